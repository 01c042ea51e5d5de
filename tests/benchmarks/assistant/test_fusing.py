"""Which change makes torch run a fused kernel for an attention: each is made, and what ran decides."""
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.assistant import why
from benchmarks.assistant.attention_finding import attention_at
from benchmarks.assistant.fusing import EVERY_BACKEND, Given, MaskGiven, fused_or_why_not
from benchmarks.assistant.program import read
from benchmarks.assistant.softmaxes import softmaxes
from benchmarks.assistant.techniques import flex_attention, sdpa
from benchmarks.measure.calls import Inputs
from common.block.evidence import Evidence, judge

SHAPE = 2, 4, 9, 16
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
PLAIN = Given(torch.device("cpu"), SHAPE, SHAPE, SHAPE, torch.float32)
BIAS = MaskGiven((1, 4, 9, 9), torch.float32, trains=True)
FEW_HEADS = {"key": (2, 2, 9, 16), "value": (2, 2, 9, 16)}


def seen(**kernels) -> Evidence:
    return judge(Counter(kernels), None)


@pytest.mark.unit
@pytest.mark.parametrize("technique", [sdpa, flex_attention])
@pytest.mark.parametrize("before, left, why_not", [
    (2, 0, ""), (2, 1, ""), (1, 1, "1 softmax kernels ran, and no more before"),
    (0, 0, "")])                                           # beside compiled code, whose kernels have other names
def test_a_softmax_that_still_runs_is_reported(technique, before, left, why_not):
    program = SimpleNamespace(analysis=SimpleNamespace(attentions=[]))
    kernels = [seen(**{"aten::softmax": count, FUSED: 1}) for count in (before, left)]
    assert technique.TECHNIQUE.fired(program, *kernels) == why_not


@pytest.mark.unit
@pytest.mark.parametrize("given, said", [
    (PLAIN, ""), (replace(PLAIN, mask=MaskGiven((9, 9), torch.bool)), ""),
    (replace(PLAIN, enable_gqa=True, **FEW_HEADS), ""),
    (replace(PLAIN, dropout_p=0.1, trains=True), "dropout 0.1 in train mode; without it"),
    (replace(PLAIN, value=(2, 4, 9, 8)), "values 8 wide beside keys 16 wide; with zeros up to one width"),
    (replace(PLAIN, strided=True), "the elements of a head do not stand side by side; contiguous"),
    (replace(PLAIN, mask=BIAS, trains=True),
     "a mask float32 [1, 4, 9, 9] that takes a gradient; with one that takes none"),
    (replace(PLAIN, mask=MaskGiven((1, 1, 9, 9), torch.float64)), "a mask float64 [1, 1, 9, 9]; in float32"),
    (replace(PLAIN, **FEW_HEADS), "4 heads of queries and 2 of keys; keys and values repeated"),
    (replace(PLAIN, strided=True, value=(2, 4, 9, 8)), "by side, values 8 wide beside keys 16 wide; contiguous and "),
    (replace(PLAIN, backends=(SDPBackend.MATH,)), "torch.backends.cuda allows MATH alone there; with all allowed"),
    (replace(PLAIN, backends=(SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)), "allows CUDNN_ATTENTION and MATH alone"),
    (replace(PLAIN, strided=True, dropout_p=0.1), "side by side, dropout 0.1 in train mode; contiguous and"),
])
def test_the_smallest_change_is_found_by_making_it(given, said):
    ran, why_not = fused_or_why_not(given)
    assert ran == ("" if said else "FlashAttention")
    assert said in why_not and bool(said) == why_not.endswith(", FlashAttention ran")


@pytest.mark.unit
@pytest.mark.parametrize("width, expected", [
    (61, ["with zeros up to 64 and the scale of 61"]), (64, []), (256, ["with 128"]),
    (257, ["with zeros up to 264 and the scale of 257", "with 256", "with 128"])])
