"""The techniques of a whole model, graph breaks and waits: found with their lines, applied where a machine can."""
import functools
import inspect
import logging
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant.analysis import waits_in
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import (
    EVERY,
    autocast,
    compiled,
    cuda_graph,
    fused_qkv,
    graph_break,
    host_sync,
    library_norm,
    sdpa,
    tf32,
)
from benchmarks.assistant.trace import Call, Trace, operator_name, trace
from benchmarks.examples import cnn, cnn_good, diffusion, diffusion_good, gpt, gpt_good
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.runtime import compiler
from tests.helpers.pasting import all_pasted, pasted

CPU, X = torch.device("cpu"), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
log = logging.getLogger(__name__)


def program_of(model, inputs=X):
    return read(model, Inputs.of(inputs))


def small_gpt(module=gpt):
    return module.of_size(vocabulary=64, width=32, heads=2, layers=3, batch=2, length=16)


@pytest.fixture(scope="module")
def of_gpt():
    model, inputs, _ = small_gpt()
    return program_of(model, inputs)


def line_of(words, module=gpt):
    (line,) = [number for number, line in enumerate(inspect.getsource(module).splitlines(), 1) if words in line]
    return line


@pytest.mark.integration
def test_every_planted_fault_is_found_at_its_line(of_gpt):
    found = [(technique.name, each.place.line if each.place else None, each.module, each.count)
             for technique in EVERY for each in technique.find(of_gpt)]
    item, talk = line_of(".item()"), line_of("log.debug")
    assert set(found) == {
        ("tf32", None, "", 1), ("autocast", None, "", 1), ("fp8", None, "", 1), ("compile", None, "", 1),
        ("cuda-graph", None, "", 1), ("checkpointing", None, "", 1),
        ("sdpa", line_of("scores = q @ k"), "blocks.*.attn", 3),
        ("library-norm", line_of("mean = x.mean"), "blocks.*.ln_1, blocks.*.ln_2", 6),
        ("library-norm", line_of("torch.rsqrt"), "norm", 1),
        ("fused-qkv", line_of("q = self.query"), "blocks.*.attn", 3),
        ("graph-break", talk, "", 1), ("graph-break", item, "blocks.*", 3), ("host-sync", item, "blocks.*", 3)}


SMALL = {cnn: {"channels": 16, "blocks": 2, "classes": 8, "batch": 8, "size": 32},
         diffusion: {"width": 32, "heads": 2, "layers": 2, "batch": 2, "size": 8}}
OF_THE_WHOLE = {"tf32", "cudnn-benchmark", "autocast", "compile", "cuda-graph", "checkpointing", "fp8"}
PLANTED = {
    cnn: {("channels-last", None), ("sdpa", "weights = torch.bmm(q, k)"), ("library-norm", "u = x.mean"),
          ("library-gelu", "return 0.5 * x"), ("library-silu", "return x * torch.sigmoid"),
          ("graph-break", "log.debug"), ("graph-break", "if torch.isnan"), ("host-sync", "if torch.isnan"),
          ("loop", "for image in x")},
    diffusion: {("channels-last", None), ("sdpa", "scores = torch.einsum"), ("library-norm", "mean = x.mean"),
                ("library-gelu", "h = 0.5 * h"), ("library-silu", "h = h * torch.sigmoid"),
                ("library-silu", "time * torch.sigmoid"), ("fused-qkv", "q = self.to_q"),
                ("graph-break", "if (t > 1000)"), ("host-sync", "if (t > 1000)")}}


