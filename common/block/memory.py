"""How much memory a checked and timed run of the block needs, and which shape would fit."""
import torch

from . import parameters
from .config import BlockConfig
from .traits import Traits


def needed(config: BlockConfig, traits: Traits, device: torch.device) -> int:
    """Bytes that a run holds at its peak, estimated on the high side.

    Parameters with their gradients. Beside them either the batch and what FP64 gave for one sequence, or the FP64
    check itself. The batch is its activations. An attention by hand adds four S x S tensors a head: it keeps three,
    and one is a gradient. On a CPU also the process and the buffers by which it measures the machine.
    """
    B, S, E, F, H = (config.batch_size, config.seq_len, config.hidden_size, config.ffn_hidden_size, config.num_heads)
    weights = sum(torch.Size(shape).numel() for shape in parameters.shapes(config).values())
    scores = 4 * H * S * S if traits.holds_scores(device) else 0
    batch = 4 * B * (S * (12 * E + 3 * F) + scores)
    oracle = 16 * weights + 8 * (S * (24 * E + 6 * F) + 8 * S * S)
    process = 5 * 2**28 if device.type == "cpu" else 0
    return 12 * weights + max(batch + 8 * weights, oracle) + process


def largest_that_fits(config: BlockConfig, traits: Traits, device: torch.device, total: int) -> BlockConfig | None:
    """The shape with the largest batch, and failing that the longest halved sequence, that `total` bytes hold."""
    smaller = config
    while needed(smaller, traits, device) > 0.9 * total or smaller == config:
        if smaller.batch_size > 1:
            smaller = smaller.replace(batch_size=smaller.batch_size // 2)
        elif smaller.seq_len > 16:
            smaller = smaller.replace(seq_len=smaller.seq_len // 2)
        else:
            return None
        if traits.fp8 and config.amp_dtype is not None and smaller.tokens % 16:          # FP8 takes whole sixteens
            smaller = smaller.replace(seq_len=max(16, smaller.seq_len // 16 * 16))
    return smaller


def that_fits(config: BlockConfig, traits: Traits, device: torch.device, total: int) -> str:
    """The same in words: the flags of that shape."""
    smaller = largest_that_fits(config, traits, device, total)
    if smaller is None:
        return "no batch of it fits"
    return f"--batch-size {smaller.batch_size} --seq-len {smaller.seq_len} fits"
