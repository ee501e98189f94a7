"""The page of a root: steps, times and sizes of a run, also of one that went wrong."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.catalog.listing import NOT_FOLLOWED, Catalog, CatalogEntry
from ckpttool.catalog.retention import Rules, decide
from ckpttool.commit.marks import Pin
from ckpttool.extensions.pages.catalog import catalog_page
from tests.catalog.decisions import Keeping
from tests.cli.command import ckpttool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.extensions.pages.browser import Opened

    Open = Callable[..., Opened]


def _entry(name: str, step: int | None, modified: float | None, **more: Any) -> CatalogEntry:
    given: dict[str, Any] = {
        "name": name, "path": f"/run/{name}", "format": "zero", "stage": 2, "world_size": 2, "step": step,
        "nbytes": 1000, "modified": modified, "saved": modified, "whole": True, "problem": None, "latest": False,
        "link": None, "metrics": {}, "of_run": True,
    }  # fmt: skip
    return CatalogEntry(**(given | more))


def _page(*entries: CatalogEntry) -> bytes:
    return catalog_page(Catalog("/run", entries, ()))


def _chart(page: Opened, title: str) -> list[list[float | None]]:
    """What a chart is drawn from: positions, then the values of each series."""
    found: list[list[float | None]] = page.run("(t) => page.charts.find((c) => c.title === t).data", title)
    return found


def test_steps_over_time_are_in_the_order_of_time(opened: Open) -> None:
    page = opened(_page(_entry("a", 10, 3e9), _entry("b", 20, 1e9), _entry("c", 30, 2e9), _entry("d", 40, None)))
    assert _chart(page, "Steps over time") == [[1e9, 2e9, 3e9], [20, 30, 10]]
    assert "oldest" not in page.text("#entries caption")
    page.sound()


@pytest.mark.parametrize("count", [2, 300])
def test_checkpoints_of_one_step_and_time_are_drawn(count: int, opened: Open) -> None:
    entries = [_entry(f"try{i}", 7, 1e9, nbytes=1000 + i, metrics={"loss": 1.0 + i}) for i in range(count)]
    page = opened(_page(*entries))
    for title in ("loss", "Size of the checkpoints", "Steps over time"):
        low, high = page.run(
            "(t) => { const { x } = page.charts.find((c) => c.title === t).plot().scales; return [x.min, x.max]; }",
            title,
        )
        assert low < _chart(page, title)[0][0] < high
        pixels = page.run(
            """(title) => {
              const { ctx } = page.charts.find((c) => c.title === title).plot(), { width, height } = ctx.canvas;
              const { data } = ctx.getImageData(0, 0, width, height);
              let seen = 0;
              for (let i = 0; i < data.length; i += 4) {
                const [r, g, b, a] = data.slice(i, i + 4);
                if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 90) seen += 1;
              }
              return seen;
            }""",
            title,
        )
        assert pixels > 20, title
    assert "of step 7" in page.text("section")
    page.sound()


def test_a_torn_checkpoint_has_its_size_in_the_chart(opened: Open, tmp_path: Path) -> None:
    from tests.extensions.pages.test_other_pages import torn_run

    root = torn_run(tmp_path)
    assert ckpttool("ls", root, "--html", tmp_path / "ls.html").code == 0
    page = opened(tmp_path / "ls.html")
    found = api.ls(root).entries
    x, whole, torn = _chart(page, "Size of the checkpoints")
    assert x == [3, 3, 30]  # the files of all three say 3; the torn one cannot be read, and its name says 30
    assert whole == [found[0].nbytes, found[1].nbytes, None]
    assert torn == [None, None, found[2].nbytes]
    page.sound()


def test_a_checkpoint_behind_a_link_is_not_called_torn(opened: Open) -> None:
    problem = f"leads to /elsewhere, which {NOT_FOLLOWED}"
    page = opened(_page(_entry("a", 1, 1e9), _entry("b", 2, 2e9, whole=False, problem=problem, link="/elsewhere")))
    assert "not read (--follow-links), link to /elsewhere" in page.text("#entries")
    assert "torn" not in page.text("#entries")
    assert len(_chart(page, "Size of the checkpoints")) == 2
    page.sound()


def _losses(*losses: float | None) -> bytes:
    """A page of one checkpoint for each loss; None has no loss."""
    return _page(
        *(_entry(f"s{i}", i, 1e9 + i, metrics={} if loss is None else {"loss": loss}) for i, loss in enumerate(losses))
    )


def test_the_page_says_which_values_no_chart_has(opened: Open) -> None:
    page = opened(_losses(1.0, math.nan, math.inf, 0.5, None, -math.inf))
    assert _chart(page, "loss")[1] == [1.0, None, None, 0.5, None, None]
    assert page.text(".left-out") == ("Not in this chart: NaN at step 1; infinite at steps 2, 5; no value at step 4.")
    page.sound()


def test_of_many_values_that_no_chart_has_five_are_named(opened: Open) -> None:
    page = opened(_losses(1.0, *[math.nan] * 7, 2.0))
    assert page.text(".left-out") == "Not in this chart: NaN at 7 steps: 1, 2, 3, 4, 5, ..." + "."
    page.sound()


def test_a_line_has_a_gap_where_a_value_is_left_out(opened: Open) -> None:
    page = opened(_losses(1.0, 2.0, math.nan, 1.5, None, 0.5, 0.6))
    gaps = page.run("page.charts.find((c) => c.title === 'loss').plot().series[1]._paths.gaps.length")
    assert gaps == 2
    page.sound()


def test_a_point_between_gaps_is_drawn_in_a_long_chart(opened: Open) -> None:
    page = opened(_losses(*[1.0] * 300, math.nan, 2.0, math.nan, *[1.0] * 300))
    assert page.run("page.charts[0].plot().series[1].points.filter(page.charts[0].plot(), 1, false, null)") == [301]
    assert page.run("!!page.charts[0].plot().series[1].points._paths")
    page.sound()


def test_the_numbers_of_a_metric_are_in_a_table(opened: Open) -> None:
    page = opened(_losses(1.25, math.nan, None))
    assert page.run("document.querySelector('figure.chart').getAttribute('aria-label')") == (
        "loss; the table below has the numbers"
    )
    page.page.click(".numbers summary")
    page.wait_for("document.querySelector('.numbers tbody tr')")
    rows = page.run(
        "[...document.querySelectorAll('.numbers tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert rows == [["0", "1.25"], ["1", "nan"], ["2", ""]]
    names = page.run("[...document.querySelectorAll('figure.chart')].map((f) => f.getAttribute('aria-label'))")
    captions = page.run("[...document.querySelectorAll('caption')].map((c) => c.innerText)")
    assert all(name.split('"')[1] in captions for name in names if '"' in name)
    page.sound()


@pytest.mark.parametrize(
    ("apart", "pattern"),
    [
        (10, r"02:4\d:\d[05](\n2001-09-09)?"),
        (3600, r"0\d:[03]0(\n2001-09-09)?"),
        (7200, r"\d\d:00(\n2001-09-\d\d)?"),
        (5 * 86400, r"2001-09-\d\d"),
    ],
)
def test_times_are_written_as_in_iso_8601(apart: float, pattern: str, opened: Open) -> None:
    start = 1e9 + 3600  # 2001-09-09 02:46:40
    page = opened(_page(*(_entry(f"s{i}", i, start + i * apart) for i in range(5))))
    shown = page.run("page.charts.find((c) => c.title === 'Steps over time').plot().axes[0]._values")
    labels = [text for text in shown if text]
    assert len(labels) >= 2
    assert all(re.fullmatch(pattern, text) for text in labels)
    assert "2001-09" in labels[0]
    page.sound()


def test_pins_and_thin_checkpoints_are_named(opened: Open) -> None:
    pin = Pin("ana", 1e9, "the paper's <run>")
    thin = _entry("b", 20, 9e9, format="thin", stage=None, thin="bf16", saved=2e9)
    page = opened(_page(_entry("a", 10, 1e9, pin=pin), thin, _entry("c", 30, 3e9)))
    first, second, _ = page.run("() => [...document.querySelectorAll('#entries tbody tr')].map((r) => r.innerText)")
    assert "pinned by ana: the paper's <run>" in first
    assert "thin bf16" in second
    assert "2033-05-18" in second  # the time of the save, not that of the thinning
    assert _chart(page, "Steps over time")[0] == [1e9, 2e9, 3e9]
    page.sound()


def test_rules_that_thin_are_told_apart_from_those_that_remove(opened: Open) -> None:
    entries = tuple(_entry(f"s{step}", step, 1e9 + step, path=f"/run/s{step}") for step in (10, 15, 20, 30))
    rules: dict[str, Any] = {"keep_last": 1, "keep_for": 7 * 86400.0, "thin_every": 10}
    action: Any = Keeping("bf16", 10)
    decisions = decide(entries, Rules(last=1, age=7 * 86400.0, action=action), root="/run")
    data = catalog_page(Catalog("/run", entries, ()), decisions, rules)
    page = opened(data)
    assert "--keep-last 1 --keep-for 7d --thin-every 10" in page.text("#entries thead")
    rows = page.run("() => [...document.querySelectorAll('#entries tbody tr')].map((r) => r.lastChild.innerText)")
    assert [row.split(":")[0] for row in rows] == ["thinned to bf16", "removed", "thinned to bf16", "kept"]
    assert "frees 1.0 kB, thins 2" in page.text("body")
    page.sound()


def test_a_page_of_many_roots_is_as_wide_as_a_telephone(opened: Open, tmp_path: Path) -> None:
    long = {f"a metric with a long name for the {word} part of the model": 1.0 for word in ("encoder", "decoder")}
    problem = "is a root of its own, with a checkpoint"
    entries = [_entry(f"run{i}", 3, 1e9 + i / 1000, whole=False, problem=problem, metrics=long) for i in range(131)]
    page = opened(_page(*entries), width=375)
    assert page.run("document.documentElement.scrollWidth") <= 375
    plot = "page.charts.find((c) => c.title === 'Steps over time').plot()"
    places, texts = page.run(f"[{plot}.axes[0]._splits.map((v) => {plot}.valToPos(v, 'x')), {plot}.axes[0]._values]")
    longest = max(len(line) for text in texts for line in str(text).split("\n"))
    assert len(places) >= 2
    assert min(after - before for before, after in itertools.pairwise(places)) > 6.5 * longest  # pixels of a character
    page.sound()
