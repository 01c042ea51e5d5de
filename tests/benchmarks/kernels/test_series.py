"""Attention in CUDA C++, rung by rung: each file compiles and does what it claims; each is right against FP64."""
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.kernels.cuda import extension, series
from benchmarks.kernels.cuda.series import BACKWARD_RUNGS, RUNGS
from common.block import oracle
from tests.helpers import kernel_cases as cases

unit, integration = pytest.mark.unit, pytest.mark.integration
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
each_backward_rung = pytest.mark.parametrize("rung", BACKWARD_RUNGS, ids=lambda rung: rung.name)
each_mask = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
each_width = pytest.mark.parametrize("D", series.WIDTHS)
BAD = [math.nan, math.inf, -math.inf]
BRINGS = {3: "mma.sync", 4: "cp.async.cg", 6: "wgmma.mma_async", 7: "cp.async.bulk.tensor", 8: "setmaxnreg"}
GIVES_UP = {"mma.sync": 6, "cp.async.cg": 7}
HAVE_IT_IN_THE_BACKWARD = {"mma.sync": [2], "wgmma.mma_async": [3, 4], "cp.async.bulk.tensor": [4]}
SPILLS = {BACKWARD_RUNGS[1]: 16}          # bytes, at D 128


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """rung -> (its PTX, what ptxas said)."""
    if reason := extension.compiler_missing():
        pytest.skip(reason)
    every = (*RUNGS, *BACKWARD_RUNGS)
    folders = {rung: tmp_path_factory.mktemp("rung") for rung in every}

    def compile_one(rung):
        folder = folders[rung]
        done = series.compiled(rung, folder / "cubin", "-cubin", "-Xptxas", "-v", "--keep", f"--keep-dir={folder}")
        assert done.returncode == 0, done.stdout + done.stderr
        return next(folder.glob("*.ptx")).read_text(), done.stdout + done.stderr
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(every, pool.map(compile_one, every), strict=True))


@unit
def test_rungs_are_numbered_from_one_and_each_says_its_idea():
    for rungs, which in ((RUNGS, ""), (BACKWARD_RUNGS, " of the backward")):
        assert [rung.number for rung in rungs] == [*range(1, len(rungs) + 1)]
        assert all(rung.path.read_text().startswith(f"// Rung {rung.number}{which}: ") for rung in rungs)
    assert RUNGS[4].name == "5 swizzled"


@integration
@pytest.mark.parametrize("rung", [*RUNGS, *BACKWARD_RUNGS], ids=lambda rung: f"{rung.path.parent.name} {rung.name}")
def test_a_rung_compiles_for_hopper_without_a_warning_and_keeps_all_in_registers(rung, compiled):
    """Products that ptxas serializes would be right, and slow."""
    _, said = compiled[rung]
    assert "warning" not in said and "serialized" not in said, said
    spilled = re.findall(r"(\d+) bytes spill", said)
    kernels = 10 if rung in BACKWARD_RUNGS else 4            # by dtype and width; the backward's with two around it
    assert len(spilled) == 2 * kernels and max(map(int, spilled)) <= SPILLS.get(rung, 0), said


@integration
@pytest.mark.parametrize("number", BRINGS)
def test_an_instruction_comes_with_the_rung_that_brings_it(number, compiled):
    instruction = BRINGS[number]
    has_it = {rung.number for rung in RUNGS if instruction in compiled[rung][0]}
    assert has_it == {*range(number, GIVES_UP.get(instruction, len(RUNGS) + 1))}


@integration
@pytest.mark.parametrize("instruction", HAVE_IT_IN_THE_BACKWARD)
def test_an_instruction_of_the_backward_comes_with_its_rung(instruction, compiled):
    has_it = [rung.number for rung in BACKWARD_RUNGS if instruction in compiled[rung][0]]
    assert has_it == HAVE_IT_IN_THE_BACKWARD[instruction]


Q = torch.zeros(1, 2, 8, 64, dtype=torch.float16)


