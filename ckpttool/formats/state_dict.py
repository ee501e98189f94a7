"""The state dicts of a model and its optimizer, by the names of the parameters -> Checkpoint.

``torch.distributed.checkpoint`` and the files of single ranks contain them. The readers locate the tensors; this module
sorts them into parameters, buffers, groups and states.

Source: torch 2.13, distributed/checkpoint/state_dict.py (``get_optimizer_state_dict``, ``_flatten_optim_state_dict``).
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.dtypes import DTYPES
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats.fields import fingerprint
from ckpttool.formats.scan import natural_order
from ckpttool.messages import brief
from ckpttool.model import (
    MASTER,
    MODULE,
    UNKNOWN_GROUP,
    Buffer,
    Checkpoint,
    Parameter,
    ParamGroup,
    ScalarState,
    State,
    split_numbers,
)
from ckpttool.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpttool.formats.location import Location
    from ckpttool.model import CheckpointFile, DeviceMesh, Replica, Topology
    from ckpttool.storage import Storage

STEP = "step"
"""The optimizer state that counts steps."""


class Kinds(NamedTuple):
    """The kinds of a model's tensors by name, where the reader knows them."""

    buffers: frozenset[str]
    frozen: frozenset[str]
    groups: Sequence[Sequence[str]] | None
    """The parameters of each group of the optimizer, in order; None if the save did not record them."""
    names: Mapping[str, str] = MappingProxyType({})
    """The stored name of each parameter and buffer whose name in the model differs."""


@dataclass(slots=True, eq=False)
class StateDict:
    """The entries of a model's and an optimizer's state dict, sorted by part."""

    weights: dict[str, State] = field(default_factory=dict)
    """Parameters and buffers."""
    beside: dict[str, bool] = field(default_factory=dict)
    """Tensors among them that are not in the model's state dict, such as the state of a data loader; the value is True
    for a tensor in another nested dict."""
    contained: bool = False
    """True if the model's state dict is stored under a key, such as "model"."""
    states: dict[str, dict[str, State]] = field(default_factory=dict)
    """The optimizer's states of each parameter."""
    numbers: dict[str, dict[str, ScalarState]] = field(default_factory=dict)
    """Scalar optimizer states of each parameter."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters of each parameter group, and the names of its parameters under ``params``."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters of each parameter, if the checkpoint lists them by parameter."""
    objects: dict[str, Any] = field(default_factory=dict)
    """All other objects."""
    other_numbers: dict[str, float | int | bool] = field(default_factory=dict)
    """Numbers outside the model and the optimizer."""
    flattened: bool = False
    """Whether the optimizer's states have flat keys in the place of nested dictionaries."""
    aliases: dict[str, str] | None = None
    """Tied names, if the reader knows them; None to find them by the places of the tensors."""
    buffers: frozenset[str] | None = None
    """Names of the buffers, if the reader knows them; None if floating-point ones may be frozen parameters."""
    frozen: frozenset[str] | None = None
    """Names of the frozen parameters, if the reader knows them; None if those without a state may be frozen."""

    step: int | None = None
    """Steps of the run; None for the steps of the optimizer."""
    scheduler: Any = None
    """State of the scheduler."""
    mesh: DeviceMesh | None = None
    """The mesh of DTensors."""
    grouped: Sequence[Sequence[str]] | None = None
    """Parameters of each group, if the reader knows them beside a flattened state dict."""
    unsharded: frozenset[str] = frozenset()
    """Parameters that every rank has whole, beside DTensors."""
    left_out: str = ""
    """Why the optimizer's states are not read."""
    unread: list[str] = field(default_factory=list)
    """Tensors that are objects of an unknown class, with their file."""
    replicas: tuple[Replica, ...] = ()
    """States that are stored several times."""
    remarks: tuple[str, ...] = ()
    """Facts for the user."""

    def to_checkpoint(
        self,
        storage: Storage,
        location: Location,
        kind: str,
        path: str,
        topology: Topology,
        files: tuple[CheckpointFile, ...],
    ) -> Checkpoint:
        """Return the layout.

        Args:
            storage: The storage of the files.
            location: Their directory.
            kind: ``Checkpoint.format``.
            path: The file to name in errors.
            topology: Ranks of the run.
            files: The files.

        Raises:
            LayoutError: States belong to an unknown parameter.
        """
        weights, aliases = self._without_ties()
        known = self.buffers
        trainable = {
            n: s for n, s in weights.items() if (DTYPES[s.dtype].floating if known is None else n not in known)
        }
        states, listed = self.states, self.groups
        if self.flattened and self.grouped is not None:
            own = (next((self.options[name] for name in names if name in self.options), {}) for names in self.grouped)
            listed = {str(n): {**options, "params": [*self.grouped[n]]} for n, options in enumerate(own)}
        elif self.flattened:
            options = {aliases.get(name, name): own for name, own in self.options.items()}
            states = {aliases.get(name, name): own for name, own in states.items()}
            listed = listed | _group_by_hyperparameters(path, options, states, weights)
        single = _numbers_elsewhere(self.numbers, trainable)
        updated = {*states, *self.numbers} if self.frozen is None else trainable.keys() - self.frozen
        groups, group_of, numbers = _groups(
            listed, trainable, self.numbers, updated, ordered=not self.flattened or self.grouped is not None
        )
        parameters = []
        for name, weight in trainable.items():
            # The optimizer has states only for the parameters that it updates.
            group = group_of.get(name)
            parameter_states = {
                MODULE if group is None else MASTER: weight,
                **_elementwise_states(states.get(name, {}), weight.shape, single & self.numbers.get(name, {}).keys()),
            }
            parameters.append(
                Parameter(
                    name,
                    weight.shape,
                    group if groups else UNKNOWN_GROUP,
                    parameter_states,
                    numbers=numbers.get(name, {}),
                    others={
                        key: state
                        for key, state in states.get(name, {}).items()
                        if state.shape != weight.shape and key not in self.numbers.get(name, {})
                    },
                )
            )
        reached = {group.scalars[STEP].value for group in groups if STEP in group.scalars}
        reached |= {own[STEP].value for own in numbers.values() if STEP in own}
        return Checkpoint(
            storage=storage.spec,
            location=location.directory,
            root=location.root,
            tag=location.tag,
            format=kind,
            masters_alone=bool(groups),
            tells_buffers=known is not None,
            stage=None,
            topology=topology,
            dtype=next((s.dtype for s in trainable.values()), "F32"),
            deepspeed_version=None,
            step=int(reached.pop()) if self.step is None and len(reached) == 1 else self.step,
            skipped_steps=0,
            parameters=tuple(parameters),
            buffers=tuple(Buffer(n, s) for n, s in weights.items() if n not in trainable),
            aliases=aliases,
            groups=tuple(groups),
            scheduler=self.scheduler,
            client_state=self.objects | (self.other_numbers if self.flattened else {}),
            files=files,
            replicas=self.replicas,
            remarks=self.remarks,
            mesh=self.mesh,
            unsharded=self.unsharded,
            left_out=self.left_out,
            beside=frozenset(self.beside),
        )

    def _without_ties(self) -> tuple[dict[str, State], dict[str, str]]:
        """Return each weight under one name, and the tied names; without torchtitan's counts of steps and tokens."""
        weights = {n: s for n, s in self.weights.items() if not self.flattened or n not in self.other_numbers}
        aliases = _find_ties(weights) if self.aliases is None else self.aliases
        return {n: s for n, s in weights.items() if n not in aliases}, aliases


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
        own = {key: of_each[name][key] for key in sorted(of_each[name])}  # ranks write them in any order
        group = groups.setdefault(tuple(fingerprint(own)), {**own, "params": []})
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
    updated: Collection[str],
    *,
    ordered: bool,
) -> tuple[list[ParamGroup], dict[str, int], dict[str, dict[str, ScalarState]]]:
    """Return the parameter groups, the group of each parameter, and its numbers that differ within the group.

    All are empty unless the groups list their parameters by name, each once.

    Args:
        listed: Hyper-parameters and parameters of each group.
        weights: The parameters.
        numbers: Scalar states of each parameter.
        updated: Parameters with states.
        ordered: Whether the names are in the optimizer's order.
    """
    groups: list[ParamGroup] = []
    group_of: dict[str, int] = {}
    differing: dict[str, dict[str, ScalarState]] = {}
    single = _numbers_elsewhere(numbers, weights)
    for number in sorted(listed, key=natural_order):
        options = dict(listed[number])
        names = options.pop("params", None)
        named = options.pop("param_names", None) is not None
        if not isinstance(names, list) or not all(isinstance(n, str) and n in weights for n in names):
            return [], {}, {}
        if len({*names, *group_of}) < len(names) + len(group_of):
            return [], {}, {}
        # An optimizer may list parameters that it has never updated: they are frozen.
        trained = [name for name in names if name in updated] or names
        all_names = tuple(names) if len(trained) < len(names) else ()
        group_of |= dict.fromkeys(trained, len(groups))
        own = {name: numbers.get(name, {}) for name in trained}
        # In a parameter of one element, a number of that key looks like a state of the parameter's shape.
        plain = {
            name: {key: n for key, n in held.items() if n.shape != weights[name].shape or key in single}
            for name, held in own.items()
        }
        scalars, uneven = split_numbers(plain, {name: held.keys() for name, held in own.items()})
        differing |= uneven
        differing |= {name: dict(numbers[name]) for name in names if name not in own and name in numbers}
        groups.append(ParamGroup(tuple(trained), options, scalars, all_names, ordered, named))
    return groups, group_of, differing


