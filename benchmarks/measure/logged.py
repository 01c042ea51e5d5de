"""What a short program prints in a process of its own, under environment variables, without what differs by machine.

    from benchmarks.measure.logged import logged
    print(logged("import torch; ...", TORCH_LOGS="recompiles"))
"""
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from common.block.steps import ROOT

_PREFIX = re.compile(r"^[VIWE]\d{4} [\d:.]+ \d+ (?:\S*/)?(\S+?):\d+\] (?:\[\d+/[\d_]+\] )?", re.MULTILINE)
_PROGRAM = "program.py"


def logged(program: str, like: str = "", most: int = 25, **environment: str) -> str:
    """The first `most` lines of its stdout and stderr, time stamps and folders left out.

    `like`: a pattern, of the lines that are wanted. "FOLDER" in a variable's value is an empty folder of this call; the
    files that were written there are listed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="logged-") as folder:
        kept = Path(folder) / "kept"
        kept.mkdir()
        path = Path(folder) / _PROGRAM
        path.write_text(program)
        own = {name: value.replace("FOLDER", str(kept)) for name, value in environment.items()}
        ran = subprocess.run([sys.executable, str(path)], cwd=kept, env=os.environ | {"PYTHONPATH": str(ROOT)} | own,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = [line.rstrip() for line in shortened(ran.stdout, folder).splitlines()]
        wanted = [line for line in lines if line.strip() and re.search(like, line)]
        files = sorted({_kind(file.relative_to(kept)) for file in kept.rglob("*") if file.is_file()})
        cut = [f"... and {len(wanted) - most} lines more"] if len(wanted) > most > 0 else []
        return "\n".join([*wanted[:most], *cut, *(f"wrote {name}" for name in files)])


def shortened(text: str, folder: str) -> str:
    """Without time stamps, process numbers, and the folders of this machine."""
    text = _PREFIX.sub(r"\1: ", text)
    for path in (folder, *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}, str(ROOT)):
        text = text.replace(f"{path}/", "").replace(path, ".")
    return re.sub(r"\S*logged-\w+/", "", text)                 # torch itself cuts some paths


def _kind(path: Path) -> str:
    """A file's name without what is random in it."""
    random = r"^[a-z0-9]{2}$|^tmp\w{8}$|[a-z0-9]{30,}|\d{4}_\d\d_\d\d\S*|(?<=_)[a-z0-9_]{8}(?=\.log)"
    return "/".join(re.sub(random, "*", part) for part in path.parts)
