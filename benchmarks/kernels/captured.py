"""What a compiler made of a fused operation: its source, its kernels, and what they move, saved and explained.

    python -m benchmarks fusions --capture DIR         # saves for each experiment, at its largest size
    python -m benchmarks fusions --explain DIR         # prints what is there

DIR/<experiment>/ holds Inductor's source of the forward and of the backward (Triton on a GPU, C++ on a CPU), the PTX of
the kernels in benchmarks/kernels/ that ran, and metadata.json: shapes, versions, device, times and rates, and the
registers, spills and shared memory of every Triton kernel of which these are known.
"""
import ast
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.runtime.iteration import BACKWARD, as_list, taking_gradients
from common.text import figures, table

METADATA = "metadata.json"
FUSED = re.compile(r"\b(?:triton_[a-z]+|cpp)_fused_(\w+?)_\d+\b")        # Inductor names a kernel after its operations


def folder_of(folder: Path, experiment: str) -> Path:
    return folder / re.sub(r"\W+", "-", experiment).strip("-").lower()


class Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that each operator reads and writes meanwhile."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


def inductor_sources(call: Callable, given: list[Tensor]) -> dict[str, str]:
    """Pass -> the source that Inductor makes: of the forward as it is timed, without gradients, and of the backward.

    The forward of a training step, which also saves what its backward needs, is another one; it is left out.
    """
    from torch._inductor.utils import fresh_cache, run_and_get_code

    def forward() -> None:
        with torch.no_grad():
            compiled(*given)

    def backward() -> None:
        ys = taking_gradients(as_list(compiled(*given)))
        torch.autograd.grad(ys, taking_gradients(given), [torch.ones_like(y) for y in ys])

    sources = {}
    for run in (forward, backward):
        compiled = torch.compile(call, fullgraph=True, dynamic=False)
        with fresh_cache():
            torch._dynamo.reset()
            sources[run.__name__] = run_and_get_code(run)[1][-1]
    return sources


def kernels_of(source: str, itemsize: int) -> list[tuple[str, int | None]]:
    """(name, bytes of its tensors) of every kernel that a source of Inductor launches, in order.

    Sizes are those of the buffers that the source allocates and of the arguments that it checks; of the latter the
    dtype is not written down, and taken for `itemsize` bytes. What is updated in place counts once. Bytes are None for
    a library's kernel, whose own traffic the source does not tell.
    """
    reader = _Reader(itemsize)
    reader.visit(ast.parse(source))
    return reader.kernels


class _Reader(ast.NodeVisitor):
    """Goes through the statements of a source in order."""

    def __init__(self, itemsize: int):
        self.itemsize = itemsize
        self.sizes: dict[str, int] = {}
        self.kernels: list[tuple[str, int | None]] = []

    def visit_Assign(self, node: ast.Assign) -> None:                     # a name that ast gives, as the next one
        if not isinstance(node.targets[0], ast.Name):
            return
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Name):                                   # buf1 = buf0; del buf0  # reuse
            self.sizes[name] = self.sizes.get(value.id, 0)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            if value.func.id == "reinterpret_tensor":
                self.sizes[name] = self.sizes.get(getattr(value.args[0], "id", ""), 0)
            elif value.func.id.startswith("empty_strided"):
                given = value.args + [keyword.value for keyword in value.keywords]
                dtype = next(part.attr for part in given if isinstance(part, ast.Attribute))
                self.sizes[name] = math.prod(ast.literal_eval(value.args[0])) * getattr(torch, dtype).itemsize

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        name = getattr(function, "id", "")
        if name == "assert_size_stride":
            self._argument(node.args[0], node.args[1])
        elif name == "assert_size_stride_grouped":
            arguments, shapes = cast(ast.Tuple, node.args[0]), cast(ast.Tuple, node.args[1])
            for argument, shape in zip(arguments.elts, shapes.elts, strict=True):
                self._argument(argument, shape)
        elif FUSED.fullmatch(name):
            self.kernels.append((name, sum(self.sizes.get(getattr(argument, "id", ""), 0) for argument in node.args)))
        elif name in ("extern_kernels", "aten"):
            self.kernels.append((ast.unparse(node.func), None))

    def _argument(self, name: ast.expr, shape: ast.expr) -> None:
        if isinstance(name, ast.Name):
            self.sizes[name.id] = math.prod(ast.literal_eval(shape)) * self.itemsize


def triton_kernels(module) -> dict[int, tuple[str, Any]]:
    """id -> (name, compiled kernel) of every Triton kernel of a module, or None, compiled so far in this process."""
    kernels = {}
    for name, value in vars(module).items() if module else ():
        for cache in getattr(value, "device_caches", {}).values():
            compiled = cache[0] if isinstance(cache, tuple) else cache
            for kernel in compiled.values():
                kernels[id(kernel)] = name.strip("_"), kernel
    return kernels


def statistics(kernel) -> dict[str, int | None]:
    """Registers of a thread, bytes that spill and shared memory of a block; None where Triton does not tell."""
    metadata = getattr(kernel, "metadata", None)
    return {"registers": getattr(kernel, "n_regs", None), "spills": getattr(kernel, "n_spills", None),
            "shared bytes": getattr(metadata, "shared", None), "warps": getattr(metadata, "num_warps", None)}


