"""How the house is laid out: who may import whom, who may know which step it is, and what stands at the top level."""
import ast
import itertools
import re
import shutil
import subprocess

import pytest

import common
from common import steps
from common.block.steps import ROOT
from tests.helpers.looks_at_a_step import looks_at_a_step
from tests.helpers.sources import PACKAGES, imported, is_module, module_name, parse, sources

pytestmark = pytest.mark.unit


def in_order() -> list[str]:
    """The modules of common/ as its docstring lists them; "block.config" is in a room."""
    modules = []
    for part in common.__doc__.split("\n\n")[1].split(";"):
        room, _, names = part.rpartition(":")
        modules += [f"{room.strip()}.{name}".lstrip(".") for name in re.findall(r"\w+", names)]
    return modules


def file_of(module: str):
    """block.config -> common/block/config.py."""
    return ROOT / "common" / f"{module.replace('.', '/')}.py"


ROOMS = ("records", "measure", "show", "studies", "assistant")             # each imports only those before it
LAST = ("studies", "assistant")                                            # and these two nothing of each other
TOP_LEVEL = {*(step.path.name for step in steps.ALL), "common", "benchmarks", "tests", "Dockerfile", "README.md",
             "requirements.txt"}
FILES = {module_name(path): path for folder in PACKAGES for path in sources(folder)}
SCRIPTS = [step.path for step in steps.ALL]
ROOMS_OF_COMMON = {path.parent.name for path in (ROOT / "common").glob("*/__init__.py")}
MODULES = in_order()                                                        # each imports only those before it
each_module = pytest.mark.parametrize("module", MODULES)


def of_the_project(names) -> set[str]:
    """Those modules that are ours."""
    return {name for name in names if name.split(".")[0] in PACKAGES}


# ---------------------------------------------------------------------------------------------------------- imports


@each_module
def test_imports_inside_common_run_one_way(module):
    ours = of_the_project(imported(file_of(module)))
    above = {f"common.{name}" for name in MODULES[:MODULES.index(module)]}
    assert ours <= above


def test_every_module_of_common_is_in_the_order_that_is_checked():
    found = {name.removeprefix("common.") for name in FILES if name.startswith("common.")}
    assert found - ROOMS_OF_COMMON == {*MODULES}
    assert len(set(MODULES)) == len(MODULES)


def test_a_room_of_common_is_whole_before_the_next_begins():
    """So rooms import one way, too."""
    rooms = [module.rpartition(".")[0] for module in MODULES]
    entered = [room for room, _ in itertools.groupby(rooms) if room]
    assert len(set(entered)) == len(entered) and set(entered) == ROOMS_OF_COMMON


def test_nothing_in_common_imports_benchmarks():
    importers = [name for name, path in FILES.items() if name.startswith("common")
                 and any(other.startswith("benchmarks") for other in imported(path))]
    assert importers == []

# They import nothing of the others; notebooks' cells do, and an example the assistant, as a person's file does.
LEAVES = ("kernels", "examples", "notebooks", "recipes")


def room_of(module: str) -> str:
    """"benchmarks.records.read" -> "records"; of benchmarks itself, its command and what users import ""."""
    parts = module.split(".")
    if parts[0] != "benchmarks" or parts[1:] in (["__main__"], ["study"]):
        return ""
    return parts[1] if len(parts) > 1 else ""


def may_import(room: str) -> set[str]:
    """The rooms of benchmarks/ that a room may import, itself among them."""
    if room in LEAVES:
        return {room, "assistant"} if room == "examples" else {room}
    if room in ("patterns", "mixers"):
        return {room, "kernels"}
    before = set(ROOMS[:ROOMS.index(room)]) - set(LAST)
    of_the_last = {"kernels", "examples", "patterns", "recipes", "mixers"} if room in LAST else set()
    if room == "assistant":                                # an example may import it
        of_the_last.discard("examples")
    return before | {room} | of_the_last | ({"assistant"} if room == "studies" else set())


def test_every_room_of_benchmarks_has_its_place_in_the_order():
    rooms = {room_of(name) for name in FILES if name.startswith("benchmarks")} - {""}
    assert rooms <= {*ROOMS, *LEAVES, "patterns", "mixers"}


@pytest.mark.parametrize("module", sorted(name for name in FILES if room_of(name)))
def test_imports_inside_benchmarks_run_one_way(module):
    """studies -> assistant -> show -> measure -> records -> common; of patterns and mixers only the former two know, of
    kernels these two and they.
    """
    ours = {name for name in imported(FILES[module]) if name.startswith("benchmarks")}
    assert {room_of(name) for name in ours} <= may_import(room_of(module))


def test_what_is_imported_is_where_it_is_looked_for():
    """A module of ours by the name of its file, and by none that it had before."""
    every = {name for path in (*FILES.values(), *SCRIPTS) for name in of_the_project(imported(path))}
    assert [name for name in sorted(every) if not is_module(name)] == []


def test_no_import_runs_in_a_circle():
    """Take away every module that imports none of those left, until none is left."""
    left = {name: of_the_project(imported(path)) - {name} for name, path in FILES.items()}
    while left:
        leaves = {name for name, others in left.items() if not others & left.keys()}
        assert leaves, f"these import each other: {', '.join(sorted(left))}"
        left = {name: others for name, others in left.items() if name not in leaves}


def test_no_module_of_ours_is_imported_inside_a_function():
    """There it would hide a circle. The command imports late, so that Ctrl-C is one line from the start."""
    importers = set()
    for path in (*FILES.values(), *SCRIPTS):
        inside = {name for name, in_function in imported(path).items() if in_function}
        if of_the_project(inside):
            importers.add(module_name(path))
    assert importers == {"benchmarks.__main__"}


