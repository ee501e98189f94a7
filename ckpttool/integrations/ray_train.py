"""Checkpoints of DeepSpeed engines under Ray Train: saved once, straight to the run's storage, and committed there.

    from ckpttool.integrations import ray_train

    def train_func(config):
        ...
        state = ray_train.restore(engine) or {"step": 0}
        for step in range(state["step"], steps):
            ...
            ray_train.report(engine, {"loss": loss}, client_state={"step": step + 1})

``ray.train.report`` returns before the run's controller has taken note of a checkpoint, and Ray does not look whether
all of it is there. So the manifest is the truth here: ``restore`` takes the newest commit in the run's directory,
whether Ray has heard of it or not, and Ray is told of a checkpoint by reference when it is committed.

Source: Ray 2.60, ray/train/v2 (Train V2): ``report``, ``CheckpointUploadMode.NO_UPLOAD``, ``get_storage``.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import time
from typing import TYPE_CHECKING, Any

import ray.train

from ckpttool.candidates import Candidate, candidates
from ckpttool.errors import CkptError, PlanError
from ckpttool.integrations.process_group import ranks_of_process_group
from ckpttool.integrations.ray_storage import place_of, storage_of, url_of
from ckpttool.manager import TIMEOUT, CheckpointManager
from ckpttool.manifest import is_commit, read_manifest
from ckpttool.saving.upkeep import left_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.manager import SaveReport

LOG = logging.getLogger("ckpttool")
PREFIX = "ckpttool_"
"""Begins the name of each checkpoint's directory in that of the run."""
GRACE = 900.0
"""Seconds after which what killed workers have left is removed."""
MANIFEST_METRICS = 64
"""Of the reported metrics, so many numbers are kept in the manifest."""


