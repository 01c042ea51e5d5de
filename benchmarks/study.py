"""The shape that all studies share: cases, a check of each against FP64, interleaved rounds, records, a table, a chart.

A study names its cases; `Study.prepare` builds and checks them, `Study.time` times all that passed in the same rounds,
in a new random order each round, together with a matmul and a copy for calibration. What it finds goes into records,
and its table and its chart are drawn from records alone, those of this run or of a recorded one.
"""
import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common import BlockConfig, harness, parameters, report, roofline, timing
from common import device as machine
from common.report import Report, Row

from . import attribution

WARM_UP_ROUNDS = 3
MEASURING = ("building", "compiling", "calibrating", "checking", "warming", "sampling")       # what a run is there for


@dataclass(frozen=True)
class Case:
    """One row of a study: how to build a block, and what it is held against."""
    name: str
    build: Callable                    # (config, values, device) -> block
    step: int                          # whose arithmetic it has, and so whose gates and limit
    config: BlockConfig
    parameter_dtype: torch.dtype = torch.float32
    claims: int | None = None          # the step whose evidence it must show; None: none
    missing: str = ""                  # why it can't run on this machine, where that is known beforehand


class Study:
    """One process that measures: keeps its reports and records, and knows where its time goes."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name, self.options, self.device = name, options, options.device
        self.facts = machine.facts(self.device)
        self.neighbours = machine.neighbours(self.device)
        self.run = Report(name, options.config, "", {}).run
        self.lines: list[dict] = []                              # every record, written or not
        self.reports: dict[str, Report] = {}
        self.subjects: dict[str, harness.Subject] = {}
        self.cases: dict[str, Case] = {}
        self.peaks = roofline.Peaks({}, 0.0)
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "starting", time.perf_counter()
        self._bar = tqdm(bar_format="{desc}", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)

    def say(self, what: str) -> None:
        """Show what is going on, and count its time under its first word."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = what.split()[0].rstrip(",:"), now
        self._bar.set_description_str(what)

    def write(self, lines: list[dict]) -> None:
        self.lines += lines
        self.options.output.write(lines)

    def prepare(self, case: Case) -> bool:
        """Build and check a case; whether it can be timed. What went wrong is the status of its report."""
        result = Report(case.name, case.config, str(case.parameter_dtype).removeprefix("torch."), self.facts,
                        study=self.name, run=self.run, neighbours=self.neighbours)
        key = f"{case.name}, {result.parameter_dtype}, {case.config}, {case.config.amp_dtype}"
        self.reports[key], self.cases[key] = result, case
        with harness.judged(result, lambda: self._out_of_memory(case)):
            if case.missing:
                raise NotImplementedError(case.missing)
            needed = parameters.memory_needed(case.config, case.step, self.device)
            if self.device.type == "cpu" and needed > machine.memory_total(self.device):
                raise MemoryError                                  # Linux would kill the process instead
            self.subjects[key] = harness.prepare(case.build, case.step, case.parameter_dtype, self.device,
                                                 self.options.seed, result,
                                                 lambda what: self.say(f"{what}: {case.name}"))
            if result.emulated:
                raise NotImplementedError("emulated: its numerics are real, its time would mean nothing")
            self._measure_peaks(case, self.subjects[key])
        self.write(report.check_records(result))
        if result.status != "ok":
            self._drop(key)
        return result.status == "ok"

    def _measure_peaks(self, case: Case, subject: harness.Subject) -> None:
        if not {subject.kinds.matmul, subject.kinds.attention} <= self.peaks.flops.keys():
            self.say("peaks of this machine")
            found = roofline.measure_peaks(case.config, subject.kinds, self.device)
            self.peaks = roofline.Peaks(self.peaks.flops | found.flops, max(self.peaks.bandwidth, found.bandwidth))

    def time(self, mode: str, attribute: bool = False) -> None:
        """Time every prepared case, all ways of launching in the same rounds; writes the records of each.

        With `attribute` the faster way of launching of each is profiled too, in interleaved rounds again.
        """
        runs, between, backward = {}, {}, mode == "forward+backward"
        for key, subject in list(self.subjects.items()):
            result, case = self.reports[key], self.cases[key]
            with harness.judged(result, lambda case=case: self._out_of_memory(case)):
                self._ready(key, subject, mode, runs, between)
            if result.status != "ok":
                self.write([report.record(result, "status", "", [], mode)])
                self._drop(key)
        runs = {where: call for where, call in runs.items() if where[0] in self.subjects}
        if not runs:
            return
        clock, calibrations = timing.clock_for(self.device), timing.calibration(self.device)
        everything = runs | {(None, name): call for name, call in calibrations.items()}
        rounds = self.options.rounds

        def progress(number: int) -> None:
            self._bar.set_description_str(f"{mode}: round {number + 1} of {rounds}")
        self.say(f"warming up, {mode}")
        timing.interleaved(everything, clock, WARM_UP_ROUNDS, between)
        self.say(f"sampling {mode}")
        with harness.compiled_for_good(*(subject.block for subject in self.subjects.values())):
            samples = timing.interleaved(everything, clock, rounds, between, self.options.seed, progress)
        state = self._look(next(iter(runs.values())))
        calibration = {name: samples[None, name] for name in calibrations}
        for key, launch in runs:
            row, taken = self.reports[key].rows[mode, launch], samples[key, launch]
            row.timing = timing.Timing(taken, timing.is_settled(taken), clock.name, calibration)
            self.reports[key].state = state
        self.say(f"observing which kernels run, {mode}")
        for key, subject in self.subjects.items():
            iteration, clear = subject.iterations(backward)
            harness.observe(self.cases[key].claims, subject.block, self.device, iteration, clear, mode,
                            self.reports[key])
            seen = self.reports[key].evidence[mode]
            if seen.verdict == "refuted":
                self.reports[key].status, self.reports[key].reason = "failed", f"{mode}: {seen.because}"
            self.write(report.row_records(self.reports[key], mode))
        if attribute:
            self.say(f"sampling under the profiler, {mode}")
            self._attribute(mode, runs, between)
        for key in [key for key in self.subjects if self.reports[key].status != "ok"]:
            self._drop(key)

    def _ready(self, key: str, subject: harness.Subject, mode: str, runs: dict, between: dict) -> None:
        """Rows of one case, its peak memory and its captured graph."""
        result, backward = self.reports[key], mode == "forward+backward"
        iteration, clear = subject.iterations(backward)
        limit = roofline.limit_ms(result.config, subject.kinds, self.peaks, backward)
        for launch in self.options.launches:
            row = result.rows[mode, launch] = Row(flops=roofline.flops(result.config, backward),
                                                  tokens=result.config.tokens, limit_ms=limit)
            runs[key, launch], between[key, launch] = iteration, clear
            if launch == "eager":
                self.say(f"warming up {result.step}, {mode}")
                row.peak_bytes = self._peak_memory(subject, iteration, clear)
                if self.device.type == "cuda":
                    row.enqueue_ms = timing.enqueue_ms(iteration, clear)
                continue
            self.say(f"warming up, capturing {result.step}, {mode}")
            try:
                runs[key, launch] = captured(subject, iteration, clear)
                between[key, launch] = timing.nothing
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    row.reason = "graph: out of memory beside the other cases"
                else:
                    row.reason = f"graph: {str(error).splitlines()[0]}"
                del runs[key, launch], between[key, launch]
                torch.cuda.synchronize()

    def _peak_memory(self, subject: harness.Subject, iteration: Callable, clear: Callable) -> int | None:
        """Bytes of parameters, x, dy and whatever an iteration adds at its peak: what the case would need alone."""
        for _ in range(2):
            clear()
            iteration()
        clear()
        if self.device.type != "cuda":
            return None                                # a process has no peak of its own for each case
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        iteration()
        own = sum(t.nbytes for t in (*subject.block.parameters(), subject.x, subject.dy))
        peak = torch.cuda.max_memory_allocated(self.device) - before + own
        clear()
        return peak

    def _look(self, iteration: Callable) -> dict:
        """The machine's state under load: an idle GPU is never throttled."""
        if self.device.type == "cuda":
            for _ in range(3):
                iteration()
        return machine.state(self.device)

    def _attribute(self, mode: str, runs: dict, between: dict) -> None:
        best = {key: min((r.rows[mode, launch].timing.median, launch) for launch in report.LAUNCHES
                         if (mode, launch) in r.rows and r.rows[mode, launch].timing)[1]
                for key, r in self.reports.items() if key in self.subjects}
        chosen = {(key, launch): runs[key, launch] for key, launch in best.items()}
        rounds = max(5, self.options.rounds // 3)
        try:
            found = attribution.profiled(chosen, between, self.device, rounds, self.say)
        except RuntimeError as error:
            for key in best:
                self.write([report.record(self.reports[key], "time by part", "ms", [], mode, reason=str(error))])
            return
        for (key, launch), breakdown in found.items():
            self.write([report.record(self.reports[key], "time by part", "ms", [breakdown.clock_ms], mode, of=launch,
                                      parts=breakdown.parts, iterations=breakdown.iterations)])

    def finish(self) -> str:
        """Where the wall time went, in one line; written as records too."""
        self.say("done")
        self._bar.close()
        total = sum(self.seconds.values())
        rest = total - sum(self.seconds.get(phase, 0.0) for phase in MEASURING)
        r = Report(self.name, self.options.config, "float32", self.facts, study=self.name, run=self.run)
        self.write([report.record(r, "wall time", "s", [total], "run", phases=self.seconds, rest=rest)])
        phases = sorted(self.seconds.items(), key=lambda item: -item[1])
        return (f"{total:.0f} s: " + ", ".join(f"{name} {s:.0f}" for name, s in phases if s >= 0.5)
                + f"; {100 * rest / total:.0f} % outside of {', '.join(MEASURING)}")

    def release(self) -> None:
        """Let go of every block, as between two shapes."""
        for key in list(self.subjects):
            self._drop(key)

    def _drop(self, key: str) -> None:
        self.subjects.pop(key, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _out_of_memory(self, case: Case) -> str:
        peak, total = machine.memory_peak(self.device), machine.memory_total(self.device)
        smaller = parameters.largest_that_fits(case.config, case.step, self.device, total)
        return (f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB in use at the peak; "
                + (f"--batch-size {smaller.batch_size} --seq-len {smaller.seq_len} fits" if smaller
                   else "no batch of it fits"))


def captured(subject: harness.Subject, iteration: Callable, between: Callable) -> Callable:
    """The iteration as a CUDA graph, verified on a changed input. Raises RuntimeError where it can't be captured."""
    static = {}
    replay = timing.capture(lambda: static.update(y=iteration()), between)
    harness.verify_replay(subject.block, replay, iteration, between, static, subject.x, subject.result)
    return replay
