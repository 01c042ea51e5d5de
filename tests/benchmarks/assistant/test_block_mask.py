"""Block masks that a forward builds: where, how often the same, what they hide, and what building them takes."""
import linecache
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

from benchmarks.assistant import look
from benchmarks.assistant.block_masks import Built, _identity, block_masks_of
from benchmarks.assistant.program import read
from benchmarks.assistant.source import Place
from benchmarks.assistant.techniques import block_mask
from benchmarks.assistant.techniques.block_mask import TECHNIQUE
from benchmarks.measure.calls import Inputs

TOKENS = 256
CPU = torch.device("cpu")
DOCUMENTS = torch.arange(TOKENS) // 100


def causal(b, h, q, k):
    return q >= k


def same_document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


class Packed(nn.Module):
    """Two layers of attention over packed documents."""

    def __init__(self, shares: bool, compiles: bool = False):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.shares, self.create = shares, torch.compile(create_block_mask) if compiles else create_block_mask

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def visible(b, h, q, k):
            return (q >= k) & (documents[b, q] == documents[b, k])
        x = self.first(x)
        size = len(x), None, TOKENS, TOKENS
        for layer in range(2):
            if layer == 0 or not self.shares:
                mask = self.create(visible, *size, device=x.device)
            x = x + flex_attention(x, x, x, block_mask=mask)
        return x


INPUTS = torch.randn(2, 1, TOKENS, 16), (DOCUMENTS.repeat(2, 1))


@pytest.mark.integration
@pytest.mark.parametrize("shares, compiles, count", [(True, False, 1), (False, False, 2), (False, True, 2)])
def test_masks_of_a_forward_are_found_at_their_line(shares, compiles, count):
    before = sys.getprofile()
    program = read(Packed(shares, compiles), Inputs(INPUTS, {}), inference=True)
    (built,) = block_masks_of(program)
    assert sys.getprofile() is before
    assert built.place.file == __file__ and "mask = self.create(" in linecache.getline(__file__, built.place.line)
    assert (len(built.identities), built.different, built.is_compiled) == (count, 1, compiles)
    assert built.separates_documents(CPU)


@pytest.mark.integration
def test_without_flex_attention_no_forward_more_runs():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)
    program = read(Counting(4, 4), Inputs((torch.randn(2, 4),), {}), inference=True)
    before = len(calls)
    assert block_masks_of(program) == [] and len(calls) == before


def built(mask_mod, queries: int = TOKENS) -> Built:
    given = {"mask_mod": mask_mod, "B": None, "H": None, "Q_LEN": queries, "KV_LEN": TOKENS, "device": "cpu",
             "BLOCK_SIZE": 128}
    return Built(Place(__file__, 1), given=[given], identities=[1])