class RayTrainCheckpoints:
    """Saves, reports and restores the checkpoints of one run; make one in each worker, in ``train_func``.

    Args:
        blocking: Whether ``report`` returns when the checkpoint is committed and reported. If not, the state is copied
            to the host's memory and written in the background, and the checkpoint is reported by the next call, or by
            ``finish``.
        timeout: Seconds that a worker may be behind the others before a save is given up.
        grace: Seconds after which what killed workers have left is removed.

    Raises:
        PlanError: This is no worker of Ray Train V2.
    """

    def __init__(self, *, blocking: bool = True, timeout: float = TIMEOUT, grace: float = GRACE) -> None:
        storage = _run_storage()
        self._filesystem = storage.storage_filesystem
        self._run = storage.experiment_fs_path
        self._root = url_of(self._filesystem, self._run)
        self._place = place_of(self._filesystem)
        self._grace = grace
        self._timeout = timeout
        self._manager = CheckpointManager(
            self._root, async_save=not blocking, timeout=timeout, place=self._place, on_save=self._note
        )
        self._ranks = ranks_of_process_group(f"{self._manager.name} under Ray")
        self._pending: tuple[str, dict[str, Any]] | None = None
        self._preempted = False
        self.last_save: SaveReport | None = None
        """How the last save of this worker went."""

    def report(self, engine: Any, metrics: Mapping[str, Any], *, client_state: Mapping[str, Any] | None = None) -> None:
        """Save the engine's state, and tell Ray Train; on every worker at the same step.

        Args:
            engine: What ``deepspeed.initialize`` returned.
            metrics: As for ``ray.train.report``; numbers among them go into the manifest, too.
            client_state: What to save along; ``restore`` returns it.

        Raises:
            CkptError: The save failed; says which worker and why. Nothing was committed, and nothing was reported.
        """
        self._tell_ray()
        step = int(engine.global_steps)
        name = self._agree(f"{PREFIX}{step:08d}_{secrets.token_hex(4)}")
        self._manager.save_into(
            posixpath.join(self._root, name), engine, tag=None, client_state=client_state or {},
            metrics=_numbers(metrics), overwrite=False, exclude_frozen=False,
        )  # fmt: skip
        self._pending = name, dict(metrics)
        if self._manager.saves_in_background:
            return
        self._tell_ray()

    def finish(self) -> None:
        """Wait for what is being saved in the background, and tell Ray Train.

        Raises:
            CkptError: The save failed.
        """
        self._tell_ray()

    def _tell_ray(self) -> None:
        """Report what was saved, if anything was, when it is committed."""
        pending, self._pending = self._pending, None
        self._manager.wait()
        if pending is not None:
            name, metrics = pending
            self._report(name, metrics)
            self._collect()

    def _report(self, name: str, metrics: Mapping[str, Any]) -> None:
        checkpoint = ray.train.Checkpoint(posixpath.join(self._run, name), filesystem=self._filesystem)
        ray.train.report(
            dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )

    def _note(self, report: SaveReport) -> None:
        self.last_save = report

    def _agree(self, said: Any) -> Any:
        """What the first worker says."""
        return self._ranks.agree(self._root, said, lambda all_said: all_said[0], timeout=self._timeout)

    # ------------------------------------------------------------------------------------------- restoring

    def restore(
        self, engine: Any, checkpoint: Any = None, *, strict: bool = True, weights_only: bool = False
    ) -> dict[str, Any] | None:
        """Load a checkpoint into the engine, on every worker; their number and the ZeRO stage may be other ones.

        Args:
            engine: What ``deepspeed.initialize`` returned.
            checkpoint: A ``ray.train.Checkpoint``, a path or a URL. Default: the newest commit of this run, or, where
                there is none, what ``ray.train.get_checkpoint`` returns.
            strict: As for ``ckpttool.load``.
            weights_only: As for ``ckpttool.load``.

        Returns:
            The client state that was saved along; None if the run has no checkpoint yet.

        Raises:
            CkptError: There are checkpoints, and none of them can be restored; the same on every worker.
        """
        self._tell_ray()
        how = {"strict": strict, "weights_only": weights_only, "dry_run": False}
        if checkpoint is not None:
            return self._restore_given(engine, checkpoint, how)
        found = [Candidate(*one) for one in self._agree(self._commits() if self._ranks.rank == 0 else [])]
        if not found:
            known = ray.train.get_checkpoint()
            return None if known is None else self._restore_given(engine, known, how)
        state = self._manager.restore_any(found, engine, passing_over=True, **how)
        self._adopt()
        return state

    def _restore_given(self, engine: Any, checkpoint: Any, how: dict[str, Any]) -> dict[str, Any] | None:
        if isinstance(checkpoint, ray.train.Checkpoint):
            storage = storage_of(checkpoint.filesystem)
            root = url_of(checkpoint.filesystem, checkpoint.path)
            found = self._agree([tuple_of(c) for c in candidates(storage, root)] if self._ranks.rank == 0 else [])
            manager = CheckpointManager(root, timeout=self._timeout, place=place_of(checkpoint.filesystem))
            if not found:
                raise PlanError(root, "holds no checkpoint of DeepSpeed's", "pass one that was saved by it")
            return manager.restore_any([Candidate(*c) for c in found], engine, passing_over=False, **how)
        how = {name: value for name, value in how.items() if name != "dry_run"}
        return CheckpointManager(checkpoint, timeout=self._timeout).restore(engine, **how)

    def _commits(self) -> list[tuple[str, str, bool]]:
        """All commits of this run, the newest first."""
        storage = self._place.storage
        storage.refresh([])
        found = []
        for directory in self._directories():
            for candidate in candidates(storage, directory):
                if not candidate.committed:
                    continue
                try:
                    manifest = read_manifest(storage, candidate.path)
                except CkptError as error:
                    LOG.warning("%s is passed over: %s", candidate.path, error)
                    continue
                found.append(((manifest.step, manifest.created), tuple_of(candidate)))
        return [one for _, one in sorted(found, reverse=True)]

    def _directories(self) -> list[str]:
        storage = self._place.storage
        if not storage.is_dir(self._root):
            return []
        names = [e.name for e in storage.listing(self._root) if e.is_dir and e.name.startswith(PREFIX)]
        return [posixpath.join(self._root, name) for name in names]

    def _adopt(self) -> None:
        """Report the commit that was restored, if Ray has never heard of it: its worker died before that."""
        restored = self._manager.restored
        directory = posixpath.dirname(restored.path) if restored is not None else ""
        name = posixpath.basename(directory)

        def look() -> dict[str, float] | None:
            if name in self._known():
                return None
            return dict(read_manifest(self._place.storage, restored.path).metrics) if restored else None

        metrics = self._agree(look() if self._ranks.rank == 0 else None)
        if metrics is not None:
            self._report(name, metrics)

    def _known(self) -> set[str]:
        """Names of the checkpoints that Ray has taken note of."""
        reported = ray.train.get_all_reported_checkpoints(
            consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
        )
        return {posixpath.basename(one.checkpoint.path.rstrip("/")) for one in reported}

    # ------------------------------------------------------------------------------------------- clearing away

    def _collect(self) -> None:
        """Remove what killed workers have left: what was never committed, and commits that Ray never heard of.

        The newest commit is never removed, nor what is younger than the grace period.
        """
        if self._ranks.rank:
            return
        try:
            for directory in self._abandoned():
                self._place.remove(directory)
                LOG.info("removed %s", directory)
        except CkptError as error:
            LOG.warning("what killed workers have left was not removed: %s", error)

    def _abandoned(self) -> list[str]:
        storage = self._place.storage
        storage.refresh([])
        torn: list[str] = []
        whole: list[tuple[int, float, str]] = []
        for directory in self._directories():
            tags = [posixpath.join(directory, e.name) for e in storage.listing(directory) if e.is_dir]
            commits = [tag for tag in tags if is_commit(storage, tag)]
            if commits:
                manifest = read_manifest(storage, commits[0])
                whole.append((manifest.step, manifest.created, directory))
            elif len(left_over(self._place, directory, grace=self._grace)) == len(tags) > 0:
                torn.append(directory)
        old = [(created, d) for _, created, d in sorted(whole)[:-1] if time.time() - created >= self._grace]
        if not old:
            return torn
        known = self._known()
        return torn + [d for _, d in old if posixpath.basename(d) not in known]

    # ------------------------------------------------------------------------------------------- preemption

    def preempted(self) -> bool:
        """Whether a node of this run is about to be taken away; true once for each notice. Call it on every worker.

        If so, save at once, wait, and go on training: Ray ends the workers when the time is up, and starts again with
        those that are left.
        """
        told = ray.train.get_preemption_info() is not None
        new = told and not self._preempted
        self._preempted = told
        return new


