"""The CUDA C++ kernels: index arithmetic and compilation anywhere; results against FP64 on a GPU.

Every output and gradient, odd shapes, strange values, bad input; attention against its definition.
"""
import functools
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import kernel_cases
import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, GATES, assert_same_bits, outputs

pytest.importorskip("triton")
from benchmarks import operations
from benchmarks.kernels import cuda, extension
from common import oracle

SHAPES = [(3, 1), (3, 1000), (3, 4097), (2, 5, 64), (1, 1), (7,), (3, 8200), (2, 8193), (3, 16384), (40, 24)]
P, SEED = 0.3, -7


# What the kernels compute, in plain PyTorch.

def softmax(scores):
    return torch.softmax(scores, -1)


def softmax_dropout(scores):
    factors = torch.from_numpy(dropout_factors(scores.numel(), P, SEED)).view(scores.shape)
    return torch.softmax(scores, -1) * factors.to(scores)


def causal_softmax_dropout(scores):
    """On [..., S, S] made of `scores`, so that every shape has one."""
    return softmax_dropout(square(scores).masked_fill(above_diagonal(scores.size(-1), scores.device), -math.inf))


def square(scores):
    return torch.stack([scores.roll(i, -1) for i in range(min(scores.size(-1), 65))], -2)[..., :65]


def above_diagonal(size, device):
    size = min(size, 65)
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def attention(q, k, v, causal=True):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.softmax(scores, -1) @ v


def philox(seed, counters):
    """Philox4x32-7 of [n] counters: [n, 4] 32-bit words."""
    low32, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    counters, key = counters.astype(np.uint64), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    state = [counters & low32, counters >> word, np.zeros_like(counters), np.zeros_like(counters)]
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * state[0], np.uint64(0xCD9E8D57) * state[2]
        state = [b >> word ^ state[1] ^ np.uint64(key[0]), b & low32,
                 a >> word ^ state[3] ^ np.uint64(key[1]), a & low32]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(state, -1).astype(np.uint32)


