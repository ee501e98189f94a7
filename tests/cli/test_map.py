"""The map of a layout in the terminal."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import ckpttool as api
from ckpttool.analysis.layout import layer_of
from ckpttool.cli import _map
from tests import synthetic
from tests.cli.command import ckpttool, in_terminal, plain
from tests.sampling import some
from tests.truth import NAMES, source


def _lines(text: str, label: str) -> list[str]:
    return [line.removeprefix(label).strip() for line in text.splitlines() if line.startswith(label)]


def test_each_rank_is_a_line_of_letters() -> None:
    done = ckpttool("inspect", source("zero2-dp2-bf16"), "--map")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    letters = dict(re.findall(r"(\w) ([\w.]+)(?:  |$)", done.stdout.splitlines()[-2]))
    checkpoint = api.inspect(source("zero2-dp2-bf16"))
    held: list[Counter[str]] = [Counter(), Counter()]
    for parameter in checkpoint.parameters:
        for row in parameter.states["fp32"].extents if "fp32" in parameter.states else ():
            held[checkpoint.files[int(row["file"])].rank or 0][layer_of(parameter.name)] += int(row["numel"])
    for rank in (0, 1):
        line = _lines(done.stdout, f"rank {rank}")[0]
        longest = max(held[0].total(), held[1].total())
        for letter, count in Counter(line.replace(".", "")).items():
            assert count / len(line) == pytest.approx(held[rank][letters[letter]] / longest, abs=0.03)


@pytest.mark.parametrize("name", some(NAMES, 8, key="map"))
def test_every_kind_of_checkpoint_has_a_map(name: str) -> None:
    done = ckpttool("inspect", source(name), "--map")
    assert (done.code, done.stderr) == (0, "")
    drawn = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert max(map(len, drawn)) <= _map.PLAIN_WIDTH + 30


def test_many_ranks_are_drawn_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    _map.print_map(synthetic.large(256, 4, 64))
    printed = capsys.readouterr().out
    assert len(_lines(printed, "rank ")) == _map.MAX_LINES
    assert "(224 more ranks are not drawn)" in printed


def test_the_map_has_colours_in_a_terminal() -> None:
    shown = in_terminal(
        "inspect", source("zero2-dp2-bf16"), "--map", columns=90, TERM="xterm-256color", COLORTERM="truecolor"
    )
    assert len(set(re.findall(r"\x1b\[38;2;[\d;]+m█", shown))) >= 5
    shown_plain = plain(shown)
    drawn = [line for line in shown_plain.splitlines() if line.startswith("rank 1")]
    assert {len(line.rstrip()) for line in drawn} <= set(range(85, 91))
    without = in_terminal("inspect", source("zero2-dp2-bf16"), "--map", NO_COLOR="1", columns=90)
    assert "\x1b[38" not in without
    assert "█" not in without


@pytest.mark.parametrize("kind", ["xterm-256color", "vt100"])
def test_a_terminal_with_few_colours_gets_letters(kind: str) -> None:
    shown = in_terminal("inspect", source("zero2-dp2-bf16"), "--map", TERM=kind, COLORTERM="", columns=90)
    assert "█" not in shown
    assert re.search(r"\x1b\[[\d;]+m[a-k]", shown)
    shown_plain = plain(shown)
    assert shown_plain == in_terminal("inspect", source("zero2-dp2-bf16"), "--map", NO_COLOR="1", columns=90)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 60, 61, 100, 400])
def test_every_layer_has_one_letter_and_the_legend_all_letters(layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    _map.print_map(synthetic.large(4, layers, 64))
    drawn, _, legend = capsys.readouterr().out.rpartition("\n\n")
    entries = re.findall(r"(?:^|  )(\w) (\S+)(?: to (\S+))?(?=  |$)", legend, re.MULTILINE)
    letters = [letter for letter, _, _ in entries]
    assert len(set(letters)) == len(letters)
    names = [layer_of(name) for name in synthetic.shapes_of(layers, 64)]
    order = list(dict.fromkeys(names))
    told = [name for _, first, last in entries for name in order[order.index(first) : order.index(last or first) + 1]]
    assert told == order
    assert set("".join(_lines(drawn, "rank 0"))) <= set(letters)


@pytest.mark.parametrize("width", [8, 20, 40])
def test_a_narrow_map_keeps_its_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    _map.print_map(api.inspect(source("pipeline-zero1-pp2-tp2-bf16")), width)
    lines = capsys.readouterr().out.split("\n\n")[2].splitlines()[1:]
    assert max(map(len, lines)) <= max(width, 4 + 2 + _map.MIN_ROOM)
    assert len({line.split("  ")[0] for line in lines}) == (4 if width >= 20 else 2)
    assert all(len(line.split("  ")[1]) >= _map.MIN_ROOM - 1 for line in lines)
