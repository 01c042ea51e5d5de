"""What others have published of FSDP on many GPUs, and how far the ring's model is from it."""
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.studies.distributed import ring
from common.text import table

NO_COMMUNICATION = "model, no communication ran"
LLM_FOUNDRY = "llm-foundry, scripts/train/benchmarking"
TORCHTITAN = "torchtitan, llama3_h100_202412"


@dataclass(frozen=True)
class Series:
    """One model at several sizes, the batch of a GPU being the same. All are FSDP in BF16 unless told otherwise."""
    source: str
    model: str
    parameters: float
    layers: int
    tokens: int                        # of a GPU in one step
    reduced_in: int                    # bytes
    rates: dict[int, float]            # GPUs -> tokens/s of each


# tokens/s of one GPU, as the sources' tables have them. What gradients are reduced in is assumed.
SERIES = (
    Series(LLM_FOUNDRY, "760M, batch 24", 0.760e9, 24, 24 * 2048, 2, {16: 68_551, 32: 67_971}),
    Series(LLM_FOUNDRY, "1B, batch 20", 1.316e9, 24, 20 * 2048, 2, {16: 46_037, 32: 45_130, 64: 44_402}),
    Series(LLM_FOUNDRY, "3B, batch 6", 2.652e9, 32, 6 * 2048, 2, {32: 23_021, 64: 22_525}),
    Series(LLM_FOUNDRY, "7B, batch 6", 6.659e9, 32, 6 * 2048, 2, {8: 10_643, 128: 10_475, 256: 10_119, 512: 9_670}),
    Series(LLM_FOUNDRY, "13B, batch 2", 12.85e9, 40, 2 * 2048, 2, {8: 4_792, 16: 4_767, 32: 4_811, 64: 4_800}),
    Series(LLM_FOUNDRY, "13B, batch 16, checkpointed", 12.85e9, 40, 16 * 2048, 2, {128: 5_080, 256: 4_989, 512: 4_952}),
    Series(LLM_FOUNDRY, "30B, batch 8, checkpointed", 29.98e9, 48, 8 * 2048, 2, {128: 2_199, 512: 2_115}),
    Series(LLM_FOUNDRY, "70B, batch 8, checkpointed", 64.86e9, 80, 8 * 2048, 2, {128: 1_058, 512: 1_007}),
    Series(TORCHTITAN, "Llama 3 8B, eager", 8.03e9, 32, 2 * 8192, 4, {8: 5_762, 128: 5_605}),
    Series(TORCHTITAN, "Llama 3 8B, compiled", 8.03e9, 32, 2 * 8192, 4, {8: 6_667, 128: 6_514}),
    Series(TORCHTITAN, "Llama 3 8B, compiled, FP8", 8.03e9, 32, 2 * 8192, 4, {8: 8_532, 128: 8_380}),
    Series("torchtitan, H200", "Llama 3 8B, compiled, FP8", 8.03e9, 32, 2 * 8192, 4, {32: 10_938, 64: 10_753}),
)


@dataclass(frozen=True)
class Point:
    """How much of its rate at the fewest GPUs a GPU keeps at more of them."""
    series: Series
    fewest: int
    ranks: int
    published: float
    predicted: float

    @property
    def miss(self) -> float:
        return self.predicted - self.published


def points() -> Iterator[Point]:
    """Of every series, all but the first size, which gives its compute."""
    for series in SERIES:
        fewest, *others = sorted(series.rates)
        at_fewest = series.tokens / series.rates[fewest]
        forward, backward = ring.compute_of(at_fewest, series.layers, *_moved(series, fewest))
        for ranks in others:
            at_more = ring.total(ring.Layer(forward, backward, *_moved(series, ranks)), series.layers)
            yield Point(series, fewest, ranks, series.rates[ranks] / series.rates[fewest], at_fewest / at_more)


def _moved(series: Series, ranks: int) -> tuple[float, float]:
    """Seconds that a layer's parameters are gathered in, in 16 bits, and its gradients are reduced in."""
    of_layer = series.parameters / series.layers
    return ring.seconds(2 * of_layer, ranks), ring.seconds(series.reduced_in * of_layer, ranks)


def text(width: int | None = None) -> str:
    """The table, and the misses in short."""
    rows, misses = [], []
    for point in points():
        misses.append(point.miss)
        rows.append([f"{point.series.source}: {point.series.model}", f"{point.fewest} to {point.ranks}",
                     f"{point.published:.3f}", f"{point.predicted:.3f}", f"{point.miss:+.3f}"])
    headers = [NO_COMMUNICATION, "GPUs", "kept, published", "predicted", "miss"]
    worst = max(misses, key=abs)
    in_short = (f"{len(misses)} points: the miss is {statistics.fmean(misses):+.3f} in the mean, {worst:+.3f} at the "
                "worst; overlap is taken as perfect, so expect less")
    return "\n\n".join([table(rows, headers, width), in_short, ring.CONSTANTS])
