"""Draw how time and memory grow with bytes and ranks, from ``benchmarks/record.json``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from docs.generators.drawings import caption, svg

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "record.json"
FACTORS = ("1x", "4x", "16x")
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")
WIDTH, HEIGHT, LEFT, TOP = 250, 190, 70, 60


def picture(record: dict[str, Any]) -> str:
    """Four panels: seconds and MB, against bytes and against ranks; both axes are logarithmic."""
    comparisons = {c["comparison"]: c["contestants"] for c in record["comparisons"] if c["benchmark"] == "growth"}
    names = [name.removesuffix(", bytes") for name in comparisons if name.endswith(", bytes")]
    parts = [caption(10, 22, "Growth with the bytes and the ranks of a checkpoint", bold=True)]
    for column, what in enumerate(("bytes", "ranks")):
        for row, (quantity, unit, low, high) in enumerate((("wall", "s", 0.05, 20), ("peak_mb", "MB", 1, 10_000))):
            x, y = LEFT + column * (WIDTH + 80), TOP + row * (HEIGHT + 60)
            parts += [caption(x, y - 8, f"{unit}, by {what}", small=True), _frame(x, y, low, high)]
            for name, colour in zip(names, COLOURS, strict=False):
                contestants = comparisons.get(f"{name}, {what}")
                if contestants is None:
                    continue
                values = [contestants[f][quantity]["median"] for f in FACTORS]
                points = " ".join(f"{x + WIDTH * n / 2:g},{_height(y, v, low, high):.1f}" for n, v in enumerate(values))
                parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    across = LEFT + 2 * (WIDTH + 80) - 40
    for n, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        y = TOP + 10 + 22 * n
        line = f'x1="{across}" y1="{y}" x2="{across + 24}" y2="{y}"'
        parts += [f'<line {line} stroke="{colour}" stroke-width="2"/>', caption(across + 32, y + 4, name, small=True)]
    return svg(across + 190, TOP + 2 * (HEIGHT + 60), parts)


def _height(y: float, value: float, low: float, high: float) -> float:
    share = math.log(max(low, min(high, value)) / low) / math.log(high / low)
    return y + HEIGHT * (1 - share)


def _frame(x: float, y: float, low: float, high: float) -> str:
    parts = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#555"/>']
    parts += [caption(x + WIDTH * n / 2 - 8, y + HEIGHT + 16, factor, small=True) for n, factor in enumerate(FACTORS)]
    value = math.pow(10, math.ceil(math.log10(low)))
    while value <= high:
        at = _height(y, value, low, high)
        parts.append(f'<line x1="{x}" y1="{at:.1f}" x2="{x + WIDTH}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(caption(x - 38, at + 4, f"{value:g}", small=True))
        value *= 10
    return "".join(parts)


def write(directory: Path) -> None:
    """Write the picture into a directory."""
    (directory / "growth.svg").write_text(picture(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
