"""The digests and numbers of a checkpoint's files, to compare a live state with where the save recorded none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool import digests
from ckpttool.analysis.digest import by_state, every_tensor, tensor_digests
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import numpy_dtype
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.extensions.proof.state_digest import NOT_HYPERPARAMETERS, PYTHON, StateDigest, leaves
from ckpttool.model.items import NOT_COMPARED, TensorDigest, canonical
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint, Parameter
    from ckpttool.model.selection import Content

SCALER = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
    "raise_error_at_min_scale",
)
"""Attributes of DeepSpeed's dynamic loss scaler: its state, and its settings."""


def state_digest(checkpoint: Checkpoint, share: tuple[int, int] = (0, 1)) -> StateDigest:
    """Return the digests and numbers of a checkpoint's files, for a proof.

    Args:
        checkpoint: The checkpoint.
        share: Number of this rank, and number of ranks: each digests a share of the tensors.

    Raises:
        StorageError: Reading failed, or a file changed meanwhile.
    """
    rank, ranks = share
    held = every_tensor(checkpoint)
    numbers: dict[str, dict[str, float]] = {}
    types: dict[str, dict[str, str]] = {}
    parameters = {p.name: p for p in checkpoint.parameters}
    with_number = [c for c in held if c.name in parameters and _is_number(c, parameters[c.name])]
    plain = [c for c in held if c not in with_number]
    tensors = by_state(tensor_digests(checkpoint, plain[rank::ranks], jobs=None))
    if with_number:
        files = source_files(checkpoint)
        with Sources(files, checks_for(files, checkpoint, "read")) as sources:
            for c in with_number:
                for _, values in StateReader(sources).chunks(c.state):
                    numbers.setdefault(c.key, {})[c.name] = float(values[0])
                    types.setdefault(c.key, {})[c.name] = c.state.dtype
    for group in checkpoint.groups:
        for name in group.parameters:
            parameter = parameters.get(name)
            shape = None if parameter is None else parameter.shape
            own = group.scalars if parameter is None else checkpoint.numbers(parameter)
            for key, scalar in own.items():
                if key == "step" or scalar.dtype is None or scalar.shape != shape:
                    numbers.setdefault(key, {}).setdefault(name, float(scalar.value))
                    types.setdefault(key, {}).setdefault(name, scalar.dtype or PYTHON)
                elif rank == 0:  # of a parameter of one element, where a number looks like a state of its shape
                    value = np.array([scalar.value], dtype=numpy_dtype(scalar.dtype))
                    tensors.setdefault(key, {})[name] = TensorDigest(scalar.dtype, shape, digests.digest(value))
    counters = {"global_steps": checkpoint.step, "global_samples": checkpoint.samples}
    counters["skipped_steps"] = checkpoint.skipped_steps if checkpoint.native else None
    return StateDigest(
        tensors=tensors,
        numbers=numbers,
        types=types,
        groups=[
            {k: canonical(v, not_read) for k, v in group.hyperparameters.items() if k not in NOT_HYPERPARAMETERS}
            for group in checkpoint.groups
        ],
        group_of={name: n for n, group in enumerate(checkpoint.groups) for name in group.listed or group.parameters},
        values={name: canonical(value) for name, value in counters.items() if value is not None}
        | (leaves("scheduler", checkpoint.scheduler, not_read) if isinstance(checkpoint.scheduler, Mapping) else {})
        | (_loss_scale(checkpoint.loss_scaler) if checkpoint.dtype == "F16" else {}),
    )


def not_read(value: Any) -> str | None:
    """Return the text of a tensor or an object in a file, which is not compared."""
    if isinstance(value, Opaque):
        return f"{NOT_COMPARED}{value.qualified_name}"
    return f"{NOT_COMPARED}tensor" if isinstance(value, TensorRef) else None


def _loss_scale(scaler: Any) -> dict[str, str]:
    """Return the numbers of a dynamic loss scaler, in which form a file has it."""
    state = scaler if isinstance(scaler, Mapping) else getattr(scaler, "state", None)
    found = state if isinstance(state, Mapping) else {}
    return {f"loss_scale.{key}": canonical(found[key]) for key in SCALER if key in found}


def _is_number(content: Content, parameter: Parameter) -> bool:
    """Return whether a state is one number for a parameter, such as a step."""
    shape = content.state.shape
    return content.state.numel == 1 and len(shape) < 2 and (content.key == "step" or shape != parameter.shape)
