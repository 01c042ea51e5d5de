"""What is timed: built, calibrated and checked first, and never otherwise than it is then timed."""
import math
import types

import pytest
import torch
from torch import nn

from common import BlockConfig, parameters, steps
from common.block import block_work, oracle
from common.block.traits import DYNAMIC, Traits
from common.measure import measurement, subject
from common.outcome import Failed
from common.report.result import Result, Row
from common.runtime import compiler
from common.runtime.iteration import BOTH, FORWARD
from tests.helpers.blocks import calibrate, case, subject_of

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
CONFIG = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=4, amp_dtype=None)


def result_of(matmul: str, config: BlockConfig = CONFIG, **changes) -> Result:
    """A run's result, in which nothing is known yet but what is multiplied in."""
    return Result("a block", config, "float32", {"device": "cpu"}, matmul=matmul, **changes)


def teller(said: list[str]):
    """What `prepare` says, as a person would see it, goes to the list."""
    return lambda phase, detail="": said.append(phase.said(detail))


def prepared(step: int, config: BlockConfig = CONFIG, dtype=torch.float32, build=None, said=None, **options):
    """(subject, result) of a step on a CPU; what is said on the way goes to the list `said`."""
    traits = steps.load(step).traits
    result = Result("a block", config, str(dtype).removeprefix("torch."), {"device": "cpu"}, step=step, traits=traits)
    say = teller(said if said is not None else [])
    return subject.prepare(build or steps.load(step).build, dtype, CPU, 0, result, say, **options), result


# --------------------------------------------------------------------------------------------------------- the check


@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_the_block_in_the_mode_it_was_in(training, uncompiled):
    """A block left in eval mode would be timed without its dropout, which is off meanwhile."""
    config = CONFIG.replace(dropout=0.5)
    values, x, _ = case(config)
    block = steps.load(2).build(config, values, "cpu").train(training)
    modes = []
    block.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    subject.check(block, x, values, result_of("float32", config))
    assert block.training == training and set(modes) == {False}


def test_without_dropout_the_block_is_checked_as_it_is_timed(uncompiled):
    """In training mode: another mode would be another graph of a compiled block."""
    values, x, _ = case(CONFIG)
    block = steps.load(2).build(CONFIG, values, "cpu")
    modes = []
    block.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    subject.check(block, x, values, result_of("float32"))
    assert set(modes) == {True}


FINE = {"output": 1.0, "branch": 1e-6, "input gradient": 1e-6, "attn.proj.bias": 1e-6,
        "mlp.fc.bias": 1e-6}


@pytest.fixture
def errors_are(monkeypatch):
    """errors_are(one_sequence, whole_batch): what a comparison with FP64 gives."""
    def set_up(one_sequence, whole_batch):
        monkeypatch.setattr(oracle, "checks", lambda *_: (one_sequence, whole_batch))
    return set_up


def checked(result: Result, x=None) -> Result:
    """The result, after a check of a block of which nothing is computed."""
    block = nn.Linear(1, 1)
    block.config = CONFIG
    subject.check(block, torch.zeros(1, 4, 6) if x is None else x, {}, result)
    return result


@pytest.mark.parametrize("off", ["branch", "input gradient", "mlp.fc.bias"])
def test_every_error_has_its_gate_in_the_check(off, errors_are):
    """Each alone beyond its gate fails the run and is named; of the parameters the one farthest beyond its own."""
    wrong = FINE | {off: 1e-4}
    for one_sequence, whole_batch in ((wrong, FINE), (FINE, wrong)):
        errors_are(one_sequence, whole_batch)
        with pytest.raises(Failed, match=off):
            checked(result_of("float32"))


def test_what_the_check_found_is_recorded_with_its_gates(errors_are):
    """Of each the run that is worse, and of all parameters the worst; the output has no gate."""
    errors_are(FINE | {"branch": 2e-6}, FINE | {"output": 2.0, "mlp.fc.bias": 3e-6})
    result = checked(result_of("float32"))
    assert result.errors == {"output": (2.0, None), "branch": (2e-6, 3e-6), "input gradient": (1e-6, 9e-6),
                             "parameter gradient": (3e-6, 9e-6)}
    assert result.worst_parameter == "mlp.fc.bias"


