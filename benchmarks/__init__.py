"""Questions asked of the steps: `python -m benchmarks` lists them. README.md beside this file says how to read them."""
import importlib.util
import sys
from pathlib import Path


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
