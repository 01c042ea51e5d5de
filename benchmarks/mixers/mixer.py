"""The mixers: what each makes of q, k, v and its gates, the ways to compute it, and whether one is right.

Gates are what a layer gives, of any size: a decay is exp(-softplus(gate)), the strength of a delta rule sigmoid(gate).
SSD multiplies its values by softplus(gate) too, the step of its discretization.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.mixers import forms
from benchmarks.mixers.forms import Form, Given
from benchmarks.mixers.fused import fused
from common.block import oracle
from common.block.workload import causal_attention_flops

LONGEST = 2**14                            # steps at which every form but the one at once has fewer FLOPs
Mix = Callable[..., Tensor]                # q, k, v [B, H, S, D], gates [B, H, S] in FP32 at least -> y [B, H, S, D]


@dataclass(frozen=True)
class Mixer:
    """Which gates it has, beside q, k and v."""
    name: str
    decays: bool = True                    # a gate of its own at each step; else each head has a constant one
    replaces: bool = False                 # a delta rule
    discretizes: bool = False              # what a step forgets it also multiplies its value by

    @property
    def gates(self) -> int:
        return self.decays + self.replaces

    def given(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Given:
        """As the recurrence has it. Keys of a delta rule have length 1: else what it replaces could grow."""
        g = self.decay(q, *gates)
        if self.replaces:
            return Given(q, F.normalize(k, dim=-1), v, g, torch.sigmoid(gates[-1]))
        return Given(q / math.sqrt(q.size(-1)), k, self.values(v, g), g)

    def decay(self, q: Tensor, *gates: Tensor) -> Tensor:
        """Its logarithm [B, H, S]."""
        return -F.softplus(gates[0]) if self.decays else constant_decay(q)

    def values(self, v: Tensor, g: Tensor) -> Tensor:
        """What is written of v."""
        return (-g.unsqueeze(-1) * v).to(v.dtype) if self.discretizes else v

    def by(self, form: Form) -> Mix:
        """A call of its own, which a compiler can take."""
        def mix(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
            return form(self.given(q, k, v, *gates), None)[0]
        return mix

    def flops(self, way: str, steps: int, width: int) -> int:
        """Of a forward of one head by that form, in products alone."""
        if way == LOOP:
            return forms.flops_of_recurrent(steps, width, width, self.replaces)
        return self.flops_by_chunks_of(steps if way == AT_ONCE else forms.CHUNK, steps, width)

    def flops_by_chunks_of(self, chunk: int, steps: int, width: int) -> int:
        """The same, of chunks of so many steps."""
        return forms.flops_of_chunked(steps, width, width, self.replaces, chunk)

    def as_few_flops_from(self, way: str, width: int) -> int | None:
        """The length from which on that form has no more than causal attention; None where it always has more."""
        if way == AT_ONCE:                                 # as many pairs of steps, and a state besides
            return None
        more = [steps for steps in range(1, LONGEST)
                if self.flops(way, steps, width) > causal_attention_flops(steps, width, width)]
        return more[-1] + 1

    def inputs(self, shape: Sequence[int], seed: int, device: torch.device, dtype: torch.dtype = torch.float32
               ) -> list[Tensor]:
        """q, k, v in `dtype` and gates in FP32, of normal numbers.

        Gates of a decay lie around -3, which forgets over some twenty steps.
        """
        numbers = torch.Generator(device).manual_seed(seed)
        B, H, S, D = shape
        sizes = [(B, H, S, D)] * 3 + [(B, H, S)] * self.gates
        made = [torch.randn(size, generator=numbers, device=device) for size in sizes]
        if self.decays:
            made[3] = made[3] - 3
        return [each.requires_grad_() for each in (*(each.to(dtype) for each in made[:3]), *made[3:])]


def constant_decay(q: Tensor) -> Tensor:
    """Log decay [B, H, S] of retention, in FP32 at least: head h keeps 1 - 2^(-5 - h)."""
    B, H, S, _ = q.shape
    heads = torch.arange(H, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.log1p(-torch.exp2(-5 - heads)).view(1, H, 1).expand(B, H, S)


Step = Callable[..., Tensor]       # state [B, H, D, D], where the next one goes, and a Mix's inputs of one step -> y


def step_of(mixer: Mixer) -> Step:
    """One step of decoding."""
    def step(state: Tensor, following: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        y, after = forms.recurrent(mixer.given(q, k, v, *gates), state)
        following.copy_(after)
        return y
    return step


@dataclass(frozen=True)
class Decoder:
    """Repeats one step: it reads one state and writes another, so that each call, also a graph's, computes the same.

    What is compiled stays an attribute, so that it can be seen.
    """
    step: Step
    state: Tensor
    following: Tensor

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.step(self.state, self.following, *inputs)


def step_errors(step: Step, mixer: Mixer, state: Tensor, inputs: Sequence[Tensor]) -> dict[str, float]:
    """What -> relative L2 error of y, and of the next state, against the recurrence in FP64."""
    following = torch.empty_like(state)
    y = step(state, following, *inputs)
    exact_y, after = forms.recurrent(mixer.given(*(each.double() for each in inputs)), state.double())
    return {"y": oracle.relative_error(y, exact_y), "state": oracle.relative_error(following, after)}


def bytes_of_a_step(width: int) -> int:
    """Of one head: its state, read and written in FP32."""
    return 2 * 4 * width**2


def bytes_of_a_cache(steps: int, width: int, itemsize: int = 4) -> int:
    """Of one head: all keys and values, read."""
    return 2 * itemsize * steps * width


EVERY = (Mixer("linear attention, decay", decays=False), Mixer("SSD", discretizes=True),
         Mixer("gated delta rule", replaces=True))
MIXERS = {mixer.name: mixer for mixer in EVERY}
LOOP, AT_ONCE, CHUNKS, COMPILED, TRITON = "a loop", "at once", "chunks", "chunks, compiled", "chunks, Triton"
WAYS = LOOP, AT_ONCE, CHUNKS, COMPILED, TRITON


def form_of(way: str) -> Form:
    """What computes it by that way; who asks for `COMPILED` compiles it. Raises ImportError without Triton."""
    plain: dict[str, Form] = {LOOP: forms.recurrent, AT_ONCE: forms.parallel, CHUNKS: forms.chunked,
                              COMPILED: forms.chunked}
    return fused() if way == TRITON else plain[way]


# -------------------------------------------------------------------------------------------------------- its check


def errors(mix: Mix, mixer: Mixer, inputs: Sequence[Tensor], dy: Tensor, truth: Sequence[Tensor]) -> dict[str, float]:
    """What -> relative L2 error of y and of each gradient, against `exact`; the worst head of those."""
    names = ["y", "dq", "dk", "dv", *["dg"] * mixer.decays, *["db"] * mixer.replaces]
    y = mix(*inputs)
    found = [y.detach(), *torch.autograd.grad(y, list(inputs), dy)]
    worst = dict.fromkeys(names, 0.0)
    for name, own, exact_value in zip(names, found, truth, strict=True):
        for place, (sample, head) in enumerate(looked_at(y)):
            error = oracle.relative_error(own[sample, head], exact_value[place])
            worst[name] = max(worst[name], error)
    return worst


def output_error(mix: Mix, inputs: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Of y alone, of what has no backward."""
    with torch.no_grad():
        y = mix(*inputs)
    return max(oracle.relative_error(y[sample, head], truth[0][place])
               for place, (sample, head) in enumerate(looked_at(y)))


def looked_at(y: Tensor) -> list[tuple[int, int]]:
    """(sample, head) of the first and the last of both: heads share nothing."""
    return [(sample, head) for sample in sorted({0, y.size(0) - 1}) for head in sorted({0, y.size(1) - 1})]


def exact(mixer: Mixer, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """y and all gradients of the recurrence in FP64, of the heads that are looked at: [place, S, D], gates [place, S].
    """
    places = looked_at(dy)

    def picked(t: Tensor) -> Tensor:
        return torch.stack([t.detach()[place] for place in places]).unsqueeze(1).double()              # a head each
    leaves = [picked(each).requires_grad_() for each in inputs]
    given = mixer.given(*leaves)
    if not mixer.decays:
        given = replace(given, g=picked(constant_decay(inputs[0].detach().double())))
    y, _ = forms.recurrent(given)
    return [each.squeeze(1) for each in (y.detach(), *torch.autograd.grad(y, leaves, picked(dy)))]
