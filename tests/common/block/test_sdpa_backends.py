"""A process's order of attention backends stays as torch chose it."""
import pytest
import torch

from common.block import sdpa_backends


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
