"""What all steps share. A module imports only those before it in this order:

config, precision, attention, parameters, steps, oracle, device, timing, roofline, evidence, report, output,
te_emulation, graph, harness, run.
"""
from .config import PRESETS, BlockConfig

__all__ = ["PRESETS", "BlockConfig"]
