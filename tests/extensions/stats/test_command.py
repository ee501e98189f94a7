"""The command ``stats``: its numbers, its table on terminals, and wrong usage."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.cli import test_interface, test_tables
from tests.cli.command import ckpttool, in_terminal, plain
from tests.cli.test_reading import NAME, SRC, change
from tests.truth import source, truth

if TYPE_CHECKING:
    from pathlib import Path


def test_statistics_are_those_of_torch() -> None:
    (one,) = json.loads(ckpttool("stats", SRC, "--optimizer", "--json").stdout)["checkpoints"]
    told = {(t["name"], t["state"]): t for t in one["tensors"]}
    facts = truth(NAME).facts
    for key, tensor in truth(NAME).tensors.items():
        kind, _, name = key.partition("/")
        if kind == "module" and name not in facts["frozen"]:
            continue
        found = told.pop((name, "weights" if kind in {"fp32", "module", "buffer"} else kind))
        wide = tensor.double()
        assert found["numel"] == wide.numel()
        assert (found["min"], found["max"]) == (wide.min().item(), wide.max().item())
        assert found["mean"] == pytest.approx(wide.mean().item(), rel=1e-12, abs=1e-15)
        assert found["norm"] == pytest.approx(wide.norm().item(), rel=1e-12)
        assert (found["zeros"], found["nan"], found["inf"]) == ((wide == 0).sum().item(), 0, 0)
    assert not told


def test_values_that_are_not_finite_are_counted_and_left_out_of_the_rest(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    assert ckpttool("consolidate", SRC, weights, "--to", "safetensors").code == 0
    file = weights / "model.safetensors"
    for index, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0)):
        change(file, "up.bias", index, value)
    (one,) = json.loads(ckpttool("stats", weights, "--include", "up.bias", "--json").stdout)["checkpoints"]
    (found,) = one["tensors"]
    rest = truth(NAME).tensors["fp32/up.bias"].double()[4:]
    assert (found["nan"], found["inf"], found["zeros"]) == (1, 2, 1)
    assert found["max"] == max(rest.max().item(), 0)
    assert found["mean"] == pytest.approx(rest.sum().item() / 34)
    assert "1 tensors have values that are not finite" in ckpttool("stats", weights).stdout


def test_statistics_have_a_histogram_in_a_wide_terminal() -> None:
    wide = in_terminal("stats", source("zero2-dp2-bf16"), columns=160)
    row = next(line for line in wide.splitlines() if line.startswith("embed.weight"))
    assert re.search(r"[▁▂▃▄▅▆▇█ ]{8,}$", re.sub(r"\x1b\[[\d;]*m", "", row).rstrip("\r"))
    assert "█" in row
    assert "█" not in in_terminal("stats", source("zero2-dp2-bf16"), columns=100)
    assert "█" not in ckpttool("stats", source("zero2-dp2-bf16")).stdout


@pytest.mark.parametrize(("columns", "kept"), [(60, ["min", "max"]), (80, ["min", "max", "norm"])])
def test_statistics_lose_counts_of_0_before_their_numbers(columns: int, kept: list[str]) -> None:
    shown = in_terminal("stats", SRC, "--optimizer", columns=columns, errors=False)
    assert plain(shown).splitlines()[0].split() == ["tensor", "state", *kept]


def test_no_number_breaks_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_tables.COMMANDS, "stats", ("stats", SRC, "--optimizer"))
    for columns in (60, 80, 120):
        test_tables.test_no_number_breaks_on_a_terminal("stats", columns, tmp_path / str(columns))


def test_parts_of_several_sources_are_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_interface.test_wrong_usage_exits_with_2_and_says_how_it_is_right(
        ["stats", SRC, SRC, "--part", SRC], tmp_path, monkeypatch
    )
