"""The operations that there are kernels of: what each computes, who has one, and whether it is right."""
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.block import oracle
from common.block.config import BlockConfig
from common.block.workload import causal_attention_flops
from common.outcome import Failed, in_a_line
from common.runtime import compiler
from common.runtime.iteration import FORWARD, as_list, taking_gradients


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5), approximate="tanh")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()                  # squares of FP16 overflow
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, 1e-5), total


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def softmax_dropout(scores: Tensor) -> Tensor:
    future = torch.ones(scores.size(-1), scores.size(-1), dtype=torch.bool, device=scores.device).triu(1)
    return F.dropout(torch.softmax(scores.masked_fill(future, float("-inf")), -1), 0.1)


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(LayerNorm times scale in FP8, its largest absolute value before scaling, the LayerNorm: it takes the gradient).

    In FP64 nothing is rounded. Where no gradients are recorded the first stands in the third's place.
    """
    normal = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    scaled = normal.detach() * scale.to(normal.dtype)
    if x.dtype != torch.float64:
        scaled = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return scaled, normal.detach().abs().amax(), normal if torch.is_grad_enabled() else scaled


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    return torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def _library_rms_norm() -> Callable:
    return lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _library_attention(backend: SDPBackend) -> Callable:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return call


def _liger_rms_norm() -> Callable:
    from liger_kernel.transformers.functional import liger_rms_norm
    return lambda x, weight: liger_rms_norm(x, weight, 1e-6, in_place=False)     # in place it overwrites dy


def _liger_swiglu() -> Callable:
    from liger_kernel.transformers.functional import liger_swiglu
    return lambda a, b: liger_swiglu(a.detach(), b.detach())             # its backward overwrites a and b: forward only


def _kernel(name: str) -> Callable[[], Callable]:
    """What imports "module.function" of the Triton kernels, where it is called: without a GPU nothing needs Triton."""
    module, function = name.split(".")
    return lambda: getattr(importlib.import_module(f"{TRITON}.{module}"), function)


def _cuda(function: str, **constants) -> Callable[[], Callable]:
    """The same of the kernels in CUDA C++, which need more than a GPU."""
    def load() -> Callable:
        kernels = importlib.import_module("benchmarks.kernels.cuda")
        if reason := kernels.extension.missing():
            raise NotImplementedError(reason)
        return functools.partial(getattr(kernels, function), **constants)
    return load


def _triton_softmax_dropout() -> Callable:
    """With its seed on the device already, as a training loop would hold it."""
    kernel, seeds = _kernel("softmax.softmax_dropout")(), {}

    def call(scores: Tensor) -> Tensor:
        if scores.device not in seeds:
            seeds[scores.device] = torch.full((), DROPOUT["seed"], dtype=torch.int64, device=scores.device)
        return kernel(scores, DROPOUT["p"], seeds[scores.device], DROPOUT["causal"])
    return call


def _triton_layer_norm_fp8() -> Callable:
    """As `layer_norm_fp8` above: its third result, which has no values, only where gradients are recorded."""
    kernel = _kernel("quantize.layer_norm_fp8")()

    def call(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, amax, proxy = kernel(*given)
        return y, amax, proxy if torch.is_grad_enabled() else y
    return call


def _forward_only(load: Callable[[], Callable]) -> Callable[[], Callable]:
    return lambda: lambda *given: load()(*(t.detach() for t in given))


@dataclass(frozen=True)
class Experiment:
    """An operation, and what it must move at the least."""
    plain: Callable                    # in PyTorch's operations: the truth, and what TorchScript and the compiler get
    inputs: str                        # x: the tensor, w: a vector [width], 1: one FP32 number; x, w get gradients
    shape: str                         # of x: "hidden" [rows, E], "ffn" [rows, F], "scores" [matrices, S, S], or
                                       # "heads" [B, H, S, D]
    moved: tuple[float, float]         # times x's elements read and written, forward and backward
    by_hand: dict[str, Callable[[], Callable]]           # level -> what imports it
    module: str                        # of benchmarks/kernels/triton
    fp8: bool = False                  # its first output is in FP8, and its last only takes the gradient in its place
    no_torchscript: str = ""           # why TorchScript can't on a GPU


TRITON = "benchmarks.kernels.triton"
TORCHSCRIPT = "TorchScript (deprecated)"
FP8_GATE = 4e-2                        # of an output in FP8: three bits of mantissa
DROPOUT: dict[str, Any] = {"p": 0.1, "seed": 1, "causal": True}
EXPERIMENTS = {
    "LayerNorm+GELU": Experiment(layer_norm_gelu, "xww", "hidden", (2, 3), {
        "Triton": _kernel("norms.layer_norm_gelu"), "CUDA C++": _cuda("layer_norm_gelu")}, "norms"),
    "RMSNorm": Experiment(rms_norm, "xw", "hidden", (2, 3), {
        "Triton": _kernel("norms.rms_norm"), "CUDA C++": _cuda("rms_norm"), "Liger": _liger_rms_norm,
        "PyTorch's rms_norm": _library_rms_norm}, "norms"),
    "residual+LayerNorm": Experiment(residual_layer_norm, "xxww", "hidden", (4, 4), {
        "Triton": _kernel("norms.residual_layer_norm")}, "norms"),
    "LayerNorm to FP8": Experiment(layer_norm_fp8, "xww1", "hidden", (1, 3), {        # and the FP8: a byte an element
        "Triton": _triton_layer_norm_fp8}, "quantize", fp8=True,
        no_torchscript="TorchScript's fuser knows no FP8"),              # seen: it writes CUDA that does not compile
    "SiLU": Experiment(silu, "x", "ffn", (2, 3), {"Triton": _kernel("activations.silu")}, "activations"),
    "SwiGLU": Experiment(swiglu, "xx", "ffn", (3, 5), {
        "Triton": _kernel("activations.swiglu"), "CUDA C++": _cuda("swiglu"),
        "Liger": _liger_swiglu}, "activations"),
    "bias+GELU": Experiment(bias_gelu, "xw", "ffn", (2, 3), {
        "Triton": _kernel("activations.bias_gelu")}, "activations"),
    # What is beyond the diagonal is written and not read.
    "softmax+dropout": Experiment(softmax_dropout, "x", "scores", (1.5, 2), {
        "Triton": _triton_softmax_dropout,
        "CUDA C++": _cuda("softmax_dropout", **DROPOUT)}, "softmax"),
    "attention": Experiment(attention, "xxx", "heads", (4, 8), {
        "Triton": _kernel("attention.attention"), "CUDA C++": _forward_only(_cuda("attention")),
        "PyTorch's FlashAttention": lambda: _library_attention(SDPBackend.FLASH_ATTENTION),
        "cuDNN": lambda: _library_attention(SDPBackend.CUDNN_ATTENTION)}, "attention"),
}


def shape(config: BlockConfig, name: str, rows: int) -> tuple[int, ...]:
    """Of x for so many tokens; matrices and sequences are whole, at least one."""
    S, H = config.seq_len, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "hidden": (rows, config.hidden_size), "ffn": (rows, config.ffn_hidden_size),
        "scores": (max(1, rows * H // S), S, S), "heads": (max(1, rows // S), H, S, config.head_dim)}
    return shapes[name]


def least_bytes(experiment: Experiment, mode: str, x: Tensor) -> float:
    """What a pass must read and write; vectors are too small to count."""
    forward, backward = experiment.moved
    if mode != FORWARD:
        return backward * x.nbytes
    of_fp8 = x.numel() if experiment.fp8 else 0            # a byte an element
    return forward * x.nbytes + of_fp8


def least_flops(experiment: Experiment, mode: str, x: Tensor) -> float:
    """Of attention under a causal mask, half of the S x S; 0 where bytes and not FLOPs are the limit."""
    if experiment.shape != "heads":
        return 0.0
    B, H, S, D = x.shape
    return float(B * H * causal_attention_flops(S, D, D, mode))


def levels(experiment: Experiment, device: torch.device) -> dict[str, Callable | str]:
    """Level -> the function, or why there is none here."""
    present: dict[str, Callable | str] = {"eager": experiment.plain}
    if device.type == "cuda" and experiment.no_torchscript:
        present[TORCHSCRIPT] = experiment.no_torchscript
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)               # deprecated: the level's name says so
            present[TORCHSCRIPT] = torch.jit.script(experiment.plain)
    torch._dynamo.config.recompile_limit = compiler.RECOMPILE_LIMIT
    present["torch.compile"] = torch.compile(experiment.plain, fullgraph=True, dynamic=False)
    for level, load in experiment.by_hand.items():
        try:
            present[level] = load() if device.type == "cuda" else "timed on a GPU alone"
        except NotImplementedError as error:
            present[level] = str(error)
        except Exception as error:                                       # a library that is not there, or half of it
            present[level] = in_a_line(error)
    present.setdefault("CUDA C++", "no kernel of it is written")
    return present


def tensors(experiment: Experiment, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
            ) -> list[Tensor]:
    """Random inputs; vectors are around 1. These and x ask for gradients."""
    generator, inputs = torch.Generator(device).manual_seed(seed), []
    for kind in experiment.inputs:
        if kind == "1":
            inputs.append(torch.full((1,), 50.0, device=device))
        else:
            x = torch.randn(size if kind == "x" else size[-1:], generator=generator, device=device)
            inputs.append((x if kind == "x" else 1 + 0.3 * x).to(dtype).requires_grad_())
    return inputs


def check(call: Callable, experiment: Experiment, inputs: list[Tensor], seed: int) -> tuple[dict[str, float], bool]:
    """(what -> relative L2 error against FP64 of outputs and gradients, whether it has a backward). Raises Failed
    beyond the gate.

    As they are timed: the outputs without gradients and at a third call, since a compiler may have other code for that.
    """
    errors: dict[str, float] = {}
    for backward in (False, True):
        with torch.set_grad_enabled(backward):
            for _ in range(3):
                outputs = as_list(call(*inputs))
        has_backward = bool(taking_gradients(outputs))
        if backward and not has_backward:                                # it is measured without
            break
        for what, error in _errors(experiment, inputs, outputs, backward, seed).items():
            errors[what] = max(error, errors.get(what, 0.0))
    return errors, has_backward


def _errors(experiment: Experiment, inputs: list[Tensor], outputs: list[Tensor], backward: bool, seed: int
            ) -> dict[str, float]:
    """The errors of what one call gave, and of its gradients where `backward`. Raises Failed beyond the gate."""
    taking = taking_gradients(inputs)
    shown = outputs[:-1] if experiment.fp8 else outputs
    gate, gate_of_gradient = oracle.MODULE_GATES[inputs[0].dtype]
    values = [(f"output {place}", y.detach(), gate) for place, y in enumerate(shown)]
    dys = []
    if backward:
        ys = taking_gradients(outputs)
        generator = torch.Generator(inputs[0].device).manual_seed(seed)
        dys = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in ys]
        gradients = torch.autograd.grad(ys, taking, dys)
        values += [(f"gradient {place}", gradient, gate_of_gradient) for place, gradient in enumerate(gradients)]
    truth = truth_of(experiment, inputs, outputs, dys)
    if len(truth) != len(values):
        due = len(truth)
        if backward:
            due -= len(taking)
        if experiment.fp8:
            due += 1
        raise Failed(f"it gives {len(outputs)} tensors, not {due}")
    errors = {}
    for (name, value, gate), exact in zip(values, truth, strict=True):
        if value.dtype == torch.float8_e4m3fn:
            value, gate = value.float(), FP8_GATE
        errors[name] = oracle.relative_error(value, exact)
        if not errors[name] <= gate:
            raise Failed(f"{name} is off by {errors[name]:.1e} against FP64")
    return errors


def truth_of(experiment: Experiment, inputs: list[Tensor], outputs: list[Tensor], dys: list[Tensor]) -> list[Tensor]:
    """FP64 outputs, and gradients where `dys` are given; dropout by the mask in `outputs`, whose share is checked."""
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    if experiment.plain is softmax_dropout:
        truth = [_with_the_mask_of(outputs[0], exact[0])]
    else:
        truth = as_list(experiment.plain(*exact))
    gradients: tuple[Tensor, ...] = ()
    if dys:
        gradients = torch.autograd.grad(taking_gradients(truth), taking_gradients(exact), [dy.double() for dy in dys])
    shown = truth[:-1] if experiment.fp8 else truth
    return [*(y.detach() for y in shown), *gradients]


def _with_the_mask_of(y: Tensor, scores: Tensor) -> Tensor:
    """The causal softmax of scores with the dropout that shows in y. Raises Failed where it is none."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    kept, p = (y.detach() != 0), DROPOUT["p"]
    if kept[..., ~seen].any():
        raise Failed("a query sees keys behind it")
    count = seen.sum().item() * (kept.numel() // seen.numel())
    share = kept[..., seen].double().mean().item()
    if abs(share - (1 - p)) > 5 * math.sqrt(p * (1 - p) / count):
        raise Failed(f"dropout keeps {share:.4f} of {count} elements, not {1 - p:g}")
    return torch.softmax(scores.masked_fill(~seen, -math.inf), -1) * (kept.double() / (1 - p))
