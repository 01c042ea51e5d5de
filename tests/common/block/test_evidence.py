"""Kernel names, as profilers showed them on an H200 under CUDA 13 and on older GPUs, and the verdicts they lead to."""
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import steps
from common.block import evidence
from common.block.evidence import FUSED_ATTENTION, Claims, Evidence, kind_of

pytestmark = pytest.mark.unit

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FP32 = ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"
        "_execute_kernel__5x_cublas")
SGEMM = ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>"
         "(cutlass_80_simt_sgemm_256x128_8x4_nt_align1::Params)")
TF32 = ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x256x32_warpgroupsize2x1x1_execute_segment_k_off_kernel"
        "__5x_cublas")
FP16 = "nvjet_sm90_hsh_192x192_64x4_2x1_v_bz_coopB_bias_TNN"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT"
FP8 = "nvjet_sm90_qqhsh_192x192_128x4_2x1_v_bz_coopB_bias_TNN"
FP8_GELU = "nvjet_sm90_qqhsq_128x192_128x5_2x1_v_bz_coopB_geluauxbias_auxh_TNN"
FP8_GRADIENT = "nvjet_sm90_qrhsh_128x160_128x5_2x1_v_bz_coopA_algo2_TNT"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
CUDNN_BACKWARD = CUDNN.replace("fprop", "bprop")
EFFICIENT = ("fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, "
             "cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)")
FLASH = ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::half_t, "
         "Flash_kernel_traits<128, 128, 64, 4, cutlass::half_t> >, false, true, false, false, true, true, false>")
SOFTMAX = ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>(float*, "
           "float const*, int, int, int, bool const*, int, bool)")
SOFTMAX_16 = "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, c10::Half, float, float, long>"
MASK = ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::(anonymous "
        "namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}")
TRITON = "triton_red_fused__to_copy_add_native_layer_norm_view_5"
LAYER_NORM = ("void transformer_engine::normalization::ln_fwd_tuned_kernel<transformer_engine::normalization::"
              "Kernel_traits<__half, __half, __nv_fp8_e4m3, float, unsigned int, 4096u, 1u, 1u, 4u, 16u, ")
CUDNN_LAYER_NORM = "ln_tma_fwd_kernel"
GELU = ("void transformer_engine::unary_kernel<16, true, float, transformer_engine::Empty, &(float transformer_engine::"
        "gelu<float, float>(float, transformer_engine::Empty const&)), __half, __nv_fp8_e4m3>(__half const*, ")
ADD = ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
       "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)")
CAST = ("void transformer_engine::unary_kernel<16, true, float, transformer_engine::Empty, &transformer_engine::"
        "detail::identity, __half, __nv_fp8_e4m3>(__half const*, float const*, __nv_fp8_e4m3*, ")
CAST_TRANSPOSE = "cast_transpose_optimized_kernel(__half const*, float const*, __nv_fp8_e4m3*, __nv_fp8_e4m3*, "
BY_HAND = [SOFTMAX, MASK]
CPU_FLASH, GRAPH = "aten::_scaled_dot_product_flash_attention_for_cpu", "## Call CompiledFxGraph fabc123 ##"

