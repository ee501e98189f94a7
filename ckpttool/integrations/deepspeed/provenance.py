"""The provenance of a save: what the process is made of, and the checkpoint that its engine was restored from."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ckpttool.commit.provenance import RESTORED_FROM
from ckpttool.saving.provenance import run_provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from ckpttool.model import Checkpoint

_restored: MutableMapping[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""By engine: the checkpoint of its last load, of ``ckpttool.load`` or of a manager."""


def note_restored(engine: Any, checkpoint: Checkpoint) -> None:
    """Remember which checkpoint was loaded into an engine."""
    found = {
        "path": checkpoint.location, "tag": checkpoint.tag, "step": checkpoint.step, "attempt": checkpoint.attempt,
    }  # fmt: skip
    with contextlib.suppress(TypeError):  # an engine of another kind, to which nothing can refer weakly
        _restored[engine] = found


def current_provenance(engine: Any) -> Mapping[str, Any]:
    """Return the fields of a manifest's provenance for a save of an engine."""
    found: Mapping[str, Any] | None = None
    with contextlib.suppress(TypeError):
        found = _restored.get(engine)
    return {**run_provenance(), **({} if found is None else {RESTORED_FROM: found})}
