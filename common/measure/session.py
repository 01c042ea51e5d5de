"""One process that measures. A script names one case, a study many; the session does the rest, the same for all.

It builds and checks each case and times those that passed: each until its median is known, or all in the same
interleaved rounds together with matmuls and a copy for calibration. It looks at their kernels, and writes records as
they become final. It shows progress, and it goes on without what was compiled again, or does not fit.
"""
import contextlib
import dataclasses
import gc
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..block.config import BlockConfig, dtype_name
from ..block.evidence import Evidence
from ..outcome import Failed, is_out_of_memory, judged
from ..phases import Phase
from ..report.record import Record, check_records, peak_records, record, row_records, status_record
from ..report.record_file import RecordFile
from ..report.result import Result, Row
from ..runtime import compiler, engine, machine, rounds, timing
from ..runtime.iteration import BOTH, LAUNCHES, Iteration
from ..runtime.peaks import YARDSTICKS, MeasuredPeaks
from . import attribution, measurement
from .cases import Case, Group, Setting
from .measurement import Work
from .progress import Progress
from .subject import Subject

WARM_UP_ROUNDS = 2
CALLS_TO_WARM_AGAIN = 20                # of what was compiled while it was timed: its shapes depend on its data


@dataclass(eq=False)
class Entry:
    """A case in this session. Its subject is None where it can't be timed, or no longer."""
    case: Case
    result: Result
    subject: Subject | None = None


@dataclass(frozen=True)
class RowKey:
    """A case by one way of launching."""
    entry: Entry
    launch: str


@dataclass(frozen=True)
class Calibration:
    """Work that every process times beside its cases: a matmul or a copy, or what a sustained peak was measured by."""
    name: str
    is_peak: bool = False


Key = RowKey | Calibration


def _run_once(entry: Entry, works: dict[Key, Work]) -> None:
    """All work of a case, each with what comes between two calls."""
    for key, work in works.items():
        if isinstance(key, RowKey) and key.entry is entry:
            work.between()
            work.run()


