"""The operations that there are kernels of: every level is the operation in both passes, and what is not is refused."""
import importlib

import pytest
import torch

from benchmarks.kernels import operations
from common import PRESETS, BlockConfig
from common.outcome import Failed
from common.runtime.iteration import BACKWARD, FORWARD

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*torch.jit.script")]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {"hidden": (3, 40), "ffn": (3, 40), "scores": (2, 30, 30), "heads": (2, 3, 20, 16)}
each_operation = pytest.mark.parametrize("name", operations.EXPERIMENTS)


def given_to(name: str, seed=0):
    """(experiment, its inputs)"""
    experiment = operations.EXPERIMENTS[name]
    return experiment, operations.tensors(experiment, SIZES[experiment.shape], torch.float32, CPU, seed)


# -------------------------------------------------------------------------------------------------------------- levels


@each_operation
@pytest.mark.parametrize("level", ["eager", operations.TORCHSCRIPT])
def test_every_level_is_the_operation(name, level):
    experiment, inputs = given_to(name)
    errors, has_backward = operations.check(operations.levels(experiment, CPU)[level], experiment, inputs, 1)
    gradients = [error for what, error in errors.items() if what.startswith("gradient")]
    assert has_backward and len(gradients) == len(experiment.inputs.rstrip("1")) and max(gradients) < 1e-6
    assert len(errors) == len(gradients) + 1 + (name in ("residual+LayerNorm", "LayerNorm to FP8"))
    assert max(errors.values()) < (operations.FP8_GATE if experiment.fp8 else 1e-6)


@each_operation
def test_every_operation_has_five_levels_or_says_why_not(name):
    experiment = operations.EXPERIMENTS[name]
    there = operations.levels(experiment, CPU)
    assert there.keys() >= {"eager", operations.TORCHSCRIPT, "torch.compile", "Triton", "CUDA C++"}
    assert all(callable(there[level]) for level in ("eager", operations.TORCHSCRIPT, "torch.compile"))
    by_hand = "CUDA C++" in experiment.by_hand
    assert there["CUDA C++"] == ("timed on a GPU alone" if by_hand else "no kernel of it is written")
    assert all(there[level] == "timed on a GPU alone" for level in experiment.by_hand)


def test_a_level_that_can_not_be_loaded_says_why():
    """A library that is not there, or half of it; or what a machine lacks."""
    def without_a_compiler():
        raise NotImplementedError("no nvcc")

    def without_a_library():
        raise ImportError("cannot import name 'x'\nfrom somewhere")
    fake = operations.Experiment(operations.silu, "x", "ffn", (2, 3), {
        "CUDA C++": without_a_compiler, "Liger": without_a_library, "Triton": lambda: operations.silu}, "activations",
        no_torchscript="its fuser knows no FP8")
    there = operations.levels(fake, CUDA)
    assert there["CUDA C++"] == "no nvcc" and there["Liger"] == "ImportError: cannot import name 'x'"
    assert there["Triton"] is operations.silu and there[operations.TORCHSCRIPT] == "its fuser knows no FP8"


@each_operation
def test_a_kernel_by_hand_stands_where_its_level_says(name):
    """In the module of that name; in CUDA C++ under the operation's own."""
    pytest.importorskip("triton")
    experiment = operations.EXPERIMENTS[name]
    assert importlib.import_module(f"{operations.TRITON}.{experiment.module}")
    assert callable(experiment.by_hand["Triton"]())
    if "CUDA C++" in experiment.by_hand:
        try:
            assert callable(experiment.by_hand["CUDA C++"]())
        except NotImplementedError as missing:
            assert str(missing)                            # no GPU, or no compiler for it


@pytest.mark.skipif(torch.cuda.is_available(), reason="each is checked and timed where there is a GPU")
def test_the_kernels_by_hand_are_the_operations():
    """Through Triton's interpreter, as levels() would give them on a GPU."""
    pytest.importorskip("triton")
    for name, experiment in operations.EXPERIMENTS.items():
        if name != "attention":                                          # in 16 bits alone
            call, inputs = experiment.by_hand["Triton"](), given_to(name)[1]
            errors, has_backward = operations.check(call, experiment, inputs, 1)
            count = sum(what.startswith("gradient") for what in errors)
            assert has_backward and count == len(experiment.inputs.rstrip("1"))
            with torch.no_grad():                                        # all that a replay is compared by
                assert all(y.float().isfinite().all() for y in operations.as_list(call(*inputs)))


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("wrong, said", [
    (lambda s: operations.F.dropout(s.softmax(-1), 0.1), "a query sees keys behind it"),
    (lambda s: s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf).softmax(-1), "dropout keeps 1.0000 of"),
    (lambda s: operations.softmax_dropout(s) * 0.9, "output 0 is off by 1.0e-01"),
    (lambda s: operations.softmax_dropout(s.detach()) + 0 * s, "gradient 0 is off by 1.0e"),
])
def test_wrong_dropout_is_refused(wrong, said):
    with pytest.raises(Failed, match=said):
        operations.check(wrong, *given_to("softmax+dropout"), 1)


