"""Keeps a process's order of attention backends as torch chose it."""
import torch
from torch.nn import functional as F


def settle_backend_order(device: torch.device | str) -> None:
    """Let torch choose its own order of `scaled_dot_product_attention`'s backends now.

    torch makes that choice (cuDNN first, on Hopper) at the first attention of a process. Were that inside
    `sdpa_kernel(..., set_priority=True)`, leaving it would put the order back that stood before the choice, and all
    other attention of the process would run another kernel than it does without us.
    """
    if torch.device(device).type == "cuda":
        q = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
