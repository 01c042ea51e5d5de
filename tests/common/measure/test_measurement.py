"""How a row is timed: what runs before, when the peak memory is read, and in which state the machine was meanwhile."""
from types import SimpleNamespace

import pytest
import torch

from common import PRESETS
from common.measure import measurement
from common.measure.cases import Case, Group
from common.measure.session import Entry, Session
from common.report.result import Result, Row
from common.runtime import compiler, machine, timing
from common.runtime.iteration import BOTH, FORWARD, Iteration
from common.runtime.timing import EventClock, HostClock, StopRule, Timing
from tests.helpers.made_results import CPU, H200, SAMPLES

pytestmark = pytest.mark.unit
RULE = StopRule(max_seconds=1.25)
CPU_DEVICE = torch.device("cpu")


class FakeSubject:
    """Its iterations say that they ran; of what is captured a replay is given, or a reason."""
    call = workload = None

    def __init__(self, device: str, order: list[str], reason: str = ""):
        self.inputs = [SimpleNamespace(device=torch.device(device))]
        self.order, self.reason = order, reason
        self.modes: list[str] = []

    def iteration(self, mode: str) -> Iteration:
        self.modes.append(mode)
        return Iteration(lambda: self.order.append("run"), lambda: self.order.append("between"), [], {})

    def replay(self, mode: str, captured):
        self.modes.append(mode)
        self.order.append("capture")
        if self.reason:
            return None, self.reason
        captured()
        return lambda: self.order.append("replay"), ""

    def between_replays(self, mode: str, replayed):
        return timing.nothing


