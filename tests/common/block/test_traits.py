"""What a block is said to do, and what follows: its arithmetic, its residual, the kernels that it claims."""
import pytest
import torch

from common import PRESETS, BlockConfig, steps
from common.block import oracle, traits
from common.block.config import SERIES
from common.block.evidence import FUSED_ATTENTION, SERIES_ATTENTION, Claims
from common.block.traits import BY_HAND, DELAYED, DYNAMIC, FUSED, FUSED_IN_16_BITS, Arithmetic, Traits, amp_default

pytestmark = pytest.mark.unit

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = BlockConfig(batch_size=1, seq_len=16, hidden_size=16, num_heads=1)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def gpu_with_tf32(monkeypatch):
    """A GPU is asked for by name alone here; whether the one at hand has TF32 must not matter."""
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)


def arithmetic(step: int, config=CONFIG, parameter_dtype=FP32, device=GPU) -> Arithmetic:
    return steps.load(step).traits.arithmetic(config, parameter_dtype, device)


# ------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("step, parameter_dtype, amp_dtype, device, expected", [
    (0, FP32, FP16, GPU, Arithmetic("float32", "float32", 4, 4, 4, 4)),
    (1, FP32, None, GPU, Arithmetic("tf32", "tf32", 4, 4, 4, 4)),
    (1, FP32, None, CPU, Arithmetic("float32", "float32", 4, 4, 4, 4)),        # a CPU has no TF32
    (1, FP32, FP16, GPU, Arithmetic("float16", "float16", 4, 2, 2, 4)),
    (2, FP32, BF16, CPU, Arithmetic("bfloat16", "bfloat16", 4, 2, 2, 4)),
    (3, FP16, FP16, GPU, Arithmetic("float16", "float16", 2, 2, 2, 2)),
    (3, FP64, FP16, GPU, Arithmetic("float64", "float64", 8, 8, 8, 8)),        # autocast is for FP32 parameters alone
    (4, FP32, FP16, GPU, Arithmetic("float8", "float16", 4, 2, 1, 4)),
    (4, BF16, BF16, GPU, Arithmetic("float8", "bfloat16", 2, 2, 1, 2)),
    (4, FP32, None, GPU, Arithmetic("tf32", "tf32", 4, 4, 4, 4)),              # no autocast, no FP8
    (4, FP64, None, GPU, Arithmetic("float64", "float64", 8, 8, 8, 8)),
    (4, FP64, FP16, GPU, Arithmetic("float64", "float64", 8, 8, 8, 8)),        # no engine has FP8 over FP64
])
def test_what_a_step_computes_in(step, parameter_dtype, amp_dtype, device, expected):
    assert arithmetic(step, CONFIG.replace(amp_dtype=amp_dtype), parameter_dtype, device) == expected


def test_a_gpu_without_tf32_multiplies_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    assert arithmetic(1, CONFIG.replace(amp_dtype=None)).matmul == "float32"


def test_weights_quantized_before_are_read_in_one_byte():
    for weights, expected in (("per-call", 4), ("cached", 1), ("kept", 1)):
        assert arithmetic(4, CONFIG.replace(fp8_weights=weights)).weight_bytes == expected


def test_attention_in_fp8_is_limited_by_fp8():
    config = CONFIG.replace(fp8_attention=True)
    assert arithmetic(4, config).attention == "float8"
    assert arithmetic(2, config).attention == "float16"


@pytest.mark.parametrize("step", steps.ALL, ids=lambda step: step.name)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_presets_arithmetic_is_known_to_the_gates(preset, step):
    """Whatever a run may multiply in has a gate for its error, and claims of its own."""
    for amp_dtype in (None, FP16, BF16):
        for parameter_dtype in {FP32, amp_dtype or FP32}:
            for device in (CPU, GPU):
                config = PRESETS[preset].replace(amp_dtype=amp_dtype)
                a = step.traits.arithmetic(config, parameter_dtype, device)
                assert a.matmul in oracle.GATES and a.attention in oracle.GATES
                assert 1 <= a.operand_bytes <= a.activation_bytes <= a.parameter_bytes
                assert step.traits.claims(a.matmul, device).needed


