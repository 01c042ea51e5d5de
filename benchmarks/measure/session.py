"""One process that measures. A study names its cases; the session does the rest, the same for all studies.

It builds and checks each case, times all that passed in the same interleaved rounds together with matmuls and a copy
for calibration, looks at their kernels, and writes records as they become final. It shows progress, and it goes on
without what was compiled again, or does not fit.
"""
import dataclasses
import functools
import gc
import math
import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.measure import attribution
from benchmarks.measure.cases import Case, Group, Setting
from benchmarks.measure.progress import Progress
from common import compiler, engine, machine, measurement, rounds, timing
from common.config import BlockConfig, dtype_name
from common.iteration import LAUNCHES, Iteration
from common.outcome import Failed, is_out_of_memory, judged
from common.peaks import MeasuredPeaks
from common.phases import Phase
from common.record import Record, check_records, peak_records, record, row_records, status_record
from common.record_file import RecordFile
from common.result import Result
from common.subject import Subject

WARM_UP_ROUNDS = 2


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


@dataclass(frozen=True)
class Work:
    """What is timed for one row."""
    run: Callable
    between: Callable[[], None]
    iteration: Iteration | None = None     # launched eagerly; None for a replay


class Session:
    """Keeps the results and records of what it measures, and knows where its time goes."""

    def __init__(self, study: str, device: torch.device, rounds_: int, seed: int = 0,
                 launches: Sequence[str] | None = None, file: RecordFile | None = None, slow_down: float = 0.0):
        self.study, self.device, self.rounds, self.seed = study, device, rounds_, seed
        self.launches = launches or (LAUNCHES if device.type == "cuda" else LAUNCHES[:1])
        self.file = file or RecordFile(None)
        self.slow_down = slow_down                               # percent that every case is made slower on purpose
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

    def _say_of(self, case: Case, phase: Phase, detail: str) -> None:
        self.say(phase, f"{case.name}, {detail}" if detail else case.name)

    def write(self, lines: list[Record]) -> None:
        """Keep records, and append them to the file."""
        self.lines += lines
        self.file.write(lines)

    def finish(self, config: BlockConfig) -> str:
        """Where the wall time went, in two lines; a record holds it too, and others the peaks that were measured."""
        seconds = self.progress.finish()
        whole = Result("", config, "float32", self.facts, study=self.study, run=self.run)
        self.write([*peak_records(whole, self.peaks),
                    record(whole, "wall time", "s", [sum(seconds.values())], "run", phases=seconds,
                           purposes=self.progress.by_purpose(), rest=self.progress.left_over())])
        return self.progress.in_words()

    def measure(self, group: Group, keep: bool = False) -> None:
        """Build and check every case of a group, time those that passed, and write their records.

        Then it lets go of them, unless they are to be kept.
        """
        for case in group.cases:
            self.prepare(case)
        self.say(Phase.CALIBRATING, "peaks of this machine")    # now: the rounds fill the memory with graphs
        for entry in self.alive():
            if entry.subject and entry.subject.workload:
                self.peaks.of(entry.subject.workload)
                if group.sustained:
                    self.peaks.sustain(entry.subject.workload)
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

    def prepare(self, case: Case) -> Entry:
        """Build and check a case. What went wrong is the status of its result, and its subject is then None."""
        result = Result(case.name, case.config, dtype_name(case.parameter_dtype), self.facts, step=case.step,
                        traits=case.traits, variant=dict(case.variant), work=dict(case.work), study=self.study,
                        run=self.run, neighbours=self.neighbours, slowed_percent=self.slow_down)
        if case.workload:
            result.matmul = case.workload.matmul
        entry = Entry(case, result)
        self.entries.append(entry)
        setting = Setting(self.device, self.seed, lambda phase, detail="": self._say_of(case, phase, detail),
                          time_compiler=not self.has_compiled)
        with judged(result, lambda: self._out_of_memory(case), foreign=not case.traits.claimed):
            if case.missing:
                raise NotImplementedError(case.missing)
            machine.refuse_beyond_memory(case.bytes_needed, self.device)
            entry.subject = case.prepare(setting, result)
            self.has_compiled = self.has_compiled or compiler.is_compiled(entry.subject.call)
            if result.emulated:
                raise NotImplementedError("emulated: its numerics are real, its time would mean nothing")
        self.write(check_records(result))
        if result.status != "ok":
            self._drop(entry)
        return entry

    def alive(self) -> list[Entry]:
        """The cases that can be timed."""
        return [entry for entry in self.entries if entry.subject is not None]

    def time(self, group: Group, mode: str) -> None:
        """Time every prepared case, all ways of launching in the same rounds, and write their records.

        In the first `profiled` rounds, profile each case's faster launch mode right after its sample. In the last round
        the machine's state is read there.
        """
        works = self._ready(group, mode)
        if not works:
            return
        clock = group.clock(self.device)
        if group.calibrated:
            for name, call in timing.calibration(self.device).items():
                works[Calibration(name)] = Work(call, timing.nothing)
        for name, sustained in self.peaks.sustained.items():
            works[Calibration(name, is_peak=True)] = Work(sustained.work.call, timing.nothing)
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
                profiler.burst(entry, number, work.run, work.between, expected[key])

            # The second of two bursts finds the GPU warmer: so each is the second in half of the rounds.
            if profiled and number % 2:
                profile()
            self.say(Phase.SAMPLING, mode)
            take()
            if profiled and not number % 2:
                profile()
            if looked_into and number == self.rounds - 1:
                self._read_state(entry, mode, launch, work, expected[key], group.metered)

        samples = self._sample(mode, works, clock, expected, visit)
        if samples is None:                                   # something was compiled again: time the others without it
            del works, profiler
            return self.time(group, mode)
        self.progress.sampled(sum(_timed_seconds(clock, key, samples, expected) for key in works))
        self._fill_rows(mode, works, samples, clock)
        self.write(group.timed([(entry.result, entry.subject) for entry in chosen if entry.subject], mode))
        for entry, launch in chosen.items():
            self._explain(entry, mode, works, profiler, launch, samples)

    def _sample(self, mode: str, works: dict[Key, Work], clock: timing.Clock, expected: dict[Key, float],
                visit: Callable[[int, Key, Callable[[], None]], None]) -> dict[Key, timing.Samples] | None:
        """The samples of all rounds. None where a case was compiled again meanwhile: it has failed."""
        self.say(Phase.SAMPLING, mode)

        def show(number: int) -> None:
            self.progress.show(f"{mode}: round {number + 1} of {self.rounds}")

        runs, between = _calls(works)
        calls = [entry.subject.call for entry in self.alive() if entry.subject]
        try:
            with compiler.compiled_for_good(*calls):
                return rounds.interleaved(runs, clock, self.rounds, between, self.seed, show, expected, visit)
        except Failed as error:
            reason = str(error)
        for entry in self._compiled_again(works):
            self.fail(entry, mode, "failed", reason)
        return None

    def _fill_rows(self, mode: str, works: dict[Key, Work], samples: dict[Key, timing.Samples], clock: timing.Clock
                   ) -> None:
        """Put the samples into the rows, per call, and hold the rows against their limits."""
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

        rows = []
        for key in samples:
            if isinstance(key, RowKey) and key.entry.subject and key.entry.subject.workload:
                rows.append((key.entry.result.rows[mode, key.launch], key.entry.subject.workload, mode))
        measurement.hold_against_limits(rows, self.peaks)

    def _explain(self, entry: Entry, mode: str, works: dict[Key, Work], profiler: attribution.Profiled, launch: str,
                 samples: dict[Key, timing.Samples]) -> None:
        """See which kernels ran and where the time went, and write the records of the pass."""
        result, subject = entry.result, entry.subject
        iteration = works[RowKey(entry, "eager")].iteration
        assert subject is not None and iteration is not None
        self.say(Phase.OBSERVING, f"which kernels run, {mode}")
        measurement.see_kernels(subject, iteration, mode, result)
        seen = result.evidence[mode]
        if seen.verdict == "refuted":
            result.status, result.reason = "failed", f"{mode}: {seen.because}"
        self.write(row_records(result, mode))
        self.say(Phase.ATTRIBUTING)
        if fields := profiler.fields(entry, samples[RowKey(entry, launch)][0]):
            total = [sum(fields["parts"].values())] if "parts" in fields else []
            self.write([record(result, "time by part", "ms", total, mode, of=launch, **fields)])
        if result.status != "ok":
            self._drop(entry)

    def _ready(self, group: Group, mode: str) -> dict[Key, Work]:
        """What is timed, by case and way of launching; sets up the rows of each case."""
        works: dict[Key, Work] = {}
        for entry in self.alive():
            case = entry.case
            own: dict[Key, Work] = {}
            assert entry.subject is not None
            if not entry.subject.has(mode):
                continue
            with judged(entry.result, functools.partial(self._out_of_memory, case), not case.traits.claimed):
                for launch in self.launches:
                    self.say(Phase.WARMING_UP, f"{case.name}, {mode}, {launch}")
                    if work := self._work(entry, mode, launch, group.watched):
                        own[RowKey(entry, launch)] = work
            if entry.result.status == "ok":
                works |= own
            else:
                self.fail(entry, mode, entry.result.status, entry.result.reason)
        return works

    def _work(self, entry: Entry, mode: str, launch: str, watched: bool) -> Work | None:
        """What is timed for one row, which it sets up; None, with the reason in the row, where that can't be."""
        subject = entry.subject
        assert subject is not None
        row = entry.result.rows[mode, launch] = measurement.row_of(subject, mode)
        if launch == "graph":
            replay, row.reason = subject.replay(mode)         # its memory is the pool, beside those of all other cases
            return Work(replay, timing.nothing) if replay else None
        iteration = subject.iteration(mode)
        for _ in range(2):
            iteration.between()
            iteration.run()
        iteration.between()
        if watched and self.device.type == "cuda":            # a process has no peak of its own for each case
            row.peak_bytes = self._peak_memory(subject, iteration)
            row.enqueue_ms = timing.enqueue_ms(iteration.run, iteration.between)
        return Work(iteration.run, iteration.between, iteration)

    def _peak_memory(self, subject: Subject, iteration: Iteration) -> int:
        """Bytes of parameters, inputs and whatever an iteration adds at its peak: what the case would need alone."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        iteration.run()
        peak = torch.cuda.max_memory_allocated(self.device) - before + subject.own_bytes
        iteration.between()
        return peak

    def _warm_up(self, mode: str, works: dict[Key, Work], clock: timing.Clock) -> dict[Key, float]:
        """A few rounds of all; what each took in ms.

        A captured graph keeps its memory. Where they do not fit together, the graph of the case that needs most when
        launched eagerly is left out, and so on.
        """
        while True:
            runs, between = _calls(works)
            try:
                samples = rounds.interleaved(runs, clock, WARM_UP_ROUNDS, between, self.seed)
                return {key: statistics.median(taken) for key, (taken, _) in samples.items()}
            except torch.OutOfMemoryError:                    # tried again below: here its tensors are still held
                graphs = [key.entry for key in works if isinstance(key, RowKey) and key.launch == "graph"]
                if not graphs:
                    raise
            largest = max(graphs, key=lambda entry: entry.result.rows[mode, "eager"].peak_bytes or 0)
            del works[RowKey(largest, "graph")], runs, between
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
                    for key, work in works.items():
                        if isinstance(key, RowKey) and key.entry is entry:
                            work.between()
                            work.run()
            except Failed:
                would.append(entry)
        return would or could

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

    def _read_state(self, entry: Entry, mode: str, launch: str, work: Work, ms: float, metered: bool) -> None:
        """The machine's state while it does this work, for 150 ms or three times: clocks follow the work.

        Where the work is `metered` it runs for a second or two, and a row gets the energy of an iteration.
        """
        on_gpu = self.device.type == "cuda"
        if metered and on_gpu:
            self.say(Phase.METERING, mode)
            measurement.steadily(self.device, work.run, work.between, entry.result.rows[mode, launch], ms)
            entry.result.state = entry.result.rows[mode, launch].state
            return
        self.say(Phase.READING_CLOCKS)
        count = max(3, math.ceil(150 / ms)) if on_gpu else 0
        entry.result.state = measurement.under_load(self.device, work.run, work.between, count)

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

    def _out_of_memory(self, case: Case) -> str:
        return f"{machine.peak_in_words(self.device)}; {case.that_fits(machine.memory_total(self.device))}"


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
