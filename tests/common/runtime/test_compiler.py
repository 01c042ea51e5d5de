"""What torch.compile needs, its caches, and that nothing is compiled while it is timed."""
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import steps
from common.outcome import Failed
from common.runtime import compiler

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def add_program(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    (folder / name).chmod(0o755)


# ------------------------------------------------------------------------------------------------- the host's compiler


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A machine without any program; the folder that its PATH names."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@unit
def test_a_compiler_that_is_missing_is_named_with_the_fix(nothing_installed, monkeypatch):
    assert compiler.missing(GPU) == "no C compiler found: install gcc, or name one in the variable CC"
    assert compiler.missing(CPU).startswith("no C++ compiler found: install ")
    monkeypatch.setenv("CXX", "/nonexistent -O2")
    assert compiler.missing(CPU) == "no C++ compiler found: the variable CXX names /nonexistent -O2"


@unit
@pytest.mark.skipif(sys.platform == "darwin", reason="there clang++ is what Inductor takes")
def test_a_compiler_that_inductor_does_not_look_for_is_none(nothing_installed, monkeypatch):
    """With clang++ alone, and no CXX, Inductor looks for g++ and fails: step 3 must say so instead of trying."""
    add_program(nothing_installed, "clang++")
    assert compiler.missing(CPU) == "no C++ compiler found: install g++, or name one in the variable CXX"
    monkeypatch.setenv("CXX", "clang++ -O2")
    assert compiler.missing(CPU) is None
    monkeypatch.delenv("CXX")
    add_program(nothing_installed, "g++")
    assert compiler.missing(CPU) is None


@unit
def test_triton_takes_any_c_compiler_that_is_there_or_named(nothing_installed, monkeypatch):
    add_program(nothing_installed, "clang")
    assert compiler.missing(GPU) is None
    monkeypatch.setenv("CC", "icx")
    assert compiler.missing(GPU)


# ------------------------------------------------------------------------------------------------------ private caches


@integration
@pytest.mark.parametrize("existing, inside, trusted", [
    (None, None, True), (0o755, None, True), (0o755, 0o700, True), (0o775, None, False), (0o777, None, False),
    (0o755, 0o775, False), ("a file", None, False), ("a link", None, False)])
def test_precompiled_headers_are_used_from_a_folder_of_ones_own(existing, inside, trusted, monkeypatch, tmp_path):
    """Inductor keeps them in the temporary folder that all users share, under a path that any of them can make."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    from torch._inductor import config
    from torch._inductor.runtime.runtime_utils import default_cache_dir
    folder = Path(default_cache_dir())
    if existing == "a file":
        folder.touch()
    elif existing == "a link":
        folder.symlink_to(tmp_path)
    for place, mode in ((folder, existing), (folder / "precompiled_headers", inside)):
        if isinstance(mode, int):
            place.mkdir()
            place.chmod(mode)
    with config.patch(cpp_cache_precompile_headers=True):
        compiler.use_private_caches()
        assert config.cpp_cache_precompile_headers == trusted
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder))


@unit
def test_a_folder_of_another_user_or_none_is_not_ones_own(monkeypatch, tmp_path):
    assert compiler.own_folder(str(tmp_path)) and not compiler.own_folder(str(tmp_path / "missing" / "folder"))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not compiler.own_folder(str(tmp_path))


@unit
def test_processes_may_share_what_triton_has_compiled(monkeypatch):
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    compiler.use_private_caches()
    first = dict(os.environ)
    with compiler.sharing_kernels():
        compiler.use_private_caches()
    assert os.environ["TRITON_CACHE_DIR"] == first["TRITON_CACHE_DIR"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != first["TORCHINDUCTOR_CACHE_DIR"]
    compiler.use_private_caches()
    assert os.environ["TRITON_CACHE_DIR"].startswith(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_removes_the_private_caches(number, tmp_path):
    """As `timeout`, a scheduler or a closed terminal tells it; told once more, it is not held up."""
    done = subprocess.run([sys.executable, "-c", f"""
import os, shutil, signal
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
from common.runtime import compiler
compiler.use_private_caches()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
remove = shutil.rmtree
def removed(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    remove(*arguments, **options)
shutil.rmtree = removed
os.kill(os.getpid(), {int(number)})
print("went on")
"""], cwd=steps.ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 128 + number and "went on" not in done.stdout and not done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path and not folder.exists()


# ----------------------------------------------------------------------------------------------- compiled, and for good


@unit
def test_what_went_through_the_compiler_is_known(fresh_dynamo):
    plain = torch.nn.Linear(2, 2)
    in_place = torch.nn.Linear(2, 2)
    in_place.compile(backend="eager")
    wrapped = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    function = torch.compile(torch.relu, backend="eager")
    assert [compiler.is_compiled(call) for call in (plain, in_place, wrapped, function)] == [False, True, True, True]
    assert compiler.holds_compiled(in_place) and not compiler.holds_compiled(plain)
    holder = SimpleNamespace(gelu=function)
    assert compiler.holds_compiled(holder) and not compiler.is_compiled(holder)


@unit
@pytest.mark.parametrize("way", [lambda layer: layer.compile(), lambda layer: None])
def test_a_model_that_is_compiled_block_by_block_holds_compiled_code(way):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert not compiler.holds_compiled(model)
    way(model[0][0][0])
    assert compiler.holds_compiled(model) == compiler.is_compiled(model[0][0][0])
    wrapped = torch.nn.ModuleList([torch.compile(torch.nn.Linear(2, 2))])
    assert compiler.holds_compiled(wrapped)


@integration
def test_a_block_that_is_compiled_again_while_timed_fails(fresh_dynamo):
    block = torch.nn.Linear(2, 2)
    block.compile(backend="eager", dynamic=False)
    block(torch.ones(3, 2))
    with compiler.compiled_for_good(block):
        block(torch.ones(3, 2))
    with pytest.raises(Failed, match=r"it was compiled again after warm-up \(.+mismatch.*\): its"), \
            compiler.compiled_for_good(block):
        block(torch.ones(4, 2))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@unit
def test_the_guard_that_failed_is_named_with_its_line(fresh_dynamo):
    block = Counting()
    block.compile(backend="eager", dynamic=False)
    block(torch.ones(3))
    with pytest.raises(Failed, match=r"\(self\.calls == 0 no longer holds, test_compiler\.py:\d+\)"), \
            compiler.compiled_for_good(block):
        block(torch.ones(3))


@unit
@pytest.mark.parametrize("message, said", [
    ("Detected recompile", ""),
    ("a\n    - 0/1: self.n == 1      # self.n += 1  # home/x/m.py:11 in forward (HINT: b)\n",
     "self.n == 1 no longer holds, m.py:11"),
    ("a\n    - 12/0: tensor 'x' size mismatch at index 0. expected 3, actual 4",
     "tensor 'x' size mismatch at index 0. expected 3, actual 4"),
    ("0/0: len(self.rows) == 2", "len(self.rows) == 2 no longer holds")])
def test_a_guard_is_read_from_what_dynamo_says(message, said):
    assert compiler.guard_in(message) == said


@unit
def test_any_other_error_of_what_is_timed_passes():
    with pytest.raises(RuntimeError, match="a shape is wrong"), compiler.compiled_for_good(torch.nn.Linear(2, 2)):
        raise RuntimeError("a shape is wrong")


@unit
def test_a_block_is_compiled_whole_and_for_its_own_shape(fresh_dynamo):
    asked = []
    compiler.compile_in_place(SimpleNamespace(compile=lambda **options: asked.append(options)))
    assert asked == [{"fullgraph": True, "dynamic": False}]
    assert torch._dynamo.config.recompile_limit == compiler.RECOMPILE_LIMIT
