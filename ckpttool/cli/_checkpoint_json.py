"""A checkpoint's layout as JSON; keys are field names, and stable."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckpttool.cli._output import print_json
from ckpttool.containers.values import Opaque, TensorRef, TorchDType
from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.model import Checkpoint, State

MAX_VALUES = 100_000
"""Limit of values of client state and configuration; a short pickle can expand without end."""
CHARACTERS = 100
"""Characters of a text that count as one value."""


def print_checkpoint(checkpoint: Checkpoint, name: str | None) -> None:
    """Print everything except extents, or one parameter with its extents.

    Raises:
        PlanError: There is no parameter of that name.
    """
    print_json(_parameter(checkpoint, name) if name is not None else _everything(checkpoint))


def _everything(c: Checkpoint) -> dict[str, Any]:
    plain = _Plain()
    return {
        "location": c.location,
        "root": c.root,
        "tag": c.tag,
        "format": c.format,
        "stage": c.stage,
        "topology": {name: getattr(c.topology, name) for name in c.topology.__slots__},
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
                "states": {key: _state(s) for key, s in p.states.items()},
            }
            for p in c.parameters
        ],
        "buffers": [{"name": b.name, **_state(b.state)} for b in c.buffers],
        "aliases": dict(c.aliases),
        "groups": [
            {
                "parameters": list(g.parameters),
                "hyperparameters": plain(g.hyperparameters),
                "scalars": {k: {"value": plain(s.value), "dtype": s.dtype} for k, s in g.scalars.items()},
            }
            for g in c.groups
        ],
        "unsliceable": list(c.nonpartitionable),
        "scheduler": plain(c.scheduler),
        "loss_scaler": plain(c.loss_scaler),
        "client_state": plain(c.client_state),
        "ds_config": plain(c.ds_config),
        "files": [
            {"name": f.name, "nbytes": f.nbytes, "kind": f.kind, "rank": f.rank, "model_rank": f.model_rank}
            for f in c.files
        ],
        "notes": [str(n) for n in c.notes],
        "remarks": list(c.remarks),
    }


def _parameter(c: Checkpoint, name: str) -> dict[str, Any]:
    states = dict(states_of(c, name))
    return {
        "name": c.aliases.get(name, name),
        "states": {
            key: {**_state(s), "extents": [_extent(c, s, row) for row in s.extents]} for key, s in states.items()
        },
    }


def states_of(c: Checkpoint, name: str) -> Iterator[tuple[str, State]]:
    """Yield the states of a parameter or buffer, by its name or a tied name.

    Raises:
        PlanError: No parameter or buffer has that name.
    """
    stored = c.aliases.get(name, name)
    found = False
    for owner, key, state in c.states():
        if owner == stored:
            found = True
            yield key, state
    if not found:
        raise PlanError(c.location, f"holds no parameter {name}", "inspect --params lists the names")


def _state(s: State) -> dict[str, Any]:
    return {"dtype": s.dtype, "shape": list(s.shape), "nbytes": s.nbytes}


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
            return {self(k if isinstance(k, str) else str(k)): self(v) for k, v in value.items() if self.left > 0}
        if isinstance(value, list | tuple | set | frozenset):
            return [self(v) for v in value if self.left > 0]
        if isinstance(value, Opaque):
            return self._opaque(value)
        return f"<{type(value).__name__}>"

    def _opaque(self, value: Opaque) -> Any:
        described: dict[str, Any] = {"class": value.qualified_name}
        if value.args:
            described["args"] = self(value.args)
        if value.stated:
            described["state"] = self(value.state)
        if value.items:
            described["items"] = [[self(k), self(v)] for k, v in value.items if self.left > 0]
        if value.appended:
            described["appended"] = self(value.appended)
        return described


def _length(value: object) -> int:
    """Return the approximate number of characters of a value that is not a container."""
    if isinstance(value, str):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else 0
