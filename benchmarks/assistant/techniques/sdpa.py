"""Attention by hand becomes scaled_dot_product_attention: one fused kernel, and no scores in memory."""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.nn import functional as F

from benchmarks.assistant import attention_source, multihead_rewriting
from benchmarks.assistant.attention import Attention, missing_dimensions
from benchmarks.assistant.attention_rewriting import rewrite_attention
from benchmarks.assistant.fusing import Given, fused_or_why_not, is_fused, softmax_left
from benchmarks.assistant.graph import Captured, Refusal, place_of, with_stars
from benchmarks.assistant.multihead import UnreadWeights
from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed
from benchmarks.assistant.softmaxes import softmaxes
from benchmarks.assistant.source import Place
from benchmarks.assistant.spending import BY_HAND
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from benchmarks.assistant.workload import arithmetic_of
from common.block.evidence import FUSED_ATTENTION, Evidence

WITH_BACKWARD = 3.5                        # times the FLOPs of a forward: fused, its backward computes the scores anew
SLOWEST = 0.25                             # of the rate of a large matmul
LARGEST = 2**31                            # bytes of scores that the search for a kernel may write


def find(program: Program) -> list[Found]:
    """Every attention by hand; where it can't be rewritten, with the reason."""
    found = []
    for each in program.analysis.softmaxes:
        reason = in_words(each) + _blind_in_words(each, program) if isinstance(each, Attention) else "a softmax"
        found.append(found_at(each, reason, _why_not(each)))
    for weights in program.analysis.weights:
        reason = "attention" if isinstance(weights, Refusal) else multihead_rewriting.in_words(weights)
        found.append(found_at(weights, reason))
    return unique([*_called_already(program), *found, *_not_captured(program)])


def _why_not(found: Attention | Refusal) -> str:
    is_capped = isinstance(found, Attention) and not _can_take(found)
    return "it can't cap scores: see flex-attention" if is_capped else ""


def _called_already(program: Program) -> list[Found]:
    """Where the function itself is called."""
    places: dict[Place | None, list[tuple[str, Given]]] = {}
    for call in program.trace.calls:
        if call.attends:
            places.setdefault(call.place, []).append((call.module, replace(call.attends, trains=program.trace.trains)))
    found = []
    for place, calls in places.items():
        reasons = dict.fromkeys(why for _, given in calls if given.scores_bytes <= LARGEST
                                and (why := _fused_or_why_not(given, program)[1]))
        why_not = "it is this function already" + "".join(f"; no fused kernel computes it: {why}" for why in reasons)
        found.append(Found(place, with_stars([module for module, _ in calls]), len(calls), "attention", why_not))
    return found


def _not_captured(program: Program) -> list[Found]:
    """Where a softmax runs that is in no graph: Dynamo ran that function as it is."""
    captured = {place_of(softmax) for graph in program.graphs for softmax in softmaxes(graph)}
    calls = [call for call in program.trace.calls
             if call.name == "softmax" and call.is_batched and call.place not in captured]
    breaks = ", ".join(str(each.place.name) for each in program.breaks if each.place and each.skips)
    why = "Dynamo runs this function as it is, so its graph can't be changed"
    return [Found(place, with_stars([call.module for call in calls if call.place == place]),
                  sum(call.place == place for call in calls), "a softmax",
                  why_not=why + (f": mend the graph break at {breaks}" if breaks else ""))
            for place in dict.fromkeys(call.place for call in calls)]


def in_words(attention: Attention) -> str:
    """What it keeps in memory, and how it is masked."""
    kind = "causal" if attention.is_causal else "masked" if attention.masks else "unmasked"
    return f"{kind} attention by hand writes its scores {list(attention.shape)}, and reads them again"


def _blind_in_words(attention: Attention, program: Program) -> str:
    """That some queries see no key, where by hand and by the library's kernels other results and gradients come."""
    first = attention.place
    if first is None:
        return ""
    here = [call.blind for call in program.trace.calls
            if call.name == "softmax" and call.place and first.holds(call.place)]
    blind, rows = max(here, default=(0, 0))
    return f"; {blind:,} of {rows:,} queries see no key, where the two may differ" if blind else ""


def advice(program: Program, found: Found) -> Advice | None:
    """The call in place of the lines from the one matmul to the other. Raises NotWritten."""
    if isinstance(found.region, UnreadWeights):
        return multihead_rewriting.advice(found.region)
    return attention_source.advice(program, found, "sdpa")


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the fused function in place of every attention by hand; what that assumes of the buffers."""
    return [*rewrite_attention(graph, _can_take, _call), *multihead_rewriting.without_weights(graph)]


def _can_take(attention: Attention) -> bool:
    return attention.cap is None


def _call(attention: Attention, operands: list[Any], mask: fx.Node | None, nodes: fx.Graph) -> fx.Node:
    for _ in range(missing_dimensions(attention, 4) if mask is not None else 0):
        mask = nodes.call_method("unsqueeze", (mask, 0))
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": attention.dropout_p, "is_causal": attention.is_causal,
                               "scale": attention.scale}
    return nodes.call_function(F.scaled_dot_product_attention, tuple(operands), options)


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no fused kernel ran, or softmax still does; "" where all is fused."""
    if not any(seen.kinds[kind] for kind in FUSED_ATTENTION):
        tried = [_fused_or_why_not(Given.of_region(each), program) for each in program.analysis.attentions
                 if _can_take(each)]
        reasons = dict.fromkeys(why_not for _, why_not in tried if why_not)
        return "no fused attention kernel ran" + "".join(f": {reason}" for reason in reasons)
    return softmax_left(before, seen)


def seen_alone(program: Program) -> list[tuple[str, str]]:
    """Of each call of the function the kernel that computes it, or why there is none."""
    said: dict[tuple[str, str], None] = {}
    for call in program.trace.calls:
        if call.attends and call.place:
            ran, why_not = _fused_or_why_not(replace(call.attends, trains=program.trace.trains), program)
            said[call.place.name, f"{ran} computes it" if ran else f"no fused kernel computes it: {why_not}"] = None
    return list(said)


def _fused_or_why_not(given: Given, program: Program) -> tuple[str, str]:
    return fused_or_why_not(_in_its_pass(given, program))


def _in_its_pass(given: Given, program: Program) -> Given:
    """Without gradients in inference."""
    return given.without_gradients() if program.is_inference else given


def predict(basis: Basis, found: Sequence[Found]) -> Prediction | None:
    """Its matmuls alone are left, causal half of them, at the best to a fourth of the rate of a large one.

    What no fused kernel takes here stays as it is, as a mask that takes a gradient on a CPU.
    """
    attentions = [each.region for each in found if isinstance(each.region, Attention) and each.place
                  and is_fused(_in_its_pass(Given.of_region(each.region).of_one_sample(), basis.program))]
    arithmetic = arithmetic_of(Plan(), basis.program.inputs.device)
    places, forward = [each.place for each in attentions if each.place], 0.0
    for attention in attentions:
        share = 0.5 if attention.is_causal else 1.0
        forward += share * basis.matmuls_ms(attention.lines, arithmetic)
    if not forward:
        return None
    best = forward * (1.0 if basis.program.is_inference else WITH_BACKWARD)
    by_hand = basis.ms_of({BY_HAND}, places)
    return basis.saves(by_hand - best, by_hand - best / SLOWEST)


TECHNIQUE = Technique("sdpa", "attention by hand -> scaled_dot_product_attention", find, apply, advice, fired=fired,
                      predict=predict, seen_alone=seen_alone)
