"""What a candidate must not do while it is judged and timed: answer from memory, do less, or change the rules.

A check before the clock starts says nothing of what the clock sees. So the timed calls are looked at, too: each gets
inputs that were never there before, some of their results are held against the reference, which computes its own only
afterwards, all streams and threads are waited for, and what is global in the process is compared before and after.
In one process a candidate can still reach everything that looks at it; what was put in place of torch's own functions
before this module was imported is not seen.
"""
import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.measure.apart import GROSS, apart_where_finite, gradients_too_far_apart
from benchmarks.measure.bounds import step_in
from benchmarks.measure.calls import (
    PERTURBATIONS,
    are_looked_up,
    meanwhile_off_by_a_rounding,
    off_by_a_rounding,
    takes_gradient,
)
from benchmarks.measure.checks import Check
from benchmarks.measure.names import THE_CALL
from benchmarks.measure.observing import distance, norm
from benchmarks.measure.process_state import Globals
from benchmarks.measure.refreshing import Refresher
from common.outcome import in_a_line, is_out_of_memory
from common.runtime.iteration import Iteration

LOOKS = 2                                  # at timed calls, of each pass and way of launching
TWICE = 2                                  # so often a gradient must be another one: a kink moves it now and then
THRICE = 3                                 # so often a device must go on: a host that is held up sees that now and then
MOST_SLOW_WAITS = 9                        # of a row: another look is asked for after each, until there were so many
TIMES_ROUNDING, TIMES_THE_REFERENCE = 2, 4 # of an output: candidate and reference both round
NOT_PLAIN = ", which may compute when it is looked at: return plain tensors"
LEFT_BUSY = 2e-4                           # seconds that a device may go on behind the stream that is timed
LEFT_SHARE = 0.02                          # of the call's own time, too: no verdict rests on less


@dataclass
class Referee:
    """Looks at some of the timed calls of one candidate. `found` says what was wrong with them; "" so far."""
    reference: Callable                    # on the same flat inputs, returns the same flat outputs
    parameters: Sequence[tuple[str, Tensor]]       # of the reference, whose gradients the candidate's are held against
    allowed: float                         # between their outputs, as a share of the norm
    allowed_of_gradients: float            # between their gradients
    draws: bool                            # the reference draws random numbers: values can't be compared
    buffers: Sequence[tuple[Tensor, Tensor]]       # (its own, the reference's) of which results may depend
    checks: list[Check]                    # of the judgement that the candidate passed; what is found then joins them
    found: str = ""
    last_looks: dict[str, Callable[[], None]] = field(default_factory=dict)        # by pass and way of launching
    waiting: "_Watch | None" = None        # whose call is looked at next: other rows are given the same inputs
    globals: Globals = field(default_factory=Globals)
    in_its_numerics: Callable | None = None        # the reference, multiplying in what the candidate declares: it may
    # choose other experts then, or fall into other bins
    numerics: str | None = None            # what the candidate multiplies in, where that is coarser than its dtype
    tables: Sequence[Tensor] = ()          # of the reference, in which inputs of whole numbers are looked up

    def watched(self, work: Iteration, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], mode: str) -> Iteration:
        """The same iteration, with other inputs each time. Behind the first call, and some later ones, its results are
        looked at, outside of what is timed."""
        watch = _Watch(self, mode, inputs, cotangents)

        def run() -> list[Tensor]:
            watch.returned = work.run()
            if watch.is_due:                                   # others may share the parameters: now they are its own
                watch.gradients = work.gradients()
            return watch.returned

        def between() -> None:
            watch.look()
            work.between()
            watch.prepare()

        def once_more() -> None:
            for number in range(MOST_SLOW_WAITS):
                work.between()
                watch.prepare(is_due=True)
                run()
                watch.look()
                if not watch.asks_again(number):
                    break
            work.between()
        self.last_looks[mode] = once_more
        return Iteration(run, between, work.reads, work.receives, work)

    def look_at_last(self) -> None:
        """At one more call of each row: who was honest for long enough is not honest then."""
        try:
            for once_more in self.last_looks.values():
                once_more()
        except Exception as error:
            if not is_out_of_memory(error):
                self.found = self.found or f"a timed call raises {in_a_line(error)}"
        self.last_looks.clear()
        if self.found:
            self.checks.append(Check(THE_CALL, "timed calls", False, True, math.nan, math.nan, self.found))

    def between_replays(self, replay: Callable[[], None], writes: Sequence[Tensor], inputs: Sequence[Tensor], mode: str
                        ) -> Callable[[], None]:
        """What is to be called between two replays of a graph that writes there: other inputs, and looks."""
        watch = _Watch(self, _by_graph(mode), inputs, ())

        def between() -> None:
            watch.look()
            watch.prepare()
            watch.returned = list(writes)

        def once_more() -> None:
            for number in range(MOST_SLOW_WAITS):
                watch.prepare(is_due=True)
                replay()
                watch.returned = list(writes)
                watch.look()
                if not watch.asks_again(number):
                    break
        self.last_looks[watch.mode] = once_more
        return between

    def forget_replay(self, mode: str) -> None:
        """Let go of a graph that will not be replayed: it holds all the memory that it writes to."""
        self.last_looks.pop(_by_graph(mode), None)
        if self.waiting and self.waiting.mode == _by_graph(mode):
            self.waiting = None


