"""Choose the kind of a live run from the arguments of a save or a restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.integrations.live.run import Run


def is_engine(model: Any) -> bool:
    """Return whether an object is an engine of DeepSpeed."""
    return hasattr(model, "zero_optimization_stage")


def is_of_torch(model: Any) -> bool:
    """Return whether an object is a torch model, or several by name, and no engine or module of DeepSpeed."""
    if isinstance(model, Mapping):
        return any(map(is_of_torch, model.values())) and not any(hasattr(m, "save_checkpoint") for m in model.values())
    of_deepspeed = hasattr(model, "save_checkpoint") or type(model).__module__.startswith("deepspeed.")
    return hasattr(model, "named_parameters") and not of_deepspeed


def run_of(model: Any, optimizer: Any = True, scheduler: Any = True, step: int | None = None, extra: Any = None) -> Run:
    """Return the live run of the arguments of a save or a restore.

    Args:
        model: The engine that ``deepspeed.initialize`` returned, or a torch model; or several of either by name.
        optimizer: Of a torch model, its optimizer, or several in a list or by name; of an engine, True or False.
        scheduler: Of a torch model, its scheduler, or several by name; of an engine, True or False.
        step: Of a torch model at a save, the steps of the run.
        extra: Of a torch model, other objects with a state by name.

    Wrong arguments are refused by ``ready`` and ``check``, so that all ranks get the error.
    """
    if is_of_torch(model):
        from ckpttool.integrations.torch.run import TorchRun  # imports torch

        return TorchRun(model, optimizer, scheduler, step, extra)
    from ckpttool.integrations.deepspeed.run import EngineRun

    return EngineRun(model, optimizer, scheduler, step, extra)
