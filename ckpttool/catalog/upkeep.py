"""Carry out retention rules after a save, and clear away what killed replacements have left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckpttool.catalog.cleanup import changed_since, tidy
from ckpttool.catalog.thinning import ThinOptions, plan_thinning, recover, thin
from ckpttool.commit.manifest import directories
from ckpttool.commit.marks import TakenError, below
from ckpttool.errors import CkptError, StorageError
from ckpttool.messages import printable
from ckpttool.storage import THINNING, is_gone, is_linked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.catalog.retention import Rules
    from ckpttool.storage import WritableStorage

LOG = logging.getLogger("ckpttool")


def maintain(
    storage: WritableStorage, root: str, rules: Rules | None, *, grace: float, key: bytes | None = None
) -> None:
    """Remove and thin checkpoints after a save; log failures: the next save tries again.

    Args:
        storage: Storage of the checkpoints.
        root: The directory of all checkpoints.
        rules: Retention rules; None to keep all.
        grace: Age in seconds of leftovers to remove, counted from the newest of their files.
        key: Key that the manifests are signed with.
    """
    try:
        unlinked = [d for d in directories(storage, root) if not is_linked(storage, root, d)]
        finish_killed(storage, unlinked, grace=grace)
    except CkptError as error:
        LOG.warning("what a killed run has left of a thin checkpoint was not removed: %s", error)
    for decision in tidy(storage, root, rules, grace=grace):
        options = ThinOptions(dtype=decision.thin or "", jobs=1, key=key, grace=grace)
        path = decision.entry.path
        try:
            if (why := changed_since(storage, path, decision.entry.state, root)) is not None:
                LOG.info("%s stays whole: %s", printable(path), why)
                continue
            thin(storage, plan_thinning(storage, path, options), options)
            LOG.info("thinned %s: its weights are left, in %s", printable(path), options.dtype)
        except CkptError as error:
            LOG.warning("an old checkpoint was not thinned: %s", error)


def finish_killed(
    storage: WritableStorage, checkpoints: Iterable[str], *, grace: float
) -> tuple[bool, dict[str, StorageError]]:  # fmt: skip
    """Clear away what killed replacements have left; those that still run go on.

    Args:
        storage: Storage of the checkpoints.
        checkpoints: Their directories, or directories above them.
        grace: As for ``thinning.recover``.

    Returns:
        Whether a killed replacement was cleared away, and the failures by checkpoint; they are logged, and the next
        call tries again.
    """
    found, failed = False, {}
    for path in checkpoints:
        try:
            found = _finish_killed(storage, path, grace=grace) or found
        except StorageError as error:
            if not is_gone(storage, error):  # else another process has removed it
                failed[path] = error
                LOG.warning("what a killed run has left of a thin checkpoint was not removed: %s", error)
    return found, failed


def _finish_killed(storage: WritableStorage, path: str, *, grace: float) -> bool:
    found = False
    for directory in {directory for directory, _ in below(storage, path, THINNING)}:
        try:
            found = recover(storage, directory, grace=grace) or found
        except TakenError as error:
            LOG.info("%s", error)
    return found
