"""Attention in CUDA C++, rung by rung: a file for each idea, to be read beside the one before it.

    for rung in RUNGS:
        y, log_sum = attention(rung, q, k, v, causal=True)
    for rung in BACKWARD_RUNGS:
        dq, dk, dv = gradients(rung, q, k, v, y, log_sum, dy, causal=True)

    python -m benchmarks.kernels.cuda.series            # each rung once, under ncu: attention/README.md has the command

The files are those of the folder attention/, the backward's in attention/backward/. Each compiles alone, by nvcc, into
a library of one function. They share series.cuh (how one is called), and wgmma.cuh and tma.cuh (Hopper's instructions).
A library is kept in the folder of the other kernels' builds.
"""
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.outcome import EXIT

from ..inputs import described, require_dtype, require_like
from . import extension

FOLDER = extension.FOLDER / "attention"
BACKWARD_FOLDER = FOLDER / "backward"
ARCHITECTURE = "sm_90a"                   # Hopper, with the instructions that no later GPU has
HOPPER = (9, 0)
WIDTHS = (64, 128)
MOST_HEADS = 2**16 - 1                    # of all sequences: blocks along a grid's second dimension
ROWS_PADDED_TO = 128                      # PADDED_TO in backward.cuh
FLAGS = ["-O3", "-std=c++17", "-lineinfo", f"-gencode=arch=compute_90a,code={ARCHITECTURE}", "-shared", "-Xcompiler",
         "-fPIC"]


@dataclass(frozen=True)
class Rung:
    """One file of the series."""
    path: Path

    @property
    def number(self) -> int:
        return int(self.path.stem.partition("_")[0])

    @property
    def name(self) -> str:
        """ "5 swizzled", as tables name it."""
        return self.path.stem.replace("_", " ")


def _rungs(folder: Path) -> tuple[Rung, ...]:
    return tuple(sorted(map(Rung, folder.glob("[0-9]*.cu")), key=lambda rung: rung.number))


RUNGS, BACKWARD_RUNGS = _rungs(FOLDER), _rungs(BACKWARD_FOLDER)
POINTERS = "q", "k", "v", "y", "log_sum", "dy", "dq", "dk", "dv", "dq_sums", "row_numbers"


class _Arguments(ctypes.Structure):
    """As in series.cuh."""
    _fields_ = [*((name, ctypes.c_void_p) for name in POINTERS),
                *((name, ctypes.c_int32) for name in ("batch", "heads", "kv_heads", "length", "width", "is_bfloat16",
                                                      "is_causal")),
                ("stream", ctypes.c_void_p), ("facts", ctypes.c_void_p)]


class Facts(ctypes.Structure):
    """What a kernel takes: registers of a thread, bytes of shared memory and threads of a block, how many blocks a
    multiprocessor holds at once, and what of a thread's registers was spilled to memory, in bytes."""
    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    spilled_bytes: int
    _fields_ = [(name, ctypes.c_int32) for name in ("registers", "shared_bytes", "threads", "blocks", "spilled_bytes")]


def missing() -> str:
    """Why the series can't be built and run here, in one line; empty where it can."""
    if reason := extension.missing():
        return reason
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return "the GPU has compute capability {}.{}, and the series is written for 9.0 (Hopper)".format(*capability)
    return ""


