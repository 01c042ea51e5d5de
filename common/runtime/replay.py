"""An iteration as a CUDA graph: the GPU replays all its kernels by one call, so that none of them waits for the host.

A capture can miss work without a word. So every replay is proved: it runs on changed inputs, and on other weights too
(not where FP8 weights are cached or kept), and must give what an eager run of the same gives.
"""
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..block import oracle
from .iteration import Iteration

COUNTS_AS_ZERO = 1e-5                                   # of the norm of all gradients: rounding leaves less in 16 bits


@dataclass(frozen=True)
class Proof:
    """How far a replay may be from an eager run, and what must change with it."""
    output_gate: float                                  # relative L2 error
    gradient_gate: float
    change: Callable[[Tensor], object] = lambda tensor: tensor.normal_()       # an input, in place
    weights: Sequence[Tensor] = ()                      # negated meanwhile: as large as before, their FP8 scales hold
    residual: Tensor | None = None                      # subtracted from the output, which it would dominate
    fp8_state: Callable[[], list[tuple[Tensor, Tensor]]] = field(default=list)     # (scale, amax_history) of each


def capture(iteration: Iteration, stream: torch.cuda.Stream | None = None) -> tuple[Callable, list[Tensor]]:
    """(a call that replays it, the tensors that each replay writes). Raises RuntimeError where it can't be captured.

    `between` runs once before the capture: gradients that are None then are allocated inside the graph and overwritten
    by every replay. `stream` is where to capture: that of the forward, where the iteration is its backward alone.
    """
    aside = stream or torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):              # warm-up off the default stream, as capture needs
        for last in (False, False, True):
            iteration.between()
            with _waits_refused() if last else nullcontext():
                iteration.run()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    iteration.between()
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    give_own_workspace()
    try:
        with torch.cuda.graph(graph, stream=stream):
            written = iteration.run()
    except RuntimeError:
        torch.cuda.set_stream(current)          # where the capture can't be ended, torch stays on its stream
        end_failed_capture()
        raise
    return graph.replay, written


def give_own_workspace() -> None:
    """Call it right before a capture, so that the graph gets a cuBLAS workspace from its own pool.

    PyTorch keeps a workspace for each stream. A graph that was captured on the same stream before has it in its pool,
    and whoever clears the workspaces frees it: torch.compile's graphs do. A later graph would go on writing there
    (pytorch/pytorch issue 193402). What is in its own pool stays for as long as the graph does.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_failed_capture() -> None:
    """A capture that failed leaves the random generator capturing: any later torch.randn would fail."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Raises RuntimeError where the host waits for the GPU meanwhile: no capture could hold that.

    A capture that fails midway keeps its memory until the process ends.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise RuntimeError("the host waits for the GPU during the iteration") from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True)
class Replay:
    """Replays a graph by one call. A graph keeps no tensor alive: this does, what it reads and what it writes."""
    replay: Callable[[], None]
    reads: Iteration
    writes: Sequence[Tensor]

    def __call__(self) -> None:
        self.replay()


def verified(iteration: Iteration, proof: Proof, stream: torch.cuda.Stream | None = None,
             captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
    """(a call that replays the iteration, "") once that is proved; (None, why there is none) elsewhere.

    `captured` is called between the capture and its proof.
    """
    try:
        replay, written = capture(iteration, stream)
        captured()
        prove(iteration, replay, written, proof, stream)
        return Replay(replay, iteration, written), ""
    except torch.OutOfMemoryError:
        return None, "graph: out of memory, the eager run's tensors and the graph's do not fit together"
    except (RuntimeError, ValueError) as error:
        reason = f"graph: {str(error).splitlines()[0]}"
    torch.cuda.synchronize()
    return None, reason


def prove(iteration: Iteration, replay: Callable, written: list[Tensor], proof: Proof,
          stream: torch.cuda.Stream | None = None) -> None:
    """Replay on changed inputs and weights, and compare with an eager run of the same.

    FP8 scales must follow what is replayed, forward and backward (without gradients none moves). Raises RuntimeError
    where the replay is not the iteration.
    """
    state = [tensor for pair in proof.fp8_state() for tensor in pair]
    on_stream = torch.cuda.stream(stream) if stream else nullcontext()
    with _restored(iteration.reads, state), on_stream:
        with torch.no_grad():
            for tensor in iteration.reads:
                proof.change(tensor.detach())
        with _negated(proof.weights):
            outputs, gradients = _results(replay, lambda _: written, iteration, proof)
            eager_outputs, eager_gradients = _results(iteration.run, lambda results: results, iteration, proof)
            for place, output in enumerate(eager_outputs):
                if not oracle.relative_error(outputs[place], output) <= proof.output_gate:
                    raise RuntimeError("its replay on another input and weights differs from an eager run")
            _compare_gradients(gradients, eager_gradients, proof.gradient_gate)
            if eager_gradients and state:
                _prove_scales(iteration, replay, proof)


def _compare_gradients(replayed: dict[str, Tensor], eager: dict[str, Tensor], gate: float) -> None:
    """Raises RuntimeError where one differs. A gradient whose true value is zero, as of a key's bias, is rounding in
    both: of it only the size is known."""
    of_all = math.hypot(*(float(gradient.double().norm()) for gradient in eager.values()))
    for name, gradient in eager.items():
        other = replayed.get(name)
        is_zero = float(gradient.double().norm()) <= COUNTS_AS_ZERO * of_all
        if is_zero and other is not None and float(other.double().norm()) <= COUNTS_AS_ZERO * of_all:
            continue
        if not oracle.relative_error(other, gradient.double()) <= gate:
            raise RuntimeError(f"the gradient of {name} that it replays differs from an eager run's")


def _results(call: Callable, outputs_of: Callable, iteration: Iteration, proof: Proof
             ) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(outputs in FP64, gradients) of one call."""
    torch.cuda.manual_seed(0)                             # the same dropout mask, should there be dropout
    outputs = [y.detach().double() for y in outputs_of(call())]
    if proof.residual is not None:
        outputs = [y - proof.residual.detach().double() for y in outputs]
    gradients = {name: gradient.clone() for name, gradient in iteration.gradients().items()}
    iteration.between()
    return outputs, gradients


def _prove_scales(iteration: Iteration, replay: Callable, proof: Proof) -> None:
    """Forget all scales, and see which an eager run finds again, and which a replay."""
    moved = []
    for call in (iteration.run, replay):
        for scale, amax_history in proof.fp8_state():
            scale.fill_(1)
            amax_history.zero_()
        call()
        iteration.between()
        moved.append([scale != 1 for scale, _ in proof.fp8_state()])
    for by_run, by_replay in zip(*moved, strict=True):
        if (by_run & ~by_replay).any():
            raise RuntimeError("FP8 scales do not move when it is replayed")


@contextmanager
def _restored(*groups: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards the tensors hold what they hold now."""
    tensors = [tensor.detach() for group in groups for tensor in group]
    kept = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


@contextmanager
def _negated(weights: Sequence[Tensor]) -> Iterator[None]:
    """Meanwhile the weights have the other sign; where memory ends halfway, those that were not reached keep theirs."""
    negated = []
    try:
        for weight in weights:
            weight.detach().neg_()
            negated.append(weight)
        yield
    finally:
        for weight in negated:
            weight.detach().neg_()

