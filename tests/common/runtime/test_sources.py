"""Which sources ran: their commit, and a digest that anybody can compute again."""
import re
import subprocess
from pathlib import Path

import pytest

from common import steps
from common.runtime import machine, sources

pytestmark = pytest.mark.integration


@pytest.fixture
def tree(tmp_path) -> Path:
    """The folders of a checkout with small files: five scripts, sources, and what is none."""
    contents = {step.path.name: f"# step {step.number}\n" for step in steps.ALL}
    contents |= {"common/a.py": "a = 1\n", "common/b.py": "b = 2", "common/Z.py": "", "common/README.md": "words",
                 "benchmarks/kernels/cuda/k.cu": "__global__", "benchmarks/kernels/cuda/k.cuh": "#pragma once\n",
                 "benchmarks/kernels.py": "", "benchmarks/results/a.jsonl": "{}", "common/__pycache__/a.pyc": "code",
                 "tests/test_a.py": "", "README.md": "words"}
    for name, content in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def digest(root: Path) -> str:
    sources.digest.cache_clear()
    return sources.digest(root)


def test_the_digest_is_what_the_command_in_the_page_prints(tree):
    """All source files, one behind the other, through sha256sum."""
    lines = (steps.ROOT / "common" / "README.md").read_text().splitlines()
    (command,) = (line for line in lines if line.endswith("sha256sum"))
    told = subprocess.run(["sh", "-c", command], cwd=tree, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [digest(tree), "-"]
    names = [path.relative_to(tree).as_posix() for path in sources.files(tree)]
    assert names == sorted(names) and "benchmarks/kernels/cuda/k.cu" in names and "common/README.md" not in names


def test_what_runs_write_and_a_stray_copy_change_no_digest(tree):
    before = digest(tree)
    for name in ("2_mine.py", "README.md", "common/README.md", "benchmarks/results/a.jsonl", "tests/test_a.py",
                 "common/__pycache__/a.pyc"):
        (tree / name).write_text("another")
    assert digest(tree) == before


@pytest.mark.parametrize("name", ["common/a.py", "2_sdpa.py", "benchmarks/kernels/cuda/k.cu"])
def test_a_comment_in_a_source_changes_the_digest(tree, name):
    before = digest(tree)
    with (tree / name).open("a") as file:
        file.write("# a comment")
    assert digest(tree) != before


def test_the_digest_is_computed_once_for_a_process(tree):
    """Who edits a source while it runs has not run the edited one."""
    before = digest(tree)
    (tree / "common" / "a.py").write_text("a = 3")
    assert sources.digest(tree) == before


def test_this_trees_sources_are_in_its_facts(monkeypatch):
    monkeypatch.setattr(sources, "digest", lambda: "a digest")
    monkeypatch.setattr(sources, "commit", lambda: "a commit")
    facts = machine.facts(machine.torch.device("cpu"))
    assert (facts["sources"], facts["git"]) == ("a digest", "a commit")
    assert steps.ROOT / "common" / "runtime" / "sources.py" in sources.files()
    assert steps.load(0).path in sources.files()


@pytest.fixture
def repository(tmp_path) -> Path:
    """A checkout of one commit: a source, a page, recorded runs."""
    (tmp_path / "common" / "runtime").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("common/runtime/machine.py", "README.md", "common/README.md", "benchmarks/results/a.jsonl"):
        (tmp_path / name).write_text("a")
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b", *words], check=True,
                       capture_output=True)
    return tmp_path


def test_a_changed_checkout_is_told_apart_by_how(repository):
    """Two edits are two versions of the code, the same edit is one; what runs write, and pages, are no code."""
    commit = sources.commit(repository)
    assert re.fullmatch("[0-9a-f]+", commit)
    for name in ("README.md", "common/README.md", "benchmarks/results/a.jsonl"):
        (repository / name).write_bytes(b"caf\xe9")
    assert sources.commit(repository) == commit
    changed = []
    for text in (b"b", b"\xe9", b"b"):
        (repository / "common" / "runtime" / "machine.py").write_bytes(text)
        changed.append(sources.commit(repository))
    first, second, again = changed
    assert first == again != second and all(name.startswith(f"{commit}+") for name in changed)


def test_without_git_the_commit_is_that_of_the_environment(tmp_path, monkeypatch):
    """As in an image, into which no repository is copied."""
    monkeypatch.setenv("GIT_COMMIT", "0123abc")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert sources.commit(tmp_path) == "0123abc"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sources.commit(tmp_path) == "0123abc"
    monkeypatch.delenv("GIT_COMMIT")
    assert sources.commit(tmp_path) is None
