"""The code blocks of README and of the documentation: read, run, and compared with the output that the page shows.

    python -m tests.docs.blocks docs/quickstart.md    # writes what the commands print today into the page

Kinds of blocks, by the name behind the fence:

* ``console``: each line after "$ " is a command; the lines behind it are its output. Blocks of a page run in order in
  one empty directory, in which ``fixtures`` and ``examples`` are.
* ``python``: executed, in the same directory.
* ``text`` and ``{directive}``: no code.
* all others, and blocks that need what the tests lack: a comment right above says why they are not run, or of which
  example they are an excerpt:

      <!-- not run: needs a bucket of yours -->
      <!-- excerpt of examples/train_loop.py -->
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cli.command import ckpttool
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    + [p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "_generated"} & {*p.parts}]
    + [*(ROOT / "ckpttool" / "extensions").glob("*/docs/**/*.md")]
)
RUN = ("console", "python")
BUCKET = "s3://models"
"""The bucket in blocks that are run: on a server that the tests start."""
SHELL = ("cp", "ls", "truncate", "head", "rm", "diff")
"""Commands beside ckpttool that blocks may use."""
_FENCE = re.compile(
    r"^(?P<mark>[ ]*<!-- (?P<note>(?:not run: |excerpt of )[^\n]*) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One code block."""

    page: Path
    line: int
    kind: str
    body: str
    note: str
    """Why it is not run, or of what it is an excerpt; empty if it is run."""

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: m.start("ticks")].count("\n") + 1, m["kind"].strip(), m["body"], m["note"] or "")
        for m in _FENCE.finditer(text)
    ]


def to_run(page: Path) -> list[Block]:
    """The blocks of a page that are run."""
    return [b for b in blocks(page) if b.kind in RUN and not b.note]


def commands(body: str) -> list[tuple[str, str]]:
    """The commands of a console block, and the output that is shown behind each."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    result = []
    for part in parts:
        command, _, shown = part.partition("\n")
        while command.endswith("\\"):
            more, _, shown = shown.partition("\n")
            command = f"{command[:-1]}{more.strip()}"
        result.append((command, shown))
    return result


def printed(command: str) -> tuple[int, str]:
    """Run a command; its exit code, and what it prints: of a command that fails, also what it says on stderr."""
    name, *arguments = shlex.split(command)
    if name == "ckpttool":
        outcome = ckpttool(*arguments)
        return outcome.code, outcome.stdout + (outcome.stderr if outcome.code else "")
    assert name in SHELL, f"{name} is not run by the tests: give a reason"
    done = subprocess.run([name, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def execute(body: str) -> None:
    """Run a Python block."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and fsspec
        exec(compile(body, "<block>", "exec"), names)  # noqa: S102  (our own documentation)


def without_times(text: str) -> str:
    """Output without what differs from run to run."""
    if text.startswith("checkpoint ") and " age " in text:  # ls: how old the files are, which also sets the columns
        text = re.sub(r" +", " ", re.sub(r"\b\d+ (s|min|h|d)(?=  )", "some time", text))
    text = re.sub(r"pinned(.*) by \S+@\S+?(?= |:)( \d+ (s|min|h|d) ago)?", r"pinned\1 by someone", text)
    text = re.sub(r"^needs: about .*$", "needs: some memory", text, flags=re.MULTILINE)
    return re.sub(r"in \d+\.\d s", "in 0.0 s", text)


def needs_bucket(page: Path) -> bool:
    """Whether a block of a page that is run uses the bucket."""
    return any(BUCKET in block.body for block in to_run(page))


@contextlib.contextmanager
def bucket(endpoint: str) -> Iterator[None]:
    """An S3 server with the bucket that the pages use, found by the environment."""
    from ckpttool.storage.s3_client import SingleAttemptFileSystem

    server.client(endpoint).create_bucket(Bucket=BUCKET.removeprefix("s3://"))
    added = {**server.ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    SingleAttemptFileSystem.clear_instance_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        server.forget_everything(endpoint)


@contextlib.contextmanager
def workplace() -> Iterator[str]:
    """An empty directory that sees fixtures and examples under the names the pages use."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("fixtures", "examples"):
            (Path(directory) / name).symlink_to(ROOT / name)
        os.chdir(directory)
        try:
            yield directory
        finally:
            os.chdir(before)


def renew(page: Path) -> None:
    """Write into a page what its commands print today."""
    text = page.read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        stack.enter_context(workplace())
        if needs_bucket(page):
            stack.enter_context(bucket(stack.enter_context(server.running())))
        for block in to_run(page):
            if block.kind == "python":
                execute(block.body)
                continue
            body = ""
            for command, shown in commands(block.body):
                code, out = printed(command)
                sys.stderr.write(f"{code} {command}\n")
                same = without_times(out) == without_times(shown)
                body += f"$ {command}\n{shown if same else out}"
            if "\\\n" not in block.body:
                text = text.replace(block.body, body, 1)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        renew(Path(argument).resolve())