def test_no_module_of_ours_is_imported_by_a_text():
    """But for the studies, which are found by name, their kernels, which need a compiler, libraries that are installed
    apart, what runs notebooks, which needs nbclient, and attention by the series, which a step imports if it is asked
    for: common/ runs without benchmarks/.
    """
    dynamic = set()
    for name, path in FILES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                given = node.args[0]
                if not isinstance(given, ast.Constant) or given.value.split(".")[0] in PACKAGES:
                    dynamic.add(name)
    assert dynamic == {"benchmarks.studies", "benchmarks.kernels.operations", "benchmarks.mixers.fused",
                       "benchmarks.mixers.peers", "benchmarks.patterns.paged", "benchmarks.patterns.ways",
                       "benchmarks.notebooks.command", "benchmarks.studies.attention.subjects",
                       "common.block.sdpa_backends"}


# ------------------------------------------------------------------------------------------------ which step it is


@pytest.mark.parametrize("path", FILES.values(), ids=module_name)
def test_no_condition_looks_at_which_step_it_is(path):
    """It asks a trait: then a case of a study, a peer and a copy of a step are treated as what they are."""
    in_kernels = room_of(module_name(path)) == "kernels"                # where no name of a step ever comes
    found = looks_at_a_step(parse(path), digits=not in_kernels)
    if path == file_of("block.steps"):
        assert [condition.partition(": ")[2] for condition in found] == ["script.name.startswith(f'{step.number}_')"]
    else:
        assert found == []


@pytest.mark.parametrize("condition", [
    "if step.number == 4: calibrate()",
    "if result.step: pass",
    "if result.step == 2: pass",
    "if not run.step: pass",
    "assert case.step in (3, 4)",
    "while number_of(run) < run.step: pass",
    "fp8 = run.step == 4",
    "fp8 = case['step'] > 3",
    "if info['case'].get('step') == 4: pass",
    "compiled = [run for run in runs if run.step == 3]",
    "compiled = list(filter(lambda run: run.step, runs))",
    "if any(run.step for run in runs): pass",
    "kind = 'FP8' if step.title.endswith('FP8') else ''",
    "if step.path.name == script: pass",
    "if step.name.startswith('3'): pass",
    "if step == steps.load(2): pass",
    "if step is steps.ALL[-1]: pass",
    "if steps.load(4).traits.fp8 == traits.fp8: pass",
    "if name == '0_baseline': pass",
    "if name.startswith('2_'): pass",
    "if 'python 3_compile.py' in words: pass",
    "if row in ('3', '4'): pass",
    "if name[0].isdigit(): pass",
    "if int(name[0]) > 2: pass",
    "gates = TABLE[step.number]",
    "number = step.number\nif number > 3: pass",
    "first = int(step.name[0])\nlast = first + 1\nx = y if last > 4 else z",
    "def of(this: Step):\n    if this.name: pass",
    "for one in steps.ALL:\n    if one.path: pass",
    "for number, one in enumerate(steps.ALL):\n    if number: pass",
    "one = steps.of(script)\nif one.name: pass",
    "match run.step:\n    case 4: pass",
    "match name:\n    case '4_transformer_engine': pass",
    "late = run.step and run.step - 1",
])
def test_a_condition_that_looks_at_a_step_is_found(condition):
    assert looks_at_a_step(ast.parse(condition)), "not found"


@pytest.mark.parametrize("statement", [
    "if step.traits.fp8: pass",
    "if steps_traits == BY_HAND: pass",
    "if run.step is None: pass",
    "peers = [case for case in cases if case.step is not None]",
    "compiled = [step for step in steps.ALL if step.traits.compiled or step.traits.fp8]",
    "of_ladder = sorted(runs, key=lambda run: (run.step or 0, run.label))",
    "print(f'Step {step.number}: {step.title}.')",
    "block = (build or step.build)(config, values, device)",
    "result = Result(step.name, step=step.number)\nif result.status != 'ok': pass",
    "block = steps.load(4).build(config, values, device)\nif block.training: pass",
    "step = steps.load(2 if 'SDPA' in combination else 1)",
    "if file.path: pass",
    "if text.isdecimal(): pass",
    "tuned = os.environ.get('NVTE_NORM_FWD_USE_CUDNN') == '1'",
    "if result.study == 'step': pass",
    "rows[f'{step.number}-tf32'] = step",
])
def test_what_asks_for_traits_or_prints_a_number_is_left_alone(statement):
    assert looks_at_a_step(ast.parse(statement)) == []


# ------------------------------------------------------------------------------------------------------- docstrings


def test_every_module_says_what_it_is():
    assert [name for name, path in FILES.items() if not ast.get_docstring(parse(path))] == []


@each_module
def test_every_public_function_and_class_has_a_docstring(module):
    tree = parse(file_of(module))
    missing = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
               and not node.name.startswith("_") and not ast.get_docstring(node)]
    assert missing == []


# ---------------------------------------------------------------------------------------------------- the top level


def test_nothing_was_added_at_the_top_level():
    """The names in the first folder are fixed; files of the checkout that git ignores do not count."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True) if shutil.which("git") else None
    if listed is None or listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = {line.split("/")[0].strip('"') for line in listed.stdout.splitlines()}
    added = {name for name in names if not name.startswith(".")} - TOP_LEVEL
    assert not added, f"at the top level: {', '.join(sorted(added))}"