def attention(rung: Rung, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(D)) v [B, H, S, D], the logarithm of each row's sum of exp(score) [B, H, S] in FP32).

    q [B, H, S, D], k and v [B, G, S, D] with D 64 or 128 and H a multiple of G, of one dtype (float16, bfloat16) on one
    GPU; H / G heads of q share one of k and v. `causal` hides from query i all keys behind i. Scores and sums are in
    FP32, and what multiplies v is rounded to 16 bits. No gradients. Raises ValueError for anything else, RuntimeError
    where the series can't run.
    """
    _require(q, k, v)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise ValueError("a rung of the forward has no gradients: call it under torch.no_grad(), or detach q, k and v")
    _require_hopper(q)
    q, k, v = (_aligned(each) for each in (q, k, v))
    y, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel():
        _call(rung, {"q": q, "k": k, "v": v, "y": y, "log_sum": log_sum}, causal)
    return y, log_sum


def gradients(rung: Rung, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, dy: Tensor, causal: bool = True
              ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), like q, k and v, by a rung of the backward.

    q, k, v, `causal` and errors as `attention`'s, y and log_sum its results, dy the gradient of y and like it. Sums are
    in FP32; probabilities and the gradients of scores are rounded to 16 bits before they are multiplied. dq is summed
    in an order that may differ between calls.
    """
    _require(q, k, v)
    require_like("y", y, q, name_of_x="q")
    require_like("dy", dy, q, name_of_x="q")
    expected = q.shape[:3], torch.float32, q.device
    if not isinstance(log_sum, Tensor) or (log_sum.shape, log_sum.dtype, log_sum.device) != expected:
        raise ValueError(f"log_sum is {described(log_sum)}: give what `attention` returned")
    _require_hopper(q)
    B, H, S, D = q.shape
    given = {name: _aligned(each.detach()) for name, each in
             (("q", q), ("k", k), ("v", v), ("y", y), ("log_sum", log_sum), ("dy", dy))}
    found = {"dq": torch.empty_like(given["q"]), "dk": torch.empty_like(given["k"]), "dv": torch.empty_like(given["v"])}
    if q.numel():
        padded = -(-S // ROWS_PADDED_TO) * ROWS_PADDED_TO
        room = {"dq_sums": q.new_empty(B, H, S, D, dtype=torch.float32),
                "row_numbers": q.new_empty(B, H, padded, 2, dtype=torch.float32)}
        _call(rung, given | found | room, causal)
    return found["dq"], found["dk"], found["dv"]


def facts(rung: Rung, width: int, dtype: torch.dtype) -> Facts:
    """Of its kernel for heads of that width, on this GPU; nothing runs. Raises RuntimeError where it can't."""
    if reason := missing():
        raise RuntimeError(f"the series can't run here: {reason}")
    found, x = Facts(), torch.empty(1, 1, 1, width, dtype=dtype, device="cuda")
    _call(rung, dict.fromkeys(POINTERS, x), False, found)
    return found


def _call(rung: Rung, tensors: Mapping[str, Tensor], causal: bool, facts: Facts | None = None) -> None:
    """On q's GPU and its current stream. Raises RuntimeError with CUDA's error."""
    q, k = tensors["q"], tensors["k"]
    B, H, S, D = q.shape
    with torch.cuda.device(q.device):
        pointers = (tensors[name].data_ptr() if name in tensors else None for name in POINTERS)
        arguments = _Arguments(
            *pointers, B, H, k.size(1), S, D, q.dtype == torch.bfloat16, causal,
            torch.cuda.current_stream().cuda_stream, ctypes.addressof(facts) if facts is not None else None)
        if error := _library(rung).run(ctypes.byref(arguments)):
            raise RuntimeError(f"{rung.path.name}: {error.decode()}")


def _require(q: Tensor, k: Tensor, v: Tensor) -> None:
    require_dtype("q", q, (torch.float16, torch.bfloat16))
    if q.ndim != 4 or q.size(3) not in WIDTHS or not 0 < q.size(2) < 2**24:
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, S, D] with S from 1 to {2**24 - 1} and D 64 or 128")
    if not isinstance(k, Tensor) or k.ndim != 4 or not k.size(1) or q.size(1) % k.size(1):
        raise ValueError(f"k is {tuple(getattr(k, 'shape', ()))} beside q {tuple(q.shape)}: give [B, G, S, D], H a "
                         "multiple of G")
    require_like("k", k, q, (q.size(0), k.size(1), *q.shape[2:]), name_of_x="q")
    require_like("v", v, k, name_of_x="k")
    if q.size(0) * q.size(1) > MOST_HEADS:
        raise ValueError(f"q is {tuple(q.shape)}: give at most {MOST_HEADS} heads in all sequences together")


def _require_hopper(q: Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"q is on {q.device}: a CUDA kernel needs a GPU")
    if reason := missing():
        raise RuntimeError(f"the series can't run here: {reason}")


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and from a multiple of 16 bytes on: what copies take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@functools.cache
def _library(rung: Rung) -> ctypes.CDLL:
    library = ctypes.CDLL(str(built(rung)))
    library.run.restype = ctypes.c_char_p
    return library


def built(rung: Rung) -> Path:
    """Its library, from the cache where it is there. Raises RuntimeError with nvcc's first error."""
    folder = extension.cache_folder() / rung.path.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{rung.path.stem}-{_key(rung)}.so"
    with extension.alone(folder):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                unfinished = Path(beside) / path.name
                done = compiled(rung, unfinished)
                if done.returncode:
                    raise RuntimeError(
                        f"{rung.path.name} does not build: {extension.first_error(done.stdout + done.stderr)}")
                os.replace(unfinished, path)
    return path


def compiled(rung: Rung, into: Path, *more_flags: str) -> subprocess.CompletedProcess[str]:
    """What nvcc said. Raises RuntimeError where there is none."""
    if (home := extension.cuda_home()) is None:
        raise RuntimeError("there is no nvcc: install CUDA's toolkit, or set CUDA_HOME")
    return subprocess.run([str(home / "bin" / "nvcc"), *FLAGS, *more_flags, str(rung.path), "-o", str(into)],
                          capture_output=True, text=True, check=False)


def _key(rung: Rung) -> str:
    """Of all that a build depends on."""
    content = hashlib.sha256(repr((FLAGS, extension.nvcc_version())).encode())
    for path in [rung.path, *sorted(extension.FOLDER.rglob("*.cuh"))]:
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()[:16]


def main() -> int:
    """Each rung once, at a size that fills a GPU: what a profiler watches. Returns the exit status."""
    if reason := missing():
        print(f"series: skipped: {reason}", file=sys.stderr)
        return EXIT["skipped"]
    q, k, v, dy = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for rung in RUNGS:
        y, log_sum = attention(rung, q, k, v, causal=False)
    for rung in BACKWARD_RUNGS:
        gradients(rung, q, k, v, y, log_sum, dy, causal=False)
    torch.cuda.synchronize()
    return EXIT["ok"]


if __name__ == "__main__":
    sys.exit(main())