@unit
@pytest.mark.parametrize("given, said", [
    ((Q.float(), Q, Q), "q is torch.float32: give float16 or bfloat16"),
    ((Q[0], Q, Q), r"q is \(2, 8, 64\): give \[B, H, S, D\]"),
    ((Q[..., :32], Q, Q), "D 64 or 128"),
    ((Q[:, :, :0], Q, Q), "S from 1"),
    ((Q, Q[:, :, :4], Q), r"k is \(1, 2, 4, 64\) .*: give \(1, 2, 8, 64\)"),
    ((Q, Q.bfloat16(), Q), "k is .*bfloat16"),
    ((Q, Q.repeat(1, 2, 1, 1), Q), "H a multiple of G"),
    ((Q, Q[:, :0], Q), "H a multiple of G"),
    ((Q, None, Q), "k is"),
    ((Q, Q, Q[:, :1]), r"v is \(1, 1, 8, 64\) .*: give \(1, 2, 8, 64\)"),
    ((Q[:, :1].expand(65536, 1, 8, 64),) * 3, "at most 65535 heads"),
    ((Q, Q, Q), "q is on cpu: a CUDA kernel needs a GPU")])
def test_what_it_does_not_take_is_a_line(given, said):
    with pytest.raises(ValueError, match=said):
        series.attention(RUNGS[0], *given)
    with pytest.raises(ValueError, match=said):
        series.gradients(BACKWARD_RUNGS[0], *given, given[0], torch.zeros(given[0].shape[:3]), given[0])


@unit
def test_a_forward_that_is_to_be_differentiated_is_refused():
    with pytest.raises(ValueError, match="no gradients: call it under"):
        series.attention(RUNGS[0], Q.clone().requires_grad_(), Q, Q)


LOG_SUM = torch.zeros(1, 2, 8)


@unit
@pytest.mark.parametrize("y, log_sum, dy, said", [
    (Q[:, :1], LOG_SUM, Q, r"y is \(1, 1, 8, 64\)"), (Q, LOG_SUM, Q.float(), "dy is .*float32"),
    (Q, LOG_SUM.half(), Q, "log_sum is .*float16 .*: give what `attention` returned"),
    (Q, LOG_SUM[..., :4], Q, "log_sum is"), (Q, None, Q, "log_sum is None"), (Q, LOG_SUM, None, "dy is None")])
def test_what_the_backward_does_not_take_is_a_line(y, log_sum, dy, said):
    with pytest.raises(ValueError, match=said):
        series.gradients(BACKWARD_RUNGS[0], Q, Q, Q, y, log_sum, dy)


@unit
@pytest.mark.parametrize("capability, said", [((8, 9), "compute capability 8.9"), ((10, 0), "compute capability 10.0"),
                                              ((9, 0), "")])
