"""What a command has said: its one line on stderr, and the values of a card."""
import itertools


def one_line(err: str) -> str:
    """All of stderr, which is one line and no traceback."""
    line = err.strip()
    assert line and "\n" not in line and "Traceback" not in err
    return line


def card_value(card: str, label: str) -> str:
    """The value beside `label`, wrapped lines joined."""
    lines = card.splitlines()
    start = next(place for place, line in enumerate(lines) if line[:20].rstrip() == label)
    wrapped = itertools.takewhile(lambda line: line.startswith(" " * 20), lines[start + 1:])
    return " ".join(" ".join([lines[start][20:], *wrapped]).split())
