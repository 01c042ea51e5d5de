"""What all steps share. A module imports only those before it in this order; those behind a room's name are in it:

signals, phases, outcome, text;
block: config, precision, sdpa_backends, parameters, workload, evidence, traits, memory, block_work, steps, oracle,
emulation;
runtime: sources, machine, exclusive, timing, rounds, iteration, energy, limit, data_sheets, pieces, peaks, compiler,
engine, replay;
report: result, metrics, card, record, record_file;
measure: subject, measurement, cases, progress, attribution, session;
command_line, run.
"""
from . import signals as signals  # first of all: from here on Ctrl-C is one line
from .block import parameters, steps
from .block.config import PRESETS, BlockConfig

__all__ = ["PRESETS", "BlockConfig", "parameters", "steps"]
