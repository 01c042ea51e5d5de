"""Spread blocks are the whole ones: what the words of a layout mean, what the proof finds, how a rank's end is told."""
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor.parallel import ParallelStyle

from benchmarks import studies
from benchmarks.records.read import read, runs
from benchmarks.studies.distributed import (
    account,
    checkpoints,
    exposed,
    foreseen,
    launching,
    modelled,
    parallel,
    proof,
    published,
    ring,
    scaling,
    simulate,
    tables,
    timed,
    watch,
)
from benchmarks.studies.distributed.layout import GATHER, REDUCE, SCATTER, Layout, parsed
from benchmarks.studies.distributed.sharding import POLICY, Sharding
from common import BlockConfig, parameters, steps
from common.block import oracle, traits
from common.block.config import PRESETS
from common.block.steps import ROOT
from common.outcome import Failed
from common.report.record import check_records
from common.report.result import Result
from tests.helpers.made_records import GPU
from tests.helpers.ranks import on_ranks

unit, integration, gpu = pytest.mark.unit, pytest.mark.integration, pytest.mark.gpu
STUDY = studies.load("distributed")
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 16, 32, 4, amp_dtype=None)
USUAL = Sharding()
LAYERS = 2


# ------------------------------------------------------------------------------------------------------------- layouts


@unit
@pytest.mark.parametrize("text, ranks, layout, told", [
    ("fsdp", 4, Layout(1, 4, 1), "fsdp:4"), ("fsdp:2", 2, Layout(1, 2, 1), "fsdp:2"), ("fsdp", 1, Layout(), "fsdp:1"),
    ("hsdp:2x4", 8, Layout(2, 4, 1), "hsdp:2x4"), ("tp:2", 2, Layout(1, 1, 2), "tp:2"),
    ("tp:4+sp", 4, Layout(1, 1, 4, True), "tp:4+sp"), ("fsdp, tp:2", 8, Layout(1, 4, 2), "fsdp:4,tp:2"),
    ("tp:2+sp,fsdp:2", 4, Layout(1, 2, 2, True), "fsdp:2,tp:2+sp"), ("hsdp:4", 8, Layout(2, 4, 1), "hsdp:2x4"),
    ("hsdp:2,tp:2", 8, Layout(2, 2, 2), "hsdp:2x2,tp:2")])
def test_a_layout_is_read_and_reported(text, ranks, layout, told):
    assert parsed(text, ranks) == layout and str(layout) == told and parsed(told, ranks) == layout


@unit
@pytest.mark.parametrize("told, kind", [("fsdp:4", "fsdp"), ("hsdp:2x4", "hsdp:4"), ("tp:2", "fsdp,tp:2"),
                                        ("fsdp:8,tp:2+sp", "fsdp,tp:2+sp")])
def test_a_layout_has_a_kind_at_any_number_of_ranks(told, kind):
    ranks, layout = tables.laid_out(told)
    assert layout.ranks == ranks and layout.kind == kind and str(layout) == told


@unit
@pytest.mark.parametrize("text, ranks, said", [
    ("ddp", 2, "'ddp' is no layout; give fsdp, hsdp:2x2"), ("", 2, "'nothing' is no layout"),
    ("fsdp,fsdp", 2, "no layout"), ("hsdp:4", 2, "that is 0 ranks"),
    ("fsdp:3", 2, "that is 3 ranks, and there are 2"), ("tp:0", 2, "numbers from 1 on"),
    ("hsdp:2x0", 2, "numbers from 1 on"), ("fsdp,tp:3", 4, "4 ranks are not divisible by tp:3"),
    ("tp:2", 4, "that is 2 ranks, and there are 4")])
def test_a_wrong_layout_is_a_line(text, ranks, said):
    with pytest.raises(ValueError, match=said):
        parsed(text, ranks)


@unit
@pytest.mark.parametrize("layout, changes, number, said", [
    (Layout(tensor=3), {}, 2, "num_heads 4 is not divisible by 3; try tp:2"),
    (Layout(tensor=4), {"ffn_hidden_size": 66}, 2, "ffn_hidden_size 66 is not divisible by 4"),
    (Layout(tensor=4, sequence=True), {"seq_len": 18}, 2, "seq_len 18 .* try --seq-len 20"),
    (Layout(tensor=2, sequence=True), {}, 4, "in 4_transformer_engine that is the batch; leave out \\+sp"),
    (Layout(), {"seq_len": 9, "amp_dtype": torch.bfloat16}, 4, "FP8 needs batch_size \\* seq_len divisible by 16"),
    (Layout(tensor=4), {"amp_dtype": torch.bfloat16}, 4, "a rank has 8 of hidden_size 32; FP8 needs a multiple of 16")])
def test_blocks_that_can_not_be_split_are_a_line(layout, changes, number, said):
    with pytest.raises(ValueError, match=said):
        layout.check(CONFIG.replace(**changes), steps.load(number))


@unit
def test_scales_are_of_all_ranks_or_of_one():
    recipe = SimpleNamespace(reduce_amax=True)
    blocks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    blocks[1].recipe = recipe
    stack = parallel.Stack([parallel.Layer(block) for block in blocks])
    parallel.share_scales(stack, False)
    assert recipe.reduce_amax is False
    parallel.share_scales(stack, True)
    assert recipe.reduce_amax is True


@unit
def test_who_shares_a_batch():
    layout = Layout(2, 2, 2)
    assert [layout.batch_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3] and layout.batches == 4
    assert {name: layout.apart(name) for name in layout.mesh} == {"replicate": 4, "shard": 2, "tensor": 1}
    x, _ = proof.global_batch(CONFIG, layout, 0)
    assert torch.equal(proof.own_part(x, CONFIG, layout, 5), x[4:6])


# --------------------------------------------------------------------------------------------------------------- proof


def found_at(layout, sharding, dtype=torch.float64, number=2, config=CONFIG, divided=1.0, calibrated=False):
    """The errors of spread blocks, on the ranks that there are."""
    mesh = parallel.mesh_of(layout, CPU)
    truth = proof.truth_of(config, LAYERS, layout, 0, CPU) if torch.distributed.get_rank() == 0 else None
    make = parallel.seeded(steps.load(number), config, layout, 0, dtype, CPU, mesh)
    stack = parallel.build(make, config, LAYERS, layout, mesh, sharding, dtype)
    return proof.found_by(stack, config, layout, 0, dtype, CPU, truth, divided=divided, calibrated=calibrated)


