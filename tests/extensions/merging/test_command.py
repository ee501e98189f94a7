"""The function ``average`` and its command behave as those of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.errors import ArgumentError
from tests.cli import test_tables
from tests.execution import test_forecast
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

BOTH = [source("zero2-dp2-bf16"), source("zero3-dp2-bf16")]


@pytest.mark.slow
def test_no_number_breaks_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("average", "FIRST", "SECOND", "OUT", "--to", "safetensors", "--dry-run")
    monkeypatch.setitem(test_tables.COMMANDS, "average", command)
    for columns in (60, 80, 120):
        test_tables.test_no_number_breaks_on_a_terminal("average", columns, tmp_path / str(columns))


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the result among those of the tests of tables."""
    monkeypatch.setitem(test_tables.RESULTS, "average", lambda: api.average(BOTH, "out", to="safetensors"))
    monkeypatch.setitem(test_tables.OPTIONS, "average", [BOTH[1], "out", "--to", "safetensors"])
    return "average"


def test_a_result_prints_as_its_command_does(result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_tables.test_a_result_prints_as_its_command_does(result, tmp_path, monkeypatch)


def test_a_notebook_shows_the_tables_of_a_result(result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_tables.test_a_notebook_shows_the_tables_of_a_result(result, tmp_path, monkeypatch)


@pytest.mark.parametrize("value", ["", None, 3], ids=repr)
def test_a_path_that_is_none_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    untyped: Any = api
    with refused(ArgumentError) as caught:
        untyped.average(BOTH, value, to="torch")
    assert caught.value.path == "out"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_what_a_run_needs(tmp_path: Path) -> None:
    sources = [source(test_forecast.NAME), source("zero3-dp4-bf16")]

    def command(out: Path, **options: Any) -> api.AverageReport:
        return api.average(sources, out, to="safetensors", **options)

    test_forecast.test_a_dry_run_tells_what_a_run_needs(command, tmp_path)


def test_torchs_names_of_types_mean_the_short_ones(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for number, dtype in enumerate(("bfloat16", "torch.bfloat16", torch.bfloat16)):
        assert api.average(BOTH, tmp_path / str(number), to="safetensors", dtype=dtype).dtype == "bf16"


def test_the_options_of_a_merge_are_of_the_extension(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        api.consolidate(BOTH[0], tmp_path / "out", to="safetensors", base=BOTH[1])
    assert (caught.value.path, caught.value.hint) == ("base", "leave out base, or set merge_lora=True")
    assert list(tmp_path.iterdir()) == []
