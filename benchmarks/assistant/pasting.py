"""Advice pasted into a person's files. Theirs stay as they are: a folder of copies beside them gets the new lines."""
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.assistant.source import Place, line_of_definitions, line_of_imports
from benchmarks.assistant.technique import Advice


def pasted(text: str, advices: Sequence[Advice]) -> str:
    """The text of a file with all of them, from the last line to the first: those above keep their numbers."""
    top = line_of_imports(text) - 1
    for advice in sorted(advices, key=lambda advice: -_place(advice).line):
        text = advice.pasted_into(text)
    definitions = dict.fromkeys(one for advice in advices for one in advice.definitions)
    text = _with_definitions(text, list(definitions)) if definitions else text
    lines = text.split("\n")
    imports = dict.fromkeys(line for advice in advices for line in advice.imports)
    return "\n".join([*lines[:top], *imports, *lines[top:]])


def _with_definitions(text: str, definitions: Sequence[str]) -> str:
    """Behind the imports, with the empty lines that the language's style has."""
    lines, place = text.split("\n"), line_of_definitions(text) - 1
    new = [line for definition in definitions for line in ("", *definition.split("\n"))]
    return "\n".join([*lines[:place], *new, "", *lines[place:]])


def apart(advices: Sequence[Advice]) -> list[Advice]:
    """Those at places of their own: where two overlap, the one that comes first."""
    kept: list[Advice] = []
    for advice in advices:
        if not any(_overlap(_place(advice), _place(other)) for other in kept):
            kept.append(advice)
    return kept


@contextmanager
def copied(folders: Sequence[Path], advices: Sequence[Advice]) -> Iterator[dict[Path, Path]]:
    """Folder -> one like it: links to what is in it, and files of their own where something is pasted in."""
    texts = {}
    for file in {_place(advice).file for advice in advices}:
        here = [advice for advice in advices if _place(advice).file == file]
        texts[Path(file)] = pasted(Path(file).read_text(encoding="utf-8"), here)
    with tempfile.TemporaryDirectory(prefix="written-") as name:
        copies = {folder: Path(name) / str(place) for place, folder in enumerate(folders)}
        for folder, copy in copies.items():
            copy.mkdir()
            _mirror(folder, copy, texts)
        yield copies


def _mirror(folder: Path, into: Path, texts: dict[Path, str]) -> None:
    """Bytecode is left out: Python would write that of the new files into the folder of the old."""
    for entry in os.scandir(folder):
        path, copy = Path(entry.path), into / entry.name
        if path in texts:
            copy.write_text(texts[path], encoding="utf-8")
        elif any(path in file.parents for file in texts):
            copy.mkdir()
            _mirror(path, copy, texts)
        elif entry.name != "__pycache__":
            copy.symlink_to(path)


def _overlap(one: Place, other: Place) -> bool:
    last = [max(place.line, place.last) for place in (one, other)]
    return one.file == other.file and one.line <= last[1] and other.line <= last[0]


def _place(advice: Advice) -> Place:
    assert advice.place is not None
    return advice.place
