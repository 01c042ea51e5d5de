"""A look at a model: where its time goes, line by line with the backward, and what is said of it in seconds."""
import inspect

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from benchmarks.assistant import look
from benchmarks.assistant.attention import Attention
from benchmarks.assistant.program import read
from benchmarks.assistant.spending import (
    BY_HAND,
    CONVOLUTION,
    IDLE,
    MATMUL,
    PASSES,
    TRANSPOSES,
    Spending,
    Spent,
    kind_of,
)
from benchmarks.assistant.technique import Plan
from benchmarks.assistant.techniques import EVERY
from benchmarks.assistant.workload import arithmetic_of, workload
from benchmarks.examples import pairs
from benchmarks.measure.calls import Inputs
from common.block.workload import ATTENTION, BOTH
from common.outcome import UserError
from common.runtime.iteration import FORWARD
from tests.helpers import attention_spellings as spellings


class Three(nn.Module):
    """A matmul, a convolution and a pass over memory, a line each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x):
        x = self.linear(x)
        x = self.conv(x)
        return x.exp().sin()


X = torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(0))


def line(offset):
    return inspect.getsourcelines(Three.forward)[1] + offset


@pytest.fixture(scope="module")
def looked():
    return look(Three(), (X,))


@pytest.mark.integration
def test_time_goes_to_the_line_and_the_kind_of_work(looked):
    lines = {}
    for each in looked.spending.spent:
        if each.place:
            lines.setdefault(each.place.line, set()).add(each.kind)
    assert looked.mode == BOTH and set(lines) == {line(1), line(2), line(3)}
    assert MATMUL in lines[line(1)] and CONVOLUTION in lines[line(2)] and lines[line(3)] == {PASSES}
    assert sum(looked.spending.by_kind().values()) >= 0.99 * looked.spending.total_ms


@pytest.mark.integration
def test_a_backward_is_spent_where_its_forward_stands():
    forward = look(Three(), (X,), inference=True).spending.spent
    both = look(Three(), (X,)).spending.spent
    assert [each.place.line for each in both if each.kind == MATMUL] == [line(1)]
    assert [each.place.line for each in forward if each.kind == MATMUL] == [line(1)]


@pytest.mark.integration
def test_attention_by_hand_is_one_row():
    torch.manual_seed(0)
    spent = look(spellings.NanoGPT().eval(), (torch.randn(2, 16, 32),)).spending.spent
    (row,) = [each for each in spent if each.kind == BY_HAND]
    assert row.place.last > row.place.line and row.count == 1


@pytest.mark.integration
def test_what_a_library_calls_is_told_by_its_module():
    """All layers are one row. The model's own lines have theirs."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    spent = look(nn.TransformerEncoder(layer, 3), (torch.randn(2, 16, 32),)).spending.spent
    rows = {each.module: (each.elsewhere, each.count) for each in spent if each.kind == MATMUL}
    assert rows == {f"layers.*.{name}": ("no line of the model", 3) for name in ("linear1", "linear2", "self_attn")}


@pytest.mark.unit
@pytest.mark.parametrize("name, kind", [
    ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize", CONVOLUTION),
    ("aten::convolution_backward", CONVOLUTION), ("nvjet_sm90_hsh_192x192", MATMUL), ("aten::addmm", MATMUL),
    ("flash_fwd_kernel", "attention"), ("vectorized_elementwise_kernel", PASSES),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention"),
    ("triton_poi_fused__to_copy_convolution_8", PASSES), ("triton_red_fused_convolution_backward_0", PASSES),
    ("triton_tem_fused_convolution_4", CONVOLUTION), ("triton_poi_fused_convert_element_type_3", PASSES),
    ("void cudnn::engines_precompiled::convertTensor_kernel<float, float>(float)", PASSES),
    ("void cudnn::engines_precompiled::nchwToNhwcKernel<float>(int)", TRANSPOSES),
    ("void cudnn::engines_precompiled::nhwcToNchwKernel<float>(int)", TRANSPOSES),
    ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_nhwc_align8>(int)", CONVOLUTION),
    ("void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>(void*)", CONVOLUTION)])
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


