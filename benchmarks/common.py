"""How to run a study, for who runs it as a file (`python benchmarks/ladder.py`): it finds this and not `common`.

Python then looks for packages in the study's own folder; with `python -m` in the project's, where `common` is.
"""
import sys
from pathlib import Path

print(f"run it from the project's folder as: python -m benchmarks.{Path(sys.argv[0]).stem}", file=sys.stderr)
sys.exit(2)
