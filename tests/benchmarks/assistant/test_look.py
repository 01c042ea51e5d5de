"""A look at a model: where its time goes, line by line with the backward, and what is said of it in seconds."""
import inspect

import pytest
import torch
from torch import nn

from benchmarks.assistant import look
from benchmarks.assistant.program import read
from benchmarks.assistant.spending import BY_HAND, CONVOLUTION, IDLE, MATMUL, PASSES, Spending, Spent, kind_of
from benchmarks.assistant.technique import Plan
from benchmarks.assistant.techniques import EVERY
from benchmarks.assistant.workload import arithmetic_of, workload
from benchmarks.measure.calls import Inputs
from common.block.workload import ATTENTION, BOTH
from common.outcome import Told
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


@pytest.mark.unit
@pytest.mark.parametrize("name, kind", [
    ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize", CONVOLUTION),
    ("aten::convolution_backward", CONVOLUTION), ("nvjet_sm90_hsh_192x192", MATMUL), ("aten::addmm", MATMUL),
    ("flash_fwd_kernel", "attention"), ("vectorized_elementwise_kernel", PASSES)])
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
def test_a_model_that_raises_is_told():
    with pytest.raises(Told, match="can't be called on these inputs"):
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


@pytest.mark.unit
def test_what_is_frozen_has_no_backward_in_its_limit():
    model = Three()
    model.conv.requires_grad_(False)
    work = workload(read(model, Inputs.of(X)), arithmetic_of(Plan(), X.device))
    assert work.flops(BOTH) == work.flops("forward")


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
