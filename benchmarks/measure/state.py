"""The state behind a callable: what its calls read and change besides their inputs, and how to put it back."""
import contextlib
import functools
import pickle
import random
import types
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure.calls import first_names, modules_of, named_buffers, named_parameters, uncompiled

_FOREIGN = ("torch", "numpy", "builtins", "typing", "types", "functools", "collections", "triton", "transformer_engine")
_DEEPEST = 12
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_modules"}         # parameters, buffers, hooks: no generators
_LONGEST = 1000                            # what a longer container holds is data: it is put back, not looked into
Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


class State:
    """What is behind some callables now: attributes, containers, tensors that are no parameters, random generators.

    `restore` puts all of it back: names that are new are removed, lists and dicts hold what they held, tensors have
    their values. Values of parameters are not kept: of a large model a copy might not fit.
    """

    def __init__(self, *calls: Callable):
        self.generators: list[Generator] = []
        self.results: list[Tensor] = []                  # of earlier calls, with the graph that they came from
        self._undo: list[Callable[[], object]] = []
        self._is_as_it_was: list[Callable[[], bool]] = []
        self._seen: dict[int, Any] = {}                  # kept alive, so that an id stays what it stands for
        self._buffers = {id(t) for call in calls for t in named_buffers(call).values()}
        self._depth = 0
        for call in calls:
            for behind in (call, *modules_of(call)):
                self._visit(behind)

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()

    def has_changed(self) -> bool:
        """Whether an attribute, a list or a dict holds something else now, or a tensor in there that is no buffer."""
        return not all(each() for each in self._is_as_it_was)

    def _visit(self, value: Any) -> None:
        value = uncompiled(value) if callable(value) else value
        constant = isinstance(value, (str, bytes, int, float, type(None), type, nn.Parameter))
        if constant or id(value) in self._seen or self._depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        self._depth += 1
        self._keep(value)
        self._depth -= 1

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_leaf:
                self.results.append(value)
            self._keep_tensor(value)
        elif isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(value)
            self._undo.append(_generator_undo(value))
        elif isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
            self._keep_container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._visit_all(value)
        elif isinstance(value, types.FunctionType):
            if not _is_foreign(value.__module__):        # what torch.compile made has state of its own
                self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__)
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, nn.Module):
            self._keep_module(value)
        elif hasattr(value, "__dict__") and not _is_foreign(type(value).__module__):       # a config, a cache
            self._keep_container(vars(value))

    def _visit_all(self, values: Any) -> None:
        if len(values) <= _LONGEST:
            for value in list(values):
                self._visit(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):        # a cell that is still empty
                self._visit(cell.cell_contents)
                self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        self._visit_all(function.__defaults__ or ())
        for name in _globals_of(function):
            value = function.__globals__[name]
            if isinstance(value, (types.FunctionType, nn.Module, MutableSequence, MutableMapping, torch.Generator)):
                self._visit(value)

    def _keep_module(self, module: nn.Module) -> None:
        """Its hooks stay the same ones; what they refer to is not the module's."""
        self._keep_container(vars(module), visits=False)
        hooks: list[tuple[dict, dict]] = []
        for name, value in vars(module).items():
            if not name.endswith("_hooks"):
                self._visit(value)
            elif isinstance(value, dict):
                hooks.append((value, dict(value)))
            elif isinstance(value, (MutableMapping, MutableSequence, MutableSet)):         # of a person's own
                self._keep_container(value, visits=False)
        self._keep_hooks(hooks)

    def _keep_hooks(self, hooks: list[tuple[dict, dict]]) -> None:
        """(those of one kind, what they are now): a module has a dozen, almost all of them empty."""
        self._is_as_it_was.append(lambda: all(_same_items(value, before) for value, before in hooks))

        def undo() -> None:
            for value, before in hooks:
                if not _same_items(value, before):
                    value.clear()
                    value.update(before)
        self._undo.append(undo)

    def _keep_tensor(self, t: Tensor) -> None:
        if t.layout != torch.strided or t.is_meta or (t.requires_grad and t.is_leaf):
            return
        value = t.detach().clone()
        if id(t) not in self._buffers:
            self._is_as_it_was.append(lambda: t.shape == value.shape and torch.equal(t.detach(), value))

        def undo() -> None:
            with contextlib.suppress(RuntimeError):                            # an expanded one can't be written to
                if t.shape == value.shape:
                    _put_back(t, value)
        self._undo.append(undo)

    def _keep_container(self, value: Any, visits: bool = True) -> None:
        """A dict, list, set or what is like them: what it holds, then what that holds."""
        if isinstance(value, MutableMapping):
            items = dict(value)
            self._is_as_it_was.append(lambda: _same_items(dict(value), items))

            def undo_mapping() -> None:
                if not _same_items(dict(value), items):
                    value.clear()
                    value.update(items)
            self._undo.append(undo_mapping)
            self._visit_all(items.values() if visits else ())
            return
        members = list(value)
        self._is_as_it_was.append(lambda: _same_members(value, members))

        def undo() -> None:
            if not _same_members(value, members):
                value.clear()
                for member in members:
                    value.add(member) if isinstance(value, MutableSet) else value.append(member)
        self._undo.append(undo)
        self._visit_all(members if visits else ())


