"""A module of a person's source with advice pasted into it."""
import importlib.util
import inspect
import sys

from benchmarks.assistant import pasting


def pasted(advice, module, path):
    """The module at `path`: the source of another, with the lines that the advice replaces replaced."""
    return all_pasted([advice], module, path)


def all_pasted(advices, module, path):
    """With several."""
    path.write_text(pasting.pasted(inspect.getsource(module), list(advices)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)      # older Dynamo imports it by its name
    spec.loader.exec_module(made)
    return made
