"""One process that measures: what is built, checked, timed and looked into, and how it goes on without a case."""
import contextlib
import statistics
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.records.read import Run, extra, latest, paired, runner
from common import PRESETS, steps
from common.block import evidence
from common.block.evidence import Evidence
from common.block.traits import Traits
from common.block.workload import Operation, Workload
from common.measure import attribution, measurement, session, subject
from common.measure.cases import Case, Group, block_case, step_case
from common.measure.progress import PURPOSES
from common.measure.session import Calibration, Entry, RowKey, Session, Work
from common.outcome import Failed
from common.phases import Phase
from common.report.record_file import RecordFile
from common.report.result import Compilation, Result, Row
from common.runtime import compiler, limit, machine, peaks, rounds, timing
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES, Iteration
from tests.helpers.made_records import CPU_CONFIG, FACTS

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def some(studies_in_seconds) -> Session:
    """A session of six rounds."""
    return Session("ladder", CPU, until=6)


def group_of(*numbers: int, profiled: int = 0, **more) -> Group:
    return Group([step_case(steps.load(number), CPU_CONFIG, CPU) for number in numbers], profiled=profiled, **more)


def runs_of(some: Session) -> dict[str, Run]:
    return latest(some.lines)


def entry_of(name: str, call=None, **changes) -> Entry:
    """A case that is prepared already, of which nothing but its call is real."""
    result = Result(name, CPU_CONFIG, "float32", FACTS, **changes)
    return Entry(Case(name, prepare=None, config=CPU_CONFIG), result,
                 SimpleNamespace(call=call, forget_replay=lambda mode: None))


# --------------------------------------------------------------------------------------------------- the whole of it


@integration
def test_a_group_is_checked_timed_and_looked_into(some):
    some.measure(group_of(0, 2, profiled=6))
    runs = runs_of(some)
    assert list(runs) == ["0_baseline", "2_sdpa"]
    for run in runs.values():
        assert run.status == "ok" and run.value("check", "branch error") > 0
        for mode in MODES:
            assert len(run.samples(mode, "eager")) == 6 and not run.samples(mode, "graph")
            assert sum(run.parts(mode).values()) > 0 and run.attributed(mode)
            assert run.find(mode, "launches")["metric"]["extra_info"]["verdict"] == "proven"
            flops = step_case(steps.load(0), CPU_CONFIG, CPU).workload.flops(mode)
            assert run.value(mode, "rate", "eager") * run.median(mode, "eager") == pytest.approx(1e3 * flops)
        assert run.value(BOTH, "limit", "eager") > 2 * run.value(FORWARD, "limit", "eager")
    assert all(paired(*runs.values(), mode) for mode in MODES)
    assert some.alive() == []


@integration
@pytest.mark.parametrize("metered, also, wanted", [
    (True, (), {"eager": True}), (True, ["graph"], {"eager": True, "graph": True}),
    (False, ["graph"], {"eager": False})])
def test_the_faster_way_of_launching_is_metered_and_those_a_case_names(some, metered, also, wanted, monkeypatch):
    ready, seen = measurement.ready, {}

    def read_state(work, row, result, device, ms, is_metered):
        seen[next(launch for (_, launch), each in result.rows.items() if each is row)] = is_metered
        row.state = {"sm_mhz": 1000 + len(seen)}
    monkeypatch.setattr(measurement, "ready", lambda subject, mode, launch, *rest, **more: ready(
        subject, mode, "eager", *rest, **more))
    monkeypatch.setattr(measurement, "read_state", read_state)
    monkeypatch.setattr(some, "_faster", lambda expected: {key.entry: "eager" for key in expected
                                                           if not isinstance(key, Calibration)})
    case = replace(step_case(steps.load(0), CPU_CONFIG, CPU), metered=also)
    some.measure(Group([case], modes=(FORWARD,), launches=LAUNCHES, metered=metered))
    assert seen == wanted
    (entry,) = some.entries
    states = [entry.result.rows[FORWARD, launch].state["sm_mhz"] for launch in LAUNCHES]
    assert len(set(states)) == len(wanted)


@integration
def test_samples_say_in_which_round_and_when_they_were_taken(some):
    some.measure(group_of(0))
    for mode in MODES:
        fields = extra(runs_of(some)["0_baseline"].find(mode, "latency", "eager"))
        assert fields["rounds"] == list(range(6)) and fields["offsets_s"] == sorted(fields["offsets_s"])
        assert {name: len(samples) for name, samples in fields["calibration"].items()} == {"gemm": 6, "copy": 6}


