"""The machine's state while a row's work runs, and which kernels that work launched."""
import errno
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import PRESETS, steps
from common.block import evidence
from common.block.traits import Traits
from common.measure import measurement
from common.outcome import Failed
from common.report.result import Compilation, Result
from common.runtime import compiler, machine
from common.runtime.iteration import BOTH, FORWARD, Iteration
from tests.helpers.made_records import FACTS

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------- under load


@pytest.mark.parametrize("count, still_to_run", [(3, 2), (10, 2), (375, 75)])
def test_clocks_are_read_with_work_still_to_run(count, still_to_run, monkeypatch):
    """The host is ahead of a GPU: what counts is where in the queue of launches the event stands."""
    queue, read = [], []

    class Event:
        def record(self):
            self.behind = len(queue)

        def synchronize(self):
            read.append(self.behind)

    def state(device):
        read.append("state")
        return {"sm_mhz": 1425}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: read.append("all"))
    monkeypatch.setattr(machine, "state", state)
    readings = measurement.under_load(torch.device("cuda"), measurement.Work(lambda: queue.append(1)), count)
    assert readings == {"sm_mhz": 1425} and len(queue) == count
    assert read == [count - still_to_run, "state", "all"]


# ------------------------------------------------------------------------------------------------------------- kernels


def events(kernels: Counter) -> list[SimpleNamespace]:
    """As a profiler gives them: each took 2 ms."""
    on_cpu = torch.autograd.DeviceType.CPU
    return [SimpleNamespace(name=name, device_type=on_cpu, self_cpu_time_total=2e3) for name in kernels.elements()]


def seen(monkeypatch, traits: Traits, kernels: list[Counter], mode=BOTH, study="step", compiled=False) -> Result:
    """The result of a case with these traits, of whose iterations the profiler sees those kernels."""
    step = steps.load(2)
    result = Result(step.name, PRESETS["tiny"], "float32", FACTS, step=2, traits=traits, matmul="float32", study=study,
                    compilation=Compilation(1.0, 1.0))
    order = []
    monkeypatch.setattr(compiler, "is_compiled", lambda call: compiled)
    remaining = iter(kernels)

    def observed(iteration, device, trace=None):
        iteration()
        assert order[-2:] == ["between", "run"]
        return events(next(remaining))
    monkeypatch.setattr(evidence, "observed", observed)
    one = Iteration(lambda: order.append("run"), lambda: order.append("between"), [], {})
    subject = SimpleNamespace(inputs=[torch.ones(1)], call=None)
    measurement.see_kernels(subject, one, mode, result)
    assert order[-1] == "between" and next(remaining, None) is None
    return result


def test_kernels_are_held_against_what_the_traits_claim(monkeypatch):
    fused = Counter({"aten::_scaled_dot_product_flash_attention_for_cpu": 1})
    result = seen(monkeypatch, steps.load(2).traits, [fused])
    assert result.evidence[BOTH].verdict == "proven" and result.evidence[BOTH].kernels == fused
    result = seen(monkeypatch, steps.load(0).traits, [fused])
    assert result.evidence[BOTH].verdict == "refuted"


def test_what_claims_nothing_is_only_counted(monkeypatch):
    result = seen(monkeypatch, Traits(), [Counter({"aten::mm": 3})], compiled=True)
    assert (result.evidence[BOTH].verdict, result.evidence[BOTH].launches) == ("n/a", 3)
    assert result.evidence[BOTH].ms == {"aten::mm": 6.0}
    assert result.compilation.uncompiled is None


def test_a_compiled_block_is_held_against_itself_uncompiled(monkeypatch):
    """It must launch less; and a script says after how many calls compiling pays."""
    fused = Counter({"aten::_scaled_dot_product_flash_attention_for_cpu": 1, "CompiledFxGraph": 2})
    traits = steps.load(3).traits
    result = seen(monkeypatch, traits, [fused, Counter({"aten::mm": 4})], compiled=True)
    assert result.evidence[BOTH].verdict == "proven"
    assert len(result.compilation.uncompiled) == 10
    on_gpu = traits.claims("float16", torch.device("cuda"))
    monkeypatch.setattr(Traits, "claims", lambda *_: on_gpu)
    kernels = Counter({"nvjet_hsh_a": 4, "flash_fwd": 1, "triton_poi_fused_0": 2})
    result = seen(monkeypatch, traits, [kernels, Counter({"a kernel": 7})], compiled=True)
    assert result.evidence[BOTH].because == "7 launches, and 7 without the compiler"


@pytest.mark.parametrize("mode, study", [(FORWARD, "step"), (BOTH, "ladder")])
def test_only_a_scripts_own_card_says_when_compiling_pays(monkeypatch, mode, study):
    kernels = Counter({"aten::_scaled_dot_product_flash_attention_for_cpu": 1, "CompiledFxGraph": 2})
    result = seen(monkeypatch, steps.load(3).traits, [kernels, kernels], mode, study, compiled=True)
    assert result.compilation.uncompiled is None


def test_slow_uncompiled_iterations_are_sampled_once(monkeypatch):
    clock = SimpleNamespace(sample=lambda run, between, count: [600.0] * count)
    monkeypatch.setattr(measurement.timing, "clock_for", lambda device: clock)
    assert measurement._a_few_samples(Iteration(lambda: [], lambda: None, [], {}), CPU) == [600.0]


def test_a_timeline_that_cannot_be_written_fails_the_run(monkeypatch):
    def observed(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(evidence, "observed", observed)
    one = Iteration(lambda: [], lambda: None, [], {})
    result = Result("2_sdpa", PRESETS["tiny"], "float32", FACTS)
    with pytest.raises(Failed, match=r"--profile a\.json: No space left on device"):
        measurement.see_kernels(SimpleNamespace(inputs=[torch.ones(1)], call=None), one, BOTH, result, "a.json")


def test_when_compiling_pays_is_told_by_the_block_without_the_compiler(monkeypatch):
    """Sampled from the compiled block itself it would never pay."""
    stances = []

    def few(iteration, device):
        stances.append(torch._dynamo.eval_frame._stance.stance)
        return [1.0]
    monkeypatch.setattr(compiler, "is_compiled", lambda call: True)
    monkeypatch.setattr(measurement, "_a_few_samples", few)
    monkeypatch.setattr(evidence, "observed", lambda run, device, trace=None: events(Counter({"a kernel": 1})))
    result = Result("3_compile", PRESETS["tiny"], "float32", FACTS, traits=steps.load(3).traits, matmul="float32")
    result.compilation = Compilation(1.0, 0.5)
    subject = SimpleNamespace(inputs=[torch.zeros(1)], call=None)
    nothing = SimpleNamespace(run=lambda: [], between=lambda: None)
    measurement.see_kernels(subject, nothing, BOTH, result)
    assert stances == ["force_eager"] and result.compilation.uncompiled == [1.0]
