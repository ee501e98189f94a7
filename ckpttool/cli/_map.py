"""The layout of a checkpoint as a map in the terminal: a line for each rank, coloured or lettered by layer.

A terminal with few colours gets coloured letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.texts import title
from ckpttool.cli._output import is_colored, print_line, terminal_width
from ckpttool.dtypes import SHORT_NAMES
from ckpttool.messages import printable
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint

MAX_LINES = 32
"""Maximum number of ranks drawn of each state; of more, some at equal distances."""
PLAIN_WIDTH = 100
"""Columns of a map that is not written to a terminal."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""Letters of the layers in a map without colours; of more layers, neighbours share one."""
MAX_NAMED = 24
"""Maximum number of layers whose colours have names; of more, the first and the last have."""
MIN_ROOM = 8
"""Minimum columns of a line, however narrow the terminal is."""
PADDING = "."
STOPS = ((68, 1, 84), (59, 81, 139), (33, 144, 141), (92, 200, 99), (253, 231, 37))
"""Colours of the first to the last layer: viridis, whose lightness grows evenly."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """An extent in a line of the map."""

    layer: int
    """Index of its layer."""
    nbytes: int
    """Bytes of its elements."""
    padding: int
    """Bytes of padding after them."""


def print_map(checkpoint: Checkpoint, plain_width: int = PLAIN_WIDTH) -> None:
    """Draw which layers each rank stores, by state; states with one layout are drawn once."""
    from ckpttool.analysis.layout import layout  # it needs numpy

    told = layout(checkpoint)
    print_line(f"{checkpoint.tag}: {', '.join(title(checkpoint))}")
    colored, width = is_colored(), terminal_width() or plain_width
    drawn: dict[Any, list[str]] = {}
    lines: dict[Any, list[tuple[str, list[_Piece]]]] = {}
    hidden: dict[Any, int] = {}
    for number, state in enumerate(told["states"]):
        held, total = _held(told, number)
        key = tuple((label, tuple((p.layer, p.nbytes, p.padding) for p in pieces)) for label, pieces in held)
        lines[key], hidden[key] = held, total - len(held)
        drawn.setdefault(key, []).append(_state_title(told, number, state))
    for key, names in drawn.items():
        if lines[key]:
            print_line("")
            print_line(", ".join(names))
            _print_lines(lines[key], len(told["layers"]), width, colored=colored)
            if hidden[key]:
                print_line(f"({hidden[key]:,} more ranks are not drawn)")
    print_line("")
    _print_legend(told, width, colored=colored)


def _shows_all_colors() -> bool:
    """Return whether the terminal shows 16 million colours: of 256 or 16, neighbouring layers may get the same one."""
    from rich.console import Console

    return Console().color_system == "truecolor"


def _state_title(told: dict[str, Any], number: int, state: str) -> str:
    rows = told["rows"]
    mine = [i for i, held in enumerate(rows["state"]) if held == number]
    nbytes = sum(rows["count"][i] * rows["numel"][i] * rows["runs"][i] * rows["width"][i] for i in mine)
    kinds = dict.fromkeys(told["dtypes"][rows["dtype"][i]] for i in mine)
    shown = [SHORT_NAMES.get(kind, kind.lower()) for kind in kinds]
    return f"{state} {format_size(nbytes)}" if shown == [state] else f"{state} {'/'.join(shown)} {format_size(nbytes)}"


def _held(told: dict[str, Any], state: int) -> tuple[list[tuple[str, list[_Piece]]], int]:
    """Return the label and the extents of ranks that have a state, and the number of all such ranks."""
    rows, layer = told["rows"], told["tensors"]["layer"]
    mine = [i for i, held in enumerate(rows["state"]) if held == state]
    reached = {rows["file"][i] + k * rows["file_step"][i] for i in mine for k in range(rows["count"][i])}
    lanes = [lane for lane in told["lanes"] if not reached.isdisjoint(lane["files"])]
    shown = lanes if len(lanes) <= MAX_LINES else [lanes[k * len(lanes) // MAX_LINES] for k in range(MAX_LINES)]
    found = []
    for lane in shown:
        order = {file: k for k, file in enumerate(lane["files"])}
        pieces = []
        for i in mine:
            width = rows["width"][i]
            for k, file in _rows_in(rows, i, lane["files"]):
                place = order[file], rows["offset"][i] + k * rows["offset_step"][i]
                held = rows["numel"][i] * rows["runs"][i] * width
                pieces.append((place, _Piece(layer[rows["tensor"][i]], held, rows["padding"][i] * width)))
        found.append((lane["label"], [piece for _, piece in sorted(pieces, key=lambda found: found[0])]))
    return found, len(lanes)


def _rows_in(rows: dict[str, list[int]], i: int, files: Sequence[int]) -> list[tuple[int, int]]:
    """Return (number within the row, file) of the extents of a row in some files."""
    first, count, step = rows["file"][i], rows["count"][i], rows["file_step"][i]
    if count == 1 or step == 0:
        return [(k, first) for k in range(count)] if first in files else []
    found = []
    for file in files:
        k, rest = divmod(file - first, step)
        if rest == 0 and 0 <= k < count:
            found.append((k, file))
    return found


def _print_lines(lines: list[tuple[str, list[_Piece]]], layers: int, width: int, *, colored: bool) -> None:
    names = [printable(label, 0) for label, _ in lines]
    if max(map(len, names)) > width // 3:
        names = [name.replace(" ", "") for name in names]
    gutter = min(max(map(len, names)), max(4, width // 2))
    room = max(MIN_ROOM, width - gutter - 2)
    longest = max(sum(p.nbytes + p.padding for p in pieces) for _, pieces in lines)
    for name, (_, pieces) in zip(names, lines, strict=True):
        cells = _cells(pieces, longest, room)
        name = (name if len(name) <= gutter else f"{name[: gutter - 1]}~").ljust(gutter)
        _print_cells(name, cells, layers, colored=colored)


def _cells(pieces: list[_Piece], longest: int, room: int) -> list[int | None]:
    """Return for each column the layer that has most of its bytes, or -1 for padding; None after the last byte."""
    if not longest:
        return []
    share: list[dict[int, float]] = [{} for _ in range(room)]
    at = 0
    for piece in pieces:
        for layer, nbytes in ((piece.layer, piece.nbytes), (-1, piece.padding)):
            begin, end = at * room / longest, (at + nbytes) * room / longest
            for column in range(int(begin), min(room, int(end) + 1)):
                covered = min(end, column + 1) - max(begin, column)
                if covered > 0:
                    share[column][layer] = share[column].get(layer, 0.0) + covered
            at += nbytes
    cells: list[int | None] = [max(held, key=lambda layer: held[layer]) if held else None for held in share]
    while cells and cells[-1] is None:
        cells.pop()
    return cells


def _print_cells(label: str, cells: list[int | None], layers: int, *, colored: bool) -> None:
    if not colored:
        print_line(f"{label}  " + "".join(_letter(cell, layers) for cell in cells))
        return
    from rich.console import Console
    from rich.text import Text

    blocks = _shows_all_colors()
    line = Text(f"{label}  ")
    for cell, equal in groupby(cells):
        count = len(list(equal))
        if cell is None or cell < 0:
            line.append((("░" if blocks else PADDING) if cell == -1 else " ") * count, style="bright_black")
        else:
            line.append(("█" if blocks else _letter(cell, layers)) * count, style=_color(cell, layers))
    Console(highlight=False).print(line, soft_wrap=True)


def _letter(cell: int | None, layers: int) -> str:
    if cell is None:
        return " "
    return PADDING if cell < 0 else LETTERS[cell // _shared(layers)]


def _shared(layers: int) -> int:
    """Return how many layers share a letter."""
    return max(1, -(-layers // len(LETTERS)))


def _color(layer: int, layers: int) -> str:
    at = (0.06 + 0.9 * layer / max(1, layers - 1)) * (len(STOPS) - 1)
    low = min(int(at), len(STOPS) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _print_legend(told: dict[str, Any], width: int, *, colored: bool) -> None:
    """Print which letter or colour is which layer."""
    layers = told["layers"]
    padded = any(told["rows"]["padding"])
    if colored and _shows_all_colors():
        _print_colors(layers, width, padded=padded)
        return
    each = _shared(len(layers))
    entries = []
    for first in range(0, len(layers), each):
        last = min(first + each, len(layers)) - 1
        name = printable(layers[first], 40) + (f" to {printable(layers[last], 40)}" if last > first else "")
        entries.append(f"{_letter(first, len(layers))} {name}")
    line = ""
    for entry in entries + ([f"{PADDING} padding"] if padded else []):
        if line and len(line) + 2 + len(entry) > width:
            print_line(line)
            line = ""
        line += ("  " if line else "") + entry
    print_line(line)


def _print_colors(layers: Sequence[str], width: int, *, padded: bool) -> None:
    """Print the colours of layers: each with its name, or of many the range from the first to the last."""
    from rich.console import Console
    from rich.text import Text

    line = Text()
    if len(layers) <= MAX_NAMED:
        for layer, name in enumerate(layers):
            line.append("█ ", style=_color(layer, len(layers)))
            line.append(f"{printable(name, 40)}  ")
    else:
        line.append(f"{printable(layers[0], 40)} ")
        for step in range(12):
            line.append("█", style=_color(step * (len(layers) - 1) // 11, len(layers)))
        line.append(f" {printable(layers[-1], 40)} ({len(layers):,} layers in order)  ")
    if padded:
        line.append("░ ", style="bright_black")
        line.append("padding")
    Console(highlight=False, width=width).print(line)