@pytest.mark.unit
@pytest.mark.parametrize("mask_mod, separates", [
    (same_document, True), (and_masks(causal, same_document), True), (causal, False),
    (lambda b, h, q, k: q >= 0, False), (lambda b, h, q, k: (q >= k) & (q - k < 64), False),
    (lambda b, h, q, k: (q // 64 == k // 64) | (k == 0), False),
    (lambda b, h, q, k: (q >= k) & (k >= 8) & same_document(b, h, q, k), False),     # the first queries see nothing
    (lambda b, h, q, k: (q % 2 == k % 2) & same_document(b, h, q, k), False)])
def test_what_separates_documents(mask_mod, separates):
    """A window begins at another key for each query; what all see leaves a gap."""
    assert built(mask_mod).separates_documents(CPU) == separates


@pytest.mark.unit
def test_one_query_separates_nothing():
    assert not built(same_document, queries=1).separates_documents(CPU)


@pytest.mark.unit
def test_a_mask_is_the_same_by_its_code_and_all_that_it_reads():
    def window(size, documents):
        return lambda b, h, q, k, size=size: (q - k < size) & (documents[q] == documents[k])
    one = window(8, DOCUMENTS)
    assert _identity(one) == _identity(window(8, DOCUMENTS))
    assert _identity(one) != _identity(window(9, DOCUMENTS))               # by default
    assert _identity(one) != _identity(window(8, DOCUMENTS.clone()))
    changed = DOCUMENTS.clone()
    before = _identity(window(8, changed))
    assert before == _identity(window(8, changed))
    changed.add_(1)
    assert before != _identity(window(8, changed))


@pytest.mark.integration
@pytest.mark.parametrize("took, compiled, whole, says, verdict", [
    (2.0, 2.0, 100.0, ["2.00 ms of 100"], "by hand"), (1.9, 1.9, 100.0, ["1.90 ms of 100"], "not here"),
    (40.0, 4.0, 100.0, ["40.0 ms of 100", "by torch.compile(create_block_mask) 4.00, 183 s to compile"], "by hand"),
    (40.0, 39.5, 100.0, ["40.0 ms of 100"], "by hand"),
    (120.0, 4.0, 100.0, ["100 ms of 100", "by torch.compile(create_block_mask) 4.00, 183 s to compile"], "by hand")])
@pytest.mark.parametrize("count, different", [(1, 1), (4, 1), (4, 4)])
def test_what_building_takes_decides(took, compiled, whole, says, verdict, count, different, monkeypatch):
    one = built(same_document)
    one.given *= count
    one.identities[:] = [place % different for place in range(count)]
    monkeypatch.setattr(block_mask, "block_masks_of", lambda program: [one])
    monkeypatch.setattr(block_mask.compiler, "missing", lambda device: "")
    monkeypatch.setattr(block_mask, "_built", lambda built, create: [])
    monkeypatch.setattr(block_mask, "milliseconds", lambda before, after, device: (
        [took / count] * 6, [(took if after is before else compiled) / count] * 6))
    now = iter([10.0, 193.0])
    monkeypatch.setattr(block_mask.time, "perf_counter", lambda: next(now))
    program = SimpleNamespace(inputs=SimpleNamespace(device=CPU), iteration_ms=whole, is_compiled=False)
    (found,) = TECHNIQUE.find(program)
    assert all(each in found.reason for each in says) and found.count == count
    assert ("by torch.compile" in found.reason) == (len(says) > 1)
    assert ("1 of its 4 masks would do" in found.reason) == (different < count)
    assert "varlen_attn" in found.reason
    assert bool(found.why_not) == (verdict == "not here")


@pytest.mark.integration
@pytest.mark.parametrize("is_compiled", [True, False])
def test_of_what_is_compiled_that_time_counts(is_compiled, monkeypatch):
    one = built(causal)
    one.is_compiled = is_compiled
    monkeypatch.setattr(block_mask.compiler, "missing", lambda device: "")
    monkeypatch.setattr(block_mask, "_built", lambda built, create: [])
    monkeypatch.setattr(block_mask, "milliseconds", lambda before, after, device: ([9.0] * 6, [3.0] * 6))
    program = SimpleNamespace(inputs=SimpleNamespace(device=CPU), is_compiled=False)
    timed = block_mask._timed(program, one)
    assert (timed.ms, timed.compiled_ms) == ((3.0, None) if is_compiled else (9.0, 3.0))


@pytest.mark.integration
def test_what_can_not_be_compiled_is_timed_as_it_is(monkeypatch):
    def raises(built: Built, create) -> list:
        if create is not create_block_mask:
            raise RuntimeError("no")
        return [built.build().kv_indices]
    monkeypatch.setattr(block_mask, "_built", raises)
    monkeypatch.setattr(block_mask.compiler, "missing", lambda device: "")
    program = SimpleNamespace(inputs=SimpleNamespace(device=CPU), is_compiled=False)
    timed = block_mask._timed(program, built(causal))
    assert timed.ms > 0 and timed.compiled_ms is None and "no" in timed.why_not_compiled
    monkeypatch.setattr(block_mask, "block_masks_of", lambda program: [built(causal)])
    program.iteration_ms = 1e3 * timed.ms
    assert "it can't be compiled: RuntimeError: no" in TECHNIQUE.find(program)[0].reason


@pytest.mark.integration
def test_it_is_said_at_its_line(monkeypatch):
    monkeypatch.setattr(block_mask.compiler, "missing", lambda device: "no compiler")
    said = str(look(Packed(shares=False), INPUTS, inference=True, techniques=[TECHNIQUE]))
    words = " ".join(said.split())
    assert "block-mask test_block_mask.py:" in words and "1 of its 2 masks would do" in words
    assert "create_block_mask evaluates 256 x 256 scores in each forward" in words