def dropout_factors(count, p, seed):
    """What dropout multiplies elements 0 to count - 1 with: 16 bits of Philox each, eight elements a call."""
    numbers = philox(seed, np.arange(-(-count // 8))).astype("<u4").view("<u2").reshape(-1)[:count]
    threshold = round(p * 65536)
    return np.where(numbers < threshold, 0.0, 65536 / (65536 - threshold))


# kernel -> (the kernel, what it computes, how many of its arguments have x's shape, how many are [E])
KERNELS = {
    "layer_norm_gelu": (cuda.layer_norm_gelu, operations.layer_norm_gelu, 1, 2),
    "rms_norm": (cuda.rms_norm, operations.rms_norm, 1, 1),
    "swiglu": (cuda.swiglu, operations.swiglu, 2, 0),
    "softmax": (cuda.softmax_dropout, softmax, 1, 0),
    "softmax_dropout": (functools.partial(cuda.softmax_dropout, p=P, seed=SEED), softmax_dropout, 1, 0),
    "causal_softmax_dropout": (lambda scores: cuda.softmax_dropout(square(scores), P, SEED, causal=True),
                               causal_softmax_dropout, 1, 0),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)
each_attention = pytest.mark.parametrize("causal, width", [(True, 64), (True, 128), (False, 64), (False, 128)])


def arguments(name, *shape_and_dtype, **more):
    return kernel_cases.arguments(*KERNELS[name][2:], *shape_and_dtype, **more)


def heads(shape, dtype=torch.float16, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype) for _ in range(3)]


def errors(name, given):
    return kernel_cases.errors(*KERNELS[name][:2], given)


def attention_error(given, causal):
    return oracle.relative_error(cuda.attention(*given, causal=causal), attention(*(t.double() for t in given), causal))


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_right(name, shape, dtype):
    given = arguments(name, shape, dtype)
    found = errors(name, given)
    if shape[-1] == 1 and name != "swiglu":       # nothing depends on x then: its gradient is rounding and nothing else
        found = [found[0], found[-1]] if len(found) > 2 else found[:1]
    assert max(found) < 3 * GATES[dtype], found


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [264, 1031, 2056])
def test_a_diagonal_through_many_vectors_and_warps(length, dtype):
    given = kernel_cases.arguments(1, 0, (2, length, length), dtype)

    def truth(scores):
        hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        return softmax_dropout(scores.masked_fill(hidden, -math.inf))
    found = kernel_cases.errors(lambda scores: cuda.softmax_dropout(scores, P, SEED, causal=True), truth, given)
    assert max(found) < 3 * GATES[dtype], found


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_numbers(name, scale):
    given = arguments(name, (4, 100), scale=scale)
    found = errors(name, given)
    if "softmax" in name and scale > 1:           # p is 0 or 1: nothing depends on the scores
        found = found[:1]
    assert max(found) < 1e-5


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
def test_inputs_that_are_not_contiguous_or_not_aligned(name):
    given = arguments(name, (6, 40), torch.float16)
    turned = kernel_cases.turned(given, KERNELS[name][2])
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape).requires_grad_() for t in given]
    assert all(t.data_ptr() % 16 for t in shifted)
    expected = outputs(KERNELS[name][0], given)
    assert_same_bits(outputs(KERNELS[name][0], turned), expected)
    for a, b in zip(expected, outputs(KERNELS[name][0], shifted), strict=True):
        assert oracle.relative_error(b, a.double()) < GATES[torch.float16]     # single elements: sums in another order


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 4096, 16384])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_through_its_row_alone(name, bad, width, dtype, monkeypatch):
    monkeypatch.setattr(cuda, "BLOCKS", 1)                  # of the backward: it works on the others before and after
    given = arguments(name, (4, width), dtype)
    with torch.no_grad():
        given[0][2, 5] = bad
    (found, dx, *_), (eager, *_) = (outputs(function, given) for function in KERNELS[name][:2])
    assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())
    assert found[[0, 1, 3]].isfinite().all() and dx[[0, 1, 3]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
def test_no_rows_at_all(name):
    given = arguments(name, (0, 8))
    first, *_, last = outputs(KERNELS[name][0], given)
    assert first.numel() == 0 and first.shape[-1] == 8 and not last.any()


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 33, 4096, 8192, 8200, 9001, 16384])
def test_every_run_gives_the_same_bits(name, width, dtype, monkeypatch):
    """A block of the norms' backward adds up several rows: waiting in shared memory, or too wide or too odd for it."""
    monkeypatch.setattr(cuda, "BLOCKS", 3)                  # fewer than rows
    given = arguments(name, (13, width), dtype)
    assert max(errors(name, given)) < 3 * GATES[dtype]
    assert_same_bits(outputs(KERNELS[name][0], given), outputs(KERNELS[name][0], given))


@pytest.mark.gpu
@pytest.mark.integration
def test_a_masked_row_of_minus_infinities_is_what_eager_makes_of_it():
    scores = torch.zeros(4, 4, device=DEVICE)
    scores[2] = -math.inf
    assert torch.equal(cuda.softmax_dropout(scores).isnan(), torch.softmax(scores, -1).isnan())
    scores = torch.full((4, 4), math.nan, device=DEVICE).tril(-1).t() + torch.zeros(4, 4, device=DEVICE)
    scores.requires_grad_()
    y = cuda.softmax_dropout(scores, causal=True)           # what the mask hides is never read
    y.square().sum().backward()
    assert y.isfinite().all() and scores.grad.isfinite().all() and not y.triu(1).any()


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_drops_by_seed_and_place(dtype):
    scores = torch.zeros(5, 1000, device=DEVICE, dtype=dtype)
    for seed in (0, 1, 2**63 - 1, -2**63):
        dropped = cuda.softmax_dropout(scores, 0.25, seed) == 0
        assert torch.equal(dropped.cpu().flatten(), torch.from_numpy(dropout_factors(5000, 0.25, seed) == 0))


@pytest.mark.gpu
@pytest.mark.integration
@each_attention
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 128, 129, 200, 321])
def test_attention_is_right(length, width, causal, dtype):
    assert attention_error(heads((2, 3, length, width), dtype), causal) < GATES[dtype]


