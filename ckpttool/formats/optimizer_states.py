"""Optimizer states in safetensors files beside weights -> Checkpoint; ``targets.weight_files`` plans them.

``optimizer.safetensors`` contains the tensors ``STATE.PARAMETER``; the metadata of its header contains the rest as JSON
under the key ``ckpttool.optimizer``. A large one is split into parts with an index, and the first part has the
metadata. The weight files beside it have a fingerprint of the save under ``ckpttool.save``; it must equal the
optimizer's.

The documentation describes all keys: "Optimizer states as safetensors".
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers import safetensors
from ckpttool.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.formats.tensors import states_in
from ckpttool.messages import brief
from ckpttool.model import (
    BY_ROWS,
    MASTER,
    MODULE,
    Buffer,
    CheckpointFile,
    Parameter,
    ParamGroup,
    Replica,
    ScalarState,
    Slicing,
    State,
    tensor_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

STEM = "optimizer"
"""Prefix of the file names."""
METADATA = "ckpttool.optimizer"
"""Key of the description, JSON, in the metadata of the first file."""
SAVE = "ckpttool.save"
"""Key of the fingerprint of the save, in the metadata of the weights and in the description."""
VERSION = 1
"""Version of the description."""
UNEVEN = 2
"""Version of a description with numbers of single parameters, which older releases would not read."""
NOT_FINITE = "ckpttool.float"
"""The key of a mapping that represents NaN or infinity, which JSON lacks: {"ckpttool.float": "nan"}."""
TENSOR_NUMBER = frozenset({"value", "dtype"})
"""Keys of a hyper-parameter that was saved as a tensor of one number."""


def find_optimizer(names: Sequence[str]) -> str | None:
    """Return the name of the first file of optimizer states in a listing; None without one."""
    first = sorted(n for n in names if n == f"{STEM}.safetensors" or n.startswith(f"{STEM}-00001-of-"))
    return first[0] if first else None


def with_optimizer(checkpoint: Checkpoint, storage: Storage, first: str, saves: Mapping[str, str | None]) -> Checkpoint:
    """Add the optimizer's states to a checkpoint of weights.

    Args:
        checkpoint: The weights.
        storage: Their storage.
        first: Name of the first file of optimizer states.
        saves: Fingerprint of the save, by file of weights.

    Returns:
        The whole checkpoint; only the weights if another tool wrote the file.

    Raises:
        CkptError: A file is damaged, missing, or of another save.
    """
    reader = _Reader(checkpoint, storage)
    metadata = reader.read(first)
    if METADATA not in metadata:
        return checkpoint
    path = posixpath.join(checkpoint.location, first)
    for name in _other_parts(first):
        reader.read(name)
    try:
        described = json.loads(metadata[METADATA])
        if described["version"] not in {VERSION, UNEVEN}:
            raise LayoutError(path, f"has version {brief(described['version'])}", "use a newer release of ckpttool")
        save = described["save"]
        for name, other in saves.items():
            if other != save:
                problem = "belongs to another save than the optimizer states beside it"
                raise LayoutError(posixpath.join(checkpoint.location, name), problem, f"restore it, or remove {first}")
        return _combined(checkpoint, reader, _with_floats(described), path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"its description of the optimizer is broken ({type(error).__name__}: {brief(str(error), 200)})"
        raise LayoutError(path, problem, RESTORE) from error


class _Reader:
    """Reads the headers of the files.

    Args:
        checkpoint: The weights.
        storage: Storage of the files.
    """

    def __init__(self, checkpoint: Checkpoint, storage: Storage) -> None:
        self.states: dict[str, State] = {}
        """By name of the tensor."""
        self.files: list[CheckpointFile] = []
        self._checkpoint, self._storage = checkpoint, storage

    def read(self, name: str) -> dict[str, str]:
        """Read one header; return its metadata."""
        path = posixpath.join(self._checkpoint.location, name)
        if not self._storage.exists(path):
            raise LayoutError(path, "is missing: the optimizer states have several parts", RESTORE)
        index = len(self._checkpoint.files) + len(self.files)
        with self._storage.open(path, ahead=True) as reader:
            entries, metadata = safetensors.parse(reader)
            self.files.append(
                CheckpointFile(name, reader.nbytes, "optimizer", None, reader.version, container="safetensors")
            )
        for tensor, state in states_in(entries, index).items():
            if tensor in self.states:
                raise LayoutError(path, f"holds {tensor}, which another part holds too", RESTORE)
            self.states[tensor] = state
        return metadata


def _other_parts(first: str) -> list[str]:
    """Return the names of the other parts, by the name of the first."""
    start, _, end = first.partition("-00001-of-")
    count = end.partition(".")[0]
    if not count.isdigit() or len(count) > 6:
        return []
    return [f"{start}-{number:05d}-of-{end}" for number in range(2, int(count) + 1)]


def _combined(checkpoint: Checkpoint, reader: _Reader, described: Mapping[str, Any], path: str) -> Checkpoint:
    weights = {p.name: p.states[MODULE] for p in checkpoint.parameters} | {b.name: b.state for b in checkpoint.buffers}
    groups = tuple(_group(values) for values in described["groups"])
    group_of = {name: number for number, group in enumerate(groups) for name in group.parameters}
    slicings = {name: _slicing(values) for name, values in described.get("slicings", {}).items()}
    numbers = {name: _numbers(values) for name, values in described.get("numbers", {}).items()}
    buffers = set(described["buffers"])
    states = _by_parameter(reader.states, described["states"], path)
    if unknown := sorted({*group_of, *states, *buffers, *slicings, *numbers} - weights.keys()):
        problem = f"names {brief(unknown[0], 200)}, which the weights beside it lack"
        raise LayoutError(path, problem, RESTORE)
    if sum(len(group.parameters) for group in groups) != len(group_of):
        raise LayoutError(path, "lists a parameter in two groups", RESTORE)
    parameters, replicas = [], []
    for name, weight in weights.items():
        if name in buffers:
            continue
        own = states.get(name, {})
        if wrong := next((key for key, state in own.items() if state.shape != weight.shape), None):
            problem = f"holds {wrong} of {name} in shape {list(own[wrong].shape)}, not {list(weight.shape)}"
            raise LayoutError(path, problem, RESTORE)
        held = {MODULE: weight, **own}
        if name in group_of and MASTER not in own:
            held = {MASTER: weight, **own}
        elif own.keys() & {MASTER, MODULE}:  # narrower weights beside it are a cast
            replicas.append(Replica(name, own.get(MASTER) or own[MODULE], weight))
        slicing = slicings.get(name, BY_ROWS)
        parameters.append(Parameter(name, weight.shape, group_of.get(name), held, slicing, numbers.get(name, {})))
    return replace(
        checkpoint,
        parameters=tuple(parameters),
        buffers=tuple(Buffer(name, state) for name, state in weights.items() if name in buffers),
        tells_buffers=True,
        dtype=_dtype(described["dtype"]),
        step=described["step"],
        samples=described["samples"],
        skipped_steps=described["skipped_steps"] or 0,
        deepspeed_version=described["deepspeed_version"],
        groups=groups,
        replicas=tuple(replicas),
        scheduler=described.get("scheduler"),
        client_state=described.get("client_state", {}),
        ds_config=described.get("ds_config", {}),
        files=(*checkpoint.files, *reader.files),
    )


def _by_parameter(tensors: Mapping[str, State], keys: Sequence[str], path: str) -> dict[str, dict[str, State]]:
    """Return the states of each parameter; the name of a tensor begins with the name of its state."""
    found: dict[str, dict[str, State]] = {}
    for name, state in tensors.items():
        key = next((key for key in keys if name.startswith(f"{key}.")), None)
        if key is None:
            raise LayoutError(path, f"holds {brief(name, 200)}, which the description does not list", RESTORE)
        found.setdefault(name.removeprefix(f"{key}."), {})[key] = state
    return found


def _group(values: Mapping[str, Any]) -> ParamGroup:
    options = {key: _decoded(value) for key, value in values["hyperparameters"].items()}
    return ParamGroup(tuple(map(str, values["parameters"])), options, _numbers(values["scalars"]))


def _numbers(values: Mapping[str, Any]) -> dict[str, ScalarState]:
    return {key: ScalarState(s["value"], s["dtype"], tuple(s["shape"])) for key, s in values.items()}


def _with_floats(value: Any) -> Any:
    """Return a value of the description with NaN and infinity in the place of their mappings."""
    if isinstance(value, dict):
        if value.keys() == {NOT_FINITE}:
            return float(value[NOT_FINITE])
        return {key: _with_floats(item) for key, item in value.items()}
    return list(map(_with_floats, value)) if isinstance(value, list) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == TENSOR_NUMBER:
        return tensor_number(ScalarState(value["value"], _dtype(value["dtype"])))
    return tuple(value) if isinstance(value, list) else value  # betas


def _dtype(name: Any) -> str:
    if name not in DTYPES:
        raise ValueError(f"dtype {brief(name, 80)} is not known")
    return str(name)


def _slicing(values: Mapping[str, Any]) -> Slicing:
    view = tuple(tuple(n) if isinstance(n, list) else n for n in values["view"])
    return Slicing(values["dim"], values["parts"], view, values["vocabulary"])
