"""Numbers and tables in plain text, the same on the card and in every study."""
import math
import shutil
import sys
from html import escape

from tabulate import tabulate

NOT_AVAILABLE = "n/a"


def number(value: float | None, form: str) -> str:
    """The value in that format; n/a for None."""
    if value is None:
        return NOT_AVAILABLE
    return format(value, form) if math.isfinite(value) else "not finite"


def percent(value: float | None) -> str:
    """Of the limit; beyond 100 the peaks came out too low."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.0f} ERROR" if value > 100 else f"{value:.0f}"


def figures(value: float, sign: str = "") -> str:
    """Three figures, without an exponent: 0.123, 1.23, 12.3, 123, 1,234; with sign "+" that of any number is shown."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:{sign},.{digits}f}"


def ratio(middle_low_high: tuple[float, float, float], digits: int = 2) -> str:
    """A ratio with its interval: 1.23 [1.20, 1.27]."""
    middle, low, high = (f"{value:.{digits}f}" for value in middle_low_high)
    return f"{middle} [{low}, {high}]"


def wrap(text: str, width: int) -> list[str]:
    """The words in lines of at most `width` characters; a longer word is cut."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word[:width]
    return lines


def table(rows: list[list], headers: list[str], width: int | None = None, keys: int = 1) -> str:
    """A table in plain text. Where it is wider than the terminal it is split; its first `keys` columns begin each part.

    `width` is in characters; None asks the terminal (no limit where the output is no terminal).
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    parts: list[str] = []
    columns = list(range(keys, len(headers)))
    while columns or not parts:
        for count in range(len(columns), -1, -1):
            part = _columns(rows, headers, keys, columns[:count])
            if count <= 1 or max(map(len, part.splitlines())) <= width:
                break
        parts.append(part)
        columns = columns[count:]
    return "\n\n".join(parts)


def _columns(rows: list[list], headers: list[str], keys: int, columns: list[int]) -> str:
    """The table of the first `keys` columns and of these."""
    picked = [*range(keys), *columns]
    align = ("left",) * keys + ("right",) * len(columns)
    return tabulate([only(row, picked) for row in rows], only(headers, picked), disable_numparse=True, colalign=align)


def only(row: list, columns: list[int]) -> list:
    """Those cells of a row."""
    return [row[column] for column in columns]


def markdown(rows: list[list], headers: list[str]) -> str:
    """A table in Markdown."""
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def html(rows: list[list], headers: list[str], lines: list[str]) -> str:
    """A table as a notebook shows it, with lines of text below."""
    below = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return tabulate(rows, headers, tablefmt="html", disable_numparse=True) + below
