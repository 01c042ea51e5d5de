"""A running sum of outer products writes the state of each step: in chunks only the last state of each is written."""
from benchmarks.assistant.program import Program
from benchmarks.assistant.running_sums import RunningSum
from benchmarks.assistant.technique import Found, Technique, found_at, unique

CHUNKED = """\
within a chunk of steps it is a masked matmul, (q k^T * mask) v, and from chunk to chunk the state alone is handed on: \
linear attention in chunks"""


def find(program: Program) -> list[Found]:
    """Every one of them."""
    return unique(found_at(each, in_words(each)) for each in program.analysis.running_sums)


def in_words(of: RunningSum) -> str:
    """What it writes, and the form that does without."""
    rows, columns = of.state
    mebibytes = of.nbytes / 2**20
    return f"a state of {rows} x {columns} for each of {of.steps:,} steps, {mebibytes:,.3g} MiB together: {CHUNKED}"


TECHNIQUE = Technique("running-sum", "the states of all steps -> in chunks", find)
