"""What all tests share: their tiers, the skips where a machine lacks something, and fixtures.

Every test carries one tier: `unit` (milliseconds, no block compiled), `integration` (several parts together, a compiler
or a process) or `stress` (long or large). `pytest -m unit` is the quick look.
"""
import contextlib
import errno
import gc
import itertools
import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize

import pytest
import torch

# Before the next line imports Triton and Inductor's settings, which read these.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Inductor takes the vector instructions that the system names. Else it compiles programs to try them, in each process
# with caches of its own.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import studies
from benchmarks.measure import truth
from benchmarks.show import study as frame
from common.block import precision, traits
from common.measure import subject
from common.runtime import compiler as compilers
from common.runtime import engine, limit, timing
from tests.helpers.made_results import sustained

TIERS = ("unit", "integration", "stress")


def pytest_configure(config):
    """Caches and locks in a folder of this run's own, but for the compiler's cache: a worker shares that of the run.

    A compiler that starts anew compiles torch's headers first, which takes longer than most tests.
    """
    config.folder = tempfile.mkdtemp(prefix="test-")                     # mode 0700: what is in it gets executed
    if not hasattr(config, "workerinput"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(config.folder, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(config.folder, "triton")
    os.environ["TMPDIR"] = tempfile.tempdir = config.folder              # runs wait for each other by a file in there


def pytest_unconfigure(config):
    tempfile.tempdir = None
    # Last of all: a server of processes has a folder in it, which multiprocessing removes when this process ends.
    Finalize(None, shutil.rmtree, args=[config.folder], kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_collection_modifyitems(items):
    untiered = [item.nodeid for item in items if sum(map(bool, map(item.get_closest_marker, TIERS))) != 1]
    if untiered:
        raise pytest.UsageError(f"every test carries exactly one of the markers {', '.join(TIERS)}; these do not:\n  "
                                + "\n  ".join(untiered))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if item.get_closest_marker("transformer_engine") and (reason := fp8_missing()):
        pytest.skip(f"needs Transformer Engine and a GPU with FP8: {reason}")


def pytest_terminal_summary(terminalreporter):
    """What tests have to show, `record_property("seen", ...)`, whichever process they ran in."""
    shown = [value for report in terminalreporter.stats.get("passed", []) for name, value in report.user_properties
             if name == "seen"]
    if shown:
        terminalreporter.section("seen")
        terminalreporter.write_line("\n".join(sorted(shown)))


def fp8_missing() -> str | None:
    """Why Transformer Engine can't multiply in FP8 here, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if error := engine.import_error():
        return f"it does not import ({error})"
    available, reason = engine.transformer_engine().is_fp8_available(return_reason=True)
    return None if available else reason


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What is there before a module's first test is never garbage: each collection would look at all of it."""
    gc.set_threshold(truth.OBJECTS_A_COLLECTION, 10, 10)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def without_work_that_no_test_reads():
    """Dynamo times the guards of each graph, for its log, behind a flush of all caches. The judge asks whether objects
    are frozen, which Python counts one by one: here there always are some.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        patch.setattr(truth, "somebody_froze", lambda: True)
        yield


@pytest.fixture(autouse=True)
def a_cpu_that_multiplies_bfloat16(monkeypatch):
    """Whatever this machine's CPU does: what a test in this process claims of steps must not depend on it."""
    monkeypatch.setattr(traits, "cpu_multiplies_bfloat16", lambda: True)


@pytest.fixture
def a_cpu_without_bfloat16(monkeypatch, a_cpu_that_multiplies_bfloat16):
    monkeypatch.setattr(traits, "cpu_multiplies_bfloat16", lambda: False)


@pytest.fixture(autouse=True)
def nothing_drawn_before():
    """Forget the parameters that another test's run drew, or put in their place."""
    subject._seeded.cache_clear()


@pytest.fixture
def compiler(device):
    """Skip where Inductor finds no compiler for the test's `device`."""
    if reason := compilers.missing(torch.device(device)):
        pytest.skip(reason)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before this test, nothing left after it, the recompile limit as it was."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.fixture
def studies_in_seconds(monkeypatch):
    """Known peaks, and a calibration that takes no time: a study of a tiny shape in seconds. The caches stay ours."""
    dtypes = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
    peaks = limit.Peaks(dict.fromkeys(dtypes, 1e12), 1e11)
    small = torch.ones(16)
    monkeypatch.setattr("common.runtime.peaks.measure_burst", lambda *_: peaks)
    monkeypatch.setattr("common.runtime.peaks.measure_sustained",
                        lambda workload, name, device: sustained(name, small.sum))
    monkeypatch.setattr(timing, "calibration", lambda device: dict.fromkeys(("gemm", "copy"), small.sum))
    monkeypatch.setattr(timing.EventClock, "settle_ms", 1.0)
    monkeypatch.setattr(timing.EventClock, "burst_ms", 1.0)
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):         # a study sets them
        monkeypatch.setenv(variable, os.environ.get(variable, ""))


@pytest.fixture
def study_main(capsys, studies_in_seconds):
    """A study in this process, on a CPU: study_main(name, *argv) -> (exit status, stdout, stderr)."""
    def call(name, *argv):
        words = [str(argument) for argument in ("--preset", "tiny", "--device", "cpu", *argv)]
        try:
            status = frame.main(studies.load(name), words)
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


@pytest.fixture
def full_disk(monkeypatch):
    """Every record's write finds the disk full, as /dev/full would where it is a device; not every container has it."""
    def write(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "write", write)


@pytest.fixture
def full_stdout():
    """A context: what is printed finds the disk full. At its end stdout is closed, as at the end of a process."""
    @contextlib.contextmanager
    def context():
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
            yield
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    return context()


@pytest.fixture
def ctrl_c(monkeypatch):
    """ctrl_c(module, name, call): when module.name is called for that time, the signal that a terminal would send."""
    def at(module, name, call):
        function, calls = getattr(module, name), itertools.count(1)

        def interrupted(*arguments, **options):
            if next(calls) == call:
                signal.raise_signal(signal.SIGINT)
            return function(*arguments, **options)
        monkeypatch.setattr(module, name, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)              # in the background it may be ignored
    yield at
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


@pytest.fixture
def uncompiled():
    """Step 3 runs the same Python code without its compiler: its meaning is tested in many shapes, in no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(params=["highest", "high", "medium"])
def callers(request, monkeypatch):
    """The precision of FP32 matmuls that the caller has set, and wants back."""
    monkeypatch.setattr(precision.FLOAT32_MATMUL, "outside", None)       # a failure here is not to fail the next test
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def cheap_backend(monkeypatch, fresh_dynamo):
    """Step 3 compiled by Dynamo and AOTAutograd as it asks for, but to no C++: seconds, not minutes, for ten shapes.

    The value counts the graphs (`frame_count`).
    """
    counter, compile_in_place = CompileCounterWithBackend("aot_eager"), torch.nn.Module.compile
    asked = []

    def compile_cheaply(module, **options):
        asked.append(options)
        compile_in_place(module, backend=counter, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_cheaply)
    with torch.compiler.set_stance("default"):
        yield counter
    assert asked and all(options == {"fullgraph": True, "dynamic": False} for options in asked)
