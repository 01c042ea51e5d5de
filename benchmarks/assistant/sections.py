"""What a report is made of, and how it is written: plain text for a terminal, Markdown for a page or a notebook."""
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from common import text

WIDTH = 100                                            # of the plain text, in characters; code is as long as it is


@dataclass(frozen=True)
class Said:
    """Labels, and words behind each."""
    heading: str
    lines: Sequence[tuple[str, str]]

    def text(self) -> str:
        margin = "  " if self.heading else ""
        indent = max(len(margin + label) for label, _ in self.lines) + 2
        written = [self.heading] if self.heading else []
        for label, words in self.lines:
            first, *others = text.wrap(words, WIDTH - indent)
            written.append(f"{margin + label:<{indent}}{first}".rstrip())
            written += [" " * indent + line for line in others]
        return "\n".join(written)

    def markdown(self) -> str:
        return _headed(self.heading, "\n".join(f"- **{label}**: {plain(words)}" for label, words in self.lines))


@dataclass(frozen=True)
class Table:
    """Rows, the first `keys` of whose cells say what a row is about."""
    heading: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1

    def text(self) -> str:
        written = text.table([list(row) for row in self.rows], list(self.headers), WIDTH, self.keys)
        return "\n".join(filter(None, [self.heading, written]))

    def markdown(self) -> str:
        rows = [[plain(cell) for cell in row] for row in self.rows]
        return _headed(self.heading, text.markdown(rows, list(self.headers)))


@dataclass(frozen=True)
class Code:
    """Code, and the place of each piece."""
    heading: str
    pieces: Sequence[tuple[str, str]]

    def text(self) -> str:
        written = [self.heading]
        for place, code in self.pieces:
            written += [f"  {place}", *(f"      {line}".rstrip() for line in code.splitlines())]
        return "\n".join(written)

    def markdown(self) -> str:
        pieces = [f"{plain(place)}:\n\n```python\n{code}\n```" for place, code in self.pieces]
        return _headed(self.heading, "\n\n".join(pieces))


Section = Said | Table | Code


class Shown(ABC):
    """What can be shown to a person: `print` it, or let a notebook show it."""

    @abstractmethod
    def sections(self) -> list[Section]:
        """What is said, from first to last."""

    def __str__(self) -> str:
        return "\n\n".join(section.text() for section in self.sections())

    def markdown(self) -> str:
        """The same as Markdown."""
        return "\n\n".join(section.markdown() for section in self.sections())

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return self.markdown()


def _headed(heading: str, written: str) -> str:
    return f"### {heading[0].upper()}{heading[1:]}\n\n{written}" if heading else written


def plain(words: str) -> str:
    """The words as Markdown shows them unchanged."""
    for sign in ("*", "_", "|", "<"):
        words = words.replace(sign, "\\" + sign)
    return words
