"""Seconds of a step of spread blocks by the ring's model: what one GPU computes for them, and what the layout moves."""
from dataclasses import dataclass

import torch

from benchmarks.records import RESULTS
from benchmarks.records.files import files
from benchmarks.records.read import read, runs
from benchmarks.studies.distributed import ring
from benchmarks.studies.distributed.layout import GATHER, REDUCE, TENSOR, Layout
from benchmarks.studies.distributed.sharding import Sharding
from common.block.config import BlockConfig
from common.runtime.iteration import BOTH, FORWARD


@dataclass(frozen=True)
class Modelled:
    """Seconds: a step, what it computes, what it waits for ranks that share its batch, what hides behind a layer."""
    step: float
    compute: float
    waits: float
    gather: float                      # of a layer
    reduce: float                      # of a layer


def of_stack(config: BlockConfig, layers: int, layout: Layout, sharding: Sharding, forward: float, backward: float,
             fp8: bool = False) -> Modelled:
    """Of so many layers, whose forward and backward take one GPU so many seconds each when they are whole.

    What FSDP moves hides behind the neighbouring layers. What tensor parallelism moves hides behind nothing: the next
    matmul needs it. Its ranks split the compute evenly.
    """
    gather = reduce = waits = 0.0
    for each in layout.collectives(config, layers, sharding, torch.float32, fp8):
        seconds = ring.seconds(each.bytes, layout.mesh[each.over], layout.apart(each.over))
        seconds *= 2 if each.kind == REDUCE else 1
        if each.over == TENSOR:
            waits += each.calls * seconds
        elif each.kind == GATHER:
            gather += seconds
        else:
            reduce += seconds
    split = layout.ranks_of_a_batch
    layer = ring.Layer(forward / split, backward / split, gather, reduce, sharding.reshard)
    compute = layers * (layer.forward + layer.backward)
    return Modelled(ring.total(layer, layers) + waits, compute, waits, gather, reduce)


def recorded_layers() -> dict[tuple[str, str], tuple[float, float]]:
    """(step, shape) -> seconds of (forward, backward) of a block on one H200, by its faster launch, in FP32 parameters.
    """
    layers: dict[tuple[str, str], tuple[float, float]] = {}
    for path in files(RESULTS / "h200", "ladder-*"):
        for run in runs(read(path)):
            forward, both = run.best_ms(FORWARD), run.best_ms(BOTH)
            if forward and both and run.info["parameter_dtype"] == "float32":
                layers.setdefault((run.case["name"], run.shape), (forward / 1e3, (both - forward) / 1e3))
    return layers