@integration
def test_what_is_not_calibrated_or_kept_is_as_the_group_says(some):
    some.measure(group_of(0, calibrated=False, modes=[FORWARD]), keep=True)
    (entry,) = some.alive()
    assert entry.subject is not None
    run = runs_of(some)["0_baseline"]
    assert extra(run.find(FORWARD, "latency", "eager"))["calibration"] == {} and not run.samples(BOTH, "eager")
    some.release()
    assert some.alive() == []


@integration
def test_a_group_is_launched_by_its_own_ways(monkeypatch, studies_in_seconds):
    some, asked = Session("ladder", CPU, 6, launches=LAUNCHES), []
    ready = measurement.ready

    def seen(subject, mode, launch, row, **how):
        asked.append(launch)
        return ready(subject, mode, launch, row, **how) if launch == "eager" else None
    monkeypatch.setattr(measurement, "ready", seen)
    some.measure(group_of(0, modes=[FORWARD], launches=LAUNCHES[:1]))
    some.measure(group_of(0, modes=[FORWARD]))
    assert asked == ["eager", *LAUNCHES]


@unit
@pytest.mark.parametrize("ms, rounds_of_it", [(0.9, 2), (1.1, 1)])
def test_what_fills_a_sample_by_one_iteration_is_warm_after_one_round(ms, rounds_of_it, monkeypatch):
    some, asked = Session("ladder", CPU, 6), []

    def interleaved(runs, clock, count, between, seed):
        asked.extend(count * list(runs))
        return {key: ([ms] * count, [0.0] * count) for key in runs}
    monkeypatch.setattr(rounds, "interleaved", interleaved)
    clock = SimpleNamespace(burst_ms=1.0)
    key = Calibration("a copy")
    assert some._warm_up(FORWARD, {key: Work(lambda: None, timing.nothing)}, clock) == {key: ms}
    assert asked == rounds_of_it * [key]


@integration
def test_records_are_written_as_they_become_final(studies_in_seconds, tmp_path, monkeypatch):
    """Those of the check before anything is timed, those of a pass before the next one."""
    some = Session("ladder", CPU, 6, file=RecordFile(str(tmp_path / "out")))
    held, interleaved = [], rounds.interleaved

    def counted(*arguments):
        held.append([line["benchmark"]["mode"] for line in some.lines])
        assert some.file.count == len(some.lines)
        return interleaved(*arguments)
    monkeypatch.setattr(rounds, "interleaved", counted)
    some.measure(group_of(0))
    warm_up, _, forward, _, _, both = held                             # two rounds of warm-up
    assert set(warm_up) == set(forward) == {"check"} and set(both) == {"check", FORWARD}
    assert some.file.count == len(some.lines) > len(both)


# ---------------------------------------------------------------------------------------------- building and checking


@integration
def test_a_case_that_fails_its_check_is_a_row_without_times(some, monkeypatch):
    script = steps.load(2).module
    build = script.build

    def wrong(config, values, device):
        block = build(config, values, device)
        block.ln_1.eps = 0.5
        return block
    monkeypatch.setattr(script, "build", wrong)
    some.measure(group_of(0, 2))
    right, failed = runs_of(some).values()
    assert right.status == "ok" and all(right.best_ms(mode) > 0 for mode in MODES)
    assert failed.status == "failed" and "the gate is" in failed.info["reason"]
    assert failed.value("check", "branch error") > 0 and not failed.samples(FORWARD, "eager")


@integration
def test_memory_that_does_not_hold_a_case_is_a_row(some, monkeypatch):
    def build(*_):
        raise torch.OutOfMemoryError("no")
    monkeypatch.setattr(steps.load(1).module, "build", build)
    some.measure(group_of(0, 1))
    right, too_large = runs_of(some).values()
    assert right.status == "ok" and too_large.status == "oom" and "fits" in too_large.info["reason"]


@unit
def test_a_case_beyond_this_machines_memory_is_refused_unbuilt(some):
    config = CPU_CONFIG.replace(batch_size=2**20)
    entry = some.prepare(block_case("large", lambda *_: pytest.fail("it was built"), config, Traits(), CPU))
    assert entry.subject is None and entry.result.status == "oom"
    assert "--batch-size" in entry.result.reason and " GiB needed, this machine has " in entry.result.reason
    no_block = Case("large", prepare=None, workload=Workload("float32", bytes_needed=2**60))
    assert some.prepare(no_block).result.reason.endswith("; give smaller inputs")


