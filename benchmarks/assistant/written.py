"""All that a report says to write, written: the edited files, called as it says. Does it reach what was promised?"""
import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.assistant import switches
from benchmarks.assistant.combination import Interval
from benchmarks.assistant.loading import Source
from benchmarks.assistant.pasting import apart, copied
from benchmarks.assistant.project import folder_of_imports
from benchmarks.assistant.sections import Said
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice
from benchmarks.records.read import verdict
from common.text import figures, ratio

NAME = "written out"


@dataclass(frozen=True)
class WrittenOut:
    """What it makes of the model, beside what the same techniques promised, in the same rounds."""
    promised_ms: float | None = None
    reached_ms: float | None = None
    gain: Interval | None = None               # how many times as fast as was promised
    why_not: str = ""
    by_hand: Sequence[str] = ()                # techniques that are in it, and not in what was promised
    left_out: Sequence[Advice] = ()            # it was not pasted: two at one place, or a file of no copy

    def section(self) -> Said:
        lines = []
        if self.promised_ms:
            lines.append(("promised", f"{figures(self.promised_ms)} ms, by what the techniques taken do together"))
        if self.reached_ms:
            times = f": {ratio(self.gain)} times as fast as promised{verdict(*self.gain[1:])}" if self.gain else ""
            more = f"; {', '.join(self.by_hand)} count in this one alone" if self.by_hand else ""
            lines.append(("reached", f"{figures(self.reached_ms)} ms{times}{more}"))
        if self.why_not:
            lines.append(("not reached", self.why_not))
        if self.left_out:
            lines.append(("without", ", ".join(str(advice.place) for advice in self.left_out)))
        return Said(NAME, lines)


class AsWritten(nn.Module):
    """A model that is called by code in words: some of it runs once, and some at every call."""

    def __init__(self, model: nn.Module, once: str, call: str):
        super().__init__()
        self.module = model
        names = {"torch": torch, "model": model}
        with contextlib.ExitStack() as as_before:              # the code may set others
            for switch in switches.EVERY:
                as_before.enter_context(switch.at(switch.get()))
            exec(once, names)
            settings = tuple(switch.get() for switch in switches.EVERY)
        vars(self)["in_its_settings"] = switches.held(settings, _as_written)
        vars(self)["called"] = names["model"]                  # no child: its parameters have one name each
        vars(self)["code"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["in_its_settings"](self, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "AsWritten":
        """A copy with tensors of its own, not compiled: it says what the code means, not what a compiler does."""
        made = AsWritten(copy.deepcopy(self.module, memo), "", vars(self)["code"])
        vars(made)["in_its_settings"] = vars(self)["in_its_settings"]
        memo[id(self)] = made
        return made


def _as_written(written: AsWritten, *args: Any, **kwargs: Any) -> Any:
    own = vars(written)
    names = {"torch": torch, "model": own["called"], "inputs": kwargs or args}
    exec(own["code"], names)
    return names["output"]


@contextlib.contextmanager
def written_out(source: Source, advices: Sequence[Advice], device: torch.device
                ) -> Iterator[tuple[AsWritten, Sequence[Advice]]]:
    """The model of a person's files with all of this pasted in, called as it says; and what could not be pasted.

    Raises UserError where the edited files can't be imported, or build nothing.
    """
    placed = [advice for advice in advices if advice.place]
    folders = {advice: folder for advice in placed if (folder := _folder(source, advice))}
    pasted = apart(list(folders))
    left_out = [advice for advice in placed if advice not in pasted]
    calls = [advice.code for advice in advices if advice.is_call]
    once = [advice.code for advice in advices if not advice.place and not advice.is_call]
    wanted = dict.fromkeys([source.project.folder, *(folders[advice] for advice in pasted)])
    with copied(list(wanted), pasted) as copies, source.copied_to(copies) as copy_of_it:
        task = Task.of(copy_of_it()).on(device)
        left_out += [advice for advice in pasted if not _was_imported(advice, folders[advice], copies)]
        call = calls[0] if calls else f"output = model({'**' if task.given.kwargs else '*'}inputs)"
        yield AsWritten(task.model, "\n".join(once), call), left_out


def _was_imported(advice: Advice, folder: Path, copies: Mapping[Path, Path]) -> bool:
    """Whether the copy of its file was: one that a person's code puts first in sys.path is not."""
    assert advice.place is not None
    copy_of_it = copies[folder] / Path(advice.place.file).relative_to(folder)
    return str(copy_of_it) in {getattr(module, "__file__", None) for module in list(sys.modules.values())}


def _folder(source: Source, advice: Advice) -> Path | None:
    """From which its file is imported; None where no copy of it could be."""
    assert advice.place is not None
    file = advice.place.file
    return source.project.folder if source.project.has(file) else folder_of_imports(file)
