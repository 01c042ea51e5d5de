"""The technique of one's own that benchmarks/README.md shows, as it stands there."""
import importlib
import re

import pytest
import torch

from benchmarks.assistant import optimize
from benchmarks.assistant.project import ROOT


@pytest.mark.integration
def test_the_technique_of_the_page_is_found_applied_and_judged(tmp_path, monkeypatch, studies_in_seconds):
    page = (ROOT / "benchmarks" / "README.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TECHNIQUE = " in each]
    technique, _, _ = code.partition("\n\n\nclass Gate")
    assert len(technique.splitlines()) <= 40
    path = tmp_path / "silu.py"
    path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    names = vars(importlib.import_module("silu"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), names["Gate"]())
    (one,) = optimize(model, (torch.randn(4, 8),), quick=True, techniques=[names["TECHNIQUE"]]).opportunities
    assert one.verdict in ("take", "no gain") and one.speedup
    assert one.file == str(path) and "sigmoid" in code.splitlines()[one.line - 1]
    assert one.advice.code == "return F.silu(x)"