def test_each_run_of_the_check_has_the_gate_of_its_tokens(errors_are):
    """A CPU's LayerNorm adds up 16-bit gradients of all tokens: what many may be off by, those of one may not."""
    name, x = "ln_1.bias", torch.zeros(4, 256, 6, dtype=torch.float16)
    of_one, of_all = (oracle.gate("float16", name, x, tokens) for tokens in (256, 1024))
    assert of_all == 2 * of_one
    fine = dict.fromkeys(("output", "branch", "input gradient", name), 1e-6)

    def check(first, second):
        errors_are(fine | {name: first}, fine | {name: second})
        return checked(result_of("float16"), x).errors["parameter gradient"]

    assert check(0.9 * of_one, 1.5 * of_one) == (0.9 * of_one, of_one)              # the nearer one to its gate
    assert check(0.1 * of_one, 1.5 * of_one) == (1.5 * of_one, of_all)
    with pytest.raises(Failed, match=r"ln_1\.bias"):
        check(1.5 * of_one, 0.1 * of_one)


@pytest.mark.parametrize("matmul, emulated, gate", [
    ("float8", False, 6e-2), ("float8", True, 7.5e-2), ("bfloat16", True, 8e-3), ("float32", True, 3e-6),
])
def test_only_emulated_fp8_has_the_gates_of_small_shapes(matmul, emulated, gate, errors_are):
    """Without FP8 an emulation multiplies as PyTorch does."""
    fine = dict.fromkeys(FINE, 1e-9)
    errors_are(fine, fine)
    assert checked(result_of(matmul, emulated=emulated)).errors["branch"] == (1e-9, gate)
    errors_are(fine | {"branch": 1.01 * gate}, fine)
    with pytest.raises(Failed, match="the branch is off"):
        checked(result_of(matmul, emulated=emulated))


@pytest.mark.parametrize("matmul, hint", [("float16", True), ("bfloat16", False), ("float32", False)])
def test_what_is_not_finite_in_float16_has_a_way_out(matmul, hint, errors_are):
    errors_are(FINE | {"branch": math.inf}, FINE)
    with pytest.raises(Failed, match="the branch is missing or not finite") as error:
        checked(result_of(matmul))
    assert str(error.value).endswith("try --amp-dtype bfloat16") == hint


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_an_error_that_is_no_number_fails_with_or_without_a_gate(error):
    """A NaN compares as no larger than any gate."""
    for gate in (1.0, None):
        with pytest.raises(Failed, match=r"^the branch is missing or not finite, so$"):
            subject.require("branch", error, gate, ", so")


def test_an_error_is_required_to_be_within_its_gate():
    subject.require("branch", 1e-3, 1e-3)
    subject.require("output", 1e3, None)
    with pytest.raises(Failed, match=r"^the branch is off by 1\.1e-03 against FP64, the gate is 1\.0e-03$"):
        subject.require("branch", 1.1e-3, 1e-3)


# ----------------------------------------------------------------------------------------------------- the calibration


class Scaled(nn.Module):
    """As a block of delayed scaling: two scales in use, which the third backward settles, and one that is not."""
    config = CONFIG

    def __init__(self, never=(), fresh=None, error=None):
        super().__init__()
        self.weight, self.calls, self.never = nn.Parameter(torch.ones(())), 0, never
        self.fresh, self.error = fresh, error
        self.state = types.SimpleNamespace(scale=torch.ones(3), amax_history=torch.tensor([[1.0, 1.0, 0.0]]))
        self.fp8_meta = {"scaling_fwd": self.state}

    def forward(self, x):
        if self.error:
            raise self.error
        y = x * self.weight
        y.register_hook(self.backward_ran)
        return y

    def backward_ran(self, gradient):
        self.calls += 1
        for place in {0, 1} - set(self.never):
            self.state.scale[place] = 7.0 if self.calls == 3 else 1.0


def test_scales_are_calibrated_by_three_backwards():
    """Of another x: the one that is timed asks for no gradient, and none is left behind."""
    x, block = torch.ones(2), Scaled()
    calibrate(block, x, x)
    assert block.calls == 3 and block.weight.grad is None
    assert not x.requires_grad and x.grad is None


def test_every_scale_in_use_must_be_calibrated():
    x = torch.ones(2)
    with pytest.raises(Failed, match="an FP8 scale is still 1 after 3 forward\\+backwards"):
        calibrate(Scaled(never=(1,)), x, x)


def test_where_no_scale_is_in_use_nothing_is_calibrated():
    """FP8 was asked for, and no tensor went through it."""
    x, block = torch.ones(2), Scaled()
    block.state.amax_history.zero_()
    with pytest.raises(Failed, match="no FP8 scale is in use"):
        calibrate(block, x, x)
    block.fp8_meta = {}
    with pytest.raises(Failed, match="no FP8 scale is in use"):
        calibrate(block, x, x)


