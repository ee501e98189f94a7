"""Select the tensors of a weights-only file, their source states, and their split into files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.dtypes import DTYPES, SHORT_NAMES, castable, itemsize
from ckpttool.errors import PlanError
from ckpttool.model import MODULE
from ckpttool.model.selection import matcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint, Parameter, State


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor to write."""

    name: str
    """Its name in the module's state dict."""
    state: State
    """The state to read."""
    dtype: str
    """Type to write."""

    def renamed(self, name: str) -> Weight:
        """Return the same tensor under another name."""
        return Weight(name, self.state, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return self.state.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSelection:
    """The tensors to write."""

    weights: tuple[Weight, ...]
    """In the order of the module, without tied names."""
    aliases: Mapping[str, str]
    """Tied names of the written tensors: alias to the name it is stored under."""

    @property
    def states(self) -> dict[str, tuple[State, str]]:
        """The state to read and the type to write, by name."""
        return {weight.name: (weight.state, weight.dtype) for weight in self.weights}


def select_weights(
    checkpoint: Checkpoint,
    *,
    source: str,
    dtype: str,
    include: Sequence[str],
    exclude: Sequence[str],
    exclude_frozen: bool,
    only: frozenset[str] | None = None,
) -> WeightSelection:
    """Select the tensors to write.

    Trainable parameters come from their fp32 master weights, frozen ones from the module's copy; both are cast to
    ``dtype``. Buffers keep their dtype, because a narrower rotary table or running variance would lose precision. So do
    tensors of other than floating-point types.

    Args:
        checkpoint: The source.
        source: "masters", or "module" for the model's own copies.
        dtype: safetensors' spelling: "F32", "BF16" or "F16".
        include: Globs on full names; empty means all.
        exclude: Globs on full names; they win over ``include``.
        exclude_frozen: Leave out frozen parameters.
        only: Names to choose from; None for all.

    Raises:
        PlanError: No tensor is left, or a parameter has a type that cannot be cast.
    """
    matches = matcher(include, exclude)
    frozen_out = {p.name for p in checkpoint.parameters if exclude_frozen and p.frozen}
    # A tied name selects its tensor, which is stored under the owner's name.
    wanted = {checkpoint.aliases.get(n, n) for n in _all_names(checkpoint) if matches(n)} - frozen_out
    if only is not None:
        wanted &= only
    weights = []
    for parameter in checkpoint.parameters:
        if parameter.name in wanted:
            state = _weights_of(checkpoint, parameter, source)
            if not DTYPES[state.dtype].floating:
                weights.append(Weight(parameter.name, state, state.dtype))  # such as the codes of a quantised layer
                continue
            if not castable(state.dtype, dtype):
                problem = f"{parameter.name} is {state.dtype} and cannot be cast to {SHORT_NAMES[dtype]}"
                raise PlanError(checkpoint.location, problem, "leave it out with exclude", ("exclude",))
            weights.append(Weight(parameter.name, state, dtype))
    weights += [Weight(b.name, b.state, b.state.dtype) for b in checkpoint.buffers if b.name in wanted]
    if not weights:
        globs = ("include", "exclude", "exclude_frozen")
        raise PlanError(checkpoint.location, "no parameter is left to write", f"check {', '.join(globs)}", globs)
    aliases = {a: n for a, n in checkpoint.aliases.items() if n in wanted and matches(a)}
    return WeightSelection(tuple(weights), aliases)


def _weights_of(checkpoint: Checkpoint, parameter: Parameter, source: str) -> State:
    if source == "module" and MODULE not in parameter.states:
        problem = f"keeps no copy of {parameter.name} but the master: stage 3 saves none"
        raise PlanError(checkpoint.location, problem, "leave weights at masters", ("weights",))
    return checkpoint.weights(parameter) if source == "masters" else parameter.states[MODULE]


def _all_names(checkpoint: Checkpoint) -> list[str]:
    return [
        *(p.name for p in checkpoint.parameters),
        *(b.name for b in checkpoint.buffers),
        *checkpoint.aliases,
    ]


def split_into_shards(weights: Sequence[Weight], max_shard_bytes: int) -> list[list[Weight]]:
    """Fill files in the given order; a file exceeds the limit only if a single tensor does."""
    shards: list[list[Weight]] = []
    room = -1
    for weight in weights:
        if not shards or weight.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.nbytes
    return shards


def shard_names(stem: str, extension: str, count: int) -> list[str]:
    """Return Hugging Face's file names: one plain file, or model-00001-of-00003.safetensors and so on."""
    if count == 1:
        return [f"{stem}.{extension}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1)]