@unit
def test_what_this_machine_lacks_is_a_row_with_its_reason(some):
    entry = some.prepare(step_case(steps.load(1), CPU_CONFIG, CPU, missing="no TF32 here"))
    assert (entry.result.status, entry.result.reason) == ("skipped", "no TF32 here")
    (line,) = some.lines
    assert line["metric"]["name"] == "status" and line["benchmark"]["mode"] == "check"


@integration
def test_an_emulation_is_checked_and_not_timed(some):
    entry = some.prepare(step_case(steps.load(4), CPU_CONFIG, CPU))
    assert entry.subject is None and entry.result.status == "skipped" and "emulated" in entry.result.reason
    assert {line["metric"]["name"] for line in some.lines} >= {"branch error", "parameter gradient error"}


@unit
@pytest.mark.parametrize("error, reason", [
    (TypeError("unexpected keyword\nand more"), "TypeError: unexpected keyword"),
    (RuntimeError("no kernel image\nand more"), "RuntimeError: no kernel image")])
def test_another_librarys_error_is_a_row_and_ours_is_an_error(some, error, reason):
    def build(*_):
        raise error
    entry = some.prepare(block_case("theirs", build, CPU_CONFIG, Traits(), CPU))
    assert entry.subject is None and (entry.result.status, entry.result.reason) == ("failed", reason)
    with pytest.raises(type(error)):
        some.prepare(block_case("ours", build, CPU_CONFIG, steps.load(2).traits, CPU))


@unit
def test_only_the_first_compiled_block_is_timed_cold(some, monkeypatch):
    """The caches are filled then."""
    asked = []

    def prepare(setting, result):
        asked.append(setting.time_compiler)
        return SimpleNamespace(call="a block")
    monkeypatch.setattr(compiler, "is_compiled", lambda call: len(asked) > 1)
    for name in "abc":
        some.prepare(Case(name, prepare))
    assert asked == [True, True, False]


# ------------------------------------------------------------------------------------------------------------ profiling


@integration
def test_a_row_is_profiled_right_behind_its_samples(some, monkeypatch):
    """In the last round its clocks are read there. All is taken apart once all is timed: that takes the host a while,
    in which a GPU would raise its clocks.
    """
    order, read_state, pairs = [], measurement.read_state, attribution.CpuBurst.pairs

    class Burst(attribution.CpuBurst):
        def __init__(self, *work):
            order.append(f"profile in {work[-1]}")
            super().__init__(*work)

        def pairs(self):
            order.append("take apart")
            return pairs(self)

    def look(*arguments):
        order.append("look")
        return read_state(*arguments)
    monkeypatch.setattr(measurement, "read_state", look)
    monkeypatch.setattr(attribution, "CpuBurst", Burst)
    some.measure(group_of(0, 2, profiled=4))
    one_pass = [f"profile in {number}" for number in range(4) for _ in range(2)] + 2 * ["look"]
    assert order == 2 * (one_pass + 8 * ["take apart"])


@integration
def test_a_row_is_profiled_before_its_sample_in_every_other_round(some, monkeypatch):
    """The second of two bursts finds a GPU warmer: so each is the second in half of the rounds."""
    order, sample = [], timing.HostClock.sample

    class Burst(attribution.CpuBurst):
        def __init__(self, *work):
            super().__init__(*work)
            order.append("profile")

    def sampled(*arguments):
        order.append("sample")
        return sample(*arguments)
    monkeypatch.setattr(attribution, "CpuBurst", Burst)
    monkeypatch.setattr(some, "_warm_up", lambda mode, works, clock: dict.fromkeys(works, 1.0))
    monkeypatch.setattr(timing.HostClock, "sample", sampled)
    some.measure(group_of(0, profiled=3, modes=[FORWARD], calibrated=False))
    one_of_its_own = ["sample", "profile"]                       # a burst has a sample beside the profiler, too
    assert order == ["sample", *one_of_its_own, *one_of_its_own, "sample", "sample", *one_of_its_own, *["sample"] * 3]


@integration
def test_sustained_work_takes_part_in_the_rounds(some):
    """Beside the calibrations, and it is none: what compare holds against holds no peaks."""
    some.measure(group_of(0, sustained=True, modes=[FORWARD]))
    assert {name: len(sustained.in_rounds) for name, sustained in some.peaks.sustained.items()} == {
        "float32": 6, "copy": 6}
    run = runs_of(some)["0_baseline"]
    assert set(extra(run.find(FORWARD, "latency", "eager"))["calibration"]) == {"gemm", "copy"}
    assert run.value(FORWARD, "percent of sustained limit", "eager") > 0
    some.finish(CPU_CONFIG)
    told = {(extra(line)["yardstick"], extra(line)["of"]) for line in some.lines
            if line["metric"]["name"] == "peak"}
    assert {("sustained", "float32"), ("sustained", "copy"), ("burst", "float32"), ("burst", "copy")} <= told


