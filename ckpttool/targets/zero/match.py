"""Match a checkpoint with a live model by the names of parameters, in the groups of the model.

The result is a ``Checkpoint``, so that the planner of native files can use it. No file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpttool.errors import PlanError
from ckpttool.model import MASTER, MODULE, Parameter, ParamGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.model import Checkpoint, ScalarState, State

NAMED = 5
"""Maximum number of names that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """Names and shapes of a model's parameters and buffers."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter by its first name, in the order of the module, before ZeRO partitions it."""
    groups: Sequence[Sequence[str]]
    """Names of the trained parameters, by group in the optimizer's order."""
    buffers: Mapping[str, tuple[int, ...]]
    """Shapes of persistent buffers."""
    aliases: Mapping[str, str]
    """Tied names: further name of a parameter to its first name."""
    others: Sequence[str] = ()
    """Further names in the module's state dict: extra state, and what hooks add."""
    left_out: Sequence[str] = ()
    """Parameters that the module's state dict leaves out."""
    kept: frozenset[str] = frozenset()
    """Frozen parameters whose moments the run keeps: its optimizer lists them."""

    @property
    def frozen(self) -> list[str]:
        """Parameters outside the optimizer's groups."""
        trained = {name for group in self.groups for name in group}
        return [name for name in self.shapes if name not in trained]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """The match of a checkpoint with a model."""

    checkpoint: Checkpoint
    """The checkpoint with the model's parameters and groups. Parameters in ``missing`` have no states."""
    fresh: frozenset[str] = frozenset()
    """Parameters whose states the checkpoint lacks in part or wholly."""
    buffers: Mapping[str, State] = field(default_factory=dict)
    """The model's buffers that the checkpoint has."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's name of each parameter of the model."""
    missing: tuple[str, ...] = ()
    """Parameters and buffers of the model that are not in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """Parameters and buffers of the checkpoint that are not in the model."""
    unrestored_groups: tuple[int, ...] = ()
    """Groups of the model that keep their hyper-parameters: the checkpoint has none for them, or several."""
    regrouped: bool = False
    """Whether the model's groups differ from the checkpoint's."""
    untied: tuple[str, ...] = ()
    """Frozen parameters and buffers of the model whose values the checkpoint has as another kind of tensor."""
    notes: tuple[str, ...] = ()
    """Notes on differences from the checkpoint."""


def fit(checkpoint: Checkpoint, live: LiveModel, *, strict: bool, weights_only: bool) -> Fitted:
    """Match a checkpoint with a model by name.

    Args:
        checkpoint: Any source.
        live: The model.
        strict: Whether checkpoint and model must have the same names.
        weights_only: Leave out the optimizer's states.

    Raises:
        PlanError: A shape differs; with ``strict`` a name is missing; or the checkpoint has no optimizer states.
    """
    if not weights_only:
        check_partitionable(checkpoint)
    if not weights_only and not checkpoint.groups:
        raise PlanError(checkpoint.location, "does not record the trained parameters", "load it with weights_only=True")
    return _Matcher(checkpoint, live, weights_only).fitted(strict)


SAME_LAYOUT = "resume on the same ranks and stage, or load it with weights_only=True"


def check_partitionable(checkpoint: Checkpoint, hint: str = SAME_LAYOUT) -> None:
    """Check that files of another layout can store all states.

    Raises:
        PlanError: Some states belong to no parameter, or are numbers that differ within a group.
    """
    if checkpoint.of_one_layout:
        names = ", ".join(checkpoint.of_one_layout[:NAMED])
        raise PlanError(checkpoint.location, f"holds states that cannot be re-partitioned: {names}", hint)


class _Matcher:
    def __init__(self, checkpoint: Checkpoint, live: LiveModel, weights_only: bool) -> None:
        self.checkpoint = checkpoint
        self.live = live
        self.weights_only = weights_only
        self.notes: list[str] = []
        self.parameters = {p.name: p for p in checkpoint.parameters}
        self.sources: dict[str, Parameter | State] = {b.name: b.state for b in checkpoint.buffers}
        self.sources.update(self.parameters)
        self.names: dict[str, list[str]] = {}
        """Further names of each parameter of the model."""
        for alias, name in live.aliases.items():
            self.names.setdefault(name, []).append(alias)
        self.missing: list[str] = []
        self.used: set[str] = set()

    def fitted(self, strict: bool) -> Fitted:
        source_of = {name: self._find(name, shape) for name, shape in self.live.shapes.items()}
        buffers = {n: s for n, shape in self.live.buffers.items() if (s := self._weights(self._find(n, shape)))}
        known = {*self.live.shapes, *self.live.buffers, *self.live.aliases, *self.live.others}
        unexpected = [n for n in self.sources if n not in self.used and n not in known]
        self.notes += [
            f"{n} is tied to {live_name} in the model: it gets the values of {self._source_name(live_name)}"
            for n, live_name in self.live.aliases.items()
            if n in self.sources and n not in self.used
        ]
        if self.sources and self.live.shapes and not self.used:
            there, here = next(iter(self.sources)), next(iter(self.live.shapes))
            problem = f"has no parameter of the model: it has {there}, the model {here}"
            raise PlanError(self.checkpoint.location, problem, "build the saved model, or rename with consolidate")
        if strict:
            self._check_none("lacks", "of the model", self.missing, "and they keep the model's values")
            self._check_none("holds", "that the model lacks", unexpected, "and they are left out")
        fresh: set[str] = set()
        parameters = []
        for group, names in enumerate(self.live.groups):
            for name in names:
                states = self._trained(name, source_of[name], fresh)
                parameters.append(Parameter(name, self.live.shapes[name], group, states))
        self.notes += [
            f"{n} is frozen in the model: its {MASTER} and moments are left out"
            for n in self.live.frozen
            if not self.weights_only and n not in self.live.kept and self._has_moments(source_of[n])
        ]
        frozen = [(n, state) for n in self.live.frozen if (state := self._weights(source_of[n])) is not None]
        parameters += [Parameter(n, self.live.shapes[n], None, {MODULE: state}) for n, state in frozen]
        groups, unrestored = self._groups()
        source_names = [tuple(self._source_name(n) for n in names) for names in self.live.groups]
        checkpoint = replace(
            self.checkpoint,
            format="zero",  # the model distinguishes frozen parameters and buffers, even if the source does not
            parameters=tuple(parameters),
            buffers=(),
            aliases={},
            groups=tuple(groups),
            nonpartitionable=(),
            replicas=(),
        )
        return Fitted(
            checkpoint=checkpoint,
            fresh=frozenset(fresh),
            buffers=buffers,
            stored={name: self._source_name(name) for name in self.live.shapes},
            missing=tuple(self.missing),
            unexpected=tuple(unexpected),
            unrestored_groups=tuple(unrestored),
            regrouped=source_names != [g.parameters for g in self.checkpoint.groups],
            untied=self._untied(),
            notes=tuple(self.notes),
        )

    def _check_none(self, verb: str, whose: str, names: Sequence[str], otherwise: str) -> None:
        if names:
            raise PlanError(
                self.checkpoint.location, f"{verb} {listed(names)} {whose}", f"pass strict=False, {otherwise}"
            )

    # ------------------------------------------------------------------------------------------------ one tensor

    def _source_name(self, name: str) -> str:
        """Return the checkpoint's name of a parameter of the model; the model's own name if the checkpoint has none."""
        for candidate in (name, *self.names.get(name, ())):
            stored: str = self.checkpoint.aliases.get(candidate, candidate)
            if stored in self.sources:
                return stored
        return name

    def _find(self, name: str, shape: tuple[int, ...]) -> Parameter | State | None:
        stored = self._source_name(name)
        source = self.sources.get(stored)
        if source is None:
            if all(shape):  # a tensor without elements may not have been saved
                self.missing.append(name)
            return None
        self.used.add(stored)
        # Releases before 0.19.8 lose the shape of a parameter without elements; universal checkpoints lose the shape of
        # a scalar.
        if source.shape != shape and (all(source.shape) or all(shape)) and {source.shape, shape} != {(), (1,)}:
            problem = f"{name} has shape {list(source.shape)}, but {list(shape)} in the model"
            raise PlanError(self.checkpoint.location, problem, "build the model with the shapes of the checkpoint")
        return source

    def _untied(self) -> tuple[str, ...]:
        """Return the frozen parameters and buffers whose values the checkpoint has as another kind of tensor.

        A parameter that was tied at the save, and is not any more, has them as another parameter.
        """
        readers: dict[str, int] = {}
        for name in self.live.shapes:
            stored = self._source_name(name)
            readers[stored] = readers.get(stored, 0) + 1
        found = []
        for name in self.live.frozen:
            stored = self._source_name(name)
            source = self.sources.get(stored)
            if source is not None and (
                readers.get(stored, 0) > 1 or not isinstance(source, Parameter) or not source.frozen
            ):
                found.append(name)
        found += [n for n in self.live.buffers if isinstance(self.sources.get(self._source_name(n)), Parameter)]
        return tuple(found)

    def _weights(self, source: Parameter | State | None) -> State | None:
        if isinstance(source, Parameter):
            return self.checkpoint.weights(source) if source.states else None
        return source

    @staticmethod
    def _has_moments(source: Parameter | State | None) -> bool:
        return isinstance(source, Parameter) and not source.frozen and bool(source.optimizer_states)

    def _trained(self, name: str, source: Parameter | State | None, fresh: set[str]) -> dict[str, State]:
        weights = self._weights(source)
        if weights is None or self.weights_only:
            fresh.add(name)
            return {} if weights is None else {MASTER: weights}
        if isinstance(source, Parameter) and MASTER in source.states and not source.frozen:
            return {**{key: state for key, state in source.states.items() if key != MODULE}, MASTER: weights}
        self.notes.append(f"{name} was not trained in the saved run: it starts without moments")
        fresh.add(name)
        return {MASTER: weights}

    # ---------------------------------------------------------------------------------------------------- groups

    def _groups(self) -> tuple[list[ParamGroup], list[int]]:
        """Return the model's groups with the checkpoint's hyper-parameters, and indexes of the other groups."""
        groups, unrestored = [], []
        for number, names in enumerate(self.live.groups):
            elements: dict[int, int] = {}
            for name in names if not self.weights_only else ():
                p = self.parameters.get(self._source_name(name))
                if p is not None and p.group is not None and p.group >= 0:
                    elements[p.group] = elements.get(p.group, 0) + p.numel
            sources = [self.checkpoint.groups[i] for i in elements]
            options = [{k: v for k, v in g.hyperparameters.items() if k != "params"} for g in sources]
            if not options or not options[0].keys() - {"step"} or any(o != options[0] for o in options):
                if names and not self.weights_only:
                    unrestored.append(number)
                    differ = f"its parameters are in groups {_listed_numbers(elements)} of the checkpoint, which differ"
                    why = differ if any(o.keys() - {"step"} for o in options) else "the checkpoint has none"
                    self.notes.append(f"group {number} keeps the model's hyper-parameters: {why}")
                # Elastic checkpoints have the step of optimizers that count it in their groups, and nothing else.
                only_step = options and all(o == options[0] for o in options) and options[0].keys() == {"step"}
                options = options[:1] if only_step else [{}]
            scalars: Mapping[str, ScalarState] = {}
            if sources:
                largest = max(elements, key=lambda i: elements[i])
                scalars = self.checkpoint.groups[largest].scalars
                if any(dict(g.scalars) != dict(scalars) for g in sources):
                    self.notes.append(
                        f"group {number} gets the step of the checkpoint's group {largest}; others differ"
                    )
            groups.append(ParamGroup(tuple(names), options[0], scalars))
        return groups, unrestored


def _listed_numbers(values: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(values)))


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