KNOWN = [
    (FP32, "FP32 matmul"),
    (SGEMM, "FP32 matmul"),
    ("ampere_sgemm_128x64_tn", "FP32 matmul"),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>", "FP32 matmul"),
    ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4>", "16-bit matmul"),
    ("void gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>", "16-bit matmul"),
    (TF32, "TF32 matmul"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4>(Params)", "TF32 matmul"),    # A100
    (FP16, "16-bit matmul"),
    (BF16, "16-bit matmul"),
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "16-bit matmul"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", "16-bit matmul"),
    ("ampere_fp16_s1688gemm_fp16_128x128_ldg8_f2f_stages_32x1_tn", "16-bit matmul"),      # consumer Ampere and Ada
    (FP8, "FP8 matmul"),
    (FP8_GRADIENT, "FP8 matmul"),
    (FP8_GELU, "FP8 matmul with GELU"),
    (CUDNN, "cuDNN attention"),
    (CUDNN_BACKWARD, "cuDNN attention"),
    (EFFICIENT, "memory-efficient attention"),
    (FLASH, "FlashAttention"),
    (CPU_FLASH, "FlashAttention"),
    (SOFTMAX, "softmax"),
    (SOFTMAX_16, "softmax"),
    ("aten::_softmax", "softmax"),
    (MASK, "mask"),
    ("aten::masked_fill", "mask"),
    (TRITON, "compiled"),
    (GRAPH, "compiled"),
    ("triton_poi_fused__scaled_dot_product_efficient_attention_add_arange_where_7", "compiled"),     # it makes a mask
    ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_view_3", "compiled"),
    (LAYER_NORM, "LayerNorm to FP8"),
    (LAYER_NORM.replace("__nv_fp8_e4m3", "__half"), None),
    (CUDNN_LAYER_NORM, "cuDNN LayerNorm"),
    ("ln_tma_bwd_kernel", None),
    (GELU, "GELU to FP8"),
    (CAST, "cast to FP8"),
    (CAST_TRANSPOSE, "cast to FP8"),
    ("transpose_optimized_kernel(__nv_fp8_e4m3 const*, float const*, __nv_fp8_e4m3*, unsigned long)", None),
    ("cast_transpose_fusion_kernel_optimized(te::CTDBiasDActParam<__half, __half, __nv_fp8_e5m2, float>)", None),
    ("void (anonymous namespace)::attention_forward<__half, (anonymous namespace)::Shape<128> >(Inputs<__half>)",
     "CUDA C++ attention"),
    ("void (anonymous namespace)::attention_backward<__nv_bfloat16, 64>(BackwardInputs<__nv_bfloat16>)",
     "CUDA C++ attention"),
    ("void attention_backward_finish<__half>(BackwardInputs<__half>, long)", None),
    ("aten::addmm", "matmul"),
    (ADD, None),
    ("Memcpy DtoD (Device -> Device)", None),
]


@pytest.mark.parametrize("name, kind", KNOWN, ids=[name[:50] for name, _ in KNOWN])
def test_a_kernel_is_known_by_its_name(name, kind):
    assert kind_of(name) == kind


def judge(kernels, step: int, matmul: str, device=GPU, **more) -> Evidence:
    """The verdict on what step `step` claims where it multiplies in `matmul`."""
    return evidence.judge(Counter(kernels), steps.load(step).traits.claims(matmul, device), **more)


# What each step runs on an H200, by what it multiplies in.
RIGHT = [
    (0, "float32", [FP32, SGEMM, *BY_HAND, ADD]),
    (1, "tf32", [TF32, *BY_HAND]),
    (1, "float16", [FP16, SOFTMAX_16, MASK]),
    (1, "bfloat16", [BF16, *BY_HAND]),
    (2, "float16", [FP16, CUDNN, CUDNN_BACKWARD, ADD]),
    (2, "float16", [FP16, FLASH]),
    (2, "tf32", [TF32, EFFICIENT]),
    (3, "bfloat16", [BF16, CUDNN, TRITON]),
    (4, "float8", [FP8, FP8_GRADIENT, CUDNN, LAYER_NORM, GELU]),
    (4, "float8", [FP8, FP8_GRADIENT, CUDNN, CUDNN_LAYER_NORM, GELU]),
    (4, "float8", [FP8_GELU, FP8, CUDNN, CUDNN_LAYER_NORM]),
    (4, "tf32", [TF32, EFFICIENT]),
]
each_right = pytest.mark.parametrize("step, matmul, kernels", RIGHT, ids=[f"step {s} {m}" for s, m, _ in RIGHT])


@each_right
def test_a_mechanism_is_proven_by_the_kernels_of_that_step(step, matmul, kernels):
    seen = judge(kernels, step, matmul, uncompiled_launches=100)
    assert seen.verdict == "proven" and seen.launches == len(kernels)
    assert (seen.attention == "by hand") == (step < 2)


WRONG = [       # the last kernel of each is the one that must not run
    (0, "float32", [*BY_HAND, TF32]),
    (0, "float32", [FP32, *BY_HAND, FP16]),
    (0, "float32", [FP32, CUDNN]),
    (1, "tf32", [*BY_HAND, SGEMM]),
    (1, "float16", [FP16, *BY_HAND, FP32]),
    (1, "float16", [*BY_HAND, TF32]),
    (1, "float16", [FP16, FLASH]),
    (2, "float16", [FP16, SOFTMAX_16]),
    (2, "float16", [FP16, CUDNN, MASK]),
    (3, "float16", [FP16, CUDNN, TRITON, SOFTMAX]),
    (4, "float8", [FP8, CUDNN, LAYER_NORM, GELU, FP16]),
    (4, "float8", [FP8, CUDNN, LAYER_NORM, GELU, FP32]),
    (4, "float8", [FP8, LAYER_NORM, GELU, SOFTMAX]),
]


@pytest.mark.parametrize("step, matmul, kernels", WRONG, ids=[f"step {s} {m} {k[-1][:24]}" for s, m, k in WRONG])
def test_one_forbidden_kernel_refutes_and_is_named(step, matmul, kernels):
    seen = judge(kernels, step, matmul, uncompiled_launches=100)
    assert seen.verdict == "refuted"
    assert kind_of(kernels[-1]) in seen.because and kernels[-1][:60] in seen.because


@each_right
def test_names_of_another_gpu_leave_the_claim_unproven(step, matmul, kernels):
    """Not refuted: other libraries name their kernels otherwise. What was not seen is said."""
    seen = judge(["newgpu_kernel_a", "newgpu_kernel_b"], step, matmul, uncompiled_launches=100)
    assert seen.verdict == "unproven" and seen.because.startswith("not seen: ") and "matmul" in seen.because


@pytest.mark.parametrize("step, matmul, missing, kinds", [
    (0, "float32", SOFTMAX, "softmax"),
    (1, "float16", MASK, "mask"),
    (2, "float16", CUDNN, " or ".join(FUSED_ATTENTION)),
    (3, "float16", TRITON, "compiled"),
    (4, "float8", FP8, "FP8 matmul"),
    (4, "float8", LAYER_NORM, "LayerNorm to FP8"),
    (4, "float8", GELU, "GELU to FP8"),
])
def test_each_part_of_a_claim_must_be_seen(step, matmul, missing, kinds):
    matmuls = {"float32": FP32, "float16": FP16, "float8": FP8}
    all_of_it = {0: BY_HAND, 1: BY_HAND, 2: [CUDNN], 3: [CUDNN, TRITON], 4: [CUDNN, LAYER_NORM, GELU]}
    kernels = [name for name in (matmuls[matmul], *all_of_it[step]) if name != missing]
    seen = judge(kernels, step, matmul, uncompiled_launches=100)
    assert seen.verdict == "unproven" and seen.because.startswith(f"not seen: {kinds}")


@pytest.mark.parametrize("weights", [0, 4])
@pytest.mark.parametrize("others, expected", [(1, "proven"), (2, "proven"), (3, "unproven"), (4, "unproven")])
def test_what_cudnn_normalises_must_not_be_cast_apart(weights, others, expected):
    """Attention's output is, and its inputs where attention is in FP8. LayerNorm's two outputs would be two more."""
    kernels = Counter([FP8, CUDNN, CUDNN_LAYER_NORM, GELU]) + Counter({CAST: others, CAST_TRANSPOSE: weights})
    seen = judge(kernels, 4, "float8")
    assert seen.verdict == expected
    if expected == "unproven":
        assert seen.because == f"{weights + others} casts to FP8: one may be of LayerNorm's output"
    own = judge(kernels - Counter([CUDNN_LAYER_NORM]) + Counter([LAYER_NORM]), 4, "float8")
    assert own.verdict == "proven"                                       # its name says what it writes


@pytest.mark.parametrize("uncompiled, expected", [(4, "proven"), (3, "unproven"), (2, "unproven"), (None, "proven")])
def test_compiling_must_save_launches(uncompiled, expected):
    seen = judge([FP16, CUDNN, TRITON], 3, "float16", uncompiled_launches=uncompiled)
    assert seen.verdict == expected
    if expected == "unproven":
        assert seen.because == f"3 launches, and {uncompiled} without the compiler"


def test_who_is_not_compiled_need_not_save_launches():
    assert judge([FP16, CUDNN], 2, "float16", uncompiled_launches=2).verdict == "proven"


def test_launches_count_every_kernel_and_kinds_every_launch():
    seen = judge(Counter({FP16: 4, CUDNN: 2, ADD: 5}), 2, "float16")
    assert seen.launches == 11 and seen.kinds == {"16-bit matmul": 4, "cuDNN attention": 2}
    assert seen.because == "4 16-bit matmul, 2 cuDNN attention" and seen.attention == "cuDNN attention"


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_an_emulation_proves_nothing(device):
    seen = judge([FP8, CUDNN, LAYER_NORM, GELU], 4, "float8", device, emulated=True)
    assert (seen.verdict, seen.because) == ("unproven", "emulated")


def test_without_claims_what_ran_is_only_counted():
    seen = evidence.judge(Counter({FP16: 2, SOFTMAX: 1}), None, uncompiled_launches=1)
    assert (seen.verdict, seen.because, seen.launches) == ("n/a", "nothing is claimed", 3)
    assert seen.kinds == {"16-bit matmul": 2, "softmax": 1}


def test_a_proof_names_the_first_kind_that_was_seen_of_each():
    """And at its end what a reader must know of it."""
    claims = Claims([("softmax", "mask"), ("compiled",)], [], remark=" (so far)")
    seen = evidence.judge(Counter({MASK: 2, TRITON: 1}), claims)
    assert (seen.verdict, seen.because) == ("proven", "2 mask, 1 compiled (so far)")


@pytest.mark.parametrize("step, operators, expected", [
    (0, ["aten::_softmax", "aten::addmm"], "proven"),
    (0, ["aten::addmm"], "unproven"),
    (0, ["aten::_softmax", CPU_FLASH], "refuted"),
    (2, [CPU_FLASH], "proven"),
    (2, ["aten::_softmax"], "unproven"),
    (3, [CPU_FLASH, GRAPH], "proven"),
    (3, [CPU_FLASH], "unproven"),
    (3, [GRAPH], "unproven"),
])
def test_on_a_cpu_the_operators_speak(step, operators, expected):
    """Of the algorithm. They do not say in which arithmetic it ran."""
    seen = judge(operators, step, "float32", CPU)
    assert seen.verdict == expected
    assert ("do not tell their arithmetic" in seen.because) == (expected == "proven")


def test_observing_counts_one_iteration(tmp_path):
    """Operators on a CPU, of the one profiled iteration; with a trace as a timeline on request."""
    calls = []

    def iteration():
        calls.append(torch.zeros(4, 4).softmax(-1))
    seen = evidence.observe(iteration, CPU, trace=str(tmp_path / "timeline.json"))
    assert seen["aten::softmax"] == 1 and len(calls) == 1
    assert '"traceEvents"' in (tmp_path / "timeline.json").read_text()


def test_kernels_take_their_range_and_operators_what_they_do_themselves():
    """A kernel that is launched twice counts twice."""
    on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    kernel = SimpleNamespace(name="sgemm", device_type=on_gpu, time_range=SimpleNamespace(elapsed_us=lambda: 1500.0))
    operator = SimpleNamespace(name="aten::mm", device_type=on_cpu, self_cpu_time_total=250.0)
    assert evidence.ms_by_name([kernel, operator, kernel]) == {"sgemm": 3.0, "aten::mm": 0.25}
