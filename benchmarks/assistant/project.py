"""A person's project beside this one: modules of the same name, `common` say, that each side must find as its own."""
import builtins
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.assistant.source import is_installed
from common.outcome import UserError
from common.signals import ROOT

OURS = ("common", "benchmarks")


class Project:
    """The folder of a person's file, and those of PYTHONPATH.

    `names` are those of its modules that are imported already, from elsewhere: it gets its own, under a prefix. In
    `others` it finds modules too.
    """

    def __init__(self, folder: Path, prefix: str = "yours", names: frozenset[str] = frozenset(),
                 others: Sequence[Path] = ()):
        self.folder, self.prefix = folder, prefix
        self.folders = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        elsewhere = [path for path in self.folders if Path(path).resolve() != ROOT]
        self.clashing = [name for name in OURS if folder.resolve() != ROOT and PathFinder.find_spec(name, elsewhere)]
        self.own = {*self.clashing, *names}
        self.modules: dict[str, ModuleType] = {}               # theirs that have our names
        for each in (*others, folder):
            if str(each) not in sys.path:
                sys.path.insert(0, str(each))
        if self.clashing:
            self._refuse_late_imports()

    def neighbours(self, *folders: Path) -> frozenset[str]:
        """The names of modules that were imported from its folder and these; without those that are this suite's.

        A module counts by where its package lies: what Inductor compiles is in torch's, in whichever folder it is kept.
        """
        within = self.folder, *folders
        tops = {name.partition(".")[0] for name, module in list(sys.modules.items()) if _lies_in(module, within)}
        return frozenset(top for top in tops - {*OURS, "__main__"} if _lies_in(sys.modules.get(top), within))

    def has(self, file: str) -> bool:
        """Whether a file lies in its folder, and is no installed package's."""
        return _is_in(file, self.folder)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Meanwhile imports find their modules; afterwards ours again.

        Dynamo finds a module by the `__name__` in its globals, so theirs get one that nobody else has.
        """
        if not self.own:
            yield
            return
        path, others = list(sys.path), self._taken_out()
        if self.clashing:
            sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = self._taken_out()
            for name, module in self.modules.items():
                alias = f"{self.prefix}_{name.replace('.', '_')}"
                vars(module)["__name__"] = alias
                sys.modules[alias] = module
            sys.modules.update(others)
            sys.path[:] = path

    def _taken_out(self) -> dict[str, ModuleType]:
        """The modules of these names, which are then not imported any more."""
        names = [name for name in sys.modules if name.partition(".")[0] in self.own]
        return {name: sys.modules.pop(name) for name in names}

    def _refuse_late_imports(self) -> None:
        """Raise UserError where their code imports such a name later, inside a forward: it would get ours."""
        find: Callable[..., Any] = builtins.__import__
        theirs = tuple(path + os.sep for path in self.folders)
        ours = tuple(str(ROOT / name) + os.sep for name in OURS)

        def checked(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            top = name.partition(".")[0]
            file = (globals or {}).get("__file__") or ""
            if level == 0 and top in self.clashing and file.startswith(theirs) and not file.startswith(ours):
                found = getattr(sys.modules.get(top), "__file__", None) or ""
                if not found.startswith(ours):
                    return find(name, globals, locals, fromlist, level)
                raise UserError(f"{file} imports {name} while the model runs: import it at the top of the file, since "
                                f"this suite has a {top} too")
            return find(name, globals, locals, fromlist, level)
        builtins.__import__ = checked


def _lies_in(module: ModuleType | None, folders: Sequence[Path]) -> bool:
    """Whether its file, or a folder of a package without one, is in one of them."""
    names = vars(module) if module else {}                 # not by getattr: torch.classes makes whatever is asked for
    files = [names.get("__file__") or "", *(names.get("__path__") or ())]
    return any(_is_in(file, folder) for file in files for folder in folders)


def _is_in(file: str, folder: Path) -> bool:
    return file.startswith(str(folder) + os.sep) and not is_installed(file)


def folder_of_imports(file: str) -> Path | None:
    """The folder from which a file was imported: of a package's that above the package. None of an installed file, of
    one that is this suite's, and of one that was not imported."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file and name != "__main__" and not is_installed(file):
            depth = len(name.split(".")) - (not file.endswith("__init__.py"))
            folder = Path(file).parents[depth]
            return None if folder.resolve() == ROOT else folder
    return None