def save(folder: Path, name: str, call: Callable, given: list[Tensor], measured: dict[str, Any],
         compiled_kernels: list[tuple[str, Any]]) -> None:
    """Write everything of one experiment.

    `measured` is what its study knows: device and versions, "bytes at the least" by pass, and "levels": level -> pass
    -> ms by way of launching, rate, and kernels of a call. Raises OSError where it can't be written.
    """
    place = folder_of(folder, name)
    place.mkdir(parents=True, exist_ok=True)
    modes = list(measured["bytes at the least"])
    metadata = measured | {
        "experiment": name, "shapes": [list(t.shape) for t in given], "dtype": str(given[0].dtype), "kernels": [],
        "eager bytes": {mode: _eager_bytes(call, given, mode) for mode in modes}, "inductor": {}}
    for mode, source in inductor_sources(call, given).items():
        (place / f"inductor_{mode}.py").write_text(source)
        kernels = kernels_of(source, given[0].dtype.itemsize)
        metadata["inductor"][mode] = [{"name": kernel, "bytes": moved} for kernel, moved in kernels]
    for number, (kernel, compiled) in enumerate(compiled_kernels):
        if ptx := getattr(compiled, "asm", {}).get("ptx"):
            (place / f"triton_{kernel}_{number}.ptx").write_text(ptx)
        metadata["kernels"].append({"name": kernel} | statistics(compiled))
    (place / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")


def _eager_bytes(call: Callable, given: list[Tensor], mode: str) -> int:
    """What the operators of one pass read and write."""
    with Traffic() as traffic, torch.set_grad_enabled(mode == BACKWARD):
        ys = taking_gradients(as_list(call(*given)))
        if mode == BACKWARD:
            traffic.bytes = 0
            torch.autograd.grad(ys, taking_gradients(given), [y.detach() for y in ys])
    return traffic.bytes


def explain(folder: Path, width: int | None = None) -> str:
    """What `save` left in a folder, in words. Raises ValueError where there is nothing that `save` writes."""
    blocks = []
    for path in sorted([*folder.glob(METADATA), *folder.glob(f"*/{METADATA}")]):          # of one experiment, of many
        try:
            blocks.append(_in_words(json.loads(path.read_text()), width))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not what --capture writes: {type(error).__name__}: {error}") from None
    if not blocks:
        raise ValueError(f"{folder} holds no {METADATA}: give a folder that --capture wrote")
    return "\n\n".join(blocks)


def _in_words(metadata: dict, width: int | None) -> str:
    """One experiment: a table of its levels, what the compiler fused, and the Triton kernels."""
    elements = math.prod(metadata["shapes"][0])
    rows, fused = [], []
    for mode, least in metadata["bytes at the least"].items():
        inductor = metadata.get("inductor", {}).get(mode, [])
        moved_by = {"eager": metadata["eager bytes"][mode], "torch.compile": _sum_of_bytes(inductor)}
        for level, passes in metadata["levels"].items():
            if mode in passes:
                moved = moved_by.get(level)
                times = [figures(1e3 * passes[mode]["ms"][launch]) if launch in passes[mode]["ms"] else "n/a"
                         for launch in ("eager", "graph")]
                rows.append([mode, level, f"{passes[mode]['kernels']:.0f}",
                             "n/a" if moved is None else f"{moved / elements:.1f}", f"{least / elements:.1f}", *times])
        if mode in metadata["levels"].get("torch.compile", {}):
            for number, kernel in enumerate(inductor, 1):
                operations = ", ".join(FUSED.findall(kernel["name"])) or kernel["name"]
                fused.append(f"  {mode}, kernel {number}: {operations}")
    shapes = " and ".join(" x ".join(map(str, shape)) for shape in metadata["shapes"])
    headers = ["pass", "level", "kernels", "bytes an element", "at the least", "us, eager", "us, graph"]
    lines = [f"{metadata['experiment']} of {shapes}, {metadata['dtype'].removeprefix('torch.')}, {metadata['device']}",
             "", table(rows, headers, width, keys=2), "",
             "Bytes count the tensors of each kernel (operator) once, however often it reads them."]
    if fused:
        lines += ["", "what torch.compile fused:", *fused]
    if metadata["kernels"]:
        lines += ["", _kernels_table(metadata["kernels"], width)]
    return "\n".join(lines)


def _sum_of_bytes(inductor: list[dict]) -> int | None:
    """Of all kernels; None where one of them is a library's, or there are none."""
    moved = [kernel["bytes"] for kernel in inductor]
    return None if not moved or None in moved else sum(moved)


def _kernels_table(kernels: list[dict], width: int | None) -> str:
    keys = ("registers", "spills", "shared bytes", "warps")
    rows: dict[tuple, None] = {}           # one may be compiled twice, for a number that 16 divides and one it does not
    for kernel in kernels:
        cells = ["n/a" if kernel.get(key) is None else str(kernel[key]) for key in keys]
        rows[(kernel["name"], *cells)] = None
    return table([list(row) for row in rows], ["Triton kernel", *keys], width)