def in_fp8(rank):
    """Layout -> (errors of step 4, emulated, whether the account is that of the formula)."""
    config, found = CONFIG.replace(amp_dtype=torch.bfloat16), {}
    for words in ("fsdp", "tp:2"):
        layout = parsed(words, 2)
        found_there = found_at(layout, USUAL, torch.float32, 4, config, calibrated=True)
        expected = account.expected(config, LAYERS, layout, USUAL, torch.float32, fp8=True)
        found[words] = found_there.errors, found_there.moved == expected
    return found


def every_right_one(rank):
    """Layout and settings -> (errors, whether the account is that of the formula)."""
    found = {}

    def try_it(name, words, sharding=USUAL, number=2):
        layout = parsed(words, 2)
        found_there = found_at(layout, sharding, number=number, divided=sharding.divided(layout.batches))
        fp8 = bool(steps.load(number).traits.fp8)
        expected = account.expected(CONFIG, LAYERS, layout, sharding, torch.float64, fp8)
        found[name] = found_there.errors, found_there.moved == expected
    for words in ("fsdp", "hsdp:2x1", "tp:2", "tp:2+sp"):
        try_it(words, words)
    try_it("by the engine", "tp:2", number=4)
    settings = {"kept": Sharding(reshard=False), "not ahead": Sharding(prefetch=0),
                "summed": Sharding(divide_by=1.0)}
    for name, sharding in settings.items():
        try_it(name, "fsdp", sharding)
    compile_it = torch.nn.Module.compile
    with mock.patch.object(torch.nn.Module, "compile", lambda block, **how: compile_it(block, backend="eager", **how)):
        try_it("compiled", "fsdp", number=3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return found


def all_right_ones(rank):
    return every_right_one(rank), in_fp8(rank)


@integration
def test_spread_blocks_are_the_whole_ones():
    found, of_fp8 = on_ranks(2, all_right_ones)
    for errors, is_formula in of_fp8.values():
        assert is_formula
        for what, gate in proof.gates("float8, emulated", LAYERS).items():
            assert errors[what] < gate, (what, of_fp8)
    for what, (errors, is_formula) in found.items():
        assert is_formula, what
        assert set(errors) == set(proof.gates("float64", 1)) and max(errors.values()) < proof.MEANING, (what, errors)


def several_dimensions(rank):
    """Layout and step -> errors, on four ranks."""
    every = {"hsdp:2x2": 2, "fsdp:2,tp:2+sp": 2, "hsdp:2x1,tp:2": 2, "fsdp:2,tp:2": 4}
    return {f"{words}, step {number}": found_at(parsed(words, 4), USUAL, number=number).errors
            for words, number in every.items()}


def fails_on_one_rank(rank: int) -> str:
    """What a rank is told where another's scales never moved."""
    def never(block):
        if rank == 1:
            raise Failed("an FP8 scale is still 1")
    with mock.patch.object(proof, "check_scales", never):
        try:
            found_at(parsed("fsdp", 2), Sharding(), calibrated=True)
        except Failed as error:
            return str(error)
    return "nothing"


@integration
def test_a_rank_that_fails_its_proof_alone_is_named_by_all():
    assert on_ranks(2, fails_on_one_rank) == "rank 1: an FP8 scale is still 1"


@pytest.mark.stress
def test_blocks_that_are_spread_over_several_dimensions_are_the_whole_ones():
    for what, errors in on_ranks(4, several_dimensions).items():
        assert set(errors) == set(proof.gates("float64", 1)) and max(errors.values()) < proof.MEANING, (what, errors)


def _summed(rank):
    """Its gradients are the sum over the batches, not their mean."""
    return Sharding(divide_by=1.0), contextlib.nullcontext()


def _dropped(rank):
    """Every rank takes the first one's batch."""
    own_part = proof.own_part
    return Sharding(), mock.patch.object(
        proof, "own_part", lambda whole, config, layout, of: own_part(whole, config, layout, 0 if rank else of))


def _seeded(rank):
    """One rank begins with other parameters."""
    values_of = parallel.values_of
    return Sharding(), mock.patch.object(
        parallel, "values_of", lambda config, layer, seed, dtype: values_of(config, layer, seed + rank, dtype))


def _scaled(rank):
    """The loss is summed over the ranks."""
    loss_of = proof.loss_of

    def summed(y, target):
        return loss_of(y, target) * (2 if len(y) == CONFIG.batch_size else 1)          # the truth's batch is global
    return Sharding(), mock.patch.object(proof, "loss_of", summed)


def _not_reduced(rank):
    """Each rank keeps its own gradients."""
    as_it_is = parallel._set

    def unsynchronized(stack, *others):
        as_it_is(stack, *others)
        stack.set_requires_gradient_sync(False)
    return Sharding(), mock.patch.object(parallel, "_set", unsynchronized)


def _stepped_alone(rank):
    """One rank's optimizer never moves its shards."""
    adamw = proof.adamw

    def lazy(every):
        optimizer = adamw(every)
        if rank and len(every) > 1:                        # no step in FP64 of what was gathered
            optimizer.param_groups[0]["lr"] = 0.0
        return optimizer
    return Sharding(), mock.patch.object(proof, "adamw", lazy)


def _not_dealt(rank):
    """The rows of [Q | K | V] are split as they are."""
    return Sharding(), mock.patch.object(parallel, "dealt", lambda values, ranks: values)


def _wrong_heads(rank):
    """Each rank believes that it has all heads."""
    split = parallel.split

    def halved(block, *others):
        heads = block.attn.num_heads
        split(block, *others)
        block.attn.num_heads = heads
    return Sharding(), mock.patch.object(parallel, "split", halved)


def _norm_not_reduced(rank):
    """A LayerNorm's gradient is that of a rank's own part of S."""
    class Untouched(ParallelStyle):
        def _apply(self, module, mesh):
            return module
    return Sharding(), mock.patch.object(parallel, "SequenceParallel", Untouched)


BY_SPLIT = {_not_dealt: "tp:2", _wrong_heads: "tp:2", _norm_not_reduced: "tp:2+sp"}
MUTANTS = {_not_dealt: proof.BRANCH, _wrong_heads: proof.BRANCH, _norm_not_reduced: proof.GRADIENT,
           _summed: proof.GRADIENT, _dropped: proof.GRADIENT, _seeded: proof.BRANCH, _scaled: proof.LOSS,
           _not_reduced: proof.GRADIENT, _stepped_alone: proof.UPDATE}


def every_mutant(rank):
    """Name -> errors."""
    found = {}
    for mutant in MUTANTS:
        sharding, patched = mutant(rank)
        with patched:
            found[mutant.__name__] = found_at(parsed(BY_SPLIT.get(mutant, "fsdp"), 2), sharding).errors
    return found


@integration
def test_each_mutant_is_caught():
    found = on_ranks(2, every_mutant)
    for mutant, what in MUTANTS.items():
        error = found[mutant.__name__][what]
        assert not error <= 1e-6, (mutant.__doc__, found[mutant.__name__])


# ------------------------------------------------------------------------------------------------------------- account


@unit
@pytest.mark.parametrize("words, ranks", [
    *(("fsdp", ranks) for ranks in (1, 2, 4, 7, 8, 48, 64)), ("hsdp:2x1", 2), ("hsdp:2x4", 8), ("hsdp:8x6", 48),
    ("tp:2", 2), ("tp:4+sp", 4), ("fsdp:4,tp:4", 16), ("fsdp:7,tp:2+sp", 14), ("hsdp:2x2,tp:2+sp", 8)])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(POLICY, reshard=False)])
