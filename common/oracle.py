"""The block as plain mathematics in FP64, and how far a result is from it."""
import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import parameters
from .config import LAYER_NORM_EPS, BlockConfig

# Relative L2 error against FP64 that a step may have, by what it multiplies in: (branch, any gradient).
# Branch gates are the suite's contract. A gradient passes through more roundings than the branch: the worst parameter's
# error was 1.0 to 2.8 times the branch's in all recorded runs of the steps, so its gate is three times the branch's.
GATES = {"float64": (1e-9, 3e-9), "float32": (3e-6, 9e-6), "tf32": (1e-3, 3e-3), "float16": (1e-3, 3e-3),
         "bfloat16": (8e-3, 2.4e-2), "float8": (6e-2, 1.8e-1),
         "float8, emulated": (7.5e-2, 1.8e-1)}     # it runs at small shapes, which average less


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
    return gradient * max(1.0, (tokens / 64) ** 0.5) if sums and what.startswith("gradient of ln_") else gradient


def block(x: Tensor, p: dict[str, Tensor], config: BlockConfig) -> Tensor:
    """What every step computes, from x [B, S, E] and the canonical parameters, in the dtype these have."""
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

    q, k, v = (heads(t) for t in linear(layer_norm(x, "ln_1"), "attn.qkv").chunk(3, dim=-1))
    # Head by head, recomputed in the backward: the scores of all heads in FP64 would outgrow the block itself.
    attention = torch.stack([checkpoint(head, q[:, h], k[:, h], v[:, h], use_reentrant=False) for h in range(H)], 1)
    x = x + linear(attention.transpose(1, 2).reshape(B, S, E), "attn.proj")
    h = linear(layer_norm(x, "ln_2"), "mlp.fc")                                    # [B, S, F]
    gelu = 0.5 * h * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
    return x + linear(gelu, "mlp.proj")


def reference(x: Tensor, values: dict[str, Tensor], config: BlockConfig, dy: Tensor) -> dict[str, Tensor]:
    """Output, branch (y - x), input gradient and every parameter gradient in FP64.

    x, dy: [B, S, E] in any floating dtype; the result's keys are "output", "branch", "input gradient" and
    "gradient of <canonical name>".
    """
    x = x.detach().to(torch.float64, copy=True).requires_grad_()
    p = {n: v.detach().to(device=x.device, dtype=torch.float64, copy=True).requires_grad_() for n, v in values.items()}
    y = block(x, p, config)
    y.backward(dy.double())
    results = {"output": y.detach(), "branch": (y - x).detach(), "input gradient": x.grad}
    return results | {f"gradient of {name}": parameter.grad for name, parameter in p.items()}


def relative_error(value: Tensor | None, truth: Tensor, times: int = 1) -> float:
    """|value - truth| / |truth| in the L2 norm, `truth` taken so many times; infinite where value is missing, or either
    holds a NaN or an infinity."""
    if value is None or not (value.isfinite().all() and truth.isfinite().all()):
        return math.inf
    size = abs(times) * truth.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return (torch.sub(value.double(), truth, alpha=times).norm() / size).item()


def errors(block: torch.nn.Module, x: Tensor, values: dict[str, Tensor], sequence: int = -1,
           seed: int = 2) -> dict[str, float]:
    """Relative L2 error of every tensor of `reference`, on one sequence of x [B, S, E]: the worse of both `checks`."""
    one, everywhere = checks(block, x, values, sequence, seed)
    return {name: max(error, everywhere[name]) for name, error in one.items()}


def checks(block: torch.nn.Module, x: Tensor, values: dict[str, Tensor], sequence: int = -1,
           seed: int = 2) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of two runs of the whole batch, of which FP64 need hold one sequence alone.

    First the cotangent is N(0, 1) on `sequence` and zero elsewhere: the parameters' gradients are that sequence's, and
    what mixes others into it shows. Then that sequence stands everywhere in the batch, and its cotangent with signs of
    which some sqrt(B) are left over: each output and input gradient is known, the parameters' gradients are a multiple
    of the sequence's, no larger than a batch's are, and what leaves out a part of the batch shows. Each runs under
    no_grad too, as the forward is timed: another graph of a compiled block, another path of step 4. There every
    sequence must give what it gave with gradients. Of the outputs and branches the worst counts.
    """
    dy = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed)).to(x)
    alone = torch.zeros_like(x)
    alone[sequence] = dy
    truth = reference(x[sequence][None], values, block.config, dy[None])
    found = _errors(block, x, alone, {sequence: 1}, truth, 1)
    del alone
    B = x.size(0)
    if B == 1:
        return found, found
    left = math.isqrt(B - 1) + 1
    left += (B - left) % 2
    signs = [-1 if place % 2 and place < B - left else 1 for place in range(B)]
    return found, _errors(block, x[sequence].expand_as(x), torch.tensor(signs).to(x)[:, None, None] * dy,
                          dict(enumerate(signs)), truth, left)


def _errors(block: torch.nn.Module, x: Tensor, dy: Tensor, places: dict[int, int], truth: dict[str, Tensor],
            times: int) -> dict[str, float]:
    """Of the outputs of the sequences `places`, and of their input gradients, each so many times the truth's; of the
    parameters' gradients, which are `times` the truth's."""
    block.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    found = dict.fromkeys(("output", "branch", "input gradient"), 0.0)

    def branch(y: Tensor, place: int) -> Tensor:
        return y[place].double() - x.detach()[place].double()

    def look(y: Tensor) -> None:
        for place in places:
            found["output"] = max(found["output"], relative_error(y[place], truth["output"][0]))
            found["branch"] = max(found["branch"], relative_error(branch(y, place), truth["branch"][0]))

    y = block(x)
    y.backward(dy.to(y.dtype))
    y = y.detach()
    look(y)
    for place, sign in places.items():
        got = None if x.grad is None else x.grad[place]
        found["input gradient"] = max(found["input gradient"], relative_error(got, truth["input gradient"][0], sign))
    gradients = {f"gradient of {name}": gradient for name, gradient in parameters.gradients(block).items()}
    found |= {name: relative_error(gradients[name], truth[name], times) for name in truth if name in gradients}
    del gradients
    block.zero_grad(set_to_none=True)
    with torch.no_grad():
        without = block(x.detach())
    look(without)
    for place in range(x.size(0)):                                    # half: each of the two may be off by as much
        found["branch"] = max(found["branch"], relative_error(branch(without, place), branch(y, place)) / 2)
    return found
