"""The shape that all studies share: cases, a check of each against FP64, interleaved rounds, records, a table, a chart.

A study names its cases; `Study.prepare` builds and checks them, `Study.time` times all that passed in the same rounds,
in a new random order each round, together with matmuls and a copy for calibration. What it finds goes into records,
and its table and its chart are drawn from records alone, those of this run or of a recorded one.
"""
import argparse
import gc
import math
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common import BlockConfig, graph, harness, parameters, report, roofline, te_emulation, timing
from common import device as machine
from common.report import Report, Row

from . import attribution, command
from .comparison import compare as compare  # for a user's own modules: study.compare

WARM_UP_ROUNDS = 2
MEASURING = ("building", "compiling", "calibrating", "checking", "warming", "sampling")       # what a run is for


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
    attention_of: int | None = None    # the step whose attention it has, where that is not `step`: for its memory

    def memory_needed(self, device: torch.device) -> int:
        """Bytes, estimated on the high side."""
        return parameters.memory_needed(self.config, self.step if self.attention_of is None else self.attention_of,
                                        device)


def of_step_4(config: BlockConfig, device: torch.device) -> BlockConfig:
    """`config` as step 4's script has it: with FP8 on a CPU without 16-bit matmuls too, emulated in FP32."""
    if config.amp_dtype is None and device.type == "cpu":
        return config.replace(amp_dtype=machine.amp_default(device, 4)[0])
    return config


