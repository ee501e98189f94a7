"""Two ranks: one of them is late, fails, or passes other arguments."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tests import forked

TIMEOUT = 3.0
"""Seconds that a rank may be late;"""
LATE = 6.0
"""and those that it is, where it is too late."""


def main(directory: Path) -> None:
    """Do all that is asked, on two ranks."""
    import deepspeed  # noqa: F401  once, for all that are forked

    forked.run_ranks(2, lambda: _rank(directory))


def _rank(directory: Path) -> None:
    import torch
    from recipes import common

    import ckpttool
    from ckpttool import CheckpointManager
    from tests.deepspeed.optimizers import build, differing, held, step

    common.start(seed=1)
    rank = torch.distributed.get_rank()
    second = rank == 1
    engine = build(2, "bf16", "two", "adamw")
    step(engine, 1)
    root = str(directory / "root")
    manager: Any = CheckpointManager(root, timeout=TIMEOUT)
    manager.save(engine, tag="good", client_state={"n": 1})
    step(engine, 1)
    before = held(engine)

    def late(function: Any) -> None:
        if second:
            time.sleep(LATE)
        function()

    def from_elsewhere() -> None:
        made: Any = CheckpointManager(root if not second else "nowhere://root", timeout=TIMEOUT)
        made.save(engine, tag="t")

    background: Any = CheckpointManager(root, timeout=TIMEOUT, async_save=True)
    other: Any = CheckpointManager(str(directory / f"root-{rank}"), timeout=TIMEOUT)
    asked: dict[str, Any] = {
        "metric": lambda: manager.save(engine, tag="t", metrics={"loss": None if second else 0.5}),
        "metric in the background": lambda: background.save(engine, tag="t", metrics={"loss": None if second else 0.5}),
        "tag": lambda: manager.save(engine, tag=f"t{rank}"),
        "bad tag": lambda: manager.save(engine, tag="../t" if second else "t"),
        "client state": lambda: manager.save(engine, tag="t", client_state=[1] if second else {}),
        "overwrite": lambda: manager.save(engine, tag="good", overwrite=second),
        "engine": lambda: manager.save(None if second else engine, tag="t"),
        "root": lambda: other.save(engine, tag="t"),
        "weights only": lambda: manager.restore(engine, weights_only=not second),
        "strict": lambda: manager.preview(engine, strict=second),
        "restored tag": lambda: manager.restore(engine, tag="good" if second else None),
        "restored engine": lambda: manager.restore(None if second else engine),
        "source": lambda: ckpttool.load(engine, "nowhere://root" if second else root, timeout=TIMEOUT),
        "no source": lambda: ckpttool.preview(engine, [] if second else root, timeout=TIMEOUT),
        "memory": lambda: ckpttool.load(engine, root, memory="much" if second else None, timeout=TIMEOUT),
        "late save": lambda: late(lambda: manager.save(engine, tag="t")),
        "late restore": lambda: late(lambda: manager.restore(engine)),
        "late preview": lambda: late(lambda: manager.preview(engine)),
        "late load": lambda: late(lambda: ckpttool.load(engine, root, timeout=TIMEOUT)),
        "url": from_elsewhere,
        "left out by the second": lambda: None if second else manager.save(engine, tag="t"),
        "save after it": lambda: manager.save(engine, tag="after-second") and None,
        "left out by the first": lambda: manager.save(engine, tag="t") if second else None,
        "restore after it": lambda: manager.restore(engine, tag="after-second") and None,
    }
    told: dict[str, Any] = {}
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(handler)
    for mode in ("Warn", "IGNORE", "fail"):
        engine._config._param_dict["checkpoint"] = {"tag_validation": mode}
        lines.clear()
        try:
            manager.save(engine, tag=f"{mode}-{rank}")
            text = ""
        except Exception as error:
            text = str(error)
        told[mode] = text, list(lines), sorted(p.name for p in Path(root).glob(f"{mode}-*"))
        torch.distributed.barrier()
    del engine._config._param_dict["checkpoint"]
    for name, function in asked.items():
        forked.end_if_stuck(90)
        began = time.monotonic()
        try:
            function()
            text = ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        told[name] = text, time.monotonic() - began, differing(before, held(engine)) == []
        torch.distributed.barrier()
    if second:
        CheckpointManager(root)  # which meets nobody
    last: Any = CheckpointManager(root, timeout=20)
    last.save(engine, tag="after")
    told["after"] = last.restore(engine), differing(before, held(engine))
    (directory / f"told-{rank}.json").write_text(json.dumps(told))
    common.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
