"""Every kernel by hand once more, forward and backward, on small and odd shapes: what a memory checker watches.

    compute-sanitizer --tool memcheck python -m benchmarks kernels          # likewise racecheck, initcheck, synccheck

Each kernel runs twice and must give the same bits, but for what is summed in memory in any order (dq of attention's
backward, rung by rung); whether these are right is what the tests check, and the study of fusions. Exit status: 0 ok,
1 bits differ, 2 usage, 3 out of memory, 4 skipped for want of a GPU, 130 interrupted.
"""
import argparse
import functools
import itertools
import sys
from collections.abc import Callable

import torch

from benchmarks.kernels.cuda import extension, series
from benchmarks.kernels.operations import EXPERIMENTS, Experiment, tensors
from common.block.config import dtype_name
from common.command_line import Parser, early_ends, hush
from common.outcome import EXIT
from common.runtime.iteration import as_list, taking_gradients

SERIES = "series"
# Of the rows, so many that each program of a backward takes several; of the columns, so many that a thread holds most.
SIZES: dict[str, list[tuple[int, ...]]] = {
    "hidden": [(3, 1), (5, 1000), (3, 4097), (2000, 256), (1100, 4096), (600, 8200)],
    "ffn": [(3, 1), (5, 1000), (3, 4097), (2000, 256)],
    "scores": [(2, 1, 1), (2, 100, 100), (1, 257, 257), (1, 1031, 1031), (1, 2056, 2056)],
    "heads": [(1, 2, 1, 64), (2, 2, 130, 64), (1, 2, 257, 128), (1, 1, 512, 128)],
}


def results(call, experiment: Experiment, size: tuple[int, ...], dtype: torch.dtype) -> list[bytes]:
    """The bits of outputs, and of gradients where there are any, of fixed random numbers."""
    inputs = tensors(experiment, size, dtype, torch.device("cuda"), seed=0)
    outputs = as_list(call(*inputs))
    results = [y.detach() for y in outputs]
    if ys := taking_gradients(outputs):
        results += torch.autograd.grad(ys, taking_gradients(inputs), [torch.ones_like(y) for y in ys])
    return [t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in results]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    hush()
    parser = Parser("kernels", prog="python -m benchmarks kernels", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*EXPERIMENTS, SERIES), action="append", default=[], metavar="NAME",
                        help=f"only this operation; {SERIES}: attention rung by rung; may be repeated")
    only = parser.parse_args(argv).only or (*EXPERIMENTS, SERIES)
    if not torch.cuda.is_available():
        print("kernels: skipped: there is no GPU", file=sys.stderr)
        return EXIT["skipped"]
    different = 0
    with early_ends("kernels"):
        for name, experiment in EXPERIMENTS.items():
            if name not in only:
                continue
            for level, load in experiment.by_hand.items():
                if level == "Triton" or (level == "CUDA C++" and not extension.missing()):
                    different += _compare(name, level, load(), experiment)
        if SERIES in only and not series.missing():
            for name, call in _rungs().items():
                different += _compare("attention", name, call, EXPERIMENTS["attention"])
    return EXIT["failed" if different else "ok"]


def _rungs() -> dict[str, Callable]:
    """Name -> what of a rung's results has the same bits each time. None is under autograd."""
    def forward(rung: series.Rung, *given: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.detach() for each in given)
        return series.attention(rung, q, k, v)[0]

    def backward(rung: series.Rung, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (each.detach() for each in given)
        y, log_sum = series.attention(series.RUNGS[-1], q, k, v)
        return series.gradients(rung, q, k, v, y, log_sum, torch.ones_like(y))[1:]

    return {**{f"rung {rung.name}": functools.partial(forward, rung) for rung in series.RUNGS},
            **{f"backward {rung.name}": functools.partial(backward, rung) for rung in series.BACKWARD_RUNGS}}


def _compare(name: str, level: str, call, experiment: Experiment) -> int:
    """How many of a kernel's sizes and dtypes give other bits when it runs again."""
    different = 0
    for size, dtype in itertools.product(SIZES[experiment.shape], (torch.bfloat16, torch.float32)):
        if name == "attention" and dtype == torch.float32:
            continue
        same = results(call, experiment, size, dtype) == results(call, experiment, size, dtype)
        different += not same
        print(f"{name}, {level}, {' x '.join(map(str, size))}, {dtype_name(dtype)}: "
              f"{'same bits' if same else 'BITS DIFFER'}")
    return different


if __name__ == "__main__":
    sys.exit(main())
