"""Every kernel of this folder once more, forward and backward, on small and odd shapes: what a memory checker watches.

    compute-sanitizer --tool memcheck python -m benchmarks.kernels          # likewise racecheck, initcheck, synccheck

Each kernel runs twice and must give the same bits; whether these are right is what the tests and benchmarks.fusions
check. Exit status: 0 ok, 1 where bits differ.
"""
import sys

import torch

from benchmarks.operations import EXPERIMENTS, Experiment, outputs, tensors

from . import extension
from .quantize import layer_norm_fp8, layer_norm_fp8_backward

SIZES = {"hidden": [(3, 1), (5, 1000), (3, 4097), (300, 4096)], "ffn": [(3, 1), (5, 1000), (3, 4097), (64, 4096)],
         "scores": [(2, 1, 1), (2, 100, 100), (1, 257, 257), (1, 1024, 1024)],
         "heads": [(1, 2, 1, 64), (2, 2, 130, 64), (1, 2, 257, 128), (1, 1, 512, 128)]}


def results(call, experiment: Experiment, size: tuple[int, ...]) -> list[bytes]:
    """The bits of outputs, and of gradients where there are any, of fixed random numbers."""
    given = tensors(experiment, size, torch.bfloat16, torch.device("cuda"), seed=0)
    found = outputs(call, given)
    made = [y.detach() for y in found]
    if found[0].requires_grad:
        made += torch.autograd.grad(found, [t for t in given if t.requires_grad], [torch.ones_like(y) for y in found])
    elif len(found) == 4:                                                # LayerNorm to FP8: its backward is a function
        x, weight, *_ = given
        made += layer_norm_fp8_backward(x, weight, *found[2:], torch.ones_like(x))
    return [t.flatten().view(torch.uint8).cpu().numpy().tobytes() for t in made]


def main() -> int:
    if not torch.cuda.is_available():
        print("kernels: error: there is no GPU", file=sys.stderr)
        return 2
    different = 0
    for name, experiment in EXPERIMENTS.items():
        for level, load in experiment.by_hand.items():
            if level == "Triton" or (level == "CUDA C++" and not extension.missing()):
                call = layer_norm_fp8 if name == "LayerNorm to FP8" else load()
                for size in SIZES[experiment.shape]:
                    same = results(call, experiment, size) == results(call, experiment, size)
                    different += not same
                    print(f"{name}, {level}, {' x '.join(map(str, size))}: {'same bits' if same else 'BITS DIFFER'}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
