"""Committed checkpoints for the Hugging Face Trainer with DeepSpeed, FSDP2 or DDP: one line in a training script.

    from ckpttool.integrations.huggingface import CkptCallback

    trainer.add_callback(CkptCallback())
    trainer.train(resume_from_checkpoint=True)

Each save of the Trainer is a commit in the Trainer's own layout (``checkpoint-N``), and a resume takes the newest whole
one, on any number of ranks. For a script that cannot be changed:

    torchrun -m ckpttool.integrations.huggingface SCRIPT ARGUMENTS

The Trainer calls no callback where it writes and reads checkpoints. Therefore the first ``CkptCallback`` wraps some of
its methods, once for the class, and replaces others for one call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
import runpy
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback
from transformers import trainer as trainer_module

from ckpttool.arguments import checked_path
from ckpttool.catalog.cleanup import rotate
from ckpttool.catalog.retention import GRACE
from ckpttool.dtypes import TRAINING_DTYPES, short_name
from ckpttool.errors import ArgumentError, CkptError, LayoutError, LinkError, PlanError
from ckpttool.extensions.huggingface.export import Exporter, export, move_weights
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER
from ckpttool.formats.layouts import TRAINER, Place
from ckpttool.integrations.live.choice import is_engine, run_of
from ckpttool.integrations.live.folders import (
    Folders,
    candidates_in,
    check_no_foreign,
    current_run,
    is_static,
    is_weights,
    read_files,
    set_rng_of,
    show_log,
)
from ckpttool.integrations.live.options import SaveOptions
from ckpttool.integrations.live.request import FrameworkFiles
from ckpttool.integrations.patches import (
    check_signatures,
    make_folder,
    nothing,
    remove_files,
    replaced,
    scratch_directory,
)
from ckpttool.model.names import plain_name
from ckpttool.registry import values_of, with_options
from ckpttool.saving.coordination import TIMEOUT, RankError
from ckpttool.storage import LATEST, LOCAL, MANIFEST, absolute_path, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from typing_extensions import Unpack

    from ckpttool import _CkptCallbackOptions
    from ckpttool.extensions.huggingface.export import Dtype
    from ckpttool.integrations.live.report import LoadReport, SaveReport
    from ckpttool.integrations.live.run import Run
    from ckpttool.model import Checkpoint


STATE, OPTIMIZER = "trainer_state.json", "optimizer.pt"
LOADER: ContextVar[Callable[[str, bool], None] | None] = ContextVar("LOADER", default=None)
"""Loads a checkpoint in place of DeepSpeed or Accelerate, while a Trainer with a ``CkptCallback`` trains."""
PARAMETERS = {
    "train": ["self", "resume_from_checkpoint", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_load_rng_state": ["self", "checkpoint"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_best_model": ["self"],
    "_save": ["self", "output_dir", "state_dict"],
    "_get_output_dir": ["self", "trial"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
}
"""First parameters of the methods of ``transformers.Trainer`` that ckpttool wraps, replaces or calls."""
LOAD_PARAMETERS = {"deepspeed_load_checkpoint": ["deepspeed_engine", "checkpoint_path", "load_module_strict"]}
"""Parameters of the function of ``transformers.trainer`` that ckpttool replaces under DeepSpeed."""
FSDP_PARAMETERS = {
    "save_fsdp_model": ["fsdp_plugin", "accelerator", "model", "output_dir"],
    "save_fsdp_optimizer": ["fsdp_plugin", "accelerator", "optimizer", "model", "output_dir"],
    "load_fsdp_model": ["fsdp_plugin", "accelerator", "model", "input_dir"],
    "load_fsdp_optimizer": ["fsdp_plugin", "accelerator", "optimizer", "model", "input_dir"],
}
"""First parameters of those that it replaces under FSDP2."""
KNOWN = "transformers 4.57 to 5.23"
_wrapped: list[Any] = []


def check_trainer() -> None:
    """Check that this release of transformers has the methods that ckpttool works with.

    Raises:
        PlanError: A method is missing, or has other parameters.
    """
    release = f"transformers {transformers.__version__}"
    check_signatures(transformers.Trainer, PARAMETERS, release=release, known=KNOWN)
    check_signatures(trainer_module, LOAD_PARAMETERS, release=release, known=KNOWN, overrides=True)
    check_signatures(trainer_module, FSDP_PARAMETERS, release=release, known=KNOWN)


def install(callback: type, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Wrap methods of ``transformers.Trainer``, once in a process.

    Args:
        callback: Class of the callbacks; a Trainer without one of them works as before.
        handlers: By name of a method, the function to call instead: with the callback, the Trainer, the original
            method, and the arguments.

    Raises:
        PlanError: This release of transformers has other methods.
    """
    if _wrapped:
        return
    check_trainer()
    for name, handler in handlers.items():
        setattr(transformers.Trainer, name, _dispatching(getattr(transformers.Trainer, name), handler, callback))

    def load_engine(deepspeed_engine: Any, checkpoint_path: str, load_module_strict: bool = True) -> None:
        LOADER.get()(checkpoint_path, load_module_strict)  # type: ignore[misc]

    def load_model(fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str, *_: Any, **__: Any) -> Any:
        LOADER.get()(input_dir, True)  # type: ignore[misc]
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    loaders: dict[str, Callable[..., Any]] = {
        "deepspeed_load_checkpoint": load_engine,
        "load_fsdp_model": load_model,
        "load_fsdp_optimizer": nothing,
    }
    for name, own in loaders.items():
        setattr(trainer_module, name, _while_loading(getattr(trainer_module, name), own))
        _wrapped.append(own)