@pytest.mark.parametrize("fresh, afterwards", [(None, None), (True, False)])
def test_weights_that_are_cached_are_no_longer_fresh(fresh, afterwards):
    """From here on the weights of the last call are used; where none are cached they are quantized at every call."""
    x, block = torch.ones(2), Scaled(fresh=fresh)
    calibrate(block, x, x)
    assert block.fresh is afterwards


def test_attention_in_fp8_that_no_kernel_does_is_skipped():
    """Transformer Engine says so by a ValueError; without attention in FP8 one is an error of ours."""
    x, block = torch.ones(2), Scaled(error=ValueError("No dot product attention\nmore of it"))
    with pytest.raises(ValueError, match="more of it"):
        calibrate(block, x, x)
    block.config = CONFIG.replace(fp8_attention=True)
    with pytest.raises(NotImplementedError) as skipped:
        calibrate(block, x, x)
    assert str(skipped.value) == "No dot product attention"


# ----------------------------------------------------------------------------------------------------- the compilation


def test_compiling_is_timed_from_nothing_twice_and_of_both_passes(monkeypatch):
    """On another x, which the compiled code is not specialised for: it is the timed one's like."""
    seen = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: seen.append("reset"))
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    module.config = CONFIG
    module.register_forward_hook(lambda *_: seen.append("both" if torch.is_grad_enabled() else "forward"))
    took = subject.compilation_time(subject_of(module, x, x))
    assert seen == ["reset", "forward", "both"] * 2 and took.cold_s > 0 and took.warm_s > 0
    assert not x.requires_grad and x.grad is None and module.weight.grad is None


# ---------------------------------------------------------------------------------------------------------- preparing


@pytest.mark.parametrize("step", [0, 2])
def test_a_block_is_built_and_checked_before_anything_else(step):
    said = []
    prepared_block, result = prepared(step, said=said)
    assert said == ["building", "checking: against FP64"]
    assert (result.matmul, result.residual, result.engine) == ("float32", "float32", "PyTorch")
    assert result.compilation is None and not result.emulated
    assert result.errors.keys() == {"output", "branch", "input gradient", "parameter gradient"}
    assert prepared_block.gates == oracle.GATES["float32"]
    assert prepared_block.workload.tokens == CONFIG.tokens and prepared_block.config is CONFIG
    (x,), (dy,) = prepared_block.inputs, prepared_block.cotangents
    assert x.shape == dy.shape == (2, 16, 32) and not torch.equal(x, dy)


def test_fp8_scales_are_calibrated_before_the_check():
    """Step 4 under autocast; without FP8 it has none."""
    said, seen = [], []
    _, result = prepared(4, CONFIG.replace(amp_dtype=torch.bfloat16), said=said)
    assert said == ["building", "calibrating: FP8 scales", "checking: against FP64"]
    assert (result.matmul, result.residual) == ("float8", "bfloat16")
    assert result.emulated and result.engine.startswith("emulated (")
    _, result = prepared(4, said=seen)
    assert seen == ["building", "checking: against FP64"] and (result.matmul, result.residual) == ("float32", "float32")


def test_a_wrong_block_is_not_handed_out():
    def build(config, values, device):
        return steps.load(0).build(config, {name: 2 * value for name, value in values.items()}, device)
    with pytest.raises(Failed, match="is off by"):
        prepared(0, build=build)