class Session:
    """Keeps the results and records of what it measures, and knows where its time goes."""

    def __init__(self, study: str, device: torch.device, until: int | timing.StopRule, seed: int = 0,
                 launches: Sequence[str] | None = None, file: RecordFile | None = None, slow_down: float = 0.0,
                 refused: Mapping[str, str] | None = None, trace: str | None = None, warms_again: int = 0):
        self.study, self.device, self.seed = study, device, seed
        self.rounds = until if isinstance(until, int) else 0
        self.rule = None if isinstance(until, int) else until    # each case by itself until its median is known
        self.refused = refused or {}                             # way of launching -> why nobody wants it
        self.trace = trace                                       # file for the timeline of a forward+backward
        self.launches = launches or (LAUNCHES if device.type == "cuda" else LAUNCHES[:1])
        self.file = file or RecordFile(None)
        self.slow_down = slow_down                               # percent that every case is made slower on purpose
        self.warms_again = warms_again                           # times: where shapes depend on data, they compile anew
        self.facts = machine.facts(device)
        self.neighbours = machine.neighbours(device)
        self.run = uuid.uuid4().hex[:12]
        self.lines: list[Record] = []                            # every record, written or not
        self.entries: list[Entry] = []
        self.peaks = MeasuredPeaks(device)
        self.has_compiled = False                                # whether a block has been: the first is timed cold
        self.progress = Progress()

    def say(self, phase: Phase, detail: str = "") -> None:
        """Show what is going on, and count its time under that phase."""
        self.progress.say(phase, detail)

    def note(self, text: str) -> None:
        """Tell a person at a terminal, in a line that stays."""
        self.progress.note(f"{self.study}: {text}")

    def _say_of(self, case: Case, phase: Phase, detail: str) -> None:
        self.say(phase, f"{case.name}, {detail}" if detail else case.name)

    def write(self, lines: list[Record]) -> None:
        """Keep records, and append them to the file."""
        self.lines += lines
        self.file.write(lines)

    def finish(self, config: BlockConfig | None) -> str:
        """Where the wall time went, in two lines; a record holds it too, and others the peaks that were measured.

        `config` is that of the study; None where it is of no block.
        """
        seconds = self.progress.finish()
        whole = self._whole(config)
        self.write([*self.peak_lines(config),
                    record(whole, "wall time", "s", [sum(seconds.values())], "run", phases=seconds,
                           purposes=self.progress.by_purpose(), rest=self.progress.left_over())])
        return self.progress.in_words()

    def peak_lines(self, config: BlockConfig | None) -> list[Record]:
        """The peaks that were measured so far; `finish` writes them."""
        return peak_records(self._whole(config), self.peaks)

    def _whole(self, config: BlockConfig | None) -> Result:
        """What is said of the process, not of a case."""
        return Result("", config, "float32", self.facts, study=self.study, run=self.run)

    def measure(self, group: Group, keep: bool = False) -> None:
        """Build and check every case of a group, time those that passed, and write their records.

        Then it lets go of them, unless they are to be kept.
        """
        for case in group.cases:
            self.prepare(case, group.times_emulation)
        self.say(Phase.CALIBRATING, "peaks of this machine")    # now: the rounds fill the memory with graphs
        for entry in self.alive() if group.limited else ():
            self._calibrate(entry, group.sustained)
        if self.rule:
            self.peaks.release()                             # its tensors would count as the block's
        for mode in group.modes:
            try:
                self.time(group, mode)
            except (RuntimeError, MemoryError) as error:
                if not (group.may_not_fit and is_out_of_memory(error)):
                    raise
                for entry in self.alive():
                    self.fail(entry, mode, "oom", "out of memory beside the other cases")
        if not keep:
            self.release()

    def _calibrate(self, entry: Entry, sustained: bool) -> None:
        """Measure the peaks that its work goes by."""
        subject, workload = entry.subject, entry.subject.workload if entry.subject else None
        if subject is None or workload is None:
            return
        with self._judged(entry):
            if self._fits(lambda: self.peaks.of(workload)):
                if sustained:
                    self._fits(lambda: self.peaks.sustain(workload))
                measurement.say_peaks(entry.result, self.peaks)
            else:                                            # the case fits, the peaks' tensors beside it do not
                subject.workload = None
                for yardstick in YARDSTICKS:
                    entry.result.peaks[yardstick] = "n/a: out of memory beside the cases"
        if entry.result.status != "ok":
            self.fail(entry, "run", entry.result.status, entry.result.reason)

    def _fits(self, work: Callable[[], object]) -> bool:
        """Do it; False where memory ends meanwhile. For what stands beside a case: the case itself has done nothing
        wrong, and what was sampled of it counts."""
        try:
            work()
            return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._free()
        return False

    def prepare(self, case: Case, times_emulation: bool = False) -> Entry:
        """Build and check a case. What went wrong is the status of its result, and its subject is then None.

        An emulation is skipped, or where it is to be timed it has no rate and no limit.
        """
        result = Result(case.name, case.config, dtype_name(case.parameter_dtype), self.facts, step=case.step,
                        traits=case.traits, variant=dict(case.variant), work=dict(case.work), study=self.study,
                        run=self.run, neighbours=self.neighbours, slowed_percent=self.slow_down)
        if case.workload:
            result.matmul = case.workload.matmul
        entry = Entry(case, result)
        self.entries.append(entry)
        setting = Setting(self.device, self.seed, lambda phase, detail="": self._say_of(case, phase, detail),
                          time_compiler=not self.has_compiled)
        with self._judged(entry):
            if case.missing:
                raise NotImplementedError(case.missing)
            machine.refuse_beyond_memory(case.bytes_needed, self.device)
            entry.subject = case.prepare(setting, result)
            self.has_compiled = self.has_compiled or compiler.is_compiled(entry.subject.call)
            if result.emulated and not times_emulation:
                raise NotImplementedError("emulated: its numerics are real, its time would mean nothing")
            if result.emulated:
                entry.subject.workload = None
        self.write(check_records(result))
        if result.status != "ok":
            self._drop(entry)
        return entry

    def alive(self) -> list[Entry]:
        """The cases that can be timed."""
        return [entry for entry in self.entries if entry.subject is not None]

    def time(self, group: Group, mode: str) -> None:
        """Time every prepared case and write their records: all in the same rounds, or by the rule one by one."""
        if self.rule:
            for entry in self.alive():
                self._time_alone(entry, mode, group, self.rule)
        else:
            self._time_in_rounds(group, mode)

    def _time_alone(self, entry: Entry, mode: str, group: Group, rule: timing.StopRule) -> None:
        """Each way of launching one after the other, until its median is known."""
        result, subject = entry.result, entry.subject
        assert subject is not None
        clock = group.clock(self.device)
        result.clock = clock.name
        with self._judged(entry):
            for launch in LAUNCHES:
                row = result.rows[mode, launch] = Row(reason=self.refused.get(launch, ""))
                if not row.reason:
                    self._time_row(entry, mode, launch, clock, rule, group)
            self._hold_against_limits()
            self.peaks.release()
            self._explain(entry, mode, subject.iteration(mode), group.watched)
        if result.status != "ok":
            self.fail(entry, mode, result.status, result.reason)

    def _time_row(self, entry: Entry, mode: str, launch: str, clock: timing.Clock, rule: timing.StopRule, group: Group
                  ) -> None:
        subject, what = entry.subject, f"{mode}, {launch}"
        assert subject is not None
        row = entry.result.rows[mode, launch] = measurement.row_of(subject, mode)
        self.say(Phase.WARMING_UP, what)
        work = measurement.ready(subject, mode, launch, row, alone=True)
        if work is None:
            return

        def show(count: int, ms: float) -> None:
            self.progress.show(Phase.SAMPLING.said(f"{what}: {count} samples, {ms:.3g} ms"))

        self.say(Phase.SAMPLING, what)
        with compiler.compiled_for_good(subject.call):
            row.timing = timing.measure(work.run, clock, work.between, rule, show, timing.calibration(self.device))
        self.say(Phase.METERING, what)
        median = row.timing.median
        self._fits(lambda: measurement.read_state(work, row, entry.result, self.device, median, group.metered))
        work.between()

    def _time_in_rounds(self, group: Group, mode: str, warmed_again: int = 0) -> None:
        """All cases and ways of launching in the same rounds.

        In the first `profiled` rounds, profile each case's faster launch mode right after its sample. In the last round
        the machine's state is read there.
        """
        works = self._ready(group, mode)
        if not works:
            return
        clock = group.clock(self.device)
        if group.calibrated:
            for name, call in timing.calibration(self.device).items():
                works[Calibration(name)] = Work(call)
        for name, sustained in self.peaks.sustained.items():
            works[Calibration(name, is_peak=True)] = Work(sustained.work.call)
        self.say(Phase.WARMING_UP, mode)
        expected = self._warm_up(mode, works, clock)
        chosen = self._faster(expected)
        if self.slow_down:
            works = self._slowed(works, expected)
        profiler = attribution.Profiled(self.device)

        def visit(number: int, key: Key, take: Callable[[], None]) -> None:
            if isinstance(key, Calibration):
                self.say(Phase.CALIBRATING)
                return take()
            entry, launch, work = key.entry, key.launch, works[key]
            looked_into = chosen.get(entry) == launch
            profiled = looked_into and number < group.profiled

            def profile() -> None:
                self.say(Phase.PROFILING, mode)
                alone = work.unwatched
                work.between()                               # what was sampled is looked at before it runs on
                self._fits(lambda: profiler.burst(entry, number, alone.run, alone.between, expected[key]))

            # The second of two bursts finds the GPU warmer: so each is the second in half of the rounds.
            if profiled and number % 2:
                profile()
            self.say(Phase.SAMPLING, mode)
            take()
            if profiled and not number % 2:
                profile()
            is_metered = group.metered and (looked_into or launch in entry.case.metered)
            if number == self.rounds - 1 and (looked_into or is_metered):
                self.say(Phase.METERING if is_metered else Phase.READING_CLOCKS, mode)
                row = entry.result.rows[mode, launch]
                self._fits(lambda: measurement.read_state(work, row, entry.result, self.device, expected[key],
                                                          is_metered))
                for other in self._launches(group):
                    entry.result.rows[mode, other].state = entry.result.rows[mode, other].state or row.state

        samples = self._sample(mode, works, clock, expected, visit, warmed_again < self.warms_again)
        if samples is None:                                   # time the others without it, or it once more
            del works, profiler
            for entry in self.alive():
                if entry.subject:
                    entry.subject.forget_replay(mode)
            return self._time_in_rounds(group, mode, warmed_again + 1)
        self._refuse(mode, chosen)
        self.progress.sampled(sum(_timed_seconds(clock, key, samples, expected) for key in works))
        self._fill_rows(mode, works, samples, clock)
        if group.limited:
            self._hold_against_limits()
        self.write(group.timed([(entry.result, entry.subject) for entry in chosen if entry.subject], mode))
        for entry, launch in chosen.items():
            iteration = works[RowKey(entry, "eager")].iteration
            assert iteration is not None
            self._explain(entry, mode, iteration, group.watched)
            self._attribute(entry, mode, profiler, launch, samples)
            if entry.result.status != "ok":
                self._drop(entry)

    def _sample(self, mode: str, works: dict[Key, Work], clock: timing.Clock, expected: dict[Key, float],
                visit: Callable[[int, Key, Callable[[], None]], None], may_warm: bool
                ) -> dict[Key, timing.Samples] | None:
        """The samples of all rounds. None where a case has failed, compiled again meanwhile or out of memory, or where
        what was compiled again has been warmed up once more.
        """
        self.say(Phase.SAMPLING, mode)

        def show(number: int) -> None:
            self.progress.show(f"{mode}: round {number + 1} of {self.rounds}")

        runs, between = _calls(works)
        calls = [entry.subject.call for entry in self.alive() if entry.subject]
        visited: list[Key] = []                               # the one whose turn it is

        def visit_and_note(number: int, key: Key, take: Callable[[], None]) -> None:
            visited[:] = [key]
            visit(number, key, take)
        try:
            with compiler.compiled_for_good(*calls):
                return rounds.interleaved(runs, clock, self.rounds, between, self.seed, show, expected, visit_and_note)
        except Failed as error:
            again = self._compiled_again(works)
            for entry in again:
                if may_warm:
                    self._warm_again(entry, works)
                else:
                    self.fail(entry, mode, "failed", str(error))
            return None
        except (RuntimeError, MemoryError) as error:
            ran_out = [key.entry for key in visited if isinstance(key, RowKey)]
            if not is_out_of_memory(error) or not ran_out:
                raise
        self.fail(ran_out[0], mode, "oom", "out of memory beside the other cases")
        return None

    def _refuse(self, mode: str, chosen: dict[Entry, str]) -> None:
        """Fail the cases whose timed calls did what they must not."""
        for entry in self.alive():
            if entry.subject and (reason := entry.subject.refused()):
                self.fail(entry, mode, "failed", reason)
                chosen.pop(entry, None)

    def _fill_rows(self, mode: str, works: dict[Key, Work], samples: dict[Key, timing.Samples], clock: timing.Clock
                   ) -> None:
        """Put the samples into the rows, per call."""
        self.say(Phase.CALIBRATING, "peaks of this machine")
        calibration: dict[str, list[float]] = {}
        for key, (taken, _) in samples.items():
            if isinstance(key, Calibration) and key.is_peak:
                self.peaks.took_part(key.name, taken)
            elif isinstance(key, Calibration):
                calibration[key.name] = taken
        for key, (taken, offsets) in samples.items():
            if isinstance(key, Calibration) or key.entry.subject is None:
                continue
            entry, launch = key.entry, key.launch
            assert entry.subject is not None
            per_call = [ms / entry.subject.calls(mode) for ms in taken]
            row = entry.result.rows[mode, launch]
            row.timing = timing.Timing(per_call, timing.is_settled(per_call), clock.in_rounds, calibration,
                                       list(range(len(taken))), offsets)

    def _hold_against_limits(self) -> None:
        """Of all rows so far: those of an earlier pass again, since the peaks may have been measured again."""
        rows, results = [], []
        for entry in self.alive():
            if entry.subject and entry.subject.workload:
                results.append(entry.result)
                for (mode, _), row in entry.result.rows.items():
                    if row.timing:
                        rows.append((row, entry.subject.workload, mode))
        if not self._fits(lambda: measurement.hold_against_limits(rows, self.peaks)):
            measurement.hold_against_limits(rows, self.peaks)            # by the peaks that are known: once is enough
        for result in results:
            measurement.say_peaks(result, self.peaks)

    def _explain(self, entry: Entry, mode: str, iteration: Iteration, watched: bool) -> None:
        """See how long the host takes to launch, and which kernels ran, and write the records of the pass."""
        result, subject = entry.result, entry.subject
        assert subject is not None
        eager = result.rows[mode, "eager"]
        def look() -> None:
            if watched and eager.timing and self.device.type == "cuda":      # by now the host has done it many times
                eager.enqueue_ms = timing.enqueue_ms(iteration.run, iteration.between)
            self.say(Phase.OBSERVING, f"which kernels run, {mode}")
            measurement.see_kernels(subject, iteration, mode, result, self.trace if mode == BOTH else None)
        if not self._fits(look):
            result.evidence[mode] = Evidence(Counter(), Counter(), "unproven", "out of memory while kernels were seen")
        seen = result.evidence[mode]
        if seen.verdict == "refuted":
            result.status, result.reason = "failed", f"{mode} did not run as {result.name} claims: {seen.because}"
        self.write(row_records(result, mode))

    def _launches(self, group: Group) -> Sequence[str]:
        return group.launches or self.launches

    def _ready(self, group: Group, mode: str) -> dict[Key, Work]:
        """What is timed, by case and way of launching; sets up the rows of each case."""
        works: dict[Key, Work] = {}
        for entry in self.alive():
            own: dict[Key, Work] = {}
            assert entry.subject is not None
            if not entry.subject.has(mode):
                continue
            with self._judged(entry):
                for launch in self._launches(group):
                    self.say(Phase.WARMING_UP, f"{entry.case.name}, {mode}, {launch}")
                    row = entry.result.rows[mode, launch] = measurement.row_of(entry.subject, mode)
                    if work := measurement.ready(entry.subject, mode, launch, row, watched=group.watched):
                        own[RowKey(entry, launch)] = work
            if entry.result.status == "ok":
                works |= own
            else:
                self.fail(entry, mode, entry.result.status, entry.result.reason)
        return works

    def _warm_up(self, mode: str, works: dict[Key, Work], clock: timing.Clock) -> dict[Key, float]:
        """A few rounds, and one of what fills a sample by a single iteration; what each took in ms.

        A captured graph keeps its memory. Where they do not fit together, the graph of the case that needs most when
        launched eagerly is left out, and so on.
        """
        while True:
            runs, between = _calls(works)
            try:
                taken = {key: ms for key, (ms, _) in rounds.interleaved(runs, clock, 1, between, self.seed).items()}
                short = {key: run for key, run in runs.items() if not clock.burst_ms or taken[key][0] < clock.burst_ms}
                more = rounds.interleaved(short, clock, WARM_UP_ROUNDS - 1, between, self.seed)
                for key, (ms, _) in more.items():
                    taken[key] += ms
                return {key: statistics.median(ms) for key, ms in taken.items()}
            except torch.OutOfMemoryError:                    # tried again below: here its tensors are still held
                graphs = [key.entry for key in works if isinstance(key, RowKey) and key.launch == "graph"]
                if not graphs:
                    raise
            largest = max(graphs, key=lambda entry: entry.result.rows[mode, "eager"].peak_bytes or 0)
            del works[RowKey(largest, "graph")], runs, between
            if largest.subject:
                largest.subject.forget_replay(mode)
            largest.result.rows[mode, "graph"].reason = "graph: out of memory beside the other cases"
            self._free()

    def _compiled_again(self, works: dict[Key, Work]) -> list[Entry]:
        """The cases that would be compiled once more; all that could have been, where none would by now."""
        could = [entry for entry in self.alive() if entry.subject and compiler.holds_compiled(entry.subject.call)]
        would = []
        for entry in could:
            assert entry.subject is not None
            try:
                with compiler.compiled_for_good(entry.subject.call):
                    _run_once(entry, works)
            except Failed:
                would.append(entry)
        return would or could

    def _warm_again(self, entry: Entry, works: dict[Key, Work]) -> None:
        """Run a case on other inputs, which may have other shapes inside: what they compile is compiled then."""
        self.say(Phase.WARMING_UP, f"{entry.case.name}, which was compiled again")
        for _ in range(CALLS_TO_WARM_AGAIN):
            _run_once(entry, works)

    def _slowed(self, works: dict[Key, Work], expected: dict[Key, float]) -> dict[Key, Work]:
        """The same work, each case's with copies behind it that take `slow_down` percent of its time."""
        slowed = dict(works)
        for key, work in works.items():
            if isinstance(key, Calibration):
                continue
            copy = timing.copying_for(self.device, expected[key] * self.slow_down / 100)

            def run(of: Work = work, copy: Callable = copy) -> None:
                of.run()
                copy()
            slowed[key] = dataclasses.replace(work, run=run)
        return slowed

    def _faster(self, expected: dict[Key, float]) -> dict[Entry, str]:
        """Case -> its faster way of launching."""
        chosen: dict[Entry, str] = {}
        for key, ms in expected.items():
            if isinstance(key, Calibration):
                continue
            best = chosen.get(key.entry)
            if best is None or ms < expected[RowKey(key.entry, best)]:
                chosen[key.entry] = key.launch
        return chosen

    def _attribute(self, entry: Entry, mode: str, profiler: attribution.Profiled, launch: str,
                   samples: dict[Key, timing.Samples]) -> None:
        """Say where the time went, of the launch that was profiled."""
        self.say(Phase.ATTRIBUTING)
        if fields := profiler.fields(entry, samples[RowKey(entry, launch)][0]):
            total = [sum(fields["parts"].values())] if "parts" in fields else []
            self.write([record(entry.result, "time by part", "ms", total, mode, of=launch, **fields)])

    # ------------------------------------------------------------------------------------------------------- letting go

    def fail(self, entry: Entry, mode: str, status: str, reason: str) -> None:
        """A case can't be timed: that is its record, and it is let go of."""
        entry.result.status, entry.result.reason = status, reason
        self.write([status_record(entry.result, mode)])
        self._drop(entry)

    def release(self) -> None:
        """Let go of every subject, as between two groups."""
        for entry in self.entries:
            entry.subject = None
        self._free()
        engine.forget_modules()

    def _drop(self, entry: Entry) -> None:
        entry.subject = None
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _judged(self, entry: Entry) -> contextlib.AbstractContextManager[None]:
        """What a case fails by becomes its status; another library's, or a user's, may fail by anything."""
        def out_of_memory(error: BaseException) -> str:
            refused = isinstance(error, machine.BeyondMemory)              # what an allocator says is a paragraph
            what = str(error) if refused else machine.peak_in_words(self.device)
            return f"{what}; {entry.case.that_fits(machine.memory_total(self.device))}"
        return judged(entry.result, out_of_memory, foreign=not entry.case.traits.claimed)


def _timed_seconds(clock: timing.Clock, key: Key, samples: dict[Key, timing.Samples], expected: dict[Key, float]
                   ) -> float:
    """Seconds of the timed iterations of a case; those of a calibration count as calibrating."""
    if isinstance(key, Calibration):
        return 0.0
    timed, _ = rounds.burst(clock, expected[key])
    taken, _ = samples[key]
    return timed * sum(taken) / 1e3


def _calls(works: dict[Key, Work]) -> tuple[dict[Key, Callable], dict[Key, Callable]]:
    """(run, between) by key, as `interleaved` takes them."""
    return {key: work.run for key, work in works.items()}, {key: work.between for key, work in works.items()}