def tuple_of(candidate: Candidate) -> tuple[str, str, bool]:
    """A candidate as plain data."""
    return candidate.tag, candidate.path, candidate.committed


def _run_storage() -> Any:
    if not hasattr(ray.train, "get_preemption_info"):
        raise PlanError("ray.train", "is not Train V2", "use Ray 2.60 or later, without RAY_TRAIN_V2_ENABLED=0")
    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError as error:
        problem = "runs in local mode, which has no storage"
        raise PlanError("ray.train", problem, "set ScalingConfig(num_workers=1) or more") from error
    except RuntimeError as error:
        raise PlanError("ray.train", "is not running here", "call this in train_func of a TorchTrainer") from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return dict(list(numbers.items())[:MANIFEST_METRICS])


_default: RayTrainCheckpoints | None = None


def _here() -> RayTrainCheckpoints:
    global _default  # a worker runs one train_func
    if _default is None:
        _default = RayTrainCheckpoints()
    return _default


def report(engine: Any, metrics: Mapping[str, Any], *, client_state: Mapping[str, Any] | None = None) -> None:
    """Save, commit and report, on every worker; see ``RayTrainCheckpoints.report``."""
    _here().report(engine, metrics, client_state=client_state)


def restore(
    engine: Any, checkpoint: Any = None, *, strict: bool = True, weights_only: bool = False
) -> dict[str, Any] | None:
    """Load the newest commit of the run, or a given checkpoint; see ``RayTrainCheckpoints.restore``."""
    return _here().restore(engine, checkpoint, strict=strict, weights_only=weights_only)


def preempted() -> bool:
    """Whether a node is about to be taken away; see ``RayTrainCheckpoints.preempted``."""
    return _here().preempted()
