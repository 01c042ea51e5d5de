"""Where the milliseconds go: made-up timelines, the names of real kernels, and a profiled block."""
import json
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.records import RESULTS
from benchmarks.records.files import files, text_of
from benchmarks.records.read import extra
from common import PRESETS, parameters, steps
from common.block import evidence
from common.measure import attribution
from common.measure.attribution import IDLE, OTHER, credit
from common.report.record import PARTS
from common.runtime import iteration, machine, replay, rounds, timing
from common.runtime.iteration import BOTH, FORWARD

pytestmark = pytest.mark.unit
GEMM, SOFTMAX = "nvjet_sm90_hsh_192x192", "softmax_warp_forward"


def parts(**some):
    return dict.fromkeys(PARTS, 0.0) | {name.replace("_", " "): value for name, value in some.items()}


@pytest.mark.parametrize("intervals, expected", [
    ([], {IDLE: 10.0}),
    ([(0, 10, GEMM)], {"GEMM": 10.0}),
    ([(2, 5, GEMM), (6, 7, SOFTMAX)], {"GEMM": 3.0, "softmax and mask": 1.0, IDLE: 6.0}),
    ([(6, 7, SOFTMAX), (2, 5, GEMM)], {"GEMM": 3.0, "softmax and mask": 1.0, IDLE: 6.0}),         # in any order
    ([(0, 6, GEMM), (4, 10, SOFTMAX)], {"GEMM": 6.0, "softmax and mask": 4.0}),                   # shared: the first's
    ([(0, 10, GEMM), (4, 6, SOFTMAX)], {"GEMM": 10.0}),                                           # one inside the other
    ([(-5, 2, GEMM), (8, 20, SOFTMAX)], {"GEMM": 2.0, "softmax and mask": 2.0, IDLE: 6.0}),       # beyond the ends
])
def test_idle_is_the_timeline_less_the_union_of_the_kernels(intervals, expected):
    assert credit(intervals, 0.0, 10.0) == parts() | expected


def test_parts_always_add_up_to_the_timeline():
    draw = random.Random(0)
    for _ in range(200):
        intervals = []
        for _ in range(draw.randrange(20)):
            begin = draw.uniform(-1, 9)
            intervals.append((begin, begin + draw.expovariate(1), draw.choice([GEMM, SOFTMAX, "x"])))
        found = credit(intervals, 0.0, 8.0)
        assert sum(found.values()) == pytest.approx(8.0) and min(found.values()) >= 0


def test_the_middle_leaves_out_what_disturbed_an_iteration():
    pairs = [(parts(GEMM=1.0), 1.2), (parts(GEMM=1.0), 1.1), (parts(GEMM=1.1), 1.0), (parts(GEMM=0.2), 0.1),
             (parts(GEMM=9.0, idle=50.0), 1.3)]
    assert attribution.middle([pairs], [1.0]) == (parts(GEMM=pytest.approx(3.1 / 3)), pytest.approx(1.1), 1.0)
    pairs = [(parts(GEMM=1.0), 1.1), (parts(GEMM=1.1), 1.0), (parts(GEMM=1.2), 70.0),      # the clock's one disturbed
             (parts(GEMM=1.3), 1.2), (parts(GEMM=1.4), 1.3)]
    assert attribution.middle([pairs], [2.0]) == (parts(GEMM=pytest.approx(3.8 / 3)), pytest.approx(3.5 / 3), 2.0)


@pytest.mark.parametrize("timed", [[1.0, 1.3, 1.1, 1.2, 1.0], [1.0, 1.3, 30.0, 1.2, 1.0]])
def test_of_a_round_that_was_disturbed_neither_sample_nor_burst_counts(timed):
    bursts = [[(parts(GEMM=ms), ms + 1)] * 2 for ms in (1.1, 1.0, 9.0, 1.2, 0.1)]
    found = attribution.middle(bursts, timed)
    assert found == (parts(GEMM=pytest.approx(1.1)), pytest.approx(2.1), pytest.approx(3.5 / 3))


