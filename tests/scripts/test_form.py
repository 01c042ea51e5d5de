"""What every script promises about its own form: its size, its neighbours, its order, and the contract of its block."""
import ast
import difflib
import math

import pytest
import torch

from common import BlockConfig, parameters, steps
from tests.helpers.sources import imported, parse

pytestmark = pytest.mark.unit

SCRIPTS = [step.path for step in steps.ALL]
MOST_LINES = dict.fromkeys((step.number for step in steps.ALL), 110) | {4: 130}    # it maps names and engines, too
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
each_step = pytest.mark.parametrize("step", steps.ALL, ids=lambda step: step.name)


def test_there_are_five_scripts_in_the_order_of_their_numbers():
    assert [step.number for step in steps.ALL] == [0, 1, 2, 3, 4]
    assert [path.name for path in SCRIPTS] == sorted(path.name for path in steps.ROOT.glob("[0-9]_*.py"))


@each_step
def test_a_script_is_read_in_one_sitting(step):
    lines = step.path.read_text().splitlines()
    assert 60 <= len(lines) <= MOST_LINES[step.number]


@pytest.mark.parametrize("old, new, most", [(0, 1, 25), (1, 2, 25), (2, 3, 25), (2, 4, math.inf), (3, 4, math.inf)])
def test_neighbours_differ_by_the_optimization_alone(old, new, most, record_property):
    """Added plus removed lines, as README counts them."""
    before, after = (SCRIPTS[step].read_text().splitlines() for step in (old, new))
    differences = list(difflib.unified_diff(before, after, n=0, lineterm=""))
    changed = sum(line[0] in "+-" for line in differences[2:])
    record_property("seen", f"{SCRIPTS[old].stem} -> {SCRIPTS[new].stem}: {changed} lines added or removed")
    assert 0 < changed <= most


@each_step
def test_a_script_says_what_it_is_and_how_to_run_it(step):
    """A line that is its title, a paragraph on the mechanism, the command."""
    first, paragraph, command = ast.get_docstring(parse(step.path)).split("\n\n")
    assert first == f"Step {step.number}: {step.title}."
    assert len(paragraph.splitlines()) >= 2
    assert command.strip() == f"python {step.path.name}"


@each_script
def test_a_script_holds_the_block_and_nothing_else(script):
    """No command line, clock or printing of its own; it imports torch, a little stdlib and common."""
    tree = parse(script)
    modules = set(imported(script))
    assert {name.split(".")[0] for name in modules} <= {"math", "types", "torch", "common"}
    of_block = {f"common.block.{name}" for name in ("config", "parameters", "precision", "sdpa_backends")}
    ours = {name for name in modules if name.startswith("common.")}
    assert ours <= {*of_block, "common.runtime.engine", "common.run"}
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"print", "open", "input"}


@each_script
def test_a_script_reads_docstring_imports_classes_build_run(script):
    body = parse(script).body
    definitions = [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert isinstance(body[0], ast.Expr) and isinstance(body[-1], ast.If)
    assert definitions[-2:] == ["Block", "build"]
    assert script.read_text().endswith('if __name__ == "__main__":\n    run(__file__)\n')


@each_script
def test_functions_and_classes_of_a_script_have_docstrings(script):
    definitions = [node for node in parse(script).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert not [node.name for node in definitions if not ast.get_docstring(node)]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_the_contract_holds_as_written(number):
    """What tests, benchmarks and users call, in every step, on a shape of their own."""
    config = BlockConfig(batch_size=2, seq_len=128, hidden_size=256, num_heads=4, amp_dtype=None)
    p = parameters.seeded(config, seed=0)
    block = steps.load(number).build(config, p, device="cpu")
    x, g = torch.randn(2, 128, 256), torch.randn(2, 128, 256)
    with torch.compiler.set_stance("force_eager"):          # step 3 uncompiled: the form is asked here, not the kernels
        y = block(x)
        y.backward(g)
    assert isinstance(block, torch.nn.Module) and block.config is config
    assert y.shape == x.shape and y.dtype == x.dtype
    gradients = parameters.gradients(block)
    assert gradients.keys() == p.keys() == parameters.shapes(config).keys()
    assert all(gradients[name].shape == p[name].shape and gradients[name].isfinite().all() for name in p)
    if number == 4:
        assert "GPU" in block.engine.why_emulated
