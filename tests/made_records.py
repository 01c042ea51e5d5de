"""Records as a study writes them, from numbers that a test makes up."""
from collections import Counter

import torch

from common import PRESETS, report
from common.evidence import Evidence
from common.timing import Timing

FACTS = dict.fromkeys(("cuda", "cudnn", "driver", "triton", "transformer_engine", "git"))
FACTS |= {"device": "cpu", "name": "a CPU", "cpu_threads": 2, "torch": "2.9", "python": "3.11"}
GPU = FACTS | {"device": "cuda", "name": "a GPU", "memory_gib": 80.0, "driver": "580", "cuda": "13.0"}
CPU_CONFIG = PRESETS["tiny"].replace(amp_dtype=torch.bfloat16)


def made(step: str, ms: dict, *, run="one", study="ladder", facts=FACTS, config=CPU_CONFIG, parts=None, status="ok",
         reason="", calibration=None, parameter_dtype="float32", matmul="bfloat16", peak=2**30, enqueue=None,
         flop_bound=1.0, of="eager", clocked=None, timed=None, engine="PyTorch"):
    """The records of one case. `ms`: (mode, launch) -> samples; `parts`: mode -> milliseconds by part."""
    r = report.Report(step, config, parameter_dtype, facts, study=study, run=run, matmul=matmul, engine=engine)
    r.errors = {"output": (1e-7, None), "branch": (2e-7, 3e-6)}
    lines = report.check_records(r)
    for mode in report.MODES:
        for launch in report.LAUNCHES:
            if samples := ms.get((mode, launch)):
                r.rows[mode, launch] = report.Row(
                    Timing(list(samples), True, "fake", calibration or {}), flops=1e9, tokens=1, peak_bytes=peak,
                    limit_ms=samples[0] / 2, flop_bound=flop_bound,
                    enqueue_ms=enqueue if launch == "eager" else None)
                r.evidence[mode] = Evidence(Counter({"a kernel": 3}), Counter(), "proven", "fake")
        if mode in r.evidence:
            lines += report.row_records(r, mode)
        if parts and mode in parts:
            lines.append(report.record(r, "time by part", "ms", [sum(parts[mode].values())], mode, parts=parts[mode],
                                       of=of, clocked=clocked, timed=timed))
    if status != "ok":
        r.status, r.reason = status, reason
        lines.append(report.record(r, "status", "", [], "run"))
    return lines


def both(forward, backward, launch="eager") -> dict:
    """Samples of the two passes by one way of launching, for `made`."""
    return {("forward", launch): forward, ("forward+backward", launch): backward}
