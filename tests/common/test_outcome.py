"""What a block can fail by becomes a status and a reason; whatever else passes."""
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch

from common import outcome, steps
from common.outcome import Failed, judged

unit = pytest.mark.unit
COMPILER_SAID = """C++ compile error

Command:
g++ /tmp/inductor-x/main.cpp -O3 -o /tmp/inductor-x/main.so

Output:
{}
compilation terminated."""


def of_the_compiler(said: Exception) -> RuntimeError:
    """What torch.compile raises where its backend has failed by `said`."""
    def inductor():
        """A backend."""
    return torch._dynamo.exc.BackendCompilerFailed(inductor, said, None)


def ended(error: BaseException, foreign: bool = False) -> tuple[str, str]:
    """(status, reason) of a run in which that was raised."""
    result = SimpleNamespace(status="ok", reason="")
    with judged(result, lambda error: "the peak", foreign):
        raise error
    return result.status, result.reason


@unit
@pytest.mark.parametrize("error, status, reason", [
    (Failed("the branch is off"), "failed", "the branch is off"),
    (NotImplementedError("no FP8 here"), "skipped", "no FP8 here"),
    (torch.OutOfMemoryError("CUDA out of memory"), "oom", "the peak"),
    (MemoryError(), "oom", "the peak"),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "oom", "the peak"),
    (of_the_compiler(ValueError("unsupported\nand more")), "failed",
     "torch.compile: backend='inductor' raised: ValueError: unsupported"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_what_a_block_fails_by_is_its_status(error, status, reason):
    assert ended(error) == (status, reason)


@unit
@pytest.mark.parametrize("error", [TypeError("unexpected\nand more"), RuntimeError("unexpected\nand more")])
def test_any_other_error_passes_where_the_block_is_ours(error):
    with pytest.raises(type(error)):
        ended(error)
    assert ended(error, foreign=True) == ("failed", f"{type(error).__name__}: unexpected")


@unit
@pytest.mark.parametrize("error", [
    RuntimeError(COMPILER_SAID.format("main.cpp:1: fatal error: error writing to /tmp/a.s: No space left on device")),
    RuntimeError(COMPILER_SAID.format("collect2: fatal error: /tmp/main.so: NO SPACE LEFT ON DEVICE")),
    OSError(28, "No space left on device", "/tmp/inductor-x/main.cpp"),
], ids=["the compiler", "the linker", "the source itself"])
def test_a_full_disk_under_the_compiler_names_folder_and_fix(error, monkeypatch):
    """And is no C++ compile error, as which the message begins."""
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert ended(of_the_compiler(error)) == (
        "failed", "torch.compile: no space left on device: its files are under /scratch, set TMPDIR to a folder with "
                  "room")


@unit
def test_a_compiler_that_fails_by_the_code_says_so():
    error = torch._dynamo.exc.TorchDynamoException(COMPILER_SAID.format("main.cpp:1: error: expected ';'"))
    assert ended(error) == ("failed", "torch.compile: C++ compile error")
    assert ended(torch._dynamo.exc.TorchDynamoException("")) == ("failed", "torch.compile: no message")


@unit
def test_another_error_is_no_lack_of_memory():
    assert outcome.is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert outcome.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert outcome.is_out_of_memory(MemoryError())
    assert not outcome.is_out_of_memory(RuntimeError("a shape is wrong"))


@unit
def test_another_librarys_error_is_its_kind_and_its_first_line():
    assert outcome.in_a_line(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    assert outcome.in_a_line(ValueError("one\ntwo")) == "ValueError: one"
    assert outcome.in_a_line(ValueError()) == "ValueError: no message"
    assert outcome.in_a_line(ValueError("refused: Guard(\n  shape=1,\n  why=other)\nmore")) == \
        "ValueError: refused: Guard( shape=1, why=other)"


@pytest.mark.integration
def test_ctrl_c_does_not_import_the_compiler():
    """An exception's clauses are looked at one by one: one that names the compiler's would load it, in its seconds."""
    told = subprocess.run([sys.executable, "-c", """
import sys
from common import outcome
try:
    with outcome.judged(None, None):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("torch._dynamo" in sys.modules)
"""], cwd=steps.ROOT, capture_output=True, text=True, timeout=120)
    assert told.stdout == "False\n", told.stderr
