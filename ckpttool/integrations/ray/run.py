"""The run of Ray Train that this process is a worker of: its storage, and reports of committed checkpoints.

Source: Ray 2.60, ray/train/v2 (``get_storage``, ``report``, ``CheckpointUploadMode.NO_UPLOAD``).
"""

from __future__ import annotations

import posixpath
import sys
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.storage import WritableStorage


class RayRun:
    """A run of Ray Train, in one of its workers.

    Args:
        context: Ray's ``StorageContext``.
    """

    def __init__(self, context: Any) -> None:
        from ckpttool.integrations.ray.storage import storage_of, url_of

        self._filesystem = context.storage_filesystem
        self._path = context.experiment_fs_path
        self.root = url_of(self._filesystem, self._path)
        """Path or URL of the run's directory."""
        self.storage: WritableStorage = storage_of(self._filesystem)
        """Its storage."""

    def report(self, folder: str, metrics: Mapping[str, Any]) -> None:
        """Report a committed checkpoint of the run's directory to Ray by reference, on every worker."""
        import ray.train

        # Ray requires the run's own file system object.
        path = posixpath.join(self._path, posixpath.relpath(folder, self.root))
        checkpoint = ray.train.Checkpoint(path, filesystem=self._filesystem)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)

    def reported(self) -> set[str]:
        """Return the names of the checkpoints that Ray knows."""
        import ray.train

        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        known = ray.train.get_all_reported_checkpoints(consistency_mode=mode)
        return {posixpath.basename(one.checkpoint.path.rstrip("/")) for one in known}


def current_run() -> RayRun | None:
    """Return the run of Ray Train that this process is a worker of; None outside of one.

    Raises:
        PlanError: The worker is one of an old release of Ray Train.
    """
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    if not hasattr(train, "get_preemption_info"):
        raise PlanError("ray.train", "is not Train V2", "use Ray 2.60 or later, without RAY_TRAIN_V2_ENABLED=0")
    try:
        return RayRun(train.get_context().get_storage())
    except (RuntimeError, NotImplementedError):
        return None