@pytest.mark.integration
@pytest.mark.parametrize("module", PLANTED, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_faults_of_images_are_found_at_their_lines(module):
    model, inputs, _ = module.of_size(**SMALL[module])
    program = read(model, Inputs.of(inputs))
    found = {(technique.name, each.place.line if each.place else None) for technique in EVERY
             for each in technique.find(program) if technique.name not in OF_THE_WHOLE}
    assert found == {(name, line_of(words, module) if words else None) for name, words in PLANTED[module]}


@pytest.mark.integration
@pytest.mark.parametrize("good, module", [(cnn_good, cnn), (diffusion_good, diffusion)], ids=["cnn", "diffusion"])
def test_where_there_are_none_none_is_found(good, module):
    model, inputs, _ = good.of_size(**SMALL[module])
    program = read(model, Inputs.of(inputs))
    assert [(technique.name, each) for technique in EVERY for each in technique.find(program)
            if technique.name not in OF_THE_WHOLE and not each.why_not and each.place] == []


@pytest.mark.integration
@pytest.mark.parametrize("good, module", [(cnn_good, cnn), (diffusion_good, diffusion)], ids=["cnn", "diffusion"])
def test_a_model_with_faults_is_the_one_without(good, module):
    model, inputs, _ = module.of_size(**SMALL[module])
    other, *_ = good.of_size(**SMALL[module])
    values = model.state_dict()
    if module is diffusion:
        for block in range(SMALL[module]["layers"]):
            name = f"blocks.{block}.attention.to_"
            values[f"{name}qkv.weight"] = torch.cat([values.pop(f"{name}{each}.weight") for each in "qkv"])
    own = other.state_dict()
    other.load_state_dict({name: values[name if name in values else name.replace("head.", "head.fc.")] for name in own})
    assert validate(other, model, inputs).passed


@pytest.mark.integration
@pytest.mark.parametrize("technique", [tf32.TECHNIQUE, autocast.TECHNIQUE], ids=lambda each: each.name)
def test_different_numerics_are_declared(technique):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    rung = Rung(model, [technique])
    judgement = validate(rung, model, (X,), numerics=rung.plan.numerics)
    assert judgement.passed and judgement.numerics == {"tf32": "tf32", "autocast": "bfloat16"}[technique.name]
    assert torch.get_float32_matmul_precision() == "highest"


class Watched(nn.Linear):
    """Keeps the precision that its matmul saw."""

    def forward(self, x):
        self.seen = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
        return super().forward(x)


@pytest.mark.unit
@pytest.mark.parametrize("techniques, seen", [
    ([tf32.TECHNIQUE], ("high", False)), ([autocast.TECHNIQUE], ("highest", True)),
    ([tf32.TECHNIQUE, autocast.TECHNIQUE], ("high", True))])
def test_a_switch_is_on_inside_of_the_call_alone(techniques, seen):
    model = Watched(8, 8)
    Rung(model, techniques)(X)
    assert model.seen == seen
    assert (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")) == ("highest", False)


@pytest.mark.unit
def test_what_is_in_16_bits_or_allows_tf32_has_nothing_to_gain(callers):
    in_bf16 = program_of(nn.Linear(8, 8).bfloat16(), X.bfloat16())
    assert not autocast.find(in_bf16)
    in_fp32 = program_of(nn.Linear(8, 8))
    assert bool(tf32.find(in_fp32)) == (torch.get_float32_matmul_precision() == "highest")
    assert autocast.find(in_fp32)[0].reason == "1 matmul in float32 without autocast: 100 % of all FLOPs"


@pytest.mark.unit
def test_a_cpu_says_what_it_lacks(a_cpu_without_bfloat16):
    assert "no instructions" in autocast.missing(CPU)
    assert "NVIDIA GPU" in tf32.missing(CPU) and "GPU" in cuda_graph.missing(CPU)


@pytest.mark.integration
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_read_and_compiled_in_every_rung(in_place, fresh_dynamo):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    if in_place:
        model.compile(backend="eager")
        given = model
    else:
        given = torch.compile(model, backend="eager")
    program = program_of(given)
    (found,) = compiled.find(program)
    assert found.why_not == "it is compiled already"
    assert [call.name for call in program.trace.calls if call.is_matmul] == ["linear"]
    assert Rung(given, [autocast.TECHNIQUE]).plan.compiles


@pytest.mark.unit
def test_what_dynamo_can_not_run_is_said(monkeypatch):
    def refuses(model, **options):
        raise RuntimeError("not this one")
    monkeypatch.setattr(torch, "compile", refuses)
    (found,) = compiled.find(program_of(nn.Linear(8, 8)))
    assert found.why_not == "Dynamo can't run it: RuntimeError: not this one"


class Layers(nn.Module):
    """Layers of one class, in a list."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.integration
@pytest.mark.parametrize("inference", [False, True])
def test_layers_are_compiled_by_themselves_beside_the_whole_model(inference, monkeypatch, fresh_dynamo):
    """In a copy: the model stays as it was."""
    monkeypatch.setattr(compiled.compiler, "missing", lambda device: None)
    graphs, own = [], nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: (graphs.append(self), own(self, backend="eager")))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = Layers()
    program = program_of(model)
    program.is_inference = inference
    (what, words), *_ = compiled.seen_alone(program)
    assert what == "each of 3 Linear compiled by itself" and words.startswith("the first call takes ")
    assert len(graphs) == 3 and not set(graphs) & set(model.modules())
    assert not any(compiler.is_compiled(module) for module in model.modules())


@pytest.mark.unit
def test_where_no_layer_repeats_the_whole_model_alone_is_compiled():
    assert compiled.seen_alone(program_of(nn.Linear(8, 8))) == []


class Breaking(nn.Module):
    """Breaks its graph before anything else, by what is printed, and in the middle."""

    def forward(self, x):
        print("a leading break")
        x = x.sin()
        if x.sum() > 1e9:
            x = x + 1
        return x.cos()


@pytest.mark.integration
def test_a_leading_break_is_found_too(capsys):
    places = {each.place.line: each for each in graph_break.find(program_of(Breaking()))}
    first = inspect.getsourcelines(Breaking.forward)[1]
    assert set(places) == {first + 1, first + 3}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).sin()


@pytest.mark.integration
def test_a_recurrent_layer_names_what_lets_dynamo_capture_it():
    """By default the whole function around it is left out: `torch.compile` does nothing."""
    program = program_of(Recurrent())
    [found] = graph_break.find(program)
    assert compiled.ALLOW_RNN in found.reason and "captures nn.GRU" in found.reason
    [(what, words)] = compiled._with_recurrent_layers(program)
    assert what == "with nn.GRU compiled" and "times as fast as the model as it is" in words
    assert not torch._dynamo.config.allow_rnn
    [call] = cuda_graph.find(program)
    with pytest.raises(NotWritten, match=r"leaves out nn\.GRU, so .*make_graphed_callables"):
        cuda_graph.advice(program, call)
    with torch._dynamo.config.patch(allow_rnn=True):
        program = program_of(Recurrent())
        assert not graph_break.find(program) and program.graphs
        assert compiled._with_recurrent_layers(program) == []
        assert "reduce-overhead" in cuda_graph.advice(program, call).code


class Waiting(nn.Module):
    def forward(self, x):
        kept = x[x > 0]
        rows = x.nonzero()
        if x.sum() > 0:
            kept = kept * float(x.detach().max())
        return kept.sum() + rows.sum() + len(x.tolist())


@pytest.mark.integration
def test_every_wait_for_the_device_is_found():
    found = host_sync.find(program_of(Waiting()))
    first = inspect.getsourcelines(Waiting.forward)[1]
    assert {each.place.line - first for each in found} == {1, 2, 3, 4, 5}
    assert all("the host waits for it" in each.reason for each in found)


class Logging(nn.Module):
    def forward(self, x):
        began = time.time()
        y = x.sin()
        log.info("it took %.1f s", time.time() - began)
        return y


@pytest.mark.integration
def test_a_break_in_pythons_own_library_is_at_the_line_that_called_it():
    places = {each.place for each in graph_break.find(program_of(Logging()))}
    first = inspect.getsourcelines(Logging.forward)[1]
    assert {place.file for place in places} == {__file__} and {place.line - first for place in places} == {1, 3}


class WaitingToo(nn.Module):
    def forward(self, x):
        counts = torch.bincount((x[0] > 0).long())
        runs = torch.unique_consecutive(x[0].sign())
        rows = torch.unique(x.sign(), dim=0)
        same = torch.equal(x, x) + torch.allclose(x, x)
        inverse = torch.linalg.inv(x @ x.mT + 8 * torch.eye(len(x)))
        return inverse.sum() + counts.sum() + runs.sum() + rows.sum() + same


@pytest.mark.integration
def test_library_calls_that_wait_are_found():
    found = host_sync.find(program_of(WaitingToo()))
    first = inspect.getsourcelines(WaitingToo.forward)[1]
    assert {each.place.line - first for each in found} == {1, 2, 3, 4, 5}


class ToldItsSize(nn.Module):
    def forward(self, x, index):
        told = F.one_hot(index, 8).sum() + F.one_hot(index, num_classes=8).sum()
        told = told + torch.repeat_interleave(x[0], index, output_size=6).sum()
        asked = F.one_hot(index).sum()
        return told + asked + torch.repeat_interleave(x[0], index).sum()


@pytest.mark.integration
def test_a_call_that_is_told_the_size_of_its_result_does_not_wait():
    program = read(ToldItsSize(), Inputs.of((torch.randn(2, 3), torch.tensor([1, 2, 3]))))
    first = inspect.getsourcelines(ToldItsSize.forward)[1]
    assert {each.place.line - first for each in host_sync.find(program)} == {3, 4}


@pytest.mark.unit
@pytest.mark.parametrize("given, of_call, waits", [
    ("cuda", "cuda", True), ("cuda", "cpu", False), ("cpu", "cpu", True), ("cuda", "", True)])
def test_a_value_that_is_on_the_host_is_not_waited_for(given, of_call, waits):
    """As the lengths of a batch, whose largest is read by .item()."""
    call = Call("item", Place("model.py", 1), "", operators=["aten._local_scalar_dense.default"], device=of_call)
    assert bool(waits_in(Trace([call], given))) == waits


class SizesAsTensors(nn.Module):
    """Their quotient lies on the host, wherever the model is."""

    def forward(self, x):
        return x.view(torch.div(x.size(0), 2, rounding_mode="floor"), -1).sum()


@pytest.mark.unit
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_a_size_that_is_a_tensor_of_the_host_is_not_waited_for(device):
    recorded = trace(SizesAsTensors(), Inputs.of((torch.randn(4, 3, device=device),)))
    assert waits_in(recorded) == []


@pytest.mark.unit
@pytest.mark.parametrize("made, waits", [
    (lambda x: torch.tensor([x.size(0), 2]).sum(), False), (lambda x: torch.arange(x.size(0)).max() + 1, False),
    (lambda x: torch.arange(x.size(0), device=x.device).max(), True), (lambda x: (x > 0).sum(), True),
    (lambda x: torch.tensor(2).to(x.device), True), (lambda x: torch.tensor(2).to(torch.int32), False),
    (lambda x: x.new_tensor(2), True), (lambda x: (x > 0).sum() + torch.tensor(1), True)],
    ids=["numbers", "a range", "a range there", "a count", "moved there", "cast", "as the input", "both"])
def test_on_a_cpu_it_is_known_what_a_gpu_would_be_waited_for(made, waits):
    class Reading(nn.Module):
        def forward(self, x):
            return x * int(made(x).item())
    assert bool(waits_in(trace(Reading(), Inputs.of(torch.randn(4, 3))))) == waits


@pytest.mark.unit
@pytest.mark.parametrize("is_on_host", [True, False])
def test_what_is_given_tensors_of_the_host_alone_runs_there(is_on_host):
    """A call on a tensor of the device that reads one of the host meanwhile."""
    read = operator_name(torch.ops.aten._local_scalar_dense.default, [torch.tensor(1)], is_on_host)
    call = Call("view", Place("model.py", 1), "", operators=[read], device="cuda")
    assert bool(waits_in(Trace([call], "cuda"))) != is_on_host


@pytest.mark.integration
@pytest.mark.parametrize("technique", [graph_break.TECHNIQUE, host_sync.TECHNIQUE], ids=lambda each: each.name)
def test_what_a_person_mends_by_hand_can_be_pasted(technique, of_gpt, tmp_path):
    model, inputs, _ = small_gpt()
    for number, found in enumerate(technique.find(of_gpt)):
        advice = technique.advice(of_gpt, found)
        made = pasted(advice, gpt, tmp_path / f"pasted_{number}.py")
        other, *_ = small_gpt(made)
        assert validate(other, model, inputs).passed, advice.code
        left = [each.place.line for each in technique.find(program_of(other, inputs))]
        assert found.place.line not in left, advice.code


@pytest.mark.integration
@pytest.mark.parametrize("technique", [sdpa.TECHNIQUE, library_norm.TECHNIQUE, fused_qkv.TECHNIQUE],
                         ids=lambda each: each.name)
def test_what_is_applied_can_be_pasted_into_the_example(technique, of_gpt, tmp_path):
    """And is then the same function, in which nothing is left to find."""
    model, inputs, _ = small_gpt()
    advices = {advice.place: advice for each in technique.find(of_gpt) if (advice := technique.advice(of_gpt, each))}
    assert len(advices) == (2 if technique is library_norm.TECHNIQUE else 1)
    other, *_ = small_gpt(all_pasted(advices.values(), gpt, tmp_path / "pasted.py"))
    assert validate(other, model, inputs).passed
    assert all(each.why_not for each in technique.find(program_of(other, inputs)))


@pytest.mark.integration
def test_all_that_is_to_be_written_can_be_pasted_together(of_gpt, tmp_path):
    """of all faults, those of tf32, autocast, FP8, compile and CUDA graphs are then left: how it is called."""
    model, inputs, _ = small_gpt()
    advices = {advice.place: advice for technique in EVERY for each in technique.find(of_gpt)
               if not each.why_not and (advice := technique.advice(of_gpt, each)) and advice.place}
    assert len(advices) == 6
    other, *_ = small_gpt(all_pasted(advices.values(), gpt, tmp_path / "pasted.py"))
    assert validate(other, model, inputs).passed
    program = program_of(other, inputs)
    left = {technique.name for technique in EVERY for each in technique.find(program) if not each.why_not}
    assert left == {"tf32", "autocast", "fp8", "compile", "cuda-graph"}


@pytest.mark.integration
def test_the_good_gpt_has_no_fault_left():
    """What is left is how it is called: no verdict of a kind that a person writes can come of it."""
    model, inputs, _ = small_gpt(gpt_good)
    program = program_of(model, inputs)
    left = {technique.name for technique in EVERY for each in technique.find(program) if not each.why_not}
    assert left == {"tf32", "autocast", "fp8", "compile", "cuda-graph"}


@pytest.mark.unit
def test_reading_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    program_of(model)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and not model[0]._forward_hooks


class PrintsInALoop(nn.Module):
    """Dynamo skips its forward, and compiles the layers that it calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
            print(end="")
        return x


@pytest.mark.unit
def test_what_dynamo_can_not_run_is_captured_without_it():
    program = program_of(PrintsInALoop())
    [call] = cuda_graph.find(program)
    assert any(each.skips for each in program.breaks)
    assert "what lies between its graph breaks" in cuda_graph.find(program)[0].reason
    assert "graph breaks" not in cuda_graph.find(program_of(nn.Linear(8, 8)))[0].reason
    assert "reduce-overhead" in cuda_graph.advice(program, call).code          # of each layer
    program.not_captured = "Unsupported: a generator"
    with pytest.raises(NotWritten, match=r"can't run it: Unsupported: a generator, so .*make_graphed_callables"):
        cuda_graph.advice(program, call)
