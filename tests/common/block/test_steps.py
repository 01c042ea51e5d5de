"""The five scripts as values: which there are, what each is called, and whose traits a copy of one has."""
import dataclasses
import shutil

import pytest
import torch

from common import BlockConfig, parameters, run, steps
from common.block.traits import BY_HAND, DELAYED, FUSED, FUSED_IN_16_BITS, Traits
from common.runtime import sources

each_step = pytest.mark.parametrize("step", steps.ALL, ids=lambda step: step.name)


@pytest.mark.unit
@each_step
def test_a_step_is_its_script(step):
    assert steps.load(step.number) is step
    assert step.path == steps.ROOT / f"{step.name}.py" and step.name.startswith(f"{step.number}_")
    assert step.module.__file__ == str(step.path) and step.module is step.module
    config = BlockConfig(1, 2, 8, 2, amp_dtype=None)
    block = step.build(config, parameters.seeded(config), "cpu")
    assert type(block) is step.module.Block


@pytest.mark.unit
@pytest.mark.parametrize("number", [-1, 5, "2", 2.0, True, None])
def test_an_unknown_step_is_named(number):
    with pytest.raises(ValueError, match=f"step {number}: give a number from 0 to 4"):
        steps.load(number)


@pytest.mark.unit
def test_what_each_step_claims_of_itself():
    """What it adds stays in the next one, but for step 4, which takes attention from another library."""
    adds = [{"attention": BY_HAND, "claimed": True}, {"tf32": True, "autocast": True}, {"attention": FUSED},
            {"compiled": True}]
    traits = Traits()
    for step, what in zip(steps.ALL, adds, strict=False):
        traits = dataclasses.replace(traits, **what)
        assert step.traits == traits
    assert steps.load(4).traits == Traits(attention=FUSED_IN_16_BITS, tf32=True, autocast=True, fp8=DELAYED,
                                          residual_in_16_bits=True, claimed=True)


@pytest.mark.unit
@each_step
def test_a_title_is_what_the_docstring_begins_with(step):
    first = step.path.read_text().splitlines()[0]
    assert first == f'"""Step {step.number}: {step.title}.'


@pytest.mark.unit
@each_step
def test_a_copy_under_another_name_has_the_traits_of_its_number(step, tmp_path):
    """Its title is that of its own docstring, and its block that of its own classes."""
    copy = tmp_path / f"{step.number}_mine.py"
    original = step.path.read_text()
    copy.write_text(original.replace(step.title, "the same block as I would have it", 1))
    mine = steps.of(copy)
    assert (mine.number, mine.name, mine.traits) == (step.number, f"{step.number}_mine", step.traits)
    assert mine.title == "the same block as I would have it"
    assert mine.path == copy and mine.module.__file__ == str(copy) and mine.module is not step.module
    config = BlockConfig(1, 2, 8, 2, amp_dtype=None)
    values = parameters.seeded(config)
    with torch.compiler.set_stance("force_eager"):
        outputs = [one.build(config, values, "cpu")(torch.ones(1, 2, 8)) for one in (step, mine)]
    assert torch.equal(*outputs)


@pytest.mark.unit
@each_step
def test_a_script_is_the_step_that_it_is(step):
    """By its own path, by a relative one, and where it was copied to under its own name."""
    assert steps.of(step.path) == step
    elsewhere = steps.of(step.path.parent / "common" / step.path.name)
    assert (elsewhere.name, elsewhere.traits) == (step.name, step.traits) and elsewhere.path != step.path


@pytest.mark.unit
@pytest.mark.parametrize("name", ["mine.py", "5_mine.py", "2mine.py", "22_mine.py", "_2_mine.py"])
def test_a_file_that_names_no_step_is_told_how_to_be_named(name, tmp_path):
    with pytest.raises(ValueError) as error:
        steps.of(tmp_path / name)
    assert str(error.value) == f"{name}: name it after the step that it is a copy of, as 0_{name}"


@pytest.mark.unit
@pytest.mark.parametrize("source, title", [("x = 1\n", "2_mine"), ('"""Mine."""\n', "Mine"),
                                           ('"""Step 2: mine: faster.\n\nMore."""\n', "mine: faster")])
def test_a_copy_has_a_title_whatever_its_docstring(source, title, tmp_path):
    copy = tmp_path / "2_mine.py"
    copy.write_text(source)
    assert steps.of(copy).title == title


@pytest.mark.unit
def test_a_stray_copy_beside_the_scripts_changes_nothing(tmp_path, capsys):
    """Neither the digest of the sources nor what `2_sdpa.py` runs. tests/common/test_run.py has it in a process."""
    for path in sources.files():
        there = tmp_path / path.relative_to(steps.ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    for name in ("2_mine.py", "2_a.py", "0_first.py"):
        (tmp_path / name).write_text('"""Step 2: something else."""\nraise SystemExit("a stray copy ran")')
    assert sources.digest(tmp_path) == sources.digest()
    script = tmp_path / "2_sdpa.py"
    assert steps.of(script) == dataclasses.replace(steps.load(2), path=script)
    with pytest.raises(SystemExit) as ended:
        run.main(script, ["--help"])
    assert ended.value.code == 0 and f"Step 2: {steps.load(2).title}." in capsys.readouterr().out
    assert [step.path.parent for step in steps.ALL] == [steps.ROOT] * 5
