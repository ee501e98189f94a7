"""A checkpoint of ``torch.distributed.checkpoint`` -> Checkpoint.

Source: torch 2.13, distributed/checkpoint/metadata.py, filesystem.py (``FileSystemWriter``) and default_planner.py
(``planner_data`` of flattened state dicts).
"""

from __future__ import annotations

import itertools
import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.formats.dcp_shards import METADATA, Shards, fields_of, stored_chunks
from ckpttool.formats.fields import fingerprint
from ckpttool.formats.reports import RESTORE
from ckpttool.messages import brief
from ckpttool.model import (
    MASTER,
    MODULE,
    UNKNOWN_GROUP,
    Buffer,
    Checkpoint,
    CheckpointFile,
    Parameter,
    ParamGroup,
    ScalarState,
    State,
    Topology,
    tensor_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.formats.fields import Fields
    from ckpttool.formats.locate import Location
    from ckpttool.formats.reports import Report
    from ckpttool.storage import Storage

MAX_METADATA_BYTES = 1 << 28
"""Maximum size of ``.metadata`` in bytes."""
MAX_OBJECT_BYTES = 1 << 16
"""Maximum size in bytes of an object to read."""
MAX_NAMES_BYTES = 1 << 26
"""Maximum size in bytes of the names of a parameter group."""
STEP = "step"
"""The optimizer state that counts steps."""
CONTAINERS = frozenset({"app", "model", "module", "state_dict"})
"""Keys of a module's state dict; they are not part of its names."""


@dataclass(slots=True, eq=False)
class _Entries:
    """The entries of the state dict, sorted by part."""

    weights: dict[str, State] = field(default_factory=dict)
    """Parameters and buffers."""
    states: dict[str, dict[str, State]] = field(default_factory=dict)
    """The optimizer's states of each parameter."""
    numbers: dict[str, dict[str, ScalarState]] = field(default_factory=dict)
    """Scalar optimizer states of each parameter."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters of each parameter group."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters of each parameter, if the checkpoint lists them by parameter."""
    objects: dict[str, Any] = field(default_factory=dict)
    """All other objects."""
    other_numbers: dict[str, float | int | bool] = field(default_factory=dict)
    """Numbers outside the model and the optimizer."""
    flattened: bool = False
    """Whether the optimizer's states have flat keys in the place of nested dictionaries."""


def read_dcp(storage: Storage, location: Location, _report: Report) -> Checkpoint:
    """Read the layout of a distributed checkpoint, without tensor bytes.

    Raises:
        CkptError: The checkpoint is damaged, or has an unsupported form.
    """
    path = posixpath.join(location.directory, METADATA)
    metadata, file = _read_metadata(storage, path)
    shards = Shards(storage, location.directory, stored_chunks(path, metadata), file)
    try:
        entries = _read_entries(path, metadata, shards)
    finally:
        shards.close()
    weights, aliases = _separate_ties(entries)
    floating = {n: s for n, s in weights.items() if DTYPES[s.dtype].floating}
    states, listed = entries.states, entries.groups
    if entries.flattened:
        options = {aliases.get(name, name): own for name, own in entries.options.items()}
        states = {aliases.get(name, name): own for name, own in states.items()}
        listed = listed | _group_by_hyperparameters(path, options, states, weights)
    groups, group_of, differing = _groups(listed, floating, entries.numbers)
    parameters = []
    for name, weight in floating.items():
        # The optimizer has states only for the parameters that it updates.
        group = group_of.get(name)
        parameter_states = {
            MODULE if group is None else MASTER: weight,
            **_elementwise_states(states.get(name, {}), weight.shape),
        }
        parameters.append(Parameter(name, weight.shape, group if groups else UNKNOWN_GROUP, parameter_states))
    reached = {group.scalars[STEP].value for group in groups if STEP in group.scalars}
    files = shards.files
    return Checkpoint(
        storage=storage.spec,
        location=location.directory,
        root=location.root,
        tag=location.tag,
        format="dcp",
        masters_alone=bool(groups),
        tells_buffers=False,
        stage=None,
        topology=Topology(data_parallel=max(1, len(files) - 1)),
        dtype=next((s.dtype for s in floating.values()), "F32"),
        deepspeed_version=None,
        step=int(reached.pop()) if len(reached) == 1 else None,
        skipped_steps=0,
        parameters=tuple(parameters),
        buffers=tuple(Buffer(n, s) for n, s in weights.items() if n not in floating),
        aliases=aliases,
        groups=tuple(groups),
        nonpartitionable=tuple(differing),
        client_state=entries.objects | (entries.other_numbers if entries.flattened else {}),
        files=files,
    )


def _read_metadata(storage: Storage, path: str) -> tuple[Fields, CheckpointFile]:
    with storage.open(path) as reader:
        if reader.nbytes > MAX_METADATA_BYTES:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large to describe a checkpoint", RESTORE)
        try:
            root = unpickle(reader.read(0, reader.nbytes), path=path).value
        except Truncated:
            raise LayoutError(path, "ends too early", RESTORE) from None
        file = CheckpointFile(METADATA, reader.nbytes, "metadata", None, reader.version, container="dcp")
    return fields_of(path, root), file


def _read_entries(path: str, metadata: Fields, shards: Shards) -> _Entries:
    """Read every entry of the state dict, and sort the entries by part."""
    paths = metadata.values.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    result = _Entries()
    for fqn, value in metadata.get("state_dict_metadata", dict).items():
        if not isinstance(fqn, str):
            raise metadata.error("state_dict_metadata", f"names a tensor {brief(fqn, 80)}")
        keys = paths.get(fqn)
        keys, flat = _unflatten(tuple(map(str, keys if keys and isinstance(keys, tuple | list) else (fqn,))))
        result.flattened |= flat
        described = fields_of(path, value)
        if "chunks" in described:
            _add_tensor(result, fqn, keys, shards.tensor(fqn, described), shards, flat=flat)
            continue
        read = shards.object(fqn, MAX_NAMES_BYTES if keys[-1] == "params" else MAX_OBJECT_BYTES)
        if len(keys) >= 3 and keys[-3] == "param_groups":
            (result.options if flat else result.groups).setdefault(keys[-2], {})[keys[-1]] = read
        else:
            result.objects[fqn] = read
    return result


def _add_tensor(
    entries: _Entries, fqn: str, keys: tuple[str, ...], state: State, shards: Shards, *, flat: bool
) -> None:
    """Add one tensor to the part of the state dict that its keys name."""
    part = keys[-3] if len(keys) >= 3 else ""
    if part == "state":
        entries.states.setdefault(keys[-2], {})[keys[-1]] = state
        if state.shape in {(), (1,)} and (number := shards.number(state)) is not None:
            entries.numbers.setdefault(keys[-2], {})[keys[-1]] = number
    elif part == "param_groups":
        number = shards.number(state)
        options = (entries.options if flat else entries.groups).setdefault(keys[-2], {})
        options[keys[-1]] = None if number is None else tensor_number(number)
    else:
        named = list(itertools.dropwhile(CONTAINERS.__contains__, keys)) or [fqn]
        entries.weights[".".join(named)] = state
        if not state.shape and len(named) > 1 and (number := shards.number(state)) is not None:
            entries.other_numbers[".".join(named)] = number.value


def _separate_ties(entries: _Entries) -> tuple[dict[str, State], dict[str, str]]:
    """Return each weight under one name, and the tied names; without torchtitan's counts of steps and tokens."""
    weights = {n: s for n, s in entries.weights.items() if not entries.flattened or n not in entries.other_numbers}
    aliases = _find_ties(weights)
    return {n: s for n, s in weights.items() if n not in aliases}, aliases


def _unflatten(where: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Return the keys of an entry in the nested state dict, and whether its optimizer part was one flat key.

    torchtitan saves optimizers with flat keys: ``optimizer`` then ``state.NAME.exp_avg`` or ``param_groups.NAME.lr``.

    Source: torch 2.13, distributed/checkpoint/state_dict.py (``_flatten_optim_state_dict``).
    """
    *outer, last = where
    kind, _, rest = last.partition(".")
    name, _, key = rest.rpartition(".")
    if kind in {"state", "param_groups"} and name and outer and outer[-1] not in CONTAINERS:
        return (*outer, kind, name, key), True
    return where, False


def _group_by_hyperparameters(
    path: str,
    of_each: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, State]],
    weights: Mapping[str, State],
) -> dict[str, dict[str, Any]]:
    """Build parameter groups from the hyper-parameters of each parameter: equal hyper-parameters form one group.

    Raises:
        LayoutError: States belong to an unknown parameter.
    """
    unknown = sorted({*of_each, *states} - weights.keys())
    if unknown:
        problem = f"holds optimizer states of {brief(unknown[0], 200)}, but no such parameter"
        raise LayoutError(path, problem, "save model and optimizer under the same parameter names")
    groups: dict[object, dict[str, Any]] = {}
    for name in (n for n in weights if n in of_each):
        group = groups.setdefault(tuple(fingerprint(dict(of_each[name]))), {**of_each[name], "params": []})
        group["params"].append(name)
    return {str(number): group for number, group in enumerate(groups.values())}


def _find_ties(weights: Mapping[str, State]) -> dict[str, str]:
    """Map further names of the same bytes to the first name: torch writes a tied tensor once for each name."""
    first: dict[tuple[object, ...], str] = {}
    owner = {n: first.setdefault((s.shape, s.dtype, s.extents.tobytes()), n) for n, s in weights.items() if s.numel}
    return {name: own for name, own in owner.items() if own != name}


def _groups(
    listed: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, State],
    numbers: Mapping[str, Mapping[str, ScalarState]],
) -> tuple[list[ParamGroup], dict[str, int], list[str]]:
    """Return the parameter groups, the group of each parameter, and the scalar states that differ within a group.

    All are empty unless the groups list their parameters by name, each once.

    Source: torch 2.13, distributed/checkpoint/state_dict.py (``get_optimizer_state_dict``).
    """
    groups: list[ParamGroup] = []
    group_of: dict[str, int] = {}
    differing: dict[str, None] = {}
    for number in sorted(listed, key=lambda n: (len(n), n)):
        options = dict(listed[number])
        names = options.pop("params", None)
        if not isinstance(names, list) or not all(isinstance(n, str) and n in weights for n in names):
            return [], {}, []
        if len({*names, *group_of}) < len(names) + len(group_of):
            return [], {}, []
        scalars: dict[str, ScalarState] = {}
        for name in names:
            group_of[name] = len(groups)
            states = numbers.get(name, {})
            for key in (k for k in states if states[k].shape != weights[name].shape or k == STEP):
                if scalars.setdefault(key, states[key]) != states[key]:
                    differing[f"group {len(groups)}: {key}, which differs among its parameters"] = None
        groups.append(ParamGroup(tuple(names), options, scalars))
    return groups, group_of, list(differing)


def _elementwise_states(states: Mapping[str, State], shape: tuple[int, ...]) -> dict[str, State]:
    """Return the states with one value per element: not a step."""
    return {key: state for key, state in states.items() if state.shape == shape and key not in {STEP, MODULE, MASTER}}
