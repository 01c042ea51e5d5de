"""Ways of launching: what is checked of a replay, what is counted, and what is said of both."""
import re
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from torch.autograd import DeviceType

from benchmarks import studies
from benchmarks.records.read import read, runs
from benchmarks.studies import launches
from benchmarks.studies.launches import autotuned, changes, counting, tables, ways
from common import BlockConfig, steps
from common.measure.cases import Setting
from common.outcome import Failed
from common.report.record import record
from common.report.result import Result
from common.runtime import compiler, replay
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.made_records import GPU, made

unit, integration, gpu = pytest.mark.unit, pytest.mark.integration, pytest.mark.gpu
STUDY = studies.load("launches")
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 16, 32, 4, amp_dtype=None)


def prepared(way, number=2, config=CONFIG, device=CPU):
    """(the subject of a step that is launched that way, its result), checked."""
    case = ways.case_of(number, way, config, device)
    result = Result(case.name, case.config, "float32", GPU, step=number, traits=case.traits)
    setting = Setting(device, 0, lambda *what: None, time_compiler=False)
    return case.prepare(setting, result), result


# ------------------------------------------------------------------------------------------------------ a call's graphs


def replaying(monkeypatch, make):
    """In place of graphs: the block's forward becomes what `make` gives of its forward and a sample input."""
    def make_graphed_callables(block, inputs):
        block.forward = make(block.forward, *inputs)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)


class IntoOneMemory(torch.autograd.Function):
    """It writes each result into the same memory, as a replay does."""

    @staticmethod
    def forward(ctx, y, static):
        return static.copy_(y).detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def one_memory(forward, x):
    static = torch.empty_like(x)
    return lambda x: IntoOneMemory.apply(forward(x), static)


def of_the_first_input(forward, x):
    """It misses its input: it computes that of the capture."""
    kept = x.detach().clone()
    return lambda x: forward(kept + 0 * x)


@integration
def test_a_result_that_the_next_call_overwrites_is_copied_while_it_is_checked_and_not_while_it_is_timed(monkeypatch):
    replaying(monkeypatch, one_memory)
    subject, result = prepared(ways.CALLABLES)
    assert result.errors["branch"][0] < 1e-6
    x = subject.inputs[0]
    y, other = subject.call(x), subject.call(x)                             # as it is timed
    assert y.data_ptr() == other.data_ptr()
    subject.call.clones_output = True                                       # as it was checked
    y, other = subject.call(x), subject.call(x)
    assert y.data_ptr() != other.data_ptr()
    assert not subject.inputs[0].requires_grad
    assert subject.replay(FORWARD) == (None, "")


@integration
def test_a_replay_that_misses_its_input_is_not_timed(monkeypatch):
    replaying(monkeypatch, of_the_first_input)
    with pytest.raises(Failed, match="off by"):
        prepared(ways.CALLABLES)


