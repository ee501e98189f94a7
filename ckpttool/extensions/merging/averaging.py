"""Checkpoints of one model -> the checkpoint of their weighted mean."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.dtypes import DTYPES, castable
from ckpttool.errors import PlanError
from ckpttool.extensions.merging.formulas import WeightedMean
from ckpttool.model import MASTER, MODULE, Buffer, Checkpoint, Parameter, State
from ckpttool.model.places import Computed, Renumbered
from ckpttool.model.selection import NO_SUCH_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.model import CheckpointFile, Replica


class Combination:
    """The files of several checkpoints.

    Args:
        checkpoints: The checkpoints; file numbers of the first are kept.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.files: list[CheckpointFile] = []
        """All files, each with its directory and storage."""
        self.replicas: list[Replica] = []
        """The replicas of all checkpoints, for consistency checks."""
        self._before: list[int] = []
        for number, checkpoint in enumerate(checkpoints):
            self._before.append(len(self.files))
            self.files += [
                replace(f, directory=f.directory or checkpoint.location, storage=f.storage or checkpoint.storage)
                for f in checkpoint.files
            ]
            self.replicas += [
                replace(r, state=self.state(number, r.state), copy=self.state(number, r.copy))
                for r in checkpoint.replicas
            ]

    def state(self, number: int, state: State) -> State:
        """Return a state of a checkpoint, with the numbers that its files have here.

        Args:
            number: Index of the checkpoint.
            state: One of its states.
        """
        before = self._before[number]
        if not before or state.formula is not None:
            return state
        others = tuple(self.state(number, other) for other in state.mean_with)
        return replace(state, place=Renumbered(state.place, before), mean_with=others)


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}
"""Learning rate by the part of the decay that is done (0 to 1), relative to the rate before it."""


def decay_weights(decay: str, count: int) -> tuple[float, ...]:
    """Return the weights of checkpoints at equal distances, whose mean stands for a decayed learning rate.

    With "linear" all are equal; with "constant", no decay, the newest checkpoint has all the weight.

    Args:
        decay: One of DECAYS.
        count: Number of checkpoints, the oldest first.
    """
    rate = DECAYS[decay]
    if decay == "linear":
        return (1.0,) * count  # without the rounding of the differences below
    rates = [1.0, *(rate(i / count) for i in range(1, count)), 0.0]
    return tuple(a - b for a, b in itertools.pairwise(rates))


def moving_average_weights(decay: float, count: int) -> tuple[float, ...]:
    """Return the weights of checkpoints in their exponential moving average, which begins at the first.

    The average after checkpoint i is ``decay`` times the average before it plus ``1 - decay`` times the checkpoint.

    Args:
        decay: A number between 0 and 1.
        count: Number of checkpoints, the oldest first.
    """
    return tuple((1 - decay if i else 1.0) * decay ** (count - 1 - i) for i in range(count))


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """The mean of several checkpoints."""

    checkpoint: Checkpoint
    """Its weights are computed; everything else is copied from the newest source."""
    newest: int
    """Index of the newest source."""
    kept: tuple[str, ...]
    """Tensors of the newest source that are not averaged, as their type has no mean: integers, truth values."""


def average(
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    *,
    accumulator: str,
    ordered: bool,
    keep_types: bool,
    matches: Callable[[str], bool] = lambda _: True,
) -> Average:
    """Return the weighted mean of checkpoints with the same tensors.

    Weights and floating-point buffers are averaged, the fp32 master weights where there are any. A source with weight 0
    is compared with the others, but not read.

    Args:
        checkpoints: The sources, in the order of the sums.
        weights: One number for each.
        accumulator: Type to compute in: "F32" or "F64".
        ordered: Whether the weights depend on the order of the sources: then their steps must ascend.
        keep_types: Whether parameters keep the type of the newest source, for its optimizer; otherwise they get the
            accumulator's type. Buffers always keep their type.
        matches: Returns whether a tensor is averaged, by its name; others may differ.

    Raises:
        PlanError: The sources do not fit: names, shapes, types or order.
    """
    if ordered:
        _check_order(checkpoints)
    newest = newest_of(checkpoints)
    base = checkpoints[newest]
    counted = [n for n, weight in enumerate(weights) if weight]
    order = [newest, *(n for n in counted if n != newest)]  # file numbers of the newest are kept
    combination = Combination([checkpoints[n] for n in order])
    found = _fitting(checkpoints, base, matches)
    kept: list[str] = []

    def mean(name: str, own: State, dtype: str | None) -> State:
        states = found[name]
        if not all(DTYPES[s.dtype].floating for s in states):
            kept.append(name)
            return own
        for n, state in enumerate(states):
            if not castable(state.dtype, "F32"):
                problem = f"holds {name} as {state.dtype}, which has no mean"
                raise PlanError(place_of(checkpoints[n]), problem, "leave it out with exclude", ("exclude",))
        terms = tuple(combination.state(order.index(n), states[n]) for n in counted)
        formula = WeightedMean(terms, tuple(weights[n] for n in counted), accumulator)
        return State(own.shape, dtype or accumulator, Computed(own.numel), formula=formula)

    def parameter(own: Parameter) -> Parameter:
        key = MASTER if MASTER in own.states else MODULE
        state = base.weights(own)
        if own.name in found:
            state = mean(own.name, state, own.states[key].dtype if keep_types else None)
        return replace(own, states={key: state, **{k: s for k, s in own.states.items() if k not in {MASTER, MODULE}}})

    def buffer(own: Buffer) -> Buffer:
        return Buffer(own.name, mean(own.name, own.state, own.state.dtype)) if own.name in found else own

    made = replace(
        base,
        parameters=tuple(parameter(p) for p in base.parameters),
        buffers=tuple(buffer(b) for b in base.buffers),
        files=tuple(combination.files),
        replicas=tuple(combination.replicas),
        has_newer_copies=False,
    )
    return Average(made, newest, tuple(kept))


