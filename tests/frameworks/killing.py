"""Kill ranks at a chosen write of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

NAMES = (("checkpoint-", ""), ("checkpoint_", ""), ("step=", ".ckpt"))
"""Prefix and suffix of the step in the names of frameworks' checkpoints."""


def kill_at(point: dict[str, Any], directory: str) -> None:
    """Let a rank be killed before one of its writes into the checkpoint of a step; or all ranks at that moment.

    Args:
        point: "rank", "step", the "number" of the write, counted from 1, and "everyone".
        directory: Directory for the identifiers of the ranks' processes.
    """
    from ckpttool.storage.local import LocalStorage
    from ckpttool.storage.local_writer import LocalWriter

    Path(directory, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] != str(point["rank"]):
        return
    left = [point["number"]]

    def count(path: str) -> None:
        names = (f"/{name}{point['step']}{end}/" for name, end in NAMES)
        if not any(name in path for name in names):
            return
        left[0] -= 1
        if left[0] == 0:
            others = [int(file.read_text()) for file in Path(directory).glob("pid-*")] if point["everyone"] else []
            for process in {*others} - {os.getpid()}:
                os.kill(process, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    put, commit = LocalStorage._put, LocalWriter.commit

    def counted_put(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        count(path)
        return put(self, path, *arguments, **options)

    def counted_commit(self: Any) -> None:
        count(self.path)
        commit(self)

    LocalStorage._put = counted_put  # type: ignore[method-assign]
    LocalWriter.commit = counted_commit  # type: ignore[method-assign]
