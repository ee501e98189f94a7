"""Deltas between checkpoints as data, and the checkpoint that results from applying some."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.dtypes import castable
from ckpttool.errors import LayoutError
from ckpttool.model import MODULE, UNKNOWN_GROUP, Parameter, State
from ckpttool.model.derived.combination import Combination
from ckpttool.model.formulas import Patch, Patched
from ckpttool.model.places import Computed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.model import Checkpoint

_OTHER_BASE = "apply the delta to the checkpoint that it was made from"


class TensorType(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    """safetensors' spelling."""
    shape: tuple[int, ...]
    """Sizes; () is a scalar."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TypedState(NamedTuple):
    """A tensor of a checkpoint, and the type that a delta has it in."""

    state: State
    """Its values."""
    dtype: str
    """safetensors' spelling; the values are cast to it."""

    @property
    def type(self) -> TensorType:
        """Type and shape."""
        return TensorType(self.dtype, self.state.shape)


@dataclass(frozen=True, slots=True)
class End:
    """One of the two checkpoints of a delta: its values in the delta's types."""

    fingerprint: str
    """"crc32:" and 64 hexadecimal digits: over name, type, shape and the CRC-32 of the bytes of each tensor."""
    digest: str | None
    """SHA-256 as ``digest`` computes it; None if the delta was made without ``prove``."""
    step: int | None
    """Its step; None if not recorded."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The description of a delta."""

    begins: End
    """The checkpoint to apply it to."""
    ends: End
    """The result."""
    dtype: str
    """Type of the parameters, safetensors' spelling; some tensors may have another."""
    tensors: Mapping[str, TensorType]
    """All tensors of the result, in the order of the module."""
    removed: Mapping[str, TensorType]
    """Tensors of the first checkpoint that the result lacks, or has in another shape or kind of type."""
    aliases: Mapping[str, str]
    """Tied names of the result."""
    changed: int
    """Number of elements with a new value, those of new tensors included."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A delta in a file."""

    path: str
    """The file."""
    header: DeltaHeader
    """Its description."""
    checkpoint: Checkpoint
    """The file as a checkpoint whose parameters are the tensors in it."""
    sparse: Mapping[str, tuple[State, State]]
    """Indices and values of each tensor that is changed in part, by its name."""
    dense: Mapping[str, State]
    """Each tensor that is stored whole, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A tensor that differs between two checkpoints."""

    name: str
    """Its name."""
    changed: int
    """Elements with a new value: all of a new tensor."""
    indices: State | None
    """Their flat indices, in the only file of their own; None if the tensor is stored whole."""
    values: State | None
    """Their new values, in the same file."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A tensor of the result of some deltas."""

    start: TypedState
    """The values to begin with: of the first checkpoint, or of a delta that holds the tensor whole."""
    patches: tuple[Patch, ...] = ()
    """The patches to apply to them."""

    @property
    def state(self) -> State:
        """The values of the result."""
        state, dtype = self.start
        if not self.patches:
            return state
        return State(state.shape, dtype, Computed(state.numel), formula=Patched(state, self.patches))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The result of applying deltas to a checkpoint."""

    checkpoint: Checkpoint
    """The files of all of them; its parameters are the tensors of the result."""
    steps: Mapping[str, Step]
    """The tensors of the result, by name."""
    base: Mapping[str, TypedState]
    """All tensors of the first checkpoint, by the names that the first delta gives them."""


def partners(
    names: Iterable[str], aliases: Mapping[str, str], base: Iterable[str], base_aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return which tensor of a checkpoint each name stands for: a tied tensor may be stored under any of its names.

    Args:
        names: Names of the tensors of the other checkpoint.
        aliases: Its tied names: alias to the name that the tensor is stored under.
        base: Names of the tensors of the checkpoint.
        base_aliases: Its tied names.

    Returns:
        Names of the checkpoint by the other names; names without a partner are left out.
    """
    free = set(base)
    found = {}
    others = []
    for name in names:
        if name in free:
            found[name] = name
            free.remove(name)
        else:
            others.append(name)
    tied: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        tied.setdefault(name, []).append(alias)
    for name in others:
        options = (base_aliases.get(name, name), *tied.get(name, ()))
        partner = next((n for n in options if n in free), None)
        if partner is not None:
            found[name] = partner
            free.remove(partner)
    return found


