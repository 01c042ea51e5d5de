"""What runs have recorded: reading it, holding two of them against each other, and when a difference is real."""
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"              # recorded runs, a folder for each machine
AS_IT_IS, BY_HAND = "as it is", "version by hand"                      # cases of the assistant that pages look for
