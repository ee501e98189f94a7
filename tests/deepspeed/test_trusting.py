"""A restore runs no code from a file; it builds objects of the user's classes only with ``allow``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import CheckpointManager
from tests.deepspeed.engines import build, logged, step, told
from tests.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed


@dataclass
class Progress:
    """A class of the user's."""

    epoch: int


CLASS = f"{Progress.__module__}.Progress"


class Harm:
    """What runs a command when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@on_ranks(1)
def _restores(directory: Path) -> dict[str, Any]:
    """What is said of saves and restores, by two ways to restore."""
    root, marker, hostile = directory / "root", directory / "obeyed", directory / "hostile"
    engine = build(2, "bf16", "two", "adamw")
    step(engine, 1)
    manager = CheckpointManager(root)
    manager.save(engine, tag="older", client_state={"n": 1})
    step(engine, 1)
    with logged() as noted:
        manager.save(engine, tag="newer", client_state={"progress": Progress(3)})
    found: dict[str, Any] = {"warned": [line for line in noted if "allow=" in line]}
    engine.save_checkpoint(str(hostile), tag="t", client_state={"harm": Harm(str(marker))})
    engine.destroy()
    for name, stage in (("native", 2), ("planned", 3)):
        found[name] = _attempts(build(stage, "bf16", "two", "adamw"), root, hostile)
        found[name]["obeyed"] = marker.exists()
    return found


def _attempts(engine: Any, root: Path, hostile: Path) -> dict[str, Any]:
    """What each way to restore an engine says."""
    before, manager = engine.global_steps, CheckpointManager(root)
    allowed = CheckpointManager(root, allow=[CLASS])
    found = {
        "restore": told(lambda: manager.restore(engine)),
        "preview": told(lambda: manager.restore(engine, dry_run=True)),
        "untouched": engine.global_steps == before,
        "load": told(lambda: ckpttool.load(engine, hostile)),
        "weights": told(lambda: ckpttool.load(engine, hostile, weights_only=True)),
        "restored weights": told(lambda: CheckpointManager(hostile).restore(engine, weights_only=True)),
        "allowed": str((allowed.restore(engine) or {}).get("progress")),
        "steps": engine.global_steps,
    }
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    (one,) = _restores(tmp_path_factory.mktemp("trusting"))
    return one


def test_a_save_says_what_its_restore_will_need(found: dict[str, Any]) -> None:
    assert found["warned"] == [f"newer: restore needs CheckpointManager(..., allow=['{CLASS}']) to build objects"]


@pytest.mark.parametrize("method", ["native", "planned"])
def test_other_classes_are_refused_before_the_engine_is_touched(method: str, found: dict[str, Any]) -> None:
    for what in ("restore", "preview"):
        assert f"holds an object of {CLASS}, which ckpttool does not build" in found[method][what]
        assert "/newer" in found[method][what], "an older checkpoint must not be taken instead"
    assert found[method]["untouched"]


@pytest.mark.parametrize("method", ["native", "planned"])
def test_nothing_is_run(method: str, found: dict[str, Any]) -> None:
    assert "holds an object of posix.system, which ckpttool does not build" in found[method]["load"]
    assert found[method]["weights"] == ""
    assert found[method]["restored weights"] == ""
    assert not found[method]["obeyed"]


@pytest.mark.parametrize("method", ["native", "planned"])
def test_allowed_objects_come_back(method: str, found: dict[str, Any]) -> None:
    assert found[method]["allowed"] == "Progress(epoch=3)"
    assert found[method]["steps"] == 2
