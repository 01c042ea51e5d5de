"""Records as a study writes them, from numbers that a test makes up."""
import json
from collections import Counter
from pathlib import Path

import torch

from common import PRESETS, steps
from common.block.evidence import Evidence
from common.block.traits import Traits
from common.report.record import check_records, record, row_records, status_record
from common.report.result import Result, Row
from common.runtime.energy import Energy
from common.runtime.iteration import LAUNCHES, MODES
from common.runtime.peaks import BURST
from common.runtime.timing import Timing

FACTS = dict.fromkeys(("cuda", "cudnn", "driver", "triton", "transformer_engine", "git", "sources", "gpu_uuid"))
FACTS |= {"device": "cpu", "name": "a CPU", "cpu_model": "a CPU", "cpu_threads": 2, "torch": "2.9", "python": "3.11"}
GPU = FACTS | {"device": "cuda", "name": "a GPU", "memory_gib": 80.0, "driver": "580", "cuda": "13.0"}
CPU_CONFIG = PRESETS["tiny"].replace(amp_dtype=torch.bfloat16)
STEPS = {step.name: step for step in steps.ALL}


def made(name: str, ms: dict, *, run="one", study="ladder", facts=FACTS, config=CPU_CONFIG, parts=None, status="ok",
         reason="", calibration=None, parameter_dtype="float32", matmul="bfloat16", peak=2**30, enqueue=None,
         flop_bound=1.0, of="eager", limits=None, joules=None, clocked=None, timed=None, engine="PyTorch", variant=None,
         traits=None):
    """The records of one case. `ms`: (mode, launch) -> samples; `parts`: mode -> milliseconds by part; `limits`:
    yardstick -> kind of operation -> ms.

    `name` is a step's, or that of any other case.
    """
    step = STEPS.get(name)
    r = Result(name, config, parameter_dtype, facts, step=step.number if step else None,
               traits=traits or (step.traits if step else Traits(autocast=True)), variant=variant or {}, study=study,
               run=run, matmul=matmul, engine=engine)
    r.errors = {"output": (1e-7, None), "branch": (2e-7, 3e-6)}
    lines = check_records(r)
    for mode in dict.fromkeys([*MODES, *(mode for mode, _ in ms)]):
        for launch in LAUNCHES:
            if samples := ms.get((mode, launch)):
                timing = Timing(list(samples), True, "fake", calibration or {}, list(range(len(samples))),
                                [0.5 * number for number in range(len(samples))])
                r.rows[mode, launch] = Row(timing, flops=1e9, tokens=1, peak_bytes=peak, flop_bound=flop_bound,
                                           enqueue_ms=enqueue if launch == "eager" else None,
                                           limits={BURST: {"matmul": samples[0] / 2}} | (limits or {}))
                if joules:
                    r.rows[mode, launch].energy = Energy(joules, 1.0, 1.0, 1.0)
                r.evidence[mode] = Evidence(Counter({"a kernel": 3}), Counter(), "proven", "fake")
        if mode in r.evidence:
            lines += row_records(r, mode)
        if parts and mode in parts:
            lines.append(record(r, "time by part", "ms", [sum(parts[mode].values())], mode, parts=parts[mode], of=of,
                                clocked=clocked, timed=timed))
    if status != "ok":
        r.status, r.reason = status, reason
        lines.append(status_record(r, "run"))
    return lines


def both(forward, backward, launch="eager") -> dict:
    """Samples of the two passes by one way of launching, for `made`."""
    return {("forward", launch): forward, ("forward+backward", launch): backward}


def write(path: Path, lines: list[dict], end: str = "\n") -> Path:
    """Write records as a study writes them, then `end`."""
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def copied(lines: list[dict]) -> list[dict]:
    """Records that a test may change: those of one case share what they hold."""
    return json.loads(json.dumps(lines))
