"""An iteration as a CUDA graph: the GPU replays all its kernels by one call, so that none of them waits for the host.

A replay must be the iteration itself: a capture can miss work without a word. So `verified` replays it on another input
and other weights (not where FP8 weights are cached or kept) first, and holds the result against an eager run.
"""
from collections.abc import Callable

import torch

from . import device as machine
from . import oracle, parameters, te_emulation
from .report import Report, Row


def capture(iteration: Callable, between: Callable, stream: torch.cuda.Stream | None = None) -> Callable:
    """One whole iteration as a CUDA graph; the result replays it. Raises RuntimeError where it can't be captured.

    `between` runs once before the capture: gradients that are None then are allocated inside the graph and overwritten
    by every replay. `stream` is where to capture: that of the forward, where the iteration is its backward alone.
    """
    aside = stream or torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):              # warm-up off the default stream, as capture needs
        for _ in range(3):
            between()
            iteration()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    between()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            iteration()
    except RuntimeError:        # leaves the random generator capturing: any later torch.randn would fail
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay


def verified(block: torch.nn.Module, x: torch.Tensor, iteration: Callable, between: Callable, row: Row,
             result: Report) -> Callable | None:
    """The iteration as a CUDA graph that `verify` has passed; None, with the reason in `row`, where there is none."""
    static = {}
    try:
        replay = capture(lambda: static.update(y=iteration()), between)
        row.peak_bytes = machine.memory_peak(x.device)
        verify(block, replay, iteration, between, static, x, result)
        return replay
    except torch.OutOfMemoryError:
        row.reason = "graph: out of memory, the eager run's tensors and the graph's do not fit together"
    except RuntimeError as error:
        row.reason = f"graph: {str(error).splitlines()[0]}"
        torch.cuda.synchronize()
    return None


def verify(block, replay, iteration, between, static, x, result: Report) -> None:
    """Replay on another input and weights and compare with an eager run of the same: a capture can miss work silently.

    FP8 scales must follow what is replayed, forward and backward (without gradients none moves). Raises RuntimeError
    where the graph is not the iteration.
    """
    state = [tensor for pair in te_emulation.fp8_state(block) for tensor in pair]
    kept = [x.detach().clone()] + [tensor.clone() for tensor in state]
    branch_gate, gradient_gate = oracle.GATES[result.matmul]
    weights = ([p.detach() for p in block.parameters() if p.ndim == 2]
               if block.config.fp8_weights == "per-call" else [])        # a graph of kept weights need not follow
    negated = []
    try:
        x.detach().normal_()
        for weight in weights:
            weight.neg_()                             # as large as before: their FP8 scales hold
            negated.append(weight)
        results = []
        for call in (replay, iteration):
            torch.cuda.manual_seed(0)                 # the same dropout mask, should there be dropout
            y = call()
            y = (static["y"] if call is replay else y).detach().double()
            gradients = parameters.gradients(block) | {"the input": x.grad}
            results.append((y - x.detach().double(), {name: gradient.clone() for name, gradient in gradients.items()
                                                      if gradient is not None}))
            between()
        (captured, captured_gradients), (eager, eager_gradients) = results
        if oracle.relative_error(captured, eager) > branch_gate:
            raise RuntimeError("its replay on another input and weights differs from an eager run")
        for name, gradient in eager_gradients.items():
            if oracle.relative_error(captured_gradients.get(name), gradient.double()) > gradient_gate:
                raise RuntimeError(f"the gradient of {name} that it replays differs from an eager run's")
        if eager_gradients and state:
            moved = []
            for call in (iteration, replay):                   # forget all, and see which scales each finds again
                for scale, amax_history in te_emulation.fp8_state(block):
                    scale.fill_(1)
                    amax_history.zero_()
                call()
                between()
                moved.append([scale != 1 for scale, _ in te_emulation.fp8_state(block)])
            if any((eager & ~replayed).any() for eager, replayed in zip(*moved, strict=True)):
                raise RuntimeError("FP8 scales do not move when it is replayed")
    finally:
        for tensor, value in zip([x.detach(), *state], kept, strict=True):
            tensor.copy_(value)
        for weight in negated:
            weight.neg_()