@pytest.mark.gpu
@pytest.mark.integration
@each_attention
def test_attention_of_large_numbers_and_of_views(causal, width):
    given = heads((1, 2, 150, width), scale=30.0)
    assert attention_error(given, causal) < 2e-3
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in given]
    for other in (given, views, shifted):
        assert torch.equal(cuda.attention(*given, causal=causal), cuda.attention(*other, causal=causal))


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_attention_passes_on_what_is_not_finite(bad, which):
    given = heads((1, 2, 70, 64), torch.bfloat16)
    given[which][0, 1, 69, 3] = bad                          # in the last row: no other sees it
    found, eager = cuda.attention(*given), attention(*given)
    assert torch.equal(found[0, 1, 69].isfinite(), eager[0, 1, 69].isfinite())
    assert found[0, 0].isfinite().all() and (found[0, 1, :64].isfinite().all() or which == 2)


@pytest.mark.gpu
@pytest.mark.integration
def test_attention_where_the_first_keys_have_no_weight():
    q, k, v = heads((1, 1, 130, 64), torch.bfloat16)
    q[:] = 1
    k[..., :64, :] = -math.inf
    found = cuda.attention(q, k, v, causal=False)
    assert oracle.relative_error(found, attention(q.double(), k.double(), v.double(), False)) < GATES[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.stress
@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 4096), (4096, 16384), (100_000, 96)], ids=str)
def test_sizes_of_a_transformer(name, shape, dtype):
    if name.startswith("causal"):
        shape = (1000, 65)                                   # `square` makes it 65 times as large
    assert max(errors(name, arguments(name, shape, dtype))) < 3 * GATES[dtype]


@pytest.mark.gpu
@pytest.mark.stress
@each_attention
def test_attention_of_a_transformer(causal, width):
    assert attention_error(heads((2, 4, 2048, width)), causal) < GATES[torch.float16]


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
def test_under_the_compiler(name, fresh_dynamo):
    kernel = KERNELS[name][0]
    given = arguments(name, (16, 256), torch.float16)
    for a, b in zip(outputs(torch.compile(kernel, fullgraph=True), given), outputs(kernel, given), strict=True):
        assert oracle.relative_error(a, b.double()) < 1e-3


