"""Attention in generated spellings: nearly all are rewritten, and whatever is rewritten or written is right."""
import importlib.util
import os

import pytest
import torch

from benchmarks.assistant import pasting
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from tests.helpers import generated_attention as generated

COUNT = int(os.environ.get("SPELLINGS", "16"))
NUMBERS = torch.Generator().manual_seed(0)
X = torch.randn(2, generated.LENGTH, 2 * generated.WIDTH, generator=NUMBERS)
QKV = tuple(torch.randn(2, generated.HEADS, generated.LENGTH, generated.WIDTH, generator=NUMBERS) for _ in range(3))
MASK = torch.ones(generated.LENGTH, generated.LENGTH).tril()


def imported(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(module, name):
    torch.manual_seed(0)
    return getattr(module, name)()


@pytest.mark.stress
def test_generated_spellings_are_rewritten_and_written(tmp_path, record_property):
    every = generated.spellings(COUNT)
    names = [f"Spelling{number}" for number in range(len(every))]
    text = generated.HEAD + "".join(each.source(name) for each, name in zip(every, names, strict=True))
    module = imported(tmp_path / "spelt.py", text)
    not_rewritten, not_written, wrong = {}, {}, {}
    for each, name in zip(every, names, strict=True):
        model = made(module, name)
        inputs = ((X,) if each.projected else QKV) + ((MASK,) if each.mask == "optional" else ())
        program = read(model, Inputs.of(inputs))
        [found] = sdpa.find(program)
        if found.why_not:
            not_rewritten[each] = found.why_not
            continue
        others = [Rung(model, [sdpa.TECHNIQUE])]
        try:
            advice = sdpa.advice(program, found)
            others.append(made(imported(tmp_path / f"{name}.py", pasting.pasted(text, [advice])), name))
        except NotWritten as error:
            not_written[each] = str(error)
        for other in others:
            for given in (inputs, inputs[:-1]) if each.mask == "optional" and other is not others[0] else (inputs,):
                judgement = validate(other, model, given, cotangents=1)
                if not judgement.passed:
                    wrong[each, type(other).__name__] = judgement.failure
    record_property("seen", f"of {COUNT} spellings of attention {COUNT - len(not_rewritten)} are rewritten, "
                            f"{COUNT - len(not_rewritten) - len(not_written)} written")
    assert not wrong, wrong
    assert len(not_rewritten) <= 0.1 * COUNT, not_rewritten
    assert len(not_rewritten) + len(not_written) <= 0.1 * COUNT, not_written
