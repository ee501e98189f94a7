"""Committed checkpoints for Accelerate with DeepSpeed, FSDP2 or DDP: one line after ``Accelerator(...)``.

    from ckpttool.integrations.accelerate import prepare

    saves = prepare(accelerator)
    accelerator.save_state("checkpoints/step_100")
    accelerator.load_state("checkpoints/step_100")  # on any number of ranks
    saves.wait()  # only with async_save=True

``save_state`` and ``load_state`` keep their arguments and the layout of the folder; both take URLs as well.

Source: accelerate 1.11 and 1.15, accelerator.py (``save_state``, ``load_state``), checkpointing.py, data_loader.py,
scheduler.py
"""

from __future__ import annotations

import logging
import os
import posixpath
from functools import partial
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import accelerator as accelerator_module
from accelerate.data_loader import SeedableRandomSampler
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import BatchSampler, RandomSampler

from ckpttool.arguments import checked_path
from ckpttool.catalog.cleanup import rotate
from ckpttool.catalog.retention import GRACE
from ckpttool.errors import ArgumentError, CkptError, LayoutError, LinkError, PlanError
from ckpttool.formats.layouts import ACCELERATE, Place, step_in
from ckpttool.integrations.live.choice import is_engine, run_of
from ckpttool.integrations.live.folders import (
    Folders,
    FoldersByStorage,
    candidates_in,
    current_run,
    read_files,
    set_rng_of,
    was_within_epoch,
)
from ckpttool.integrations.live.options import SaveOptions
from ckpttool.integrations.live.request import DISTRIBUTED, FrameworkFiles
from ckpttool.integrations.patches import check_signatures, nothing, replaced, scratch_directory, write_file
from ckpttool.integrations.torch.live import unwrapped
from ckpttool.model.names import plain_name
from ckpttool.registry import values_of, with_options
from ckpttool.saving.coordination import TIMEOUT, RankError
from ckpttool.storage import absolute_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from typing_extensions import Unpack

    from ckpttool import _PrepareOptions
    from ckpttool.integrations.live.report import LoadReport, SaveReport
    from ckpttool.integrations.live.run import Run

LOG = logging.getLogger(__name__)
PARAMETERS = {
    "save_state": ["self", "output_dir", "safe_serialization"],
    "load_state": ["self", "input_dir", "load_kwargs"],
}
"""First parameters of the methods of ``Accelerator`` that ckpttool replaces."""
STATE_PARAMETERS = {
    "save_accelerator_state": ["output_dir", "model_states", "optimizers"],
    "load_accelerator_state": ["input_dir", "models", "optimizers"],
}
"""First parameters of its functions that ckpttool replaces."""
TAG = "pytorch_model"
"""Name of DeepSpeed's directory in the folder."""
RANDOM = "random_states_{}.pkl"
"""File of one rank, with the random number states and the number of steps."""


