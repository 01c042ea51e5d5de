"""Lessons that run cell by cell, with what they printed."""
from pathlib import Path

FOLDER = Path(__file__).parent


def every() -> list[Path]:
    """All of them, by name."""
    return sorted(FOLDER.glob("*.ipynb"))
