"""Tables on narrow terminals: no number breaks, and what is left out is said."""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

import ckpttool as api
from ckpttool.blocks import ELLIPSIS, Facts, Line, Table, shortened
from tests import sampling
from tests.cli.command import EXTENSIONS_READING, ckpttool, in_terminal, plain
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHECKPOINT, OTHER = source("zero2-dp2-bf16"), source("zero3-dp2-bf16")
LONG_AGO = time.time() - 10.5 * 86_400
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(?:e[+-]\d+)?(?![\w.])")

COMMANDS: dict[str, tuple[object, ...]] = {
    **{name: (name, CHECKPOINT) for name in EXTENSIONS_READING},
    "inspect": ("inspect", CHECKPOINT),
    "params": ("inspect", CHECKPOINT, "--params"),
    "ranks": ("inspect", CHECKPOINT, "--ranks"),
    "files": ("inspect", CHECKPOINT, "--files"),
    "one parameter": ("inspect", CHECKPOINT, "--param", "up.weight"),
    "digest": ("digest", CHECKPOINT, "--tensors"),
    "diff": ("diff", CHECKPOINT, OTHER, "--all"),
    "ls": ("ls", "RUN"),
    "prune": ("prune", "RUN", "--keep-last", "1", "--dry-run"),
    "consolidate": ("consolidate", CHECKPOINT, "OUT", "--to", "safetensors", "--dry-run"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, 60) for name in COMMANDS),
        *(
            pytest.param(name, columns, marks=pytest.mark.slow)
            for number, name in enumerate(COMMANDS)
            for columns in ((80, 120) if sampling.thorough() else ((80, 120)[number % 2],))
        ),
    ],
)
def test_no_number_breaks_on_a_terminal(name: str, columns: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (3, 6):
        shutil.copytree(f"{CHECKPOINT}/global_step3", run / f"a-rather-long-name-of-an-experiment-global_step{step}")
    for path in (run, *run.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))  # `ls` prints ages, which change while the test runs
    first, second = sorted(run.iterdir())
    paths = {"RUN": run, "OUT": tmp_path / "out", "FIRST": first, "SECOND": second}
    command = [paths.get(str(argument), argument) for argument in COMMANDS[name]]
    whole = ckpttool(*command)
    narrow = plain(in_terminal(*command, columns=columns, code=whole.code, errors=False)).splitlines()
    assert whole.code in {0, 1}
    known = set(NUMBER.findall(whole.stdout)) | {str(columns)}
    shown = [line for line in narrow if not line.startswith("needs: ")]  # the memory of this moment
    assert [number for line in shown for number in NUMBER.findall(line) if number not in known] == []
    assert max((len(line) for line in shown if "   " in line and CHECKPOINT not in line), default=0) <= columns
    if columns > 60:
        return
    wide = plain(in_terminal(*command, "--wide", columns=columns, code=whole.code, errors=False)).splitlines()
    assert [line for line in wide if line not in narrow[-1:] and "needs: " not in line] == [
        line for line in whole.stdout.splitlines() if "needs: " not in line and line not in narrow[-1:]
    ]


RESULTS: dict[str, Callable[[], Any]] = {
    "inspect": lambda: api.inspect(CHECKPOINT),
    "verify": lambda: api.verify(CHECKPOINT, deep=True),
    "diff": lambda: api.diff(CHECKPOINT, OTHER, all=True),
    "digest": lambda: api.digest(CHECKPOINT),
    "ls": lambda: api.ls(CHECKPOINT),
    **{name: functools.partial(getattr(api, name), CHECKPOINT) for name in EXTENSIONS_READING},
    "prune": lambda: api.prune(CHECKPOINT, keep_last=1, dry_run=True),
    "consolidate": lambda: api.consolidate(CHECKPOINT, "out", to="safetensors", prove=True),
    "convert": lambda: api.convert(CHECKPOINT, "out", to="dcp", prove=True),
    "cp": lambda: api.cp(CHECKPOINT, "out"),
    "extract": lambda: api.extract(CHECKPOINT, "up.weight", "up.npy"),
}
OPTIONS = {
    "verify": ["--deep"], "diff": [OTHER, "--all"], "consolidate": ["out", "--to", "safetensors", "--prove"],
    "convert": ["out", "--to", "dcp", "--prove"], "cp": ["out"],
    "extract": ["up.weight", "up.npy"], "prune": ["--keep-last", "1", "--dry-run"],
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_as_its_command_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("call", "command"):
        (tmp_path / where).mkdir()
    monkeypatch.chdir(tmp_path / "call")
    result = RESULTS[name]()
    monkeypatch.chdir(tmp_path / "command")
    done = ckpttool(name, CHECKPOINT, *OPTIONS.get(name, ()))
    took = re.compile(r"in \d+\.\d s")
    assert took.sub("", f"{result}\n") == took.sub("", done.stdout)


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - {"inspect"}))
def test_a_notebook_shows_the_tables_of_a_result(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = RESULTS[name]()
    page = ElementTree.fromstring(  # noqa: S314  our own
        f"<div>{result._repr_html_()}</div>"
    )
    assert [*result.blocks()]
    for block in result.blocks():
        if isinstance(block, Line):
            assert block.text in {line.text or "" for line in page.iter("div")}
            continue
        cells = (
            {value for _, value in block.shown()}
            if isinstance(block, Facts)
            else {c for row in block.rows for c in row}
        )
        assert cells
        assert cells <= {cell.text or "" for cell in page.iter("td")}


def test_a_notebook_shows_the_tables_of_a_checkpoint_that_no_extension_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.api.reading.EXTENSIONS", ())
    test_a_notebook_shows_the_tables_of_a_result("inspect", tmp_path, monkeypatch)


def test_text_of_a_checkpoint_runs_nothing_in_a_notebook() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    for block in (Line(hostile), Facts([(hostile, hostile)]), Table([hostile], [[hostile]])):
        assert "<script" not in block.html()
        assert "\x1b" not in block.html()


def test_a_narrow_table_says_what_it_leaves_out() -> None:
    columns, rows = ["name", "size", "why", "rare"], [["a" * 60, "123,456", "one two three " * 5, "9"]]
    table = Table(columns, rows, right=["size", "rare"], prose=["why"], rare=["rare"])
    lines, less = table.fitted(60, cell_len)
    assert less
    assert lines[0].split() == ["name", "size", "why"]
    assert max(map(len, lines)) <= 60
    assert "123,456" in lines[1]
    assert ELLIPSIS in lines[1]
    assert " ".join(" ".join(line[40:].split()) for line in lines).count("three") >= 1
    assert table.fitted(400, cell_len) == (table.lines(), False)


@pytest.mark.parametrize("rows", [30, 31])
def test_a_difference_of_many_tensors_shows_the_first(rows: int) -> None:
    differing = ("weights", "values", ("F32", "F32"), ((2,), (2,)), 1, 0.5, 0.25)
    table = next(
        iter(api.DiffReport("a", "b", tuple(api.Difference(f"p{n}", *differing) for n in range(rows)), ()).blocks())
    )
    assert isinstance(table, Table)
    assert len(table.head().rows) == 30
    assert len(table.lines()) == rows + 1, "a pipe gets all"


@pytest.mark.parametrize("width", range(1, 12))
def test_an_ellipsis_is_in_the_middle(width: int) -> None:
    text = "abcdefghij"
    short = shortened(text, width)
    assert len(short) == min(width, len(text))
    if width < len(text):
        start, end = short.split(ELLIPSIS)
        assert (text.startswith(start), text.endswith(end)) == (True, True)
        assert len(start) - len(end) in {0, 1}
