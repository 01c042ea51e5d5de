"""The one command of all questions, the names from before, and Ctrl-C while torch is imported."""
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import studies
from common import steps
from tests.helpers.said import one_line

pytestmark = pytest.mark.integration


def ended(call, *arguments) -> int:
    with pytest.raises(SystemExit) as end:
        call(*arguments)
    return end.value.code


# -------------------------------------------------------------------------------------------------------- one command


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_without_a_name_the_questions_are_listed(argv, capsys):
    assert command.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for study in studies.every():
        assert f"  {study.name:12} {study.question}" in out.splitlines()
    for name, what in command.TOOLS.items():
        assert f"  {name:12} {what}" in out.splitlines()


@pytest.mark.parametrize("name", ["nothing", "kernels.norms", "", "Ladder"])
def test_an_unknown_name_is_one_line_and_status_2(name, capsys):
    assert ended(command.main, [name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert one_line(err).startswith(f"benchmarks: error: {name}: there is no such question; give one of ladder, ")


@pytest.mark.parametrize("name", [*studies.names(), *command.TOOLS])
def test_each_command_has_its_help_under_its_name(name, capsys):
    assert ended(command.main, [name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: python -m benchmarks {name} ") and err == ""


@pytest.mark.parametrize("name", [*studies.names(), *command.TOOLS])
def test_each_command_tells_a_mistake_in_one_line(name, capsys):
    assert ended(command.main, [name, "--nonsense", "a", "b"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and one_line(err).startswith(f"{name}: error: ")


# ------------------------------------------------------------------------------------------------- what users import


def test_a_script_of_ones_own_finds_what_it_needs():
    from benchmarks.study import Comparison, compare, validate
    assert {each.__module__ for each in (Comparison, compare)} == {"benchmarks.measure.modules"}
    assert validate.__module__ == "benchmarks.measure.judge"


@pytest.mark.parametrize("kind", ["package", "module", "already imported"])
def test_another_package_called_common_is_named(kind, tmp_path):
    """A user's folder comes before ours."""
    theirs = tmp_path / ("common.py" if kind == "module" else "common/__init__.py")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("")
    script = tmp_path / "mine.py"
    script.write_text(("import common\n" if kind == "already imported" else "") + "import benchmarks.study")
    process = start(str(script), environment={"PYTHONPATH": str(steps.ROOT)})
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1] == (
        f"ImportError: benchmarks needs {steps.ROOT / 'common'}, but `import common` finds {theirs}: begin with "
        f"`import sys; sys.path.insert(0, '{steps.ROOT}')`, or give that package another name")


def test_a_folder_called_common_without_code_is_in_nobodys_way(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "mine.py").write_text("import benchmarks\nprint('imported')")
    process = start(str(tmp_path / "mine.py"), environment={"PYTHONPATH": str(steps.ROOT)})
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "imported\n"), err


# ----------------------------------------------------------------------------------------------------- whole processes


def start(*words: str, environment: dict | None = None) -> subprocess.Popen:
    """With Ctrl-C as a terminal would send it: what starts the tests in the background may have had it ignored."""
    return subprocess.Popen([sys.executable, *words], cwd=steps.ROOT, text=True, env=os.environ | (environment or {}),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def test_a_mistake_is_one_line_of_a_process(tmp_path):
    """Under the command's own name, with exit status 2."""
    process = start("-m", "benchmarks", "compare", str(tmp_path / "old"), str(tmp_path / "new"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert one_line(err) == f"compare: error: {tmp_path / 'old'}: No such file or directory"


def test_no_command_imports_matplotlib_before_it_draws():
    process = start("-c", """
import sys
from benchmarks import __main__, studies
from benchmarks.records import compare
from benchmarks.show import pages
studies.every()
print("matplotlib" in sys.modules)
""")
    out, err = process.communicate(timeout=120)
    assert out == "False\n", err


@pytest.mark.parametrize("words, name", [
    (["benchmarks"], "benchmarks"), (["benchmarks", "ladder", "--quick"], "ladder"),
    (["benchmarks", "compare"], "compare")])
def test_ctrl_c_while_torch_is_imported_is_one_line(words, name, tmp_path):
    """In place of torch there is a module that says that it is being imported, and is never done.

    It sleeps in short pieces: a signal that comes right before a sleep is seen behind it.
    """
    (tmp_path / "torch.py").write_text("import time\nprint('torch', flush=True)\nwhile True:\n    time.sleep(0.1)\n")
    process = start("-m", *words, environment={"PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == "torch\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", f"\n{name}: interrupted\n")
