"""The techniques, in the order in which they are tried; one file each."""
from benchmarks.assistant.technique import Technique
from benchmarks.assistant.techniques import sdpa

EVERY: tuple[Technique, ...] = (sdpa.TECHNIQUE,)