def newest_of(checkpoints: Sequence[Checkpoint]) -> int:
    """Return the index of the checkpoint with the highest step; of equal or unknown steps the last."""
    return max(range(len(checkpoints)), key=lambda n: (checkpoints[n].step or 0, n))


def _check_order(checkpoints: Sequence[Checkpoint]) -> None:
    before: Checkpoint | None = None
    for checkpoint in checkpoints:
        if checkpoint.step is None:
            continue
        if before is not None and checkpoint.step < (before.step or 0):
            problem = f"is of step {checkpoint.step:,}, but follows {place_of(before)} of step {before.step:,}"
            raise PlanError(place_of(checkpoint), problem, "name the oldest first: its weight depends on the order")
        before = checkpoint


def _fitting(
    checkpoints: Sequence[Checkpoint], base: Checkpoint, matches: Callable[[str], bool]
) -> dict[str, list[State]]:
    """Return the state of every tensor to average in each source.

    Raises:
        PlanError: A source has another set of names, or another shape.
    """
    expected = weights_of(base)
    called = {name: [name] for name in expected}
    for alias, name in base.aliases.items():
        called.setdefault(name, [name]).append(alias)
    names = [n for n in expected if any(map(matches, called[n]))]
    if not names:
        problem = "no parameter is left to average"
        raise PlanError(place_of(base), problem, *NO_SUCH_NAME[1:])
    found: dict[str, list[State]] = {name: [] for name in names}
    for checkpoint in checkpoints:
        states, used = weights_of(checkpoint), set()
        for name in names:
            owners = (checkpoint.aliases.get(n, n) for n in called[name])
            owner = next((n for n in owners if n in states), None)
            if owner is None:
                raise _unfit(checkpoint, f"holds no {name}, but {place_of(base)} does")
            shapes = [list(s.shape) for s in (states[owner], expected[name])]
            if shapes[0] != shapes[1]:
                problem = f"holds {name} with shape {shapes[0]}, but {place_of(base)} with {shapes[1]}"
                raise _unfit(checkpoint, problem)
            used.add(owner)
            found[name].append(states[owner])
        for name in states:
            if name not in used and matches(name) and name in base.aliases:
                problem = f"holds {name} as a tensor of its own, but in {place_of(base)} it is tied"
                raise _unfit(checkpoint, problem)
            if name not in used and matches(name):
                raise _unfit(checkpoint, f"holds {name}, but {place_of(base)} does not")
    return found


def _unfit(checkpoint: Checkpoint, problem: str) -> PlanError:
    hint = "average checkpoints of one model, or leave it out with exclude"
    return PlanError(place_of(checkpoint), problem, hint, ("exclude",))


def place_of(checkpoint: Checkpoint) -> str:
    """Return the path that identifies a checkpoint: its directory, or its only file."""
    return checkpoint.path(0) if len(checkpoint.files) == 1 else checkpoint.location


def weights_of(checkpoint: Checkpoint) -> dict[str, State]:
    """Return the weights of each parameter and the values of each buffer, by name."""
    held = {p.name: checkpoint.weights(p) for p in checkpoint.parameters}
    return held | {b.name: b.state for b in checkpoint.buffers}