def _while_loading(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one while a Trainer with a callback trains, else the original."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        return (original if LOADER.get() is None else own)(*args, **kwargs)

    return load


def is_sharded(trainer: Any) -> bool:
    """Return whether a Trainer trains under FSDP2 and saves sharded state dicts."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None) if trainer.is_fsdp_enabled else None
    return getattr(plugin, "fsdp_version", 1) == 2 and "SHARDED" in str(getattr(plugin, "state_dict_type", ""))


def is_replicated(trainer: Any) -> bool:
    """Return whether every rank has the whole model: under DDP, or in one process."""
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    return kind == "NO" or kind.startswith("MULTI_")


def run_of_trainer(trainer: Any) -> tuple[Run, int]:
    """Return the run of a Trainer, and its steps."""
    if trainer.is_deepspeed_enabled:
        return run_of(trainer.model_wrapped), int(trainer.model_wrapped.global_steps)
    step = int(trainer.state.global_step)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    model = trainer.model if is_replicated(trainer) else trainer.model_wrapped  # also without torch's DataParallel
    return run_of(model, optimizer, True, step), step


def _dispatching(original: Callable[..., Any], handler: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = next((one for one in self.callback_handler.callbacks if isinstance(one, kind)), None)
        if callback is None:
            return original(self, *args, **kwargs)
        if not (self.is_deepspeed_enabled or is_sharded(self) or is_replicated(self)):
            problem = "is added to a Trainer with FSDP, but not with FSDP2 and sharded state dicts"
            hint = (
                'pass deepspeed= or fsdp="full_shard" with fsdp_config={"fsdp_version": 2, "state_dict_type": '
                '"SHARDED_STATE_DICT"} to TrainingArguments, or remove the callback'
            )
            raise PlanError(kind.__name__, problem, hint)
        return handler(callback, self, functools.partial(original, self), *args, **kwargs)

    return method


def write_small_files(trainer: Any, save: Callable[[], None], scratch: str, *, name: str, best: str | None) -> bool:
    """Let the Trainer write a checkpoint without weights and optimizer into a scratch directory.

    Args:
        trainer: The Trainer.
        save: Its own ``_save_checkpoint``.
        scratch: A directory; the checkpoint's folder is created in it.
        name: Name of the folder.
        best: Name of the folder of the best checkpoint, if there is one.

    Returns:
        Whether the Trainer saves without frozen parameters.
    """
    state, run = trainer.state, trainer._get_output_dir(None)
    frozen: list[bool] = []

    def save_engine(save_dir: str, *_: Any, exclude_frozen_parameters: bool = False, **__: Any) -> None:
        frozen.append(exclude_frozen_parameters)

    if best is not None and best != name:  # the Trainer looks for the best checkpoint beside the one that it writes
        os.utime(make_folder(scratch, best), (0, 0))  # and may remove the older one of them
    make_folder(scratch, name)
    if trainer.is_deepspeed_enabled:
        without_state = replaced(trainer.model_wrapped, save_checkpoint=save_engine)
    elif is_replicated(trainer):
        without_state = replaced(trainer.optimizer, state_dict=dict)
    else:
        without_state = replaced(trainer_module, save_fsdp_model=nothing, save_fsdp_optimizer=nothing)
    with (
        replaced(
            trainer,
            _get_output_dir=lambda trial=None: scratch,
            _push_from_checkpoint=lambda folder: None,
            save_model=lambda output_dir, **_: _save_without_weights(trainer, output_dir),
        ),
        without_state,
    ):
        save()
    remove_files(os.path.join(scratch, name), OPTIMIZER.__eq__)
    if (state.best_model_checkpoint or "").startswith(scratch):
        state.best_model_checkpoint = os.path.join(run, os.path.basename(state.best_model_checkpoint))
        path = os.path.join(scratch, name, STATE)
        if os.path.exists(path):
            state.save_to_json(path)
    return any(frozen)


def _save_without_weights(trainer: Any, output_dir: str) -> None:
    """Write configuration, tokenizer and arguments, as ``Trainer.save_model`` does, and no weights."""
    with without_weights(trainer):
        trainer._save(output_dir)
    remove_files(output_dir, is_weights)


@contextlib.contextmanager
def without_weights(trainer: Any) -> Iterator[None]:
    """Context manager: let ``Trainer._save`` write all files but the weights."""
    save = trainer._save

    def save_rest(output_dir: str | None = None, state_dict: Any = None) -> None:
        directory = trainer.args.output_dir if output_dir is None else output_dir
        # PEFT looks for all names; at ZeRO-3 the tensors are empty anyway.
        weights = {name: torch.empty(0) for name in trainer.model.state_dict()} if is_adapter(trainer) else {}
        kept = {name for name in _names(directory) if not name.startswith("adapter_model")}
        save(directory, state_dict=weights)
        written = [name for name in _names(directory) if is_weights(name) and name not in kept]
        if trainer.args.should_save:
            LOCAL.delete([os.path.join(directory, name) for name in written])

    with replaced(trainer, _save=save_rest):
        yield


def _names(directory: str) -> list[str]:
    return os.listdir(directory) if os.path.isdir(directory) else []


def adapt_state(directory: str, arguments: Any, is_whole: Callable[[str], bool]) -> str:
    """Adapt the state of a checkpoint to this run, before the Trainer reads it.

    transformers 4.57 takes the batch size of the save instead of the arguments': they differ on other ranks. And the
    Trainer forgets the best checkpoint if it has no local folder: until the training begins, it gets an empty one.

    Args:
        directory: The Trainer's files of the checkpoint to resume from, in a scratch directory.
        arguments: The Trainer's arguments.
        is_whole: Returns whether the run has a checkpoint, by the name of its folder.

    Returns:
        Name of the folder of the best checkpoint; "" if there is none.

    Raises:
        LayoutError: The Trainer's state is damaged.
    """
    path = os.path.join(directory, STATE)
    if not os.path.exists(path):
        return ""
    try:
        state = transformers.TrainerState.load_from_json(path)
    except (ValueError, TypeError, AttributeError) as error:
        raise LayoutError(STATE, "is damaged", "restore it from a copy") from error
    if not arguments.auto_find_batch_size:
        state.train_batch_size = arguments.train_batch_size
    best = posixpath.basename(state.best_model_checkpoint or "")
    if best and is_whole(best):
        state.best_model_checkpoint = make_folder(directory, best)
    else:
        best = ""
    state.save_to_json(path)
    return best


@contextlib.contextmanager
def without_removal(trainer: Any) -> Iterator[None]:
    """Context manager: let the Trainer remove no checkpoint at its end: it ignores pins and other directories.

    With ``save_total_limit=1`` it removes all but the best one.
    """
    if hasattr(trainer_module, "sort_checkpoints"):
        with replaced(trainer_module, sort_checkpoints=lambda *_, **__: []):
            yield
    else:  # transformers 4.57
        with replaced(trainer, _sorted_checkpoints=lambda *_, **__: []):
            yield


def logged_numbers(state: Any) -> dict[str, float]:
    """Return the numbers that the Trainer logged at this step."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {k: float(v) for entry in entries for k, v in entry.items() if isinstance(v, int | float) and k != "step"}


def is_adapter(trainer: Any) -> bool:
    """Return whether the Trainer trains a PEFT adapter."""
    return bool(trainer_module._is_peft_model(trainer.model))


def names_of_adapter(model: Any) -> dict[str, str]:
    """Return the names that PEFT gives to the weights of the active adapter, by their names in the model.

    Raises:
        PlanError: The adapter has tensors that are not in the model, or there are several adapters.

    Source: peft 0.21, utils/save_and_load.py (``get_peft_model_state_dict``).
    """
    from peft import get_peft_model_state_dict

    places = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(place): name for name, place in places.items()}
    if len(model.peft_config) > 1:
        problem = f"are {len(model.peft_config)}, but the save would have one alone"
        raise PlanError("the adapters of PEFT", problem, "train a model with one adapter, or remove the callback")
    (adapter,) = model.peft_config
    found = get_peft_model_state_dict(model, state_dict=places, adapter_name=adapter)
    if not found or any(id(place) not in names for place in found.values()):
        problem = "is of a kind that cannot be saved"
        raise PlanError("the adapter of PEFT", problem, "train an adapter of LoRA, or remove the callback")
    return {plain_name(names[id(place)]): name for name, place in found.items()}


LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Resume:
    """The checkpoint that a run resumes from."""

    checkpoint: Checkpoint
    directory: str
    """Local directory with the Trainer's files; it is passed to the Trainer as ``resume_from_checkpoint``."""
    best: str
    """Name of the folder of the best checkpoint; "" if there is none."""
    report: LoadReport | None = None
    """Report of the engine's load; None before it."""
    failed: CkptError | None = None
    """Error of the engine's load."""


@with_options
class CkptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Makes each save of a Trainer a commit, and resumes from the newest whole one on any number of ranks.

    Args:
        root: Directory or URL of the checkpoints. Default: in a worker of Ray Train the directory of the run, whose
            ``CheckpointConfig`` then removes old checkpoints; else the Trainer's ``output_dir``.
        async_save: Return after the state is copied to host memory, and write in the background.
        auto_resume: Whether ``trainer.train()`` resumes from the newest whole checkpoint, if there is one, also when
            ``resume_from_checkpoint`` is not given.
        export_every: Write the weights of checkpoints whose step is a multiple of this as a Hugging Face folder, in
            the background. With ``push_to_hub`` each checkpoint that is pushed is exported.
        export_to: Directory or URL of the exports: ``EXPORT_TO/checkpoint-N``. Default: the checkpoint's own folder on
            disk, which under DDP has the weights anyway; for a bucket, "export" below ``root``.
        export_dtype: "fp32", "bf16" or "fp16"; default: the type that the engine computes in.
        timeout: Seconds that a rank may lag before a save fails.
        grace: Seconds after which the folder of a killed save is removed, counted from the newest of its files.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.
    """

    def __init__(  # noqa: PLR0913  public API
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        async_save: bool = False,
        auto_resume: bool = False,
        export_every: int | None = None,
        export_to: str | os.PathLike[str] | None = None,
        export_dtype: Dtype | None = None,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        storage_options: Mapping[str, Any] | None = None,
        allow: Collection[str] = (),
        **given: Unpack[_CkptCallbackOptions],
    ) -> None:
        if export_every is not None and export_every < 1:
            raise ArgumentError("export_every", f"is {export_every}", "pass a number of steps, 1 or more")
        export_dtype = short_name(export_dtype)
        if export_dtype not in {None, *TRAINING_DTYPES}:
            raise ArgumentError("export_dtype", f"is {export_dtype!r}", "pass fp32, bf16 or fp16")
        self._root = None if root is None else checked_path("root", root)
        self._auto_resume, self._grace = auto_resume, grace
        self._export_every, self._export_dtype = export_every, export_dtype
        self._export_to = None if export_to is None else checked_path("export_to", export_to)
        self._options = SaveOptions(
            async_save=async_save,
            timeout=timeout,
            storage_options=storage_options,
            allow=allow,
            given=values_of("CkptCallback", given),
        )
        self._saves: Folders | None = None
        self._output_dir = ""
        self._exporter: Exporter | None = None
        self._resume: _Resume | None = None
        self._after: Callable[[SaveReport], None] = lambda report: None
        self._current: tuple[str, int] | None = None
        self.last_save: SaveReport | None = None
        """Report of the last save of this rank."""
        self.restored: LoadReport | None = None
        """Report of the last resume of this rank."""
        install(CkptCallback, _HANDLERS)
        show_log()

    def wait(self) -> None:
        """Wait until the running save is committed and the exports are written; call it on every rank.

        Raises:
            CkptError: One of them failed.
        """
        if self._saves is None:
            return
        self._saves.wait()
        self._saves.ranks.on_first(self._saves.root, lambda: None if self._exporter is None else self._exporter.wait())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the best checkpoint of a resumed run the path that the Trainer would give it."""
        if self._resume is not None and self._resume.best:
            state.best_model_checkpoint = os.path.join(self._output_dir, self._resume.best)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last save and for the exports."""
        self.wait()

    # ------------------------------------------------------------------------------------------- saving

    def _folders(self, trainer: Any) -> Folders:
        """Return the saves of the Trainer's run: one object for each output directory."""
        output_dir = trainer._get_output_dir(None)  # a subclass may choose another
        if self._saves is not None and (self._root is not None or self._output_dir == output_dir):
            return self._saves
        if self._saves is not None:
            self.wait()
        self._output_dir = output_dir
        root = self._root
        if root is None and current_run() is None:
            root = os.path.abspath(output_dir)
        self._saves = Folders(root, self._options, on_save=self._note, layout="accelerate")
        self._current = None
        return self._saves

    def save_checkpoint(self, trainer: Any, original: Callable[..., None], model: Any, trial: Any = None) -> None:
        """Save as ``Trainer._save_checkpoint`` does, in its layout, as one commit."""
        saves, state = self._folders(trainer), trainer.state
        run, step = run_of_trainer(trainer)
        saves.wait()
        name = f"{TRAINER.prefix}{int(state.global_step)}"
        folder = posixpath.join(saves.root, name)
        if saves.storage.remote and self._current == (folder, step):
            LOG.info("%s is saved already", folder)  # a bucket cannot replace it as a whole
            return
        with scratch_directory() as scratch:
            best = None if state.best_global_step is None else f"{TRAINER.prefix}{int(state.best_global_step)}"
            if best is not None and not self._is_whole(saves, best):
                best = name if best == name else None
            save = functools.partial(original, model, trial)
            frozen = write_small_files(trainer, save, scratch, name=name, best=best)
            files = read_files(os.path.join(scratch, name))
        before = saves.begin(run, folder, step)
        self._after = functools.partial(self._committed, trainer, saves, folder, self._export_of(trainer, folder))
        saves.save(
            run,
            folder,
            tag=None,
            files=files,
            static=[name for name in files if is_static(name)],
            metrics=logged_numbers(state),
            exclude_frozen=frozen,
            before=before,
            written=_written(trainer),
        )
        self._current = folder, step

    def _note(self, report: SaveReport) -> None:
        self.last_save = report
        self._after(report)

    def _committed(
        self, trainer: Any, saves: Folders, folder: str, start_export: Callable[[], None], report: SaveReport
    ) -> None:
        """Start the export and remove old checkpoints, on the first rank, after a commit."""
        if report.error is not None or saves.ranks.rank:
            return
        start_export()
        best = trainer.state.best_model_checkpoint
        keep = {posixpath.basename(folder), *(self._exporter.busy if self._exporter else ())}
        keep |= {os.path.basename(best)} if best else set()
        limit = trainer.args.save_total_limit if saves.run is None else None
        rotate(saves.storage, saves.root, limit, keep=keep, grace=self._grace)

    # ------------------------------------------------------------------------------------------- exports

    def _export_of(self, trainer: Any, folder: str) -> Callable[[], None]:
        """Return a function that starts the export of a checkpoint, if it is due."""
        arguments = trainer.args
        pushes = arguments.push_to_hub and arguments.hub_strategy != "end"
        due = self._export_every is not None and int(trainer.state.global_step) % self._export_every == 0
        if not (pushes or due):
            return lambda: None
        name, is_remote = posixpath.basename(folder), is_url(folder)
        out: str | None = None
        if pushes and is_remote:  # the client of the Hub uploads from disk
            out = os.path.join(arguments.output_dir, "export", name)
        elif self._export_to is not None:
            out = posixpath.join(self._export_to, name)
        elif is_remote:
            out = posixpath.join(posixpath.dirname(folder), "export", name)
        if out is None and is_replicated(trainer):  # the checkpoint itself has the weights
            return functools.partial(trainer._push_from_checkpoint, folder) if pushes else lambda: None

        def start() -> None:
            if self._exporter is None:
                storage_options = self._options.storage_options
                self._exporter = Exporter(
                    self._dtype(trainer), adapter_only=is_adapter(trainer), storage_options=storage_options
                )
            self._exporter.start(folder, out, trainer._push_from_checkpoint if pushes else None)

        return start

    def _dtype(self, trainer: Any) -> Dtype:
        model = trainer.model_wrapped
        own = model.get_data_types()[0] if is_engine(model) else next(model.parameters()).dtype
        computed: Dtype = short_name(own)
        return self._export_dtype or (computed if computed in TRAINING_DTYPES else "fp32")

    def save_model(
        self, trainer: Any, original: Callable[..., None], output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save the weights as ``Trainer.save_model`` does; at ZeRO-3 and of FSDP2 without a gather, from a commit."""
        engine = trainer.model_wrapped
        if is_sharded(trainer) and trainer.optimizer is not None:  # the Trainer itself writes nothing
            out = trainer.args.output_dir if output_dir is None else output_dir
            _save_without_weights(trainer, out)
            self._write_weights(trainer, out)
            if trainer.args.push_to_hub and not _internal_call:
                trainer.push_to_hub(commit_message="Model save")
            return
        gathers = is_engine(engine) and engine.zero_gather_16bit_weights_on_model_save()
        if not is_engine(engine) or engine.zero_optimization_stage() < 3 or gathers:
            original(output_dir, _internal_call=_internal_call)
            return

        # Without the gathered weights the Trainer saves the engine into the folder instead.
        def write_weights(save_dir: str, *_: Any, **__: Any) -> None:
            self._write_weights(trainer, save_dir)

        with replaced(engine, save_checkpoint=write_weights), without_weights(trainer):
            original(output_dir, _internal_call=_internal_call)

    def _write_weights(self, trainer: Any, output_dir: str) -> None:
        """Write the weights of the run into a folder, from the commit of this step or from a temporary one."""
        saves = self._folders(trainer)
        run, step = run_of_trainer(trainer)
        saves.wait()
        folder = self._current[0] if self._current and self._current[1] == step else None
        temporary = os.path.join(os.path.abspath(output_dir), ".ckpttool-weights")
        if folder is None:
            folder = os.path.join(temporary, "saved")
            Folders(temporary, SaveOptions(timeout=self._options.timeout)).save(run, folder, tag=None, files={})
        source, dtype, adapter = folder, self._dtype(trainer), is_adapter(trainer)

        def write() -> None:
            out = os.path.join(temporary, "weights")
            export(source, out, dtype=dtype, adapter_only=adapter, storage_options=self._options.storage_options)
            move_weights(out, output_dir)
            LOCAL.remove_tree(temporary)

        saves.ranks.on_first(saves.root, write)

    # ------------------------------------------------------------------------------------------- resuming

    def train(
        self,
        trainer: Any,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as ``Trainer.train`` does, from the newest checkpoint that can be restored."""
        if trial is not None:
            problem = "cannot save the trials of a hyper-parameter search"
            raise PlanError("CkptCallback", problem, "remove it from the Trainer for the search")
        if trainer.args.save_only_model:
            problem = "cannot save only weights: save_only_model is on"
            raise PlanError("CkptCallback", problem, "leave it out, and pass export_every to the callback")
        if is_url(trainer.args.output_dir):
            problem = f"is {trainer.args.output_dir}, but the Trainer writes to local disk"
            raise ArgumentError("output_dir", problem, "pass a local directory, and the URL to CkptCallback")
        remote = self._root is not None and is_url(self._root)
        if self._export_dtype and self._export_to is None and is_replicated(trainer) and not remote:
            problem = "is missing: under DDP the checkpoint itself has the weights, in their own type"
            raise ArgumentError("export_to", problem, "pass a directory, or leave export_dtype out")
        if is_adapter(trainer) and not trainer.is_deepspeed_enabled:
            names_of_adapter(trainer.model)  # refuses before the training, not at its first save
        saves, given = self._folders(trainer), resume_from_checkpoint
        skip = None if trainer.is_deepspeed_enabled else saves.skip
        found: list[str] = saves.ranks.on_first(saves.root, lambda: self._find(saves, given, skip))
        if given is True and not found:
            raise ValueError(f"No valid checkpoint found in output directory ({saves.root})")  # as the Trainer
        token = LOADER.set(functools.partial(self._load, trainer, saves))
        try:
            with without_removal(trainer):
                if not found:
                    return original(None, trial, *args, **kwargs)
                return self._train_from(trainer, saves, found, lambda path: original(path, trial, *args, **kwargs))
        finally:
            LOADER.reset(token)
            self._resume = None

    def _train_from(self, trainer: Any, saves: Folders, found: list[str], run: Callable[[str], Any]) -> Any:
        """Train from the first checkpoint that can be restored."""
        first: CkptError | None = None
        for path in found:
            self._resume = None
            with scratch_directory() as directory:
                try:
                    checkpoint = saves.open(path)
                    saves.write_files(checkpoint, directory)
                    best = adapt_state(directory, trainer.args, functools.partial(self._is_whole, saves))
                    if is_sharded(trainer):  # by which the Trainer knows a checkpoint of FSDP
                        make_folder(directory, ACCELERATE_MODEL)
                        make_folder(directory, ACCELERATE_OPTIMIZER)
                    elif is_replicated(trainer):  # without which it does not load the scheduler
                        torch.save({}, os.path.join(directory, OPTIMIZER))
                    self._resume = _Resume(checkpoint, directory, best)
                    return run(directory)
                except (PlanError, LinkError, RankError):
                    raise  # it is sound but does not fit, or the user must decide: an older one does not help
                except CkptError as error:
                    if self._resume is not None and error is not self._resume.failed:
                        raise  # of the training
                    saves.skip(path, error)
                    first = first or error
                    trainer.model_wrapped = trainer.model  # for a new engine
                    trainer.optimizer = trainer.optimizer if trainer.is_deepspeed_enabled else None
        problem = f"holds {len(found)} checkpoints, and none can be restored"
        problem += f"; of the newest: {first.problem}" if first is not None else ""
        raise LayoutError(saves.root, problem, "restore one from a copy, or choose another output_dir")

    @staticmethod
    def _is_whole(saves: Folders, name: str) -> bool:
        return any(saves.storage.exists(posixpath.join(saves.root, name, file)) for file in (LATEST, MANIFEST))

    def _find(self, saves: Folders, given: Any, skip: Callable[[str, CkptError], None] | None) -> list[str]:
        """Return the checkpoints to try, best first, on the first rank."""
        newest = given is True or (not given and self._auto_resume)
        if not newest and not given:
            return []
        storage = saves.source(saves.root)
        storage.refresh([])
        listed = [one.path for one in Place(storage, saves.root).folders]
        if not newest:
            folder = _given_folder(saves, os.fspath(given), self._output_dir)
            if not listed or folder != listed[0]:
                found = candidates_in(saves.source(folder), [folder])
                if not found:
                    raise LayoutError(folder, "holds no whole checkpoint", "pass resume_from_checkpoint=True")
                return found
            # a script that looked for the newest
        found = candidates_in(storage, listed, skip)
        if listed and not found and given:
            problem = f"holds {len(listed)} checkpoints, and none was committed"
            raise LayoutError(saves.root, problem, "train from the beginning, without resume_from_checkpoint")
        if not found:
            check_no_foreign(storage, listed)
        return found

    def _load(self, trainer: Any, saves: Folders, path: str, strict: bool) -> None:
        """Load a checkpoint where the Trainer loads an engine, a model under FSDP2, or under DDP an optimizer."""
        resume, (run, _) = self._resume, run_of_trainer(trainer)
        strict = strict and not is_adapter(trainer)  # whose base model is not saved
        if resume is not None and path == resume.directory:
            try:
                resume.report = self.restored = saves.restore(run, resume.checkpoint, strict=strict)
            except CkptError as error:
                resume.failed = error
                raise
            location = resume.report.path if run.is_folder else posixpath.dirname(resume.report.path)
            step = resume.report.step or 0 if run.is_folder else int(trainer.model_wrapped.global_steps)
            self._current = location, step
            saves.report_restored(location, {"step": float(step)})
            return
        self.wait()  # the best model at the end
        folder = posixpath.join(saves.root, posixpath.basename(path.rstrip("/")))
        found = saves.ranks.on_first(saves.root, lambda: candidates_in(saves.source(folder), [folder]))
        if not found:
            raise LayoutError(folder, "holds no whole checkpoint", "was the best checkpoint removed?")
        saves.restore(run, saves.open(found[0]), strict=strict, weights_only=True)
        self._current = folder, run_of_trainer(trainer)[1]

    def load_weights(self, trainer: Any, original: Callable[..., None], checkpoint: str, model: Any = None) -> None:
        """Load a model as ``Trainer._load_from_checkpoint``; under DDP the optimizer's load fills the weights too."""
        if not is_replicated(trainer) or self._resume is None or checkpoint != self._resume.directory:
            original(checkpoint, model)

    def load_optimizer(self, trainer: Any, original: Callable[..., None], checkpoint: str | None) -> None:
        """Load the scheduler as ``Trainer._load_optimizer_and_scheduler``; under DDP the whole run from a commit."""
        if not is_replicated(trainer) or checkpoint is None:
            original(checkpoint)
            return
        self._load(trainer, self._folders(trainer), checkpoint, True)
        with replaced(trainer.optimizer, load_state_dict=nothing):
            original(checkpoint)

    def load_best(self, trainer: Any, original: Callable[[], None]) -> None:
        """Load the best model as ``Trainer._load_best_model``."""
        if not is_replicated(trainer):
            original()
            return
        self._load(trainer, self._folders(trainer), trainer.state.best_model_checkpoint, True)

    def load_rng_state(self, trainer: Any, original: Callable[..., None], checkpoint: str | None) -> None:
        """Restore the random number generators, as ``Trainer._load_rng_state``, on any number of ranks."""
        original(checkpoint)
        resume = self._resume
        if resume is None or resume.report is None or checkpoint != resume.directory:
            return
        if not set_rng_of(resume.report) and resume.report.source.world_size != trainer.args.world_size:
            LOG.warning("%s has no random number states for other ranks: they start again", resume.report.path)


def _written(trainer: Any) -> FrameworkFiles:
    """Return how the Trainer itself writes the model and the optimizer."""
    names = names_of_adapter(trainer.model) if is_adapter(trainer) and not trainer.is_deepspeed_enabled else None
    weights = "model.safetensors" if names is None else "adapter_model.safetensors"
    return FrameworkFiles((weights, OPTIMIZER) if is_replicated(trainer) else None, names)


def _given_folder(saves: Folders, given: str, output_dir: str) -> str:
    """Return the folder of the checkpoint that ``resume_from_checkpoint`` names.

    The Trainer's name of a checkpoint, ``OUTPUT_DIR/checkpoint-N``, names a folder of the root if the root is
    elsewhere.

    Raises:
        LayoutError: The folder does not exist.
    """
    folder = absolute_path(given)
    above, name = posixpath.split(folder.rstrip("/"))
    elsewhere = posixpath.join(saves.root, name)
    if above == os.path.abspath(output_dir) and folder != elsewhere and saves.storage.is_dir(elsewhere):
        return elsewhere
    if not saves.source(folder).is_dir(folder):
        raise LayoutError(folder, "does not exist", "pass the folder of a checkpoint, or resume_from_checkpoint=True")
    return folder


_HANDLERS: dict[str, Callable[..., Any]] = {
    "train": CkptCallback.train,
    "_save_checkpoint": CkptCallback.save_checkpoint,
    "save_model": CkptCallback.save_model,
    "_load_rng_state": CkptCallback.load_rng_state,
    "_load_from_checkpoint": CkptCallback.load_weights,
    "_load_optimizer_and_scheduler": CkptCallback.load_optimizer,
    "_load_best_model": CkptCallback.load_best,
}
"""Methods of ``transformers.Trainer`` that a callback takes over."""


def run_script(arguments: list[str]) -> None:
    """Run a training script with a ``CkptCallback`` in each Trainer that uses DeepSpeed, FSDP2 or DDP.

    Args:
        arguments: The script and its arguments.

    Raises:
        ArgumentError: The script does not exist.
    """
    if not os.path.isfile(arguments[0]):
        raise ArgumentError("SCRIPT", f"{arguments[0]} does not exist", "pass the path of a training script")
    create = transformers.Trainer.__init__

    @functools.wraps(create)
    def create_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        given = any(isinstance(one, CkptCallback) for one in self.callback_handler.callbacks)
        if (self.is_deepspeed_enabled or is_sharded(self) or is_replicated(self)) and not given:
            self.add_callback(CkptCallback(auto_resume=True))

    transformers.Trainer.__init__ = create_with_callback
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))  # as Python does for a script
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Run the script of the command line; end with one line if there is none."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: torchrun -m ckpttool.integrations.huggingface SCRIPT ARGUMENTS")
    try:
        run_script(sys.argv[1:])
    except ArgumentError as error:
        raise SystemExit(str(error)) from None