@integration
def test_a_group_that_asks_for_none_has_no_sustained_limit(some):
    some.measure(group_of(0, modes=[FORWARD]))
    run = runs_of(some)["0_baseline"]
    assert not some.peaks.sustained and run.value(FORWARD, "percent of sustained limit", "eager") is None


@integration
def test_every_case_can_be_made_slower_on_purpose(some, monkeypatch):
    """By copies that take that share of its time. The calibrations stay as they are, and the records say so."""
    asked = []
    monkeypatch.setattr(timing, "copying_for", lambda device, ms: asked.append(ms) or (lambda: asked.append("copy")))
    monkeypatch.setattr(some, "_warm_up", lambda mode, works, clock: dict.fromkeys(works, 40.0))
    some.slow_down = 5.0
    some.measure(group_of(0, modes=[FORWARD]))
    assert asked[0] == 2.0 and asked.count("copy") == 6 == len(asked) - 1
    assert runs_of(some)["0_baseline"].info["slowed_percent"] == 5.0


@integration
def test_the_parts_of_a_row_are_of_its_own_profiled_rounds(some):
    some.measure(group_of(0, 2, profiled=4))
    for run in runs_of(some).values():
        for mode in MODES:
            fields = run.by_part(mode)
            assert (fields["of"], fields["rounds"]) == ("eager", 4) and not run.attributed(mode)
            assert fields["timed"] == pytest.approx(statistics.mean(run.samples(mode, "eager")[:4]))
            assert fields["clocked"] > 0 and fields["clocked"] != fields["timed"]


@integration
def test_gradients_do_not_add_up_while_a_case_is_profiled(some, monkeypatch):
    blocks, had_gradients = [], []
    script = steps.load(0).module
    build = script.build

    def kept(*arguments):
        blocks.append(build(*arguments))
        return blocks[-1]

    def has_gradients() -> bool:
        return any(parameter.grad is not None for parameter in blocks[-1].parameters())

    class Burst(attribution.CpuBurst):
        def __init__(self, iteration, between, *more):
            iteration()
            behind = has_gradients()
            between()
            had_gradients.append((behind, has_gradients()))
            super().__init__(iteration, between, *more)
    monkeypatch.setattr(script, "build", kept)
    monkeypatch.setattr(attribution, "CpuBurst", Burst)
    some.measure(group_of(0, profiled=2))
    assert had_gradients == 2 * [(False, False)] + 2 * [(True, False)]


@unit
def test_what_is_profiled_is_the_faster_way_of_launching():
    ms = {RowKey("a", "eager"): 2.0, RowKey("a", "graph"): 1.0, RowKey("b", "eager"): 1.0, RowKey("b", "graph"): 2.0,
          RowKey("c", "eager"): 5.0, Calibration("copy"): 0.1}
    assert Session._faster(None, ms) == {"a": "graph", "b": "eager", "c": "eager"}


@integration
def test_a_case_that_the_profiler_did_not_see_whole_is_timed(some, monkeypatch):
    def unseen(self):
        raise RuntimeError("the profiler saw 0 of 1 iterations")
    monkeypatch.setattr(attribution.CpuBurst, "pairs", unseen)
    some.measure(group_of(0, 2, profiled=6))
    for run in runs_of(some).values():
        for mode in MODES:
            assert run.best_ms(mode) > 0 and run.parts(mode) is None
            assert extra(run.find(mode, "time by part"))["reason"] == "the profiler saw 0 of 1 iterations"


@integration
def test_the_clocks_of_a_row_are_read_while_its_own_work_runs(some, monkeypatch):
    """Clocks follow the work: those of an idle GPU, or of another step, would tell nothing of a row."""
    running, script = [], steps.load(0).module
    build, read = script.build, measurement.read_state

    def marked(config, values, device):
        block = build(config, values, device)
        block.register_forward_pre_hook(lambda *_: running.append(block))
        return block

    def read_state(work, *how):
        running.clear()
        work.run()
        return read(work, *how)
    monkeypatch.setattr(script, "build", marked)
    monkeypatch.setattr(machine, "state", lambda device: {"sm_mhz": 1300 if running else 1980})
    monkeypatch.setattr(measurement, "read_state", read_state)
    some.measure(group_of(0, 2))
    for run, mhz in zip(runs_of(some).values(), (1300, 1980), strict=True):
        for mode in MODES:
            assert runner(run.find(mode, "latency", "eager"))["extra_info"]["sm_mhz"] == mhz, (run.label, mode)


