"""Every name and argument of Transformer Engine that the suite uses exists in it, in 2.9 as in 2.20.

Read with ast from the Python sources, never imported: Transformer Engine's package for torch does not import without a
GPU. The uses are read from our sources in the same way, so that this can't go stale. To run it:

    pip download --no-deps --only-binary=:all: transformer-engine==2.9.0 -d wheels      # and ==2.20.2
    python -m zipfile -e wheels/transformer_engine-2.9.0-*.whl sources/2.9.0
    TE_SOURCES=sources python -m pytest tests/test_te_names.py
"""
import ast
import inspect
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from common import parameters, steps
from common.block import emulation
from common.runtime import engine

pytestmark = pytest.mark.unit

VERSIONS = ("2.9.0", "2.20.2")              # the oldest is what the container of the Dockerfile holds
SOURCES = os.environ.get("TE_SOURCES")
needs_sources = pytest.mark.skipif(not SOURCES, reason="set TE_SOURCES to a folder with 2.9.0/transformer_engine and "
                                   "2.20.2/transformer_engine (pip download transformer-engine==..., then unzip)")
PYTORCH = "transformer_engine.pytorch"
STEP_4 = ast.parse(steps.load(4).path.read_text())
STUDIES = [ast.parse((steps.ROOT / "benchmarks" / "studies" / name).read_text())
           for name in ("peers/blocks.py", "components.py")]
ENGINE = ast.parse(Path(engine.__file__).read_text())


# ------------------------------------------------------------------------------------------------------- what is used


@dataclass(frozen=True)
class Use:
    """One call, or where `positional` is None one mention, of `path`; `then` is what its instance is asked for."""
    path: str                               # "pytorch.LayerNormLinear"
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    then: str = ""                          # "forward", or "attribute gemm_gelu_fusion"

    def __str__(self):
        arguments = "" if self.positional is None else f"({self.positional}, {', '.join(self.keywords)})"
        return f"{self.path} {self.then}{arguments}"


