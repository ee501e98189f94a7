"""What ``CkptCallback`` changes in the Hugging Face Trainer: it wraps some methods, and replaces others for one call.

Source: transformers 4.57 and 5.23, trainer.py and integrations/deepspeed.py (``deepspeed_load_checkpoint``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import trainer as trainer_module

from ckpttool.errors import PlanError
from ckpttool.integrations.deepspeed.folders import is_weights
from ckpttool.integrations.replaced import replaced
from ckpttool.integrations.scratch import make_folder, remove_files
from ckpttool.integrations.signatures import check_signatures
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STATE = "trainer_state.json"
LOADER: ContextVar[Callable[[Any, str, bool], None] | None] = ContextVar("LOADER", default=None)
"""Loads a checkpoint in place of DeepSpeed, while a Trainer with a ``CkptCallback`` trains."""
PARAMETERS = {
    "train": ["self", "resume_from_checkpoint", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_load_rng_state": ["self", "checkpoint"],
    "_save": ["self", "output_dir", "state_dict"],
    "_get_output_dir": ["self", "trial"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
}
"""First parameters of the methods of ``transformers.Trainer`` that ckpttool wraps, replaces or calls."""
LOAD_PARAMETERS = {"deepspeed_load_checkpoint": ["deepspeed_engine", "checkpoint_path", "load_module_strict"]}
"""Parameters of the function of ``transformers.trainer`` that ckpttool replaces."""
KNOWN = "transformers 4.57 to 5.23"
_wrapped: list[Any] = []


def check_trainer() -> None:
    """Check that this release of transformers has the methods that ckpttool works with.

    Raises:
        PlanError: It has not.
    """
    release = f"transformers {transformers.__version__}"
    check_signatures(transformers.Trainer, PARAMETERS, release=release, known=KNOWN)
    check_signatures(trainer_module, LOAD_PARAMETERS, release=release, known=KNOWN, overrides=True)


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
    original = trainer_module.deepspeed_load_checkpoint

    @functools.wraps(original)
    def load(deepspeed_engine: Any, checkpoint_path: str, load_module_strict: bool = True) -> None:
        loader = LOADER.get()
        if loader is None:
            original(deepspeed_engine, checkpoint_path, load_module_strict=load_module_strict)
        else:
            loader(deepspeed_engine, checkpoint_path, load_module_strict)

    trainer_module.deepspeed_load_checkpoint = load
    _wrapped.append(load)


def _dispatching(original: Callable[..., Any], handler: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = next((one for one in self.callback_handler.callbacks if isinstance(one, kind)), None)
        if callback is None:
            return original(self, *args, **kwargs)
        if not self.is_deepspeed_enabled:
            problem = "is added to a Trainer without DeepSpeed"
            raise PlanError(kind.__name__, problem, "pass deepspeed= to TrainingArguments, or remove the callback")
        return handler(callback, self, functools.partial(original, self), *args, **kwargs)

    return method


def write_small_files(
    trainer: Any, save: Callable[[], None], scratch: str, *, name: str, best: str | None
) -> bool:  # fmt: skip
    """Let the Trainer write a checkpoint without weights and without the engine's state into a scratch directory.

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
    with (
        replaced(
            trainer, _get_output_dir=lambda trial=None: scratch, _push_from_checkpoint=lambda folder: None,
            save_model=lambda output_dir, **_: _save_without_weights(trainer, output_dir),
        ),
        replaced(trainer.model_wrapped, save_checkpoint=save_engine),
    ):  # fmt: skip
        save()
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

    transformers 4.57 takes the batch size of the save, not that of the arguments: they differ on other ranks. And the
    Trainer forgets the best checkpoint if it has no local folder: until the training begins, it gets an empty one.

    Args:
        directory: The Trainer's files of the checkpoint to resume from, in a scratch directory.
        arguments: The Trainer's arguments.
        is_whole: Tells whether the run has a checkpoint, by the name of its folder.

    Returns:
        Name of the folder of the best checkpoint; "" if there is none.
    """
    path = os.path.join(directory, STATE)
    if not os.path.exists(path):
        return ""
    state = transformers.TrainerState.load_from_json(path)
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
    """Context manager: let the Trainer remove no checkpoint at its end: it knows neither pins nor other directories.

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
