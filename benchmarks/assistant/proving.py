"""Every piece of advice, before it is said: pasted into a copy of the files, and held against the model as it is."""
import torch

from benchmarks.assistant.circumstances import Circumstance, circumstances
from benchmarks.assistant.loading import Source
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice
from benchmarks.assistant.written import written_out
from benchmarks.measure.judge import Judge
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth, free_memory
from common.outcome import UserError, in_a_line


class Prover:
    """Holds edited copies of a person's files against the model as it is, on the inputs given and on others.

    The truths in each circumstance are found once, when the first piece is tried.
    """

    def __init__(self, source: Source, task: Task, device: torch.device, seed: int, inference: bool = False):
        self.source, self.task, self.device, self.seed, self.inference = source, task, device, seed, inference
        self._truths: list[tuple[Circumstance, Truth]] | None = None

    def why_not(self, advice: Advice) -> str:
        """What is wrong with a piece, in words; "" where it is right wherever it was tried."""
        try:
            with written_out(self.source, [advice], self.device) as (written, left_out):
                if left_out:
                    return "there can be no copy of its file to try it in"
                if not self._known():
                    return "the model can't be judged on any inputs that it takes"
                for circumstance, truth in self._known():
                    with circumstance.entered(written, self.task.model):
                        judgement = Judge(written, truth, fresh=False).judge()
                    if not judgement.passed:
                        return ": ".join(filter(None, [circumstance.words, judgement.failure]))
        except UserError as error:
            return str(error).splitlines()[0]
        except Exception as error:                             # whatever edited code raises
            return f"it raises {in_a_line(error)}"
        finally:
            free_memory()
        return ""

    def _known(self) -> list[tuple[Circumstance, Truth]]:
        if self._truths is None:
            self._truths = self._found()
        return self._truths

    def _found(self) -> list[tuple[Circumstance, Truth]]:
        model, truths = self.task.model, []
        others = [Circumstance(words, inputs, model.training) for words, inputs in self.task.others.items()]
        for circumstance in (*circumstances(model, self.task.given), *others):
            work = Work(circumstance.inputs, None, 1, self.seed, self.inference)
            try:
                with circumstance.entered(model):
                    truths.append((circumstance, Truth(model, work)))
            except Exception:                                  # it can't be judged there, or there is no room for it
                free_memory()
        return truths
