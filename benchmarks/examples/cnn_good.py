"""The classifier of cnn.py as good as its author can write it.

    python -m benchmarks assistant benchmarks/examples/cnn_good.py:build
"""
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm2d(nn.Module):
    """Over the channels, [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        return F.layer_norm(rows, rows.shape[-1:], self.weight, self.bias, 1e-6).movedim(-1, 1)


class Residual(nn.Module):
    """x + two convolutions, each with its norm."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = LayerNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.bn1(self.conv1(x)))
        return x + F.gelu(self.norm2(self.conv2(h)), approximate="tanh")


class PixelAttention(nn.Module):
    """Self-attention over all pixels, [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (layer(x).flatten(2).mT.reshape(b, 1, h * w, c) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.mT.reshape(b, c, h, w))


class Classifier(nn.Module):
    """Images [B, 3, H, W] -> logits [B, classes]."""

    def __init__(self, channels: int, blocks: int, classes: int):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.attention = PixelAttention(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.attention(x).mean((2, 3)))


def of_size(channels: int, blocks: int, classes: int, batch: int, size: int, device: str = "cpu"):
    """(model, inputs, loss) of that size, the same every time."""
    torch.manual_seed(0)
    model = Classifier(channels, blocks, classes).to(device).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size).to(device, memory_format=torch.channels_last)
    targets = torch.randint(classes, (batch,)).to(device)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)
    return model, (images,), loss


def build():
    """Of a size for a GPU; on a CPU one that two cores run in less than a second."""
    if torch.cuda.is_available():
        return of_size(channels=256, blocks=12, classes=1000, batch=64, size=128, device="cuda")
    return of_size(channels=64, blocks=4, classes=100, batch=8, size=96)