@integration
def test_a_case_that_did_not_run_as_it_claims_fails(some, monkeypatch):
    judge, honest = evidence.judge, steps.load(0).traits.claims("float32", CPU)

    def refuted(kernels, claims, *rest):
        seen = judge(kernels, claims, *rest)
        return seen if claims == honest else Evidence(seen.kernels, seen.kinds, "refuted", "it cheated")
    monkeypatch.setattr(evidence, "judge", refuted)
    some.measure(group_of(0, 2))
    right, cheat = runs_of(some).values()
    assert right.status == "ok" and right.samples(BOTH, "eager")
    assert (cheat.status, cheat.info["reason"]) == ("failed", f"{FORWARD} did not run as 2_sdpa claims: it cheated")
    assert cheat.samples(FORWARD, "eager") and not cheat.samples(BOTH, "eager")


# -------------------------------------------------------------------------------------------------- what does not fit


@unit
def test_graphs_that_do_not_fit_beside_the_others_are_left_out(some):
    """A GPU's memory that holds each case alone: captured graphs go, the largest first."""
    calls, works, forgotten = [], {}, []
    entries = [entry_of(name) for name in "abc"]

    def eager():
        if sum(launch == "graph" for launch in [key.launch for key in works]) > 1:
            raise torch.OutOfMemoryError("no")
        calls.append("eager")
    for entry, peak in zip(entries, (2, 3, 1), strict=True):
        entry.result.rows[FORWARD, "eager"] = Row(peak_bytes=peak)
        entry.result.rows[FORWARD, "graph"] = Row()
        works[RowKey(entry, "eager")] = Work(eager, timing.nothing)
        works[RowKey(entry, "graph")] = Work(lambda: None, timing.nothing)
        entry.subject.forget_replay = lambda mode, name=entry.case.name: forgotten.append((name, mode))
    expected = some._warm_up(FORWARD, works, timing.HostClock())           # without bursts nothing is long
    assert expected.keys() == works.keys() == {*(RowKey(entry, "eager") for entry in entries),
                                               RowKey(entries[2], "graph")}
    assert all(ms > 0 for ms in expected.values())
    assert len(calls) == session.WARM_UP_ROUNDS * len(entries)
    reasons = [entry.result.rows[FORWARD, "graph"].reason for entry in entries]
    assert reasons == 2 * ["graph: out of memory beside the other cases"] + [""]
    assert forgotten == [("b", FORWARD), ("a", FORWARD)]


@unit
def test_where_no_graph_can_be_left_out_memory_has_run_out(some):
    def never():
        raise torch.OutOfMemoryError("no")
    with pytest.raises(torch.OutOfMemoryError):
        some._warm_up(FORWARD, {(entry_of("a"), "eager"): Work(never, timing.nothing)}, timing.HostClock())


@unit
@pytest.mark.parametrize("may_not_fit", [False, True])
def test_rounds_that_run_out_of_memory_end_their_group_at_most(some, monkeypatch, may_not_fit):
    def full(*_):
        raise torch.OutOfMemoryError("no")
    subject = SimpleNamespace(call=None, workload=None)
    group = Group([Case("a", lambda setting, result: subject)], may_not_fit=may_not_fit)
    monkeypatch.setattr(some, "time", full)
    if not may_not_fit:
        with pytest.raises(torch.OutOfMemoryError):
            some.measure(group)
        return
    some.measure(group)
    (entry,) = some.entries
    assert (entry.result.status, entry.result.reason) == ("oom", "out of memory beside the other cases")


@unit
def test_a_case_that_does_not_fit_once_it_is_timed_ends_alone(some):
    """An iteration may need more than the check of one sequence did."""
    def iteration(mode):
        raise torch.OutOfMemoryError("no")
    large = SimpleNamespace(call=None, has=lambda mode: True, workload=None, iteration=iteration,
                            inputs=[torch.ones(1)])
    some.prepare(Case("large", lambda setting, result: large, CPU_CONFIG))
    assert some._ready(Group([]), FORWARD) == {} and some.alive() == []
    assert some.lines[-1]["benchmark"]["extra_info"]["status"] == "oom"


# ------------------------------------------------------------------------------------------------------- one row's work


ONE = ["between", "run"]
SEVEN_TOKENS = Workload("float32", (Operation("a", "matmul", 5.0, 1.0, "float32"),), tokens=7)


