"""What the pages say holds: every link leads somewhere, every command parses, every example runs."""
import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import studies
from benchmarks.assistant import command as assistant
from benchmarks.measure import options
from benchmarks.notebooks import command as notebooks
from benchmarks.records import about, compare
from benchmarks.show import pages
from benchmarks.show import study as frame
from common import run, steps
from common.command_line import Parser

unit, integration = pytest.mark.unit, pytest.mark.integration
ROOT = steps.ROOT
PAGES = [*pages.PAGES, ROOT / ".github" / "CONTRIBUTING.md"]
MODULES = [*ROOT.glob("[0-9]_*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("benchmarks/**/*.py")]
OTHER_TOOLS = ("pytest", "ruff", "mypy", "venv", "pip")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page may name, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@unit
@each_page
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def commands(text: str) -> list[list[str]]:
    """The words of every `python ...` in a text, without what stands before it and behind a comment."""
    text = re.sub(r"<!-- begin .*?<!-- end .*?-->", "", text, flags=re.DOTALL)
    lines = re.findall(r"^(?:    |\$ )(.+)$", text, re.MULTILINE)
    for fenced in re.findall(r"```(?:sh|bash)?\n(.*?)```", text, re.DOTALL):
        lines += fenced.splitlines()
    lines += re.findall(r"`(python[^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " "))
    words_of_all = []
    for line in lines:
        code = re.sub(r"\s#.*$|\s{3,}\S.*$", "", line.strip())
        for command in re.findall(r"\bpython3? [^()&;|`]+", code):
            words_of_all.append(shlex.split(command.strip().rstrip(".,:")))
    return words_of_all


def parser_of(words: list[str]) -> tuple[Parser, list[str]] | None:
    """(the parser of a command, what it is given); None for a tool that is not ours. Fails for what there is not."""
    if words[1] == "-m":
        module = words[2].removeprefix("benchmarks.") if words[2].startswith("benchmarks.") else words[2]
        arguments = words[3:]
        if module in OTHER_TOOLS:
            return None
        if module == "benchmarks":
            if not arguments or arguments[0] == "NAME":
                return None
            module, *arguments = arguments
        if module in ("kernels", "kernels.cuda.series", "pages", "mixed", "measure.counters"):
            return None
        if module == "compare":
            return compare.parser(), arguments
        if module == "records":
            return about.parser(), arguments
        if module == "assistant":
            return assistant.parser(), arguments
        if module == "notebooks":
            return notebooks.parser(), arguments
        study = studies.load(module)
        parser = options.parser(study.name, study.doc)
        study.add_arguments(parser)
        return parser, arguments
    if words[1] in ("$step", "2_mine.py", "mine.py", "silu.py", "-c", "FILE"):
        return None
    step = next(step for step in steps.ALL if step.path.name == words[1])
    return run.parser(step), words[2:]


def check(text: str) -> int:
    """How many commands of ours a text has; each must parse."""
    count = 0
    for words in commands(text):
        if found := parser_of(words):
            parser, arguments = found
            count += 1
            if "--help" not in arguments and "NAME" not in arguments:
                parser.parse_args(arguments)
    return count


@unit
@each_page
def test_every_command_of_a_page_parses(page):
    count = check(page.read_text())
    assert count or (page.name == "README.md" and page.parent.name == "results")


@unit
def test_every_command_of_a_docstring_parses():
    count = 0
    for module in MODULES:
        count += check(ast.get_docstring(ast.parse(module.read_text()), clean=False) or "")
    assert count > 20


@unit
@pytest.mark.parametrize("text, wrong", [("`python 2_sdpa.py --no-such-flag`", SystemExit),
                                         ("    python -m benchmarks ladder --preset huge", SystemExit),
                                         ("    python -m benchmarks nonsense", ModuleNotFoundError),
                                         ("    python 5_more.py", StopIteration)])
def test_a_command_that_is_wrong_is_seen(text, wrong):
    with pytest.raises(wrong):
        check(text)


@unit
def test_readme_is_read_in_ten_minutes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 400


def python_examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@integration
@pytest.mark.parametrize("page", ["README.md", "common/README.md"])
def test_every_example_in_python_runs(page, capsys):
    examples = [code.replace("torch.randn(4096, 1024)", "torch.randn(8, 1024)")
                .replace('"compiled": torch.compile(by_hand)', '"again": by_hand') for code in python_examples(page)]
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})


@integration
def test_the_study_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys, studies_in_seconds):
    source, = [each for each in python_examples("benchmarks/README.md") if "register(Study(" in each]
    assert len(source.splitlines()) <= 40
    (tmp_path / "mixed.py").write_text(source)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path)])
    monkeypatch.setattr(frame, "registered", dict(frame.registered))
    assert "mixed" in studies.names()
    study = studies.load("mixed")
    try:
        stem = tmp_path / "chart"
        status = frame.main(study, ["--preset", "tiny", "--device", "cpu", "--quick", "--chart", str(stem)])
    finally:
        sys.modules.pop("benchmarks.studies.mixed")
    out = capsys.readouterr().out
    assert status == 0
    assert "2_sdpa, FP32" in out and "2_sdpa, BF16" in out and "x first [95 %]" in out
    assert (tmp_path / "chart-ratio.png").exists() and (tmp_path / "chart-ratio.svg").exists()

