"""Draw the pictures of the documentation as SVG: bytes in rows, and steps in columns."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ckpttool.registry import EXTENSIONS

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {
    "a": "#c6dbef", "b": "#fdd0a2", "c": "#c7e9c0", "d": "#dadaeb", "pad": "#eeeeee", "head": "#f7f7f7", "": "#ffffff",
}  # fmt: skip
ROW, LABEL, UNIT, GAP = 34, 190, 13, 14
FONT = "ui-sans-serif, system-ui, sans-serif"


@dataclass(frozen=True)
class Box:
    """One part of a row."""

    text: str
    width: float
    """In units of UNIT pixels."""
    colour: str = ""


@dataclass(frozen=True)
class Row:
    """A label and its boxes from left to right."""

    label: str
    boxes: tuple[Box, ...]


def rows_picture(title: str, rows: list[Row], notes: list[str]) -> str:
    """A picture of files or buffers: one row each, drawn to scale."""
    wide = max(sum(b.width for b in row.boxes) for row in rows) * UNIT
    width = LABEL + wide + 20
    parts = [caption(10, 22, title, bold=True)]
    y = 38.0
    for row in rows:
        parts.append(caption(10, y + ROW / 2 + 5, row.label))
        x = float(LABEL)
        for box in row.boxes:
            parts.append(_box(x, y, box.width * UNIT, ROW, box.text, box.colour))
            x += box.width * UNIT
        y += ROW + GAP
    for note in notes:
        parts.append(caption(10, y + 12, note, small=True))
        y += 18
    return svg(max(width, 10 + 6.4 * max(map(len, [title, *notes]), default=0)), y + 12, parts)


def steps_picture(title: str, columns: list[str], steps: list[tuple[int, int, str, str]], note: str) -> str:
    """A picture of a protocol: one column for each actor, time downwards.

    Args:
        title: The heading.
        columns: The actors.
        steps: (first column, last column, text, colour), from top to bottom.
        note: A line below.
    """
    wide = 185
    parts = [caption(10, 22, title, bold=True)]
    y = 40.0
    height = y + ROW + len(steps) * (ROW + GAP) + 44
    for n, name in enumerate(columns):
        x = 10 + n * wide
        parts.append(_box(x, y, wide - 20, ROW, name, "head"))
        middle = x + (wide - 20) / 2
        ends = f'x1="{middle}" y1="{y + ROW}" x2="{middle}" y2="{height - 36}"'
        parts.append(f'<line {ends} stroke="#999" stroke-dasharray="4 3"/>')
    y += ROW + GAP
    for first, last, text, colour in steps:
        parts.append(_box(10 + first * wide, y, (last - first + 1) * wide - 20, ROW, text, colour))
        y += ROW + GAP
    parts.append(caption(10, height - 12, note, small=True))
    return svg(max(10 + len(columns) * wide, 20 + 6.4 * len(note)), height, parts)


def _box(x: float, y: float, width: float, height: float, text: str, colour: str) -> str:
    fill = COLOURS[colour]
    middle, base = x + width / 2, y + height / 2 + 5
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#555"/>'
        f'<text x="{middle:g}" y="{base:g}" text-anchor="middle" font-size="13">{escape(text)}</text>'
    )


def caption(x: float, y: float, text: str, *, bold: bool = False, small: bool = False) -> str:
    """A line of text."""
    style = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{12 if small else 14}"{style}>{escape(text)}</text>'


def svg(width: float, height: float, parts: list[str]) -> str:
    """A picture of parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{FONT}" fill="#111">'
        f'<rect width="{width:g}" height="{height:g}" fill="#fff" rx="6"/>' + "".join(parts) + "</svg>\n"
    )


def row(label: str, text: str) -> Row:
    """A row from text: "name width colour | name width colour"."""
    boxes = [part.strip().rsplit(" ", 2) for part in text.split("|")]
    return Row(label, tuple(Box(name, float(width), colour) for name, width, colour in boxes))


def stage12() -> str:
    """Flat buffer of a group, cut into partitions."""
    return rows_picture(
        "Stages 1 and 2: one parameter group over 2 ranks",
        [
            row("flat buffer of the group", "embed 18 a | up 10 b | down 14 c | tiny 4 d | padding 8 pad"),
            row("optim_states of rank 0", "embed 18 a | up, first part 9 b"),
            row("optim_states of rank 1", "up 3 b | down 14 c | tiny 4 d | padding 6 pad"),
            row("mp_rank_00_model_states", "embed 9 a | up 5 b | down 7 c | tiny 4 d | buffers 6 head"),
        ],
        [
            "Each rank holds one equal cut of the flat buffer: fp32 master weights, and each state of the optimizer.",
            "Parameters do not end where partitions end. The padding is at the end of the flat buffer.",
            "One file that all ranks share contains the whole 16-bit weights.",
        ],
    )


