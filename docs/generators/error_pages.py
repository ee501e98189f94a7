"""Write a page for each class of error, which lists its messages with one anchor for each, and their index."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .error_messages import Message, public_class, read_messages

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TITLES = {
    "StorageError": "StorageError: a file or directory cannot be listed, read or written",
    "LinkError": "LinkError: a symbolic link leaves the checkpoint's root",
    "PruneError": "PruneError: a checkpoint could not be removed or thinned",
    "ContainerError": "ContainerError: a file is damaged, hostile, or of another format",
    "TruncatedError": "TruncatedError: a file ends before its content does, or was never written",
    "ChecksumError": "ChecksumError: bytes differ from those saved",
    "LayoutError": "LayoutError: the files do not form a checkpoint",
    "PlanError": "PlanError: this checkpoint cannot give the requested output",
    "ArgumentError": "ArgumentError: an argument is wrong",
    "CkptError": "CkptError: ranks that fail together, and findings of verify",
    "ProofError": "ProofError: the live state differs from the saved one",
}
"""Headings of the public classes, in the order of the index."""
USE = (
    "The first text is the problem. The next steps name Python parameters; the command line shows the options instead."
)


def anchored(messages: Iterable[Message]) -> dict[str, list[Message]]:
    """Messages by anchor. Messages of one anchor differ only in placeholders, and share a place on the page."""
    result: dict[str, list[Message]] = {}
    for message in messages:
        result.setdefault(message.anchor, []).append(message)
    return result


def find(kind: str, problem: str, messages: Iterable[Message]) -> Message | None:
    """The message that an error was made from; the one with the most fixed text where several fit.

    Args:
        kind: Public class of the error.
        problem: ``CkptError.problem``.
        messages: All messages.
    """
    fits = [m for m in messages if public_class(m.kind) == kind and pattern(m.problem).fullmatch(problem)]
    return max(fits, key=lambda m: len(re.sub(r"\{[^}]*\}", "", m.problem)), default=None)


def pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a text with placeholders."""
    parts = re.split(r"\{[^{}]*\}", re.sub(r"\s+", " ", text))
    return re.compile(".*".join(re.escape(p) for p in parts), re.DOTALL)


def write(directory: Path) -> None:
    """Write the pages into a directory, and beside it ``errors.md``, the index."""
    directory.mkdir(exist_ok=True)
    index = ["| class | messages |", "| --- | --- |"]
    places = anchored(read_messages())
    for kind, title in TITLES.items():
        lines = [f"# {title}", "", USE, ""]
        of_kind = {a: ms for a, ms in places.items() if public_class(ms[0].kind) == kind}
        for anchor, messages in of_kind.items():
            lines += [f"(error-{anchor})=", ""]
            lines += [" or ".join(dict.fromkeys(_code(m.problem) for m in messages))]
            hints = list(dict.fromkeys(h for m in messages for h in m.hints))
            lines += [f": {_hints(hints)}", "", f"  {_where(messages)}", ""]
        (directory / f"{kind}.md").write_text("\n".join(lines), encoding="utf-8")
        index.append(f"| {{doc}}`{title} <_generated/errors/{kind}>` | {len(of_kind)} |")
    directory.with_suffix(".md").write_text("\n".join([*index, ""]), encoding="utf-8")


def _hints(hints: list[str]) -> str:
    if not hints:
        return "The message is self-explanatory."
    return "Next step: " + "; or: ".join(_code(h) for h in hints)


def _where(messages: list[Message]) -> str:
    modules = sorted({place for m in messages for place in m.places})
    return "From " + ", ".join(f"`{m}`" for m in modules) + "."


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"