@unit
def test_what_can_not_be_captured_is_a_skipped_row_with_its_reason(monkeypatch):
    ended = []
    monkeypatch.setattr(replay, "end_failed_capture", lambda: ended.append(True))

    def make_graphed_callables(block, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    with pytest.raises(NotImplementedError, match=r"it can't be captured: operation not permitted .* capturing$"):
        prepared(ways.CALLABLES)
    assert ended


@unit
def test_out_of_memory_in_a_capture_is_no_skipped_row(monkeypatch):
    def make_graphed_callables(block, inputs):
        raise torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    with pytest.raises(torch.OutOfMemoryError):
        prepared(ways.CALLABLES)


@unit
@pytest.mark.parametrize("way", [way for way in ways.WAYS if way not in (ways.ONE_BY_ONE, ways.BY_HAND)])
def test_a_cpu_says_what_it_can_not(way):
    number = 3 if way in ways.COMPILED else 2
    assert ways.case_of(number, way, CONFIG, CPU).missing == "CUDA graphs need a GPU"
    assert not ways.case_of(number, ways.ONE_BY_ONE, CONFIG, CPU).missing


@integration
@gpu
@pytest.mark.parametrize("number, way", [(2, ways.CALLABLES), (3, ways.REDUCE_OVERHEAD)])
def test_graphs_are_really_launched_and_follow_their_input(number, way):
    config = BlockConfig(2, 128, 128, 4, amp_dtype=torch.float16)
    subject, result = prepared(way, number, config, torch.device("cuda"))
    assert result.errors["branch"][0] < result.errors["branch"][1]
    assert subject.kept[""] > 0
    for mode, graphs in ((FORWARD, 1), (BOTH, 2)):
        one = subject.iteration(mode)
        for _ in range(3):
            one.between()
            one.run()
        one.between()
        assert counting.count(one.run).graphs == graphs, mode


# ------------------------------------------------------------------------------------------------ where something moves


def of_the_first_addresses(forward, x):
    """It reads parameters where they lay when it was captured, and copies its input there, as a replay does."""
    block = forward.__self__
    kept, static = {name: parameter.data for name, parameter in block.named_parameters()}, x.detach().clone()

    def replay_it(x):
        static.copy_(x)
        block.forward = forward
        y = torch.func.functional_call(block, kept, static)
        block.forward = replay_it
        return y
    return replay_it


@integration
@pytest.mark.parametrize("change, happened", [
    (changes.IN_PLACE, changes.FOLLOWS), (changes.ELSEWHERE, changes.MISSED), (changes.OTHER_INPUT, changes.FOLLOWS),
    (changes.ONE_SEQUENCE, changes.MISSED)])
def test_a_replay_sees_what_lies_where_it_lay(change, happened, monkeypatch):
    """The last of them: a sequence is copied over the whole batch, and nobody says so."""
    replaying(monkeypatch, of_the_first_addresses)
    seen = changes.after(2, ways.CALLABLES, change, CONFIG, 0, CPU)
    assert seen.what == happened and min(seen.usual_ms, seen.first_ms, seen.later_ms) > 0


@integration
def test_without_graphs_all_is_followed_and_what_is_refused_says_why(monkeypatch):
    for change in changes.CHANGES:
        assert changes.after(2, ways.ONE_BY_ONE, change, CONFIG, 0, CPU).what == changes.FOLLOWS, change

    def one_shape(forward, x):
        def replay_it(other):
            if other.shape != x.shape:
                raise RuntimeError("the size must match")
            return forward(other)
        return replay_it
    replaying(monkeypatch, one_shape)
    seen = changes.after(2, ways.CALLABLES, changes.ONE_SEQUENCE, CONFIG, 0, CPU)
    assert seen.what == "refused: RuntimeError: the size must match" and seen.first_ms is None


@integration
def test_what_is_wrong_from_the_start_is_not_asked(monkeypatch):
    replaying(monkeypatch, of_the_first_input)
    with pytest.raises(Failed, match="wrong before"):
        changes.after(2, ways.CALLABLES, changes.IN_PLACE, CONFIG, 0, CPU)


@integration
def test_what_became_of_each_change_is_recorded_and_shown(monkeypatch):
    def after(number, way, change, *rest):
        if change == changes.IN_PLACE:
            raise Failed("it is wrong before anything was changed")
        return changes.Happened(changes.FOLLOWS, 1.0, 250.0, 1.0)
    monkeypatch.setattr(changes, "after", after)
    session = SimpleNamespace(facts=GPU, study="launches", run="one", seed=0, device=torch.device("cuda"), lines=[],
                              say=lambda *what: None)
    session.write = session.lines.extend
    changes.measure(session, CONFIG, tuple(ways.STEPS), ways.WAYS)
    shown = STUDY.report(session.lines)
    assert f"step 3, reduce-overhead: {changes.IN_PLACE}: failed: it is wrong before anything was changed; " \
           f"{changes.ELSEWHERE}: follows, the first call takes 250 x" in shown
    session.device, session.lines[:] = CPU, []
    changes.measure(session, CONFIG, tuple(ways.STEPS), ways.WAYS)
    assert "n/a, what happens where parameters or inputs move: CUDA graphs need a GPU" in STUDY.report(session.lines)
    session.lines[:] = []
    changes.measure(session, CONFIG, (3,), (ways.ONE_BY_ONE, ways.NO_GRAPHS))
    assert not session.lines                                                # none that has graphs was asked for


@integration
@gpu
def test_graphs_miss_what_moves_and_trees_record_anew():
    config, cuda = BlockConfig(4, 128, 128, 4, amp_dtype=torch.float16), torch.device("cuda")
    by_hand = {change: changes.after(2, ways.BY_HAND, change, config, 0, cuda).what for change in changes.CHANGES}
    assert by_hand[changes.IN_PLACE] == changes.FOLLOWS and by_hand[changes.ELSEWHERE] == changes.MISSED
    assert by_hand[changes.OTHER_INPUT] == by_hand[changes.ONE_SEQUENCE] == changes.MISSED
    assert changes.after(3, ways.REDUCE_OVERHEAD, changes.ELSEWHERE, config, 0, cuda).what == changes.FOLLOWS


# -------------------------------------------------------------------------------------------------------------- counts


@unit
def test_calls_of_the_driver_are_told_apart():
    def event(name, on_gpu=False, us=0.0):
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us))
    seen = counting.of_events([
        event("cudaGraphLaunch"), event("cudaLaunchKernel"), event("cuLaunchKernelEx"), event("aten::copy_"),
        event("Memcpy DtoD (Device -> Device)", True, 500.0), event("direct_copy_kernel", True, 250.0),
        event("gemm", True, 9.0)])
    assert seen == counting.Launches(1, 2, 0.75)


