"""Code blocks of README and of the documentation run and print what the page shows, or say why they are not run."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import (
    PAGES,
    ROOT,
    RUN,
    blocks,
    bucket,
    commands,
    execute,
    needs_bucket,
    printed,
    to_run,
    without_times,
    workplace,
)

if TYPE_CHECKING:
    from pathlib import Path

EXIT_ONE = ("diff", "verify")
"""Commands whose result may be bad without an error."""


@pytest.mark.parametrize("page", [p for p in PAGES if to_run(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(page: Path, request: pytest.FixtureRequest) -> None:
    python = [block.body for block in to_run(page) if block.kind == "python"]
    if any("torch" in body for body in python):
        pytest.importorskip("torch", reason="a block of this page uses torch")
    if needs_bucket(page):
        pytest.importorskip("moto", reason="a block of this page needs an S3 server")
    with contextlib.ExitStack() as stack:
        stack.enter_context(workplace())
        if needs_bucket(page):
            stack.enter_context(bucket(request.getfixturevalue("s3_server")[0]))
        for block in to_run(page):
            if block.kind == "python":
                execute(block.body)
                continue
            assert commands(block.body), f"{block.place}: no command begins with '$ '"
            for command, shown in commands(block.body):
                code, output = printed(command)
                may_fail = "Error: " in shown or not {*command.split()[:2]}.isdisjoint(EXIT_ONE)
                assert code == 0 or may_fail, f"{block.place}: {command}\n{output}"
                assert without_times(output) == without_times(shown), f"{block.place}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "text" or block.kind.startswith("{"):
            continue
        assert block.note or block.kind in RUN, f"{block.place}: say above it why it is not run"
        if block.note.startswith("not run: "):
            assert len(block.note) > len("not run: needs x"), f"{block.place}: that is no reason"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_an_excerpt_is_in_the_example(page: Path) -> None:
    """The examples themselves are run by ``test_docs`` and by the tests under Ray."""
    for block in blocks(page):
        if not block.note.startswith("excerpt of "):
            continue
        name = block.note.removeprefix("excerpt of ")
        assert name.startswith("examples/"), block.place
        source = iter(line.strip() for line in (ROOT / name).read_text().splitlines())
        for line in block.body.splitlines():
            wanted = line.partition("  # ")[0].strip()
            if wanted and wanted != "...":
                assert any(found.partition("  # ")[0].strip() == wanted for found in source), f"{block.place}: {wanted}"


def test_counts_of_changed_lines_are_those_of_the_diff() -> None:
    text = (ROOT / "docs" / "howto" / "ray-train.md").read_text()
    told = re.findall(
        r"removes (\d+) of (\d+) lines and\sadds (\d+):\s+```console\n\$ diff .* (\S+) \S+\n([^`]*)", text
    )
    assert len(told) == 3
    for removed, lines, added, before, shown in told:
        marks = [line[:1] for line in shown.splitlines()[2:]]
        found = marks.count("-"), len((ROOT / before).read_text().splitlines()), marks.count("+")
        assert found == (int(removed), int(lines), int(added))


def test_included_files_are_examples_that_are_run() -> None:
    for page in PAGES:
        for block in blocks(page):
            included = re.match(r"\{literalinclude\} (\S+)", block.kind)
            if included:
                assert (page.parent / included[1]).resolve().parent == ROOT / "examples", block.place


def test_there_are_blocks() -> None:
    """The pattern that finds them still does."""
    assert sum(len(to_run(page)) for page in PAGES) >= 25
    assert all("```" not in b.body for page in PAGES for b in blocks(page))
