"""A torch run on this rank: the tensors of its models, optimizers, schedulers, and other objects with a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.errors import ArgumentError
from ckpttool.formats.strided import is_expanded
from ckpttool.integrations.torch.live import NamedTensors, named_tensors, unwrapped
from ckpttool.integrations.torch.optimizers import check_class
from ckpttool.messages import brief
from ckpttool.targets.zero.match import LiveModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.live.options import LoadOptions


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """A live torch run on this rank."""

    named: NamedTensors
    """The model's tensors."""
    optimizers: Sequence[Any]
    """Its optimizers; empty if only weights are loaded."""
    schedulers: Mapping[str, Any]
    """The learning-rate schedulers by name; one alone under ""."""
    extra: Mapping[str, Any]
    """Other objects with a state, by name."""

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


def torch_run(model: Any, optimizer: Any, scheduler: Any, options: LoadOptions, extra: Any = None) -> LiveRun:
    """Return the live run of the arguments of ``ckpttool.load``.

    Args:
        model: The module, or several by name.
        optimizer: Its optimizer, or a list of several, or several by name; True or False if none is passed.
        scheduler: Its scheduler, or several by name; True or False if none is passed.
        options: What to load.
        extra: Other objects with a state, by name; None without any.

    Raises:
        ArgumentError: An argument is missing, or has another type.
    """
    named = named_tensors(one_module(model))
    for name, tensor in (*named.parameters.items(), *named.buffers.items()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(name, "has no shape yet", "call the model once before the load")
        if tensor.is_meta:
            raise ArgumentError(name, "is on the meta device, without memory", "call model.to_empty(device=...) first")
        if is_expanded(tensor.shape, tensor.stride()):
            raise ArgumentError(name, "is an expanded view, which torch cannot write into", "register a clone() of it")
    of_modules = [name for name in named.others if name.endswith("_extra_state")]
    if of_modules and options.strict:
        problem = "is extra state of a module, which is not loaded"
        raise ArgumentError(of_modules[0], problem, "pass strict=False, and it keeps the run's values")
    optimizers = [] if options.without_optimizer else _optimizers(model, optimizer)
    for one in optimizers:
        check_class(one)
    schedulers = {} if isinstance(scheduler, bool) or scheduler is None or options.weights_only else _by_name(scheduler)
    for one in schedulers.values():
        if not hasattr(one, "load_state_dict"):
            hint = "pass the scheduler itself, or several by name"
            raise ArgumentError("scheduler", f"is a {type(one).__name__}, not a scheduler", hint)
        owner = getattr(one, "optimizer", None)
        if owner is not None and optimizers and all(owner is not own for own in optimizers):
            raise ArgumentError("scheduler", "is of another optimizer", "pass the optimizer that it was made for")
    return LiveRun(named, optimizers, schedulers, {} if options.weights_only else checked_extra(extra))


def one_module(model: Any) -> Any:
    """Return several models by name as one module, whose parameters begin with the names; a single one unchanged.

    Raises:
        ArgumentError: A name has a dot, or one of them is not a module.
    """
    if not isinstance(model, Mapping):
        return model
    for name, one in model.items():
        if not isinstance(one, torch.nn.Module):
            problem = f"has a {type(one).__name__} under the name {brief(name)}, not a torch.nn.Module"
            raise ArgumentError("model", problem, "pass the models that are trained")
        if not isinstance(name, str) or not name or "." in name or hasattr(torch.nn.ModuleDict, name):
            problem = f"has the name {brief(name)}, which cannot begin the names of parameters"
            raise ArgumentError("model", problem, "use letters and digits")
    return torch.nn.ModuleDict({name: unwrapped(one) for name, one in model.items()})


def _by_name(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {"": given}


def _optimizers(model: Any, given: Any) -> list[Any]:
    """Return the optimizers of an argument."""
    if isinstance(given, bool) or given is None:
        hint = "pass optimizer=..., or weights_only=True for the weights alone"
        raise ArgumentError("optimizer", "is missing", hint)
    by_name = isinstance(given, Mapping) and isinstance(model, Mapping)
    if by_name and (strangers := given.keys() - model.keys()):
        problem = f"has the name {brief(min(map(str, strangers)))}, which is not the name of a model"
        raise ArgumentError("optimizer", problem, "pass optimizers by the names of their models, or as a list")
    several = given.values() if by_name else given
    found = [*several] if by_name or isinstance(given, list | tuple) else [given]
    if not found:
        raise ArgumentError("optimizer", "is an empty list", "pass the optimizers, or weights_only=True")
    if len({*map(id, found)}) < len(found):
        raise ArgumentError("optimizer", "is in the list twice", "pass each once")
    return found


def checked_extra(extra: Any) -> Mapping[str, Any]:
    """Return objects with a state by name; empty for None.

    Raises:
        ArgumentError: It is not a mapping, or an object has no state.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise ArgumentError(
            "extra", f"is {brief(extra)}, not objects by name", 'pass a dict, such as {"scaler": scaler}'
        )
    for name, one in extra.items():
        if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
            problem = f"has a {type(one).__name__} as {brief(name)}, without state_dict or load_state_dict"
            raise ArgumentError("extra", problem, "pass the object itself, or save values in client_state")
    return extra