def _by_graph(mode: str) -> str:
    return f"{mode} by graph"


def left_busy(call: float, wait: float, idle_wait: float = 0.0) -> bool:
    """Whether a device still worked, when waiting for it took `wait` seconds behind a call of `call` seconds.

    `idle_wait` is what the same takes while nothing runs: whatever holds the driver's lock holds up each wait, too.
    """
    return wait - idle_wait > max(LEFT_BUSY, LEFT_SHARE * call)


def _seconds_of(wait: Callable[[], None]) -> float:
    began = time.perf_counter()
    wait()
    return time.perf_counter() - began


def _threads() -> set[threading.Thread]:
    """Python's own; autograd's, which run a hook at times, are no such."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


class _Watch:
    """Of one row: which calls are looked at, and how."""

    def __init__(self, referee: Referee, mode: str, inputs: Sequence[Tensor], cotangents: Sequence[Tensor]):
        self.referee, self.mode, self.refresher = referee, mode, Refresher(inputs)
        self.inputs, self.cotangents = inputs, cotangents
        self.returned: list[Tensor] | None = None
        self.gradients: dict[str, Tensor] = {}
        self.given: list[Tensor] = []                          # what the next call is given
        self.state: list[Tensor] = []                          # the buffers that it begins with
        self.expected_state: list[Tensor] = []                 # and those that the reference leaves behind
        self.calls, self.looks, self.next = 0, 0, 2            # the first one compiles
        self.is_due = False                                    # whether the next call is looked at
        self.suspected = 0                                     # looks that found another gradient
        self.busy = 0                                          # looks in a row at which the device still went on
        self.slow_waits = 0                                    # looks at which it did, or waiting itself was slow
        self.is_unsure = False                                 # whether another look must tell which
        self.began = 0.0                                       # when the call that is looked at could begin
        self.threads: set[threading.Thread] = set()

    def prepare(self, is_due: bool = False) -> None:
        """Other inputs for the next call, once those of another row's have been looked at."""
        if self.referee.waiting:
            self.referee.waiting.look()
        self.calls += 1
        self.is_due = is_due or (self.calls >= self.next and self.looks < LOOKS)
        self.refresher.refresh()
        if self.is_due:
            self.referee.waiting = self
            self.given, self.threads = [t.detach().clone() for t in self.inputs], _threads()
            self.state = [mine.detach().clone() for mine, _ in self.referee.buffers]
        self.began = time.perf_counter()

    def look(self) -> None:
        """At the call before, if it is its turn: an early one, some that nothing tells beforehand, the last."""
        returned, self.returned = self.returned, None
        if self.referee.waiting is self:
            self.referee.waiting = None
        if returned is None or not self.is_due or self.referee.found:
            return
        self.looks += 1
        self.is_due = False
        self.next = self.calls + int.from_bytes(os.urandom(2), "little") % (4 * self.calls + 3) + 1
        try:
            self.referee.found = self._wrong(returned)
        except (RuntimeError, MemoryError) as error:           # no room for the reference beside what is timed
            if not is_out_of_memory(error):
                raise
        finally:
            self.gradients, self.given, self.state, self.expected_state = {}, [], [], []

    def _wrong(self, returned: list[Tensor]) -> str:
        as_left = [t.detach().clone() for t in returned]       # as the stream that is timed sees it
        left = {thread for thread in _threads() - self.threads if thread.is_alive()}
        if self._goes_on(returned[0].device):
            return "its work goes on, on another stream, when its own stream has ended"
        if unfinished := self._unfinished(returned, as_left, left):
            return unfinished
        if kinds := [type(t).__name__ for t in returned if type(t) not in (Tensor, torch.nn.Parameter)]:
            return f"it returns a {kinds[0]}{NOT_PLAIN}"
        if changed := self.referee.globals.changed():
            return changed
        if _differ(self.inputs, self.given) and not self._reference_changes_its_inputs():
            return "a timed call changes its input in place"
        if self.referee.draws:
            return ""
        state_as_left = [mine.detach().clone() for mine, _ in self.referee.buffers]
        with self._references_buffers_kept():
            return self._other_results(as_left) or self._other_state(state_as_left)

    def _reference_changes_its_inputs(self) -> bool:
        """In this pass: then whoever is held against it may, too."""
        inputs = [t.clone() for t in self.given]
        with torch.set_grad_enabled(bool(self.gradients)):
            self.referee.reference(*inputs)
        return _differ(inputs, self.given)

    @contextlib.contextmanager
    def _references_buffers_kept(self) -> Iterator[None]:
        """The reference's buffers are restored afterwards."""
        theirs = [own for _, own in self.referee.buffers]
        before = [own.detach().clone() for own in theirs]
        try:
            yield
        finally:
            _fill(theirs, before)

    def _other_state(self, as_left: list[Tensor]) -> str:
        """Whether the call left its buffers as the reference's last call on its input has left its own.

        Those that it shares with the reference may have been moved by others' calls since then: they tell nothing.

        A running mean is near zero at times: beside its own norm that of all counts, as for gradients.
        """
        if not self.expected_state:                            # the reference has no answer on such an input
            return ""
        allowed = self.referee.allowed
        whole = norm([own.double() for own in self.expected_state if takes_gradient(own)])
        shared = [mine is own for mine, own in self.referee.buffers]
        for mine, own, before, is_shared in zip(as_left, self.expected_state, self.state, shared, strict=True):
            if is_shared:
                continue
            apart, size = apart_where_finite(mine, own), norm([own])
            if not apart <= (max(GROSS, allowed) * size + allowed * whole if takes_gradient(own) else 0.0):
                what = "as it was" if torch.equal(mine, before) else "in another state than the reference does"
                return f"a timed call ({self.mode}) leaves a buffer of shape {tuple(mine.shape)} {what}"
        return ""

    def _goes_on(self, device: torch.device) -> bool:
        """Whether the device is busy for longer than the stream that is timed, at so many looks in a row."""
        if device.type != "cuda":
            return False
        torch.cuda.current_stream().synchronize()
        call = time.perf_counter() - self.began
        wait, *idle_waits = (_seconds_of(torch.cuda.synchronize) for _ in range(1 + THRICE))
        if not left_busy(call, wait):
            self.busy, self.is_unsure = 0, False
            return False
        self.slow_waits += 1
        self.busy += left_busy(call, wait, max(idle_waits))
        self.is_unsure = self.busy < THRICE and self.slow_waits < MOST_SLOW_WAITS
        if self.is_unsure:
            self._look_again()
        return self.busy >= THRICE

    def asks_again(self, number: int) -> bool:
        """Whether one more call must be looked at, after `number` others: something was found, but not often enough."""
        return self.is_unsure or (self.suspected > 0 and number + 1 < THRICE)

    def _look_again(self) -> None:
        """At the next call, beside the looks that are due."""
        self.looks, self.next = self.looks - 1, self.calls + 1

    def _unfinished(self, returned: list[Tensor], as_left: list[Tensor], left: set[threading.Thread]) -> str:
        """What is wrong with results that other threads, those that it left, or streams still fill in."""
        for thread in left:
            thread.join(timeout=1.0)
        if _differ(as_left, returned):
            return "its result is not there when it returns: it is filled in later, by another stream or thread"
        return f"it leaves {len(left)} threads at work" if left else ""

    def _other_results(self, as_left: list[Tensor]) -> str:
        """Held against the reference as it is, and where that is another result as it is in the declared numerics."""
        gradients = {name: t.detach().clone() for name, t in self.gradients.items()}
        other = self._other_than(self.referee.reference, as_left, gradients)
        if not other or self.referee.in_its_numerics is None:
            return other or ""
        is_same = self._other_than(self.referee.in_its_numerics, as_left, gradients) == ""
        return "" if is_same else other

    def _other_than(self, reference: Callable, as_left: list[Tensor], gradients: dict[str, Tensor]) -> str | None:
        """What is another result than the reference's, from the buffers that the call began with; None where the
        reference has none on such an input.
        """
        leaves = [t.detach().requires_grad_(bool(gradients) and takes_gradient(t)) for t in self.given]
        buffers = [own for _, own in self.referee.buffers]
        _fill(buffers, self.state)
        try:
            with torch.set_grad_enabled(bool(gradients)):
                expected = reference(*leaves)
            self.expected_state = [own.detach().clone() for own in buffers]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None
        further = {}                                       # place of an output -> how far it is off, beyond its bound
        for place, (mine, own) in enumerate(zip(as_left, expected, strict=True)):
            if takes_gradient(own):
                apart = apart_where_finite(mine, own.detach())
                if not apart <= self.referee.allowed * norm([own.detach()]):
                    further[place] = apart
        # A sum that is nearly zero may be so far off by rounding. The reference runs again for that, and may write to
        # its buffers, which its backward needs: so gradients come first.
        may_be_rounding = all(map(math.isfinite, further.values()))
        wrong = self._other_gradients(reference, gradients, leaves, expected) if gradients and may_be_rounding else ""
        for place, apart in further.items():
            own = expected[place].detach()
            if not self._explains(apart, reference, leaves, place, own):
                return (f"a timed call ({self.mode}) returned another result than the reference does on its input: "
                        f"output {place} is off by {apart / max(norm([own]), 1e-300):.1e}")
        return wrong

    def _explains(self, apart: float, reference: Callable, leaves: list[Tensor], place: int, own: Tensor) -> bool:
        """Whether rounding the inputs moves the reference's own output there as far."""
        if not math.isfinite(apart):
            return False
        buffers = [each for _, each in self.referee.buffers]
        with torch.no_grad():
            for others in self._off_by_a_rounding(leaves):
                _fill(buffers, self.state)
                moved = distance([reference(*others)[place]], [own])
                if math.isfinite(moved) and apart <= TIMES_THE_REFERENCE * moved:
                    return True
        return False

    def _other_gradients(self, reference: Callable, gradients: dict[str, Tensor], leaves: list[Tensor],
                         expected: Sequence[Tensor]) -> str:
        """Held against those that the reference computes now."""
        own = self._own_gradients(gradients, leaves, expected)
        pairs = {name: (gradients[name].to_dense(), g) for name, g in own.items()}
        whole = sum(norm([g])**2 for g in own.values())**0.5
        moved = functools.partial(self._moved, reference, gradients, leaves)
        for wrong in gradients_too_far_apart(pairs, self.referee.allowed_of_gradients, whole, moved):
            self.suspected += 1
            if self.suspected < TWICE:
                self._look_again()
                return ""
            return (f"a timed call ({self.mode}) left another gradient than the reference does on its input: of "
                    f"{wrong.of}, off by {wrong.apart / max(wrong.size, 1e-300):.1e}")
        return ""

    def _own_gradients(self, names: Container[str], leaves: list[Tensor], outputs: Sequence[Tensor]
                       ) -> dict[str, Tensor]:
        """Those of the reference of these names, for its outputs."""
        floating = {f"input {place}": t for place, t in enumerate(leaves) if t.is_floating_point()}
        wanted = {name: t for name, t in (*floating.items(), *self.referee.parameters) if name in names}
        taking = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, self.cotangents, strict=True) if y.requires_grad]
        outputs, cotangents = zip(*taking, strict=True)
        found: Sequence[Tensor | None]
        if any(map(_checkpoints_reentrantly, outputs)):
            found = self._left_by_a_backward(outputs, list(wanted.values()), cotangents)
        else:
            found = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
        return {name: g.to_dense() for name, g in zip(wanted, found, strict=True) if g is not None}

    def _left_by_a_backward(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor]
                            ) -> list[Tensor | None]:
        """What a backward leaves in .grad of these; what stood there, and in all parameters, is put back."""
        every = [*wanted, *(t for _, t in self.referee.parameters)]
        before = [t.grad for t in every]
        try:
            for t in every:
                t.grad = None
            torch.autograd.backward(outputs, cotangents)
            return [t.grad for t in wanted]
        finally:
            for t, gradient in zip(every, before, strict=True):
                t.grad = gradient

    def _moved(self, reference: Callable, names: Container[str], leaves: list[Tensor]
               ) -> Iterator[dict[str, Tensor]]:
        """The reference's own gradients where the inputs are off by a rounding, several times."""
        for others in self._off_by_a_rounding(leaves):
            yield self._own_gradients(names, others, reference(*others))

    def _off_by_a_rounding(self, leaves: list[Tensor]) -> Iterator[list[Tensor]]:
        """Such inputs, several times; meanwhile tables that whole numbers are looked up in are so, too."""
        step = step_in(self.referee.numerics, leaves[0].device)
        tables = self.referee.tables if are_looked_up(leaves) else ()
        for number in range(PERTURBATIONS):
            generator = torch.Generator(leaves[0].device).manual_seed(number)
            others = [off_by_a_rounding(t, generator, step).requires_grad_(t.requires_grad) for t in leaves]
            with meanwhile_off_by_a_rounding(tables, number, step):
                yield others


def _checkpoints_reentrantly(output: Tensor) -> bool:
    """Whether its graph holds a checkpoint by `use_reentrant=True`, which torch.autograd.grad can't go through."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            left += [other for other, _ in node.next_functions]
    return False


def _differ(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether any has another value than its partner; NaN counts as equal to itself."""
    return any(not torch.equal(t.detach().nan_to_num(), other.detach().nan_to_num())
               for t, other in zip(tensors, others, strict=True))


def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, value in zip(tensors, values, strict=True):
            t.copy_(value)
