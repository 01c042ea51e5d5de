"""A function of a person's file, wherever that lies: it imports its neighbours as a script in that folder would."""
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.assistant.project import Project
from common.outcome import UserError

FRAMES = 4                       # of a traceback, the last ones: where a person's own code failed


class Source:
    """The function of a file, imported; calling it builds what it builds.

    With a `prefix` the file and its neighbours are imported beside modules of the same names, under others.
    """

    def __init__(self, path: Path, function: str, prefix: str = "", neighbours: frozenset[str] = frozenset(),
                 others: Sequence[Path] = ()):
        self.path, self.function = path, function
        self.project = Project(path.parent, prefix or "yours", neighbours, others)
        known = path.stem
        if prefix or known in sys.modules:
            known = f"{self.project.prefix}_{path.stem}"
        spec = importlib.util.spec_from_file_location(known, path)
        if spec is None or spec.loader is None:
            raise UserError(f"{path.name}: it is no Python file")
        self.module = sys.modules[known] = importlib.util.module_from_spec(spec)
        with blaming_their_code(f"{path.name} can't be imported"), self.project.entered():
            spec.loader.exec_module(self.module)
        if not callable(getattr(self.module, function, None)):
            raise UserError(f"{path.name} has no function {function}; it has {', '.join(self._functions()) or 'none'}")

    def _functions(self) -> list[str]:
        return [name for name, value in vars(self.module).items()
                if callable(value) and getattr(value, "__module__", "") == self.module.__name__
                and not isinstance(value, type)]

    def __call__(self) -> Any:
        with blaming_their_code(f"{self.function}() of {self.path.name} failed"), self.project.entered():
            return getattr(self.module, self.function)()

    @contextmanager
    def copied_to(self, copies: Mapping[Path, Path]) -> Iterator["Source"]:
        """The same function of a folder like its own, imported anew; forgotten afterwards.

        `copies` are of its folder, and of others that hold modules of its model: folder -> copy.
        """
        before, path = set(sys.modules), list(sys.path)
        own = copies.get(self.project.folder, self.project.folder)
        others = [copy for folder, copy in copies.items() if folder != self.project.folder]
        try:
            yield Source(own / self.path.name, self.function, "written", self.project.neighbours(*copies), others)
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                if name.startswith("written_"):
                    del sys.modules[name]


def load(target: str) -> Source:
    """The function of "FILE:function". Raises UserError where there is none, and for what the file itself raises."""
    name, _, function = target.rpartition(":")
    if not name:
        raise UserError(f"{target}: give FILE:FUNCTION, my_model.py:build say")
    path = Path(os.path.abspath(name))                     # without "..": places are compared by their files
    if not path.is_file():
        raise UserError(f"{name}: there is no such file")
    return Source(path, function)


@contextmanager
def blaming_their_code(what: str) -> Iterator[None]:
    """Whatever a person's code raises becomes UserError, with the last frames of where."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__)
                  if frame.filename != __file__ and not frame.filename.startswith("<frozen")]
        lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in theirs[-FRAMES:]]
        message = str(error).strip() or "no message"
        raise UserError("\n".join([f"{what}: {type(error).__name__}: {message.splitlines()[0]}", *lines])) from None
