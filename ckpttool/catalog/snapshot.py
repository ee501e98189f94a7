"""The snapshot of a run of Ray Train: the checkpoints that it lists, and the names of their directories.

Source: Ray 2.60, ray/train/v2: ``CheckpointManager`` (the snapshot: a run whose snapshot lists a missing checkpoint
    refuses to start) and ``StorageContext.make_default_checkpoint_dir_name``.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError
from ckpttool.formats.layouts import OWN_OF_RAY
from ckpttool.storage import (
    read_json,
)

if TYPE_CHECKING:
    from ckpttool.storage import Storage


SNAPSHOT = "checkpoint_manager_snapshot.json"
"""File in which Ray Train lists the checkpoints of the run."""
MAX_BYTES = 1 << 28
"""Most bytes of a snapshot; one of a hundred thousand checkpoints is smaller."""


def directory_name(step: int, number: int, token: str) -> str:
    """Return the name of a save's directory; it is unique, so that the directory contains no old files.

    Args:
        step: Steps of the engine.
        number: ``Manifest.number``; it orders the names of saves of one step.
        token: Unique hexadecimal text.
    """
    return f"{OWN_OF_RAY.prefix}{step:08d}_{number:06d}_{token}"


def listed_by_ray(storage: Storage, run: str) -> frozenset[str]:
    """Return the directories of a run that Ray's snapshot lists; empty without a snapshot.

    Raises:
        CkptError: The snapshot cannot be read.
    """
    listed, latest = _snapshot(storage, run)
    # The listed path may have several components.
    return frozenset(name.partition("/")[0] for name in [*listed, latest] if name)


def latest_of_ray(storage: Storage, run: str) -> str:
    """Return the checkpoint that Ray would resume from, by its name in the run directory; "" without one.

    Raises:
        CkptError: The snapshot cannot be read.
    """
    return _snapshot(storage, run)[1]


def _snapshot(storage: Storage, run: str) -> tuple[list[str], str]:
    path = posixpath.join(run, SNAPSHOT)
    if not storage.exists(path):
        return [], ""
    hint = "a run may be writing it: try again; or start that run with the Ray release that wrote it"
    what = "a snapshot of Ray Train's checkpoints"
    found = read_json(storage, path, what, hint, MAX_BYTES)
    try:
        latest = found["latest_checkpoint_result"]
        return [_name(result) for result in found["checkpoint_results"]], _name(latest) if latest else ""
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(path, f"is not {what}", hint) from error


def _name(result: Any) -> str:
    name = posixpath.normpath(str(result["checkpoint_dir_name"]).strip("/"))
    if name.startswith("."):
        raise ValueError("a name leads out of the directory")
    return name
