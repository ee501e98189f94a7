"""The page of a root: steps, times and sizes of a run, also of one that went wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.api._pages import page_of_catalog
from ckpttool.catalog.entries import Catalog, CatalogEntry
from ckpttool.commit.pins import Pin
from tests.cli.command import ckpttool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.pages.browser import Opened

    Open = Callable[..., Opened]


def _entry(name: str, step: int | None, modified: float | None, **more: Any) -> CatalogEntry:
    given: dict[str, Any] = {
        "name": name, "path": f"/run/{name}", "format": "zero", "stage": 2, "world_size": 2, "step": step,
        "nbytes": 1000, "modified": modified, "saved": modified, "whole": True, "problem": None, "latest": False,
        "link": None, "metrics": {},
    }  # fmt: skip
    return CatalogEntry(**(given | more))


def _page(*entries: CatalogEntry) -> bytes:
    return page_of_catalog(Catalog("/run", entries, ()))


def _chart(page: Opened, title: str) -> list[list[float | None]]:
    """What a chart is drawn from: positions, then the values of each series."""
    found: list[list[float | None]] = page.run("(t) => page.charts.find((c) => c.title === t).plot().data", title)
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
    from tests.pages.test_other_pages import torn_run

    root = torn_run(tmp_path)
    assert ckpttool("ls", root, "--html", tmp_path / "ls.html").code == 0
    page = opened(tmp_path / "ls.html")
    found = api.ls(root).entries
    x, whole, torn = _chart(page, "Size of the checkpoints")
    assert x == [3, 3, 30]  # the files of all three say 3; the torn one cannot be read, and its name says 30
    assert whole == [found[0].nbytes, found[1].nbytes, None]
    assert torn == [None, None, found[2].nbytes]
    page.sound()


def test_the_page_says_which_values_no_chart_has(opened: Open) -> None:
    losses = [1.0, math.nan, math.inf, 0.5]
    page = opened(_page(*(_entry(f"s{i}", i, 1e9 + i, metrics={"loss": loss}) for i, loss in enumerate(losses))))
    assert _chart(page, "loss")[1] == [1.0, None, None, 0.5]
    assert page.text(".left-out") == "Not in this chart: 2 values that are NaN or infinite."
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
    data = page_of_catalog(Catalog("/run", entries, ()), keep_last=1, thin_every=10, keep_for=7 * 86400.0)
    page = opened(data)
    assert "--keep-last 1 --keep-for 7d --thin-every 10" in page.text("#entries thead")
    rows = page.run("() => [...document.querySelectorAll('#entries tbody tr')].map((r) => r.lastChild.innerText)")
    assert [row.split(":")[0] for row in rows] == ["thinned to bf16", "goes", "thinned to bf16", "stays"]
    page.sound()
