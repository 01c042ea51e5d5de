"""How it is measured: what is timed, for a row, for a case, for many side by side."""
