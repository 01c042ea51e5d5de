"""What a compiler made of a fused operation: its source, its kernels, and what they move, saved and explained.

    python -m benchmarks.fusions --capture DIR         # saves for each experiment, at its largest size
    python -m benchmarks.fusions --explain DIR         # prints what is there

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

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import command
from .operations import differentiable, outputs
from .records import Run

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
        ys = differentiable(outputs(compiled, given))
        torch.autograd.grad(ys, differentiable(given), [torch.ones_like(y) for y in ys])

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
        self.itemsize, self.sizes, self.kernels = itemsize, {}, []

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
                dtype = next(part.attr for part in [*value.args, *(k.value for k in value.keywords)]
                             if isinstance(part, ast.Attribute))
                self.sizes[name] = math.prod(ast.literal_eval(value.args[0])) * getattr(torch, dtype).itemsize

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        name = getattr(function, "id", "")
        if name == "assert_size_stride":
            self._argument(node.args[0], node.args[1])
        elif name == "assert_size_stride_grouped":
            for argument, shape in zip(node.args[0].elts, node.args[1].elts, strict=True):
                self._argument(argument, shape)
        elif FUSED.fullmatch(name):
            self.kernels.append((name, sum(self.sizes.get(getattr(argument, "id", ""), 0) for argument in node.args)))
        elif name in ("extern_kernels", "aten"):
            self.kernels.append((ast.unparse(node.func), None))

    def _argument(self, name: ast.expr, shape: ast.expr) -> None:
        if isinstance(name, ast.Name):
            self.sizes[name.id] = math.prod(ast.literal_eval(shape)) * self.itemsize


def triton_kernels(module) -> dict[int, tuple[str, object]]:
    """id -> (name, compiled kernel) of every Triton kernel of a module, or None, compiled so far in this process."""
    found = {}
    for name, value in vars(module).items() if module else ():
        for cache in getattr(value, "device_caches", {}).values():
            compiled = cache[0] if isinstance(cache, tuple) else cache
            found |= {id(kernel): (name.strip("_"), kernel) for kernel in compiled.values()}
    return found


def statistics(kernel) -> dict[str, int | None]:
    """Registers of a thread, bytes that spill and shared memory of a block; None where Triton does not tell."""
    metadata = getattr(kernel, "metadata", None)
    return {"registers": getattr(kernel, "n_regs", None), "spills": getattr(kernel, "n_spills", None),
            "shared bytes": getattr(metadata, "shared", None), "warps": getattr(metadata, "num_warps", None)}


def save(folder: Path, name: str, call: Callable, given: list[Tensor], least: dict[str, float], runs: dict[str, Run],
         compiled_kernels: list[tuple[str, object]]) -> None:
    """Write everything of one experiment; `least` is the bytes that a pass must move, `runs` its records by level.

    Raises OSError where it can't be written.
    """
    place = folder_of(folder, name)
    place.mkdir(parents=True, exist_ok=True)
    info = next(iter(runs.values())).lines[-1]
    found = {"experiment": name, "shapes": [list(t.shape) for t in given], "dtype": str(given[0].dtype),
             "device": info["runners"][0]["name"],
             "versions": {package: entry["version"] for package, entry in info["dependencies"].items()},
             "bytes at the least": least, "levels": {}, "kernels": []}
    for level, run in runs.items():
        copies = {mode: run.find(mode, "work rate", "eager")["metric"]["extra_info"]["copies"] for mode in least
                  if run.best(mode)}
        found["levels"][level] = {mode: {
            "ms": {launch: run.median(mode, launch) for launch in ("eager", "graph") if run.samples(mode, launch)},
            "rate": run.value(mode, "work rate", run.best(mode)),
            "kernels": run.value(mode, "launches") / count} for mode, count in copies.items()}
    for mode in least:
        with Traffic() as traffic, torch.set_grad_enabled(mode == "backward"):
            ys = differentiable(outputs(call, given))
            if mode == "backward":
                traffic.bytes = 0
                torch.autograd.grad(ys, differentiable(given), [y.detach() for y in ys])
        found.setdefault("eager bytes", {})[mode] = traffic.bytes
    for mode, source in inductor_sources(call, given).items():
        (place / f"inductor_{mode}.py").write_text(source)
        found.setdefault("inductor", {})[mode] = [{"name": kernel, "bytes": moved} for kernel, moved in
                                                  kernels_of(source, given[0].dtype.itemsize)]
    for number, (kernel, compiled) in enumerate(compiled_kernels):
        text = getattr(compiled, "asm", {}).get("ptx")
        if text:
            (place / f"triton_{kernel}_{number}.ptx").write_text(text)
        found["kernels"].append({"name": kernel} | statistics(compiled))
    (place / METADATA).write_text(json.dumps(found, indent=1) + "\n")


def explain(folder: Path, width: int | None = None) -> str:
    """What `save` left in a folder, told. Raises ValueError where there is nothing, or it is not what `save` writes."""
    blocks = []
    for path in sorted([*folder.glob(METADATA), *folder.glob(f"*/{METADATA}")]):          # of one experiment, of many
        try:
            blocks.append(_told(json.loads(path.read_text()), width))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not what --capture writes: {type(error).__name__}: {error}") from None
    if not blocks:
        raise ValueError(f"{folder} holds no {METADATA}: give a folder that --capture wrote")
    return "\n\n".join(blocks)


def _told(found: dict, width: int | None) -> str:
    elements = math.prod(found["shapes"][0])
    rows, fused = [], []
    for mode, least in found["bytes at the least"].items():
        for level, passes in found["levels"].items():
            if mode not in passes:
                continue
            one, moved = passes[mode], None
            if level == "eager":
                moved = found["eager bytes"][mode]
            if level == "torch.compile" and found.get("inductor", {}).get(mode):
                inductor = found["inductor"][mode]
                if not any(kernel["bytes"] is None for kernel in inductor):
                    moved = sum(kernel["bytes"] for kernel in inductor)
                names = [", ".join(FUSED.findall(kernel["name"])) or kernel["name"] for kernel in inductor]
                fused += [f"{mode}, kernel {n}: {name}" for n, name in enumerate(names, 1)]
            rows.append([mode, level, f"{one['kernels']:.0f}",
                         "n/a" if moved is None else f"{moved / elements:.1f}", f"{least / elements:.1f}",
                         *("n/a" if launch not in one["ms"] else command.figures(1e3 * one["ms"][launch])
                           for launch in ("eager", "graph"))])
    lines = [f"{found['experiment']} of {' and '.join(' x '.join(map(str, shape)) for shape in found['shapes'])}, "
             f"{found['dtype'].removeprefix('torch.')}, {found['device']}", "",
             command.table(rows, ["pass", "level", "kernels", "bytes an element", "at the least", "us, eager",
                                  "us, graph"], width, keys=2)]
    lines += ["", "Bytes count the tensors of each kernel (operator) once, however often it reads them."]
    if fused:
        lines += ["", "what torch.compile fused:", *(f"  {line}" for line in fused)]
    if found["kernels"]:
        # One may be compiled twice, for a number that 16 divides and one that it does not.
        kernels = dict.fromkeys((kernel["name"], *("n/a" if kernel.get(key) is None else str(kernel[key])
                                                   for key in ("registers", "spills", "shared bytes", "warps")))
                                for kernel in found["kernels"])
        lines += ["", command.table([list(kernel) for kernel in kernels],
                                    ["Triton kernel", "registers", "spills", "shared bytes", "warps"], width)]
    return "\n".join(lines)