class AcceleratorSaves:
    """The committed saves of one ``Accelerator``; made by ``prepare``."""

    def __init__(self, accelerator: Any, options: SaveOptions, *, root: str | None, grace: float) -> None:
        self._accelerator = accelerator
        self._save_state, self._load_state = accelerator.save_state, accelerator.load_state
        self._root, self._grace = root, grace
        self._folders = FoldersByStorage(options, on_save=self._note, layout="accelerate")
        self._folder = ""
        self.last_save: SaveReport | None = None
        """Report of the last save of this rank."""
        self.restored: LoadReport | None = None
        """Report of the last ``load_state`` of this rank."""

    def wait(self) -> None:
        """Wait until the running save is committed; call it on every rank.

        Raises:
            CkptError: It failed.
        """
        self._folders.wait()

    def _note(self, report: SaveReport) -> None:
        self.last_save = report
        config = self._accelerator.project_configuration
        if report.error is None and self._accelerator.is_main_process and config.automatic_checkpoint_naming:
            saves, name = self._folders.at(self._folder), posixpath.basename(self._folder)
            limit = config.total_limit if saves.run is None else None
            rotate(saves.storage, posixpath.dirname(self._folder), limit, keep={name}, grace=self._grace)

    def _model(self) -> Any:
        """Return the DeepSpeed engine, or the model under FSDP2 or DDP.

        Raises:
            PlanError: There is none, or several.
        """
        models = self._accelerator._models
        fitting = [model for model in models if _uses(self._accelerator) != "DeepSpeed" or is_engine(model)]
        if len(fitting) != 1 or len(models) != 1:
            uses = _uses(self._accelerator)
            problem = f"holds {len(models)} models, {len(fitting)} of them with {uses}"
            raise PlanError("Accelerator", problem, f"prepare one model with {uses} before a save or load")
        return fitting[0]

    def _run(self, model: Any) -> tuple[Run, int]:
        """Return the run of an engine or a model, and its steps."""
        if is_engine(model):
            return run_of(model), int(model.global_steps)
        optimizers = [getattr(one, "optimizer", one) for one in self._accelerator._optimizers]
        counts = (state.get("step", 0) for one in optimizers for state in one.state.values())
        step = int(max(map(float, counts), default=0.0)) or int(self._accelerator.save_iteration)
        return run_of(model, optimizers, True, step), step

    def _automatic_root(self) -> str:
        """Return the directory of the folders that Accelerate names.

        Raises:
            ArgumentError: Accelerate does not name any.
        """
        accelerator = self._accelerator
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            problem = "is missing, and automatic_checkpoint_naming is off"
            raise ArgumentError("output_dir", problem, "pass a folder")
        run = current_run()
        root = self._root or (run.root if run is not None else posixpath.join(accelerator.project_dir, "checkpoints"))
        return absolute_path(root)

    # ------------------------------------------------------------------------------------------- saving

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metrics: Mapping[str, float] | None = None,
        **options: Any,
    ) -> str:
        """Save as ``Accelerator.save_state`` does, in its layout, as one commit.

        Args:
            output_dir: As for Accelerate, or a URL.
            safe_serialization: As for Accelerate.
            metrics: Numbers for the manifest, and for Ray Train.
            options: Options of ``engine.save_checkpoint``: ``client_state``, ``exclude_frozen_parameters``. FSDP2 and
                DDP have the same.

        Returns:
            The folder.

        Raises:
            CkptError: This save failed, or the previous one in the background. Nothing was committed.
        """
        accelerator, model = self._accelerator, self._model()
        config = accelerator.project_configuration
        if config.automatic_checkpoint_naming:
            folder = posixpath.join(self._automatic_root(), f"{ACCELERATE.prefix}{accelerator.save_iteration}")
        elif output_dir is None:
            raise ArgumentError("output_dir", "is missing, and automatic_checkpoint_naming is off", "pass a folder")
        else:
            folder = absolute_path(checked_path("output_dir", output_dir))
        if not safe_serialization and _uses(accelerator) == "DDP":
            problem = "is False, but the weights are saved as safetensors"
            raise ArgumentError("safe_serialization", problem, "leave it out")
        saves = self._folders.at(folder)
        saves.wait()
        given: dict[str, Any] = {}

        def save_engine(save_dir: str, tag: str, **values: Any) -> None:
            given.update(values)

        with scratch_directory() as scratch:
            if is_engine(model):
                without_state = replaced(model, save_checkpoint=save_engine)
            else:
                given.update(options)
                without_state = replaced(
                    accelerator_module,
                    save_fsdp_model=nothing,
                    save_fsdp_optimizer=nothing,
                    save_accelerator_state=_without_state(accelerator_module.save_accelerator_state, accelerator),
                )
            with without_state, replaced(config, automatic_checkpoint_naming=False):
                self._save_state(scratch, safe_serialization=safe_serialization, **options)
            files = read_files(scratch)
        if unknown := set(given) - {"client_state", "exclude_frozen_parameters"}:
            raise ArgumentError(sorted(unknown)[0], "is not an option of a save", "leave it out")
        run, step = self._run(model)
        before = saves.begin(run, folder, step)
        self._folder = folder
        own = RANDOM.format(accelerator.process_index)  # other files have the same names on all ranks
        saves.save(
            run,
            folder,
            tag=TAG,
            files=files,
            client_state=given.get("client_state"),
            before=before,
            metrics=metrics,
            within_epoch=_is_within_epoch(accelerator),
            exclude_frozen=bool(given.get("exclude_frozen_parameters")),
            hidden=() if accelerator.is_main_process else [name for name in files if name != own],
            written=_written(accelerator, model),
        )
        return folder

    # ------------------------------------------------------------------------------------------- loading

    def has_checkpoint(self) -> bool:
        """Return whether ``load_state()`` finds a folder that Accelerate named; call it on every rank."""
        root = self._automatic_root()
        saves = self._folders.at(posixpath.join(root, "checkpoint"))
        saves.wait()
        return bool(saves.ranks.on_first(saves.root, lambda: _find(saves, root, newest=True)))

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load as ``Accelerator.load_state`` does, on any number of ranks and at any ZeRO stage.

        Without ``input_dir``, the newest whole checkpoint that Accelerate named.

        Raises:
            CkptError: There is none, or it cannot be restored; the same on every rank.
        """
        root = (
            self._automatic_root()
            if input_dir is None
            else absolute_path(os.path.expanduser(checked_path("input_dir", input_dir)))
        )
        saves = self._folders.at(posixpath.join(root, "checkpoint"))
        saves.wait()
        skip = None if _uses(self._accelerator) == "DeepSpeed" else saves.skip
        find = partial(_find, saves, root, newest=input_dir is None, skip=skip)
        found: list[str] = saves.ranks.on_first(saves.root, find)
        first: CkptError | None = None
        for path in found:
            try:
                self._load(saves, path, load_kwargs, options)
            except (PlanError, LinkError, RankError):
                raise
            except CkptError as error:
                if input_dir is not None:
                    raise
                saves.skip(path, error)
                first = first or error
                continue
            folder = root if input_dir is not None else posixpath.join(root, path[len(root) :].strip("/").split("/")[0])
            self._continue(saves, folder, automatic=input_dir is None)
            return
        problem = "holds no whole checkpoint" if first is None else f"holds checkpoints, all damaged: {first.problem}"
        raise LayoutError(root, problem, "pass another folder, or start from scratch without load_state")

    def _continue(self, saves: Folders, folder: str, *, automatic: bool) -> None:
        """Let the next save have the next number, and report the checkpoint to Ray Train."""
        step = step_in(posixpath.basename(folder), ACCELERATE)
        if automatic and step is not None:
            self._accelerator.project_configuration.iteration = step + 1
        saves.report_restored(folder, {})

    def _load(self, saves: Folders, path: str, load_kwargs: Any, options: dict[str, Any]) -> None:
        accelerator, model = self._accelerator, self._model()
        reports: list[LoadReport] = []
        with scratch_directory() as directory:
            checkpoint = saves.open(path)
            saves.write_files(checkpoint, directory)
            own, first = (RANDOM.format(n) for n in (accelerator.process_index, 0))
            states = read_files(directory)
            if own not in states and first in states:
                write_file(directory, own, states[first])  # for the number of steps

            def load_engine(load_dir: str, tag: str, load_module_strict: bool = True, **_: Any) -> None:
                with replaced(model, load_checkpoint=load_natively):  # the restore may call it
                    reports.append(saves.restore(run_of(model), checkpoint, strict=load_module_strict))

            def load_run(*_: Any, **__: Any) -> None:
                reports.append(saves.restore(self._run(model)[0], checkpoint))

            if is_engine(model):
                load_natively = model.load_checkpoint
                with_state = replaced(model, load_checkpoint=load_engine)
            else:
                load_rest = _without_state(accelerator_module.load_accelerator_state, accelerator)
                with_state = replaced(
                    accelerator_module,
                    load_fsdp_model=load_run,
                    load_fsdp_optimizer=nothing,
                    load_accelerator_state=load_rest,
                )
            with with_state:
                if _uses(accelerator) == "DDP":
                    load_run()
                self._load_state(directory, load_kwargs, **options)
        (report,) = reports
        self.restored = report
        self._restore_rng(model, report)
        if report.source.world_size != accelerator.num_processes:
            _rescale(accelerator, report.source.world_size)
        if accelerator.is_main_process and any(_has_unsaved_order(loader) for loader in accelerator._dataloaders):
            LOG.warning(
                "a data loader shuffles in an order that is not saved, so that the resumed run may read samples twice "
                "or not at all: pass DataLoaderConfiguration(use_seedable_sampler=True) to Accelerator"
            )

    def _restore_rng(self, model: Any, report: LoadReport) -> None:
        """Restore the random number generators; after a save within an epoch, once more at the first step.

        The iterator of a data loader draws a number when it is made. A run that was saved within an epoch had drawn it
        before; the resumed one makes a new iterator after the load.
        """
        set_rng_of(report)
        if not was_within_epoch(report):
            return

        def restore(module: Any, inputs: Any) -> None:
            if module.training:
                hook.remove()
                set_rng_of(report)

        hook = model.register_forward_pre_hook(restore)


@with_options
def prepare(
    accelerator: Any,
    *,
    root: str | os.PathLike[str] | None = None,
    async_save: bool = False,
    timeout: float = TIMEOUT,
    grace: float = GRACE,
    storage_options: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    **given: Unpack[_PrepareOptions],
) -> AcceleratorSaves:
    """Let ``save_state`` and ``load_state`` of an accelerator save commits, and load on any number of ranks.

    Args:
        accelerator: ``accelerate.Accelerator`` with DeepSpeed, with FSDP2 and sharded state dicts, or with DDP or one
            process.
        root: With ``automatic_checkpoint_naming``, directory or URL of the folders. Default: in a worker of Ray Train
            the directory of the run, else ``checkpoints`` in the project's directory.
        async_save: Return from ``save_state`` after the state is copied to host memory, and write in the background.
        timeout: Seconds that a rank may lag before a save fails.
        grace: Seconds after which the folder of a killed save is removed, counted from the newest of its files.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.

    Raises:
        PlanError: This release of Accelerate has other methods, or the accelerator uses neither DeepSpeed, FSDP2 nor
            DDP, or was prepared before.
    """
    options = SaveOptions(
        async_save=async_save,
        timeout=timeout,
        storage_options=storage_options,
        allow=allow,
        given=values_of("prepare", given),
    )
    release = f"accelerate {accelerate.__version__}"
    check_signatures(accelerate.Accelerator, PARAMETERS, release=release, known="accelerate 1.11 to 1.15")
    if isinstance(getattr(accelerator.save_state, "__self__", None), AcceleratorSaves):
        raise PlanError("Accelerator", "was prepared before", "use the return values of the first prepare")
    check_signatures(accelerator_module, STATE_PARAMETERS, release=release, known="accelerate 1.11 to 1.15")
    if not _uses(accelerator):
        hint = "pass it a deepspeed_plugin, or an fsdp_plugin with fsdp_version=2, or leave prepare out"
        raise PlanError("Accelerator", "does not use DeepSpeed, FSDP2 or DDP", hint)
    if _uses(accelerator) == "FSDP2" and "SHARDED" not in str(accelerator.state.fsdp_plugin.state_dict_type):
        problem = f"has fsdp_plugin.state_dict_type {accelerator.state.fsdp_plugin.state_dict_type}"
        raise PlanError("Accelerator", problem, 'pass state_dict_type="SHARDED_STATE_DICT" to the plugin')
    root = None if root is None else checked_path("root", root)
    saves = AcceleratorSaves(accelerator, options, root=root, grace=grace)
    accelerator.save_state, accelerator.load_state = saves.save_state, saves.load_state
    return saves


def _uses(accelerator: Any) -> str:
    """Return "DeepSpeed", "FSDP2" or "DDP", which stands for one process too; "" for anything else."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "DEEPSPEED":
        return "DeepSpeed"
    if getattr(accelerator, "is_fsdp2", False):  # Accelerate 1.6 and later have it
        return "FSDP2"
    return "DDP" if kind == "NO" or kind.startswith("MULTI_") else ""


