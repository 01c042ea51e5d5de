"""What a person sees of their model, as text."""
from benchmarks.assistant.optimize import AS_IT_IS, Opportunity, Optimized
from benchmarks.measure.calls import named_parameters
from benchmarks.records.read import verdict
from common.block.config import dtype_name
from common.runtime.iteration import MODES
from common.text import figures, ratio, table

WIDTH = 100


def text(result: Optimized) -> str:
    """Everything, at most 100 columns wide."""
    return "\n\n".join(filter(None, [_model(result), _opportunities(result), _reasons(result), _write_this(result)]))


def _model(result: Optimized) -> str:
    model, inputs = result.program.model, result.program.inputs
    count = sum(t.numel() for t in {id(t): t for t in named_parameters(model).values()}.values())
    given = ", ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in inputs.named().values())
    lines = [f"model      {result.name}   {type(model).__name__}, {count / 1e6:,.1f} M parameters   inputs  {given}",
             f"truth      {result.truth}"]
    run = result.run(AS_IT_IS)
    if run:
        times = [f"{mode} {figures(run.best_ms(mode) or 0.0)} ms" for mode in MODES if run.best(mode)]
        lines.append(f"as it is   {'   '.join(times)}")
    return "\n".join(lines)


def _opportunities(result: Optimized) -> str:
    rows = []
    for one in result.opportunities:
        times = f"{one.count} x" if one.count > 1 else ""
        rows.append([one.technique, str(one.found.place or "the call"), times, _gain(one),
                     f"{one.error:.0e}" if one.error is not None else "", one.verdict])
    if not rows:
        return "no opportunity was found"
    return table(rows, ["opportunity", "where", "", "alone [95 %]", "error", "verdict"], WIDTH, keys=2)


def _gain(one: Opportunity) -> str:
    if one.speedup is None or one.interval is None:
        return ""
    return ratio((one.speedup, *one.interval)) + verdict(*one.interval)


def _reasons(result: Optimized) -> str:
    lines = []
    for one in result.opportunities:
        place = f" at {one.found.place}" if one.found.place else ""
        lines.append(f"{one.technique}{place}: {one.why or one.reason}")
    return "\n".join(lines)


def _write_this(result: Optimized) -> str:
    lines = []
    for one in result.opportunities:
        if one.advice and one.verdict in ("take", "different numerics", "by hand"):
            lines += [f"  {one.advice.place or 'where you call the model'}",
                      *(f"      {line}" for line in one.advice.code.splitlines())]
    return "\n".join(["write this", *lines]) if lines else ""
