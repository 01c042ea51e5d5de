"""A process's order of attention backends stays as torch chose it."""
import pytest
import torch

from benchmarks.kernels.cuda import series_operator
from common import PRESETS
from common.block import sdpa_backends

SERIES = PRESETS["tiny"].replace(attention="series")


@pytest.mark.unit
def test_torch_chooses_by_one_attention_on_a_gpu_alone(monkeypatch):
    """On a CPU there is no choice."""
    seen, zeros = [], torch.zeros

    def attend(q, k, v, **options):
        seen.append(q.device.type)

    def zeros_of_no_memory(*sizes, device, **_):
        assert device == "cuda"
        return zeros(*sizes, device="meta")

    monkeypatch.setattr(sdpa_backends.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch, "zeros", zeros_of_no_memory)
    sdpa_backends.settle_backend_order("cpu")
    assert seen == []
    sdpa_backends.settle_backend_order("cuda")
    assert seen == ["meta"]


@pytest.mark.unit
def test_the_series_attends_where_it_is_asked_for_alone(monkeypatch):
    assert sdpa_backends.series_attention(PRESETS["tiny"]) is None
    monkeypatch.setattr(series_operator, "missing", lambda: "")
    assert sdpa_backends.series_attention(SERIES) is series_operator.scaled_dot_product_attention


@pytest.mark.unit
def test_where_the_series_cannot_run_it_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(series_operator, "missing", lambda: "there is no nvcc")
    with pytest.raises(NotImplementedError, match="attention by the series: there is no nvcc"):
        sdpa_backends.series_attention(SERIES)
