"""A torch run on this rank: the tensors of its model, its optimizers and its scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.errors import ArgumentError
from ckpttool.formats.strided import is_expanded
from ckpttool.integrations.torch.live import NamedTensors, named_tensors
from ckpttool.integrations.torch.optimizers import check_class
from ckpttool.targets.zero.match import LiveModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.integrations.live.options import LoadOptions


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """A live torch run on this rank."""

    named: NamedTensors
    """The model's tensors."""
    optimizers: Sequence[Any]
    """Its optimizers; empty if only weights are loaded."""
    scheduler: Any
    """The learning-rate scheduler, or None."""

    @property
    def groups(self) -> list[tuple[Any, dict[str, Any]]]:
        """All groups, each with its optimizer."""
        return [(owner, group) for owner in self.optimizers for group in owner.param_groups]

    @property
    def order(self) -> list[str]:
        """Names of the parameters in the order of the optimizers, which may list frozen ones too."""
        names = self.named.names
        return [names[id(p)] for _, group in self.groups for p in group["params"] if id(p) in names]

    def trained(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the trained parameters of a group.

        Raises:
            ArgumentError: The model does not have one of its parameters.
        """
        names = self.named.names
        own = [parameter for parameter in group["params"] if parameter.requires_grad]
        if strangers := sum(id(parameter) not in names for parameter in own):
            hint = "make it after the model is wrapped: fully_shard replaces parameters"
            raise ArgumentError("optimizer", f"has {strangers} parameters that the model lacks", hint)
        return [names[id(parameter)] for parameter in own]

    def frozen(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the frozen parameters of a group."""
        names = self.named.names
        return [names[id(p)] for p in group["params"] if not p.requires_grad and id(p) in names]

    def model(self) -> LiveModel:
        """Return the names and shapes that a checkpoint is matched with."""
        return LiveModel(
            shapes={name: tuple(p.shape) for name, p in self.named.parameters.items()},
            groups=[self.trained(group) for _, group in self.groups],
            buffers={name: tuple(b.shape) for name, b in self.named.buffers.items()},
            aliases=self.named.aliases,
            others=self.named.others,
            kept=frozenset(name for _, group in self.groups for name in self.frozen(group)),
        )


def torch_run(model: Any, optimizer: Any, scheduler: Any, options: LoadOptions) -> LiveRun:
    """Return the live run of the arguments of ``ckpttool.load``.

    Args:
        model: The module.
        optimizer: Its optimizer, or a list of several; True or False if none is passed.
        scheduler: Its scheduler; True or False if none is passed.
        options: What to load.

    Raises:
        ArgumentError: An argument is missing, or has another type.
    """
    named = named_tensors(model)
    for name, tensor in (*named.parameters.items(), *named.buffers.items()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(name, "has no shape yet", "call the model once before the load")
        if tensor.is_meta:
            raise ArgumentError(name, "is on the meta device, without memory", "call model.to_empty(device=...) first")
        if is_expanded(tensor.shape, tensor.stride()):
            raise ArgumentError(name, "is an expanded view, which torch cannot write into", "register a clone() of it")
    extra = [name for name in named.others if name.endswith("_extra_state")]
    if extra and options.strict:
        problem = "is extra state of a module, which is not loaded"
        raise ArgumentError(extra[0], problem, "pass strict=False, and it keeps the run's values")
    if options.without_optimizer:
        optimizers: list[Any] = []
    elif isinstance(optimizer, bool) or optimizer is None:
        hint = "pass optimizer=..., or weights_only=True for the weights alone"
        raise ArgumentError("optimizer", "is missing", hint)
    else:
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ArgumentError("optimizer", "is an empty list", "pass the optimizers, or weights_only=True")
        if len({*map(id, optimizers)}) < len(optimizers):
            raise ArgumentError("optimizer", "is in the list twice", "pass each once")
    for one in optimizers:
        check_class(one)
    given = None if isinstance(scheduler, bool) or options.weights_only else scheduler
    if given is not None and not hasattr(given, "load_state_dict"):
        raise ArgumentError("scheduler", f"is a {type(given).__name__}, not a scheduler", "pass the scheduler itself")
    owner = getattr(given, "optimizer", None)
    if owner is not None and optimizers and all(owner is not one for one in optimizers):
        raise ArgumentError("scheduler", "is of another optimizer", "pass the optimizer that it was made for")
    return LiveRun(named, optimizers, given)