def _numbers_elsewhere(numbers: Mapping[str, Mapping[str, ScalarState]], weights: Mapping[str, State]) -> set[str]:
    """Return the states that are numbers: of a parameter of one element, the shape does not show it."""
    known = ((weights[name].shape, own) for name, own in numbers.items() if name in weights)
    return {STEP, *(key for shape, own in known for key, n in own.items() if n.shape != shape)}


def _elementwise_states(
    states: Mapping[str, State], shape: tuple[int, ...], single: Collection[str]
) -> dict[str, State]:
    """Return the states with one value per element, without the ones that are ``single`` numbers."""
    without = {*single, MODULE, MASTER}
    return {key: state for key, state in states.items() if state.shape == shape and key not in without}


def is_reduced(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a shape has some dimensions of another one, in order, and size 1 for others: sums of Adafactor."""
    sizes = iter(whole)
    return all(next(sizes, 0) > 0 if n == 1 else n in sizes for n in shape)


def recorded_step(storage: Storage, directory: str) -> int | None:
    """Return the step by the name of a directory (of verl, torchtitan, the Trainer), or by the Trainer's state."""
    for part in directory.split("/")[::-1][:2]:
        if match := re.fullmatch(r"(?:global_step_|step-|checkpoint-)(\d+)", part):
            return int(match[1])
    path = posixpath.join(directory, "trainer_state.json")
    with contextlib.suppress(CkptError, ValueError, KeyError, TypeError):
        if storage.exists(path):
            return int(read_json(storage, path, "", "")["global_step"])
    return None