def test_it_runs_on_hopper_alone(capability, said, monkeypatch):
    monkeypatch.setattr(extension, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = series.missing()
    assert said in reason and bool(reason) == bool(said)


@unit
def test_what_the_other_kernels_lack_it_lacks_too(monkeypatch):
    monkeypatch.setattr(extension, "missing", lambda: "there is no GPU")
    assert series.missing() == "there is no GPU"


@unit
def test_a_library_is_built_once_for_what_it_depends_on(monkeypatch, tmp_path):
    """Another compiler is another library; an error of nvcc is one line, and leaves nothing behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    calls = []

    def compiled(rung, into, *flags):
        calls.append(rung)
        into.write_text("a library")
        return type("Done", (), {"returncode": 0, "stdout": "", "stderr": ""})
    monkeypatch.setattr(series, "compiled", compiled)
    monkeypatch.setattr(extension, "nvcc_version", lambda: "13.0")
    first = series.built(RUNGS[0])
    assert series.built(RUNGS[0]) == first and first.read_text() == "a library" and len(calls) == 1
    monkeypatch.setattr(extension, "nvcc_version", lambda: "13.1")
    assert series.built(RUNGS[0]) != first and len(calls) == 2

    def failed(rung, into, *flags):
        return type("Done", (), {"returncode": 1, "stdout": "", "stderr": "x.cu(1): error: no\nmore"})
    monkeypatch.setattr(series, "compiled", failed)
    with pytest.raises(RuntimeError, match=r"2_online_softmax.cu does not build: x.cu\(1\): error: no$"):
        series.built(RUNGS[1])
    assert not list((tmp_path / "attention").glob("2_*"))


# ------------------------------------------------------------------------------------------------------------ on a GPU


def arguments(shape, dtype, kv_heads=None, scale=1.0):
    """q, k and v of normal numbers; q and k times `scale`."""
    generator = torch.Generator().manual_seed(0)
    of_kv = (shape[0], kv_heads or shape[1], *shape[2:])
    q, k, v = (torch.randn(size, generator=generator).to("cuda", dtype) for size in (shape, of_kv, of_kv))
    return scale * q, scale * k, v


def plain(q, k, v, causal):
    """(y, the logarithm of each row's sum), as mathematics, in the dtype of its inputs."""
    S, D = q.shape[-2:]
    k, v = (each.repeat_interleave(q.size(1) // k.size(1), 1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def assert_right(rung, given, causal):
    y, log_sum = series.attention(rung, *given, causal)
    exact_y, exact_log_sum = plain(*(each.double() for each in given), causal)
    assert oracle.relative_error(y, exact_y) < cases.GATES[given[0].dtype]
    assert float((log_sum - exact_log_sum).abs().max()) < 1e-4 * max(1.0, float(exact_log_sum.abs().max()))


@pytest.mark.gpu
@unit
@each_rung
@each_mask
@each_width
@each_dtype
def test_it_is_right_at_any_length(rung, dtype, D, causal):
    for S in (1, 7, 63, 64, 65, 127, 128, 129, 200, 385):
        assert_right(rung, arguments((2, 3, S, D), dtype), causal)


@pytest.mark.gpu
@unit
@each_rung
@each_mask
@each_width
def test_grouped_heads_share_their_keys(rung, D, causal):
    for heads, kv_heads in ((8, 2), (6, 1)):
        assert_right(rung, arguments((2, heads, 150, D), torch.bfloat16, kv_heads), causal)


@pytest.mark.gpu
@unit
@each_rung
@each_mask
def test_scores_of_about_a_hundred(rung, causal):
    """A softmax that is nearly one-hot: its peak moves from tile to tile."""
    assert_right(rung, arguments((1, 2, 300, 64), torch.float16, scale=10.0), causal)


@pytest.mark.gpu
@unit
@each_rung
def test_peaks_that_grow_and_that_fall(rung):
    q, k, v = arguments((1, 2, 512, 128), torch.bfloat16)
    growing = torch.linspace(0.1, 4, 512, device="cuda")
    for size in (growing, growing.flip(0)):
        assert_right(rung, (q.abs(), (k.abs() * size[:, None]).to(k.dtype), v), False)


@pytest.mark.gpu
@unit
@each_rung
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("bad", BAD)
def test_the_last_row_alone_sees_what_is_not_finite(rung, which, bad):
    given = arguments((1, 2, 70, 64), torch.bfloat16)
    given[which][0, 1, 69, 3] = bad
    y, _ = series.attention(rung, *given)
    expected, _ = plain(*given, True)
    assert torch.equal(y[0, 1, 69].isfinite(), expected[0, 1, 69].isfinite())
    assert y[0, 0].isfinite().all()
    if which < 2:                                             # 0 times NaN: rows of a tile share its values
        assert y[0, 1, :64].isfinite().all()


@pytest.mark.gpu
@unit
@each_rung
def test_where_the_first_keys_have_no_weight(rung):
    q, k, v = arguments((1, 1, 260, 64), torch.bfloat16)
    q[:] = 1
    k[..., :130, :] = -math.inf
    y, _ = series.attention(rung, q, k, v, False)
    exact, _ = plain(q.double(), k.double(), v.double(), False)
    assert oracle.relative_error(y, exact) < cases.GATES[torch.bfloat16]


@pytest.mark.gpu
@unit
@each_rung
def test_it_runs_on_the_current_stream_and_gives_the_same_bits_twice(rung):
    given = arguments((2, 4, 500, 128), torch.float16)
    first = series.attention(rung, *given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = series.attention(rung, *given)
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
@unit
@each_rung
def test_what_lies_askew_in_memory_is_taken_too(rung):
    q, k, v = arguments((1, 2, 100, 64), torch.float16)
    storage = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")
    askew = storage[1:].view_as(q).copy_(q)
    assert torch.equal(series.attention(rung, askew, k, v)[0], series.attention(rung, q, k, v)[0])
    across = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(series.attention(rung, across, k, v)[0], series.attention(rung, q, k, v)[0])


@pytest.mark.gpu
@unit
def test_no_heads_are_no_work():
    y, log_sum = series.attention(RUNGS[0], *(torch.empty(0, 2, 8, 64, dtype=torch.float16, device="cuda"),) * 3)
    assert y.shape == (0, 2, 8, 64) and log_sum.shape == (0, 2, 8)


# ------------------------------------------------------------------------------------------------------- the backward


def exact_gradients(q, k, v, dy, causal):
    """(dq, dk, dv), as mathematics, in FP64."""
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    return torch.autograd.grad(plain(*exact, causal)[0], exact, dy.double())


def differentiated(rung, given, causal, dy=None):
    """(dq, dk, dv) by a rung, after the last rung of the forward; and dy."""
    q = given[0]
    if dy is None:
        dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    y, log_sum = series.attention(RUNGS[-1], *given, causal)
    return series.gradients(rung, *given, y, log_sum, dy, causal), dy


def assert_gradients_right(rung, given, causal, times=1.0):
    """Beside the largest of the three, where one is zero: of a single key no score has a gradient."""
    found, dy = differentiated(rung, given, causal)
    exact = exact_gradients(*given, dy, causal)
    for gradient, right in zip(found, exact, strict=True):
        assert gradient.dtype == given[0].dtype and gradient.shape == right.shape
        if right.norm() > 1e-6 * exact[2].norm():
            assert oracle.relative_error(gradient, right) < times * cases.GATES[given[0].dtype]
        else:
            assert gradient.norm() < times * cases.GATES[given[0].dtype] * exact[2].norm()


@pytest.mark.gpu
@unit
@each_backward_rung
@each_mask
@each_width
@each_dtype
def test_gradients_are_right_at_any_length(rung, dtype, D, causal):
    for S in (1, 7, 63, 64, 65, 127, 128, 129, 200, 385):
        assert_gradients_right(rung, arguments((2, 3, S, D), dtype), causal)


@pytest.mark.gpu
@unit
@each_backward_rung
@each_mask
@each_width
def test_keys_that_several_heads_share_have_the_sum_of_their_gradients(rung, D, causal):
    for heads, kv_heads in ((8, 2), (6, 1)):
        assert_gradients_right(rung, arguments((2, heads, 150, D), torch.bfloat16, kv_heads), causal)


@pytest.mark.gpu
@unit
@each_backward_rung
@each_mask
def test_gradients_where_scores_are_about_a_hundred(rung, causal):
    """Most probabilities are zero or one, and dS is a difference of nearly equal numbers."""
    assert_gradients_right(rung, arguments((1, 2, 300, 64), torch.float16, scale=10.0), causal, times=4)


@pytest.mark.gpu
@unit
@each_backward_rung
@pytest.mark.parametrize("bad", BAD)
def test_a_gradient_that_is_not_finite_stays_in_its_rows(rung, bad):
    """Of row 69 alone, which sees all keys: its dq, and every dk and dv of that head; nothing of the other head."""
    given = arguments((1, 2, 70, 64), torch.bfloat16)
    dy = torch.ones_like(given[0])
    dy[0, 1, 69, 3] = bad
    (dq, dk, dv), _ = differentiated(rung, given, True, dy)
    for gradient, right in zip((dq, dk, dv), exact_gradients(*given, dy, True), strict=True):
        assert torch.equal(gradient.isfinite(), right.isfinite())
    assert dq[0, 1, :69].isfinite().all() and not dq[0, 1, 69].isfinite().any() and dk[0, 0].isfinite().all()


@pytest.mark.gpu
@unit
@each_backward_rung
def test_keys_without_weight_have_no_gradient(rung):
    q, k, v = arguments((1, 1, 260, 64), torch.bfloat16)
    q[:] = 1
    k[..., :130, :] = -math.inf
    (_, _, dv), _ = differentiated(rung, (q, k, v), False)
    assert dv[..., :130, :].abs().max() == 0 and dv[..., 130:, :].isfinite().all()


@pytest.mark.gpu
@unit
@each_backward_rung
def test_gradients_of_keys_have_the_same_bits_twice(rung):
    """Those of queries are summed in an order that may differ."""
    given = arguments((2, 4, 500, 128), torch.float16)
    first, second = (differentiated(rung, given, True)[0] for _ in range(2))
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])
    assert oracle.relative_error(first[0], second[0].double()) < cases.GATES[torch.float16]


@pytest.mark.gpu
@unit
@each_backward_rung
def test_what_lies_askew_in_memory_is_differentiated_too(rung):
    q, k, v = arguments((1, 2, 100, 64), torch.float16)
    y, log_sum = series.attention(RUNGS[-1], q, k, v)
    across = q.transpose(1, 2).contiguous().transpose(1, 2)
    one = series.gradients(rung, q, k, v, y, log_sum, q)
    other = series.gradients(rung, across, k, v, y, log_sum, across)
    assert torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])


@pytest.mark.gpu
@unit
def test_no_heads_have_no_gradients():
    none = torch.empty(0, 2, 8, 64, dtype=torch.float16, device="cuda")
    log_sum = none.new_empty(0, 2, 8, dtype=torch.float32)
    found = series.gradients(BACKWARD_RUNGS[0], none, none, none, none, log_sum, none)
    assert [each.shape for each in found] == [none.shape] * 3
