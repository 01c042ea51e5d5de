"""Where the milliseconds go: made-up timelines, the names of real kernels, and a profiled block."""
import json
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import attribution, readme
from benchmarks.attribution import IDLE, OTHER, PARTS, credit
from common import PRESETS, evidence, graph, harness, parameters, steps, timing

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
        intervals = [(begin := draw.uniform(-1, 9), begin + draw.expovariate(1), draw.choice([GEMM, SOFTMAX, "x"]))
                     for _ in range(draw.randrange(20))]
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
])
def test_kernels_are_told_by_their_names(name, category):
    assert attribution.category(name) == category


def test_every_matmul_and_attention_kernel_on_record_is_counted_as_such():
    """What the evidence calls a matmul or fused attention, the attribution does too, over all recorded names."""
    kinds = {"matmul": "GEMM", "attention": "attention", "Attention": "attention"}
    seen = set()
    for path in sorted(readme.RESULTS.glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            seen |= set(json.loads(line)["metric"]["extra_info"].get("kernels", ()))
    named = {name: evidence.kind_of(name) for name in seen}
    assert sum(kind is not None for kind in named.values()) > 40
    for name, kind in named.items():
        for word, category in kinds.items():
            if kind and kind.split(" with")[0].split(" in")[0].endswith(word):
                assert attribution.category(name) == category, name


def test_a_profiled_block_is_taken_apart_on_a_cpu():
    config = PRESETS["tiny"].replace(amp_dtype=None)
    values, x, dy = parameters.seeded(config), torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    pairs = {step: harness.iterations(steps.load(step).build(config, values, "cpu"), x.clone(), dy, True)
             for step in (0, 2)}
    runs = {step: iteration for step, (iteration, _) in pairs.items()}
    between = {step: clear for step, (_, clear) in pairs.items()}
    found = {step: [attribution.CpuBurst(runs[step], between[step], 1.0, 0).pairs() for _ in range(5)]
             for step in (0, 2)}
    assert all(len(pairs) == 1 and pairs[0][1] > 0 for bursts in found.values() for pairs in bursts)
    by_hand, fused = (attribution.middle(found[step], [1.0] * 5)[0] for step in (0, 2))
    assert by_hand["softmax and mask"] > 0 and by_hand["attention"] == 0
    assert fused["softmax and mask"] == 0 and fused["attention"] > 0
    assert all(some["GEMM"] > 0 and some[IDLE] > 0 for some in (by_hand, fused))


def test_both_iterations_of_a_burst_on_a_cpu_run_under_the_profiler_each_behind_what_comes_between():
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
    found = profiled(monkeypatch, [1, 2, 5]).found("a", [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    assert found == {"parts": parts(GEMM=pytest.approx(8 / 3)), "clocked": pytest.approx(38 / 3),
                     "timed": pytest.approx(308 / 3), "rounds": 3}


def test_a_burst_that_was_not_seen_is_left_out_with_its_sample(monkeypatch):
    seen = profiled(monkeypatch, [2, 3, 4])
    assert seen.found("a", [0.0, 0.0, 8.0, 1000.0, 9.0]) == {
        "reason": "the profiler saw 0 of 2 iterations", "parts": parts(GEMM=3.0), "clocked": 13.0, "timed": 8.5,
        "rounds": 2}
    assert seen.found("b", []) is None
    assert profiled(monkeypatch, [3]).found("a", [0.0] * 4) == {"reason": "the profiler saw 0 of 2 iterations"}


def test_where_the_profiler_fails_the_case_is_not_profiled_again(monkeypatch):
    tried = []

    def fails(number):
        tried.append(number)
        if number == 2:
            raise RuntimeError("can't disable\nthe profiler")
    seen = profiled(monkeypatch, [1, 2, 4], fails)
    assert tried == [1, 2]
    assert seen.found("a", [5.0] * 5) == {"reason": "not profiled any further: RuntimeError: can't disable",
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
        now, found = 0, [SimpleNamespace(start_ns=lambda: 0, name=lambda: "mark", duration_ns=lambda: 1,    # the host's
                                         device_type=lambda: DeviceType.CPU)]
        for call in self.calls:
            length = {"run": 2, "mark": 1}.get(call)
            if length:
                found.append(SimpleNamespace(start_ns=lambda now=now: now * 10**6, name=lambda call=call: call,
                                             duration_ns=lambda length=length: length * 10**6,
                                             device_type=lambda: DeviceType.CUDA))
                now += length + 1
        return found


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
def test_a_burst_is_one_pair_or_as_long_as_the_timed_one_and_the_profiler_keeps_it(ms, lead_in, pairs, fake_gpu):
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
    timed = timing.interleaved(runs, timing.EventClock(), 2)
    expected = {key: statistics.median(some) for key, some in timed.items()}
    found = {key: attribution.middle([attribution.GpuBurst(run, timing.nothing, expected[key], 0).pairs()],
                                     [expected[key]]) for key, run in runs.items()}
    seen = {key: parts_ for key, (parts_, _, _) in found.items()}
    assert seen["matmul"]["GEMM"] > 0.9 * sum(seen["matmul"].values())
    assert seen["softmax"]["softmax and mask"] > 0 and seen["softmax"]["GEMM"] == 0
    assert seen["both"]["GEMM"] > 0 and seen["both"]["softmax and mask"] > 0 and seen["both"]["attention"] == 0
    for parts_, clocked, _ in found.values():
        assert sum(parts_.values()) == pytest.approx(clocked, rel=0.03, abs=0.02)


@pytest.mark.gpu
def test_graph_replay_shows_its_kernels_too():
    a = torch.randn(1024, 1024, device="cuda")
    replay = graph.capture(lambda: (a @ a).softmax(-1), timing.nothing)
    (parts_, _), *_ = attribution.GpuBurst(replay, timing.nothing, 1.0, 0).pairs()
    assert parts_["GEMM"] > 0 and parts_["softmax and mask"] > 0
