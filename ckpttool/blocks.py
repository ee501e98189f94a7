"""Results as blocks of text: lines, facts and tables, for terminals, ``print`` and notebooks."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.messages import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GAP = "  "
"""Between two columns."""
SHORTEST, SHORTEST_PROSE = (24, 12), (30, 16)
"""Least columns of shortened names and of wrapped texts: while a rare column can be left out, and after that."""
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table. Numbers are whole; names are shortened in the middle."""

    columns: Sequence[str]
    """Headings."""
    rows: Sequence[Sequence[str]]
    """Cells."""
    right: Sequence[str] = ()
    """Headings of numbers, which are right-aligned."""
    whole: Sequence[str] = ()
    """Headings of other columns that are never shortened."""
    prose: Sequence[str] = ()
    """Headings of texts, which wrap at words."""
    rare: Sequence[str] = ()
    """Headings of the columns to leave out where the table is too wide, the first of them first."""
    most: int | None = None
    """Rows that a terminal shows; None: all."""

    def lines(self) -> list[str]:
        """Return the lines of the whole table."""
        return self._drawn([max(map(len, cells)) for cells in self._by_column()], len)

    def fitted(self, width: int, measure: Callable[[str], int]) -> tuple[list[str], bool]:
        """Return the lines for a terminal, and whether something is shortened or left out.

        Args:
            width: Columns of the terminal.
            measure: Returns the columns of a text.
        """
        widths = [max(map(measure, cells)) for cells in self._by_column()]
        kept = list(self.columns)
        steps = [("", False), *((name, False) for name in self.rare if name in self.columns), ("", True)]
        for rare, final in steps:
            kept = [name for name in kept if name != rare or not rare]
            table = self._with(kept)
            full = [widths[self.columns.index(name)] for name in kept]
            fitting = table._shrunk(full, width, final=final)
            if sum(fitting) + len(GAP) * (len(fitting) - 1) <= width:
                break
        names = [n for n, name in enumerate(kept) if table._is_name(name)]
        less = len(kept) < len(self.columns) or any(fitting[n] < full[n] for n in names)
        return table._drawn(fitting, measure), less

    def head(self) -> Table:
        """Return the rows that a terminal shows."""
        return replace(self, rows=self.rows[: self.most])

    def html(self) -> str:
        """Return the table as HTML."""
        aligns = [' style="text-align: right"' if name in self.right else "" for name in self.columns]
        head, *rows = zip(*self._by_column(), strict=True)
        lines = [
            "".join(f"<{tag}{align}>{_escaped(cell)}</{tag}>" for align, cell in zip(aligns, row, strict=True))
            for tag, row in (("th", head), *(("td", row) for row in rows))
        ]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def _by_column(self) -> list[tuple[str, ...]]:
        rows = ([printable(cell, 0) for cell in row] for row in self.rows)
        return list(zip(self.columns, *rows, strict=True))

    def _with(self, kept: Sequence[str]) -> Table:
        places = [self.columns.index(name) for name in kept]
        rows = [[row[place] for place in places] for row in self.rows]
        return Table(kept, rows, self.right, self.whole, self.prose)

    def _shrunk(self, widths: Sequence[int], width: int, *, final: bool) -> list[int]:
        """Return the widths of the columns, as near to a sum as their least widths allow: texts shrink before names."""
        found = list(widths)
        excess = sum(found) + len(GAP) * (len(found) - 1) - width
        for shrinks, least in ((self._is_prose, SHORTEST_PROSE[final]), (self._is_name, SHORTEST[final])):
            while excess > 0:
                free = [n for n, name in enumerate(self.columns) if shrinks(name) and found[n] > max(least, len(name))]
                if not free:
                    break
                found[max(free, key=lambda n: found[n])] -= 1
                excess -= 1
        return found

    def _is_prose(self, name: str) -> bool:
        return name in self.prose

    def _is_name(self, name: str) -> bool:
        return name not in {*self.right, *self.whole, *self.prose}

    def _drawn(self, widths: Sequence[int], measure: Callable[[str], int]) -> list[str]:
        lines = []
        for row in zip(*self._by_column(), strict=True):
            cells = [
                textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
                if name in self.prose and measure(cell) > width
                else [shortened(cell, width) if measure(cell) > width else cell]
                for name, cell, width in zip(self.columns, row, widths, strict=True)
            ]
            for n in range(max(map(len, cells))):
                parts = [(cell[n] if n < len(cell) else "") for cell in cells]
                blanks = [" " * (width - measure(part)) for part, width in zip(parts, widths, strict=True)]
                aligned = (
                    blank + part if name in self.right else part + blank
                    for name, part, blank in zip(self.columns, parts, blanks, strict=True)
                )
                lines.append(GAP.join(aligned).rstrip())
        return lines


def shortened(text: str, width: int) -> str:
    """Return a text with an ellipsis in its middle, of so many characters."""
    kept = max(width - 1, 0)
    return text if len(text) <= width else text[: kept - kept // 2] + ELLIPSIS + text[len(text) - kept // 2 :]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text."""

    text: str
    color: str | None = None
    """Its colour on a terminal."""

    def lines(self) -> list[str]:
        """Return the line."""
        return [printable(self.text, 0)]

    def html(self) -> str:
        """Return the line as HTML."""
        return f"<div>{_escaped(self.text)}</div>"


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and values in two columns; empty values are left out."""

    facts: Sequence[tuple[str, str]]

    def shown(self) -> list[tuple[str, str]]:
        """Return the labels that have values, and these."""
        return [(label, printable(value, 0)) for label, value in self.facts if value]

    def start(self) -> int:
        """Return the column of the values."""
        return max((len(label) for label, _ in self.shown()), default=0) + len(GAP)

    def lines(self) -> list[str]:
        """Return a line for each label."""
        return [label.ljust(self.start()) + value for label, value in self.shown()]

    def html(self) -> str:
        """Return a table without a header."""
        rows = (f"<tr><th>{_escaped(label)}</th><td>{_escaped(value)}</td></tr>" for label, value in self.shown())
        return f"<table>{''.join(rows)}</table>"


Block = Line | Facts | Table


class Shown(ABC):
    """A result that ``print`` shows as its command does, and a notebook with tables."""

    __slots__ = ()

    @abstractmethod
    def blocks(self) -> Iterable[Block]:
        """Return the output of the command."""

    def __str__(self) -> str:
        return "\n".join(line for block in self.blocks() for line in block.lines())

    def _repr_html_(self) -> str | None:
        return "".join(block.html() for block in self.blocks())


def _escaped(text: str) -> str:
    import html  # only notebooks need it

    return html.escape(printable(text, 0))
