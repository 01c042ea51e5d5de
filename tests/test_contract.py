"""What every script and module promises about its own form: size, neighbours, imports, names, the shared config."""
import ast
import difflib
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import common
from common import PRESETS, BlockConfig, parameters, steps

pytestmark = pytest.mark.unit

ROOT = steps.ROOT
SCRIPTS = [steps.path(step) for step in range(steps.COUNT)]
MODULES = re.findall(r"\w+", common.__doc__.split("\n\n")[1])              # each imports only those before it
TOP_LEVEL = {"0_baseline.py", "1_cublas.py", "2_sdpa.py", "3_compile.py", "4_transformer_engine.py", "common",
             "benchmarks", "tests", "Dockerfile", "README.md", "requirements.txt"}
STDLIB_AND_TORCH = {"math", "types", "torch", "common"}
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
each_module = pytest.mark.parametrize("module", MODULES)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module) -> set[str]:
    """Every module imported anywhere in `tree`, also inside functions; `from . import a` inside common is common.a."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["common" if node.level else "", node.module or ""]))
            submodules = {f"{base}.{alias.name}" for alias in node.names if base == "common" and alias.name in MODULES}
            found |= submodules or {base}
    return found


# ---------------------------------------------------------------------------------------------------- the scripts


@each_script
def test_a_script_is_read_in_one_sitting(script):
    assert 60 <= len(script.read_text().splitlines()) <= 110


@pytest.mark.parametrize("old, new, most", [(0, 1, 25), (1, 2, 25), (2, 3, 25), (2, 4, math.inf), (3, 4, math.inf)])
def test_neighbours_differ_by_the_optimization_alone(old, new, most, record_property):
    """Added plus removed lines, as README counts them."""
    texts = [SCRIPTS[step].read_text().splitlines() for step in (old, new)]
    changed = sum(line[0] in "+-" for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:])
    record_property("seen", f"{SCRIPTS[old].stem} -> {SCRIPTS[new].stem}: {changed} lines added or removed")
    assert 0 < changed <= most


@each_script
def test_a_script_says_what_it_is_and_how_to_run_it(script):
    doc = ast.get_docstring(parse(script))
    assert doc.startswith(f"Step {script.name[0]}: ")
    assert f"python {script.name}" in doc


@each_script
def test_a_script_holds_the_block_and_nothing_else(script):
    """No command line, clock or printing of its own; imports only torch, a little stdlib and common."""
    tree = parse(script)
    assert {name.split(".")[0] for name in imports(tree)} <= STDLIB_AND_TORCH
    assert not imports(tree) & {"common.timing", "common.report", "common.evidence", "common.roofline"}
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"print", "open", "input"}


@each_script
def test_a_script_reads_docstring_imports_classes_build_run(script):
    kinds = [type(node).__name__ for node in parse(script).body]
    definitions = [node.name for node in parse(script).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert kinds[0] == "Expr" and kinds[-1] == "If"
    assert definitions[-2:] == ["Block", "build"]
    assert script.read_text().endswith('if __name__ == "__main__":\n    run(__file__)\n')


@pytest.mark.parametrize("step", range(steps.COUNT))
def test_the_contract_holds_as_written(step):
    """What tests, benchmarks and users call, in every step, on a shape of their own."""
    config = BlockConfig(batch_size=2, seq_len=128, hidden_size=256, num_heads=4, amp_dtype=None)
    p = parameters.seeded(config, seed=0)
    block = steps.load(step).build(config, p, device="cpu")
    x, g = torch.randn(2, 128, 256), torch.randn(2, 128, 256)
    with torch.compiler.set_stance("force_eager"):          # step 3 uncompiled: the form is asked here, not the kernels
        y = block(x)
        y.backward(g)
    assert isinstance(block, torch.nn.Module) and y.shape == x.shape and y.dtype == x.dtype
    gradients = parameters.gradients(block)
    assert gradients.keys() == p.keys() == parameters.shapes(config).keys()
    assert all(gradients[name].shape == p[name].shape and gradients[name].isfinite().all() for name in p)
    if step == 4:
        assert "emulated" in block.engine and "GPU" in block.engine


@pytest.mark.parametrize("step", [-1, 5, "2"])
def test_an_unknown_step_is_named(step):
    with pytest.raises(ValueError, match=f"step {step}: give a number from 0 to 4"):
        steps.path(step)


# ------------------------------------------------------------------------------------------------------ the modules


@each_module
def test_imports_inside_common_run_one_way(module):
    found = imports(parse(ROOT / "common" / f"{module}.py"))
    above = {f"common.{name}" for name in MODULES[:MODULES.index(module)]}
    assert {name for name in found if name.startswith("common")} <= above
    assert "benchmarks" not in {name.split(".")[0] for name in found}


def test_every_module_of_common_is_in_the_order_that_is_checked():
    assert {path.stem for path in (ROOT / "common").glob("*.py")} == {*MODULES, "__init__"}


@each_module
def test_every_public_function_and_class_has_a_docstring(module):
    tree = parse(ROOT / "common" / f"{module}.py")
    assert ast.get_docstring(tree)
    missing = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
               and not node.name.startswith("_") and not ast.get_docstring(node)]
    assert not missing


def test_nothing_was_added_at_the_top_level():
    """The names in the first folder are fixed; files of the checkout that git ignores do not count."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True) if shutil.which("git") else None
    if listed is None or listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = {line.split("/")[0].strip('"') for line in listed.stdout.splitlines()}
    added = {name for name in names if not name.startswith(".")} - TOP_LEVEL
    assert not added, f"at the top level: {', '.join(sorted(added))}"


# ------------------------------------------------------------------------------------------------------- the config

GOOD = {"batch_size": 2, "seq_len": 64, "hidden_size": 64, "num_heads": 4}


