"""How many samples of a batch FP64 fits: what that needs in memory and time, and whether samples stand alone.

A model that fills half of a GPU in FP32 does not fit twice as wide. Then fewer samples tell what it means, and the
whole batch is held against the reference at its own dtype. Where a sample's output depends on the others, as in batch
norm in training, the fewer are a batch of their own, of two at least; running tells.
"""
import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.measure.bounds import BOUNDS
from benchmarks.measure.calls import Inputs, named_parameters, outputs_of, takes_gradient
from benchmarks.measure.keeping import uncompiled_in_fp64, uncompiled_meanwhile, without_dropout
from benchmarks.measure.observing import Work, distance, exact_in, norm
from benchmarks.measure.state import Start
from common.outcome import is_out_of_memory
from common.runtime.machine import memory_free

SECONDS = 10.0                             # that one look in FP64 may take
SHARE = 0.7                                # of the memory that is free; the rest is for what nothing counts here
FORWARDS_OF_A_LOOK = 14                    # as long as so many forwards: three times forward and backward, and others
SLOWEST = 64                               # times FP32's time, which FP64 takes on a desktop's GPU
LEAST_TOGETHER = 2                         # samples that depend on each other: batch norm takes no single one
OUTPUTS, PARAMETERS = 5, 3                 # copies that a look holds: of what is returned, and of parameters


class DoesNotFit(MemoryError):
    """Not even one sample does, or it takes no fewer; the message says which."""


def samples_of(inputs: Inputs) -> int:
    """The size of the batch: the first dimension of the first tensor that has more than one, else of the first."""
    tensors = list(inputs.named().values())
    first = next((t for t in tensors if t.ndim > 1), tensors[0])
    return first.size(0) if first.ndim else 1


def that_fit(copy: Callable, plain: Callable, work: Work, dtype: torch.dtype, draws: bool) -> tuple[int, str]:
    """(how many samples a look at `copy`, in `dtype`, may have; why not all, or "").

    `plain` is the reference that it is a copy of. Raises DoesNotFit where none fits, or it takes no fewer.
    """
    total = samples_of(work.inputs)
    seconds, of_samples, of_parameters = _forward(plain, work)
    free = SHARE * memory_free(work.inputs.device)
    needed = of_samples + of_parameters
    fitting, why = total, ""
    if needed > free:
        fitting = max(0, int(total * (free - of_parameters) / of_samples))
        why = f"{words(dtype)} of all {total} needs about {needed / 2**30:,.0f} GiB, {free / 2**30:,.0f} may be used"
    if fitting and seconds * SLOWEST * FORWARDS_OF_A_LOOK > SECONDS:
        in_time = _in_time(copy, work, dtype, fitting)
        if in_time < fitting:
            fitting, why = in_time, f"{words(dtype)} of all {total} would take longer than {SECONDS:g} s a look"
    if fitting >= total:
        return total, ""
    if not fitting:
        raise DoesNotFit(f"{why}: not even one sample fits")
    fitting = 2 ** (fitting.bit_length() - 1)
    if stand_alone(plain, work, fitting, draws):
        return fitting, why
    why, fewer = f"{why}, and its samples depend on each other", max(LEAST_TOGETHER, fitting)
    if not _is_callable_with(plain, work, fewer, draws):
        raise DoesNotFit(why)
    return fewer, f"{why}: these are a batch of their own"


def words(dtype: torch.dtype) -> str:
    """FP64, say."""
    return f"FP{torch.finfo(dtype).bits}"


def _forward(plain: Callable, work: Work) -> tuple[float, int, int]:
    """(seconds of a forward with gradients at its own dtype, bytes that a look at all samples needs in FP64 for them,
    and for parameters). What is for inference alone may have no such forward."""
    try:
        return _forward_counted(plain, work, with_gradients=True)
    except Exception as error:
        if is_out_of_memory(error) or not work.forward_only:
            raise
        return _forward_counted(plain, work, with_gradients=False)


