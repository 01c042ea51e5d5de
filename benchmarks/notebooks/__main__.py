"""Run every notebook, or those that are named, and record what they print: python -m benchmarks.notebooks [NAME ...]"""
import sys

from benchmarks import notebooks

for path in notebooks.every():
    if not sys.argv[1:] or path.stem in sys.argv[1:]:
        print(f"running {path.name}", file=sys.stderr)
        notebooks.record(path)
