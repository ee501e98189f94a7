"""A checkpoint as plain values for JSON; keys are field names, and stable."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.texts import states_of
from ckpttool.containers.values import Opaque, TensorRef, TorchDType
from ckpttool.messages import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpttool.model import Checkpoint, ScalarState, State

JSON_VERSION = 1
"""Version of the objects of ``--json``: it grows if a field leaves or changes its meaning, not if one comes."""
MAX_VALUES = 100_000
"""Limit of values of client state, of configuration and of the like; a short pickle can expand without end."""
CHARACTERS = 100
"""Characters of a text that count as one value."""


def describe(c: Checkpoint) -> dict[str, Any]:
    """Describe everything of a checkpoint except its extents."""
    plain = _Plain()  # of the groups; the others have a limit of their own, so that one does not cut another
    return {
        "location": c.location,
        "root": c.root,
        "tag": c.tag,
        "format": c.format,
        "stage": c.stage,
        "topology": {name: getattr(c.topology, name) for name in c.topology.__slots__},
        "mesh": None if c.mesh is None else dataclasses.asdict(c.mesh),
        "dtype": c.dtype,
        "deepspeed_version": c.deepspeed_version,
        "step": c.step,
        "skipped_steps": c.skipped_steps,
        "nbytes": c.nbytes,
        "parameters": [
            {
                "name": p.name,
                "shape": list(p.shape),
                "numel": p.numel,
                "group": p.group,
                "frozen": p.frozen,
                "states": {key: describe_state(s) for key, s in p.tensors.items()},
                "numbers": _numbers(p.numbers, plain),
            }
            for p in c.parameters
        ],
        "buffers": [{"name": b.name, **describe_state(b.state)} for b in c.buffers],
        "aliases": dict(c.aliases),
        "groups": [
            {
                "parameters": list(g.parameters),
                "hyperparameters": plain(g.hyperparameters),
                "scalars": _numbers(g.scalars, plain),
            }
            for g in c.groups
        ],
        "unsliceable": list(c.of_one_layout),
        "scheduler": _Plain()(c.scheduler),
        "data_states": _Plain()(dict(c.data_states)),
        "loss_scaler": _Plain()(c.loss_scaler),
        "client_state": _Plain()(c.client_state),
        "metrics": _Plain()(dict(c.metrics)),
        "provenance": _Plain()(dict(c.provenance)),
        "thin": c.thin,
        "ds_config": _Plain()(c.ds_config),
        "files": [
            {"name": f.name, "nbytes": f.nbytes, "kind": f.kind, "rank": f.rank, "model_rank": f.model_rank}
            for f in c.files
        ],
        "notes": [str(n) for n in c.notes],
        "remarks": list(c.remarks),
    }


def _numbers(numbers: Mapping[str, ScalarState], plain: _Plain) -> dict[str, Any]:
    return {key: {"value": plain(number.value), "dtype": number.dtype} for key, number in numbers.items()}


def as_plain(data: Any) -> Any:
    """Return dataclasses as mappings, and NaN and infinity, which JSON lacks, as text."""
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {
            f.name: as_plain(getattr(data, f.name)) for f in dataclasses.fields(data) if f.metadata.get("json", True)
        }
    if isinstance(data, Mapping):
        return {key: as_plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [as_plain(value) for value in data]
    if isinstance(data, str):
        return hide_secrets(data)
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def describe_state(s: State) -> dict[str, Any]:
    """Describe one state of a parameter."""
    return {"dtype": s.dtype, "shape": list(s.shape), "nbytes": s.nbytes}


class _Plain:
    """Converts unpickled values to JSON values, within a budget."""

    def __init__(self) -> None:
        self.left = MAX_VALUES
        self._inside: set[int] = set()
        """Identities of the enclosing containers, to stop at cycles."""

    def __call__(self, value: Any) -> Any:
        self.left -= 1 + _length(value) // CHARACTERS
        if self.left < 0 or id(value) in self._inside:
            return "..."
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no such numbers
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, TensorRef):
            return {"tensor": value.dtype, "shape": list(value.shape)}
        if isinstance(value, TorchDType):
            return f"torch.{value.name}"
        if isinstance(value, bytes | bytearray):
            return f"<{len(value)} bytes>"
        self._inside.add(id(value))
        try:
            return self._container(value)
        finally:
            self._inside.remove(id(value))

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            found = {}
            for key, item in self._affordable(value.items()):
                name = key if isinstance(key, str) else str(key)
                if not isinstance(key, str) and name in value:  # 1 beside "1"
                    name = f"{name} ({type(key).__name__})"
                shown = self(name)
                found[shown] = self(item)
            return found if len(found) == len(value) or self.left > 0 else {**found, "...": "..."}
        if isinstance(value, list | tuple | set | frozenset):
            listed = [self(v) for v in self._affordable(value)]
            return listed if len(listed) == len(value) else [*listed, "..."]
        if isinstance(value, Opaque):
            return self._opaque(value)
        return f"<{type(value).__name__}>"

    def _affordable(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items as long as the budget lasts."""
        return itertools.takewhile(lambda _: self.left > 0, items)

    def _opaque(self, value: Opaque) -> Any:
        described: dict[str, Any] = {"class": value.qualified_name}
        if value.args:
            described["args"] = self(value.args)
        if value.stated:
            described["state"] = self(value.state)
        if value.items:
            described["items"] = [[self(k), self(v)] for k, v in self._affordable(value.items)]
        if value.appended:
            described["appended"] = self(value.appended)
        return described


def _length(value: object) -> int:
    """Return the approximate number of characters of a value that is not a container."""
    if isinstance(value, str):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else 0


def describe_parameter(c: Checkpoint, name: str) -> dict[str, Any]:
    """Return the states of a parameter or buffer with their extents.

    Raises:
        PlanError: No parameter or buffer has that name.
    """
    states = dict(states_of(c, name))
    return {
        "name": c.aliases.get(name, name),
        "states": {
            key: {**describe_state(s), "extents": [_extent(c, s, row) for row in s.extents]}
            for key, s in states.items()
        },
    }


def _extent(c: Checkpoint, state: State, row: Any) -> dict[str, Any]:
    file = c.files[int(row["file"])]
    width = state.nbytes // state.numel if state.numel else 0
    extent = {
        "file": file.name,
        "rank": file.rank,
        "offset": int(row["offset"]),
        "nbytes": int(row["numel"]) * int(row["runs"]) * width,
        "start": int(row["start"]),
        "numel": int(row["numel"]),
        "padding": int(row["padding"]),
    }
    if row["runs"] > 1:
        extent |= {key: int(row[key]) for key in ("runs", "pitch", "stride")}
    return extent
