"""Block masks of FlexAttention that a forward builds: at which line, how often, and what they hide.

`create_block_mask` asks every score whether it is hidden. It is no torch function, so no trace of calls holds it: one
more forward runs under Python's own profiler, and what it is given is read from its frame.
"""
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place
from benchmarks.assistant.trace import here
from benchmarks.measure.keeping import kept

GIVEN = ("mask_mod", "B", "H", "Q_LEN", "KV_LEN", "device", "BLOCK_SIZE")
ROWS = 32                              # pairs of queries, one behind the other, of which is asked what they see
_CODE: CodeType = flex.create_block_mask.__code__
_FILE, _COMPILED = _CODE.co_filename, torch._dynamo.eval_frame.__file__        # whose frame calls what is compiled


@dataclass
class Built:
    """The block masks that are built at one line."""
    place: Place
    is_compiled: bool = False          # create_block_mask is
    given: list[dict[str, Any]] = field(default_factory=list)          # its arguments, of each mask
    identities: list[Any] = field(default_factory=list)                # of each mask: equal where it is the same one

    def build(self, create: Callable = flex.create_block_mask) -> flex.BlockMask:
        """The first of them."""
        return create(**self.given[0])

    @property
    def different(self) -> int:
        """How many masks there are among them."""
        return len(set(self.identities))

    def separates_documents(self, device: torch.device) -> bool:
        """Whether it hides other documents, and in a document at most the future: each query sees one run of keys, and
        the next query either a run that begins at the same key or one behind it. Asked of some queries of the first
        mask, in its first sample and head.
        """
        queries, keys, mask_mod = (self.given[0][name] for name in ("Q_LEN", "KV_LEN", "mask_mod"))
        if queries < 2:
            return False
        rows = torch.linspace(0, queries - 2, min(ROWS, queries - 1), device=device).long()
        both = torch.stack([rows, rows + 1], -1).flatten()
        sees = flex.create_mask(lambda b, h, q, k: mask_mod(b, h, both[q], k), 1, 1, len(both), keys, str(device))
        runs = [_run_of(row) for row in sees[0, 0].cpu()]
        if None in runs or len({run[0] for run in runs if run}) < 2:
            return False
        pairs = zip(runs[::2], runs[1::2], strict=True)
        return all(after[0] in (before[0], before[1] + 1) for before, after in pairs if before and after)


def block_masks_of(program: Program) -> list[Built]:
    """Those that a forward builds."""
    if not any(place.file == _FILE for call in program.trace.calls for place in call.through):
        return []
    found: dict[Place, Built] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code is not _CODE:
            return
        place, _ = here(frame)
        if place is not None:
            given = {name: frame.f_locals[name] for name in GIVEN}
            is_compiled = frame.f_back is not None and frame.f_back.f_code.co_filename == _COMPILED
            built = found.setdefault(place, Built(place, is_compiled))
            built.given.append(given)                      # which keeps its tensors: another one may not get their ids
            built.identities.append(_identity(list(given.values())))
    before = sys.getprofile()
    with kept(program.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        sys.setprofile(look)
        try:
            program.inputs.as_trained().call(program.model)
        finally:
            sys.setprofile(before)
    return list(found.values())


def _identity(value: Any) -> Any:
    """Equal of two functions of the same code that close over the same tensors, with the same values."""
    if isinstance(value, FunctionType):
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        by_default = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return value.__code__, _identity(closure), _identity(by_default)
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return value if isinstance(value, int | float | str | None | torch.device) else id(value)


def _run_of(sees: Tensor) -> tuple[int, int] | None:
    """The first and the last key, where it sees all between them; None where it does not, or sees none."""
    keys = sees.nonzero().flatten()
    if not len(keys) or int(keys[-1] - keys[0]) + 1 != len(keys):
        return None
    return int(keys[0]), int(keys[-1])
