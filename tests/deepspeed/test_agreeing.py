"""A rank that is late or differs is named on all ranks, in time, before any engine changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked
from tests.deepspeed.agreeing import LATE, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

SLACK = 10.0
"""Seconds that a busy machine may take."""
TOLD = {
    "metric": ("rank 1: metrics: are not a mapping", "ArgumentError: metrics: are not a mapping"),
    "metric in the background": ("rank 1: metrics: are not a mapping", "ArgumentError: metrics: are not a mapping"),
    "tag": ("rank 0 has tag 't0', rank 1 has 't1'",) * 2,
    "bad tag": ("rank 1: tag: cannot be '../t'", "ArgumentError: tag: cannot be '../t'"),
    "client state": ("rank 1: client_state: is a list", "ArgumentError: client_state: is a list"),
    "overwrite": ("rank 0 has overwrite False, rank 1 has True",) * 2,
    "engine": ("rank 1: engine: is a NoneType", "ArgumentError: engine: is a NoneType"),
    "root": ("rank 0 has root ",) * 2,
    "weights only": ("rank 0 has weights_only True, rank 1 has False",) * 2,
    "strict": ("rank 0 has strict False, rank 1 has True",) * 2,
    "restored tag": ("rank 0 has tag None, rank 1 has 'good'",) * 2,
    "restored engine": ("rank 1: DeepSpeed ", "PlanError: DeepSpeed "),
    "source": ("rank 1: nowhere://root: nowhere:// is not a known storage", "StorageError: nowhere://root"),
    "no source": ("rank 1: ", "Error: "),
    "memory": ("rank 1: memory: is 'much'", "ArgumentError: memory: is 'much'"),
    "late save": ("rank 1 was not heard of in time",) * 2,
    "late restore": ("rank 1 was not heard of in time",) * 2,
    "late preview": ("rank 1 was not heard of in time",) * 2,
    "late load": ("rank 1 was not heard of in time",) * 2,
    "url": ("rank 1 was not heard of in time", "StorageError: nowhere://root"),
}
LEFT_OUT = {
    "left out by the second": ("rank 1 was not heard of in time; call this on every rank", ""),
    "save after it": ("", ""),
    "left out by the first": ("", "rank 0 was not heard of for 23 s; call this on every rank"),
    "restore after it": ("", ""),
}
"""Two calls that one rank did not make, each followed by one that both make."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> list[dict[str, Any]]:
    directory: Path = tmp_path_factory.mktemp("agreeing")
    forked.start("tests.deepspeed.agreeing", [], directory)
    return [json.loads((directory / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("what", TOLD)
def test_one_rank_alone(what: str, told: list[dict[str, Any]]) -> None:
    for rank, expected in enumerate(TOLD[what]):
        text, seconds, untouched = told[rank][what]
        assert expected in text
        assert "\n" not in text
        assert untouched
        is_late = what.startswith("late") or what == "url"
        assert seconds < (max(LATE, TIMEOUT) if is_late else 0) + SLACK


def test_a_call_that_one_rank_left_out_does_not_disturb_the_next(told: list[dict[str, Any]]) -> None:
    for what, expected in LEFT_OUT.items():
        for rank, text in enumerate(expected):
            said, seconds, _ = told[rank][what]
            assert text in said if text else not said
            assert text or seconds < SLACK


def test_tags_that_differ_are_treated_as_the_configuration_says(told: list[dict[str, Any]]) -> None:
    warning = "rank 1 has tag Warn-1: the save has that of rank 0, Warn-0"
    assert [one["Warn"] for one in told] == [["", [], ["Warn-0"]], ["", [warning], ["Warn-0"]]]
    assert [one["IGNORE"] for one in told] == [["", [], ["IGNORE-0"]]] * 2
    for text, _, saved in (one["fail"] for one in told):
        assert "rank 0 has tag 'fail-0', rank 1 has 'fail-1'" in text
        assert saved == []


def test_the_ranks_go_on_as_if_nothing_had_been(told: list[dict[str, Any]]) -> None:
    assert [one["after"] for one in told] == [[{}, []], [{}, []]]
