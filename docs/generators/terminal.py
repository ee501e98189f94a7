"""Record commands on the bundled checkpoints as pictures of a terminal.

    python docs/generators/terminal.py     # writes docs/_static/inspect.svg

The pictures are committed, because README shows them; a test compares their text with the current output of the
commands.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from ckpttool.cli import cli
from ckpttool.cli._errors import invoke

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "_static" / "inspect.svg"
COMMANDS = (
    ("inspect", "fixtures/checkpoints/zero3-dp4-bf16"),
    ("inspect", "fixtures/checkpoints/zero3-dp4-bf16", "--param", "tiny"),
)
WIDTH = 112


def session() -> str:
    """Return each command and its output."""
    shown = []
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        for command in COMMANDS:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = invoke(cli, command)
            if code:
                raise SystemExit(f"{command} ended with {code}")
            shown.append(f"$ ckpttool {' '.join(command)}\n{out.getvalue()}")
    finally:
        os.chdir(before)
    return "\n".join(shown)


def picture(text: str) -> str:
    """The session as an SVG image."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in text.splitlines():
        console.print(Text(line, style="bold green" if line.startswith("$ ") else ""), soft_wrap=True)
    drawn = console.export_svg(title="ckpttool inspect", unique_id="ckpttool")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # fonts would come from another site


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(session()), encoding="utf-8")