def stage3() -> str:
    """Each parameter cut over all ranks."""
    return rows_picture(
        "Stage 3: every parameter is cut over all ranks (here 4)",
        [
            row("embed, 61 x 18", "rank 0 10 a | rank 1 10 a | rank 2 10 a | rank 3 10 a"),
            row("tiny, 3 elements", "rank 0 6 d | rank 1 6 d | rank 2 6 d | padding 6 pad"),
            row("optim_states of rank 0", "embed 10 a | up 6 b | down 7 c | tiny 6 d"),
            row("optim_states of rank 3", "embed 10 a | up 6 b | down 7 c | padding 6 pad"),
            row("model_states of rank 0", "empty placeholders, buffers, cuts of frozen parameters 40 head"),
        ],
        [
            "Rank r holds elements r * ceil(n / N) to (r + 1) * ceil(n / N) of each parameter of n elements.",
            "The cuts of a rank follow each other in flat buffers, one for each sub-group (sub_group_size).",
            "Padding has any values.",
        ],
    )


def universal() -> str:
    """One directory for each parameter."""
    files = "fp32.pt 10 {0} | exp_avg.pt 11 {0} | exp_avg_sq.pt 12 {0} | step.pt 8 head"
    return rows_picture(
        "Universal: one directory for each parameter, one file for each state",
        [
            row("zero/embed.weight/", files.format("a")),
            row("zero/up.weight/", files.format("b")),
            row("zero/", "optimizer_state.pt: parameter groups, loss scaler 41 head"),
            row("model states", "*_model_states.pt: shapes, steps, client state 41 head"),
        ],
        ["Every file holds a whole tensor, so that any number of ranks can cut it."],
    )


def commit() -> str:
    """A save of two ranks."""
    return steps_picture(
        "One save: complete, or not at all",
        ["rank 0", "rank 1", "root/TAG/", "root/latest"],
        [
            (0, 1, "agree on tag, step and files", "head"),
            (0, 2, "rank 0 writes the in-progress marker into TAG", "b"),
            (0, 0, "write own files, sync", "a"),
            (1, 1, "write own files, sync", "a"),
            (0, 1, "send sizes and checksums to rank 0", "head"),
            (0, 2, "rank 0 writes ckpttool.json: the commit", "c"),
            (0, 3, "rank 0 replaces latest", "c"),
            (0, 2, "rank 0 removes the marker", "b"),
        ],
        "A crash before the commit leaves a directory that readers refuse. A crash after it leaves a whole checkpoint.",
    )


def packages() -> str:
    """The pipeline of the packages of the core, and below it the extensions by the fields of their rows."""
    return rows_picture(
        "The packages of the core, in the order in which data passes through them, and the extensions beside it",
        [
            row("open", "storage 10 a | containers 10 a | formats 10 a | model 10 d"),
            row("consolidate, convert", "model 10 d | targets 10 b | plan 10 b | execution 10 c | storage 10 a"),
            row("save in a run", "engine 10 head | integrations 10 d | saving 10 b | commit 10 c | storage 10 a"),
            row(
                "load into a run",
                "model 10 d | targets.zero 10 b | execution 10 c | integrations 10 d | engine 10 head",
            ),
            *_extensions(),
        ],
        [
            "model is data: for each state of each parameter, the file, offset and length of each run of elements.",
            "plan is data too: for each byte of each output file, its source byte. Only execution moves bytes.",
            "The row of an extension lists all that it adds. Without this row and the folder the core is whole.",
        ],
    )


def _extensions() -> list[Row]:
    """Rows of extensions: for each field of ``registry.Extension`` those that have it."""
    return [
        Row(f"extensions: {field}", tuple(Box(one.name, 10, "") for one in EXTENSIONS if getattr(one, field)))
        for field in ("commands", "options", "formats", "targets", "retention", "hooks", "addresses")
    ]


PICTURES = {"stage12": stage12, "stage3": stage3, "universal": universal, "commit": commit, "packages": packages}


def write(directory: Path) -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")
