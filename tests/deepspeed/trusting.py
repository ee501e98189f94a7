"""Engines that restore checkpoints with objects of other classes in the client state, some of them hostile."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked


@dataclass
class Progress:
    """A class of the user's."""

    epoch: int


class Harm:
    """What runs a command when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def main(directory: Path) -> None:
    """Try everything on one rank."""
    import deepspeed  # noqa: F401  before it is forked

    forked.run_ranks(1, lambda: _rank(directory))


def _rank(directory: Path) -> None:
    from recipes import common

    from ckpttool import CheckpointManager
    from tests.deepspeed.optimizers import build, step

    common.start(seed=1)
    root, marker, hostile = directory / "root", directory / "obeyed", directory / "hostile"
    engine = build(2, "bf16", "two", "adamw")
    step(engine, 1)
    manager = CheckpointManager(root)
    manager.save(engine, tag="older", client_state={"n": 1})
    step(engine, 1)
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(handler)
    manager.save(engine, tag="newer", client_state={"progress": Progress(3)})
    told: dict[str, Any] = {"warned": [line for line in noted if "allow=" in line]}
    engine.save_checkpoint(str(hostile), tag="t", client_state={"harm": Harm(str(marker))})
    engine.destroy()
    for name, stage in (("native", 2), ("planned", 3)):
        told[name] = _attempts(build(stage, "bf16", "two", "adamw"), root, hostile)
        told[name]["obeyed"] = marker.exists()
    (directory / "told.json").write_text(json.dumps(told))
    common.leave()


def _attempts(engine: Any, root: Path, hostile: Path) -> dict[str, Any]:
    """What each way to restore an engine says."""
    import ckpttool
    from ckpttool import CheckpointManager

    before, manager = engine.global_steps, CheckpointManager(root)
    allowed = CheckpointManager(root, allow=[f"{Progress.__module__}.Progress"])
    told = {
        "restore": _told(lambda: manager.restore(engine)),
        "preview": _told(lambda: manager.preview(engine)),
        "untouched": engine.global_steps == before,
        "load": _told(lambda: ckpttool.load(engine, hostile)),
        "weights": _told(lambda: ckpttool.load(engine, hostile, weights_only=True)),
        "restored weights": _told(lambda: CheckpointManager(hostile).restore(engine, weights_only=True)),
        "allowed": str((allowed.restore(engine) or {}).get("progress")),
        "steps": engine.global_steps,
    }
    engine.destroy()
    return told


def _told(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
