"""Public models by their configurations, with drawn weights: at the sizes that people train on a GPU, small on a CPU.

    python -m benchmarks assistant benchmarks/examples/public.py:gpt2
    python -m benchmarks assistant benchmarks/examples/public.py:resnet50 --inference

Needs what a model is from: transformers or torchvision. Each function returns (model, inputs, loss), and for three of
them a version by hand goes with it.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.assistant import ByHand, Task
from benchmarks.examples import by_hand

Built = tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]
BF16 = "bfloat16"


def _full() -> bool:
    return torch.cuda.is_available()


def _drawn(kind: Callable[[Any], nn.Module], config: Any) -> Any:
    """A model with random weights, drawn where it will run."""
    torch.manual_seed(0)
    with torch.device("cuda" if _full() else "cpu"):
        return kind(config)


def _tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _of_tokens(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Built:
    """On the device, with the cross-entropy of its logits and a target for each."""
    device = "cuda" if _full() else "cpu"
    targets = targets.to(device)

    def loss(returned: Any) -> Tensor:
        logits = getattr(returned, "logits", returned)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return model.to(device), {name: t.to(device) for name, t in inputs.items()}, loss


def _of_images(model: nn.Module, batch: int, size: int, classes: int = 1000) -> Built:
    device = "cuda" if _full() else "cpu"
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.randint(0, classes, (batch,), generator=torch.Generator().manual_seed(1)).to(device)
    return model.to(device), {"x": images}, lambda logits: F.cross_entropy(logits, labels)


def _without_dropout(model: nn.Module) -> nn.Module:
    """The same model, whose values can then be compared call by call."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ------------------------------------------------------------------------------------------------------- transformers


def gpt2() -> Task:
    """GPT-2 small, 124 million parameters, 8 x 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel
    sizes: dict[str, Any] = {} if _full() else {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1000}
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **sizes)
    model = _drawn(GPT2LMHeadModel, config)
    tokens = _tokens(model.config.vocab_size, *((8, 1024) if _full() else (2, 128)))
    built, inputs, loss = _of_tokens(model, {"input_ids": tokens}, tokens.roll(-1, 1))
    return Task(built, inputs, loss, by_hand=ByHand(by_hand.compiled(by_hand.GPT2(model)), BF16))


def llama() -> Task:
    """TinyLlama, 1.1 billion parameters: 32 query heads to 4 key-value heads; 2 x 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
    if not _full():
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 8,
                 "num_key_value_heads": 2, "vocab_size": 1000}
    model = _drawn(LlamaForCausalLM, LlamaConfig(use_cache=False, **sizes))
    tokens = _tokens(model.config.vocab_size, *((2, 2048) if _full() else (2, 128)))
    built, inputs, loss = _of_tokens(model, {"input_ids": tokens}, tokens.roll(-1, 1))
    return Task(built, inputs, loss, by_hand=ByHand(by_hand.compiled(by_hand.Llama(model)), BF16))


def bert() -> Built:
    """BERT base, 110 million parameters, 32 x 512 tokens of which up to half are padding."""
    from transformers import BertConfig, BertForMaskedLM
    sizes: dict[str, Any] = {} if _full() else {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4,
                                                "intermediate_size": 512, "vocab_size": 1000}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    batch, length = (32, 512) if _full() else (4, 128)
    tokens = _tokens(config.vocab_size, batch, length)
    lengths = length - length // 2 * torch.arange(batch) // batch
    mask = (torch.arange(length) < lengths[:, None]).long()
    return _of_tokens(_drawn(BertForMaskedLM, config), {"input_ids": tokens, "attention_mask": mask}, tokens)


def t5() -> Built:
    """T5 base, 223 million parameters: 8 x 512 tokens in, 128 out."""
    from transformers import T5Config, T5ForConditionalGeneration
    sizes: dict[str, Any] = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    if not _full():
        sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    config = T5Config(dropout_rate=0.0, use_cache=False, **sizes)
    batch, length, answer = (8, 512, 128) if _full() else (2, 64, 16)
    tokens, targets = _tokens(config.vocab_size, batch, length), _tokens(config.vocab_size, batch, answer)
    inputs = {"input_ids": tokens, "decoder_input_ids": targets.roll(1, 1)}
    return _of_tokens(_drawn(T5ForConditionalGeneration, config), inputs, targets)