def test_what_is_moved_is_what_the_formula_gives(words, ranks, sharding):
    """To the byte: 96 rows in 7 shards are padded to 98."""
    config, layout = CONFIG.replace(amp_dtype=torch.bfloat16), parsed(words, ranks)
    try:
        seen = simulate.seen_at(steps.load(2), config, LAYERS, layout, sharding)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert seen.moved == account.expected(config, LAYERS, layout, sharding, torch.float32)
    assert seen.state_bytes == account.expected_state(config, LAYERS, layout, torch.float32)


@unit
def test_what_is_moved_at_a_thousand_ranks():
    layout = parsed("fsdp", 1024)
    seen = simulate.seen_at(steps.load(2), CONFIG, 1, layout, Sharding())
    assert seen.moved == account.expected(CONFIG, 1, layout, Sharding(), torch.float32)


@unit
def test_the_formula_at_a_published_size():
    """Four blocks of te-tutorial in 16 bits: twice 2 bytes of each parameter are gathered, 4 are reduced."""
    config, layout = PRESETS["te-tutorial"].replace(amp_dtype=torch.bfloat16), parsed("fsdp", 64)
    moved = account.expected(config, 4, layout, Sharding(POLICY), torch.float32)
    assert moved == {GATHER: account.Moved(8, 4 * 2 * 2 * 201_379_840),
                     SCATTER: account.Moved(4, 4 * 4 * 201_379_840)}


