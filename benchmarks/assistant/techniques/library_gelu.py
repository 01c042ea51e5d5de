"""GELU by hand becomes the library's: one pass over x, in place of one an operation."""
from benchmarks.assistant.activations import GELUS
from benchmarks.assistant.one_function import technique_of

TECHNIQUE = technique_of("library-gelu", "GELU by hand -> F.gelu", GELUS)
