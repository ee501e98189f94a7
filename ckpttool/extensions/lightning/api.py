"""Committed checkpoints for Lightning's strategies for DeepSpeed and FSDP2.

    from ckpttool.integrations.lightning import CkptDeepSpeedStrategy, newest_checkpoint

    trainer = lightning.Trainer(strategy=CkptDeepSpeedStrategy(stage=3), ...)
    trainer.fit(module, ckpt_path=newest_checkpoint("checkpoints"))

``ModelCheckpoint`` and ``trainer.save_checkpoint`` save commits in Lightning's layout, and ``ckpt_path`` takes any
number of ranks and any ZeRO stage or mesh. ``CkptModelParallelStrategy`` is for models that ``configure_model`` shards
with ``fully_shard`` or ``parallelize_module``; each strategy loads the checkpoints of the other.
For another strategy on DeepSpeed, such as Ray's, put ``CkptSaves`` before it:

    class Strategy(CkptSaves, ray.train.lightning.RayDeepSpeedStrategy): ...

Source: lightning 2.5 and 2.6, pytorch/strategies/deepspeed.py and model_parallel.py (``save_checkpoint``,
``load_checkpoint``), trainer/connectors/checkpoint_connector.py (``dump_checkpoint``).
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckpttool.arguments import checked_path
from ckpttool.catalog.restore_order import of_folder
from ckpttool.commit.manifest import read_manifest
from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError
from ckpttool.formats.scan import scan
from ckpttool.integrations.live.choice import run_of
from ckpttool.integrations.live.folders import Folders, FoldersByStorage, candidates_in, current_run, set_rng_of
from ckpttool.integrations.live.options import SaveOptions
from ckpttool.integrations.patches import check_signatures
from ckpttool.integrations.torch.run import TorchRun
from ckpttool.messages import brief
from ckpttool.registry import options_of, with_options
from ckpttool.saving.coordination import TIMEOUT
from ckpttool.storage import absolute_path, open_storage
from ckpttool.targets.dcp import LIGHTNING_VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.integrations.live.report import LoadReport, SaveReport
    from ckpttool.integrations.live.run import Run

LOG = logging.getLogger(__name__)
TAG = "checkpoint"
"""Name of DeepSpeed's directory in a checkpoint of Lightning."""
WEIGHTS, STATES = "state_dict", "optimizer_states"
"""Entries of Lightning's checkpoint that the run itself saves."""
PARAMETERS = {
    "save_checkpoint": ["self", "checkpoint", "filepath", "storage_options"],
    "load_checkpoint": ["self", "checkpoint_path", "weights_only"],
    "remove_checkpoint": ["self", "filepath"],
    "on_train_batch_start": ["self", "batch", "batch_idx"],
}
"""Parameters of the methods of the strategy that ``CkptSaves`` overrides."""