class _Generators(State):
    """The random generators alone: of all else nothing is kept."""

    def _keep_tensor(self, t: Tensor) -> None:
        pass

    def _keep_container(self, value: Any, visits: bool = True) -> None:
        self._visit_all(value.values() if isinstance(value, MutableMapping) else value)

    def _keep_module(self, module: nn.Module) -> None:
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                self._visit(value)


class Start:
    """The state from which every run of a callable begins: its buffers, no gradients, the same random numbers.

    With `whole`, all else that its calls may change, too: attributes, lists and dicts. Parameters that its calls
    write to, by the names of `written`, are as buffers here.
    """

    def __init__(self, call: Callable, whole: bool = False, written: Collection[str] = ()):
        parameters = named_parameters(call)
        self.parameters = {name: parameters[name] for name in first_names(parameters).values()}     # a tied one once
        self.buffers = named_buffers(call) | only_written(parameters, written)
        self.before = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
        state = State(call) if whole else _Generators(call)
        self._generators, self._state = state.generators, state if whole else None

    def begin(self, seed: int) -> None:
        """Go back to it."""
        if self._state is not None:
            self._state.restore()
        for name, buffer in self.buffers.items():
            _put_back(buffer, self.before[name])
        for parameter in self.parameters.values():
            parameter.grad = None
        seed_all(seed, self._generators)

    def random_states(self) -> list[bytes]:
        """Where all random numbers are that it seeds: equal states, where none were taken in between."""
        return _states_of(self._generators)


def only_written(parameters: Mapping[str, Tensor], written: Collection[str]) -> dict[str, Tensor]:
    """Those of these names."""
    return {name: t for name, t in parameters.items() if name in written}


def _put_back(t: Tensor, value: Tensor) -> None:
    """Its value, and outside of any graph, which a call that writes to it leaves behind it."""
    with torch.no_grad():
        if t.grad_fn is not None:
            t.detach_()
        t.copy_(value)


def _same_items(a: Mapping, b: Mapping) -> bool:
    return len(a) == len(b) and list(a) == list(b) and all(a[key] is b[key] for key in b)


def _same_members(a: Any, b: list) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _is_foreign(module: str | None) -> bool:
    """Whether what is defined there keeps its own state: a library's, or a module of Python itself."""
    return (module or "").partition(".")[0] in _FOREIGN


def _globals_of(function: types.FunctionType) -> list[str]:
    return [name for name in function.__code__.co_names if name in function.__globals__]


def _generator_undo(generator: Generator) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def seed_all(seed: int, generators: list[Generator]) -> None:
    """Seed torch, Python's `random`, numpy, and generators that a callable has for itself."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:                                  # torch.manual_seed keeps a traceback of each call until CUDA is initialised
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, (random.Random, np.random.RandomState)):
            generator.seed(seed)
        else:
            fresh = type(generator.bit_generator)(seed)
            generator.bit_generator.state = fresh.state


def _states_of(generators: Iterable[Generator]) -> list[bytes]:
    """Where torch's, Python's and numpy's random numbers are, and those of these generators."""
    of_torch = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    return [pickle.dumps(state) for state in (random.getstate(), np.random.get_state(),
                                              *map(_state_of, (*of_torch, *generators)))]


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Afterwards torch's, Python's and numpy's random numbers go on where they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