def held_at_once(layout, number, config):
    """Bytes of a training step with AdamW on the first rank, by what the CPU's allocator is asked for and given back.
    """
    mesh = parallel.mesh_of(layout, CPU)
    make = parallel.seeded(steps.load(number), config, layout, 0, torch.float32, CPU)
    stack = parallel.build(make, config, LAYERS, layout, mesh, USUAL, torch.float32)
    optimizer = proof.adamw(list(stack.parameters()))
    x, dy = proof.global_batch(config, Layout(), 0)
    work = timed.iteration_of(stack, x, dy)
    for _ in range(2):
        work.between()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            work.run()
            optimizer.step()
        before = 3 * sum(account.own(parameter).nbytes for parameter in stack.parameters()) + x.nbytes + dy.nbytes
    events = [(event.start_ns(), event.nbytes()) for event in seen.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    return before + max(itertools.accumulate(size for _, size in sorted(events)))


@integration
@pytest.mark.parametrize("words, ranks, number", [("fsdp", 8, 0), ("hsdp:2x2", 4, 2), ("tp:2", 2, 2),
                                                  ("tp:2+sp", 2, 2), ("fsdp,tp:2", 4, 0)])
def test_the_memory_that_is_foreseen_is_what_a_rank_holds(words, ranks, number):
    config, layout = BlockConfig(2, 128, 256, 4, amp_dtype=None), parsed(words, ranks)
    with simulate.fake_group(ranks):
        held = held_at_once(layout, number, config)
    foreseen = simulate.seen_at(steps.load(number), config, LAYERS, layout, USUAL).peak_bytes
    assert foreseen == pytest.approx(held, rel=0.05)


@integration
def test_what_softmax_holds_meanwhile_on_a_gpu_is_foreseen():
    """Its backward makes a product of all scores there, which it does not on a CPU."""
    config, layout = BlockConfig(2, 1024, 64, 4, amp_dtype=None), parsed("fsdp", 8)
    with simulate.fake_group(8):
        held = held_at_once(layout, 0, config)
    foreseen = simulate.seen_at(steps.load(0), config, LAYERS, layout, USUAL).peak_bytes
    assert foreseen - held == pytest.approx(2 * 4 * 1024 * 1024 * 4, rel=0.01)


@unit
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_is_foreseen_as_a_gpu_keeps_it(dtype):
    scores = torch.empty(4, 4, dtype=dtype, device="meta", requires_grad=True)
    with simulate.AutocastOfGPU():
        assert scores.softmax(dim=-1).dtype == dtype
        with torch.autocast("cpu", dtype):
            weights = scores.softmax(dim=-1)
            others = torch.softmax(scores, -1), torch.nn.functional.softmax(scores, dim=-1)
            assert {each.dtype for each in (weights, *others)} == {torch.float32}
            assert scores.softmax(dim=-1, dtype=torch.float64).dtype == torch.float64
    weights.backward(torch.empty_like(weights))
    assert scores.grad.dtype == dtype


@gpu
@integration
@pytest.mark.parametrize("number, precision", [(0, "autocast"), (1, "autocast"), (2, "autocast"), (2, "policy")])
def test_the_memory_that_is_foreseen_is_what_a_gpu_holds(number, precision):
    config, sharding = PRESETS["te-tutorial"].replace(batch_size=2, dropout=0.0), Sharding(precision)
    which = steps.load(number), config, LAYERS, parsed("fsdp", 8), sharding
    before = torch.cuda.memory_allocated()                 # by other tests
    held = simulate.measured_peak(*which, torch.device("cuda")) - before
    assert simulate.seen_at(*which).peak_bytes == pytest.approx(held, rel=0.05)


@unit
def test_gpus_are_simulated_whatever_this_machine_multiplies(study_main, monkeypatch, tmp_path):
    """Two stacks in a chart are told apart."""
    monkeypatch.setattr(traits, "cpu_multiplies_bfloat16", lambda: False)
    path = tmp_path / "records.jsonl"
    for layers in ("1", "2"):
        status, out, err = study_main("distributed", "--preset", "tiny", "--simulate", "2,4", "--device", "cpu",
                                      "--layers", layers, "--json", str(path))
        assert status == 0 and "fsdp:4, float16 by autocast, simulated" in out, err
    drawn = []
    monkeypatch.setattr(tables.charting, "panels_chart", lambda *words: drawn.append(words))
    STUDY.charts(read(path))["ranks"]()
    (panels, _, _, title, _), = drawn
    assert title == "simulated: no communication ran"
    names = ["fsdp, autocast, step 2, 1 layer", "fsdp, autocast, step 2, 2 layers"]
    for series in panels.values():
        assert list(series) == names and [ranks for ranks, _ in series[names[0]]] == [2, 4]


@unit
@pytest.mark.parametrize("precision, told", [("autocast", "tp:2+sp, float32, simulated"),
                                             ("policy", "tp:2+sp, float16 by policy, simulated")])
def test_a_step_without_autocast_multiplies_as_its_parameters_are(study_main, precision, told):
    status, out, err = study_main("distributed", "--preset", "tiny", "--simulate", "2", "--parallel", "tp:2+sp",
                                  "--step", "0", "--precision", precision, "--device", "cpu")
    assert status == 0 and told in out, out + err


@unit
def test_an_account_that_is_off_fails(study_main, monkeypatch):
    expected = account.expected
    monkeypatch.setattr(account, "expected", lambda *a: expected(*a) | {REDUCE: account.Moved(1, 8)})
    status, out, _ = study_main("distributed", "--preset", "tiny", "--simulate", "4", "--device", "cpu")
    assert status == 1 and "all-reduce: 0 calls of 0 bytes were counted, the formula gives 1 of 8" in out


# -------------------------------------------------------------------------------------------------------- model of time


@unit
def test_a_ring_takes_what_its_formula_says():
    assert ring.seconds(1e9, 1) == 0.0
    assert ring.seconds(ring.BUS, 8) == pytest.approx(7 / 8 + ring.BASE_S + 7 * ring.NVLINK_S)
    assert ring.seconds(0.0, 16) == pytest.approx(ring.BASE_S + 14 * ring.NVLINK_S + ring.NETWORK_S)


@unit
def test_rings_that_run_at_once_share_a_nodes_network():
    """hsdp:4x8 has eight rings over four nodes, one NIC for each; fsdp:4,tp:2 has two rings, both in one node."""
    assert ring.seconds(ring.BUS, 4, 8) == pytest.approx(8 * 3 / 4 + ring.BASE_S + 3 * ring.NETWORK_S)
    assert ring.seconds(ring.BUS, 4, 2) == ring.seconds(ring.BUS, 4)
    assert ring.seconds(ring.BUS, 8, 2) == pytest.approx(
        2 * 7 / 8 + ring.BASE_S + 6 * ring.NVLINK_S + ring.NETWORK_S)


@unit
def test_what_hides_behind_compute_costs_nothing_but_at_the_ends():
    hidden = ring.Layer(forward=1.0, backward=2.0, gather=0.1, reduce=0.2)
    assert ring.total(hidden, 10) == pytest.approx(10 * 3.0 + 2 * 0.1 + 0.2)
    exposed = ring.Layer(forward=1.0, backward=2.0, gather=3.0, reduce=0.5)
    assert ring.total(exposed, 10) == pytest.approx(3 + 9 * 3 + 1 + 3 + 9 * 3.5 + 2 + 0.5)
    kept = dataclasses.replace(exposed, gathered_again=False)
    assert ring.total(kept, 10) == pytest.approx(3 + 9 * 3 + 1 + 9 * 2 + 2 + 0.5)
    forward, backward = ring.compute_of(ring.total(hidden, 10), 10, 0.1, 0.2)
    assert (forward, backward) == pytest.approx((1.0, 2.0))


@unit
def test_the_model_of_a_stack_moves_what_the_formulas_say():
    """Bytes by hand: of TP the 16-bit output of both halves and the FP32 gradient of both inputs of a layer."""
    config = PRESETS["te-tutorial"].replace(batch_size=1, dropout=0.0, amp_dtype=torch.bfloat16)
    whole = modelled.of_stack(config, 4, Layout(), USUAL, 0.1, 0.2)
    assert whole == modelled.Modelled(pytest.approx(1.2), pytest.approx(1.2), 0.0, 0.0, 0.0)
    split = modelled.of_stack(config, 4, Layout(tensor=2), USUAL, 0.1, 0.2)
    size = config.tokens * config.hidden_size
    waits = 4 * 2 * 2 * (ring.seconds(2 * size, 2) + ring.seconds(4 * size, 2))
    assert split == modelled.Modelled(pytest.approx(0.6 + waits), pytest.approx(0.6), pytest.approx(waits), 0.0, 0.0)
    over_nodes = modelled.of_stack(config, 4, Layout(replicate=4, shard=8), USUAL, 0.1, 0.2)
    of_layer = 4 * sum(math.prod(shape) for shape in parameters.shapes(config).values())
    assert over_nodes.gather == ring.seconds(of_layer, 8)
    assert over_nodes.reduce == pytest.approx(ring.seconds(of_layer, 8) + 2 * ring.seconds(of_layer / 8, 4, 8))


@unit
@pytest.mark.parametrize("sharding", [USUAL, Sharding("policy", False, 3, torch.bfloat16, 2.0)])
def test_what_fsdp_was_told_is_read_back_from_a_record(sharding):
    assert Sharding.of_variant({"parallel": "fsdp:2", "layers": 4} | sharding.variant) == sharding


@unit
def test_the_model_stands_beside_every_published_point_with_its_miss():
    points = list(published.points())
    assert len(points) == sum(len(series.rates) - 1 for series in published.SERIES)
    assert all(0.9 < point.published < 1.01 and 0.99 < point.predicted <= 1.0 for point in points)
    shown = published.text()
    assert published.NO_COMMUNICATION in shown and f"{len(points)} points" in shown
    assert f"{max((point.miss for point in points), key=abs):+.3f} at the worst" in shown


@unit
def test_a_block_that_was_recorded_has_a_modelled_step(study_main):
    words = ["--simulate", "8", "--layers", "2", "--preset", "te-tutorial", "--device", "cpu", "--published"]
    status, out, _ = study_main("distributed", *words)
    assert status == 0 and out.count(published.NO_COMMUNICATION) == 2 and tables.FROM_ONE in out, out
    words = ["--simulate", "8", "--layers", "1", "--preset", "tiny", "--device", "cpu"]
    status, out, _ = study_main("distributed", *words)
    assert status == 0 and tables.NO_RECORD in out and tables.FROM_ONE not in out, out


# --------------------------------------------------------------------------------------------------------- checkpoints


OWN = checkpoints.about(CONFIG, LAYERS, 2, Layout(shard=2), 0)


def stack_on(words):
    """(layout, a stack on the ranks that there are, its optimizer)."""
    layout = parsed(words, 2)
    make = parallel.seeded(steps.load(2), CONFIG, layout, 0, torch.float32, CPU)
    mesh = parallel.mesh_of(layout, CPU)
    stack = parallel.build(make, CONFIG, LAYERS, layout, mesh, Sharding(), torch.float32)
    return layout, stack, proof.adamw(list(stack.parameters()))


def resumed(rank, folder):
    """Words of a layout -> how far the third step's parameters are from those of who never stopped, relatively."""
    def train(layout, stack, optimizer, first, last):
        list(checkpoints.trained(stack, optimizer, CONFIG, layout, 0, first, last))
        return [proof.full(parameter) for parameter in stack.parameters()]
    layout, stack, optimizer = stack_on("fsdp")
    found = {"as losses": [loss for _, loss in checkpoints.trained(stack, optimizer, CONFIG, layout, 0, 1, 2)]}
    checkpoints.save(folder, 2, stack, optimizer, OWN)
    whole = train(layout, stack, optimizer, 3, 3)
    _, path = checkpoints.latest(folder, OWN)
    for words in ("fsdp", "hsdp:2x1"):
        layout, stack, optimizer = stack_on(words)
        checkpoints.load(path, stack, optimizer)
        parts = zip(train(layout, stack, optimizer, 3, 3), whole, strict=True)
        found[words] = max(oracle.relative_error(one, other) for one, other in parts)

    config = CONFIG.replace(batch_size=2 * CONFIG.batch_size)          # of two ranks that share it
    layout, stack, optimizer = stack_on("tp:2")
    found["losses"] = [loss for _, loss in checkpoints.trained(stack, optimizer, config, layout, 0, 1, 2)]
    load = checkpoints.dcp.load

    def stale(state, **where):
        shards = [account.own(parameter) for parameter in state["model"].values()]
        kept = [shard.clone() for shard in shards]
        load(state, **where)
        with torch.no_grad():
            for shard, before in zip(shards, kept, strict=True) if rank else ():
                shard.copy_(before)
    _, stack, optimizer = stack_on("fsdp")
    with mock.patch.object(checkpoints.dcp, "load", stale):
        try:
            checkpoints.load(path, stack, optimizer)
        except Failed as error:
            found["stale"] = str(error)
    return found


@integration
def test_a_checkpoint_resumes_bitwise_and_on_other_meshes_and_a_stale_shard_is_found(tmp_path):
    found = on_ranks(2, resumed, str(tmp_path / "kept"))
    assert found["fsdp"] == 0.0 and found["hsdp:2x1"] < 1e-6
    assert "is not what was saved" in found["stale"]
    assert found["losses"] == pytest.approx(found["as losses"], rel=1e-6)      # whoever splits what, it is one training


def made_checkpoint(folder, steps, own=OWN, complete=True):
    path = folder / f"step-{steps}"
    path.mkdir(parents=True)
    (path / checkpoints.ABOUT).write_text(json.dumps({"about": own, "norms": {}}))
    if complete:
        (path / checkpoints.COMPLETE).touch()
    return path


@unit
def test_an_operator_that_no_formula_knows_is_counted():
    assert account.kind_of("_allgather_base_.default") == GATHER
    assert account.kind_of("alltoall_.default") == "alltoall_.default"
    assert account.kind_of("wait_tensor.default") is None


@unit
def test_an_error_that_is_no_number_is_kept():
    found = proof.Found()
    for error in (0.5, float("nan"), 0.1):
        found.see(proof.LOSS, error)
    assert not found.errors[proof.LOSS] <= 1.0


@unit
def test_the_newest_whole_checkpoint_is_found(tmp_path):
    assert checkpoints.latest(str(tmp_path / "new"), OWN) is None
    made_checkpoint(tmp_path, 9), made_checkpoint(tmp_path, 10), made_checkpoint(tmp_path, 11, complete=False)
    assert checkpoints.latest(str(tmp_path), OWN) == (10, tmp_path / "step-10")


@unit
@pytest.mark.parametrize("name, text, said", [
    ("notes.txt", "", "it holds something else"), ("step-3/about.json", "{", "can't be read"),
    ("step-3/about.json", json.dumps({"about": OWN | {"seed": 7}}), "it is of seed 7, not 0"),
    ("step-3/about.json", "[]", "can't be read")])
def test_a_foreign_checkpoint_is_a_line(study_main, monkeypatch, tmp_path, name, text, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    if "/" in name:
        ((tmp_path / name).parent / checkpoints.COMPLETE).touch()
    with pytest.raises(ValueError, match=said):
        checkpoints.latest(str(tmp_path), OWN)
    monkeypatch.setattr(launching, "start", lambda *_: pytest.fail("it started"))
    words = ["--preset", "tiny", "--device", "cpu", "--ranks", "2", "--checkpoint", tmp_path]
    status, _, err = study_main("distributed", *words)
    assert status == 2 and len(err.splitlines()) == 1 and "--checkpoint" in err


# --------------------------------------------------------------------------------------------------------- the command


@unit
def test_how_a_rank_ended_is_reported(tmp_path):
    def failure(exitcode, message="", error_file="error.json"):
        return SimpleNamespace(exitcode=exitcode, message=message, error_file=error_file)
    assert launching.in_words(2, failure(-9)) == "rank 2 was ended by SIGKILL"
    assert launching.in_words(2, failure(2, error_file=launching.NO_FILE)) == "rank 2 ended with status 2"
    said = {"message": "ValueError: one\ntwo", "extraInfo": {}}
    assert launching.in_words(2, failure(1, said)) == "rank 2 failed: ValueError: one"
    (tmp_path / f"error.json{launching.SAID}").write_text("rank 1 hangs")
    own = failure(1, "Hung: rank 1 hangs", error_file=str(tmp_path / "error.json"))
    assert launching.in_words(2, own) == "rank 1 hangs"


@unit
@pytest.mark.parametrize("words, said", [
    ([], "give --ranks N, or start it by torchrun"), (["--ranks", "2", "--parallel", "tp:3"], "not divisible by tp:3"),
    (["--ranks", "3", "--parallel", "tp:3"], "num_heads 4 is not divisible by 3"),
    (["--simulate", "4", "--ranks", "2"], "give one of them"),
    (["--simulate", "4", "--profile", "timeline.json"], "nothing runs with --simulate"),
    (["--ranks", "2", "--profile", "/nowhere/timeline.json"], "give a file that can be written"),
    (["--ranks", "2", "--published"], "belongs to --simulate"),
    (["--ranks", "2", "--step", "4", "--checkpoint", "new"], "FP8's scales are no part"),
    (["--simulate", "4", "--step", "4"], "its parameters are those of step 2"),
    (["--simulate", "8,4", "--parallel", "hsdp:2x4"], "that is 8 ranks, and there are 4"),
    (["--ranks", "2", "--prefetch", "-1"], "--prefetch -1"), (["--ranks", "2", "--divide-by", "0"], "--divide-by 0"),
    (["--ranks", "2", "--divide-by", "4", "--parallel", "hsdp:2x1"], "--divide-by 4 --parallel hsdp:2x1"),
    (["--ranks", "0"], "whole number from 1"), (["--ranks", "2", "--timeout", "0"], "--timeout 0")])
def test_a_mistake_is_one_line_before_any_process_starts(study_main, monkeypatch, words, said):
    monkeypatch.setattr(launching, "start", lambda *_: pytest.fail("it started"))
    status, _, err = study_main("distributed", "--preset", "tiny", "--device", "cpu", *words)
    assert status == 2 and said in err and len(err.splitlines()) == 1, err


@unit
def test_a_port_in_use_is_a_line(study_main, monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in zip(launching.FROM_LAUNCHER, ("0", "0", "2", "localhost", port), strict=True):
            monkeypatch.setenv(name, value)
        status, _, err = study_main("distributed", "--preset", "tiny", "--device", "cpu")
        assert status == 2 and f"MASTER_PORT {port}" in err and len(err.splitlines()) == 1, err


@unit
def test_what_is_not_usual_is_reported():
    sharding = Sharding(POLICY, False, 2, torch.bfloat16, 1.0)
    assert sharding.variant == {"precision": "policy", "gathered": "kept", "prefetch": 2, "reduced in": "bfloat16",
                             "divided by": 1.0}
    assert Sharding().variant == {"precision": "autocast"}


@unit
def test_a_rank_among_others_that_were_started(study_main, monkeypatch):
    for name, value in zip(launching.FROM_LAUNCHER, ("1", "1", "4", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert launching.place() == launching.Place(1, 1, 4)
    status, _, err = study_main("distributed", "--preset", "tiny", "--device", "cpu", "--ranks", "2")
    assert status == 2 and "the launcher has started 4" in err


@unit
def test_what_a_version_of_torch_can_not_simulate_is_a_skipped_row(study_main, monkeypatch):
    def lost(*_):
        raise RuntimeError("Could not resolve the process group registered under the name 5")
    monkeypatch.setattr(simulate, "mesh_of", lost)
    status, out, _ = study_main("distributed", "--preset", "tiny", "--simulate", "8", "--device", "cpu")
    assert status == 4 and f"fsdp:8, skipped: torch {torch.__version__} does not find its groups" in out


@unit
def test_a_simulation_is_shown_as_one(study_main, tmp_path):
    path = tmp_path / "simulated.jsonl"
    words = ["--preset", "tiny", "--simulate", "8,64", "--device", "cpu", "--json", path]
    status, out, _ = study_main("distributed", *words)
    assert status == 0 and "fsdp:64" in out and "nothing was sent" in out and "against one process" not in out
    assert "foreseen" in out and "times n/a" not in out
    assert STUDY.report(read(path)) in out


@integration
def test_the_command_from_words_to_table(tmp_path):
    path, timeline = tmp_path / "distributed.jsonl", tmp_path / "timeline.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "distributed", "--ranks", "2", "--preset", "tiny", "--layers", "2",
         "--device", "cpu", "--json", path, "--profile", timeline], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = read(path)
    assert [run.status for run in runs(lines)] == ["ok", "ok"]
    assert STUDY.report(lines) in ended.stdout and "step 2, 2 layers, fsdp:2, float64" in ended.stdout
    assert "times n/a: numerics only" in ended.stdout and "gloo:all_gather" in timeline.read_text()
    assert STUDY.answer(lines).startswith("in FP64 spread and whole agree to ")


@unit
def test_the_truth_is_the_same_a_sequence_at_a_time(monkeypatch):
    layout = Layout(shard=3)
    at_once = proof.truth_of(CONFIG, LAYERS, layout, 0, CPU)
    monkeypatch.setattr(proof, "SCORES_AT_ONCE", 1)
    by_one = proof.truth_of(CONFIG, LAYERS, layout, 0, CPU)
    assert by_one.loss == pytest.approx(at_once.loss, rel=1e-14)
    torch.testing.assert_close(by_one.branch, at_once.branch, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_one.x_gradient, at_once.x_gradient, rtol=1e-12, atol=1e-12)
    for one, other in zip(by_one.gradients, at_once.gradients, strict=True):
        for name, value in one.items():
            assert oracle.relative_error(value, other[name]) < 1e-13


@unit
def test_a_mean_over_many_elements_has_gradients_in_fp16():
    layer, x, target = torch.nn.Linear(8, 8), torch.randn(2**17, 8), torch.zeros(2**17, 8)
    leaves = layer.weight, x.requires_grad_()
    proof.backward(proof.loss_of(layer(x), target), layer, x)
    exact = [leaf.grad.double() for leaf in leaves]
    layer.zero_grad()
    x.grad = None
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    proof.backward(proof.loss_of(y.float(), target), layer, x)
    assert max(map(oracle.relative_error, [leaf.grad for leaf in leaves], exact)) < 1e-2


# ---------------------------------------------------------------------------------------------------------------- time


class OfMany:
    """A clock by which an iteration takes long on one rank and not on the other."""
    settle_ms, burst_ms, lead_in = 100.0, 100.0, 1

    def __init__(self, rank):
        self.ms, self.counts = (1.0, 50.0)[rank], []

    def sample(self, iteration, between, count, lead_in=lead_in):
        self.counts.append((count, lead_in))
        between()
        iteration()
        return [self.ms] * count


def counts_of(rank):
    """(how often each rank has run what, the times of the first), where the second one has memory and has not."""
    return [_counts_of(rank, fits) for fits in (True, False)]


def _counts_of(rank, fits):
    layout, clock = parsed("fsdp", 2), OfMany(rank)
    make = parallel.seeded(steps.load(2), CONFIG, layout, 0, torch.float32, CPU)
    stack = parallel.build(make, CONFIG, LAYERS, layout, parallel.mesh_of(layout, CPU), USUAL, torch.float32)

    def alone():
        if rank and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return parallel.Stack([parallel.Layer(make(number)) for number in range(LAYERS)])
    x, dy = proof.global_batch(CONFIG, Layout(), 0)
    with mock.patch.object(timed, "clock_for", lambda device: clock):
        found_there = timed.timed(stack, alone, x, dy, 6, 0, lambda phase: None)
    every = [None, None]
    torch.distributed.all_gather_object(every, clock.counts)
    return every, found_there


@integration
def test_all_ranks_run_as_often_as_the_first_one_says():
    for (every, found_there), fits in zip(on_ranks(2, counts_of), (True, False), strict=True):
        assert every[0] == every[1] and (100, 100) in every[0]
        assert found_there.spread == [1.0] * 6 and found_there.alone == [1.0] * 6 * fits


def of_times(layout, **figures_of_it):
    """Records of a run on GPUs."""
    result = Result("2_sdpa", PRESETS["te-tutorial"].replace(amp_dtype=torch.bfloat16), "float32",
                    GPU | {"name": "NVIDIA H100 80GB HBM3"}, 2, steps.load(2).traits, study="distributed",
                    variant={"parallel": str(layout), "layers": 4, "precision": "autocast"}, matmul="bfloat16")
    return tables.records_of_time(result, timed.Timed(**figures_of_it), 4, layout, torch.device("cuda"))


@unit
def test_peaks_are_shown_as_they_are_foreseen_and_measured():
    result = Result("2_sdpa", PRESETS["tiny"], "float32", GPU, 2, steps.load(2).traits, study="distributed",
                    variant={"parallel": "fsdp:2", "layers": 4, "precision": "autocast"}, matmul="bfloat16")
    shown = STUDY.report([*foreseen(result, 2**34), *tables.records_of_peak(result, 2**34 + 2**30)])
    assert re.search(r"autocast +16\.0 +17\.0 +6\n", shown), shown
    result.traits = steps.load(3).traits
    assert foreseen(result, 2**34) == []


@unit
def test_times_are_shown_beside_those_of_one_gpu_alone():
    of_data = of_times(Layout(shard=2), spread=[100.0] * 6, alone=[95.0] * 6, communication_ms=30.0, exposed_ms=4.0)
    shown = STUDY.report(of_data)
    assert "163,840" in shown and "0.95 [0.95, 0.95]" in shown and tables.TIMES in shown
    assert re.search(r"autocast +95\.0 +1\.13 +1\.13 +0\.000 +98\.4 +100 +-2\n", shown), shown
    of_tensor = of_times(Layout(tensor=2), spread=[100.0] * 6, alone=[160.0] * 6)
    assert "81,920" in (shown := STUDY.report(of_tensor)) and "0.80 [0.80, 0.80]" in shown
    assert "n/a: whole they do not fit" in STUDY.report(of_times(Layout(shard=2), spread=[100.0] * 6))


@unit
def test_what_spreading_loses_is_told_apart_and_by_the_number_of_gpus():
    in_kernels = {"computation_ms": 97.0, "computation_alone_ms": 94.0}
    two = of_times(Layout(shard=2), spread=[100.0] * 6, alone=[95.0] * 6, exposed_ms=1.5, **in_kernels)
    four = of_times(Layout(shard=4), spread=[110.0] * 6, alone=[95.0] * 6, exposed_ms=5.0, **in_kernels)
    shared = of_times(Layout(tensor=4), spread=[40.0] * 6, alone=[100.0] * 6, exposed_ms=10.0,
                      computation_ms=29.0, computation_alone_ms=96.0)
    unknown = of_times(Layout(tensor=2), spread=[40.0] * 6, alone=[100.0] * 6, exposed_ms=10.0)
    rows = [[cell.strip() for cell in row.strip("|").split("|")]
            for row in scaling.text([[*two, *shared, *unknown], four]).splitlines()[2:]]
    assert [row[1:] for row in rows] == [["2", "0.95 [0.95, 0.95]", "5.00", "1.50", "3.00", "0.500"],
                                         ["4", "0.86 [0.86, 0.86]", "15.0", "5.00", "3.00", "7.00"],
                                         ["4", "0.62 [0.62, 0.62]", "15.0", "10.0", "5.00", "0"]]


@unit
def test_the_answer_has_the_speed_of_sharded_blocks_alone():
    result = Result("2_sdpa", PRESETS["tiny"], "float64", GPU, 2, steps.load(2).traits, study="distributed",
                    variant={"parallel": "fsdp:2", "layers": 4, "precision": "autocast"}, matmul="float64")
    result.errors = {proof.LOSS: (2e-16, 1e-12), proof.BRANCH: (7e-16, 1e-12)}
    lines = check_records(result)
    assert STUDY.answer(lines) == "in FP64 spread and whole agree to 7e-16"
    lines += of_times(Layout(shard=2), spread=[100.0] * 6, alone=[95.0] * 6)
    assert STUDY.answer(lines).endswith("sharded a GPU has 0.95 of its speed alone")
    lines += of_times(Layout(replicate=2), spread=[100.0] * 6, alone=[99.0] * 6)
    lines += of_times(Layout(tensor=2), spread=[100.0] * 6, alone=[150.0] * 6)
    assert STUDY.answer(lines).endswith("has 0.95 to 0.99 of its speed alone")


# ------------------------------------------------------------------------------------------------------------- failure


FAULTY = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.studies.distributed import launching, proof
launching.PROGRAM = (__file__, "distributed")
whole = proof.loss_of
def broken(y, target):
    if os.environ["RANK"] == "1" and len(y) == 2:
        {fault}
    return whole(y, target)
proof.loss_of = broken
from benchmarks.__main__ import main
sys.exit(main())
"""


@integration
def test_a_rank_that_hangs_ends_the_run_in_a_line(tmp_path):
    """For what a rank raises or is killed by, how it is told is tried below and above, and the launcher is torch's."""
    script, path = tmp_path / "faulty.py", tmp_path / "records.jsonl"
    script.write_text(FAULTY.format(root=str(ROOT), fault="time.sleep(1000)"))
    words = ["--ranks", "2", "--preset", "tiny", "--layers", "1", "--device", "cpu", "--timeout", "4", "--json", path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, script, "distributed", *words], cwd=tmp_path, env=environment, check=False,
                           capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and path.read_text() == "", ended.stderr
    assert ended.stderr == ("distributed: rank 1 hangs in 'forward' at faulty.py:9; "
                            "the others have waited for it for 4 s\n")


@unit
def test_what_a_rank_raises_goes_where_its_launcher_finds_it(monkeypatch, tmp_path, capsys):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(launching.compiler, "use_private_caches", lambda: None)
    monkeypatch.setattr(launching.compiler, "remove_private_caches", lambda: None)
    monkeypatch.setattr(launching.signal, "signal", lambda *_: None)
    ended = []
    monkeypatch.setattr(launching.os, "_exit", ended.append)
    with launching.failing_in_a_line():
        raise ValueError("planned")
    assert ended == [1] and "ValueError: planned" in path.read_text()
    assert capsys.readouterr().err == "distributed: rank 3 failed: ValueError: planned\n"


@unit
@pytest.mark.parametrize("words, said", [
    ({0: watch.Word(3, "forward", ""), 1: watch.Word(3, "forward", "mine.py:7")},
     "rank 1 hangs in 'forward' at mine.py:7; the others have waited for it for 5 s"),
    ({0: watch.Word(4, "backward", ""), 1: watch.Word(3, "forward", ""), 2: watch.Word(4, "backward", "")},
     "rank 1 hangs in 'forward'; the others have waited for it for 5 s"),
    ({0: watch.Word(4, "backward", ""), 1: watch.Word(4, "backward", "")},
     "all ranks are in 'backward', for 5 s now; a longer --timeout lets them go on")])
def test_who_holds_up_the_others(words, said):
    assert watch.verdict(words, 5.0, len(words)) == said


@unit
@pytest.mark.parametrize("heard, said", [
    ({1: watch.Word(3, "forward", "")}, "rank 0 never said where it is; the others have waited for 5 s"),
    ({}, "ranks 0, 1 never said where they are; the others have waited for 5 s")])
def test_a_rank_that_has_never_reported_is_the_one_that_is_named(heard, said):
    assert watch.verdict(heard, 5.0, 2) == said


@unit
def test_who_waits_for_whom():
    long = watch.DEADLOCK + 1.0
    words = {rank: watch.Word(4, "backward", "", "all_gather", long) for rank in (0, 2)}
    words[1] = watch.Word(3, "forward", "", "all_reduce", long)
    assert watch.deadlock(words, 3) == ("all wait for each other, rank 1 in all_reduce of 'forward'; "
                                        "ranks 0, 2 in all_gather of 'backward': their collectives do not match")
    assert not watch.deadlock(words, 4)
    assert not watch.deadlock(words | {1: words[0]}, 3)                   # all in the same one: it is slow
    for busy in ({"line": "mine.py:3"}, {"idle_s": 1.0}):
        assert not watch.deadlock(words | {2: dataclasses.replace(words[2], **busy)}, 3)


@unit
def test_who_is_in_another_collective():
    both = {"0, default_pg: 7": "all_reduce [[3]] Float", "1, mesh_shard: 2": "_all_gather_base [[8]] Float"}
    words = {rank: watch.Word(3, "backward", "proof.py:7", unfinished=both) for rank in (0, 1, 2)}
    assert not watch.mismatch(words) and not watch.mismatch({0: words[0], 1: watch.Word(3, "backward", "")})
    words[1] = watch.Word(3, "forward", "", unfinished={"0, default_pg: 7": "barrier"})
    assert watch.mismatch(words) == ("rank 1 in barrier; ranks 0, 2 in all_reduce [[3]] Float: their collectives do "
                                     "not match")


def waited_for(rank):
    """What the first rank has begun and not ended: before the other one has joined it, and behind that."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank:
        store.wait(["looked"])
        torch.distributed.all_reduce(torch.ones(3))
        return None
    joined = torch.distributed.all_reduce(torch.ones(3), async_op=True)
    before = list(watch.unfinished().values())
    store.set("looked", "")
    joined.wait()
    deadline = time.monotonic() + 20
    while watch.unfinished() and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, list(watch.unfinished().values())


@integration
@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
                    reason="this torch records no collectives of Gloo")
def test_what_a_rank_has_begun_is_told_until_it_ends():
    with mock.patch.dict(os.environ):
        watch.record_collectives()                         # the ranks inherit it
        assert on_ranks(2, waited_for) == (["all_reduce [[3]] Float"], [])


@unit
def test_where_a_rank_is():
    line, waits_in = watch.where(threading.get_ident())
    assert line.startswith("watch.py:") and waits_in == ""


# -------------------------------------------------------------------------------------------------------------- overlap


@unit
@pytest.mark.parametrize("communication, computation, left", [
    ([], [(0, 9)], 0), ([(0, 4)], [], 4), ([(0, 4)], [(0, 4)], 0), ([(2, 6)], [(0, 3), (5, 9)], 2),
    ([(0, 4), (2, 6)], [], 6), ([(0, 10)], [(1, 3), (2, 5), (7, 8)], 5), ([(3, 3)], [], 0)])
def test_what_is_exposed_is_what_no_compute_covers(communication, computation, left):
    assert exposed.exposed(communication, computation) == left


@unit
def test_times_side_by_side_count_once():
    assert exposed.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert exposed.length([(0, 2), (1, 3)]) == 3
