"""What all pages share: paper, names that hide something, one tab stop for a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ckpttool as api
from ckpttool.extensions.pages.checkpoint import checkpoint_page
from ckpttool.messages import printable
from tests import synthetic
from tests.cli.command import ckpttool
from tests.extensions.pages.test_catalog import _entry, _page
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.extensions.pages.browser import Opened

    Open = Callable[..., Opened]

PAPER = 700
"""Pixels between the margins of a sheet of A4."""
ESCAPED = "\u00ad\u034f\u061c\u115f\u17b4\u180e\u200b\u202e\u2028\u2800\u3164\ufe0f\ufeff\uffa0\U000e0041\U000e0100"


@pytest.mark.parametrize("command", ["inspect", "diff", "ls"])
def test_nothing_is_cut_on_paper(command: str, opened: Open, tmp_path: Path) -> None:
    name = source("pipeline-zero1-pp2-tp2-bf16")
    if command == "inspect":
        data = checkpoint_page(api.inspect(name))
    elif command == "ls":
        data = _page(*(_entry(f"global_step{i}", i, 1e9 + i, problem="is missing " * 9, whole=False) for i in range(9)))
    else:
        assert ckpttool("diff", name, source("megatron-zero1-tp2-dp2-bf16"), "--html", tmp_path / "d.html").code == 1
        data = (tmp_path / "d.html").read_bytes()
    nothing_is_cut_on_paper(opened(data))


def nothing_is_cut_on_paper(page: Opened) -> None:
    """Check that a page is as wide as a sheet of paper when it is printed."""
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    page.page.set_viewport_size({"width": PAPER, "height": 1000})
    page.page.emulate_media(media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    wide = page.run(
        "(paper) => [...document.querySelectorAll('table, canvas, svg, .facts, .note')]"
        ".filter((e) => e.getClientRects().length && e.getBoundingClientRect().right > paper + 1)"
        ".map((e) => `${e.tagName} ${e.id} ${e.getBoundingClientRect().right}`)",
        PAPER,
    )
    assert wide == []
    sketches = page.run("[...document.querySelectorAll('td svg')].map((e) => [e.clientWidth, e.viewBox.baseVal.width])")
    assert all(scaled > 0 and whole > 0 for scaled, whole in sketches)  # a view box scales, no part is left out
    broken = page.run(
        """[...document.querySelectorAll('td.right')].filter((e) => {
          const range = document.createRange();
          range.selectNodeContents(e);
          return e.childElementCount === 0 && !e.innerText.includes(' ') && range.getClientRects().length > 1;
        }).map((e) => e.innerText)"""
    )
    assert broken == []
    page.sound()


def test_the_page_and_the_terminal_show_what_cannot_be_seen(opened: Open) -> None:
    page = opened(checkpoint_page(api.inspect(source("zero2-dp2-bf16"))))
    for character in ESCAPED:
        code = ord(character)
        known = f"a\\u{code:04x}b" if code > 0xFF else f"a\\x{code:02x}b"
        known = f"a\\U{code:08x}b" if code > 0xFFFF else known
        assert printable(f"a{character}b") == known
        assert page.run("page.text", f"a{character}b") == known.replace("\\x", "\\u00")
    for text in ("Größe 重み é 🙂 x̂", "model.layers.0"):
        assert printable(text) == page.run("page.text", text) == text
    page.sound()


def test_a_treemap_is_one_tab_stop_with_arrow_keys(opened: Open) -> None:
    page = opened(checkpoint_page(api.inspect(source("zero3-dp4-bf16"))))
    leaves = page.run("document.querySelectorAll('svg .leaf').length")
    assert leaves > 3
    assert page.run("document.querySelectorAll('svg .leaf[tabindex=\"0\"]').length") == 1
    page.page.focus("svg .leaf[tabindex='0']")
    place = "[...document.querySelectorAll('svg .leaf')].indexOf(document.activeElement)"
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowDown", 2),
        ("ArrowLeft", 1),
        ("End", leaves - 1),
        ("ArrowRight", leaves - 1),
        ("Home", 0),
    ):
        page.page.keyboard.press(key)
        assert page.run(place) == at
    page.page.keyboard.press("Tab")
    assert page.run(place) == -1
    page.sound()


def test_colours_that_are_data_stay_where_a_reader_has_colours_of_their_own(opened: Open) -> None:
    """Forced colours of the system would paint legends and bars in one colour."""
    page = opened(checkpoint_page(synthetic.large(2, 2, 64)), forced=True)
    assert page.run("matchMedia('(forced-colors: active)').matches")
    for selector in (".bar", ".legend i"):
        colours = page.run(
            "(s) => [...document.querySelectorAll(s)].map((e) => { const { backgroundColor, backgroundImage } ="
            " getComputedStyle(e); return backgroundColor + backgroundImage; })",
            selector,
        )
        assert len(set(colours)) > 1 or "gradient" in colours[0], selector
    page.sound()
