"""Processes that measured the same steps on one machine: their records, with the noise that real ones have."""
import random

from tests.helpers.made_records import both, made

STEPS = ("0_baseline", "1_cublas", "2_sdpa", "3_compile")


def process(seed: int, *, clock=1.0, slower=None, noise=0.004, samples=40, calibrated=True, **more) -> list[dict]:
    """The records of one process on a machine whose clock is `clock`: everything takes that much longer.

    Within a process samples scatter by `noise`, between processes medians do by 0.3 %. `slower`: step -> factor.
    """
    draw = random.Random(seed)

    def taken(ms: float) -> list[float]:
        return [ms * clock * draw.gauss(1, noise) for _ in range(samples)]

    lines = []
    for number, step in enumerate(STEPS):
        bias = draw.gauss(1, 0.003) * (slower or {}).get(step, 1.0)
        ms = both(taken(8.0 / 2**number * bias), taken(24.0 / 2**number * bias))
        calibration = {"gemm": taken(1.4), "copy": taken(0.3)} if calibrated else None
        lines += made(step, ms, run=f"run {seed}", calibration=calibration, **more)
    return lines


def several(first: int, count: int) -> list[dict]:
    """The records of so many processes."""
    lines = []
    for seed in range(first, first + count):
        lines += process(seed)
    return lines


NOISE = several(100, 6)