class Watched:
    """A case on a made-up GPU, on which an iteration adds 300 bytes to 50; `order` is what happened."""

    def __init__(self, some: Session, monkeypatch):
        self.some, self.order = some, []
        self.entry = entry_of("a")
        self.entry.subject = SimpleNamespace(workload=SEVEN_TOKENS, iteration=self.iteration, own_bytes=1000,
                                             inputs=[SimpleNamespace(device=GPU)], replay=lambda *_: (print, ""),
                                             between_replays=lambda *_: timing.nothing, refused=lambda: "")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.order.append("wait"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.order.append("reset"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.tells("allocated", 50))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.tells("peak", 350))

    def iteration(self, mode: str) -> Iteration:
        return Iteration(lambda: self.order.append("run"), lambda: self.order.append("between"), [], {})

    def tells(self, what: str, value: float) -> float:
        self.order.append(what)
        return value

    def work(self, launch: str = "eager", watched: bool = True) -> Row:
        """The row that was set up."""
        row = measurement.row_of(self.entry.subject, BOTH)
        assert measurement.ready(self.entry.subject, BOTH, launch, row, watched=watched) is not None
        return row


@unit
def test_a_row_is_warm_before_its_peak_memory_is_read(some, monkeypatch):
    """The peak is of one iteration since the reset. What its first calls keep for good is there before."""
    gpu = Watched(some, monkeypatch)
    row = gpu.work()
    assert gpu.order == [*ONE, *ONE, "between", "wait", "reset", "allocated", "run", "peak", "between"]
    assert row.peak_bytes == 1300 and (row.tokens, row.flops) == (7, 5.0)


@unit
@pytest.mark.parametrize("watched, timed, known", [(True, True, 0.25), (False, True, None), (True, False, None)])
def test_the_hosts_time_to_launch_is_taken_once_the_row_is_timed(watched, timed, known, some, monkeypatch):
    """By then the host has launched it many times. Nobody asks where the eager row was refused."""
    monkeypatch.setattr(timing, "enqueue_ms", lambda run, between: 0.25)
    monkeypatch.setattr(some, "device", GPU)
    monkeypatch.setattr(measurement, "see_kernels", lambda subject, iteration, mode, result, trace=None:
                        result.evidence.update({mode: Evidence(Counter(), Counter(), "proven", "fake")}))
    entry = entry_of("a")
    row = entry.result.rows[FORWARD, "eager"] = Row(timing.Timing([1.0] * 6, True, "fake") if timed else None)
    some._explain(entry, FORWARD, Iteration(print, print, [], {}), watched)
    assert row.enqueue_ms == known


@unit
def test_a_row_is_warm_where_nobody_watches_its_memory(some, monkeypatch):
    """In a group that is not watched, and on a CPU; nothing of a GPU is asked."""
    gpu = Watched(some, monkeypatch)
    row = gpu.work(watched=False)
    gpu.entry.subject.inputs[0].device = CPU
    gpu.work()
    assert gpu.order == [*ONE, *ONE, "between"] * 2
    assert row.peak_bytes is None and row.enqueue_ms is None


@unit
def test_a_replay_needs_no_warm_up_of_its_own(some, monkeypatch):
    """Its capture has warmed it; its memory is a pool beside those of all other cases."""
    gpu = Watched(some, monkeypatch)
    row = gpu.work("graph")
    assert gpu.order == [] and row.peak_bytes is None and row.reason == ""


# --------------------------------------------------------------------------------------------------- compiled once more


@integration
def test_a_block_that_is_compiled_again_fails_alone(some, monkeypatch):
    """Its samples would hold a compilation: it is a failed row, and the others are timed anew without it."""
    real, blocks = compiler.compiled_for_good, []

    @contextlib.contextmanager
    def once(*calls):
        blocks.append(len(calls))
        with real(*calls):
            yield
        if len(blocks) == 1:
            raise Failed("it was compiled again after warm-up: its timings are void")
    monkeypatch.setattr(compiler, "compiled_for_good", once)
    monkeypatch.setattr(compiler, "is_compiled", lambda block: type(block).__module__ == "step_2_sdpa")
    monkeypatch.setattr(subject, "compilation_time", lambda *_: Compilation(1.0, 1.0))
    some.measure(group_of(0, 2, profiled=6))
    assert blocks == [2, 1, 1, 1]
    timed, failed = runs_of(some).values()
    assert (timed.status, failed.status) == ("ok", "failed")
    assert failed.info["reason"] == "it was compiled again after warm-up: its timings are void"
    assert all(timed.attributed(mode) for mode in MODES) and not failed.samples(FORWARD, "eager")