def whisper() -> Built:
    """Whisper small, 242 million parameters: 8 x 30 seconds of sound, 128 tokens out."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    sizes: dict[str, Any] = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
                             "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    if not _full():
        sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 1000,
                 "max_source_positions": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                 "decoder_start_token_id": 1}
    config = WhisperConfig(dropout=0.0, use_cache=False, **sizes)
    batch, answer = (8, 128) if _full() else (2, 16)
    sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions,
                        generator=torch.Generator().manual_seed(2))
    targets = _tokens(config.vocab_size, batch, answer)
    inputs = {"input_features": sound, "decoder_input_ids": targets.roll(1, 1)}
    return _of_tokens(_drawn(WhisperForConditionalGeneration, config), inputs, targets)


def mixtral() -> Built:
    """Mixtral at a quarter of its width and depth, 791 million parameters; 4 x 1,024 tokens, 2 of 8 experts each."""
    from transformers import MixtralConfig, MixtralForCausalLM
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
                             "num_attention_heads": 16, "num_key_value_heads": 4}
    if not _full():
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 1000}
    model = _drawn(MixtralForCausalLM, MixtralConfig(use_cache=False, **sizes))
    tokens = _tokens(model.config.vocab_size, *((4, 1024) if _full() else (2, 64)))
    return _of_tokens(model, {"input_ids": tokens}, tokens.roll(-1, 1))


# -------------------------------------------------------------------------------------------------------- torchvision


def resnet50() -> Task:
    """ResNet-50, 26 million parameters, 64 images of 224 x 224; ResNet-18, 4 of 64 x 64, on a CPU."""
    from torchvision import models
    torch.manual_seed(0)
    model, inputs, loss = _of_images(models.resnet50(), 64, 224) if _full() else _of_images(models.resnet18(), 4, 64)
    return Task(model, inputs, loss, by_hand=ByHand(by_hand.compiled(by_hand.ResNet(model)), BF16))


def convnext() -> Built:
    """ConvNeXt tiny, 29 million parameters, 64 images of 224 x 224, without its stochastic depth."""
    from torchvision import models
    torch.manual_seed(0)
    model = models.convnext_tiny(stochastic_depth_prob=0.0)
    return _of_images(model, 64, 224) if _full() else _of_images(model, 1, 64)


def vit() -> Built:
    """ViT-B/16, 87 million parameters, 64 images of 224 x 224."""
    from torchvision import models
    torch.manual_seed(0)
    if _full():
        return _of_images(_without_dropout(models.vit_b_16()), 64, 224)
    small = models.VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=256)
    return _of_images(_without_dropout(small), 4, 64)


def swin() -> Built:
    """Swin tiny, 28 million parameters, 64 images of 224 x 224, without its stochastic depth."""
    from torchvision import models
    torch.manual_seed(0)
    if _full():
        tiny = models.SwinTransformer([4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.0)
        return _of_images(_without_dropout(tiny), 64, 224)
    small = models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0)
    return _of_images(_without_dropout(small), 2, 64)


# --------------------------------------------------------------------------------------------------------- of torch's


class TiedLSTM(nn.Module):
    """A language model of two LSTM layers whose embedding is its head, too. Tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


class Residual(nn.Module):
    """Two convolutions, and what a time step adds between them. Images [B, C, H, W] -> [B, out, H, W]."""

    def __init__(self, channels: int, out: int, time: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(y)


class PixelAttention(nn.Module):
    """Each pixel attends to all, with its scores by hand. Images [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, channels), heads
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3 * self.heads, -1)).chunk(3, 1)     # [B, H, D, S]
        weights = torch.softmax(q.transpose(-2, -1) @ k * q.size(2)**-0.5, dim=-1)
        return x + self.proj((v @ weights.transpose(-2, -1)).reshape(x.shape))


class UNet(nn.Module):
    """The noise in images at a time step, as diffusion models learn it. [B, 3, H, W], [B] -> [B, 3, H, W].

    Three resolutions; pixels attend to each other at the two lower ones.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.width, time, widths = width, 4 * width, [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.down_attention, self.up_attention = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        before = width
        for level, channels in enumerate(widths):
            self.down.append(Residual(before, channels, time))
            self.down_attention.append(PixelAttention(channels, heads) if level else nn.Identity())
            self.shrink.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
            before = channels
        self.middle, self.middle_attention = Residual(before, before, time), PixelAttention(before, heads)
        for level, channels in reversed(list(enumerate(widths))):
            self.grow.append(nn.Upsample(scale_factor=2.0))
            self.up.append(Residual(before + channels, channels, time))
            self.up_attention.append(PixelAttention(channels, heads) if level else nn.Identity())
            before = channels

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.logspace(0, -4, self.width // 2, device=t.device, dtype=x.dtype)
        angles = t[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, skipped = self.enter(x), []
        for residual, attention, shrink in zip(self.down, self.down_attention, self.shrink, strict=True):
            x = attention(residual(x, time))
            skipped.append(x)
            x = shrink(x)
        x = self.middle_attention(self.middle(x, time))
        for residual, attention, grow in zip(self.up, self.up_attention, self.grow, strict=True):
            x = attention(residual(torch.cat([grow(x), skipped.pop()], 1), time))
        return self.leave(F.silu(x))


def unet() -> Built:
    """A UNet with attention over pixels, 29 million parameters, 32 images of 64 x 64 and their noise."""
    torch.manual_seed(0)
    device = "cuda" if _full() else "cpu"
    width, heads, batch, size = (128, 8, 32, 64) if _full() else (16, 2, 2, 16)
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, batch, 3, size, size, generator=generator).to(device)
    steps = (1000 * torch.rand(batch, generator=generator)).to(device)
    return UNet(width, heads).to(device), {"x": images, "t": steps}, lambda found: F.mse_loss(found, noise)


def lstm() -> Built:
    """Two layers of an LSTM with tied weights, 27 million parameters, 64 x 128 tokens."""
    torch.manual_seed(0)
    vocabulary, width, batch, length = (32000, 650, 64, 128) if _full() else (1000, 64, 4, 32)
    tokens = _tokens(vocabulary, batch, length)
    return _of_tokens(TiedLSTM(vocabulary, width), {"tokens": tokens}, tokens.roll(-1, 1))


def _encoder() -> nn.Module:
    width, heads, layers = (768, 12, 12) if _full() else (64, 4, 2)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _of_encoder(model: nn.Module) -> Built:
    device, shape = ("cuda", (16, 512, 768)) if _full() else ("cpu", (2, 64, 64))
    src = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    return model.to(device), {"src": src}, lambda y: y.square().mean()


def encoder() -> Built:
    """nn.TransformerEncoder, 12 layers, 85 million parameters, 16 x 512 vectors."""
    torch.manual_seed(0)
    return _of_encoder(_encoder())


def compiled() -> Built:
    """The same, compiled already and under no other name: what is left to gain?"""
    torch.manual_seed(0)
    model = _encoder()
    model.compile()
    return _of_encoder(model)