@with_options
class CkptSaves:
    """Overrides of ``DeepSpeedStrategy``: saves are commits, and loads take any number of ranks and any ZeRO stage.

    Args:
        async_save: Return after the state is copied to host memory, and write in the background.
        save_timeout: Seconds that a rank may lag before a save fails.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.
            So may be objects in hyper-parameters and in states of callbacks.
        arguments: Arguments of the strategy.
    """

    def __init__(
        self,
        *args: Any,
        async_save: bool = False,
        save_timeout: float = TIMEOUT,
        storage_options: Mapping[str, Any] | None = None,
        allow: Collection[str] = (),
        **arguments: Any,
    ) -> None:
        check_strategy(type(self))
        names = [option.name for option in options_of("CkptSaves")]
        given = {name: arguments.pop(name) for name in names if name in arguments}
        super().__init__(*args, **arguments)
        options = SaveOptions(
            async_save=async_save,
            timeout=save_timeout,
            storage_options=storage_options,
            allow=allow,
            given=given,
        )
        self._folders = FoldersByStorage(options, on_save=self._note, layout="lightning")
        self._rng_of: LoadReport | None = None
        self.last_save: SaveReport | None = None
        """Report of the last save of this rank."""
        self.restored: LoadReport | None = None
        """Report of the last load of this rank."""

    def _note(self, report: SaveReport) -> None:
        self.last_save = report

    def _run(self, *, optimizers: bool = True) -> tuple[Run, int]:
        """Return the run, with or without its optimizers, and its steps."""
        engine = self.deepspeed_engine  # type: ignore[attr-defined]
        return run_of(engine), int(engine.global_steps)

    def _check(self, checkpoint: Mapping[str, Any]) -> None:
        """Check that a checkpoint of Lightning is the state of the run."""

    def wait(self) -> None:
        """Wait until the running save is committed; call it on every rank.

        Raises:
            CkptError: It failed.
        """
        self._folders.wait()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as Lightning's strategy does, in its layout, as one commit.

        Raises:
            CkptError: This save failed, or the previous one in the background. Nothing was committed.
        """
        strategy: Any = self
        if storage_options is not None:
            problem = "is not an option of a save"
            raise ArgumentError("storage_options", problem, f"pass it to {type(self).__name__}")
        folder = absolute_path(str(strategy.broadcast(os.fspath(filepath))))
        saves = self._folders.at(folder)
        saves.wait()
        saves.ranks.together(folder, partial(self._check, checkpoint))
        metrics = _float_metrics(strategy.lightning_module.trainer.callback_metrics)
        run, step = self._run(optimizers=STATES in checkpoint)
        saves.save(
            run,
            folder,
            tag=TAG,
            files={},
            before=saves.begin(run, folder, step),
            metrics=metrics,
            client_state={key: value for key, value in checkpoint.items() if key not in {WEIGHTS, STATES}},
            exclude_frozen=bool(getattr(strategy, "exclude_frozen_parameters", False)),
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as Lightning's strategy does, on any number of ranks, and at any ZeRO stage or on any mesh.

        Raises:
            CkptError: The checkpoint was not committed, is damaged or does not fit; the same on every rank.
        """
        strategy: Any = self
        if getattr(strategy, "load_full_weights", False) and strategy.zero_stage_3:
            options = {} if weights_only is None else {"weights_only": weights_only}  # lightning 2.5 does not have it
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)  # type: ignore[misc]
            return loaded
        folder = absolute_path(os.fspath(checkpoint_path))
        saves = self._folders.at(folder)
        saves.wait()
        found = saves.ranks.on_first(saves.root, lambda: _find(saves, folder))
        checkpoint = saves.open(found[0])
        if LIGHTNING_VERSION not in checkpoint.client_state:
            raise LayoutError(folder, "was not saved by Lightning: it has no loops", "load it with ckpttool.load")
        module = strategy.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        report = saves.restore(self._run()[0], checkpoint, strict=module.strict_loading, weights_only=not fits)
        saves.report_restored(folder, {})
        self.restored = report
        if fits:
            self._restore_rng(report)
            self._rng_of = report
        return dict(checkpoint.client_state if not fits else report.client_state)

    def _restore_rng(self, report: LoadReport) -> None:
        if not set_rng_of(report):
            LOG.warning("%s has no random number states: they start again", report.path)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the random number generators again before the first batch of a run that was saved within an epoch.

        The iterator of the data loader, which is made in between, draws from them once an epoch: a run that was saved
        at the end of an epoch takes that number from the restored generators, as in an uninterrupted run.
        """
        report, self._rng_of = self._rng_of, None
        if report is not None and batch_idx:
            self._restore_rng(report)
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the running save is committed: it may be the only whole one until then."""
        self.wait()
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for the running save."""
        self.wait()
        super().teardown()  # type: ignore[misc]


class CkptDeepSpeedStrategy(CkptSaves, DeepSpeedStrategy):  # lightning is not followed
    """``DeepSpeedStrategy`` whose saves are commits; takes the arguments of both."""


class CkptModelParallelStrategy(CkptSaves, ModelParallelStrategy):
    """``ModelParallelStrategy`` whose saves are commits; takes the arguments of both."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        if not self._save_distributed_checkpoint:
            problem = "is False, which saves one file of all weights, not a commit"
            raise ArgumentError("save_distributed_checkpoint", problem, "leave it out, and export with consolidate")
        self._given: Mapping[str, Any] = {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's parts of the model for hooks, without a copy: a save reads the model itself."""
        self._given = get_model_state_dict(self.model)
        return dict(self._given)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: a save reads the optimizer itself. Lightning's takes a step if there was none."""
        return {}

    def _run(self, *, optimizers: bool = True) -> tuple[Run, int]:
        module = cast("Any", self.lightning_module)
        step = int(module.trainer.global_step)
        run = TorchRun(self.model, list(self.optimizers) if optimizers else False, True, step)
        run.clears_gradients = module.automatic_optimization and module.trainer.accumulate_grad_batches == 1
        return run, step

    def _check(self, checkpoint: Mapping[str, Any]) -> None:
        given, self._given = self._given, {}
        found = checkpoint.get(WEIGHTS, {})
        for name in {**given, **found}:
            if found.get(name) is not given.get(name):
                problem = f"has another {brief(name, 200)} than the model"
                hint = "let on_save_checkpoint change other entries, or use Lightning's ModelParallelStrategy"
                raise PlanError(WEIGHTS, problem, hint)


def newest_checkpoint(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return the newest whole checkpoint in the directory of a ``ModelCheckpoint``, for ``ckpt_path``.

    Args:
        directory: Directory or URL.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.

    Returns:
        Its path or URL; None if there is none yet.
    """
    root = absolute_path(checked_path("directory", directory))
    storage = open_storage(root, storage_options)
    found = []
    for folder in (one.path for one in scan(storage, root, depth=1) if not one.hidden):
        commit = next((one for one in of_folder(storage, folder) if one.committed), None)
        if commit is None:
            LOG.warning("%s was not committed and is skipped", folder)
            continue
        try:
            manifest = read_manifest(storage, commit.path)
        except CkptError as error:
            LOG.warning("%s is skipped: %s", folder, error)
            continue
        found.append((manifest.step, manifest.number, folder))
    return max(found)[2] if found else None


def run_directory() -> str:
    """Return the directory of the run of Ray Train, for ``ModelCheckpoint(dirpath=...)``, in a worker.

    Raises:
        PlanError: This process is not a worker of Ray Train.
    """
    run = current_run()
    if run is None:
        raise PlanError("ray.train", "is not running here", "call this in train_func of a TorchTrainer")
    return run.root


def check_strategy(strategy: type = CkptDeepSpeedStrategy) -> None:
    """Check that this release of Lightning has the methods that ``CkptSaves`` overrides.

    Args:
        strategy: A class with ``CkptSaves`` among its bases.

    Raises:
        PlanError: A method is missing, or has other parameters; or the class is not a strategy for DeepSpeed or FSDP2.
    """
    base: Any = DeepSpeedStrategy
    if issubclass(strategy, CkptModelParallelStrategy):
        base = ModelParallelStrategy
    elif not issubclass(strategy, DeepSpeedStrategy):
        hint = "use CkptModelParallelStrategy, or save with ckpttool.CheckpointManager in a callback"
        raise PlanError(strategy.__name__, "is not a strategy for DeepSpeed, which CkptSaves is for", hint)
    release = f"lightning {lightning.__version__}"
    check_signatures(base, PARAMETERS, release=release, known="lightning 2.5 or 2.6", overrides=True)


def _find(saves: Folders, folder: str) -> list[str]:
    if saves.source(folder).exists(folder) and not saves.source(folder).is_dir(folder):
        hint = "load it with Lightning's own strategy, and save it with this one"
        raise LayoutError(folder, "is a file, not the directory of a checkpoint", hint)
    if not saves.source(folder).is_dir(folder):
        raise LayoutError(folder, "does not exist", "pass newest_checkpoint(DIRECTORY) as ckpt_path")
    found = candidates_in(saves.source(folder), [folder])
    if not found:
        raise LayoutError(folder, "holds no whole checkpoint", "pass newest_checkpoint(DIRECTORY) as ckpt_path")
    return found


def _float_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return found
