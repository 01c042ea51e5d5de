"""Converts the recorded files of schema 1 to schema 2, once: names are taken apart into a `case`. Then it is deleted.

    python -m benchmarks.records.convert
"""
import json
import re
from pathlib import Path

from benchmarks.records import RESULTS
from common import steps
from common.record import PASSES, SCHEMA

SPLIT = {                              # file -> what a record goes by; a folder of files takes its place
    "h200/fusions-te-tutorial": lambda line: case_of(line)["name"],
    "cpu/fusions-cpu": None,
    "h200/sweep-gpt2": lambda line: case_of(line)["variant"].get("axis") or AXIS_OF[shape_and_run(line)],
    "h200/peers-te-tutorial": lambda line: line["benchmark"]["extra_info"]["run"],
    "h200/peers-gpt2": lambda line: line["benchmark"]["extra_info"]["run"],
    "h200/noise-gpt2": lambda line: line["benchmark"]["extra_info"]["run"],
    "h200/noise-te-tutorial": lambda line: line["benchmark"]["extra_info"]["run"],
}
AXIS_OF: dict = {}


def case_of(line):
    return line["benchmark"]["extra_info"]["case"]


def shape_and_run(line):
    return line["model"]["name"], line["benchmark"]["extra_info"]["run"]


def name_and_variant(info, study, dtype):
    """(step, name, variant) out of the old name."""
    old = info["step"]
    by_name = {step.name: step for step in steps.ALL}
    config = info["config"]
    usual = "float16" if info["device"] == "cuda" else "bfloat16"
    autocast = True
    number = None
    if old == study:
        return None, None, {}
    if old in by_name:
        step = by_name[old]
        number, name, variant, autocast = step.number, old, {}, step.traits.autocast
    elif study == "ablation":
        optimizations = [] if old == "FP32" else old.split(" + ")
        name, variant, autocast = "block", {"optimizations": optimizations}, "autocast" in optimizations
    elif study == "components":
        name, way = old.split(", ")
        variant, autocast = {"way": way}, False
    elif study == "fusions":
        name, size, level = old.split(", ")
        variant = {"size": None if size == "all sizes" else [int(n) for n in size.split(" x ")], "level": level}
        autocast = False
    elif study == "peers":
        name, variant = peer(old)
    else:
        raise ValueError(old)
    if autocast and config["amp_dtype"] != usual:
        variant["amp_dtype"] = config["amp_dtype"]
    if config["dropout"]:
        variant["dropout"] = config["dropout"]
    if autocast and info["parameter_dtype"] != "float32":
        variant["parameters"] = info["parameter_dtype"]
    if number == 0 and info["parameter_dtype"] != "float32":
        variant["parameters"] = info["parameter_dtype"]
    if config["fp8_weights"] != "per-call":
        variant["fp8_weights"] = config["fp8_weights"]
    if config["fp8_attention"]:
        variant["fp8_attention"] = True
    return number, name, variant


def peer(old):
    if match := re.fullmatch(r"te.TransformerLayer (FP8|16-bit), (y in \w+)", old):
        return "te.TransformerLayer", {"precision": match[1], "output": match[2]}
    if match := re.fullmatch(r"te.TransformerLayer FP8, (tuned|casts compiled)", old):
        return "te.TransformerLayer", {"precision": "FP8", "as": match[1]}
    if match := re.fullmatch(r"torchao float8 (\w+), compiled", old):
        return "torchao float8", {"recipe": match[1], "compiled": True}
    name, _, compiled = old.partition(", ")
    assert compiled in ("", "compiled"), old
    return name, {"compiled": True} if compiled else {}


def converted(line):
    info = line["benchmark"]["extra_info"]
    extra = line["metric"]["extra_info"]
    study = info.pop("study")
    step, name, variant = name_and_variant(info, study, line["benchmark"]["dtype"])
    del info["step"]
    metric = line["metric"]["name"]
    if metric == "size done":
        variant = {"axis": extra.pop("axis"), "size": extra.pop("size")}
    mode = line["benchmark"]["mode"]
    case = {"study": study, "step": step, "name": name, "variant": variant, "pass": mode if mode in PASSES else None,
            "launch": extra.pop("launch", None)}
    order = ("status", "reason", "config", "parameter_dtype", "autocast", "residual", "engine", "device", "git")
    line["benchmark"]["extra_info"] = {"schema": SCHEMA, "case": case} | {key: info.pop(key) for key in order} | {
        "sources": None} | info
    if metric == "latency" and line["metric"]["benchmark_values"]:
        extra |= {"rounds": None, "offsets_s": None}
    runner = line["runners"][0]
    machine = runner["extra_info"]
    cpu = runner["name"] if runner["type"] == "cpu" else None
    runner["extra_info"] = {"driver": machine.pop("driver"), "compute_capability": machine.pop("compute_capability"),
                            "gpu_uuid": None, "cpu_model": cpu} | machine
    return line


def slug(text):
    return re.sub(r"\W+", "-", str(text)).strip("-").lower()


def main():
    for path in sorted(RESULTS.glob("*/*.jsonl")):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        if lines[0]["benchmark"]["extra_info"].get("schema"):
            continue
        lines = [converted(line) for line in lines]
        key = SPLIT.get(str(path.relative_to(RESULTS).with_suffix("")))
        if key is None:
            write(path, lines)
            continue
        AXIS_OF.clear()
        for line in lines:
            if line["metric"]["name"] == "size done":
                AXIS_OF.setdefault(shape_and_run(line), case_of(line)["variant"]["axis"])
        groups: dict = {}
        whole = []
        for line in lines:
            if (line["metric"]["name"] == "wall time" and "sweep" in path.stem) or (case_of(line)["name"] is None and (
                    "fusions" in path.stem)):
                whole.append(line)
            else:
                groups.setdefault(key(line), []).append(line)
        folder = path.with_suffix("")
        folder.mkdir(exist_ok=True)
        by_run = "run" in key.__code__.co_consts
        for number, (name, some) in enumerate(groups.items(), 1):
            words = f"{number}" if by_run else f"{number}-{slug(name)}"
            last = whole if number == len(groups) else []
            write(folder / f"{words}.jsonl", some + last)
        path.unlink()


def write(path: Path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(path.relative_to(RESULTS), path.stat().st_size)


if __name__ == "__main__":
    main()