@pytest.mark.gpu
@pytest.mark.integration
def test_in_a_cuda_graph():
    given, q = [t.detach() for t in arguments("rms_norm", (5, 48))], heads((1, 1, 80, 64))
    eager = [cuda.rms_norm(*given), cuda.attention(*q)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [cuda.rms_norm(*given), cuda.attention(*q)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


@pytest.mark.unit
@pytest.mark.parametrize("call, said", [
    (lambda x, w: cuda.rms_norm(x.double(), w.double()), "x is torch.float64: give float16, bfloat16 or float32"),
    (lambda x, w: cuda.rms_norm(x[:, :0], w[:0]), r"x is \(4, 0\): give \[..., E\] with E from 1"),
    (lambda x, w: cuda.rms_norm(x.new_empty(2, cuda.WIDEST + 1), w), r"x is \(2, 16385\)"),
    (lambda x, w: cuda.rms_norm(x[0, 0], w), r"x is \(\): give"),
    (lambda x, w: cuda.rms_norm(x[:1, :1].expand(2**31, 1), w[:1]), r"give at most 2147483647 rows"),
    (lambda x, w: cuda.rms_norm(x, w[1:]), r"weight is \(7,\) torch.float32 on .*: give \(8,\)"),
    (lambda x, w: cuda.layer_norm_gelu(x, w, w.to("meta")), r"bias is \(8,\) torch.float32 on meta"),
    (lambda x, w: cuda.layer_norm_gelu(x, w.half(), w), r"weight is \(8,\) torch.float16"),
    (lambda x, w: cuda.layer_norm_gelu(x, None, w), r"weight is None: give \(8,\) torch.float32"),
    (lambda x, w: cuda.swiglu(2.0, x), "a is 2.0: give a tensor"),
    (lambda x, w: cuda.swiglu(x, x[:2]), r"b is \(2, 8\) .*: give \(4, 8\)"),
    (lambda x, w: cuda.swiglu(x.int(), x.int()), r"a is torch.int32: give float16, bfloat16 or float32"),
    (lambda x, w: cuda.softmax_dropout(x, causal=True), r"scores is \(4, 8\): a causal mask needs \[..., S, S\]"),
    (lambda x, w: cuda.softmax_dropout(x, 1.0), "p is 1.0: give 0 <= p < 1"),
    (lambda x, w: cuda.softmax_dropout(x, -0.1), "p is -0.1"),
    (lambda x, w: cuda.softmax_dropout(x, math.nan), "p is nan"),
    (lambda x, w: cuda.softmax_dropout(x, 0.1, 2**63), "seed is 9223372036854775808"),
    (lambda x, w: cuda.attention(x, x, x), "q is torch.float32: give float16 or bfloat16"),
    (lambda x, w: cuda.attention(*[x.half()] * 3), r"q is \(4, 8\): give \[B, H, S, D\]"),
    (lambda x, w: cuda.attention(*[x.new_empty(1, 1, 4, 96).half()] * 3), r"\(1, 1, 4, 96\): give .* D 64 or 128"),
    (lambda x, w: cuda.attention(*[x.new_empty(1, 1, 0, 64).half()] * 3), "S from 1"),
    (lambda x, w: cuda.attention(*(x.new_empty(1, n, 4, 64).half() for n in (2, 1, 2))), r"k is \(1, 1, 4, 64\)"),
    (lambda x, w: cuda.attention(*[x.new_empty(1, 1, 4, 64).half().requires_grad_()] * 3), "no backward"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=DEVICE), torch.ones(8, device=DEVICE))


@pytest.mark.unit
@pytest.mark.parametrize("call", [
    lambda x: cuda.layer_norm_gelu(x, x[0], x[0]), lambda x: cuda.rms_norm(x, x[0]), lambda x: cuda.swiglu(x, x),
    cuda.softmax_dropout, lambda x: cuda.attention(*[x.half().view(1, 1, 2, 64)] * 3)])
def test_a_tensor_that_is_not_on_a_gpu_is_named(call):
    with pytest.raises(ValueError, match=r"is \(.*\) torch.float.* on cpu: a CUDA kernel needs a GPU"):
        call(torch.zeros(2, 64))


@pytest.mark.unit
def test_philox_is_philox():
    """Against the first of the known answers that its authors publish (Salmon et al., Random123)."""
    assert [f"{word:08x}" for word in philox(0, np.zeros(1))[0]] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]


@pytest.mark.unit
@pytest.mark.parametrize("width", [64, 128])
def test_tiles_in_shared_memory_have_no_bank_conflict_and_give_each_lane_its_elements(width):
    """ldmatrix by the rules of the PTX manual, over the addresses that attention.cu computes."""
    def swizzled(row, chunk):
        return row * width + (chunk ^ row % 8) * 8

    rows = 64
    tile = np.full(rows * width, -1)
    for row in range(rows):
        for chunk in range(width // 8):                      # as copy_rows stores it
            tile[swizzled(row, chunk):][:8] = row * width + chunk * 8 + np.arange(8)
    assert (np.sort(tile) == np.arange(rows * width)).all()

    def matrices(address):
        """[4, 8, 8]: lanes 8 i to 8 i + 7 give the rows of matrix i; each row is 16 bytes, eight of them 32 banks."""
        found = np.stack([tile[address(lane):][:8] for lane in range(32)]).reshape(4, 8, 8)
        banks = np.array([address(lane) // 8 % 8 for lane in range(32)]).reshape(4, 8)
        assert (np.sort(banks) == np.arange(8)).all()
        return found

    def block(row, column):                                  # of the matrix that the tile is
        return (row + np.arange(8))[:, None] * width + column + np.arange(8)

    for first in range(0, rows, 16):
        for d in range(width // 16):
            plain = matrices(lambda lane, first=first, d=d: first * width + (   # q as operand a; v transposed as b
                swizzled(lane % 16, lane // 16) ^ 16 * d))
            keys = matrices(lambda lane, first=first, d=d: first * width + (
                swizzled(lane % 8 + lane // 16 * 8, lane // 8 % 2) ^ 16 * d))
            for i, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
                assert (plain[i] == block(first + down, 16 * d + right)).all()
                assert (keys[i] == block(first + right, 16 * d + down)).all()


@pytest.fixture(scope="module")
def nvcc():
    if reason := extension.compiler_missing():
        pytest.skip(reason)
    return extension.cuda_home() / "bin" / "nvcc"


@pytest.fixture(scope="module")
def compiled(nvcc, tmp_path_factory):
    """source -> its finished compilation, one on each core; unoptimized, as that finds nothing more."""
    folder = tmp_path_factory.mktemp("objects")
    macros = [flag for flag in extension.cpp_extension.COMMON_NVCC_FLAGS if flag.startswith("-D")]

    def compile_one(source):
        return subprocess.run([nvcc, "-c", "-std=c++17", "-Xcicc", "-O0", "-Xptxas", "-O0", *macros, "-arch=sm_90",
                               source, "-o", folder / source.stem], capture_output=True, text=True, check=False)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(extension.SOURCES, pool.map(compile_one, extension.SOURCES), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("source", extension.SOURCES, ids=lambda path: path.name)
def test_each_source_compiles(source, compiled):
    """For compute capability 9.0, without a warning, under the macros that torch's builder defines."""
    done = compiled[source]
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.unit
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_one_line():
    extension.missing.cache_clear()
    reason = extension.missing()
    assert reason and "\n" not in reason
    with pytest.raises(RuntimeError, match=f"CUDA kernels can't run here: {reason}"):
        extension.load()


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """toolkit(version): a CUDA toolkit whose nvcc says it is `version`, found through CUDA_HOME."""
    def make(version):
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        extension.cuda_home.cache_clear()
        return tmp_path
    find = extension.cuda_home
    yield make
    find.cache_clear()


@pytest.mark.unit
def test_what_is_missing_is_named(toolkit, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert toolkit("12.4") == extension.cuda_home()
    assert extension.compiler_missing() == "nvcc is of CUDA 12.4, and torch of CUDA 13.2"
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(extension.cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(extension.cpp_extension, "get_cxx_compiler", lambda: sys.executable)
    assert extension.compiler_missing() == "there is no ninja: pip install ninja"
    monkeypatch.setattr(extension.cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert extension.compiler_missing() == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setattr(extension, "cuda_home", lambda: None)
    assert extension.compiler_missing().startswith("there is no nvcc")


@pytest.mark.unit
@pytest.mark.skipif(os.name != "posix", reason="the wrapper is a shell script")
def test_an_nvcc_that_is_a_wrapper_leads_to_its_toolkit(tmp_path, monkeypatch):
    home, wrapper = tmp_path / "cuda", tmp_path / "path" / "nvcc"
    for script, body in ((home / "bin" / "nvcc", f'echo "#$ TOP={home}/bin/.." >&2'),
                         (wrapper, f'exec {home}/bin/nvcc "$@"')):
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert extension.cuda_home.__wrapped__() == home


@pytest.mark.unit
def test_a_failed_build_says_its_first_error():
    log = "[1/2] nvcc a.cu\na.cu(3): warning: x\na.cu(7): error: y is undefined\na.cu(8): error: z\nninja: stopped"
    assert extension.first_error(log) == "a.cu(7): error: y is undefined"
    assert extension.first_error("In file x\nb.cpp:1:2: fatal error: no.h\n") == "b.cpp:1:2: fatal error: no.h"
    assert extension.first_error("Ninja is required\n") == "Ninja is required"


@pytest.mark.unit
def test_a_build_is_of_one_torch_one_gpu_and_these_sources(toolkit, tmp_path, monkeypatch):
    toolkit("13.0")
    for path in extension.FOLDER.glob("*.c*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(extension, "FOLDER", tmp_path)
    names = {extension._key((9, 0)), extension._key((8, 0))}
    (tmp_path / "rows.cuh").write_text("edited")
    names.add(extension._key((9, 0)))
    monkeypatch.setattr(torch, "__version__", "0.0")
    names.add(extension._key((9, 0)))
    assert len(names) == 4
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert str(extension._cache()) == "/somewhere"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(extension._cache()) == "/caches/transformer-block"


@pytest.mark.unit
def test_two_builds_of_one_folder_wait_for_each_other_and_not_for_the_dead(tmp_path):
    (tmp_path / "lock").touch()                              # what a build that was killed leaves behind
    order = []

    def second():
        with extension._alone(tmp_path):
            order.append("second")

    with extension._alone(tmp_path):
        assert not (tmp_path / "lock").exists()
        other = threading.Thread(target=second)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
