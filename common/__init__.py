"""What all steps share. A module imports only those before it in this order:

signals, phases, config, precision, sdpa_backends, parameters, text, timing, rounds, iteration, workload, limit,
evidence, traits, memory, block_work, steps, sources, machine, peaks, energy, exclusive, outcome, compiler, emulation,
engine, oracle, replay, result, metrics, card, record, record_file, command_line, subject, measurement, cases, progress,
attribution, session, run.
"""
from . import signals as signals  # first of all: from here on Ctrl-C is one line
from .config import PRESETS, BlockConfig

__all__ = ["PRESETS", "BlockConfig"]
