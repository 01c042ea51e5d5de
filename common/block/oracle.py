"""The block as plain mathematics in FP64, and how far a result is from it."""
import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import parameters
from .config import LAYER_NORM_EPS, BlockConfig

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
# A gradient passes through more roundings than an output: the worst parameter's error was 1.0 to 2.8 times the branch's
# in all recorded runs of the steps.
TIMES_OF_A_GRADIENT = 3
# Relative L2 error against FP64 that a step may have, by what it multiplies in: (branch, any gradient).
# Branch gates are the suite's contract.
GATES = {kind: (gate, TIMES_OF_A_GRADIENT * gate) for kind, gate in {
    "float64": 1e-9, "float32": 3e-6, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3, "float8": 6e-2}.items()}
GATES["float8, emulated"] = 7.5e-2, GATES["float8"][1]     # it runs at small shapes, which average less
# The same of any module, by the dtype of its inputs: (output, any gradient).
MODULE_GATES = {dtype: (gate, TIMES_OF_A_GRADIENT * gate) for dtype, gate in {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.items()}


def gate(kind: str, what: str, x: Tensor, tokens: int) -> float:
    """The relative L2 error that one of `reference`'s tensors may have, in a step that multiplies in `kind`.

    `what` is a key of `reference`, but not the output: its residual would hide errors that the branch shows. `tokens`
    is how many contribute to the gradients. With 16-bit parameters on a CPU, PyTorch's LayerNorm adds up the gradients
    of its gain and bias over a thread's tokens in 16 bits, and their error grows with the tokens, as no other
    gradient's does. So there these two, of both LayerNorms, have a gate that grows with the root.
    """
    branch, gradient = GATES[kind]
    if what == "branch":
        return branch
    sums = kind in ("float16", "bfloat16") and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    return gradient * max(1.0, (tokens / 64) ** 0.5) if sums and parameters.is_of_layer_norm(what) else gradient


def block(x: Tensor, p: dict[str, Tensor], config: BlockConfig, mix: Mix | None = None) -> Tensor:
    """What every step computes, from x [B, S, E] and the canonical parameters, in the dtype these have.

    `mix` stands in attention's place: of q, k, v [B, H, S, D] and, where p has a layer "attn.gates", what that gives.
    """
    B, S, E = x.shape
    H, D = config.num_heads, config.head_dim

    def layer_norm(t, name):
        centred = t - t.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + LAYER_NORM_EPS).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(t, name):
        return t @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def heads(t):
        return t.reshape(B, S, H, D).transpose(1, 2)                               # [B, H, S, D]

    def head(q, k, v):                                                             # [B, S, D] each
        scores = (q @ k.mT) / math.sqrt(D)                                         # [B, S, S]
        scores = scores + torch.full((S, S), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        exps = (scores - scores.amax(-1, keepdim=True)).exp()
        return (exps / exps.sum(-1, keepdim=True)) @ v

    normed = layer_norm(x, "ln_1")
    q, k, v = (heads(t) for t in linear(normed, "attn.qkv").chunk(3, dim=-1))
    if mix:
        attention = mix(q, k, v, linear(normed, "attn.gates") if "attn.gates.weight" in p else None)
    else:  # head by head, recomputed in the backward: the scores of all heads in FP64 would outgrow the block itself
        attention = torch.stack([checkpoint(head, q[:, h], k[:, h], v[:, h], use_reentrant=False) for h in range(H)], 1)
    x = x + linear(attention.transpose(1, 2).reshape(B, S, E), "attn.proj")
    h = linear(layer_norm(x, "ln_2"), "mlp.fc")                                    # [B, S, F]
    gelu = 0.5 * h * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
    return x + linear(gelu, "mlp.proj")


def reference(x: Tensor, values: dict[str, Tensor], config: BlockConfig, dy: Tensor, mix: Mix | None = None
              ) -> dict[str, Tensor]:
    """Output, branch (y - x), input gradient and every parameter gradient in FP64.

    x, dy: [B, S, E] in any floating dtype; the result's keys are "output", "branch", "input gradient", and for the
    gradient of a parameter its canonical name.
    """
    x = x.detach().to(torch.float64, copy=True).requires_grad_()
    p = {}
    for name, value in values.items():
        p[name] = value.detach().to(device=x.device, dtype=torch.float64, copy=True).requires_grad_()
    y = block(x, p, config, mix)
    y.backward(dy.double())
    assert x.grad is not None
    results = {"output": y.detach(), "branch": (y - x).detach(), "input gradient": x.grad}
    for name, parameter in p.items():
        assert parameter.grad is not None
        results[name] = parameter.grad
    return results


def relative_error(value: Tensor | None, reference: Tensor, times: int = 1) -> float:
    """|value - times * reference| / |times * reference| in the L2 norm.

    Infinite where value is missing, or where either holds a NaN or an infinity.
    """
    if value is None or not (value.isfinite().all() and reference.isfinite().all()):
        return math.inf
    size = abs(times) * reference.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return (torch.sub(value.double(), reference, alpha=times).norm() / size).item()


def errors(block: torch.nn.Module, x: Tensor, values: dict[str, Tensor], sequence: int = -1,
           seed: int = 2) -> dict[str, float]:
    """Relative L2 error of every tensor of `reference`, on one sequence of x [B, S, E]: the worse of both `checks`."""
    one_sequence, whole_batch = checks(block, x, values, sequence, seed)
    return {name: max(error, whole_batch[name]) for name, error in one_sequence.items()}


def checks(block: torch.nn.Module, x: Tensor, values: dict[str, Tensor], sequence: int = -1,
           seed: int = 2, mix: Mix | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of two runs of the whole batch, x [B, S, E]. FP64 computes one sequence alone.

    First the cotangent is N(0, 1) on `sequence` and zero elsewhere. The parameters' gradients are then that sequence's,
    and what mixes others into it shows. Then that sequence stands everywhere in the batch, and its cotangent with
    `signs`. So each output and each input gradient is known, and the parameters' gradients are a multiple of the
    sequence's: what leaves out a part of the batch shows. Each check also runs under no_grad, as the forward is timed,
    which is another graph of a compiled block and another path of step 4.
    """
    dy = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed)).to(x)
    truth = reference(x[sequence][None], values, cast(BlockConfig, block.config), dy[None], mix)
    cotangent = torch.zeros_like(x)
    cotangent[sequence] = dy
    one_sequence = _errors(block, x, cotangent, {sequence: 1}, truth)
    del cotangent
    if x.size(0) == 1:
        return one_sequence, one_sequence
    sign = signs(x.size(0))
    cotangents = torch.tensor(sign).to(x)[:, None, None] * dy
    whole_batch = _errors(block, x[sequence].expand_as(x), cotangents, dict(enumerate(sign)), truth)
    return one_sequence, whole_batch


def signs(count: int) -> list[int]:
    """So many times 1 or -1, whose sum is about sqrt(count), as that of as many random numbers would be.

    Its parity is that of `count`. They alternate, and what is left over at the end is 1.
    """
    total = math.isqrt(count - 1) + 1
    if (count - total) % 2:
        total += 1
    alternating = [1, -1] * ((count - total) // 2)
    return alternating + [1] * total


def _errors(block: torch.nn.Module, x: Tensor, dy: Tensor, sign: dict[int, int], truth: dict[str, Tensor]
            ) -> dict[str, float]:
    """The errors of one run of x with the cotangent dy, both [B, S, E].

    `sign` names the sequences that FP64 knows. Their outputs should be the reference, their input gradients it or its
    negative. Parameter gradients should be the sum of the signs times the reference.
    """
    block.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    y = block(x)
    y.backward(dy.to(y.dtype))
    worst = _forward_errors(x, y.detach(), sign, truth)
    input_errors = [relative_error(None if x.grad is None else x.grad[place], truth["input gradient"][0], times)
                    for place, times in sign.items()]
    worst["input gradient"] = max(input_errors)
    total = sum(sign.values())
    for name, gradient in parameters.gradients(block).items():
        worst[name] = relative_error(gradient, truth[name], total)
    block.zero_grad(set_to_none=True)
    with torch.no_grad():
        without_gradients = block(x.detach())
    for what, error in _forward_errors(x, without_gradients, sign, truth).items():
        worst[what] = max(worst[what], error)
    for place in range(x.size(0)):
        apart = relative_error(_branch(x, without_gradients, place), _branch(x, y.detach(), place))
        worst["branch"] = max(worst["branch"], apart / 2)                # half: each of the two may be off by as much
    return worst


def _forward_errors(x: Tensor, y: Tensor, places: Iterable[int], truth: dict[str, Tensor]) -> dict[str, float]:
    """The worst error of the outputs, and of the branches, of these sequences."""
    outputs = [relative_error(y[place], truth["output"][0]) for place in places]
    branches = [relative_error(_branch(x, y, place), truth["branch"][0]) for place in places]
    return {"output": max(outputs), "branch": max(branches)}


def _branch(x: Tensor, y: Tensor, place: int) -> Tensor:
    """y - x of one sequence, in FP64."""
    return y[place].double() - x.detach()[place].double()