@unit
def test_the_host_is_timed_amid_launches_and_not_behind_a_wait(monkeypatch):
    waits, between, runs = [], [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(runs)))
    assert counting.host_ms(lambda: runs.append(0), lambda: between.append(0)) > 0
    assert waits == list(range(0, len(runs) + 1, counting.IN_A_ROW)) and len(between) == len(runs) + 1


@unit
def test_why_a_graph_was_skipped_is_read_from_the_log():
    log = torch._logging.getArtifactLogger("torch._inductor.cudagraph_utils", "cudagraphs")
    level, handlers = log.level, list(log.handlers)
    with counting.reasons() as found:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device\nand where")
    log_cudagraph_skip_and_bump_counter("another")
    assert found == ["skipping cudagraphs due to cpu device"] and (log.level, log.handlers) == (level, handlers)


# ---------------------------------------------------------------------------------------------------------- the command


@integration
def test_on_a_cpu_it_tells_the_hosts_share_and_what_is_missing(study_main, cheap_backend, tmp_path):
    path = tmp_path / "launches.jsonl"
    status, out, _ = study_main("launches", "--quick", "--tokens", "32,16", "--json", path)
    assert status == 0 and "the host's share" in out and "step 2, 16 tokens" in out, out
    assert "CUDA graphs need a GPU" in out and "within" not in out
    lines = read(path)
    assert STUDY.report(lines) in out
    assert [tables.tokens_of(run) for run in runs(lines) if run.step == 2 and run.best(BOTH)] == [16, 32]
    timed = [run for run in runs(lines) if run.step == 2 and run.best(BOTH)]
    assert all(run.value(mode, counting.OF_ONE_TOKEN, "eager") > 0 for run in timed for mode in MODES)
    assert set(STUDY.charts(lines)) == {"step-2", "step-3"}
    assert re.fullmatch(r"on a CPU the host takes \d+ % of 16 tokens, \d+ % of 32", STUDY.answer(lines))


@unit
@pytest.mark.parametrize("words, said", [
    (["--tokens", "100"], "multiples of 16"), (["--tokens", "80"], "multiples of 16 up to 64, then of that"),
    (["--tokens", "many"], "whole numbers"), (["--steps", "1,2"], "--steps 1: give some of 2, 3, 4"),
    (["--ways", "by magic"], "--ways by magic: there is no such way")])
def test_a_mistake_on_the_command_line_is_a_line(words, said, study_main):
    status, _, err = study_main("launches", *words)
    assert status == 2 and said in err.strip().splitlines()[-1], err


@unit
def test_groups_hold_the_ways_that_were_asked_for():
    base = BlockConfig(1, 64, 64, 4, amp_dtype=None)
    options = SimpleNamespace(config=base, device=CPU, tokens=(16, 128, 256), ways=ways.WAYS, steps=(2, 3, 4),
                              autotuned=(16, 128), autotuned_here=(16, 128))
    every = launches.groups(options)
    shapes = [{(case.config.batch_size, case.config.seq_len) for case in group.cases} for group in every]
    assert shapes == [{(1, 16)}, {(2, 64)}, {(4, 64)}]
    assert [len(group.cases) for group in every] == [8, 8, 6]               # max-autotune at two of them
    options.ways = (ways.BY_HAND,)
    assert [[case.variant["way"] for case in group.cases] for group in launches.groups(options)] == \
        [[ways.ONE_BY_ONE] * 3] * 3


