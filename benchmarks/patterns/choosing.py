"""Attention under a pattern for a person's own model: the fastest way that this machine has, checked, with the reason.

    from benchmarks.patterns import attention
    attend = attention("sliding_window", window=256)
    y = attend(q, k, v)                    # q [B, H, S, D], k and v [B, G, T, D]; differentiable
    print(attend)                          # which way it took, and what the others took

The first call of each shape builds every way, holds it against FP64 and times it, which takes seconds. What the fastest
one has built, its mask among it, is kept for that shape, and for the last few shapes alone.
"""
import gc
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.patterns import checking
from benchmarks.patterns.pattern import Pattern, pattern_named
from benchmarks.patterns.ways import WAYS, Attend, Shape, why_no_backward
from common.outcome import Failed, in_a_line, is_out_of_memory
from common.runtime import timing
from common.text import figures, table

SAMPLED_MS, LEAST, MOST = 50.0, 5, 200     # each way is sampled for about so long, in so many calls
SHAPES = 8                                 # that are kept: each may hold a mask of S x S
Key = tuple[Shape, bool]                   # a shape, and whether gradients are wanted


@dataclass(frozen=True)
class Tried:
    """A way at one shape: its time, or why it has none."""
    way: str
    attend: Attend | None = None
    milliseconds: float | None = None      # of a forward, with its backward where gradients are wanted
    why_not: str = ""


@dataclass
class PatternAttention:
    """Call it on q, k and v. `way` is taken wherever it is given; else the fastest at each shape.

    It computes in the dtype of q, as it was checked: autocast around it changes nothing.
    """
    pattern: Pattern
    way: str | None = None
    tried: dict[Key, list[Tried]] = field(default_factory=dict)

    @torch.compiler.disable                # a model around it that is compiled calls it as it is
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = self.function(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return attend(q, k, v, *self.pattern.learned)

    def function(self, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        """(q, k, v, *pattern.learned) -> the result, for tensors like these.

        Raises ValueError where the tensors or the pattern do not fit, Failed where no way is right here.
        """
        shape = Shape.of(q, k, v, paired=self.pattern.differential is not None)
        self.pattern.check(shape.batch, shape.heads, shape.queries, shape.keys)
        for learned in self.pattern.learned:
            if learned.device != q.device:
                raise ValueError(f"table is on {learned.device}, q on {q.device}: move them to one device")
        key = shape, torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *self.pattern.learned))
        if key not in self.tried:
            self.tried[key] = self._try_all(*key)
            if len(self.tried) > SHAPES:
                del self.tried[next(iter(self.tried))]
        return _fastest(self.tried[key])

    def _try_all(self, shape: Shape, trains: bool) -> list[Tried]:
        """Every way at that shape, the fastest first. Raises Failed where none is right."""
        if shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Failed("the first call of a shape tries every way: call it once before a graph is captured")
        names = list(WAYS) if self.way is None else [self.way]
        kind = shape.device.type
        with torch.inference_mode(False), torch.set_grad_enabled(trains), torch.autocast(kind, enabled=False):
            tried = [_try(name, self.pattern, shape, trains) for name in names]
        if all(one.attend is None for one in tried):
            reasons = "; ".join(f"{one.way}: {one.why_not}" for one in tried)
            raise Failed(f"{self.pattern.name}: no way computes it here: {reasons}")
        fastest, *others = sorted(tried, key=lambda one: (one.attend is None, one.milliseconds or 0.0))
        return [fastest, *(replace(other, attend=None) for other in others)]        # their masks are let go of

    def __str__(self) -> str:
        """Which way it takes at each shape that it has seen, with the times of all, or why they have none."""
        if not self.tried:
            return f"{self.pattern.name}: not called yet"
        return "\n\n".join(_in_words(self.pattern, *key, tried) for key, tried in self.tried.items())


def attention(name: str, *, way: str | None = None, **options) -> PatternAttention:
    """A pattern by its name, and what it needs: `window`, `prefix`, `documents`, `lengths`, `table`, `cap`.

    `documents` are lengths that add up to S, `lengths` the keys that count in each sequence of the batch, `table`
    T5's learned [32, H]. Any other part of a Pattern may be added. `way` is taken without asking for the fastest.
    Raises ValueError for what is unknown, missing or contradicts itself.
    """
    if way is not None and way not in WAYS:
        raise ValueError(f"{way!r} is no way: give one of {', '.join(WAYS)}")
    return PatternAttention(pattern_named(name, **options), way)


def _try(way: str, pattern: Pattern, shape: Shape, trains: bool) -> Tried:
    """Build it, check it, time it. What it lacks or does wrong is the reason why not."""
    if trains and (reason := why_no_backward(way, shape.device)):
        return Tried(way, why_not=reason)
    try:
        attend = WAYS[way](pattern, shape)
        given = checking.inputs_of(pattern, shape, seed=0)
        if not trains:
            given = [t.detach() for t in given]
        checking.check(attend, pattern, shape, given, seed=1, backward=trains)
        return Tried(way, attend, _milliseconds(attend, given, trains))
    except NotImplementedError as error:
        return Tried(way, why_not=str(error))
    except Failed as error:
        return Tried(way, why_not=f"wrong here: {error}")
    except Exception as error:                             # another library's may be any
        return Tried(way, why_not="out of memory" if is_out_of_memory(error) else in_a_line(error))
    finally:
        gc.collect()


def _milliseconds(attend: Attend, given: Sequence[Tensor], trains: bool) -> float:
    def step() -> None:
        y = attend(*given)
        if trains:
            torch.autograd.grad(y, list(given), y.detach())
    clock = timing.clock_for(given[0].device)
    about = statistics.median(clock.sample(step, timing.nothing, 3))
    count = min(MOST, max(LEAST, math.ceil(SAMPLED_MS / about)))
    return statistics.median(clock.sample(step, timing.nothing, count))


def _fastest(tried: Sequence[Tried]) -> Attend:
    attend = tried[0].attend
    assert attend is not None
    return attend


def _in_words(pattern: Pattern, shape: Shape, trains: bool, tried: Sequence[Tried]) -> str:
    first = tried[0]
    passes = "forward and backward" if trains else "forward"
    head = (f"{pattern.name} at q {[shape.batch, shape.heads, shape.queries, shape.width]}, k "
            f"{[shape.batch, shape.kv_heads, shape.keys, shape.width]}, {passes}: {first.way}")
    if pattern.window is not None and pattern.window >= shape.keys:
        head += f"\na window of {pattern.window} over {shape.keys} keys leaves none out"
    rows = []
    for one in tried:
        rows.append([one.way, figures(one.milliseconds) if one.milliseconds else "", one.why_not])
    return f"{head}\n{table(rows, ['way', 'ms', 'why not'])}"
