"""Files of records, as they are kept: JSON lines, the large ones compressed."""
import errno
import gzip
from pathlib import Path

from benchmarks.records import RESULTS

PLAIN, COMPRESSED = ".jsonl", ".jsonl.gz"
LARGE = 1_000_000                      # bytes, from which on a recorded file is compressed


def files(folder: Path, pattern: str = "*") -> list[Path]:
    """Those in a folder, or in some by a pattern such as "*/noise-*", in the order of their names."""
    return sorted([*folder.glob(pattern + PLAIN), *folder.glob(pattern + COMPRESSED)])


def file_of(stem: Path) -> Path:
    """The file that a name without its ending stands for: the compressed one where there is one."""
    compressed = stem.with_name(stem.name + COMPRESSED)
    return compressed if compressed.exists() else stem.with_name(stem.name + PLAIN)


def stem_of(path: Path) -> Path:
    """Without its ending; a folder of such files as it is."""
    for ending in (COMPRESSED, PLAIN):
        if path.name.endswith(ending):
            return path.with_name(path.name.removesuffix(ending))
    return path


def text_of(path: Path) -> str:
    """What it holds. Raises OSError, or UnicodeDecodeError where that is no text."""
    if not path.name.endswith(COMPRESSED):
        return path.read_text(encoding="utf-8")
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8")
    except EOFError:
        raise OSError(errno.EIO, "cut off: its last bytes are missing") from None
    except gzip.BadGzipFile:
        raise OSError(errno.EINVAL, "not compressed by gzip") from None


def compress_large(folder: Path = RESULTS) -> None:
    """Compress each file of records from LARGE on, in that folder and in those inside of it.

    Of the same records it makes the same bytes. A plain file of any size replaces the compressed one beside it.
    """
    for path in folder.glob("**/*" + PLAIN):
        compressed = path.with_name(path.name + ".gz")
        if path.stat().st_size >= LARGE or compressed.exists():
            compressed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