def test_the_widths_of_heads_that_are_tried(width, expected):
    made = list(PLAIN.with_heads_of(width).changes())
    assert [change.words for change in made if change.condition == f"heads {width} wide"] == expected
    assert all(change.given.query[-1] == change.given.value[-1] for change in made)


class Attends(nn.Module):
    def __init__(self, backends):
        super().__init__()
        self.backends = backends

    def forward(self, x):
        with sdpa_kernel(self.backends):
            return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.unit
@pytest.mark.parametrize("backends, said", [
    ([SDPBackend.MATH], "allows MATH alone there"),
    ([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], "allows EFFICIENT_ATTENTION and MATH alone there"),
    ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "")])
def test_a_model_that_allows_no_backend_which_fits_is_told_so(backends, said):
    [already] = sdpa.find(read(Attends(backends), Inputs.of(torch.randn(SHAPE))))
    assert already.why_not.startswith("it is this function already") and said in already.why_not
    assert ("no fused kernel computes it" in already.why_not) == bool(said)


@pytest.mark.unit
def test_three_dimensions_get_a_batch():
    made, *_ = replace(PLAIN, query=SHAPE[1:], key=SHAPE[1:], value=SHAPE[1:]).changes()
    assert made.given == replace(PLAIN, query=(1, *SHAPE[1:]), key=(1, *SHAPE[1:]), value=(1, *SHAPE[1:]))


@pytest.mark.unit
def test_what_no_change_helps_says_so():
    alone = replace(PLAIN, query=(9, 16), key=(9, 16), value=(9, 16))
    assert fused_or_why_not(alone)[0] == "" and "FlashAttention ran" not in fused_or_why_not(alone)[1]


class ByHand(nn.Module):
    """Values of half the width of the keys, and a bias that is learned."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(9, 9))

    def forward(self, q, k, v):
        return F.softmax(q @ k.mT / 4 + self.bias, dim=-1) @ v


class Called(ByHand):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


QKV = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2, 4, 9, 8)


@pytest.mark.unit
def test_a_region_is_asked_under_what_the_process_allows():
    [region] = read(ByHand(), Inputs.of(torch.randn(3, *SHAPE).unbind())).analysis.attentions
    with sdpa_kernel(SDPBackend.MATH):
        assert Given.of_region(region).backends == (SDPBackend.MATH,)
    assert Given.of_region(region).backends == EVERY_BACKEND


@pytest.mark.unit
def test_a_region_gives_what_the_function_would_get():
    program = read(ByHand(), Inputs.of(QKV))
    [graph] = program.graphs
    given = Given.of_region(attention_at(*softmaxes(graph), graph))
    assert given == Given(torch.device("cpu"), SHAPE, SHAPE, (2, 4, 9, 8), torch.float32,
                          MaskGiven((9, 9), torch.float32, trains=True), trains=True)
    assert given.without_gradients() == replace(given, trains=False, mask=MaskGiven((9, 9), torch.float32))


@pytest.mark.integration
@pytest.mark.parametrize("model, label", [(ByHand(), "then"), (Called(), "alone")])
def test_why_names_both_conditions(model, label):
    said = " ".join(str(why("sdpa", model, QKV)).split())
    assert label in said and "values 8 wide beside keys 16 wide" in said and "with one that takes none" in said, said


class Padded(nn.Module):
    """Attention by hand, with a floating mask: 1 where a token counts."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * 0.25 + (1.0 - mask[:, None, None, :]) * -1e4
        return scores.softmax(-1) @ v


@pytest.mark.unit
@pytest.mark.parametrize("mask, trains", [([[1.0] * 6 + [0.0] * 3], False), ([[0.5] * 9], True)])
def test_a_floating_mask_that_is_given_takes_no_gradient(mask, trains):
    """Other floating inputs do."""
    program = read(Padded(), Inputs.of((torch.randn(2, 9, 64), torch.tensor(mask))))
    [graph] = program.graphs
    given = Given.of_region(attention_at(*softmaxes(graph), graph))
    assert given.mask.trains == trains
    assert fused_or_why_not(given)[0] == ("" if trains else "FlashAttention")