class Timed:
    """A row that was timed by fakes of all that takes time; `order` is what happened, one behind the other."""

    def __init__(self, monkeypatch, device: str):
        self.device, self.order = device, []
        self.row, self.asked = Row(), None
        self.states = [{"load_average": 0.5}]
        self.result = Result("2_sdpa", PRESETS["tiny"], "float32", H200 if device == "cuda" else CPU)
        monkeypatch.setattr(machine, "state", self._state)
        for name in ("empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.order.append(name))
        monkeypatch.setattr(machine, "memory_peak", self._memory_peak)
        monkeypatch.setattr(timing, "measure", self._measure)
        monkeypatch.setattr(timing, "calibration", lambda device: {"of": device})
        monkeypatch.setattr(timing, "enqueue_ms", self._enqueue_ms)
        monkeypatch.setattr(measurement, "under_load", self._under_load)

    def _memory_peak(self, device) -> int:
        self.order.append("peak")
        return 1000 + self.order.count("run") + 100 * self.order.count("replay")

    def _measure(self, *arguments) -> Timing:
        self.asked = arguments
        run, _, between, *_ = arguments
        self.order.append("measure")
        between()
        run()
        return Timing(SAMPLES, True, "fake")

    def _enqueue_ms(self, run, between) -> float:
        self.order.append("enqueue")
        between()
        run()
        return 0.25

    def _under_load(self, device, work, count) -> dict:
        self.order.append(f"{count} under load")
        work.between()
        work.run()
        return self.states.pop(0)

    def _state(self, device) -> dict:
        self.order.append("state")
        return self.states.pop(0)

    def time(self, mode: str = BOTH, launch: str = "eager", reason: str = "") -> FakeSubject:
        subject = FakeSubject(self.device, self.order, reason)
        session = Session("step", CPU_DEVICE, RULE)
        session.device, self.order[:] = torch.device(self.device), []
        entry = Entry(Case("2_sdpa", prepare=None), self.result, subject)
        session._time_row(entry, mode, launch, timing.clock_for(session.device), RULE, Group([], metered=True))
        self.row = self.result.rows[mode, launch]
        return subject


@pytest.fixture
def on_gpu(monkeypatch) -> Timed:
    return Timed(monkeypatch, "cuda")


@pytest.fixture
def on_cpu(monkeypatch) -> Timed:
    return Timed(monkeypatch, "cpu")


ONE = ["between", "run"]


def test_a_row_is_warm_before_its_peak_memory_is_read(on_gpu):
    """The peak is that of two iterations since the reset: read at once, it would be that of what lay there before."""
    subject = on_gpu.time(FORWARD)
    assert on_gpu.order == ["empty_cache", "reset_peak_memory_stats", *ONE, *ONE, "peak", "between", "measure", *ONE,
                            "3 under load", *ONE, "between"]
    assert on_gpu.row.peak_bytes == 1002 and on_gpu.row.timing.samples == SAMPLES
    assert on_gpu.row.reason == "" and subject.modes == [FORWARD]


def test_a_row_on_a_cpu_is_warm_too_and_nothing_of_a_gpu_is_asked(on_cpu):
    on_cpu.time()
    assert on_cpu.order == [*ONE, *ONE, "peak", "between", "measure", *ONE, "state", "between"]
    assert on_cpu.row.peak_bytes == 1002 and on_cpu.row.enqueue_ms is None
    assert on_cpu.row.state == {} and on_cpu.result.state == {"load_average": 0.5}


def test_a_replays_peak_memory_is_that_of_its_capture(on_gpu):
    """Its proof takes more, which no run of it needs. A replay is warm too, and nothing comes between two."""
    subject = on_gpu.time(launch="graph")
    assert on_gpu.order == ["empty_cache", "reset_peak_memory_stats", "capture", "peak", "measure", "replay",
                            "3 under load", "replay"]
    assert on_gpu.row.peak_bytes == 1000 and on_gpu.row.enqueue_ms is None
    assert on_gpu.row.timing.samples == SAMPLES and subject.modes == [BOTH]


def test_what_can_not_be_captured_is_a_row_with_its_reason(on_gpu):
    on_gpu.time(launch="graph", reason="graph: no")
    assert on_gpu.row == Row(reason="graph: no") and "measure" not in on_gpu.order


def test_a_cpu_has_no_graph_and_nothing_is_run_for_one(on_cpu):
    on_cpu.time(launch="graph")
    assert on_cpu.row == Row(reason=measurement.NOT_A_GPU) and on_cpu.order == []


@pytest.mark.parametrize("device, clock", [("cuda", EventClock), ("cpu", HostClock)])
def test_a_row_is_measured_by_its_devices_clock(monkeypatch, device, clock):
    timed = Timed(monkeypatch, device)
    timed.time()
    _, used, _, rule, progress, calibration = timed.asked
    assert type(used) is clock and rule is RULE and callable(progress)
    assert calibration == {"of": torch.device(device)}


def test_a_run_is_throttled_by_what_throttled_any_of_its_rows(on_gpu):
    """Its other readings are those of its last row; a row has its own."""
    on_gpu.states = [{"sm_mhz": 1980, "throttled": ["software thermal"]}, {"sm_mhz": 1425, "throttled": ["power cap"]},
                     {"sm_mhz": 1500, "throttled": []}]
    rows = []
    for _ in range(3):
        on_gpu.time()
        rows.append(on_gpu.row.state)
    assert on_gpu.result.state == {"sm_mhz": 1500, "throttled": ["power cap", "software thermal"]}
    assert [state["throttled"] for state in rows] == [["software thermal"], ["power cap"], []]
    assert [state["sm_mhz"] for state in rows] == [1980, 1425, 1500]


def test_where_throttling_is_not_known_none_is_reported(on_gpu):
    """No NVML: the card says n/a, and not that there was none."""
    on_gpu.time()
    assert on_gpu.row.state == on_gpu.result.state == {"load_average": 0.5}


def test_what_is_timed_is_not_compiled_meanwhile(on_cpu, monkeypatch):
    """What was compiled since would be in its samples; what runs before is outside."""
    seen = []
    entered = compiler.compiled_for_good

    def watched(*blocks):
        seen.append((blocks, list(on_cpu.order)))
        return entered(*blocks)
    monkeypatch.setattr(compiler, "compiled_for_good", watched)
    on_cpu.time()
    assert seen == [((None,), [*ONE, *ONE, "peak", "between"])]


# ----------------------------------------------------------------------------------------------------------- its state


@pytest.mark.parametrize("ms, count", [(12.5, 12), (0.4, 375), (444.0, 3)])
def test_clocks_are_read_in_150_ms_of_work_on_a_gpu(ms, count, monkeypatch):
    counts, result = [], Result("2_sdpa", PRESETS["tiny"], "float32", H200)

    def under_load(device, work, count):
        counts.append(count)
        return {"sm_mhz": 1400}
    monkeypatch.setattr(measurement, "under_load", under_load)
    monkeypatch.setattr(machine, "state", lambda device: {"load_average": 1.0})
    row = Row()
    measurement.read_state(measurement.Work(None), row, result, torch.device("cuda"), ms, metered=False)
    assert counts == [count] and row.state == result.state == {"sm_mhz": 1400} and row.energy is None
    measurement.read_state(measurement.Work(None), row, result, CPU_DEVICE, ms, metered=False)
    assert counts == [count] and result.state == {"load_average": 1.0}


def test_a_row_is_metered_on_a_gpu_alone(monkeypatch):
    """What was read of the machine meanwhile is the state of the row."""
    metered = []

    def steadily(device, work, row, ms):
        metered.append((device.type, ms))
        row.state = {"sm_mhz": 1400}
    monkeypatch.setattr(measurement, "_steadily", steadily)
    monkeypatch.setattr(machine, "state", lambda device: {"load_average": 1.0})
    states = []
    for device in ("cuda", "cpu"):
        result = Result("2_sdpa", PRESETS["tiny"], "float32", H200)
        measurement.read_state(measurement.Work(None), Row(), result, torch.device(device), 3.5, metered=True)
        states.append(result.state)
    assert metered == [("cuda", 3.5)] and states == [{"sm_mhz": 1400}, {"load_average": 1.0}]
