"""Python loops over steps: many small launches, where one call may do. A person writes the other form."""
from benchmarks.assistant.loops import Loop
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Found, Technique, found_at, unique

BATCHED = "no step needs another: stack what they work on, and compute all at once (one bmm in place of many matmuls)"
SCANNED = """\
a step is linear in the one before it, number by number: y[t] = a[t] * y[t-1] + b[t]. Chunks compute it in parallel: \
within a chunk by cumulative products, from chunk to chunk by its last state"""
CHUNKED = """\
a step is linear in the state before it, by matmuls: linear attention, SSD or a delta rule. Within a chunk of steps it \
is a masked matmul, from chunk to chunk the state alone is handed on"""
RECURRENT = """\
a step needs more than a linear function of the one before it: no parallel form is known here. nn.RNN, nn.GRU and \
nn.LSTM run theirs in one call of cuDNN; of any other, torch.compile or a CUDA graph launches all steps at once"""
IN_MEMORY = "what a step hands on is written into a tensor, so what it depends on is not seen here"


def find(program: Program) -> list[Found]:
    """Every one of them."""
    return unique(found_at(each, in_words(each), _why_not(each)) for each in program.analysis.loops)


def in_words(loop: Loop) -> str:
    """How much it launches, and the form that it could have."""
    steps = f"{loop.steps:,} steps of {round(len(loop.nodes) / loop.steps)} operations each"
    if _why_not(loop):
        return steps
    form = BATCHED if loop.is_independent else CHUNKED if loop.of_matrices else SCANNED
    return f"{steps}: {form}"


def _why_not(loop: Loop) -> str:
    if loop.in_memory:
        return IN_MEMORY
    return "" if loop.is_linear else RECURRENT


TECHNIQUE = Technique("loop", "a loop over steps -> all at once", find)
