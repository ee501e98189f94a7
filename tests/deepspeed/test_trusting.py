"""A restore runs nothing that a file holds; objects of the user's classes are built only where the user says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
CLASS = "__main__.Progress"
"""As the script that saves calls it."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("trusting")
    forked.start("tests.deepspeed.trusting", [], directory)
    found: dict[str, Any] = json.loads((directory / "told.json").read_text())
    return found


def test_a_save_says_what_its_restore_will_need(told: dict[str, Any]) -> None:
    assert told["warned"] == [f"newer: restore needs CheckpointManager(..., allow=['{CLASS}']) to build objects"]


@pytest.mark.parametrize("road", ["native", "planned"])
def test_other_classes_are_refused_before_the_engine_is_touched(road: str, told: dict[str, Any]) -> None:
    for what in ("restore", "preview"):
        assert f"holds an object of {CLASS}, which ckpttool does not build" in told[road][what]
        assert "/newer" in told[road][what], "an older checkpoint must not be taken instead"
    assert told[road]["untouched"]


@pytest.mark.parametrize("road", ["native", "planned"])
def test_nothing_is_run(road: str, told: dict[str, Any]) -> None:
    assert "holds an object of posix.system, which ckpttool does not build" in told[road]["load"]
    assert told[road]["weights"] == ""
    assert told[road]["restored weights"] == ""
    assert not told[road]["obeyed"]


@pytest.mark.parametrize("road", ["native", "planned"])
def test_what_is_allowed_comes_back(road: str, told: dict[str, Any]) -> None:
    assert told[road]["allowed"] == "Progress(epoch=3)"
    assert told[road]["steps"] == 2
