"""Write the tables at the start of the reference: the names of each page, and the commands."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ckpttool.cli import SECTIONS, cli
from docs.generators import extension_pages

API = Path(__file__).resolve().parents[1] / "api"


def write(out: Path) -> None:
    """Write a fragment for each page of the API that describes names, and one for the commands."""
    for page in sorted(API.glob("*.md")):
        text = extension_pages.completed(f"api/{page.stem}", page.read_text(encoding="utf-8"))
        names = re.findall(r"(?m)^\.\. auto(?:function|class|exception):: (\S+)$", text)
        if names:
            lines = [
                "```{eval-rst}",
                ".. autosummary::",
                "   :nosignatures:",
                "",
                *(f"   {n}" for n in names),
                "```",
                "",
            ]
            (out / f"summary-{page.stem}.md").write_text("\n".join(lines), encoding="utf-8")
    (out / "commands.md").write_text("\n".join(_commands()), encoding="utf-8")


def _commands() -> list[str]:
    rows = ["| for | command | work |", "| --- | --- | --- |"]
    context = click.Context(cli)
    for section, names in SECTIONS.items():
        for name in names:
            if command := cli.get_command(context, name):
                # The anchors come from sphinx_click, so Markdown does not know them.
                link = f'<a href="#ckpttool-{name}"><code>{name}</code></a>'
                rows.append(f"| {section} | {link} | {command.get_short_help_str(200)} |")
    return [*rows, ""]
