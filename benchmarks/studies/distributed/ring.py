"""A model of time on many GPUs: one GPU's compute, and collectives on a ring. No communication runs.

It takes overlap as perfect and the network as idle: real runs are mostly slower, as `published` shows. Nothing in it is
fitted.
"""
import math
from dataclasses import dataclass

BUS = 360e9                            # bytes/s of a ring over a node's 8 H100, or over nodes with 8 NICs of 400 Gbit/s
PER_NODE = 8                           # GPUs
BASE_S, NVLINK_S, NETWORK_S = 8.4e-6, 3.4e-6, 14e-6        # NCCL's own tuning, protocol Simple: of a ring, of a step
CONSTANTS = (f"constants: {BUS / 1e9:g} GB/s on the ring, {PER_NODE} GPUs a node, NCCL's latencies: "
             f"{BASE_S * 1e6:g} us, and {NVLINK_S * 1e6:g} or {NETWORK_S * 1e6:g} us for a step by NVLink or network")


def seconds(size: float, ranks: int, apart: int = 1) -> float:
    """That an all-gather or a reduce-scatter of `size` bytes in all takes; an all-reduce takes twice that.

    Neighbours on the ring are `apart` ranks from each other. So many rings run at once, and between nodes they share
    the NICs. The formula is that of nccl-tests. How many steps go between nodes is that of NCCL's tuning.
    """
    if ranks == 1:
        return 0.0
    nodes = min(ranks, math.ceil(ranks * apart / PER_NODE))
    bus = BUS / min(apart, PER_NODE) if nodes > 1 else BUS
    latency = BASE_S + (ranks - nodes) * NVLINK_S + (nodes - 1) * NETWORK_S
    return latency + size * (ranks - 1) / ranks / bus


@dataclass(frozen=True)
class Layer:
    """Seconds that one GPU computes for a layer, and that its parameters are gathered and its gradients reduced in."""
    forward: float
    backward: float
    gather: float
    reduce: float
    gathered_again: bool = True        # for the backward


def total(layer: Layer, layers: int) -> float:
    """Seconds of a forward and backward, where a layer's gather and the last one's reduction hide behind compute.

    The first gather of each pass and the last reduction have nothing to hide behind.
    """
    forward = layer.gather + (layers - 1) * max(layer.forward, layer.gather) + layer.forward
    again = layer.gather if layer.gathered_again else 0.0
    behind = max(layer.backward, again + layer.reduce)
    return forward + again + (layers - 1) * behind + layer.backward + layer.reduce


def compute_of(wanted: float, layers: int, gather: float, reduce: float) -> tuple[float, float]:
    """(forward, backward) of the layer whose steps take `wanted` seconds: a backward computes twice as much."""
    low, high = 0.0, wanted
    for _ in range(60):                                    # a step grows with its compute: it is searched by halves
        forward = (low + high) / 2 / layers / 3
        if total(Layer(forward, 2 * forward, gather, reduce), layers) < wanted:
            low = forward * layers * 3
        else:
            high = forward * layers * 3
    return forward, 2 * forward
