"""What runs have recorded: reading it, holding two of them against each other, and when a difference is real."""
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"              # recorded runs, a folder for each machine
