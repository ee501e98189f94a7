"""The pages of ls and diff in a real browser: they draw, and say what the commands say."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool as api
from ckpttool.analysis.diff import Difference, DiffReport
from ckpttool.extensions.pages.diff import diff_page
from ckpttool.registry import options_of
from tests.cli.command import EXTENSIONS_READING, ckpttool, remains
from tests.extensions.pages.test_checkpoint import HOSTILE
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.extensions.pages.browser import Opened

    Open = Callable[..., Opened]

ZERO2, ZERO3 = source("zero2-dp2-bf16"), source("zero3-dp2-bf16")


def cells(page: Opened, table: str, column: int) -> list[str]:
    """Return the texts of a column of a table."""
    found: list[str] = page.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map((r) => r.cells[{column}].innerText)"
    )
    return found


def torn_run(directory: Path) -> Path:
    """A root with three checkpoints, the last of which is torn."""
    root = directory / "run"
    for step in (10, 20, 30):
        shutil.copytree(os.path.join(ZERO2, "global_step3"), root / f"global_step{step}")
    (root / "latest").write_text("global_step20")
    next((root / "global_step30").glob("*optim*")).unlink()
    return root


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    """A root with three checkpoints, the last of which is torn."""
    return torn_run(tmp_path)


# ------------------------------------------------------------------------------------------------- ls


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_life_of_a_run(scheme: str, opened: Open, run_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "ls.html"
    assert ckpttool("prune", run_root, "--keep-last", "1", "--dry-run", "--html", out).code == 0
    page = opened(out, scheme=scheme)
    found = api.ls(run_root)
    assert cells(page, "entries", 0) == [e.name for e in found.entries]
    decisions = api.prune(run_root, keep_last=1, dry_run=True)
    told = cells(page, "entries", 8)
    assert [text.partition(":")[0] == "kept" for text in told] == [d.keep for d in decisions]
    assert all(d.reason in text for d, text in zip(decisions, told, strict=True))
    assert "torn" in cells(page, "entries", 7)[2]
    assert page.run("page.charts.map((c) => c.title)").count("Size of the checkpoints") == 1
    assert page.run("page.charts.every((c) => c.data[0].length > 0)")
    page.sound()
    assert remains(tmp_path)[0] == "ls.html"


def test_a_root_with_hostile_names(opened: Open, run_root: Path, tmp_path: Path) -> None:
    names = ["<script>window.hacked=1</script>", "\"><img src=x onerror='window.hacked=1'>", "\u202estep"]
    for name in names:
        shutil.copytree(run_root / "global_step10", run_root / name.replace("/", "_"))
    out = tmp_path / "ls.html"
    assert ckpttool("ls", run_root, "--html", out).code == 0
    page = opened(out)
    assert len(cells(page, "entries", 0)) == 6
    assert page.run("window.hacked === undefined && !document.querySelector('img')")
    page.sound()


# ------------------------------------------------------------------------------------------------- diff


def test_a_comparison_shows_where_and_how_much(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "diff.html"
    done = ckpttool("diff", ZERO2, ZERO3, "--html", out)
    assert done.code == 1
    report = api.diff(ZERO2, ZERO3)
    page = opened(out)
    assert page.text("h1") == f"{len(report.different)} of {len(report.tensors)} tensors differ"
    worst = max(report.tensors, key=lambda t: t.max_abs)
    assert (cells(page, "tensors", 0)[0], cells(page, "tensors", 1)[0]) == (worst.name, worst.state)
    layers = list(dict.fromkeys(t.name.partition(".")[0] for t in report.tensors))
    assert cells(page, "heat", 0) == layers
    for layer, shown in zip(layers, cells(page, "heat", 1), strict=True):
        most = max(t.max_abs for t in report.tensors if t.name.partition(".")[0] == layer and t.state == "weights")
        assert shown == "equal" if most == 0 else math.isclose(float(shown), most, rel_tol=0.05)
    page.page.select_option("#measure", "share")
    assert any(text.endswith("%") for text in cells(page, "heat", 1))
    page.page.fill("#search", "up.*")
    assert set(cells(page, "tensors", 0)) == {"up.weight", "up.bias"}
    page.sound()


def test_equal_checkpoints_and_only_in_one(opened: Open, tmp_path: Path) -> None:
    assert ckpttool("diff", ZERO2, ZERO2, "--html", tmp_path / "same.html").code == 0
    page = opened(tmp_path / "same.html")
    assert page.text("h1") == "equal"
    page.sound()
    assert ckpttool("diff", ZERO2, source("zero0-dp2-fp32"), "--html", tmp_path / "other.html").code == 1
    opened(tmp_path / "other.html", width=390).sound()


def test_no_page_runs_a_hostile_name(opened: Open, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    names = [name for name in HOSTILE if name and "\ud800" not in name and name != "__proto__"]
    safetensors.save_file({name: np.ones(3, np.float32) for name in names}, str(tmp_path / "model.safetensors"))
    other = tmp_path / "other"
    other.mkdir()
    safetensors.save_file({name: np.zeros(3, np.float32) for name in names}, str(other / "model.safetensors"))
    src = tmp_path / "model.safetensors"
    with_page = [name for name in EXTENSIONS_READING if options_of(name)]
    commands: list[list[Any]] = [["inspect", src], ["diff", src, other], *([name, src] for name in with_page)]
    for command in commands:
        out = tmp_path / f"{command[0]}.html"
        assert ckpttool(*command, "--html", out).code in {0, 1}
        page = opened(out)
        assert page.run("window.hacked === undefined && !document.querySelector('img, iframe')")
        assert page.run("document.scripts.length") == 2
        page.sound()


def test_a_comparison_of_many_tensors_lists_those_that_differ_most(opened: Open) -> None:
    tensors = [
        Difference(f"layers.{i}.weight", "weights", "values", ("F32", "F32"), ((8,), (8,)), 1 + i % 8, i / 7, i / 9)
        for i in range(50)
    ]
    tensors[3] = Difference("layers.3.weight", "weights", "only in a", ("F32", None), ((8,), None))
    tensors[4] = Difference("layers.4.weight", "weights", "equal", ("F32", "F32"), ((8,), (8,)))
    data = diff_page(DiffReport("a", "b", tuple(tensors), ()), max_rows=10)
    page = opened(data)
    assert page.text("h1") == "49 of 50 tensors differ"
    assert len(cells(page, "heat", 0)) == 50
    assert cells(page, "heat", 1)[3:5] == ["only in a", "equal"]
    shown = cells(page, "tensors", 0)
    assert set(shown) == {"layers.3.weight", *(f"layers.{i}.weight" for i in range(41, 50))}
    assert "the other 40 differ less" in page.text("#tensors caption")
    many = [replace(t, name=f"model.{k}.{t.name}") for k in range(2_000) for t in tensors]
    assert len(diff_page(DiffReport("a", "b", tuple(many), ()))) < 1_000_000
    page.sound()
