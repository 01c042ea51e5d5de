"""Which sources ran: the commit they are at, and one digest over all of them that anybody can compute again."""
import functools
import hashlib
import os
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

from ..block.steps import ALL, ROOT

FOLDERS = ("common", "benchmarks")
ENDINGS = (".py", ".cu", ".cuh")


def files(root: Path = ROOT) -> list[Path]:
    """Every source file of the scripts, `common/` and `benchmarks/`, in the order of their paths' bytes."""
    sources = [root / step.path.name for step in ALL]
    for folder in FOLDERS:
        sources += [path for path in (root / folder).rglob("*") if path.suffix in ENDINGS and path.is_file()]
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix().encode())


@functools.cache
def digest(root: Path = ROOT) -> str:
    """The SHA-256, in hexadecimal, of all source files one behind the other. `common/README.md` has it as a command."""
    return digest_of(files(root))


def digest_of(paths: Iterable[Path]) -> str:
    """The same of these files."""
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    return content.hexdigest()


def commit(root: Path = ROOT) -> str | None:
    """The commit that these files are at, and behind a "+" a digest of what has been changed since.

    The variable GIT_COMMIT where there is no git; None where it is not set either. What runs write, and README.md, is
    left out: a second process would seem to be of other code than the first, whose records it finds there.
    """
    try:
        changes = _git(root, "diff", "--no-ext-diff", "--binary", "HEAD", "--", ".", ":!benchmarks/results", ":!*.md")
        name = _git(root, "rev-parse", "--short", "HEAD").decode().strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT")
    return f"{name}+{zlib.crc32(changes):08x}" if changes else name


def _git(root: Path, *arguments: str) -> bytes:
    """What git prints. Raises OSError or SubprocessError where there is no git, or no repository."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]      # a mount may be another user's
    return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout
