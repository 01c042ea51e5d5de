"""The operations of benchmarks.fusions: what each computes, who has a kernel of it, and whether a kernel is right."""
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import BlockConfig, harness, oracle

from .comparison import GATES


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


def _kernel(name: str, **constants) -> Callable[[], Callable]:
    """What imports "module.function" of benchmarks/kernels, and binds arguments that no level varies."""
    module, function = name.split(".")

    def load() -> Callable:
        found = getattr(importlib.import_module(f"{__package__}.kernels.{module}"), function)
        return functools.partial(found, **constants) if constants else found
    return load


def _cuda(function: str, **constants) -> Callable[[], Callable]:
    """The same of the CUDA C++ kernels, which need more than a GPU."""
    def load() -> Callable:
        if reason := importlib.import_module(f"{__package__}.kernels.extension").missing():
            raise NotImplementedError(reason)
        return _kernel(f"cuda.{function}", **constants)()
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
    module: str                        # of benchmarks/kernels: where its Triton kernels are
    fp8: bool = False                  # its first output is in FP8, and its last only takes the gradient in its place
    no_torchscript: str = ""           # why TorchScript can't on a GPU


TORCHSCRIPT = "TorchScript (deprecated)"
FP8_GATE = 4e-2                        # of an output in FP8: three bits of mantissa
DROPOUT = {"p": 0.1, "seed": 1, "causal": True}
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
    return {"hidden": (rows, config.hidden_size), "ffn": (rows, config.ffn_hidden_size),
            "scores": (max(1, rows * H // S), S, S), "heads": (max(1, rows // S), H, S, config.head_dim)}[name]


def least_bytes(experiment: Experiment, mode: str, x: Tensor) -> float:
    """What a pass must read and write; vectors are too small to count."""
    forward, backward = experiment.moved
    return forward * x.nbytes + experiment.fp8 * x.numel() if mode == "forward" else backward * x.nbytes


def levels(experiment: Experiment, device: torch.device) -> dict[str, Callable | str]:
    """Level -> the function, or why there is none here."""
    found: dict[str, Callable | str] = {"eager": experiment.plain}
    if device.type == "cuda" and experiment.no_torchscript:
        found[TORCHSCRIPT] = experiment.no_torchscript
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)               # deprecated: the level's name says so
            found[TORCHSCRIPT] = torch.jit.script(experiment.plain)
    torch._dynamo.config.recompile_limit = 1024                          # its 8 count over all sizes
    found["torch.compile"] = torch.compile(experiment.plain, fullgraph=True, dynamic=False)
    for level, load in experiment.by_hand.items():
        try:
            found[level] = load() if device.type == "cuda" else "timed on a GPU alone"
        except NotImplementedError as error:
            found[level] = str(error)
        except Exception as error:                                       # a library that is not there, or half of it
            found[level] = harness.in_a_line(error)
    found.setdefault("CUDA C++", "no kernel of it is written")
    return found


def tensors(experiment: Experiment, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
            ) -> list[Tensor]:
    """Random inputs; vectors are around 1. These and x ask for gradients."""
    generator, found = torch.Generator(device).manual_seed(seed), []
    for kind in experiment.inputs:
        if kind == "1":
            found.append(torch.full((1,), 50.0, device=device))
        else:
            x = torch.randn(size if kind == "x" else size[-1:], generator=generator, device=device)
            found.append((x if kind == "x" else 1 + 0.3 * x).to(dtype).requires_grad_())
    return found


def outputs(call: Callable, given: list[Tensor]) -> tuple[Tensor, ...]:
    found = call(*given)
    return found if isinstance(found, tuple) else (found,)


def differentiable(some: Iterable[Tensor]) -> list[Tensor]:
    """Those inputs or outputs that take a gradient."""
    return [t for t in some if t.requires_grad]


def check(call: Callable, experiment: Experiment, given: list[Tensor], seed: int) -> dict[str, float]:
    """What -> relative L2 error against FP64 of outputs and gradients. Raises harness.Failed beyond the gate.

    As they are timed: the outputs without gradients and at a third call, since a compiler may have other code for that.
    """
    inputs = differentiable(given)
    generator = torch.Generator(given[0].device).manual_seed(seed)
    exact, errors = GATES[given[0].dtype], {}
    for backward in (False, True):
        with torch.set_grad_enabled(backward):
            found = [outputs(call, given) for _ in range(3)][-1]
        ys = differentiable(found)
        if backward and not ys:                                          # what has no backward is measured without
            break
        shown = found[:-1] if experiment.fp8 else found
        values = {f"output {n}": y.detach() for n, y in enumerate(shown)}
        dys = []
        if backward:
            dys = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in ys]
            values |= {f"gradient {n}": t for n, t in enumerate(torch.autograd.grad(ys, inputs, dys))}
        truth = truth_of(experiment, given, found, dys)
        if len(truth) != len(values):
            due = len(truth) - len(inputs) * backward + experiment.fp8
            raise harness.Failed(f"it gives {len(found)} tensors, not {due}")
        for (name, value), right in zip(values.items(), truth, strict=True):
            gate = exact if name.startswith("output") else 3 * exact
            if value.dtype == torch.float8_e4m3fn:
                value, gate = value.float(), FP8_GATE
            error = oracle.relative_error(value, right)
            if not error <= gate:
                raise harness.Failed(f"{name} is off by {error:.1e} against FP64")
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def truth_of(experiment: Experiment, given: list[Tensor], found: tuple[Tensor, ...], dys: list[Tensor]
             ) -> list[Tensor]:
    """FP64 outputs, and gradients where `dys` are given; dropout by the mask in `found`, whose share is checked."""
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    if experiment.plain is not softmax_dropout:
        truth = outputs(experiment.plain, exact)
        gradients = torch.autograd.grad(differentiable(truth), differentiable(exact), [dy.double() for dy in dys]
                                        ) if dys else ()
        return [*(y.detach() for y in (truth[:-1] if experiment.fp8 else truth)), *gradients]
    (scores,), (y,) = exact, found
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    kept, p = (y.detach() != 0), DROPOUT["p"]
    if kept[..., ~seen].any():
        raise harness.Failed("a query sees keys behind it")
    count = seen.sum().item() * (kept.numel() // seen.numel())
    share = kept[..., seen].double().mean().item()
    if abs(share - (1 - p)) > 5 * math.sqrt(p * (1 - p) / count):
        raise harness.Failed(f"dropout keeps {share:.4f} of {count} elements, not {1 - p:g}")
    mask = kept.double() / (1 - p)
    truth = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) * mask
    return [truth.detach(), *(torch.autograd.grad(truth, scores, dys[0].double()) if dys else ())]