@pytest.mark.parametrize("name, category", [
    ("nvjet_sm90_hsh_128x256_64x4_1x2_h_bz_coopA_NNN", "GEMM"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>", "GEMM"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", "GEMM"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>", "GEMM"),
    ("nvjet_sm90_qqhsq_128x192_128x5_2x1_v_bz_coopB_geluauxbias_auxh_TNN", "GEMM"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<false, 128>", "attention"),
    ("triton_tem_fused_flex_attention_0", "attention"),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_add_permute_select_view_4", attribution.OTHER),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 11>", "softmax and mask"),
    ("void at::native::triu_tril_kernel<bool, int, true, 8, false>", "softmax and mask"),
    ("triton_red_fused__to_copy_add_native_layer_norm_view_5", "normalisation and activation"),
    ("triton_poi_fused_gelu_view_2", "normalisation and activation"),
    ("void transformer_engine::normalization::ln_bwd_tuned_kernel<x>", "normalisation and activation"),
    ("ln_tma_fwd_kernel", "normalisation and activation"),
    ("ln_bwd_finalize_kernel", "normalisation and activation"),
    ("triton_poi_fused__to_copy_view_0", "casts and copies"),
    ("cast_transpose_optimized_kernel(__half const*, float const*, __nv_fp8_e4m3*)", "casts and copies"),
    ("cast_transpose_fusion_kernel_optimized(transformer_engine::CTDBiasDActParam<x>)", "casts and copies"),
    ("Memcpy DtoD (Device -> Device)", "casts and copies"),
    ("triton_poi_fused__to_copy_add_0", "residual and other"),
    ("triton_poi_fused_add_clone_permute_select_backward_3", "residual and other"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "residual and other"),
    ("aten::addmm", "GEMM"), ("aten::_softmax", "softmax and mask"), ("aten::_to_copy", "casts and copies"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("aten::add", "residual and other"),
    ("aten::native_layer_norm", "normalisation and activation"),
    ("aten::gelu_backward", "normalisation and activation"),
    ("triton_mm_12", "GEMM"), ("triton_tem_fused__to_copy_addmm_5", "GEMM"), ("triton_tem_fused_mm_t_3", "GEMM"),
    ("triton_poi_fused_mm_relu_2", "residual and other"), ("triton_tem_fused_convolution_4", "residual and other"),
])
def test_kernels_are_told_by_their_names(name, category):
    assert attribution.category(name) == category


def recorded_kernels() -> set[str]:
    """The names of all kernels and operators in the recorded runs."""
    names = set()
    for path in files(RESULTS, "**/*"):
        for line in text_of(path).splitlines():
            if '"name": "launches"' in line:
                names |= set(extra(json.loads(line))["kernels"])
    return names


def test_every_matmul_and_attention_kernel_on_record_counts_as_such():
    """What the evidence calls a matmul or fused attention, the attribution does too, over all recorded names."""
    kinds = {"matmul": "GEMM", "attention": "attention", "Attention": "attention"}
    named = {name: evidence.kind_of(name) for name in recorded_kernels()}
    assert sum(kind is not None for kind in named.values()) > 40
    for name, kind in named.items():
        for word, category in kinds.items():
            if kind and kind.split(" with")[0].split(" in")[0].endswith(word):
                assert attribution.category(name) == category, name


# -------------------------------------------------------------------------------------------------------- on a CPU


def operator(name: str, ms: float, *called) -> SimpleNamespace:
    """An operator as the profiler tells it: its own time, without that of those it called."""
    return SimpleNamespace(name=name, self_cpu_time_total=1e3 * ms, cpu_children=list(called))


@pytest.fixture
def burst_of(monkeypatch):
    """burst_of(*operators): a burst of an iteration that called these, and took 1 ms of Python besides."""
    def call(*called):
        events = [operator("aten::mm", 50.0), operator(attribution.CpuBurst._RANGE, 1.0, *called)]

        class Profiler:
            function_events = events

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass
        monkeypatch.setattr(attribution, "profile", Profiler)
        return attribution.CpuBurst(lambda: None, timing.nothing, 1.0, 0)
    return call


@pytest.mark.parametrize("called, expected", [
    ([], {}),
    ([operator("aten::mm", 2.0)], {"GEMM": 2.0}),
    ([operator("aten::_softmax", 2.0, operator("aten::empty", 3.0))], {"softmax and mask": 5.0}),
    ([operator("aten::gelu", 1.0, operator("aten::empty", 2.0, operator("aten::resize_", 4.0)))],
     {"normalisation and activation": 7.0}),                              # through a caller whose name says nothing too
    ([operator("aten::linear", 1.0, operator("aten::t", 2.0, operator("aten::as_strided", 4.0)),
               operator("aten::addmm", 8.0, operator("aten::copy_", 16.0)))],
     {"GEMM": 15.0, "casts and copies": 16.0}),                           # whose own name says something keeps its time
    ([operator("aten::add", 2.0, operator("aten::empty", 3.0)), operator("autograd::engine", 1.0)], {OTHER: 6.0}),
    ([operator("autograd::engine", 1.0, operator("aten::mm", 2.0, operator("aten::empty", 4.0)))],
     {OTHER: 1.0, "GEMM": 6.0}),
])
def test_an_operator_that_says_nothing_passes_its_time_to_its_caller(called, expected, burst_of):
    """Nothing is lost: the parts add up to all that ran. What runs outside of the iteration is none of it."""
    ((by_part, clocked_ms),) = burst_of(*called).pairs()
    assert by_part == parts(**{IDLE: 1.0} | expected)
    assert clocked_ms > 0


def test_a_profiled_block_is_taken_apart_on_a_cpu():
    config = PRESETS["tiny"].replace(amp_dtype=None)
    values, x, dy = parameters.seeded(config), torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    found = {}
    for number in (0, 2):
        block = steps.load(number).build(config, values, "cpu")
        work = iteration.of_call(block, [x.clone()], [dy], parameters.named(block), BOTH)
        bursts = [attribution.CpuBurst(work.run, work.between, 1.0, 0).pairs() for _ in range(5)]
        assert all(len(pairs) == 1 and pairs[0][1] > 0 for pairs in bursts)
        found[number] = attribution.middle(bursts, [1.0] * 5)[0]
    by_hand, fused = found[0], found[2]
    assert by_hand["softmax and mask"] > 0 and by_hand["attention"] == 0
    assert fused["softmax and mask"] == 0 and fused["attention"] > 0
    assert all(one["GEMM"] > 0 and one[IDLE] > 0 for one in (by_hand, fused))


def test_both_iterations_of_a_burst_on_a_cpu_run_under_the_profiler():
    """Each behind what comes between."""
    calls = []
    attribution.CpuBurst(lambda: calls.append(torch.autograd._profiler_enabled()), lambda: calls.append("between"), 1.0,
                         0)
    assert calls == 2 * ["between", True]


class FakeBurst:
    """Whose pairs take its number of ms, and 10 more by the clock."""

    def __init__(self, iteration, between, expected_ms, number):
        self.number = number
        iteration(number)

    def pairs(self):
        if self.number == 3:
            raise RuntimeError("the profiler saw 0 of 2 iterations")
        return 2 * [(parts(GEMM=self.number), self.number + 10.0)]


def profiled(monkeypatch, numbers, iteration=lambda number: None):
    monkeypatch.setattr(attribution, "CpuBurst", FakeBurst)
    seen = attribution.Profiled(torch.device("cpu"))
    for number in numbers:
        seen.burst("a", number, iteration, timing.nothing, 1.0)
    return seen


def test_what_is_found_is_of_the_rounds_that_were_profiled(monkeypatch):
    found = profiled(monkeypatch, [1, 2, 5]).fields("a", [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    assert found == {"parts": parts(GEMM=pytest.approx(8 / 3)), "clocked": pytest.approx(38 / 3),
                     "timed": pytest.approx(308 / 3), "rounds": 3}


def test_a_burst_that_was_not_seen_is_left_out_with_its_sample(monkeypatch):
    seen = profiled(monkeypatch, [2, 3, 4])
    assert seen.fields("a", [0.0, 0.0, 8.0, 1000.0, 9.0]) == {
        "reason": "the profiler saw 0 of 2 iterations", "parts": parts(GEMM=3.0), "clocked": 13.0, "timed": 8.5,
        "rounds": 2}
    assert seen.fields("b", []) == {}
    assert profiled(monkeypatch, [3]).fields("a", [0.0] * 4) == {"reason": "the profiler saw 0 of 2 iterations"}


def test_where_the_profiler_fails_the_case_is_not_profiled_again(monkeypatch):
    tried = []

    def fails(number):
        tried.append(number)
        if number == 2:
            raise RuntimeError("can't disable\nthe profiler")
    seen = profiled(monkeypatch, [1, 2, 4], fails)
    assert tried == [1, 2]
    assert seen.fields("a", [5.0] * 5) == {"reason": "not profiled any further: RuntimeError: can't disable",
                                          "parts": parts(GEMM=1.0), "clocked": 11.0, "timed": 5.0, "rounds": 1}


class FakeProfiler:
    """Of a GPU: each kernel takes 2 ms and each marker 1, with 1 ms between two of them."""

    def __init__(self, calls):
        self.calls, self.kineto_results = calls, SimpleNamespace(events=self.events)

    def __enter__(self):
        self.calls.append("profiler")
        return self

    def __exit__(self, *_):
        self.calls.append("ends")

    def events(self):
        of_the_host = SimpleNamespace(start_ns=lambda: 0, name=lambda: "mark", duration_ns=lambda: 1,
                                      device_type=lambda: DeviceType.CPU)
        now, events = 0, [of_the_host]
        for call in self.calls:
            length = {"run": 2, "mark": 1}.get(call)
            if length:
                events.append(SimpleNamespace(start_ns=lambda now=now: now * 10**6, name=lambda call=call: call,
                                              duration_ns=lambda length=length: length * 10**6,
                                              device_type=lambda: DeviceType.CUDA))
                now += length + 1
        return events


@pytest.fixture
def fake_gpu(monkeypatch):
    calls = []
    event = SimpleNamespace(record=lambda: calls.append("event"), elapsed_time=lambda end: 7.0)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("mark"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(attribution, "_MARKER", "mark")
    asked = {"use_cpu": False, "use_device": "cuda", "use_kineto": True}       # refused on a GPU without the last
    monkeypatch.setattr(attribution, "profile", lambda **given: FakeProfiler(calls) if given == asked else None)
    return calls


def of_the_fake_gpu(calls, ms, number=0):
    return attribution.GpuBurst(lambda: calls.append("run"), lambda: calls.append("clear"), ms, number)


def test_a_profiled_burst_is_timed_and_marked_by_turns(fake_gpu):
    burst = of_the_fake_gpu(fake_gpu, 25.0)
    clocked, marked = ["clear", "event", "run", "event"], ["clear", "mark", "run", "mark"]
    lead_in = 4 * ["clear", "run"]                              # a tenth of a second, as before a timed burst
    assert fake_gpu == ["profiler", *lead_in, *marked, *clocked, *clocked, *marked, "wait", "ends"]
    assert burst.pairs() == 2 * [(parts(**{OTHER: 2.0, IDLE: 2.0}), 7.0)]


def test_of_single_pairs_neither_iteration_is_always_the_second(fake_gpu):
    for number in range(2):
        of_the_fake_gpu(fake_gpu, 1000.0, number)
    assert [call for call in fake_gpu if call in ("mark", "event")] == 2 * ["mark"] + 4 * ["event"] + 2 * ["mark"]


@pytest.mark.parametrize("ms, lead_in, pairs", [(1000.0, 1, 1), (30.0, 3, 1), (10.0, 10, 5), (4.0, 25, 10),
                                                (0.1, 120, 10)])
def test_a_burst_is_as_long_as_the_timed_one_and_no_longer_than_is_kept(ms, lead_in, pairs, fake_gpu):
    assert len(of_the_fake_gpu(fake_gpu, ms).pairs()) == pairs
    assert fake_gpu.count("run") == lead_in + 2 * pairs


def test_a_burst_that_the_profiler_did_not_see_whole_is_refused(fake_gpu):
    burst = of_the_fake_gpu(fake_gpu, 25.0)
    del fake_gpu[-4:]                                           # the last marker, and the ends
    with pytest.raises(RuntimeError, match="the profiler saw 1 of 2 iterations"):
        burst.pairs()


@pytest.mark.gpu
def test_kernels_between_the_markers_add_up_to_what_events_measure():
    a = torch.randn(8192, 8192, device="cuda")                 # long kernels: the host's pace does not matter
    runs = {"matmul": lambda: a @ a, "softmax": lambda: a.softmax(-1), "both": lambda: (a @ a).softmax(-1)}
    timed = rounds.interleaved(runs, timing.EventClock(), 2)
    found, seen = {}, {}
    for key, run in runs.items():
        expected_ms = statistics.median(timed[key][0])
        burst = attribution.GpuBurst(run, timing.nothing, expected_ms, 0)
        found[key] = attribution.middle([burst.pairs()], [expected_ms])
        seen[key] = found[key][0]
    assert seen["matmul"]["GEMM"] > 0.9 * sum(seen["matmul"].values())
    assert seen["softmax"]["softmax and mask"] > 0 and seen["softmax"]["GEMM"] == 0
    assert seen["both"]["GEMM"] > 0 and seen["both"]["softmax and mask"] > 0 and seen["both"]["attention"] == 0
    if machine.neighbours(torch.device("cuda")):
        return                                         # the clock holds their share of the GPU, a kernel does not
    for parts_, clocked, _ in found.values():
        assert sum(parts_.values()) == pytest.approx(clocked, rel=0.03, abs=0.02)


@pytest.mark.gpu
def test_graph_replay_shows_its_kernels_too():
    a = torch.randn(1024, 1024, device="cuda")
    work = iteration.of_call(lambda a: (a @ a).softmax(-1), [a], [], {}, FORWARD)
    replayed, _ = replay.capture(work)
    (parts_, _), *_ = attribution.GpuBurst(replayed, timing.nothing, 1.0, 0).pairs()
    assert parts_["GEMM"] > 0 and parts_["softmax and mask"] > 0