@contextlib.contextmanager
def saved_tensors(own: set[int], size: Callable[[Tensor], int]) -> Iterator[dict[int, int]]:
    """Meanwhile what autograd saves, address -> bytes as `size` has them; but for the addresses in `own`."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        address = t.untyped_storage().data_ptr()
        if address not in own:
            sizes[address] = size(t)
        return t.detach()                                # a result that is saved would hold the graph, which holds it
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield sizes


def _bytes_in_fp64(t: Tensor) -> int:
    wider = 8 / t.dtype.to_real().itemsize if takes_gradient(t) else 1
    return int(t.untyped_storage().nbytes() * wider)


def _forward_counted(plain: Callable, work: Work, with_gradients: bool) -> tuple[float, int, int]:
    own = {t.untyped_storage().data_ptr() for t in named_parameters(plain).values()}
    start = work.start_of(plain)
    seconds = []
    for _ in range(2):                                   # the first has what is done once
        start.begin(work.seed)
        _wait(work)
        began = time.perf_counter()
        with (torch.set_grad_enabled(with_gradients), without_dropout(plain),
              saved_tensors(own, _bytes_in_fp64) as saved):
            outputs = outputs_of(work.inputs.copies().call(plain))
            of_outputs = 8 * sum(t.numel() for t in outputs.values())
            del outputs
        _wait(work)
        seconds.append(time.perf_counter() - began)
        if seconds[0] * SLOWEST * FORWARDS_OF_A_LOOK <= SECONDS:
            break
    start.begin(work.seed)
    of_parameters = 8 * sum(t.numel() for t in start.parameters.values())
    return min(seconds), sum(saved.values()) + OUTPUTS * of_outputs, PARAMETERS * of_parameters


def _wait(work: Work) -> None:
    if work.inputs.device.type == "cuda":
        torch.cuda.synchronize()


def _in_time(copy: Callable, work: Work, dtype: torch.dtype, most: int) -> int:
    """The largest power of two, or `most`, of samples whose look takes no longer than is allowed; at least one."""
    start, count, fits = work.start_of(copy), 1, 1
    while fits < most:
        try:
            seconds = min(_seconds(copy, start, work, dtype, count) for _ in range(2 if count == 1 else 1))
        except Exception as error:                       # it can't be called with fewer: memory alone decides
            fits = most if not is_out_of_memory(error) else fits
            break
        if seconds * FORWARDS_OF_A_LOOK > SECONDS:
            break
        fits = count
        count = min(2 * count, most)
    start.begin(work.seed)
    return fits


def _seconds(copy: Callable, start: Start, work: Work, dtype: torch.dtype, samples: int) -> float:
    """Of a forward without gradients of so many samples."""
    start.begin(work.seed)
    _wait(work)
    began = time.perf_counter()
    with torch.no_grad(), without_dropout(copy), exact_in(dtype), uncompiled_in_fp64(copy, dtype):
        work.inputs.first(samples).copies(dtype).call(copy)
    _wait(work)
    return time.perf_counter() - began


def stand_alone(call: Callable, work: Work, samples: int, draws: bool) -> bool:
    """Whether the first and the last so many samples give by themselves what they give among all."""
    total, start = samples_of(work.inputs), work.start_of(call)
    found = []
    with torch.no_grad(), without_dropout(call, functions=draws), uncompiled_meanwhile(call):
        try:
            of_all, first, last = (_outputs(call, inputs, start, work.seed) for inputs in (
                work.inputs, work.inputs.first(samples), work.inputs.last(samples)))
        except Exception:                                # a size that it was made for
            return False
    for name, whole in of_all.items():
        if whole.ndim and whole.size(0) == total and takes_gradient(whole):
            share = 2 * BOUNDS[whole.dtype.to_real()][0]
            for part, expected in ((first, whole[:samples]), (last, whole[-samples:])):
                same_shape = name in part and part[name].shape == expected.shape
                found.append(same_shape and distance([part[name]], [expected]) <= share * norm([expected]))
    return bool(found) and all(found)


def _is_callable_with(call: Callable, work: Work, samples: int, draws: bool) -> bool:
    """Whether it takes the first so many samples: of a graph's nodes, say, it need not."""
    with torch.no_grad(), without_dropout(call, functions=draws), uncompiled_meanwhile(call):
        try:
            _outputs(call, work.inputs.first(samples), work.start_of(call), work.seed)
        except Exception:
            return False
    return True


def _outputs(call: Callable, inputs: Inputs, start: Start, seed: int) -> dict[str, Tensor]:
    start.begin(seed)
    outputs = outputs_of(inputs.copies().call(call))
    start.begin(seed)
    return outputs
