"""What a block does, as a value: what it computes in, how it does attention, and which kernels must be seen running.

A step, a case of a study, a peer and a user's own model each carry traits. What depends on a block asks them.
"""
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import SDPA, SERIES
from .evidence import FUSED_ATTENTION, SERIES_ATTENTION, Claims
from .precision import cpu_multiplies_bfloat16

BY_HAND, FUSED, FUSED_IN_16_BITS = "by hand", "fused", "fused in 16 bits"      # attention
DELAYED, DYNAMIC = "delayed", "dynamic"                                        # scaling of tensors in FP8
_MATMUL_KERNELS = {"float32": "FP32 matmul", "tf32": "TF32 matmul", "float16": "16-bit matmul",
                   "bfloat16": "16-bit matmul", "float8": "FP8 matmul", "float64": "FP64 matmul"}
_TENSOR_CORES = ["FP8 matmul", "16-bit matmul", "TF32 matmul"]


@dataclass(frozen=True)
class Arithmetic:
    """What a block computes in, and how many bytes things have."""
    matmul: str                # "float64", "float32", "tf32", "float16", "bfloat16" or "float8"
    attention: str
    parameter_bytes: int       # parameters, their gradients, x and y
    activation_bytes: int      # what travels between the matmuls
    operand_bytes: int         # the left operand of a matmul: 1 in FP8
    weight_bytes: int          # what a matmul reads of its weight: 1 where it was quantized before


class Asked(Protocol):
    """What a run asks for in numerics; a BlockConfig has it among its fields."""
    @property
    def amp_dtype(self) -> torch.dtype | None: ...                # autocast's; None: no autocast, and no FP8
    @property
    def fp8_weights(self) -> str: ...
    @property
    def fp8_attention(self) -> bool: ...


@dataclass(frozen=True)
class Traits:
    """What a block does, whoever wrote it. Where that is `claimed`, its kernels must bear it out."""
    attention: str | None = None         # BY_HAND, FUSED or FUSED_IN_16_BITS; None: nothing is known of it
    tf32: bool = False                   # its FP32 matmuls may round to TF32
    autocast: bool = False               # over FP32 parameters it runs under autocast, where a dtype is asked for
    compiled: bool = False               # by torch.compile
    fp8: str | None = None               # under autocast its matmuls are in FP8, with DELAYED or DYNAMIC scaling
    residual_in_16_bits: bool = False    # under autocast the residual is in its dtype, not in that of the parameters
    claimed: bool = False

    def mixed(self, asked: Asked, parameter_dtype: torch.dtype) -> bool:
        """Whether it computes in 16 bits or in FP8 there."""
        takes_it = self.autocast or self.fp8 is not None
        return takes_it and asked.amp_dtype is not None and parameter_dtype != torch.float64

    def arithmetic(self, asked: Asked, parameter_dtype: torch.dtype, device: torch.device) -> Arithmetic:
        """What it computes in on that device."""
        mixed = self.mixed(asked, parameter_dtype)
        dtype = parameter_dtype
        if self.autocast and asked.amp_dtype is not None and parameter_dtype == torch.float32:
            dtype = asked.amp_dtype
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and self.tf32 and device.type == "cuda" and torch.cuda.is_tf32_supported():
            name = "tf32"                                          # older GPUs ignore the switch
        if not (mixed and self.fp8):
            return Arithmetic(name, name, parameter_dtype.itemsize, dtype.itemsize, operand_bytes=dtype.itemsize,
                              weight_bytes=parameter_dtype.itemsize)
        kept = asked.fp8_weights != "per-call"
        return Arithmetic("float8", "float8" if asked.fp8_attention else name, parameter_dtype.itemsize,
                          dtype.itemsize, operand_bytes=1, weight_bytes=1 if kept else parameter_dtype.itemsize)

    def residual(self, asked: Asked, parameter_dtype: torch.dtype) -> torch.dtype:
        """The dtype that the residual travels in."""
        if self.residual_in_16_bits and asked.amp_dtype is not None:
            return asked.amp_dtype
        return parameter_dtype

    def needs_calibration(self, asked: Asked) -> bool:
        """Whether its FP8 scales must first see some calls."""
        return self.fp8 == DELAYED and asked.amp_dtype is not None

    def holds_scores(self, device: torch.device) -> bool:
        """Whether it keeps S x S scores for its backward, as attention by hand does, and on a CPU all of them may."""
        return self.attention == BY_HAND or device.type == "cpu"

    def claims(self, matmul: str, device: torch.device, attention: str = SDPA) -> Claims | None:
        """Which kernels must and must not run where it multiplies in `matmul` (`Arithmetic.matmul`), and where fused
        attention is by `attention`, one of ATTENTIONS.
        """
        if not self.claimed:
            return None
        return self._claims_on_gpu(matmul, attention) if device.type == "cuda" else self._claims_on_cpu()

    def _claims_on_gpu(self, matmul: str, attention: str) -> Claims:
        own = _MATMUL_KERNELS[matmul]
        needed: list[tuple[str, ...]] = [(own,)]
        forbidden = list(_TENSOR_CORES)
        if matmul not in ("float32", "float64"):
            forbidden = ["FP32 matmul"] + [kind for kind in _TENSOR_CORES if kind != own]
        fused = self.attention == FUSED or (self.attention == FUSED_IN_16_BITS and matmul not in ("float32", "tf32"))
        if self.attention == BY_HAND:
            needed += [("softmax",), ("mask",)]
            forbidden += FUSED_ATTENTION
        elif fused and attention == SERIES:
            needed.append((SERIES_ATTENTION,))
            forbidden += [*FUSED_ATTENTION, "softmax", "mask"]
        elif fused and matmul != "float64":
            needed.append(FUSED_ATTENTION)
            forbidden += ["softmax", "mask"]
        if self.compiled:
            needed.append(("compiled",))
        writes_fp8 = self.fp8 == DELAYED and matmul == "float8"
        if writes_fp8:
            needed += [("LayerNorm to FP8", "cuDNN LayerNorm"), ("GELU to FP8", "FP8 matmul with GELU")]
        return Claims(needed, forbidden, fewer_launches=self.compiled, writes_fp8=writes_fp8)

    def _claims_on_cpu(self) -> Claims:
        """There an operator says which algorithm ran, not in which arithmetic."""
        needed: list[tuple[str, ...]] = []
        forbidden: list[str] = []
        if self.attention == BY_HAND:
            needed, forbidden = [("softmax",)], list(FUSED_ATTENTION)
        elif self.attention is not None:
            needed = [FUSED_ATTENTION]
        if self.compiled:
            needed.append(("compiled",))
        return Claims(needed, forbidden, remark=" (the algorithm; a CPU's operators do not tell their arithmetic)")


def amp_default(device: torch.device, traits: Traits = Traits(autocast=True)) -> tuple[torch.dtype | None, str]:
    """(autocast's dtype where none is asked for, why it is None).

    float16 on a GPU, bfloat16 on a CPU that multiplies it. On a CPU that does not (no AVX-512), PyTorch's own loops are
    so much slower than FP32 that a default run would not end. FP8 has it there too: its emulation multiplies in FP32.
    """
    if device.type == "cuda":
        return torch.float16, ""
    if traits.fp8 or cpu_multiplies_bfloat16():
        return torch.bfloat16, ""
    return None, "this CPU has no fast 16-bit matmuls; --amp-dtype bfloat16 takes the slow ones"