@pytest.mark.parametrize("own, mixed", [
    (Traits(), False), (Traits(tf32=True), False), (Traits(autocast=True), True), (Traits(fp8=DYNAMIC), True),
])
def test_mixed_is_what_autocast_or_fp8_makes_of_a_config(own, mixed):
    assert own.mixed(CONFIG, FP32) == mixed and own.mixed(CONFIG, FP16) == mixed
    assert not own.mixed(CONFIG.replace(amp_dtype=None), FP32) and not own.mixed(CONFIG, FP64)


# --------------------------------------------------------------------------------- residual, calibration, scores


def test_the_residual_is_in_16_bits_where_a_library_has_it_so():
    for step in (0, 1, 2, 3):
        assert steps.load(step).traits.residual(CONFIG, FP32) == FP32
    library = steps.load(4).traits
    assert library.residual(CONFIG, FP32) == FP16
    assert library.residual(CONFIG.replace(amp_dtype=BF16), FP32) == BF16
    assert library.residual(CONFIG.replace(amp_dtype=None), FP32) == FP32
    assert library.residual(CONFIG, FP16) == FP16


def test_scales_that_lag_behind_are_calibrated():
    for own, needed in ((Traits(fp8=DELAYED), True), (Traits(fp8=DYNAMIC), False), (Traits(autocast=True), False)):
        assert own.needs_calibration(CONFIG) == needed
        assert not own.needs_calibration(CONFIG.replace(amp_dtype=None))
    assert [step.traits.needs_calibration(CONFIG) for step in steps.ALL] == [False] * 4 + [True]


def test_attention_by_hand_holds_scores_and_on_a_cpu_any_may():
    assert [step.traits.holds_scores(GPU) for step in steps.ALL] == [True, True, False, False, False]
    assert all(step.traits.holds_scores(CPU) for step in steps.ALL)


# ----------------------------------------------------------------------------------------------------------- claims

CORES = {"FP8 matmul", "16-bit matmul", "TF32 matmul"}


def claims(step: int, matmul: str, device=GPU) -> Claims:
    return steps.load(step).traits.claims(matmul, device)


@pytest.mark.parametrize("step, matmul, own", [
    (0, "float32", "FP32 matmul"), (1, "tf32", "TF32 matmul"), (1, "float16", "16-bit matmul"),
    (2, "bfloat16", "16-bit matmul"), (4, "float8", "FP8 matmul"), (1, "float64", "FP64 matmul"),
])
def test_matmuls_of_another_arithmetic_are_forbidden(step, matmul, own):
    """In FP32 and in FP64 those of all tensor cores; on tensor cores those of other ones, and of none."""
    found = claims(step, matmul)
    assert (own,) in found.needed
    others = CORES if matmul in ("float32", "float64") else (CORES | {"FP32 matmul"}) - {own}
    assert others <= set(found.forbidden) and own not in found.forbidden


@pytest.mark.parametrize("step, matmul", [(0, "float32"), (1, "tf32"), (1, "float16")])
def test_attention_by_hand_must_be_seen_by_hand(step, matmul):
    found = claims(step, matmul)
    assert ("softmax",) in found.needed and ("mask",) in found.needed and set(FUSED_ATTENTION) <= set(found.forbidden)


@pytest.mark.parametrize("step, matmul", [(2, "float16"), (2, "tf32"), (3, "bfloat16"), (4, "float8"), (4, "float16")])
def test_fused_attention_must_be_seen_fused(step, matmul):
    found = claims(step, matmul)
    assert FUSED_ATTENTION in found.needed and {"softmax", "mask"} <= set(found.forbidden)


