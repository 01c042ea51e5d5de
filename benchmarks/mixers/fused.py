"""The form in chunks by kernels of our own, in Triton."""
import importlib

from torch import Tensor

from benchmarks.mixers.forms import Form, Given


def fused() -> Form:
    """As `forms.chunked`.

    The form raises ValueError for widths, dtypes and devices that the kernels do not take. Triton is imported here, and
    not by each call, which a compiler could not trace.
    """
    kernels = importlib.import_module("benchmarks.kernels.triton.linear_attention")
    delta_rule = importlib.import_module("benchmarks.kernels.triton.delta_rule").delta_rule

    def by_kernels(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if given.b is None:
            return kernels.linear_attention(given.q, given.k, given.v, given.g, None, state)
        written, forgotten = delta_rule(given.k, given.v, given.g, given.b)
        return kernels.linear_attention(given.q, given.k, written, given.g, forgotten, state)
    return by_kernels
