"""What all steps share; each module imports only those above it in DESIGN.md's list, kept short here on purpose."""
from .config import PRESETS, BlockConfig

__all__ = ["PRESETS", "BlockConfig"]
