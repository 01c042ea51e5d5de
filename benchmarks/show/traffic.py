"""The table of bytes that each step moves through DRAM, from the records of --counters."""
from typing import Any

from benchmarks.records.read import extra, latest, runs
from common.report.record import Record
from common.text import table

WAYS = ("read", "written")
HEADERS = ["step", "block reads GiB", "writes", "attention reads GiB", "writes", "launches of it"]


def traffic(lines: list[Record], mode: str, width: int | None = None) -> str:
    """GiB through DRAM per step, from the latest run that counted them; empty where none did."""
    counted: dict[str, dict[str, Any]] = {}
    for run in runs(lines):
        line = run.find(mode, "dram traffic")
        if line and ("reason" not in extra(line) or run.label not in counted):
            counted[run.label] = extra(line)
    if not counted:
        return ""
    for name, run in latest(lines).items():
        if name not in counted and run.best(mode):
            counted[name] = {"reason": "not counted in this run"}
    rows, notes = [], []
    for name, bytes_of in counted.items():
        if "reason" in bytes_of:
            notes.append(f"n/a because: {bytes_of['reason']}")
            rows.append([name, *["n/a"] * 5])
            continue
        attention = bytes_of.get("attention", {})
        rows.append([name, *_gibibytes(bytes_of["block"]), *_gibibytes(attention), attention.get("launches", "n/a")])
    return "\n".join([f"DRAM traffic of {mode}\n\n{table(rows, HEADERS, width)}", *dict.fromkeys(notes)])


def _gibibytes(part: dict[str, float]) -> list[str]:
    return [f"{part[way] / 2**30:.2f}" if part else "n/a" for way in WAYS]
