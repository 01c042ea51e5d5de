"""What all steps share. A module imports only those before it in this order:

signals, phases, config, precision, sdpa_backends, parameters, text, timing, rounds, limit, evidence, traits, steps,
sources, machine, peaks, energy, exclusive, memory, outcome, compiler, emulation, engine, oracle, iteration, replay,
result, card, record, record_file, command_line, subject, measurement, run.
"""
from . import signals as signals  # first of all: from here on Ctrl-C is one line
from .config import PRESETS, BlockConfig

__all__ = ["PRESETS", "BlockConfig"]