@pytest.mark.parametrize("wrong, said", [
    (lambda x, w: operations.rms_norm(x, w) * 1.01, "output 0 is off by 1.0e-02"),
    (lambda x, w: operations.rms_norm(x, w.detach()) + 0 * w, "gradient 1 is off by 1.0e"),
    (lambda x, w: operations.rms_norm(x, w) + float("nan"), "output 0 is off by inf"),
    (lambda x, w: (operations.rms_norm(x, w), x), "it gives 2 tensors, not 1"),
])
def test_what_is_not_the_operation_is_refused(wrong, said):
    with pytest.raises(Failed, match=said):
        operations.check(wrong, *given_to("RMSNorm"), 1)


@pytest.mark.parametrize("wrong, said", [
    (lambda y, amax, proxy: ((y.float() * 1.1).to(y.dtype), amax, proxy), "output 0 is off by"),
    (lambda y, amax, proxy: (y, amax * 1.001, proxy), "output 1 is off by 1.0e-03"),
    (lambda y, amax, proxy: (y, amax, proxy * 1.001 if torch.is_grad_enabled() else y), "gradient 0 is off by 1.0e-03"),
    (lambda y, amax, proxy: (y, amax), "it gives 2 tensors, not 3"),
])
def test_what_is_not_layer_norm_to_fp8_is_refused(wrong, said):
    with pytest.raises(Failed, match=said):
        operations.check(lambda *inputs: wrong(*operations.layer_norm_fp8(*inputs)), *given_to("LayerNorm to FP8"), 1)


def test_the_third_call_is_checked_and_without_gradients_too():
    """A compiler may have other code for that."""
    calls = []

    def wrong_at_the_third_call(x, w):
        calls.append(torch.is_grad_enabled())
        return operations.rms_norm(x, w) * (1.01 if len(calls) == 3 else 1.0)
    with pytest.raises(Failed, match="output 0 is off by"):
        operations.check(wrong_at_the_third_call, *given_to("RMSNorm"), 1)
    assert calls == 3 * [False]


def test_what_has_no_backward_is_checked_without():
    errors, has_backward = operations.check(lambda a, b: operations.swiglu(a.detach(), b.detach()),
                                            *given_to("SwiGLU"), 1)
    assert list(errors) == ["output 0"] and not has_backward


# -------------------------------------------------------------------------------------------------------- their sizes


def test_sizes_follow_the_tokens():
    config = PRESETS["te-tutorial"]
    assert [operations.shape(config, name, 16384) for name in SIZES] == [
        (16384, 4096), (16384, 16384), (256, 2048, 2048), (8, 32, 2048, 128)]
    assert [operations.shape(config, name, 64)[0] for name in SIZES] == [64, 64, 1, 1]


@each_operation
def test_inputs_are_as_the_operation_asks_for_them(name):
    experiment, inputs = given_to(name)
    size = SIZES[experiment.shape]
    for kind, tensor in zip(experiment.inputs, inputs, strict=True):
        assert tensor.shape == {"x": size, "w": size[-1:], "1": (1,)}[kind]
        assert tensor.requires_grad == (kind != "1")
    again, other = given_to(name)[1], given_to(name, seed=1)[1]
    assert torch.equal(inputs[0], again[0]) and not torch.equal(inputs[0], other[0])


@pytest.mark.parametrize("name, forward, backward", [
    ("SiLU", 2, 3), ("SwiGLU", 3, 5), ("residual+LayerNorm", 4, 4),
    ("LayerNorm to FP8", 1.25, 3),                         # in FP32: a byte an element more is a quarter
    ("softmax+dropout", 1.5, 2),
])
def test_the_least_that_moves_is_in_multiples_of_x(name, forward, backward):
    experiment, (x, *_) = given_to(name)
    assert operations.least_bytes(experiment, FORWARD, x) == forward * x.nbytes
    assert operations.least_bytes(experiment, BACKWARD, x) == backward * x.nbytes


def test_attention_has_the_flops_under_its_mask_and_nothing_else_has_any():
    config = BlockConfig(2, 20, 48, 3)
    experiment, (q, *_) = given_to("attention")
    forward = 2 * config.batch_size * config.seq_len**2 * config.hidden_size
    assert operations.least_flops(experiment, FORWARD, q) == forward
    assert operations.least_flops(experiment, BACKWARD, q) == 2.5 * forward
    other, (x, *_) = given_to("SwiGLU")
    assert operations.least_flops(other, FORWARD, x) == 0
