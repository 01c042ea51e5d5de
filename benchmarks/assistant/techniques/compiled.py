"""torch.compile: Inductor fuses what stands between the matmuls, and fewer kernels are launched."""
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.assistant import memory, regions
from benchmarks.assistant.predicting import Basis, Prediction, share_of_fused
from benchmarks.assistant.program import Program, fresh_dynamo
from benchmarks.assistant.side_by_side import compiled_work, times_as_fast
from benchmarks.assistant.spending import BY_HAND, PASSES
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.workload import arithmetic_of
from benchmarks.measure.copying import shared_copy
from benchmarks.measure.keeping import kept, parameters_kept
from common.block.evidence import Evidence
from common.outcome import in_a_line
from common.runtime import compiler
from common.runtime.compiler import holds_compiled

CODE = "model = torch.compile(model)"
ALLOW_RNN = "torch._dynamo.config.allow_rnn = True"
OTHER_BRANCH = "; the model asks whether it is being compiled, and may take another branch then"


def find(program: Program) -> list[Found]:
    """The call of the model."""
    trace = program.trace
    if program.is_compiled:
        return [Found(None, "", 1, "the model", why_not="it is compiled already")]
    if program.not_captured:
        return [Found(None, "", 1, "the model", why_not=f"Dynamo can't run it: {program.not_captured}")]
    passes = sum(call.bytes for call in trace.calls if not call.is_matmul)
    share = f"{100 * passes / trace.bytes:.0f} % of the bytes move outside of matmuls" if trace.bytes else "the model"
    breaks = len(program.breaks)
    count = "no graph break" if not breaks else "1 graph break" if breaks == 1 else f"{breaks} graph breaks"
    branches = OTHER_BRANCH if program.has_branches else ""
    return [Found(None, "", 1, f"{share}; {count}{branches}")]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return compiler.missing(device) or ""


def apply(plan: Plan) -> None:
    """To the whole model."""
    plan.compiles = True


def advice(program: Program, found: Found) -> Advice:
    """Once, before the first call."""
    return Advice(CODE, wraps=True)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no compiled code ran; "" where some did."""
    return "" if seen.kinds["compiled"] else "no compiled kernel ran"


def remark(program: Program, before: Evidence, seen: Evidence) -> str:
    """That as much is launched as before: nothing of it was fused."""
    fewer = seen.launches < before.launches
    return "" if fewer else f"it launches {seen.launches} kernels, and {before.launches} without it"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """What is passed from one pass over memory to the next stays in registers; at most so inside of attention by hand,
    too, and nothing is idle any more.
    """
    program, fused = basis.program, 1 - share_of_fused(basis.program.graphs)
    lines = set().union(*(attention.lines for attention in program.analysis.attentions))
    products = basis.matmuls_ms(lines, arithmetic_of(Plan(), program.inputs.device))
    with_backward = products * (1 if program.is_inference else 3)      # whose backward multiplies twice as much
    inside = max(0.0, basis.ms_of({BY_HAND}) - with_backward)
    passes = basis.ms_of({PASSES})
    return basis.saves(fused * (passes + inside) + basis.spending.idle_ms, fused * passes / 2)


def seen_alone(program: Program) -> list[tuple[str, str]]:
    """Each repeated layer compiled by itself, the parts that are slower compiled, the whole with nn.LSTM in it."""
    if program.not_captured or missing(program.inputs.device) or holds_compiled(program.model):
        return []
    said: list[tuple[str, str]] = []
    parts = {"each layer compiled by itself": _by_layer, "parts": regions.slower_compiled,
             "recurrent layers": _with_recurrent_layers}
    for what, part in parts.items():
        try:
            said += part(program)
        except Exception as error:                             # whatever a compiler raises: the other is told
            said.append((what, f"it could not be timed: {in_a_line(error)}"))
    return said


def _by_layer(program: Program) -> list[tuple[str, str]]:
    """Each of the repeated layers compiled by itself, which is once for all of them."""
    if not program.layers:
        return []
    by_layer = shared_copy(program.model)
    layers = dataclasses.replace(program, model=by_layer).layers
    with kept(program.model), fresh_dynamo(), parameters_kept(program.model, program.inputs):
        whole, seconds = compiled_work(torch.compile(program.model), program, [program.inputs])
        for layer in layers:
            layer.compile()
        by_itself, seconds_by_layer = compiled_work(by_layer, program, [program.inputs])
        gain = times_as_fast(whole, by_itself, program.inputs.device)
    words = (f"the first call takes {seconds_by_layer:.0f} s, of the whole model {seconds:.0f} s; then it is "
             f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] times as fast as that")
    return [(f"each of {len(layers)} {type(layers[0]).__name__} compiled by itself", words)]


def _with_recurrent_layers(program: Program) -> list[tuple[str, str]]:
    """Beside the model as it is: by default Dynamo leaves the functions out that call one."""
    kinds = {type(module).__name__: None for module in program.model.modules() if isinstance(module, nn.RNNBase)}
    if not kinds or torch._dynamo.config.allow_rnn:
        return []
    with (kept(program.model), fresh_dynamo(), parameters_kept(program.model, program.inputs),
          torch._dynamo.config.patch(allow_rnn=True)):
        before, _ = compiled_work(program.model, program, [program.inputs])
        after, seconds = compiled_work(torch.compile(program.model), program, [program.inputs])
        gain = times_as_fast(before, after, program.inputs.device)
    words = (f"`{ALLOW_RNN}`: the first call takes {seconds:.0f} s; then it is {gain[0]:.2f} [{gain[1]:.2f}, "
             f"{gain[2]:.2f}] times as fast as the model as it is")
    return [(f"with {' and '.join(f'nn.{kind}' for kind in kinds)} compiled", words)]


TECHNIQUE = Technique("compile", "eager -> torch.compile", find, apply, advice, missing, fired, remark,
                      predict=predict, frees=memory.compiled, seen_alone=seen_alone)
