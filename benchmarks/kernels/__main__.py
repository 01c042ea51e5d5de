"""Every kernel of this folder once more, forward and backward, on small and odd shapes: what a memory checker watches.

    compute-sanitizer --tool memcheck python -m benchmarks.kernels          # likewise racecheck, initcheck, synccheck

Each kernel runs twice and must give the same bits; whether these are right is what the tests and benchmarks.fusions
check. Exit status: 0 ok, 1 bits differ, 2 usage, 4 skipped for want of a GPU.
"""
import argparse
import itertools
import sys

import torch

from benchmarks import command
from benchmarks.operations import EXPERIMENTS, Experiment, differentiable, outputs, tensors
from common.config import dtype_name
from common.run import EXIT

# Of the rows, so many that each program of a backward takes several; of the columns, so many that a thread holds most.
SIZES = {"hidden": [(3, 1), (5, 1000), (3, 4097), (2000, 256), (1100, 4096), (600, 8200)],
         "ffn": [(3, 1), (5, 1000), (3, 4097), (2000, 256)],
         "scores": [(2, 1, 1), (2, 100, 100), (1, 257, 257), (1, 1031, 1031), (1, 2056, 2056)],
         "heads": [(1, 2, 1, 64), (2, 2, 130, 64), (1, 2, 257, 128), (1, 1, 512, 128)]}


def results(call, experiment: Experiment, size: tuple[int, ...], dtype: torch.dtype) -> list[bytes]:
    """The bits of outputs, and of gradients where there are any, of fixed random numbers."""
    given = tensors(experiment, size, dtype, torch.device("cuda"), seed=0)
    found = outputs(call, given)
    made = [y.detach() for y in found]
    if ys := differentiable(found):
        made += torch.autograd.grad(ys, differentiable(given), [torch.ones_like(y) for y in ys])
    return [t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in made]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: command.usage(parser, message)
    parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels: skipped: there is no GPU", file=sys.stderr)
        return EXIT["skipped"]
    from . import extension  # here, as torch warns where there is no GPU
    different = 0
    for name, experiment in EXPERIMENTS.items():
        for level, load in experiment.by_hand.items():
            if level == "Triton" or (level == "CUDA C++" and not extension.missing()):
                call = load()
                for size, dtype in itertools.product(SIZES[experiment.shape], (torch.bfloat16, torch.float32)):
                    if name == "attention" and dtype == torch.float32:
                        continue
                    same = results(call, experiment, size, dtype) == results(call, experiment, size, dtype)
                    different += not same
                    print(f"{name}, {level}, {' x '.join(map(str, size))}, {dtype_name(dtype)}: "
                          f"{'same bits' if same else 'BITS DIFFER'}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