def _without_state(original: Callable[..., Any], accelerator: Any) -> Callable[..., Any]:
    """Return a function of Accelerate that saves or loads all but the models and the optimizers, under DDP."""

    def rest(directory: Any, models: Any, optimizers: Any, *others: Any, **options: Any) -> Any:
        if _uses(accelerator) == "DDP":
            models, optimizers = [], []
        return original(directory, models, optimizers, *others, **options)

    return rest


def _written(accelerator: Any, model: Any) -> FrameworkFiles:
    """Return how Accelerate itself writes the model and the optimizer: under DDP by the names of the wrapped model."""
    if _uses(accelerator) != "DDP":
        return DISTRIBUTED
    names = dict(zip(map(plain_name, unwrapped(model).state_dict()), model.state_dict(), strict=True))
    wrapped = any(name != own for name, own in names.items())
    return FrameworkFiles(("model.safetensors", "optimizer.bin"), names if wrapped else None)


def _find(
    saves: Folders, root: str, *, newest: bool, skip: Callable[[str, CkptError], None] | None = None
) -> list[str]:
    """Return the checkpoints to try, best first, on the first rank; ``skip`` is as for ``candidates_in``."""
    storage = saves.source(root)
    if not newest:
        if not storage.is_dir(root):
            raise LayoutError(root, "does not exist", "pass a folder that save_state has written")
        return candidates_in(storage, [root])
    storage.refresh([])
    return candidates_in(storage, [one.path for one in Place(storage, root).folders], skip)


