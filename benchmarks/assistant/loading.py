"""A function of a person's file, wherever that lies: it imports its neighbours as a script in that folder would."""
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.assistant.project import Project
from common.outcome import Told

FRAMES = 4                       # of a traceback, the last ones: where a person's own code failed


def load(target: str) -> Callable[[], Any]:
    """The function of "FILE:function". Raises Told where there is none; what the file itself raises is told so, too."""
    name, _, function = target.rpartition(":")
    if not name:
        raise Told(f"{target}: give FILE:FUNCTION, my_model.py:build say")
    path = Path(name).absolute()
    if not path.is_file():
        raise Told(f"{name}: there is no such file")
    project = Project(path.parent)
    known = f"yours_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None:
        raise Told(f"{name}: it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    with told(f"{name} can't be imported"), project.entered():
        spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        functions = [each for each, value in vars(module).items()
                     if callable(value) and getattr(value, "__module__", "") == known
                     and not isinstance(value, type)]
        raise Told(f"{name} has no function {function}; it has {', '.join(functions) or 'none'}")

    def called() -> Any:
        with told(f"{function}() of {name} failed"), project.entered():
            return build()
    return called


@contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever a person's code raises becomes Told, with the last frames of where."""
    try:
        yield
    except Told:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
        message = str(error).strip() or "no message"
        raise Told("\n".join([f"{what}: {type(error).__name__}: {message.splitlines()[0]}", *lines])) from None
