"""What each rung waits for, from what ncu recorded."""
import csv
from pathlib import Path

from benchmarks.kernels.cuda.series import BACKWARD_RUNGS, RUNGS
from common.text import figures, table

STALL = "smsp__average_warps_issue_stalled_"
MILLISECONDS, CONFLICTS, TENSOR = ("gpu__time_duration.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
                                   "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
# What each of ncu's reasons means in these kernels.
MEANS = {"math_pipe_throttle": "the arithmetic units", "short_scoreboard": "shared memory",
         "long_scoreboard": "memory", "barrier": "other warps", "wait": "its own last instruction",
         "gmma": "a product", "mio_throttle": "shared memory's queue", "dispatch_stall": "the dispatcher"}
SHOWN = 2                                  # reasons
Kernel = dict[str, float]                  # a metric of ncu's -> its value


def read(path: Path) -> list[Kernel]:
    """The kernels of an ncu run (--csv --print-units base), in their order."""
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) > 2]            # ncu's own messages are lines among them
    number, name, value = (rows[0].index(column) for column in ("ID", "Metric Name", "Metric Value"))
    kernels: dict[str, Kernel] = {}
    for row in rows[1:]:
        kernels.setdefault(row[number], {})[row[name]] = float(row[value].replace(",", ""))
    return list(kernels.values())


def text(path: Path, width: int | None = None) -> str:
    """A row a rung, of a file that holds the kernels of all of them, the backward's last."""
    rows = []
    names = [*(rung.name for rung in RUNGS), *(f"backward {rung.name}" for rung in BACKWARD_RUNGS)]
    for name, kernel in zip(names, read(path), strict=True):
        stalls = waits(kernel)
        shares = [f"{MEANS[reason]} {share:.0%}" for reason, share in list(stalls.items())[:SHOWN]]
        rows.append([name, figures(kernel[MILLISECONDS] / 1e6), f"{kernel[TENSOR]:.0f}",
                     f"{kernel[CONFLICTS] / 1e6:,.1f}", f"{ready(kernel):.0%}", ", ".join(shares)])
    headers = ["rung", "ms", "tensor cores, %", "bank conflicts, M", "ready", "the others wait for"]
    return table(rows, headers, width)


def ready(kernel: Kernel) -> float:
    """The share of the time of all warps in which one could go on, whether it was chosen or not."""
    every = _every(kernel)
    return (every["selected"] + every["not_selected"]) / sum(every.values())


def waits(kernel: Kernel) -> dict[str, float]:
    """Reason -> its share of the time of all warps, the largest first; of those that are known here."""
    every = _every(kernel)
    shares = {reason: every[reason] / sum(every.values()) for reason in MEANS if reason in every}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _every(kernel: Kernel) -> dict[str, float]:
    return {metric.removeprefix(STALL).removesuffix("_per_issue_active.ratio"): value
            for metric, value in kernel.items() if metric.startswith(STALL)}
