"""All that is to be written, written into a copy of a person's files: it runs, and theirs stay as they are."""
import builtins
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize, verdicts
from benchmarks.assistant.loading import load
from benchmarks.assistant.pasting import apart, pasted
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice
from benchmarks.assistant.techniques import library_norm, sdpa
from benchmarks.assistant.written import AsWritten, written_out
from common.outcome import UserError

CPU = torch.device("cpu")
FILES = {
    "my_model.py": """
        from pathlib import Path

        import torch
        from torch import nn
        from common.layers import Attention
        from norms import Norm

        def build():
            width = int((Path(__file__).parent / "width.txt").read_text())
            torch.manual_seed(0)
            return nn.Sequential(Norm(width), Attention()), (torch.randn(2, 16, width),)
    """,
    "norms.py": """
        import torch
        from torch import nn

        class Norm(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(width))

            def forward(self, x):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
    """,
    "width.txt": "32",
    "common/layers.py": """
        from torch import nn

        class Attention(nn.Module):
            def forward(self, x):
                q = k = v = x.unflatten(-1, (2, -1)).transpose(1, 2)
                weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
                y = weights @ v
                return y.transpose(1, 2).flatten(2)
    """,
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model, a neighbour, data, and a package called as one of this suite; imports are put back."""
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    yield tmp_path
    for name in set(sys.modules) - set(before):            # torch imports some of its own late, and only once
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.integration
def test_what_is_to_be_written_is_timed_beside_what_was_promised(project, studies_in_seconds, monkeypatch):
    monkeypatch.setattr(verdicts, "WORTH_IT", 0.0)                # how fast it is, no test says
    source = load(f"{project}/my_model.py:build")
    result = optimize(source, rounds=6, techniques=(sdpa.TECHNIQUE, library_norm.TECHNIQUE))
    assert result.to_write(), result
    written = result.written
    assert written.reached_ms and written.gain and not written.why_not and not written.left_out, written
    assert "reached  " in str(result) and " times as fast as promised" in str(result)
    assert "written out" in {line["benchmark"]["extra_info"]["case"]["variant"].get("measured")
                             for line in result.lines}


@pytest.mark.integration
def test_each_of_several_pieces_is_timed_alone_too(project, studies_in_seconds, monkeypatch):
    monkeypatch.setattr(verdicts, "WORTH_IT", 0.0)
    (project / "both.py").write_text(textwrap.dedent(FILES["norms.py"]).replace("Norm", "First") + textwrap.dedent("""

        class Second(First):
            def forward(self, x):
                return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

        def build():
            return nn.Sequential(First(32), Second(32)), (torch.randn(2, 16, 32),)
    """))
    result = optimize(load(f"{project}/both.py:build"), quick=True, rounds=6, techniques=(library_norm.TECHNIQUE,))
    assert {name for name in result.pieces.results if "as written" in name} == {
        "library-norm, as written", "library-norm, as written at both.py:11 alone",
        "library-norm, as written at both.py:16 alone"}
    asked = {name: {check.question for check in result.judgements[name]}
             for name in result.pieces.results if "as written" in name}
    assert asked == {                                      # what each piece means alone, the prover has told
        "library-norm, as written": {"meaning", "precision"},
        "library-norm, as written at both.py:11 alone": {"precision"},
        "library-norm, as written at both.py:16 alone": {"precision"}}


@pytest.mark.integration
def test_the_copies_run_and_what_is_yours_stays(project):
    """In a folder of copies, edited, that is gone afterwards; packages and neighbours are edited too."""
    source = load(f"{project}/my_model.py:build")
    model, (x,) = source()
    texts = {path: path.read_text() for path in project.rglob("*.py")}
    modules, path = set(sys.modules), list(sys.path)
    advices = [Advice("return nn.functional.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6)",
                      Place(f"{project}/norms.py", 11)),
               Advice("y = nn.functional.scaled_dot_product_attention(q, k, v)",
                      Place(f"{project}/common/layers.py", 7, 8)),
               Advice("never", Place(f"{project}/common/layers.py", 8)), Advice("never", Place("/elsewhere.py", 1))]
    with written_out(source, advices, CPU) as (written, left_out):
        assert left_out == advices[2:]
        files = {type(each).forward.__code__.co_filename for each in written.module}
        assert not any(file.startswith(str(project)) for file in files), files
        for file, words in zip(sorted(files), ("scaled_dot_product_attention", "rms_norm"), strict=True):
            assert words in Path(file).read_text()
        torch.testing.assert_close(written(x), model(x))
    assert {path: path.read_text() for path in project.rglob("*.py")} == texts
    assert set(sys.modules) == modules and sys.path == path
    assert not any(Path(file).exists() for file in files)


@pytest.mark.integration
def test_a_file_of_another_folder_is_edited_in_a_copy_too(project, monkeypatch):
    """A package beside the folder of the build file, which it finds by sys.path."""
    (project / "scripts").mkdir()
    (project / "scripts" / "build.py").write_text("from layers.norms import Norm\nimport torch\n\ndef build():\n"
                                                  "    return Norm(8), (torch.randn(2, 8),)\n")
    (project / "layers").mkdir()
    (project / "norms.py").rename(project / "layers" / "norms.py")
    monkeypatch.syspath_prepend(str(project))
    source = load(f"{project}/scripts/build.py:build")
    model, (x,) = source()
    model.weight.data.fill_(1.0)
    advice = Advice("return nn.functional.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6)",
                    Place(f"{project}/layers/norms.py", 11))
    modules = set(sys.modules)
    with written_out(source, [advice], CPU) as (written, left_out):
        assert not left_out
        written.module.weight.data.fill_(1.0)
        file = type(written.module).forward.__code__.co_filename
        assert not file.startswith(str(project)) and "rms_norm" in Path(file).read_text()
        torch.testing.assert_close(written(x), model(x))
    assert set(sys.modules) == modules and "rms_norm" not in (project / "layers" / "norms.py").read_text()


@pytest.mark.integration
def test_a_copy_that_is_not_imported_is_left_out(project):
    """The build file itself says where its neighbour is: what would be tried is the neighbour as it was."""
    (project / "layers").mkdir()
    (project / "norms.py").rename(project / "layers" / "own_norms.py")
    (project / "build.py").write_text(f"import sys\nsys.path.insert(0, {str(project / 'layers')!r})\nimport torch\n"
                                      "from own_norms import Norm\n\ndef build():\n"
                                      "    return Norm(8), (torch.randn(2, 8),)\n")
    source = load(f"{project}/build.py:build")
    source()
    advice = Advice("return x", Place(f"{project}/layers/own_norms.py", 11))
    with written_out(source, [advice], CPU) as (_, left_out):
        assert left_out == [advice]


@pytest.mark.integration
def test_code_that_does_not_run_is_reported(project):
    source = load(f"{project}/my_model.py:build")
    with pytest.raises(UserError, match=r"my_model.py can't be imported: SyntaxError"), \
            written_out(source, [Advice("return (", Place(f"{project}/norms.py", 11))], CPU):
        pass


@pytest.mark.integration
def test_it_is_called_as_the_code_says():
    before = torch.get_float32_matmul_precision()
    model = nn.Linear(32, 32)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    call = 'with torch.autocast("cpu", torch.bfloat16):\n    output = model(**inputs)'
    once = 'torch.set_float32_matmul_precision("high")\nmodel = lambda _m=model, **k: _m(**k)'
    written = AsWritten(model, once, call)
    assert written(input=torch.randn(4, 32)).dtype == torch.bfloat16
    assert seen == ["high"] and torch.get_float32_matmul_precision() == before
    assert list(dict(written.named_parameters())) == ["module.weight", "module.bias"]


@pytest.mark.unit
def test_of_two_pieces_for_one_line_the_first_is_pasted():
    first, second, other = Advice("a = 1", Place("f", 1, 2)), Advice("b = 2", Place("f", 2)), Advice("c", Place("g", 2))
    assert apart([first, second, other]) == [first, other]
    third = Advice("c = 3\nd = 4", Place("f", 4))
    assert pasted("x\ny\nif z:\n  z\n", [first, third]) == "a = 1\nif z:\n  c = 3\n  d = 4\n"


@pytest.mark.unit
def test_what_the_code_needs_is_imported(tmp_path):
    """Below the docstring, where the file has it not."""
    path = tmp_path / "norms.py"
    text = '"""Norms."""\nfrom __future__ import annotations\nimport torch\n\n\ndef norm(x):\n    return torch.f(x)\n'
    path.write_text(text)
    advice = Advice("x = torch.abs(x)\nreturn F.rms_norm(x, (2,))", Place(str(path), 7))
    assert advice.imports == ["from torch.nn import functional as F"]
    lines = pasted(text, [advice]).splitlines()
    assert lines[1:4] == ["from __future__ import annotations", *advice.imports, "import torch"]
    assert lines[-2:] == ["    x = torch.abs(x)", "    return F.rms_norm(x, (2,))"]