class Study:
    """One process that measures: keeps its reports and records, and knows where its time goes."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name, self.options, self.device = name, options, options.device
        self.facts = machine.facts(self.device)
        self.neighbours = machine.neighbours(self.device)
        self.run = uuid.uuid4().hex[:12]
        self.lines: list[dict] = []                              # every record, written or not
        self.reports: dict[str, Report] = {}
        self.subjects: dict[str, harness.Subject] = {}
        self.cases: dict[str, Case] = {}
        self.peaks = roofline.Peaks({}, 0.0)
        self._compiled = False                                   # whether a block has been: the first is timed cold
        self.seconds: dict[str, float] = {}
        self.seconds["starting"] = machine.process_seconds()
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
        result.matmul = roofline.arithmetic(case.config, case.step, case.parameter_dtype, self.device).matmul
        with harness.judged(result, lambda: self._out_of_memory(case)):
            if case.missing:
                raise NotImplementedError(case.missing)
            machine.refuse_beyond_memory(case.memory_needed(self.device), self.device)
            self.subjects[key] = self._prepared(case, result)
            if result.emulated:
                raise NotImplementedError("emulated: its numerics are real, its time would mean nothing")
            self.measure_peaks(case.config, self.subjects[key].kinds)
        self.write(report.check_records(result))
        if result.status != "ok":
            self._drop(key)
        return result.status == "ok"

    def _prepared(self, case: Case, result: Report) -> harness.Subject:
        """Raises what harness.prepare does; whatever else another library fails by is a Failed of that case alone."""
        try:
            subject = harness.prepare(case.build, case.step, case.parameter_dtype, self.device, self.options.seed,
                                      result, lambda what: self.say(f"{what}: {case.name}"),
                                      time_compiler=not self._compiled)
        except (harness.Failed, NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if case.claims is not None:
                raise
            raise harness.Failed(harness.in_a_line(error)) from None
        self._compiled = self._compiled or harness.compiled(subject.block)
        return subject

    def measure_peaks(self, config: BlockConfig, kinds: roofline.Arithmetic) -> None:
        """Those of this arithmetic, and of copying, that are not known yet."""
        if not {kinds.matmul, kinds.attention} <= self.peaks.flops.keys():
            self.say("peaks of this machine")
            self.peaks = roofline.measure_peaks(config, kinds, self.device, self.peaks)

    def time(self, mode: str, profiled: int = 0) -> None:
        """Time every prepared case, all ways of launching in the same rounds; writes the records of each.

        Right behind samples of the way of launching of each that was faster while warming up, some more iterations run
        under the profiler, in the first `profiled` rounds, and the machine's state is read, in the last.
        """
        runs, between = self._ready(mode)
        if not runs:
            return
        clock, calibrations = timing.clock_for(self.device), timing.calibration(self.device)
        runs |= {(None, name): call for name, call in calibrations.items()}
        self.say(f"warming up, {mode}")
        expected = self._warm_up(mode, runs, between, clock)
        chosen = self._faster(expected)
        seen = attribution.Profiled(self.device)

        def look_into(number: int, where: tuple) -> None:
            key, launch = where
            if chosen.get(key) != launch:
                return
            work = runs[where], between[where], expected[where]
            if number == self.options.rounds - 1:
                self.reports[key].state = self.look(*work)
                self.say(f"sampling {mode}")
            if number < profiled:
                seen.burst(key, number, *work)

        again = ""
        try:
            with harness.compiled_for_good(*(subject.block for subject in self.subjects.values())):
                self.say(f"sampling {mode}")
                samples = timing.interleaved(runs, clock, self.options.rounds, between, self.options.seed,
                                             lambda number: self._bar.set_description_str(
                                                 f"{mode}: round {number + 1} of {self.options.rounds}"),
                                             expected, look_into)
        except harness.Failed as error:
            again = str(error)
        if again:                                             # time the others without what was compiled again
            guilty = self._compiled_again(runs, between)
            del runs, between, seen
            for key in guilty:
                self._fail(key, mode, "failed", again)
            return self.time(mode, profiled)
        calibration = {name: samples.pop((None, name)) for name in calibrations}
        for (key, launch), taken in samples.items():
            row = self.reports[key].rows[mode, launch]
            row.timing = timing.Timing(taken, timing.is_settled(taken), clock.in_rounds, calibration)
        for key in list(self.subjects):
            self.say(f"observing which kernels run, {mode}")
            self._observe(key, mode)
            self.say("attributing")
            if found := seen.found(key, samples[key, chosen[key]]):
                self.write([report.record(self.reports[key], "time by part", "ms",
                                          [sum(found["parts"].values())] if "parts" in found else [], mode,
                                          of=chosen[key], **found)])
            if self.reports[key].status != "ok":
                self._drop(key)

    def _ready(self, mode: str) -> tuple[dict, dict]:
        """(runs, between): (key, launch) -> one iteration, and what comes before it; sets up the rows of each case."""
        runs, between, backward = {}, {}, mode == "forward+backward"
        for key, subject in list(self.subjects.items()):
            result, case = self.reports[key], self.cases[key]
            with harness.judged(result, lambda case=case: self._out_of_memory(case)):
                for launch in self.options.launches:
                    row = result.rows[mode, launch] = Row(flops=roofline.flops(result.config, backward),
                                                          tokens=result.config.tokens)
                    row.limit_ms = roofline.limit_ms(result.config, subject.kinds, self.peaks, backward)
                    row.flop_bound = roofline.flop_bound(result.config, subject.kinds, self.peaks, backward)
                    self.say(f"warming up {result.step}, {mode}, {launch}")
                    iteration, clear = subject.iterations(backward)
                    if launch == "eager":
                        row.peak_bytes = self._peak_memory(subject, iteration, clear)
                        if self.device.type == "cuda":
                            row.enqueue_ms = timing.enqueue_ms(iteration, clear)
                    else:
                        iteration = graph.verified(subject.block, subject.x, iteration, clear, row, result)
                        row.peak_bytes, clear = None, timing.nothing         # the pool beside those of all other cases
                    if iteration:
                        runs[key, launch], between[key, launch] = iteration, clear
            if result.status != "ok":
                runs = {where: call for where, call in runs.items() if where[0] != key}
                self._fail(key, mode, result.status, result.reason)
        return runs, between

    def _warm_up(self, mode: str, runs: dict, between: dict, clock) -> dict:
        """A few rounds of all; what each took in ms. A captured graph keeps its memory: where they do not fit together,
        the graph of the case that needs most when launched eagerly is left out, and so on."""
        while True:
            graphs = [where for where in runs if where[1] == "graph"]
            try:
                return _medians(timing.interleaved(runs, clock, WARM_UP_ROUNDS, between))
            except torch.OutOfMemoryError:                    # tried again below: here its tensors are still held
                if not graphs:
                    raise
            largest = max(graphs, key=lambda where: self.reports[where[0]].rows[mode, "eager"].peak_bytes or 0)
            del runs[largest]
            self.reports[largest[0]].rows[mode, "graph"].reason = "graph: out of memory beside the other cases"
            self._free()

    def _compiled_again(self, runs: dict, between: dict) -> list[str]:
        """The cases that would be compiled once more; all that could have been, where none would by now."""
        could, would = [key for key, s in self.subjects.items() if harness.holds_compiled(s.block)], []
        for key in could:
            try:
                with harness.compiled_for_good(self.subjects[key].block):
                    for where in [where for where in runs if where[0] == key]:
                        between[where]()
                        runs[where]()
            except harness.Failed:
                would.append(key)
        return would or could

    def out_of_memory(self, mode: str) -> None:
        """What is left of the cases did not fit together: each ends so."""
        for key in list(self.subjects):
            self._fail(key, mode, "oom", "out of memory beside the other cases")

    def _faster(self, expected: dict) -> dict[str, str]:
        """Case -> its faster way of launching."""
        return {key: min((expected[key, launch], launch) for launch in report.LAUNCHES
                         if (key, launch) in expected)[1] for key in self.subjects}

    def _observe(self, key: str, mode: str) -> None:
        """Which kernels ran, and the records of the pass."""
        result, subject = self.reports[key], self.subjects[key]
        iteration, clear = subject.iterations(mode == "forward+backward")
        harness.observe(self.cases[key].claims, subject.block, self.device, iteration, clear, mode, result)
        seen = result.evidence[mode]
        if seen.verdict == "refuted":
            result.status, result.reason = "failed", f"{mode}: {seen.because}"
        self.write(report.row_records(result, mode))

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

    def look(self, iteration: Callable, between: Callable, ms: float) -> dict:
        """The machine's state while it does this work, for 150 ms or three times: clocks follow the work."""
        self.say("reading clocks")
        return harness.under_load(self.device, iteration, between,
                                  max(3, math.ceil(150 / ms)) if self.device.type == "cuda" else 0)

    def show(self, text: Callable, draw: Callable, lines: list[dict] | None = None) -> int:
        """Print `text(lines)`, `draw` the chart that was asked for, and say where the time went; the exit status."""
        lines = self.lines if lines is None else lines
        self.say("showing what was found")
        self._bar.clear()
        command.tell(text(lines))
        if self.options.chart:
            draw(lines, self.options.chart)
        print(self.finish(), file=sys.stderr)
        return command.exit_status(r.status for r in self.reports.values())

    def finish(self) -> str:
        """Where the wall time went, in two lines: what a run is for, and the rest; a record holds it too."""
        self.say("done")
        self._bar.close()
        total = sum(self.seconds.values())
        rest = total - sum(self.seconds.get(phase, 0.0) for phase in MEASURING)
        r = Report(self.name, self.options.config, "float32", self.facts, study=self.name, run=self.run)
        self.write([report.record(r, "wall time", "s", [total], "run", phases=self.seconds, rest=rest)])
        phases = sorted(self.seconds.items(), key=lambda item: -item[1])

        def told(measuring: bool) -> str:
            return ", ".join(f"{name} {s:.0f}" for name, s in phases if s >= 0.5 and (name in MEASURING) == measuring)
        return (f"{total:.0f} s: {told(True) or 'nothing was left to measure'};\n"
                f"overhead {100 * rest / total:.0f} %: {told(False) or 'less than a second'}")

    def release(self) -> None:
        """Let go of every block, as between two shapes.

        Transformer Engine keeps the FP8 state of every module there has been, and updates all of it in every iteration.
        """
        self.subjects.clear()
        self._free()
        if te_emulation.IMPORT_ERROR is None:
            te_emulation.transformer_engine_pytorch.quantization.FP8GlobalStateManager.reset()

    def _fail(self, key: str, mode: str, status: str, reason: str) -> None:
        """A case can't be timed: that is its record, and it is let go of."""
        self.reports[key].status, self.reports[key].reason = status, reason
        self.write([report.record(self.reports[key], "status", "", [], mode)])
        self._drop(key)

    def _drop(self, key: str) -> None:
        self.subjects.pop(key, None)
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _out_of_memory(self, case: Case) -> str:
        peak, total = machine.memory_peak(self.device), machine.memory_total(self.device)
        step = case.step if case.attention_of is None else case.attention_of
        smaller = parameters.largest_that_fits(case.config, step, self.device, total)
        return (f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB in use at the peak; "
                + (f"--batch-size {smaller.batch_size} --seq-len {smaller.seq_len} fits" if smaller
                   else "no batch of it fits"))


def _medians(samples: dict) -> dict:
    return {where: statistics.median(some) for where, some in samples.items()}
