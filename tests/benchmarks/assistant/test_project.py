"""A person's file in any folder: it finds its own neighbours, packages called `common` and `benchmarks` among them."""
import builtins
import os
import subprocess
import sys
import textwrap
import types

import pytest

from benchmarks.assistant import look
from benchmarks.assistant.loading import load
from benchmarks.assistant.program import read
from benchmarks.assistant.project import ROOT, Project
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from common.outcome import UserError

FILES = {
    "my_model.py": """
        import torch
        from torch import nn
        from common.layers import Layer
        from benchmarks import SIZE
        import neighbour

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = Layer(SIZE)

            def forward(self, x):
                return neighbour.twice(self.layer(x))

        def build():
            from common import late_in_build
            return Model(), (torch.randn(4, late_in_build.SIZE),)
    """,
    "neighbour.py": """
        from common import SCALE

        def twice(x):
            return SCALE * x
    """,
    "common/__init__.py": "SCALE = 2.0",
    "common/late_in_build.py": "SIZE = 32",
    "common/layers.py": """
        from torch import nn
        from torch.nn import functional as F
        FACTOR = 3.0

        class Layer(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.linear = nn.Linear(size, size)

            def forward(self, x):
                return F.softmax(_scaled(self.linear(x)), dim=-1)

        def _scaled(x):
            return FACTOR * x
    """,
    "benchmarks.py": "SIZE = 32",
}


def assistant(folder, *options, target="my_model.py:build"):
    """Of a project in that folder, in a process of its own: (exit status, stdout, stderr)."""
    command = [sys.executable, "-m", "benchmarks", "assistant", f"{folder}/{target}", "--device", "cpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.integration
def test_a_project_with_packages_of_the_same_names_finds_its_own(project):
    status, out, err = assistant(project, "--look")
    assert status == 0, err
    assert "layers.py:12" in out, out
    assert "no graph break" in out, out


@pytest.fixture
def imports(monkeypatch, tmp_path):
    """What loading somebody's project changes is put back."""
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):            # torch imports some of its own late, and only once
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.integration
def test_an_import_inside_a_forward_is_refused(project, imports):
    (project / "neighbour.py").write_text("def twice(x):\n    from common import SCALE\n    return SCALE * x\n")
    with pytest.raises(UserError, match="imports common while the model runs: import it at the top"):
        look(load(f"{project}/my_model.py:build"))


@pytest.mark.integration
def test_a_file_may_be_called_as_a_module_of_this_suite(project, imports):
    ours = sys.modules["benchmarks"]
    os.rename(project / "benchmarks.py", project / "size.py")
    text = (project / "my_model.py").read_text().replace("from benchmarks", "from size")
    (project / "benchmarks.py").write_text(text)
    model, (x,) = load(f"{project}/benchmarks.py:build")()
    assert model(x).shape == (4, 32) and sys.modules["benchmarks"] is ours


ATTENTION = """
import torch
from torch import nn

class ByHand(nn.Module):
    def forward(self, q, k, v):
        weights = torch.softmax(q @ k.mT / 4, dim=-1)
        return weights @ v

def build():
    return ByHand(), tuple(torch.randn(1, 2, 8, 16) for _ in range(3))
"""


@pytest.mark.integration
def test_a_file_that_is_named_with_dots_is_read_once(imports, tmp_path):
    """Its lines are the same ones to Dynamo and to the trace: the softmax is in the graph, and nowhere else."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "by_hand.py").write_text(ATTENTION)
    model, inputs = load(f"{tmp_path}/inner/../by_hand.py:build")()
    (found,) = sdpa.find(read(model, Inputs.of(inputs)))
    assert found.place.name == "by_hand.py:7-8" and not found.why_not


@pytest.mark.unit
def test_what_a_package_from_elsewhere_keeps_in_the_folder_is_no_neighbour(tmp_path, monkeypatch):
    """Inductor's code is in modules of torch's, and TORCHINDUCTOR_CACHE_DIR may lie below a model: torch stays there.

    A package without an __init__.py has no file, and is one.
    """
    def imported(name, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    imported("torch._inductor.kept", __file__=str(tmp_path / "cache" / "kept.py"))
    imported("near", __file__=str(tmp_path / "near.py"))
    imported("bare", __path__=[str(tmp_path / "bare")])
    imported("bare.inside", __file__=str(tmp_path / "bare" / "inside.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert Project(tmp_path).neighbours() == {"near", "bare"}
