"""A report as a page of Markdown, with its chart beside it."""
from pathlib import Path

from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.sections import plain
from benchmarks.records.provenance import provenance
from benchmarks.show import charts

CHART = "gains"


def write_page(result: Optimized, path: Path) -> None:
    """Write `path` and, where a gain was measured, <its stem>-gains.png and .svg."""
    parts = [f"# {plain(result.looked.name)}", provenance(result.lines) if result.lines else "", result.markdown()]
    if gains := result.gains():
        stem = path.with_suffix("")
        x = f"times as fast, {result.mode}"
        charts.draw({CHART: lambda: charts.bars_chart(gains, x, digits=2, line_at=1)}, str(stem), result.lines)
        parts.append(f"![how many times as fast each technique makes it]({stem.name}-{CHART}.svg)")
    path.write_text("\n\n".join(filter(None, [*parts, result.times])) + "\n")
