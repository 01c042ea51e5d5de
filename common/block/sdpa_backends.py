"""Whose kernels attend: torch's, in the order that torch chose, or the series of benchmarks/ where it is asked for."""
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import SERIES, BlockConfig


def settle_backend_order(device: torch.device | str) -> None:
    """Let torch choose its own order of `scaled_dot_product_attention`'s backends now.

    torch makes that choice (cuDNN first, on Hopper) at the first attention of a process. Were that inside
    `sdpa_kernel(..., set_priority=True)`, leaving it would put the order back that stood before the choice, and all
    other attention of the process would run another kernel than it does without us.
    """
    if torch.device(device).type == "cuda":
        q = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)


def series_attention(config: BlockConfig) -> Callable[..., Tensor] | None:
    """The series' attention, called as `scaled_dot_product_attention` is; None where the config does not ask for it.

    Raises NotImplementedError, with the reason, where it can't run. It is imported by its name, and then alone: the
    steps run without benchmarks/.
    """
    if config.attention != SERIES:
        return None
    operator = importlib.import_module("benchmarks.kernels.cuda.series_operator")
    if reason := operator.missing():
        raise NotImplementedError(f"attention by the series: {reason}")
    return operator.scaled_dot_product_attention