@pytest.mark.parametrize("change, named", [
    ({"hidden_size": 65}, "65"), ({"num_heads": 128}, "128"),
    *(({field: value}, str(value)) for field in (*GOOD, "ffn_hidden_size")
      for value in (0, -3, 10**9, 2.0, True, "64")),
    ({"dropout": 1.0}, "1.0"), ({"dropout": -0.1}, "-0.1"), ({"dropout": math.nan}, "nan"), ({"dropout": 7}, "7"),
    ({"amp_dtype": torch.float32}, "torch.float32"), ({"amp_dtype": torch.float64}, "torch.float64"),
    ({"amp_dtype": "float16"}, "float16"), ({"fp8_weights": "sometimes"}, "sometimes"),
], ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_wrong_config_is_refused_with_its_value_and_a_fix(change, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        BlockConfig(**GOOD | change)
    assert re.search(r"try|give", str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, field, value, fix", [
    ({"batch_size": 1, "seq_len": 65}, "batch_size * seq_len", 65, 80),
    ({"hidden_size": 72}, "hidden_size", 72, 80),
    ({"ffn_hidden_size": 100}, "ffn_hidden_size", 100, 112),
])
def test_dimensions_that_fp8_cannot_take_are_named(change, field, value, fix):
    config = BlockConfig(**GOOD | change)                    # a good shape without FP8
    with pytest.raises(ValueError, match=re.escape(f"{field} divisible by 16, not {value}: try {fix}")):
        config.check_fp8()


def test_the_config_is_immutable_and_its_copies_are_checked():
    config = BlockConfig(**GOOD)
    with pytest.raises(AttributeError):
        config.batch_size = 3
    assert config.replace(batch_size=3).batch_size == 3
    with pytest.raises(ValueError, match="63"):
        config.replace(hidden_size=63)
    assert config.ffn_hidden_size == 256 and config.head_dim == 16 and config.tokens == 128


@pytest.mark.parametrize("name, shape", [
    ("gpt2", (32, 1024, 768, 12, 3072)), ("te-tutorial", (8, 2048, 4096, 32, 16384)), ("cpu", (4, 512, 768, 12, 3072)),
])
def test_published_shapes(name, shape):
    p = PRESETS[name]
    assert (p.batch_size, p.seq_len, p.hidden_size, p.num_heads, p.ffn_hidden_size) == shape


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_in_every_step(name):
    preset = PRESETS[name]
    preset.check_fp8()
    assert preset.dropout == 0.0 and preset.head_dim * preset.num_heads == preset.hidden_size


# ------------------------------------------------------------------------------------------------------ the container


@pytest.fixture
def dockerfile():
    """Its instructions: comments left out, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in re.sub(r" *\\\n *", " ", "\n".join(lines)).splitlines() if line]


def test_the_container_starts_from_the_known_image_and_keeps_its_constraints(dockerfile):
    assert dockerfile[0] == "FROM nvcr.io/nvidia/pytorch:25.11-py3" and dockerfile[-1].startswith("CMD")
    assert not re.search(r"PIP_CONSTRAINT|--no-deps|--force-reinstall|--upgrade|(^|\n)USER", "\n".join(dockerfile))


IMAGE = ["torch==2.10.0a0+nv25.11", "pytorch-triton==3.5.0", "transformer_engine==2.9.0+70f53666", "numpy==2.1.0"]


@pytest.mark.parametrize("before, after, builds", [
    pytest.param(IMAGE, IMAGE, True, id="nothing changed"),
    pytest.param(IMAGE, [*IMAGE, "tabulate==0.9.0"], True, id="a new package"),
    pytest.param(IMAGE, ["torch==2.15.0", *IMAGE[1:]], False, id="another torch"),
    pytest.param(IMAGE, [*IMAGE[:2], "transformer_engine==2.20.2"], False, id="another engine"),
    pytest.param(IMAGE, [*IMAGE, "triton==3.9.0"], False, id="a second triton"),
    pytest.param(IMAGE[:2], IMAGE[:2], False, id="no engine"),
    pytest.param(IMAGE[1:], IMAGE[1:], False, id="no torch"),
])
def test_the_container_is_not_built_where_pip_changed_its_torch(dockerfile, tmp_path, before, after, builds):
    """The build's own shell lines, run with a pip that installs what is given."""
    command = next(line for line in dockerfile if line.startswith("RUN") and "pip install" in line).removeprefix("RUN ")
    (tmp_path / "before").write_text("\n".join(before) + "\n")
    (tmp_path / "after").write_text("\n".join(after) + "\n")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nif [ "$1" = list ]; then cat before; else cp rest.txt asked; mv after before; fi\n')
    pip.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    built = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (built.returncode == 0) == builds, built.stdout + built.stderr
    if builds:
        asked = [line for line in (tmp_path / "asked").read_text().splitlines() if line[:1].isalpha()]
        assert "numpy" in asked and not [line for line in asked if line.startswith(("torch", "triton"))]


def test_requirements_allow_the_containers_torch():
    """The image's torch is an alpha of 2.10: at least 2.9, but not at least 2.10. The engine is no requirement."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    requirements = {r.name: r for r in (Requirement(line.split("#")[0]) for line in lines if line[:1].isalpha())}
    assert set(requirements) == {"torch", "triton", "numpy", "pytest", "pytest-xdist", "tabulate", "matplotlib", "tqdm",
                                 "nvidia-ml-py"}
    torch_versions = requirements["torch"].specifier
    assert torch_versions.contains("2.10.0a0+nv25.11", prereleases=True) and torch_versions.contains("2.9.0")
    assert not torch_versions.contains("2.8.0") and not requirements["numpy"].specifier
    assert not requirements["triton"].marker.evaluate({"sys_platform": "darwin"})