@pytest.mark.unit
def test_shares_add_up_to_a_hundred():
    spending = Spending(10.0, [Spent(MATMUL, None, "", 1, 6.0), Spent(PASSES, None, "", 1, 2.0)])
    assert spending.by_kind() == {MATMUL: 6.0, PASSES: 2.0, IDLE: 2.0}
    assert spending.percent(6.0) == 60
    longer = Spending(1.0, [Spent(MATMUL, None, "", 1, 3.0), Spent(PASSES, None, "", 1, 1.0)])
    assert longer.percent(3.0) == 75 and longer.idle_ms == 0


@pytest.mark.integration
def test_what_is_said_names_model_work_lines_and_what_could_be_done(looked):
    said = str(looked)
    assert f"test_look.py:{line(1)}" in said and "78.1 k parameters" in said and "117 MFLOP" in said
    assert all(f"  {technique.name}" in said for technique in EVERY if looked.found[technique])
    assert all(len(each) <= 100 for each in said.splitlines())
    assert "### Where the " in looked._repr_markdown_()


@pytest.mark.unit
def test_a_model_that_raises_is_reported():
    with pytest.raises(UserError, match="can't be called on these inputs"):
        look(nn.Linear(3, 3), (torch.ones(2, 2),))


# ------------------------------------------------------------------------------------------------------- the workload


@pytest.mark.unit
def test_its_work_is_that_of_its_matmuls_and_convolutions():
    work = workload(read(Three(), Inputs.of(X)), arithmetic_of(Plan(), X.device))
    assert work.matmul == "float32"
    flops = 2 * 8 * 64 * 256 * 256, 2 * 8 * 256 * 64 * 64 * 3
    assert [one.flops for one in work.forward] == list(flops)
    assert [one.shape for one in work.forward] == [(8 * 64, 256, 256), (8 * 256, 64 * 3, 64)]
    assert work.flops(BOTH) == 3 * sum(flops)


def work_of(model, *inputs):
    return workload(read(model, Inputs.of(inputs)), arithmetic_of(Plan(), torch.device("cpu")))


@pytest.mark.unit
def test_what_is_frozen_has_no_gradient_of_its_own_in_its_limit():
    model = Three()
    model.conv.requires_grad_(False)
    work = work_of(model, X)
    linear, conv = (one.flops for one in work.forward)
    assert work.flops(BOTH) == 3 * linear + 2 * conv


@pytest.mark.unit
def test_nothing_flows_back_before_what_is_trained():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    model[2].requires_grad_(True)
    work = work_of(model, torch.arange(6))
    first, last = (one.flops for one in work.forward)
    assert (first, last) == (2 * 6 * 4 * 4, 2 * 6 * 4 * 2)
    assert work.flops(BOTH) == first + 2 * last                # nobody takes its input gradient