def test_who_writes_into_its_values_spoils_no_other_case():
    """Nor hides it: the next case with the same seed has the parameters as they were drawn."""
    def build(config, values, device):
        block = steps.load(0).build(config, values, device)
        values["ln_1.bias"].zero_()
        return block
    with pytest.raises(Failed, match="is off by"):
        prepared(0, build=build)
    after, _ = prepared(0)
    assert torch.equal(after.parameters["ln_1.bias"], parameters.seeded(CONFIG)["ln_1.bias"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_all_that_is_timed_is_in_the_dtype_of_the_parameters(dtype):
    config = CONFIG.replace(amp_dtype=torch.float16)
    prepared_block, result = prepared(1, config, dtype)
    tensors = [*prepared_block.inputs, *prepared_block.cotangents, *prepared_block.parameters.values()]
    assert {tensor.dtype for tensor in tensors} == {dtype} and result.matmul == str(dtype).removeprefix("torch.")
    assert prepared_block.own_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_block_may_give_its_output_in_a_dtype_of_its_own():
    """As a library's whole layer does; the cotangent then comes in that one."""
    def build(config, values, device):
        block = steps.load(0).build(config, values, device)
        block.output_dtype = torch.float64
        block.register_forward_hook(lambda module, args, y: y.double())
        return block
    prepared_block, _ = prepared(0, build=build)
    assert prepared_block.cotangents[0].dtype == torch.float64 and prepared_block.inputs[0].dtype == torch.float32


@pytest.mark.parametrize("time_compiler", [True, False])
def test_compiling_is_timed_where_that_is_asked_for(time_compiler, monkeypatch, uncompiled):
    said, timed = [], []
    monkeypatch.setattr(compiler, "missing", lambda device: None)
    monkeypatch.setattr(subject, "compilation_time", lambda block: timed.append(block) or "seconds")
    prepared_block, result = prepared(3, said=said, time_compiler=time_compiler)
    assert ("compiling: cold and warm" in said) == time_compiler
    assert (timed, result.compilation) == (([prepared_block], "seconds") if time_compiler else ([], None))


def test_a_block_that_holds_compiled_code_needs_a_compiler(monkeypatch, uncompiled):
    """Step 3, and whatever calls a compiled function, as step 4 does on a GPU; any other block does without."""
    def build(config, values, device):
        block = steps.load(0).build(config, values, device)
        block.add = torch.compile(torch.add)
        return block
    monkeypatch.setattr(compiler, "missing", lambda device: "no compiler here")
    with pytest.raises(NotImplementedError, match="no compiler here"):
        prepared(3)
    with pytest.raises(NotImplementedError, match="no compiler here"):
        prepared(0, build=build)
    prepared(0)


def test_parameters_are_drawn_once_for_all_cases_of_a_study(monkeypatch):
    """Whatever their precision; another seed draws others."""
    drawn = []

    def seeded(config, seed, inner=parameters.seeded):
        drawn.append(seed)
        return inner(config, seed)
    monkeypatch.setattr(parameters, "seeded", seeded)
    for step, amp_dtype in ((0, None), (1, torch.bfloat16), (2, torch.bfloat16)):
        prepared(step, CONFIG.replace(amp_dtype=amp_dtype))
    assert drawn == [0]


# ------------------------------------------------------------------------------------------------------- its passes


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_another_x_is_iterated_on_as_the_one_that_is_timed(mode):
    values, x, dy = case(CONFIG)
    block = steps.load(0).build(CONFIG, values, "cpu")
    elsewhere = subject.on_a_copy(subject_of(block, x, dy), mode)
    elsewhere.run()
    (other,) = elsewhere.reads
    assert torch.equal(other, x) and other.data_ptr() != x.data_ptr()
    assert not x.requires_grad and (other.grad is None) == (mode == FORWARD)


@pytest.mark.parametrize("fp8_weights, followed", [("per-call", True), ("cached", False), ("kept", False)])
def test_a_replay_must_follow_weights_that_are_not_kept(fp8_weights, followed):
    """The matrices alone: of biases FP8 knows nothing, and negated LayerNorms would be another function."""
    config = CONFIG.replace(fp8_weights=fp8_weights)
    values, x, dy = case(config)
    proof = subject_of(steps.load(0).build(config, values, "cpu"), x, dy).proof()
    assert [weight.ndim for weight in proof.weights] == ([2] * 4 if followed else [])
    assert proof.residual is x and (proof.output_gate, proof.gradient_gate) == oracle.GATES["float64"]


def test_a_prepared_block_has_the_work_of_its_config():
    block, result = prepared(0)
    assert block.workload == block_work.workload(block.config, steps.load(0).traits, torch.float32, CPU)
    assert result.matmul == block.workload.matmul == "float32" and block.workload.bytes_needed > 0


def test_what_has_no_workload_has_a_row_without_a_rate():
    _, x, dy = case(CONFIG)
    call = subject.Subject(torch.sin, [x], [dy], {}, (1e-3, 3e-3))
    assert measurement.row_of(call, BOTH) == Row() and call.calls(BOTH) == 1 and call.has(BOTH)


def test_traits_decide_what_is_calibrated_and_not_the_block():
    """Dynamic scaling finds its scales in each call."""
    config = CONFIG.replace(amp_dtype=torch.bfloat16)
    traits, said = Traits(autocast=True, fp8=DYNAMIC), []
    result = Result("another library's", config, "float32", {"device": "cpu"}, traits=traits)
    subject.prepare(steps.load(1).build, torch.float32, CPU, 0, result, teller(said))
    assert said == ["building", "checking: against FP64"] and result.matmul == "float8"
