"""Questions asked of the steps: `python -m benchmarks` lists them. README.md beside this file says how to read them.

The names from before there were folders still work: `python -m benchmarks.ladder`, `from benchmarks.study import
compare`, `from benchmarks.kernels.norms import rms_norm`. This module finds what they mean.
"""
import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

COMMANDS = ("ladder", "ablation", "sweep", "peers", "components", "fusions", "compare")
MOVED = {
    **{f"benchmarks.{name}": f"benchmarks.studies.{name}" for name in COMMANDS[:-1]},
    "benchmarks.compare": "benchmarks.records.compare",
    "benchmarks.study": "benchmarks.measure.modules",
    **{f"benchmarks.kernels.{name}": f"benchmarks.kernels.triton.{name}"
       for name in ("activations", "attention", "norms", "quantize", "softmax")},
    "benchmarks.kernels.extension": "benchmarks.kernels.cuda.extension",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module by its earlier name, and gives the one that stands for it now."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        return ModuleSpec(name, self, origin=f"{__path__[0]}/__main__.py")       # `python -m` makes it __file__

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])

    def get_code(self, name: str) -> CodeType:
        """What `python -m` runs under that name."""
        command = name.removeprefix("benchmarks.")
        source = f"import sys\nsys.argv[1:1] = [{command!r}]\nfrom benchmarks.__main__ import main\nsys.exit(main())"
        return compile(source, name, "exec")


def _refuse_another_common() -> None:
    """Raise ImportError where `common` is another package than the one beside this folder."""
    ours = Path(__file__).absolute().parents[1]                # this folder may be a link
    loaded = sys.modules.get("common")
    found = loaded.__spec__ if loaded else importlib.util.find_spec("common")
    places = [found.origin, *(found.submodule_search_locations or ())] if found else []
    theirs = next((place for place in places if place), None)
    ours_too = (ours / "common", Path(__file__).resolve().parents[1] / "common")
    if theirs is None or any(Path(theirs).absolute().is_relative_to(place) for place in ours_too):
        return
    raise ImportError(f"benchmarks needs {ours / 'common'}, but `import common` finds {theirs}: "
                      f"begin with `import sys; sys.path.insert(0, {str(ours)!r})`, or give that package another name")


_refuse_another_common()
if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
    sys.meta_path.append(_Moved())
