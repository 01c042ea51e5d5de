"""What should you change in your own model, what does it buy, and is it still the same function? The ladder on it.

    python -m benchmarks assistant my_model.py:build
    python -m benchmarks assistant my_model.py:build --inference --quick --json records.jsonl

`build()` returns (model, inputs), (model, inputs, loss) or a Task. inputs are a tuple, or a dict by keyword, of what
the model is called with; loss maps the model's output to a scalar. Each technique that applies is put into the model,
held against it in FP64, and timed beside it in interleaved rounds.
Exit status: 0 ok, 1 failed, 2 usage, 3 out of memory, 130 interrupted.
"""
import argparse
import logging
import os
from pathlib import Path
from typing import Any

from benchmarks.assistant.loading import load
from benchmarks.assistant.optimize import Interrupted, look, optimize, why
from benchmarks.assistant.page import write_page
from benchmarks.assistant.techniques import EVERY
from common.command_line import Parser, check_seed, device_of, early_ends, hush, mistakes, open_records, tell
from common.outcome import EXIT
from common.runtime import compiler, exclusive

NAME = "assistant"
NAMES = tuple(each.name for each in EVERY)


def parser() -> Parser:
    """The command line."""
    made = Parser(NAME, prog=f"python -m benchmarks {NAME}", description=__doc__,
                  formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("target", metavar="FILE:FUNCTION", help="the function that builds the model and its inputs")
    add("--inference", action="store_true", help="forward alone")
    add("--quick", action="store_true", help="6 rounds, of a large model in one pass: a look, not a measurement")
    add("--look", action="store_true", help="read it alone: where its time goes, and what could be done, in seconds")
    add("--why", metavar="TECHNIQUE", choices=NAMES, help="where this one applies and where not, and whether it fired")
    add("--only", metavar="TECHNIQUE", action="append", choices=NAMES, default=[],
        help=f"try this one, once or more: {', '.join(NAMES)}")
    add("--rounds", type=int, metavar="N", help="interleaved samples of each rung (default: 20 on a GPU, 12 on a CPU)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (default: auto)")
    add("--seed", type=int, default=0, help="of cotangents and order (default: 0)")
    add("--cards", action="store_true", help="show those of the model as it is and of the whole ladder, too")
    add("--json", metavar="FILE", help="append one JSON line per metric")
    add("--report", metavar="FILE.md", help="write the report as Markdown, its chart beside it")
    return made


def _page(name: str | None) -> Path | None:
    """Where the report goes. Raises ValueError where it could not."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix != ".md":
        raise ValueError(f"--report {name}: give a name that ends in .md")
    if not path.parent.is_dir():
        raise ValueError(f"--report {name}: there is no folder {path.parent}")
    return path


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    hush()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)         # the report has the breaks, each with its line
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)      # and what can't be captured
    chosen = parser().parse_args(argv)
    with mistakes(NAME):
        device = device_of(chosen.device)
        check_seed(chosen.seed)
        if chosen.rounds is not None and chosen.rounds < 6:
            raise ValueError(f"--rounds {chosen.rounds}: give at least 6, fewer bound no median")
        build = load(chosen.target)
        file = open_records(chosen.json)
        page = _page(chosen.report)
    techniques = [each for each in EVERY if each.name in (chosen.only or NAMES)]
    with early_ends(NAME, file), exclusive.alone(device, NAME):
        compiler.use_private_caches()
        how: dict[str, Any] = {"name": os.path.basename(chosen.target), "inference": chosen.inference,
                               "seed": chosen.seed, "device": device}
        if chosen.why:
            tell(str(why(chosen.why, build, **how)))
            return EXIT["ok"]
        if chosen.look:
            looked = look(build, techniques=techniques, **how)
            tell(str(looked))
            return EXIT["failed" if looked.faults else "ok"]
        try:
            result = optimize(build, quick=chosen.quick, rounds=chosen.rounds, file=file, techniques=techniques, **how)
        except Interrupted as ended:
            tell(f"{ended.result}\n\nit was interrupted: what was not reached is missing\n{ended.result.times}")
            if page:
                write_page(ended.result, page)
            raise ended.by from None
        tell(f"{result}\n\n{result.times}")
        if chosen.cards:
            tell("\n" + "\n\n".join(result.cards()))
        if page:
            write_page(result, page)
        return EXIT["failed" if result.failures else "ok"]