def _is_within_epoch(accelerator: Any) -> bool:
    """Return whether the loop has more batches of a data loader to take."""
    state = accelerator.gradient_state
    return bool(state.in_dataloader and not state.end_of_dataloader)


def _has_unsaved_order(loader: Any) -> bool:
    """Return whether a data loader shuffles in an order that follows from no seed and no epoch.

    Source: accelerate 1.15, data_loader.py (``prepare_data_loader``, ``BatchSamplerShard``, ``set_sampler``).
    """
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # the sampler of all ranks
    sampler = getattr(batches, "sampler", None)
    return isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler)


def _rescale(accelerator: Any, saved: int) -> None:
    """Move the schedulers of Accelerate, which take one step for each rank, to the same place on other ranks.

    Source: accelerate 1.15, scheduler.py (``AcceleratedScheduler.step``).
    """
    for wrapped in accelerator._schedulers:
        if not isinstance(wrapped, AcceleratedScheduler) or wrapped.split_batches or not wrapped.step_with_optimizer:
            continue
        inner = wrapped.scheduler
        if not isinstance(inner, torch.optim.lr_scheduler.LambdaLR):
            LOG.warning(
                "%s has taken one step for each of %d ranks: its position is wrong on %d ranks",
                type(inner).__name__,
                saved,
                accelerator.num_processes,
            )
            continue
        steps = inner.last_epoch // saved
        inner.last_epoch = steps * accelerator.num_processes
        inner._step_count = inner.last_epoch + 1
        inner._last_lr = [
            base * rate(inner.last_epoch) for base, rate in zip(inner.base_lrs, inner.lr_lambdas, strict=True)
        ]