def dotted(node: ast.AST) -> str | None:
    """The text of a.b.c, None for anything else. What `transformer_engine()` gives is called te everywhere."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and ast.unparse(node) == "transformer_engine()":
        return "te"
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def path_of(name: str) -> str:
    """"te.Linear" -> "transformer_engine.pytorch.Linear"."""
    return name.replace("te.", f"{PYTORCH}.", 1)


def arguments(call: ast.Call) -> tuple[int, tuple[str, ...]]:
    return len(call.args), tuple(keyword.arg for keyword in call.keywords)


def bindings(cls: ast.ClassDef) -> dict[str, tuple[str, bool]]:
    """For every `self.name = te.X` or `= te.X(...)`: self.name -> (X, whether it is an instance of X)."""
    bound = {}
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and (target := dotted(node.targets[0])):
            is_instance = isinstance(node.value, ast.Call)
            source = dotted(node.value.func if is_instance else node.value) or ""
            if source.startswith("te."):
                bound[target] = path_of(source), is_instance
    return bound


def uses_of(source: ast.Module) -> set[Use]:
    """What a module of ours calls of Transformer Engine, and sets of its modules."""
    uses = set()
    for node in ast.walk(source):
        name = dotted(node.func) if isinstance(node, ast.Call) else None
        if name and name.startswith("te."):
            uses.add(Use(path_of(name), *arguments(node)))
    for cls in (node for node in source.body if isinstance(node, ast.ClassDef)):
        bound = bindings(cls)
        for node in ast.walk(cls):
            if isinstance(node, ast.Call) and dotted(node.func) in bound:
                path, is_instance = bound[dotted(node.func)]
                uses.add(Use(path, *arguments(node), then="forward" if is_instance else ""))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                owner = dotted(node.targets[0].value)
                if owner in bound:
                    uses.add(Use(bound[owner][0], then=f"attribute {node.targets[0].attr}"))
    return uses


USES = sorted(uses_of(STEP_4), key=str)
ALL_USES = sorted(set(USES).union(*map(uses_of, [*STUDIES, ENGINE])), key=str)
each_use = pytest.mark.parametrize("use", ALL_USES, ids=str)
each_version = pytest.mark.parametrize("version", VERSIONS)


def test_the_uses_were_found():
    """The reading above sees what a reader sees: all kinds of use that step 4 has."""
    seen = {str(use).removeprefix(f"{PYTORCH}.").split(" ")[0] for use in USES}
    assert {"LayerNormLinear", "Linear", "LayerNormMLP", "DotProductAttention", "autocast", "quantized_model_init",
            "quantization.DelayedScaling", "utils.SplitAlongDim.apply"} <= seen
    forward = [use for use in USES if use.then == "forward"]
    assert {use.keywords for use in forward} == {("is_first_microbatch",), ()} and len(forward) >= 4
    paths = {use.path.removeprefix(f"{PYTORCH}.") for use in ALL_USES}
    assert {"is_fp8_available", "quantization.FP8GlobalStateManager.reset", "TransformerLayer", "LayerNorm"} <= paths


# ------------------------------------------------------------------------------------------------------ what is there


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class Package:
    """Names of one version's sources, followed through its imports."""

    def __init__(self, version: str):
        self.root = Path(SOURCES) / version

    def file(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def find(self, path: str) -> ast.AST:
        """The definition that `path` leads to. Raises LookupError where it leads nowhere."""
        parts = path.split(".")
        cut = next(count for count in range(len(parts), 0, -1) if self.file(".".join(parts[:count])))
        module, names = ".".join(parts[:cut]), parts[cut:]
        if not names:
            return tree(self.file(module))
        node = self.member(module, names[0])
        for name in names[1:]:
            node = next((inner for inner in node.body if getattr(inner, "name", None) == name), None)
            if node is None:
                raise LookupError(f"{name} of {path}")
        return node

    def member(self, module: str, name: str) -> ast.AST:
        """What a module defines, or imports, by that name."""
        file = self.file(module)
        for node in ast.walk(tree(file)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name and node in tree(file).body:
                return node
            if isinstance(node, ast.Assign) and any(dotted(target) == name for target in node.targets):
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{self.imported_from(node, module, file)}.{alias.name}")
        raise LookupError(f"{name} in {module}")

    @staticmethod
    def imported_from(node: ast.ImportFrom, module: str, file: Path) -> str:
        """The whole name of the module that `from ... import` names."""
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        base = package[:len(package) - node.level + 1] if node.level else []
        return ".".join([*base, node.module] if node.module else base)


def strings_of(node: ast.AST) -> set[str]:
    return {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)}


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def parameters_of(node: ast.AST, name: str) -> tuple[list[str], set[str], bool]:
    """(those that may be given by position, those that may be given by name, whether any other name is taken too)."""
    if isinstance(node, ast.ClassDef):
        if method(node, name) is None:      # a dataclass: its fields, in their order
            fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
            return fields, set(fields), False
        node = method(node, name)
        own = node.args.args[1:]            # without self, or ctx
    else:
        own = node.args.args
    by_position = [argument.arg for argument in own]
    return by_position, {*by_position, *(a.arg for a in node.args.kwonlyargs)}, node.args.kwarg is not None


def accepted(package: Package, use: Use) -> tuple[list[str], set[str], bool]:
    """The parameters of what a use calls, as `parameters_of` gives them."""
    path = use.path
    if path.endswith(".apply"):             # of an autograd.Function: its forward's, without ctx
        return parameters_of(package.find(path.removesuffix(".apply")), "forward")
    return parameters_of(package.find(path), use.then or "__init__")


@needs_sources
@each_version
@each_use
def test_transformer_engine_has_it(use, version):
    package = Package(version)
    if use.then.startswith("attribute "):
        own = {dotted(node) for node in ast.walk(package.find(use.path)) if isinstance(node, ast.Attribute)}
        assert f"self.{use.then.removeprefix('attribute ')}" in own
    else:
        by_position, by_name, any_name = accepted(package, use)
        assert use.positional <= len(by_position)
        assert any_name or set(use.keywords) <= by_name


BY_POSITION = [use for use in USES if use.positional and not use.then and not use.path.endswith(".apply")]


@needs_sources
@each_version
@pytest.mark.parametrize("use", BY_POSITION, ids=str)
def test_an_argument_by_position_means_the_same_as_in_the_emulation(use, version):
    theirs, _, _ = accepted(Package(version), use)
    ours = list(inspect.signature(emulated(use)).parameters)
    assert theirs[:use.positional] == ours[:use.positional]


@needs_sources
@each_version
@pytest.mark.parametrize("name", [*steps.load(4).module.Block.parameter_names.values(), "attn.qkv.weight",
                                  "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias"])
def test_the_parameters_have_these_names(name, version):
    """A module registers each of its parameters under a name that stands as a string in its class."""
    owner, parameter = name.rsplit(".", 1)
    attribute = owner.rsplit(".", 1)[-1]
    classes = [bindings(node) for node in STEP_4.body if isinstance(node, ast.ClassDef)]
    path = next(bound[f"self.{attribute}"][0] for bound in classes if f"self.{attribute}" in bound)
    assert parameter in strings_of(Package(version).find(path))


def fields_of(cls: ast.ClassDef) -> set[str]:
    return {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}


@needs_sources
@each_version
def test_the_fp8_state_is_where_the_run_looks_for_it(version):
    """Scales and amax histories, that a run checks to have moved, and the scale that kept weights start from."""
    package = Package(version)
    reader = ast.parse(inspect.getsource(engine.fp8_state))
    read = {node.attr for node in ast.walk(reader)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "meta[key]"}
    keys = {text for text in strings_of(reader) if text.startswith("scaling_")}
    base = tree(package.file(f"{PYTORCH}.module.base"))
    assert keys == {"scaling_fwd", "scaling_bwd"} and keys <= strings_of(base)
    assert "self.fp8_meta" in {dotted(node) for node in ast.walk(base) if isinstance(node, ast.Attribute)}
    state = package.find(f"{PYTORCH}.quantization.DelayedScalingRecipeState")
    assert read == {"scale", "amax_history"} and read <= fields_of(state)
    assert "_quantizer.scale" in inspect.getsource(parameters.load)
    assert "scale" in fields_of(package.find(f"{PYTORCH}.tensor.float8_tensor.Float8Quantizer"))


# ---------------------------------------------------------------------------------------------------- what is emulated


def emulated(use: Use):
    """The emulation's own of what step 4 uses."""
    value = emulation
    for name in use.path.removeprefix(f"{PYTORCH}.").split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("use", [use for use in USES if use.positional is not None], ids=str)
def test_the_emulation_takes_every_argument_that_step_4_passes(use):
    """Not by attribute: a Module takes any."""
    by_name = dict.fromkeys(use.keywords)
    if use.then == "forward":
        inspect.signature(emulated(use).forward).bind(None, *[None] * use.positional, **by_name)
    else:
        inspect.signature(emulated(use)).bind(*[None] * use.positional, **by_name)


@needs_sources
@each_version
@pytest.mark.parametrize("name, ours", [
    ("Linear", emulation.Linear), ("LayerNormLinear", emulation.LayerNormLinear),
    ("LayerNormMLP", emulation.LayerNormMLP), ("DotProductAttention", emulation.DotProductAttention),
    ("autocast", emulation.autocast), ("quantized_model_init", emulation.quantized_model_init),
    ("quantization.DelayedScaling", emulation.DelayedScaling),
])
def test_the_emulation_has_no_argument_of_its_own(name, ours, version):
    """What runs on the emulation runs on Transformer Engine: it invents no option."""
    _, theirs, _ = parameters_of(Package(version).find(f"{PYTORCH}.{name}"), "__init__")
    assert set(inspect.signature(ours).parameters) <= theirs
