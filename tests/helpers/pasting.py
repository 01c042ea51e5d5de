"""A module of a person's source with advice pasted into it."""
import importlib.util
import inspect


def pasted(advice, module, path):
    """The module at `path`: the source of another, with the lines that the advice replaces replaced."""
    return all_pasted([advice], module, path)


def all_pasted(advices, module, path):
    """With several, from the last line to the first: those above keep their numbers."""
    text = inspect.getsource(module)
    for advice in sorted(advices, key=lambda advice: -advice.place.line):
        text = advice.pasted_into(text)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
