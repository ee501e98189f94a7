"""The digests and numbers of a training state, which a save records and a proof compares with the live state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckpttool import digests
from ckpttool.analysis.digest import by_state, every_tensor, tensor_digests
from ckpttool.blocks import Line, Shown
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import numpy_dtype
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.model.items import (
    NOT_COMPARED,
    OPTION,
    STATE,
    WEIGHTS,
    Fact,
    Item,
    Mismatch,
    TensorDigest,
    canonical,
    same_form,
    tensor_table,
)
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint, Parameter
    from ckpttool.model.selection import Content

A = TypeVar("A")
GATHERED = "gathered"
"""State of live weights that a rank keeps whole beside its partition, as ZeRO-3 does with small parameters."""
SCALE = "loss_scale"
"""Name of the loss scale where none belongs to the type and it is not 1, as in bf16; begins its other names in fp16."""
MICRO_BATCHES = "micro_batches"
"""The number of micro batches since the last step; a state without any has no such value."""
NOT_HYPERPARAMETERS = frozenset({"params", "param_names", "name"})
"""Keys of a parameter group that say which parameters it has."""
TYPE = "type"
"""Kind of the types of a parameter's numbers: "F32" of a tensor, or PYTHON."""
PYTHON = "a Python number"
TIE = "tied"
"""Kind of the items of the other names of tied parameters."""
MEMBER = "member"
"""Kind of the items that say which parameters the optimizer has: TRAINED, FROZEN or UNKNOWN."""
TRAINED = "trained"
FROZEN = "frozen"
UNKNOWN = "in a group"
VALUE = "value"
"""Kind of the values of a run."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest(Shown):
    """The digests and numbers of a training state, the same for every number of ranks, ZeRO stage and file format."""

    tensors: Mapping[str, Mapping[str, TensorDigest]]
    """Digests by state ("weights", "module", "exp_avg") and name of the parameter or buffer."""
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """States that are one number for a parameter, such as "step", by state and name."""
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Types of the numbers, by state and name; without those that are unknown."""
    groups: Sequence[Mapping[str, str]] = ()
    """Hyper-parameters of each optimizer group, as ``canonical`` text."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    """Index of each trained parameter's group."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Other values by name, as ``canonical`` text: counters, scheduler, loss scale, client state."""
    frozen: frozenset[str] | None = None
    """Parameters of a group that need no gradient; None if unknown."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied parameters; a checkpoint records them beside its digests."""
    differing: frozenset[str] | None = None
    """Buffers and values that were not the same on all ranks, whose first rank's are here; None if unknown."""

    @property
    def count(self) -> int:
        """Number of tensors."""
        return sum(map(len, self.tensors.values()))

    def blocks(self) -> Iterator[Block]:
        """Yield one row for each tensor, then how many numbers and other values there are."""
        yield tensor_table(self.tensors)
        yield Line(f"{self.count} tensors, {sum(map(len, self.numbers.values()))} numbers, {len(self.values)} values")

    def to_json(self) -> dict[str, Any]:
        """Return the digests as JSON data."""
        return {
            "tensors": {key: {n: str(d) for n, d in found.items()} for key, found in self.tensors.items()},
            "numbers": {key: _packed(found) for key, found in self.numbers.items()},
            **({"types": {key: _packed(found) for key, found in self.types.items()}} if self.types else {}),
            "groups": [dict(options) for options in self.groups],
            "group_of": _packed(self.group_of),
            "values": dict(self.values),
            **({} if self.frozen is None else {"frozen": sorted(self.frozen)}),
            **({} if self.differing is None else {"differing": sorted(self.differing)}),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StateDigest:
        """Return the digests of ``to_json``.

        Raises:
            ValueError: The data is not of that form; also KeyError, TypeError and AttributeError.
        """
        return cls(
            tensors={
                str(key): {str(name): TensorDigest.parse(text) for name, text in own.items()}
                for key, own in found["tensors"].items()
            },
            numbers={str(key): _unpacked(own, float) for key, own in found["numbers"].items()},
            types={str(key): _unpacked(own, str) for key, own in found.get("types", {}).items()},
            groups=[{str(k): str(v) for k, v in options.items()} for options in found["groups"]],
            group_of=_unpacked(found["group_of"], int),
            values={str(name): str(text) for name, text in found["values"].items()},
            frozen=frozenset(map(str, found["frozen"])) if "frozen" in found else None,
            differing=frozenset(map(str, found["differing"])) if "differing" in found else None,
        )


def items_of_state(state: StateDigest) -> dict[Item, Fact]:
    """Return all digests and numbers by item: numbers, hyper-parameters and values as ``canonical`` text."""
    result: dict[Item, Fact] = {}
    for key, tensors in state.tensors.items():
        result.update((Item(STATE, key, name), one) for name, one in tensors.items())
    for key, numbers in state.numbers.items():
        result.update((Item(STATE, key, name), canonical(number)) for name, number in numbers.items())
    for key, types in state.types.items():
        result.update((Item(TYPE, key, name), one) for name, one in types.items())
    result.update((Item(TIE, WEIGHTS, name), TIE) for name in state.aliases)
    frozen = {*(state.frozen or ())}
    for name, group in state.group_of.items():
        trained = UNKNOWN if state.frozen is None else FROZEN if name in frozen else TRAINED
        result[Item(MEMBER, WEIGHTS, name)] = trained
        result.update((Item(OPTION, key, name), text) for key, text in state.groups[group].items())
    result.update((Item(VALUE, name), text) for name, text in state.values.items())
    return result


def once(found: Iterable[tuple[Item, str, bool]]) -> list[Mismatch]:
    """Return mismatches of items; of a hyper-parameter one for all parameters with the same problem."""
    result: dict[tuple[str, str, str], Mismatch] = {}
    for item, problem, of_values in found:
        owner = "" if item.kind == OPTION else item.name
        result.setdefault((item.key, owner, problem), Mismatch(item.key, item.owner, problem, of_values))
    return list(result.values())


def other_values(a: Fact | None, b: Fact | None) -> bool:
    """Return whether two tensors have one form and other values."""
    return isinstance(a, TensorDigest) and isinstance(b, TensorDigest) and same_form(a, b) and a.value != b.value


def leaves(path: str, value: Any, tensor: Callable[[Any], str | None] | None = None) -> dict[str, str]:
    """Return the items of nested dicts and lists as ``canonical`` text, by "path.key.0".

    Args:
        path: Path of the value.
        value: The data.
        tensor: As for ``canonical``.
    """
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return {}
    return _leaves(path, value, tensor)


def _leaves(path: str, value: Any, tensor: Callable[[Any], str | None] | None) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        pairs = items_of(value)
    elif isinstance(value, list | tuple) and value:
        pairs = [(str(n), item) for n, item in enumerate(value)]
    else:
        return {path: canonical(value, tensor)}
    return {name: text for key, item in pairs for name, text in _leaves(f"{path}.{key}", item, tensor).items()}


def items_of(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the items of a mapping by their keys as text; a key of another type than another's text is quoted."""
    return [
        (key if isinstance(key, str) else repr(key) if str(key) in values else str(key), item)
        for key, item in values.items()
    ]


def _packed(numbers: Mapping[str, float | str]) -> list[list[Any]]:
    """Return numbers or types by name as JSON data: each one with its names."""
    found: dict[str, list[Any]] = {}  # by text: 0.0 equals -0.0, and NaN not itself
    for name, number in numbers.items():
        found.setdefault(repr(number), [number, []])[1].append(name)
    return list(found.values())


def _unpacked(found: Sequence[Sequence[Any]], kind: Callable[[Any], A]) -> dict[str, A]:
    return {str(name): kind(number) for number, names in found for name in names}


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
