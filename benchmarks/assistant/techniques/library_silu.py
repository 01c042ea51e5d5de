"""SiLU (Swish), Mish and Hardswish by hand become the library's: one pass over x."""
from benchmarks.assistant.activations import SILUS
from benchmarks.assistant.one_function import technique_of

TECHNIQUE = technique_of("library-silu", "SiLU and its kind by hand -> F.silu, F.mish, F.hardswish", SILUS)
