"""A restore runs no code from a file; it builds objects of the user's classes only with ``allow``."""

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


@pytest.mark.parametrize("method", ["native", "planned"])
def test_other_classes_are_refused_before_the_engine_is_touched(method: str, told: dict[str, Any]) -> None:
    for what in ("restore", "preview"):
        assert f"holds an object of {CLASS}, which ckpttool does not build" in told[method][what]
        assert "/newer" in told[method][what], "an older checkpoint must not be taken instead"
    assert told[method]["untouched"]


@pytest.mark.parametrize("method", ["native", "planned"])
def test_nothing_is_run(method: str, told: dict[str, Any]) -> None:
    assert "holds an object of posix.system, which ckpttool does not build" in told[method]["load"]
    assert told[method]["weights"] == ""
    assert told[method]["restored weights"] == ""
    assert not told[method]["obeyed"]


@pytest.mark.parametrize("method", ["native", "planned"])
def test_allowed_objects_come_back(method: str, told: dict[str, Any]) -> None:
    assert told[method]["allowed"] == "Progress(epoch=3)"
    assert told[method]["steps"] == 2