@unit
def test_what_other_processes_time_this_one_does_not():
    options = SimpleNamespace(config=CONFIG, device=CPU, tokens=(16, 128, 256), steps=(2, 3), autotuned=(16, 128),
                              autotuned_here=(), ways=(ways.ONE_BY_ONE, ways.MAX_AUTOTUNE))

    def timed():
        return [[(case.step, case.variant["way"]) for case in group.cases] for group in launches.groups(options)]
    one_by_one = [(2, ways.ONE_BY_ONE), (3, ways.ONE_BY_ONE)]
    assert timed() == [one_by_one[:1], one_by_one[:1], one_by_one]
    options.ways += (ways.BY_HAND,)
    assert timed() == [one_by_one] * 3
    options.steps, options.tokens, options.ways = (3,), (16,), (ways.MAX_AUTOTUNE,)
    assert timed() == []


# ----------------------------------------------------------------------------------------------- max-autotune's choice


@unit
def test_each_process_measures_it_beside_the_default(monkeypatch):
    asked = []

    def in_turn(commands, file, name, died):
        asked.extend(commands)
        return died(1, [], -9)
    monkeypatch.setattr(autotuned, "in_turn", in_turn)
    options = SimpleNamespace(argv=["--seed", "3", "--chart", "x"], autotuned=(128, 2048), processes=3, file=None,
                              ways=ways.WAYS, config=CONFIG, device=CPU)
    lines = autotuned.measure(options, "launches")
    assert len(asked) == 3 and asked[0] == [
        "launches", "--seed", "3", "--chart", "x", "--tokens", "128,2048", "--steps", "3", "--ways",
        "one by one,max-autotune-no-cudagraphs,max-autotune", "--processes", "1", "--chart", ""]
    assert "process 2 ended with -9" in STUDY.report(lines)
    assert autotuned._died(options, 0, row(16, ways.NO_GRAPHS, 4.0, 3), 1) == []


@unit
def test_processes_are_shown_apart_and_paired_within(monkeypatch):
    """Those of the main run are not replaced by the default that each process times anew."""
    lines = [*row(16, ways.ONE_BY_ONE, (8.0, 2.0), 3)]
    for number, ms in enumerate((5.0, 4.0)):
        lines += [*row(16, ways.ONE_BY_ONE, 10.0, 3, run=f"own {number}"),
                  *row(16, ways.NO_GRAPHS, ms, 3, run=f"own {number}")]
    monkeypatch.setattr(autotuned, "_templates", lambda run: run.info["run"][-1])
    assert tables.by_key(lines)[3, ways.ONE_BY_ONE, 16].median(BOTH, "eager") == 8.0
    assert "no way is faster" not in (shown := STUDY.report(lines))
    assert "process 2, B1 S16" in shown and "2.50 [2.50, 2.50]" in shown
    assert "max-autotune-no-cudagraphs, forward+backward: 2.00 to 2.50 times as fast as the default" in shown
    assert "the processes chose differently, matmuls in Triton: 0, 1 at B1 S16 E32" in shown


# ------------------------------------------------------------------------------------------------------- what is shown


