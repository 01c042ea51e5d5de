"""Pieces of work whose rate is a peak: matmuls, fused attention and copies, each a call to repeat."""
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..block.precision import multiplying_float32_in

FP8_MULTIPLE = 16                          # of the sides that its matmuls take


@dataclass(frozen=True)
class Work:
    """Something to repeat, and what one repetition amounts to: FLOPs, or bytes read and written."""
    what: str
    call: Callable[[], Any]
    amount: float


def matmul_work(layout: str, m: int, k: int, n: int, dtype: str, device: torch.device) -> Callable[[], Any]:
    """A matmul of `matmul_operands`."""
    left, right = matmul_operands(layout, m, k, n, dtype, device)
    return lambda: multiply(left, right, dtype)


def multiplies(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether there is a matmul of [m, k] x [k, n] in that arithmetic: FP8 takes k and n in multiples of 16."""
    _, k, n = shape
    return dtype != "float8" or k % FP8_MULTIPLE == n % FP8_MULTIPLE == 0


def matmul_operands(layout: str, m: int, k: int, n: int, dtype: str, device: torch.device
                    ) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, k] and [k, n], normal random numbers, which lie in memory as in that pass of a linear layer.

    FP8 reads both operands along k, whatever the pass; they fill its range, as scaling has them do.
    """
    if dtype == "float8":
        a = _in_float8(torch.randn(m, k, device=device))
        b = _in_float8(torch.randn(n, k, device=device)).t()
        return a, b
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    transposed = layout == "weight gradient"
    a = torch.randn((k, m) if transposed else (m, k), device=device, dtype=kind)
    b = torch.randn((n, k) if layout == "forward" else (k, n), device=device, dtype=kind)
    return a.t() if transposed else a, b.t() if layout == "forward" else b


def multiply(left: torch.Tensor, right: torch.Tensor, dtype: str) -> torch.Tensor:
    """left @ right in that arithmetic; FP8 gives bfloat16, by tensor cores that add up fast."""
    if dtype == "float8":
        scale = _one(left.device)
        return torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16,
                                use_fast_accum=True)
    with multiplying_float32_in("high" if dtype == "tf32" else "highest"):
        return torch.mm(left, right)


@functools.cache                           # to fill one for each call would be a kernel more
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _in_float8(values: torch.Tensor) -> torch.Tensor:
    """Scaled so that four standard deviations are the largest number of e4m3."""
    return (values * 112).clamp_(-448, 448).to(torch.float8_e4m3fn)


def attention_work(shape: tuple[int, ...], dtype: str, backward: bool, backend: SDPBackend | None,
                   device: torch.device) -> Callable[[], Any]:
    """Causal fused attention of a shape B, S, H, D, which lies so in memory, or its backward alone.

    Without a backend torch chooses. Raises RuntimeError where the backend can't do it.
    """
    B, S, H, D = shape
    packed = torch.randn(B, S, 3, H, D, device=device, dtype=getattr(torch, dtype))
    q, k, v = (part.detach().requires_grad_() for part in packed.permute(2, 0, 3, 1, 4))
    backends = [backend] if backend else list(SDPBackend.__members__.values())[1:]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_alone() -> None:
        with torch.no_grad():
            forward()

    if not backward:
        forward_alone()
        return forward_alone
    y = forward()
    dy = torch.randn_like(y)

    def backward_alone() -> None:
        torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    backward_alone()
    return backward_alone


def copy_work(device: torch.device) -> tuple[Callable[[], Any], float]:
    """(a copy far beyond any cache, the bytes that it reads and writes)."""
    # Moving random bits takes a GPU more power. To draw them takes a CPU longer than the copies.
    source = torch.randn(2**28, device=device) if device.type == "cuda" else torch.ones(2**26)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * source.nbytes
