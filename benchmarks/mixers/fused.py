"""The form in chunks by kernels of our own, in Triton."""
import importlib

from torch import Tensor

from benchmarks.mixers import forms
from benchmarks.mixers.forms import Form, Given


def fused() -> Form:
    """As `forms.chunked`. What steps of one chunk do to each other under a delta rule stays in PyTorch.

    The form raises ValueError for widths, dtypes and devices that the kernels do not take. Triton is imported here, and
    not by each call, which a compiler could not trace.
    """
    kernels = importlib.import_module("benchmarks.kernels.triton.linear_attention")

    def by_kernels(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if given.b is None:
            return kernels.linear_attention(given.q, given.k, given.v, given.g, None, state)
        v, f = forms.by_chunks_of(given, kernels.CHUNK)
        return kernels.linear_attention(given.q, given.k, v, given.g, f, state)
    return by_kernels