@integration
@pytest.mark.parametrize("times, status", [(1, "ok"), (2, "ok"), (3, "failed")])
def test_what_its_data_compiles_again_is_warmed_up_again(some, monkeypatch, times, status):
    """As often as the session was told: behind that it fails."""
    real, raised, calls = compiler.compiled_for_good, [], []

    @contextlib.contextmanager
    def again(*blocks):
        with real(*blocks):
            yield
        if len(raised) < 2 * times:                        # in the rounds, then as each case is tried by itself
            raised.append(blocks)
            raise Failed("it was compiled again after warm-up: its timings are void")
    monkeypatch.setattr(compiler, "compiled_for_good", again)
    monkeypatch.setattr(compiler, "is_compiled", lambda block: type(block).__module__ == "step_2_sdpa")
    monkeypatch.setattr(subject, "compilation_time", lambda *_: Compilation(1.0, 1.0))
    monkeypatch.setattr(session, "_run_once", lambda *_: calls.append(1))
    some.warms_again = 2
    some.measure(group_of(2, modes=(FORWARD,)))
    [run] = runs_of(some).values()
    assert run.status == status
    assert len(calls) == times + min(times, 2) * session.CALLS_TO_WARM_AGAIN


@unit
def test_of_two_compiled_blocks_that_one_fails_which_is_compiled_again(some, monkeypatch):
    def for_good(call):
        if call == "changed":
            raise Failed("compiled again")
        return contextlib.nullcontext()
    monkeypatch.setattr(compiler, "compiled_for_good", for_good)
    monkeypatch.setattr(compiler, "holds_compiled", lambda call: call != "eager")

    def again(*calls: str) -> list[str]:
        some.entries = [entry_of(name, call) for name, call in zip("abc", calls, strict=True)]
        works = {RowKey(entry, "eager"): Work(timing.nothing, timing.nothing) for entry in some.entries}
        return [entry.case.name for entry in some._compiled_again(works)]
    assert again("eager", "changed", "as it was") == ["b"]
    assert again("eager", "as it was", "as it was") == ["b", "c"]                # it was one of them


# ------------------------------------------------------------------------------------------------------------- its time


@integration
def test_peaks_are_measured_while_calibrating(some, monkeypatch):
    phases, known = [], peaks.measure_burst()

    def measure_burst(*_):
        phases.append(some.progress._phase)
        return known
    monkeypatch.setattr(peaks, "measure_burst", measure_burst)
    some.measure(group_of(0))
    assert set(phases) == {Phase.CALIBRATING} and Phase.CALIBRATING in PURPOSES["calibrating"]


@unit
def test_rows_of_a_pass_are_held_against_the_same_peaks(some, monkeypatch):
    """Though only the second row has them measured again. What has no workload has no limit."""
    found = iter([limit.Peaks({"float32": 1.0}, 1.0), limit.Peaks({"float32": 1e4}, 1.0)])
    monkeypatch.setattr(peaks, "measure_burst", lambda *_: next(found))
    entries = [entry_of("before"), entry_of("passes its limit"), entry_of("of no known work")]
    for entry, work in zip(entries, (SEVEN_TOKENS, SEVEN_TOKENS, None), strict=True):
        entry.subject = SimpleNamespace(workload=work, calls=lambda mode: 1)
        entry.result.rows[FORWARD, "eager"] = Row()
    some.entries = entries
    taken = zip(entries, (6e3, 4e3, 1.0), strict=True)
    samples = {RowKey(entry, "eager"): ([ms] * 6, [0.0] * 6) for entry, ms in taken}
    some._fill_rows(FORWARD, {}, samples, timing.HostClock())
    some._hold_against_limits()
    limits = [entry.result.rows[FORWARD, "eager"].limit_by("burst") for entry in entries]
    assert limits == [1e3, 1e3, None]


@unit
def test_the_wall_time_is_a_record_of_no_case(some, monkeypatch):
    of_phases = dict.fromkeys(Phase, 0.0) | {Phase.STARTING: 2.0, Phase.BUILDING: 5.0}
    monkeypatch.setattr(some.progress, "seconds", of_phases)
    said = some.finish(CPU_CONFIG)
    assert said == some.progress.in_words()
    line = some.lines[-1]
    assert line["metric"]["name"] == "wall time" and line["benchmark"]["extra_info"]["case"]["name"] is None
    assert extra(line)["phases"]["building"] == 5.0 and 2.0 <= extra(line)["rest"] < sum(extra(line)["phases"].values())
    assert set(extra(line)["purposes"]) == set(PURPOSES)


