"""Find phrases that the project does not use: ``python -m tests.prose [--since REV] [FILE ...]``.

It reads the docstrings, comments and messages of Python files, and the text of Markdown files outside of code. With
``--since`` it reports only lines that changed after a revision.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
SCOPE = ("ckpttool", "docs", "examples", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""Files and directories to check if none is named."""
PHRASES = {
    r"\b(?:is|are|was|were) no\b(?! (?:longer|more|less|later|earlier|larger|smaller|\w+er than)\b)": "write: is not a",
    r"\bwhat (?:is|was|are|were|has|have|had)\b(?! to\b)": "write the noun: leftovers, content, files",
    r"\bwhat (?:an?|the|it|they|this|these|those|its|killed|others|ours|we|you|each|all|no|none)\b": "write the noun",
    r"\bwhat (?:ckpttool|DeepSpeed|torch|Ray)\b": "write the noun",
    r"\b(?:one|some) behind (?:the other|another)\b": "write: contiguous",
    r"\bnone of (?:them|some|these|those|its|the)\b": "write: no, not any",
    r"\banew\b": "write: again",
    r"\b(?:that|those) of\b": "write the noun again",
    r"\bof which\b": "write two sentences",
    r"\bwho (?:keeps|has|reads|may|writes|saved)\b": "write the noun: user, process, rank",
    r"\b(?:tells?|stays?|goes|lies|lie)\b": "write: reports, is kept, is removed, is stored",
    r"\bbehind (?:it|them|the)\b": "write: after",
}  # fmt: skip
"""A pattern of each phrase, and what to write in its place."""
CODE = re.compile(r"```.*?```|~~~.*?~~~|``[^`]+``|`[^`]+`|^ {4,}.*?$|<!--.*?-->", re.DOTALL | re.MULTILINE)

QUOTED = re.compile(r"``[^`]+``")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file as texts, each with the number of its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = re.compile(r"[^\n]")
        yield 1, CODE.sub(lambda found: blank.sub(" ", found[0]) if "\n" in found[0] else "`" * len(found[0]), source)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}:
            yield (
                token.start[0],
                re.sub(r"``[^`]+``|\"[^\"\n]*\"(?=[,:)])", lambda found: "`" * len(found[0]), token.string),
            )


def found_in(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and advice."""
    for first, text in texts(path):
        joined = re.sub(r"\n[ #]*", lambda found: "\n" + " " * (len(found[0]) - 1), text)
        for pattern, advice in PHRASES.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), joined):
                yield first + joined.count("\n", 0, match.start()), " ".join(match[0].split()), advice


def changed_lines(since: str, path: Path) -> set[int]:
    """Return the numbers of the lines of a file that changed after a revision."""
    command = ["git", "-C", str(ROOT), "diff", "-U0", since, "--", str(path)]
    hunks = re.findall(r"(?m)^@@ .* \+(\d+)(?:,(\d+))? @@", subprocess.check_output(command, text=True))
    return {int(first) + n for first, count in hunks for n in range(int(count or 1))}


def files(named: Sequence[str]) -> list[Path]:
    """Return the files to check."""
    listed = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", *(named or SCOPE)], text=True).splitlines()
    return [ROOT / name for name in listed if name.endswith((".py", ".md"))]


def main() -> int:
    """Print one line for each phrase; return 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--since", help="only lines changed after this revision")
    arguments = parser.parse_args()
    failed = False
    for path in files(arguments.files):
        lines = None if arguments.since is None else changed_lines(arguments.since, path)
        for line, phrase, advice in sorted(found_in(path)):
            if lines is None or line in lines:
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {phrase!r}: {advice}\n")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