class Calls(nn.Module):
    """A function as a model, with a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, *given):
        return self.function(self.weight, *given)


def attends(weight, q):
    return torch.nn.functional.scaled_dot_product_attention(q @ weight, q, q, dropout_p=0.1)


COUNTED = {
    "a linear layer": (nn.Linear(8, 12), [(2, 5, 8)]),
    "a convolution": (nn.Conv2d(4, 8, 3), [(2, 4, 9, 9)]),
    "torch's attention with its weights": (nn.MultiheadAttention(8, 2, batch_first=True), [(2, 5, 8)] * 3),
    "attention that drops": (Calls(attends), [(2, 4, 16, 8)]),
    "a bias of two dimensions": (Calls(lambda w, x, b: torch.addmm(b, x, w)), [(5, 8), (5, 8)]),
    "a bias of three dimensions": (Calls(lambda w, x, b: torch.baddbmm(b, x, w.expand(2, 8, 8))), [(2, 5, 8)] * 2),
    "einsum": (Calls(lambda w, x: torch.einsum("bij,jk->bik", x, w)), [(2, 5, 8)]),
    "a frozen linear layer": (nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)), [(5, 8)])}


@pytest.mark.unit
@pytest.mark.parametrize("name", COUNTED)
def test_its_flops_are_those_that_torch_counts_forward_and_backward(name):
    model, shapes = COUNTED[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    work = work_of(model, *inputs)
    with FlopCounterMode(display=False) as forward:
        outputs = [y for y in tree_leaves(model(*inputs)) if y.requires_grad]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
    assert work.flops(FORWARD) == forward.get_total_flops()
    assert work.flops(BOTH) == forward.get_total_flops() + backward.get_total_flops()


def fused_on_a_cpu(query, key, value, dropout_p=0.0, is_causal=False, out_val=None, **kwargs):
    return sdpa_flop(query, key, value, out_val=out_val) / (2 if is_causal else 1)


EXAMPLES = {f"{name}, {side}": (make, side) for group in (pairs.RIGHT, pairs.WRONG) for name, make in group.items()
            for side in ("reference", "candidate")}
# torch counts nothing of a recurrent layer. Here the backward of attention counts whole, and a forward without
# gradients shows no `no_grad` of its own. The last one has no backward.
COUNTED_OTHERWISE = {"an LSTM by hand, reference", "keys detached, candidate", "no_grad inside, candidate",
                     "its input changed in place, candidate"}


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - COUNTED_OTHERWISE))
def test_the_work_of_every_example_is_what_torch_counts(name, monkeypatch):
    monkeypatch.setattr(Attention, "is_causal", False)
    make, side = EXAMPLES[name]
    pair = make(torch.float32)
    model, given = getattr(pair, side), Inputs.of(pair.inputs)
    model = model if isinstance(model, nn.Module) else Calls(lambda _, *args: getattr(pair, side)(*args))
    work = workload(read(model, given), arithmetic_of(Plan(), X.device))
    counter = FlopCounterMode(display=False, custom_mapping={
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_on_a_cpu})
    with counter:
        returned = tree_leaves(given.copies().call(model))
    outputs = [y for y in returned if isinstance(y, torch.Tensor) and y.requires_grad]
    assert work.flops(FORWARD) == counter.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
    if not any(one.name.startswith("scaled_dot") for one in work.forward):
        assert work.flops(BOTH) == counter.get_total_flops() + backward.get_total_flops()


@pytest.mark.unit
@pytest.mark.parametrize("options, share", [({}, 1.0), ({"is_causal": True}, 0.5)])
def test_a_cpus_fused_attention_counts_as_it_would_elsewhere(options, share):
    call = Calls(lambda w, q: torch.nn.functional.scaled_dot_product_attention(q, q[:, :, :9], q[:, :, :9], **options))
    (one,) = work_of(call, torch.randn(2, 4, 16, 8)).forward
    assert one.kind == ATTENTION and one.flops == share * 4 * 2 * 4 * 16 * 9 * 8 and one.shape == (2, 4, 16, 8)


@pytest.mark.unit
def test_a_recurrent_layer_multiplies_every_token_with_every_weight():
    layer = nn.LSTM(8, 16, batch_first=True)
    weights = sum(t.numel() for t in layer.parameters() if t.ndim == 2)
    assert work_of(layer, torch.randn(2, 5, 8)).flops(FORWARD) == pytest.approx(2 * 2 * 5 * weights)


@pytest.mark.unit
def test_causal_attention_by_hand_counts_half_and_without_its_scores():
    torch.manual_seed(0)
    model = spellings.NanoGPT().eval()
    B, S, H, D = 2, spellings.LENGTH, spellings.HEADS, spellings.WIDTH // spellings.HEADS
    work = workload(read(model, Inputs.of(torch.randn(B, S, spellings.WIDTH))),
                    arithmetic_of(Plan(autocast=torch.bfloat16), X.device))
    (attention,) = [one for one in work.forward if one.kind == ATTENTION]
    assert attention.flops == 2 * B * H * S * S * D and attention.bytes == 4 * B * H * S * D * 2
    assert work.matmul == "bfloat16"