@pytest.mark.parametrize("step, matmul", [(2, "float64"), (3, "float64"), (4, "float64"), (4, "tf32"), (4, "float32")])
def test_where_no_kernel_is_fused_nothing_is_claimed_of_attention(step, matmul):
    """No library has one in FP64, and Transformer Engine none in FP32."""
    found = claims(step, matmul)
    kinds = {kind for alternatives in found.needed for kind in alternatives}
    assert not kinds & {"softmax", "mask", *FUSED_ATTENTION} and not set(found.forbidden) & {"softmax", "mask"}


@pytest.mark.parametrize("step, matmul", [(2, "float16"), (3, "bfloat16")])
def test_attention_by_the_series_must_be_seen_and_no_librarys(step, matmul):
    found = steps.load(step).traits.claims(matmul, GPU, SERIES)
    assert (SERIES_ATTENTION,) in found.needed and FUSED_ATTENTION not in found.needed
    assert {*FUSED_ATTENTION, "softmax", "mask"} <= set(found.forbidden)


def test_what_is_compiled_claims_fewer_launches():
    assert [("compiled",) in claims(step, "float16").needed for step in range(1, 5)] == [False, False, True, False]
    assert [claims(step, "float16").fewer_launches for step in range(1, 5)] == [False, False, True, False]


def test_layer_norm_and_gelu_claim_to_write_fp8():
    """With delayed scaling, whose scale is known before; where nothing is in FP8 there is nothing to write."""
    found = claims(4, "float8")
    assert found.writes_fp8
    assert ("LayerNorm to FP8", "cuDNN LayerNorm") in found.needed
    assert ("GELU to FP8", "FP8 matmul with GELU") in found.needed
    assert not claims(4, "float16").writes_fp8
    dynamic = Traits(fp8=DYNAMIC, attention=FUSED, claimed=True).claims("float8", GPU)
    assert not dynamic.writes_fp8 and dynamic.needed == [("FP8 matmul",), FUSED_ATTENTION]


@pytest.mark.parametrize("step, needed, forbidden", [
    (0, [("softmax",)], list(FUSED_ATTENTION)), (1, [("softmax",)], list(FUSED_ATTENTION)), (2, [FUSED_ATTENTION], []),
    (3, [FUSED_ATTENTION, ("compiled",)], []), (4, [FUSED_ATTENTION], []),
])
def test_on_a_cpu_the_algorithm_is_claimed_alone(step, needed, forbidden):
    """Its operators do not tell their arithmetic, and the remark says so."""
    for matmul in ("float32", "bfloat16", "float8"):
        found = claims(step, matmul, CPU)
        assert (found.needed, found.forbidden) == (needed, forbidden)
        assert not found.fewer_launches and not found.writes_fp8
        assert found.remark == " (the algorithm; a CPU's operators do not tell their arithmetic)"


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("attention", [None, BY_HAND, FUSED, FUSED_IN_16_BITS])
def test_what_claims_nothing_has_no_claims(attention, device):
    """A peer, a user's own model: their kernels are counted, and prove nothing."""
    assert Traits(attention=attention, compiled=True).claims("float16", device) is None


def test_of_an_attention_that_is_not_known_nothing_is_claimed():
    assert Traits(claimed=True).claims("float16", GPU).needed == [("16-bit matmul",)]
    assert Traits(claimed=True).claims("float32", CPU).needed == []


# ---------------------------------------------------------------------------------------------- autocast's own dtype


@pytest.mark.parametrize("multiplies, fp8, expected", [(True, None, BF16), (False, None, None), (False, DELAYED, BF16)])
def test_autocast_has_the_dtype_that_the_machine_multiplies(multiplies, fp8, expected, monkeypatch):
    """float16 on a GPU; on a CPU without 16-bit matmuls none, but for FP8, whose emulation multiplies in FP32."""
    monkeypatch.setattr(traits, "cpu_multiplies_bfloat16", lambda: multiplies)
    own = Traits(autocast=True, fp8=fp8)
    assert amp_default(GPU, own) == (FP16, "")
    dtype, why_none = amp_default(CPU, own)
    assert dtype == expected and (why_none == "") == (expected is not None)
    assert amp_default(CPU)[0] == (BF16 if multiplies else None)
