"""What a reader of records must know besides the figures: machine, versions, commit, and whatever went wrong."""
from collections.abc import Iterable

from benchmarks.records.read import Run, extra, info, metric, runner, shape, versions
from common.report.record import NOT_A_BLOCK, Record
from common.runtime import engine, machine


def cautions(runs: Iterable[Run]) -> list[str]:
    """What a reader of these runs must know besides their figures, a line each: none where all is as it should be."""
    sentences: dict[str, None] = {}
    for run in runs:
        if run.status != "ok":
            sentences[f"{run.label}: {run.status}: {run.info['reason']}"] = None
        if slowed := run.info.get("slowed_percent"):
            sentences[f"every row was made {slowed:g} % slower on purpose"] = None
        sentences |= dict.fromkeys(unproven(run))
        for line in run.lines:
            sentences |= dict.fromkeys(_cautions_of(line, run.label))
    return list(sentences)


def _cautions_of(line: Record, what: str) -> list[str]:
    sentences = []
    readings = runner(line)["extra_info"]
    if reason := extra(line).get("reason"):
        sentences.append(f"{what}, {line['benchmark']['mode']}: {reason}")
    if readings.get("throttled"):
        sentences.append(f"throttled meanwhile: {', '.join(readings['throttled'])}")
    if runner(line)["type"] == "cpu" and machine.busy(readings):
        sentences.append(f"the machine was busy with other work too: load {readings['load_average']:.0f}, "
                    f"{readings['cpu_threads']} threads")
    if readings.get("neighbours"):
        sentences.append("other processes were on this GPU: " + ", ".join(readings["neighbours"]))
    return sentences


def unproven(run: Run) -> list[str]:
    """A line for each pass of a run whose kernels do not bear its claim out."""
    if engine.Engine.of_record(run.info["engine"]).is_emulated:
        return []
    sentences = []
    for line in run.lines:
        if metric(line) == "launches" and extra(line).get("verdict") == "unproven":
            sentences.append(f"{run.label}, {line['benchmark']['mode']}: unproven: {extra(line).get('because', '')}")
    return sentences


# The libraries that every record names; those of some cases alone are in `python -m benchmarks records`.
EVERYWHERE = ("torch", "cuda", "cudnn", "triton")


OF_THE_RUN = ("wall time", "peak")     # metrics of no case: written last, with the shape of the command line


def provenance(lines: list[Record]) -> str:
    """One sentence: the machine, the versions and the commit of a set of records."""
    known = {name for line in lines for name in versions(line)}
    software = ", ".join(f"{name} {_versions_of(name, lines)}" for name in EVERYWHERE if name in known)
    engines = sorted({versions(line)["transformer_engine"] for line in lines if "transformer_engine" in versions(line)})
    shapes = list(dict.fromkeys(shape(line) for line in lines if metric(line) not in OF_THE_RUN))
    shapes = [each for each in shapes if each != NOT_A_BLOCK] or shapes
    sizes = shapes[0] if len(shapes) == 1 else f"{len(shapes) or 'no'} shapes"
    driver = runner(lines[0])["extra_info"].get("driver")
    return (f"{runner(lines[0])['name']}, {sizes}; {software}, Transformer Engine {' and '.join(engines) or 'none'}"
            f"{f', driver {driver}' if driver else ''}; commit {commits(lines)}.")


def _versions_of(library: str, lines: list[Record]) -> str:
    return " and ".join(sorted({versions(line).get(library, "unknown") for line in lines}))


def commits(lines: Iterable[Record]) -> str:
    """Those that the records are of, in words."""
    names = list(dict.fromkeys(_short(info(line).get("git")) for line in lines))
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _short(commit: str | None) -> str:
    if not commit:
        return "not recorded"
    return commit[:7] + ("+" if "+" in commit else "")