def row(tokens, way, ms, number=4, host=None, kernels=None, graphs=0, kept=None, run="one", copy_ms=0.5):
    """Records of a step at so many tokens on a GPU. `ms`: (eager, graph) or one number."""
    eager, graph = ms if isinstance(ms, tuple) else (ms, None)
    samples = {(mode, launch): [each] * 6 for mode in MODES for launch, each in (("eager", eager), ("graph", graph))
               if each}
    config = BlockConfig(tokens // 16, 16, 32, 4, amp_dtype=torch.float16)
    parts = {mode: {"GEMM": kernels, "idle": 1.0} for mode in MODES} if kernels else None
    name = {2: "2_sdpa", 3: "3_compile", 4: "4_transformer_engine"}[number]
    lines = made(name, samples, facts=GPU, study="launches", config=config, variant={"way": way}, parts=parts,
                 run=run)
    result = Result(name, config, "float32", GPU, step=number, study="launches", run=run, variant={"way": way},
                    traits=steps.load(number).traits, matmul="bfloat16")
    for mode in MODES:
        lines.append(record(result, counting.LAUNCHED, "graphs", [graphs], mode, "eager", kernels=7, copy_ms=copy_ms,
                            skipped=[] if graphs or way == ways.ONE_BY_ONE else ["a device is missing"]))
        if host is not None:
            lines.append(record(result, counting.HOST, "ms", [host], mode, "eager"))
        if kept is not None:
            lines.append(record(result, counting.KEPT, "bytes", [kept], mode, "eager"))
    return lines


@unit
def test_predicted_beside_measured():
    lines = [*row(16, ways.ONE_BY_ONE, (8.0, 2.0), host=8.0, kernels=1.5),
             *row(16, ways.CALLABLES, 1.0, graphs=1, kept=3 * 2**20),
             *row(64, ways.ONE_BY_ONE, (4.0, 4.0), host=1.0, kernels=4.0),
             *row(256, ways.ONE_BY_ONE, (9.0, 8.0), host=1.0, kernels=8.0),
             *row(1024, ways.ONE_BY_ONE, (16.0, 16.0), host=1.0, kernels=15.0)]
    of_all = tables.by_key(lines)
    predicted = tables.prediction(of_all[4, ways.ONE_BY_ONE, 16], BOTH)
    assert predicted == tables.Prediction(8.0, 1.5, 2.0, 4.0) and (predicted.expected, predicted.off) == (4.0, 0.0)
    assert tables.predicted_crossover(of_all, 4, BOTH) == 64
    assert tables.crossover(of_all, 4, BOTH) == 1024
    assert tables.best_at(of_all, 4, 16, BOTH)[0] == ways.CALLABLES
    shown = STUDY.report(lines)
    assert "within 10 % on 6 of 8 points" in shown                          # 9 against 8 is off by an eighth
    assert f"{ways.CALLABLES} is 8.00 [8.00, 8.00] times as fast as one by one" in shown
    assert "step 4, forward+backward: a graph buys more than 5 % below 1024 tokens" in shown
    assert f"at 16 tokens {ways.CALLABLES} makes step 4 8.0 times as fast, from 1024 on nothing" == STUDY.answer(lines)
    assert "3.00" in next(line for line in shown.splitlines() if line.startswith(f"step 4, {ways.CALLABLES}, 16"))


@unit
def test_what_is_copied_is_told_as_a_share_of_a_call():
    lines = [*row(64, ways.ONE_BY_ONE, (8.0, 8.0), 3, host=1.0, kernels=8.0),
             *row(64, ways.REDUCE_OVERHEAD, 10.0, 3, graphs=1, copy_ms=0.9)]
    assert tables.copied(tables.by_key(lines), 64) == pytest.approx(0.04)
    assert "64 tokens: to copy its input takes 4.0 % of a call by reduce-overhead" in STUDY.report(lines)
    assert tables.copied(tables.by_key(lines[:1]), 64) is None


@unit
def test_what_another_process_timed_is_not_compared():
    lines = [*row(16, ways.ONE_BY_ONE, 8.0, 3), *row(16, ways.REDUCE_OVERHEAD, 4.0, 3, run="two")]
    of_all = tables.by_key(lines)
    assert tables.median_of(of_all, 3, ways.REDUCE_OVERHEAD, 16, BOTH) == 4.0
    assert tables.gain_of(of_all, 3, ways.REDUCE_OVERHEAD, 16, BOTH) is None
    assert tables.best_at(of_all, 3, 16, BOTH) is None


@unit
def test_a_graph_that_was_skipped_shows():
    lines = [*row(16, ways.ONE_BY_ONE, (8.0, 2.0), 3), *row(16, ways.REDUCE_OVERHEAD, 7.0, 3, graphs=0),
             *row(64, ways.REDUCE_OVERHEAD, 7.0, 3, graphs=1)]
    shown = STUDY.report(lines).splitlines()
    assert sum("0: skipped" in line for line in shown) == 2                 # one a pass
    assert "n/a, step 3, reduce-overhead: no graph: a device is missing" in shown
    assert STUDY.answer(lines) == "see the tables"


@unit
def test_it_stands_for_its_block():
    block = torch.nn.Linear(2, 2)
    launched = ways.Launched(block, ways.ONE_BY_ONE)
    assert dict(launched.named_parameters()).keys() == {"weight", "bias"} and not compiler.holds_compiled(launched)
    block.compile()
    assert compiler.holds_compiled(launched)
    assert not hasattr(launched, "engine")