def apply_deltas(
    base: Checkpoint,
    states: Mapping[str, State],
    deltas: Sequence[Delta],
    starts: Sequence[Mapping[str, Patch]],
) -> Result:
    """Return the result of applying deltas in order, without reading any values.

    Args:
        base: The first checkpoint.
        states: Its weights and buffers, by name.
        deltas: The deltas.
        starts: For each delta the patches of its sparse tensors, by name.

    Raises:
        LayoutError: A delta does not begin at the checkpoint before it: names, shapes or types differ.
    """
    combination = Combination([base, *(d.checkpoint for d in deltas)])
    held = _typed_base(base, states, deltas[0])
    steps = {name: Step(typed) for name, typed in held.items() if name not in deltas[0].header.removed}
    aliases: Mapping[str, str] = {}  # ``steps`` has the first delta's names already
    for number, (delta, patches) in enumerate(zip(deltas, starts, strict=True), start=1):
        found = _kept(delta.header, steps, aliases)
        before = {name: steps[own] for name, own in found.items()}
        moved = {
            n: Patch(combination.state(number, p.indices), combination.state(number, p.values), p.starts)
            for n, p in patches.items()
        }
        dense = {n: combination.state(number, state) for n, state in delta.dense.items()}
        steps = _next_steps(before, delta, moved, dense)
        aliases = delta.header.aliases
    last = deltas[-1].header
    parameters = tuple(Parameter(n, s.start.state.shape, UNKNOWN_GROUP, {MODULE: s.state}) for n, s in steps.items())
    checkpoint = replace(
        base, parameters=parameters, buffers=(), aliases=dict(last.aliases), files=tuple(combination.files),
        replicas=tuple(combination.replicas), groups=(), has_newer_copies=False, step=last.ends.step,
    )  # fmt: skip
    return Result(checkpoint, steps, held)


def _kept(header: DeltaHeader, before: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor that each tensor of the result was before; new ones are left out."""
    # A name in ``removed`` is that of another tensor in the result, which has another shape or type.
    names = (n for n in header.tensors if n not in header.removed)
    return partners(names, header.aliases, (n for n in before if n not in header.removed), aliases)


def _typed_base(base: Checkpoint, states: Mapping[str, State], delta: Delta) -> dict[str, TypedState]:
    """Return the tensors of the first checkpoint by the names of the delta, in its types."""
    header = delta.header
    gone = [n for n in header.removed if n not in states]
    if gone:
        raise LayoutError(base.location, f"holds no {gone[0]}, but {delta.path} begins with it", _OTHER_BASE)
    found = _kept(header, states, base.aliases)
    held = {n: TypedState(states[n], kind.dtype) for n, kind in header.removed.items()}
    held |= {name: TypedState(states[own], header.tensors[name].dtype) for name, own in found.items()}
    unknown = set(states) - set(found.values()) - set(header.removed)
    if unknown:
        problem = f"holds {min(unknown)}, but {delta.path} begins at a checkpoint without it"
        raise LayoutError(base.location, problem, _OTHER_BASE)
    for name, (state, dtype) in held.items():
        kind = header.removed.get(name) or header.tensors[name]
        if state.shape != kind.shape or not castable(state.dtype, dtype):
            problem = f"holds {name} as {state.dtype} {list(state.shape)}, but {delta.path} begins with {dtype} "
            raise LayoutError(base.location, f"{problem}{list(kind.shape)}", _OTHER_BASE)
    return held


def _next_steps(
    before: Mapping[str, Step], delta: Delta, patches: Mapping[str, Patch], dense: Mapping[str, State]
) -> dict[str, Step]:
    """Apply one delta to the tensors before it, which have its names."""
    result = {}
    for name, kind in delta.header.tensors.items():
        step = before.get(name)
        if name in dense:
            result[name] = Step(TypedState(dense[name], kind.dtype))
            continue
        if step is None or step.start.type != kind:
            problem = f"changes {name} of {kind.dtype} {list(kind.shape)}, which the checkpoint before it lacks"
            raise LayoutError(delta.path, problem, _OTHER_BASE)
        patch = patches.get(name)
        result[name] = step if patch is None else Step(step.start, (*step.patches, patch))
    return result
