"""A module of a person's source with advice pasted into it."""
import importlib.util
import inspect


def pasted(advice, module, path):
    """The module at `path`: the source of another, with the lines that the advice replaces replaced."""
    path.write_text(advice.pasted_into(inspect.getsource(module)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
