"""Kernels in CUDA C++, a .cu file for each operation; operators.py makes PyTorch operations of them."""
from . import extension
from .operators import attention, layer_norm_gelu, rms_norm, softmax_dropout, swiglu

__all__ = ["attention", "extension", "layer_norm_gelu", "rms_norm", "softmax_dropout", "swiglu"]