# ---------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@integration
def test_a_graph_and_its_eager_run_are_timed_in_the_same_rounds(studies_in_seconds):
    some = Session("ladder", GPU, until=10)
    config = PRESETS["gpt2"].replace(batch_size=2)
    some.measure(Group([step_case(steps.load(number), config, GPU) for number in (1, 2)], profiled=10))
    first, second = runs_of(some).values()
    for run in (first, second):
        for mode in MODES:
            assert all(len(run.samples(mode, launch)) == 10 for launch in LAUNCHES)
            assert run.value(mode, "peak memory", "eager") > 0 and run.parts(mode)["GEMM"] > 0
            assert run.value(mode, "enqueue", "eager") > 0
    assert paired(first, second, BOTH)


@unit
@pytest.mark.parametrize("launch", LAUNCHES)
def test_parts_stand_beside_the_samples_of_the_launch_that_was_profiled(launch, some):
    """A replay's parts beside the eager samples would leave the difference unexplained."""
    entry = entry_of("a case")
    entry.subject = SimpleNamespace(call=None)
    taken = {"eager": [8.0] * 6, "graph": [4.0] * 6}
    samples = {RowKey(entry, each): (taken[each], [0.0] * 6) for each in LAUNCHES}
    given = []

    class Profiler:
        def fields(self, key, beside):
            given.append(beside)
            return {}

    some._attribute(entry, FORWARD, Profiler(), launch, samples)
    assert given == [taken[launch]]


# ------------------------------------------------------------------------------------------- memory that ends late


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


def is_sampled(run: Run) -> bool:
    return run.status == "ok" and all(len(run.samples(mode, "eager")) == 6 for mode in MODES)


@integration
@pytest.mark.parametrize("what", ["of", "sustain"])
def test_peaks_that_do_not_fit_beside_the_cases_cost_no_case(some, monkeypatch, what):
    monkeypatch.setattr(some.peaks, what, full)
    some.measure(group_of(0, 2, sustained=True))
    for run in runs_of(some).values():
        assert is_sampled(run)
        assert (run.find(FORWARD, "limit", "eager") is None) == (what == "of")       # a burst's is known


@integration
def test_peaks_that_do_not_fit_when_they_are_measured_again_cost_no_sample(some, monkeypatch):
    """Graphs fill the memory by then; the limit is that of the peaks that are known."""
    monkeypatch.setattr(Row, "beyond_its_limit", True)
    again = []

    def once(workload):
        again.append(workload)
        if len(again) < 2:
            full()
        return False
    monkeypatch.setattr(some.peaks, "again", once)
    some.measure(group_of(0, 2, sustained=False))
    assert again and all(map(is_sampled, runs_of(some).values()))
    assert all(run.value(FORWARD, "limit", "eager") > 0 for run in runs_of(some).values())


@integration
@pytest.mark.parametrize("holder, name", [(measurement, "see_kernels"), (measurement, "read_state")])
def test_what_is_looked_at_behind_the_samples_costs_none(some, monkeypatch, holder, name):
    monkeypatch.setattr(holder, name, full)
    some.measure(group_of(0, 2))
    assert all(map(is_sampled, runs_of(some).values()))
    if name == "see_kernels":
        found = runs_of(some)["2_sdpa"].find(FORWARD, "launches")["metric"]["extra_info"]
        assert (found["verdict"], found["because"]) == ("unproven", "out of memory while kernels were seen")


@integration
def test_a_profile_that_does_not_fit_costs_no_sample(some, monkeypatch):
    monkeypatch.setattr(attribution.Profiled, "burst", full)
    some.measure(group_of(0, 2, profiled=2))
    assert all(map(is_sampled, runs_of(some).values()))


@integration
def test_a_case_that_runs_out_of_memory_in_the_rounds_fails_alone(some):
    """The others are timed again without it."""
    calls = [0]

    def grows(setting, result):
        made = step_case(steps.load(0), CPU_CONFIG, CPU).prepare(setting, result)
        block = made.call

        def call(*given):
            calls[0] += 1
            if calls[0] > 6:
                full()
            return block(*given)
        return type(made)(**{**vars(made), "call": call})
    large = Case("large", grows, CPU_CONFIG)
    small = group_of(0, 2).cases
    some.measure(Group([small[0], large, small[1]], modes=(FORWARD,), limited=False, watched=False))
    runs = runs_of(some)
    assert (runs["large"].status, runs["large"].info["reason"]) == ("oom", "out of memory beside the other cases")
    assert all(len(runs[name].samples(FORWARD, "eager")) == 6 for name in ("0_baseline", "2_sdpa"))
