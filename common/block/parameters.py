"""The canonical parameters: their names, seeded values, how a block adopts them and gives its gradients back."""
from typing import cast

import torch
from torch import Tensor, nn

from .config import BlockConfig

LAYER_NORMS = "ln_1", "ln_2"


def is_of_layer_norm(name: str) -> bool:
    """Whether a canonical name is that of a LayerNorm's gain or bias."""
    module, _, _ = name.partition(".")
    return module in LAYER_NORMS


def shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, in the order of the forward pass (E = hidden_size, F = ffn_hidden_size)."""
    E, F = config.hidden_size, config.ffn_hidden_size
    return {
        "ln_1.weight": (E,), "ln_1.bias": (E,),
        "attn.qkv.weight": (3 * E, E), "attn.qkv.bias": (3 * E,),       # rows ordered [Q | K | V]
        "attn.proj.weight": (E, E), "attn.proj.bias": (E,),
        "ln_2.weight": (E,), "ln_2.bias": (E,),
        "mlp.fc.weight": (F, E), "mlp.fc.bias": (F,),
        "mlp.proj.weight": (E, F), "mlp.proj.bias": (E,),
    }


def seeded(config: BlockConfig, seed: int = 0) -> dict[str, Tensor]:
    """Canonical name -> FP32 CPU tensor, the same on every machine for the same seed.

    Every parameter is random, gains and biases too: at the default initialisation (gain 1, bias 0) a dropped bias
    or a missing LayerNorm changes nothing and no check could see it. Matrices have std 1 / sqrt(fan-in).
    """
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in shapes(config).items():
        value = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            value *= shape[1] ** -0.5
        else:
            value *= 0.2
            if is_of_layer_norm(name) and name.endswith("weight"):
                value += 1.0
        values[name] = value
    return values


def named(block: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> the block's own parameter.

    A block with other names says so in `parameter_names`, one that holds matrices [in, out] in `transposed`; one with
    more of them names these in `beside_canonical`.
    """
    own = dict(block.named_parameters())
    translate = getattr(block, "parameter_names", {})
    names = (*shapes(cast(BlockConfig, block.config)), *getattr(block, "beside_canonical", ()))
    return {name: own[translate.get(name, name)] for name in names}


def load(block: nn.Module, values: dict[str, Tensor], device: torch.device | str) -> nn.Module:
    """Give `block` a copy of `values` (canonical name -> tensor) on `device`, in the dtype they come in.

    Raises ValueError when a name is missing, unknown or of another shape, or the dtypes differ.
    """
    expected = {name: tuple(_turned(own, name, block).shape) for name, own in named(block).items()}
    if values.keys() != expected.keys():
        raise ValueError(f"parameters do not match: {sorted(values.keys() ^ expected.keys())} missing or unknown")
    wrong = [f"{n} is {tuple(values[n].shape)}, not {s}" for n, s in expected.items() if tuple(values[n].shape) != s]
    if wrong:
        raise ValueError("parameters do not match the block: " + "; ".join(wrong))
    dtypes = {value.dtype for value in values.values()}
    if len(dtypes) > 1:
        raise ValueError(f"parameters must share one dtype, not {sorted(map(str, dtypes))}")
    block.to(device=device, dtype=dtypes.pop())
    with torch.no_grad():
        for name, parameter in named(block).items():
            if hasattr(parameter, "_quantizer"):      # kept in FP8: from a scale that fits, not the uncalibrated 1
                parameter._quantizer.scale.fill_(torch.finfo(torch.float8_e4m3fn).max / values[name].abs().max())
            parameter.copy_(_turned(values[name], name, block))
    return block


def gradients(block: nn.Module) -> dict[str, Tensor | None]:
    """Canonical name -> gradient after a backward (None where there was none), in every step."""
    return {name: None if parameter.grad is None else _turned(parameter.grad, name, block)
            for name, parameter in named(block).items()}


def _turned(value: Tensor, name: str, block: nn.Module) -> Tensor:
    return value.T if name in getattr(block, "transposed", ()) else value
