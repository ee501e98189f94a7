"""The states that an optimizer keeps of each parameter: which they are, and their forms, from trial steps.

An optimizer makes its states in its first step. A step of the live optimizer would change the run and call its hooks;
a step of a copy of it, on small parameters, does neither.

Source: torch 2.13, optim/optimizer.py (``Optimizer.step`` and its hooks), optim/adam.py and optim/_adafactor.py
(``_init_group``).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpttool.errors import ArgumentError
from ckpttool.model.items import STEP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIZES = (2, 3, 5, 7, 11), (3, 5, 7, 11, 13)
"""Sizes of the first dimensions of two trial parameters; further dimensions have size 2. The sizes of their states show
which dimensions a state has."""
LATER_STEPS = 15
"""Trial steps after the first: some optimizers add states later, such as the slow weights of Lookahead."""


class Trial(NamedTuple):
    """The states of trial parameters."""

    first: list[dict[str, Any]]
    """After the first step, by parameter."""
    last: list[dict[str, Any]]
    """After all steps."""
    options: dict[str, Any]
    """Options of their group after all steps."""


class Form(NamedTuple):
    """The form of one state of a parameter."""

    number: bool
    """True for one number, also in a tensor of one element; false for any other tensor."""
    dtype: torch.dtype | None
    """Its type; None for a Python number."""
    device: torch.device | None
    """Device of a number; None if it is the parameter's, or for a Python number."""
    shape: tuple[int, ...]
    """Shape of a number: () or (1,)."""
    first: bool
    """Whether the first step makes it."""
    dims: tuple[tuple[int | None, int], ...] | None = None
    """Of a tensor of another shape than the parameter's, such as the row sums of Adafactor: for each of its dimensions
    the one of the parameter with that size and 0, or None and a size that does not depend on the parameter."""

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the state, a tensor, of a parameter of some shape."""
        if self.dims is None:
            return tuple(shape)
        return tuple(size if dim is None else shape[dim] if dim < len(shape) else 1 for dim, size in self.dims)


def trial(optimizer: Any, options: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]) -> Trial | None:
    """Take steps of an optimizer of this class on parameters of its own, whose gradients are zero.

    Args:
        optimizer: The optimizer; it is not changed, and its hooks are not called.
        options: Options of the parameters' group.
        parameters: The parameters.

    Returns:
        Their states; None if an optimizer of this class cannot take such steps.
    """
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return None  # these count steps outside of Python, by a number that a copy shares
    try:
        probe = copy.copy(optimizer)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        own = {key: value for key, value in options.items() if key not in {"params", "param_names"}}
        probe.state = defaultdict(dict)
        probe.param_groups = [{**copy.deepcopy(own), "params": [*parameters]}]
        step = inspect.unwrap(type(optimizer).step)  # without the hooks of users and profilers
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            step(probe)
            first = [dict(probe.state[parameter]) for parameter in parameters]
            for _ in range(LATER_STEPS):
                step(probe)
        last = [dict(probe.state[parameter]) for parameter in parameters]
        return Trial(first, last, probe.param_groups[0])
    except Exception:  # an optimizer may need any argument
        return None


def check_class(optimizer: Any) -> None:
    """Check that states can be given to an optimizer one by one.

    Raises:
        ArgumentError: It loads states in a way of its own, or keeps none by parameter.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        problem = "is LBFGS, which keeps one state for all parameters"
        raise ArgumentError("optimizer", problem, "load it with torch, or pass weights_only=True")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError("optimizer", f"is a {name}, not a torch.optim.Optimizer", "pass the optimizer itself")
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        problem = f"is {name}, which loads its states in a way of its own"
        raise ArgumentError("optimizer", problem, "load it with its framework, or pass weights_only=True")


class Forms:
    """The forms of the states that one group of an optimizer keeps.

    Args:
        optimizer: The optimizer.
        group: The group.
        hint: What to do where a shape is unknown.
    """

    def __init__(
        self, optimizer: Any, group: Mapping[str, Any], hint: str = "load it with torch, or pass weights_only=True"
    ) -> None:
        self._optimizer = optimizer
        self._hint = hint
        self._group = group
        self._known: dict[tuple[int, torch.dtype, str], dict[str, Form] | None] = {}
        self.options = {*group}
        """Options that the group has, or gets in the first steps."""

    def of(self, parameter: Any) -> dict[str, Form] | None:
        """Return the forms of the states of a parameter, by name; its own states win over the states of a trial step.

        Returns:
            None if neither shows them.

        Raises:
            ArgumentError: The shape of one does not follow from the parameter's.
        """
        own = self._optimizer.state.get(parameter, {})
        tried = self._tried(parameter)
        if tried is None and not own:
            return None
        tried = tried or {}
        return tried | {key: self._form(key, value, parameter, tried.get(key)) for key, value in own.items()}

    def _tried(self, parameter: Any) -> dict[str, Form] | None:
        """Return the forms that a trial step shows."""
        device = getattr(parameter, "_local_tensor", parameter).device
        dims = max(1, parameter.dim())  # of a scalar, a moment could not be told from the step
        key = dims, parameter.dtype, device.type
        if key not in self._known:
            several = [
                torch.nn.Parameter(torch.zeros(_sizes(dims, number), dtype=parameter.dtype, device=device))
                for number in range(2)
            ]
            on_cpu = {"capturable": False} if device.type == "cpu" and "capturable" in self._group else {}
            found = trial(self._optimizer, {**self._group, **on_cpu}, several)
            self._known[key] = None if found is None else self._forms(found, several)
            self.options |= {*found.options} if found is not None else {*()}
        return self._known[key]

    def _forms(self, found: Trial, several: Sequence[Any]) -> dict[str, Form]:
        first, last = found.first[0], found.last[0]
        forms = {}
        for key, value in {**first, **last}.items():
            other = {**found.first[1], **found.last[1]}.get(key)
            dims = _dims([value, other], several)
            made = (
                Form(number=False, dtype=None, device=None, shape=(), first=key in first, dims=dims) if dims else None
            )
            forms[key] = self._form(key, value, several[0], made, first=key in first)
        return forms

    def _form(self, key: str, value: Any, parameter: Any, tried: Form | None, *, first: bool = True) -> Form:
        """Return the form of a state; errors as for ``of``."""
        found = _form(value, parameter, tried, number=key == STEP, first=first)
        if found is None:
            name = type(self._optimizer).__name__
            problem = f"is {name}, whose {key} has a shape that does not follow from the parameter's"
            raise ArgumentError("optimizer", problem, self._hint)
        return found


def _sizes(dims: int, number: int) -> list[int]:
    """Return the sizes of a trial parameter."""
    return [*SIZES[number][:dims], *[2] * (dims - len(SIZES[number]))]


def _dims(values: Sequence[Any], several: Sequence[Any]) -> tuple[tuple[int | None, int], ...] | None:
    """Return ``Form.dims`` of a state from the states of the trial parameters; None if it has their shape, or is one
    number, or its shape depends on more than their sizes.
    """
    if not all(isinstance(value, torch.Tensor) for value in values) or len({value.dim() for value in values}) > 1:
        return None
    if all(value.numel() == 1 and value.dim() <= 1 for value in values):
        return None
    if all(value.shape == parameter.shape for value, parameter in zip(values, several, strict=True)):
        return None
    pairs = [*zip(*(map(int, parameter.shape) for parameter in several), strict=True)]
    found: list[tuple[int | None, int]] = []
    for sizes in zip(*(map(int, value.shape) for value in values), strict=True):
        if pairs.count(sizes) == 1:
            found.append((pairs.index(sizes), 0))
        elif len({*sizes}) == 1:
            found.append((None, sizes[0]))
        else:
            return None
    return tuple(found)


def _form(value: Any, parameter: Any, tried: Form | None, *, number: bool, first: bool) -> Form | None:
    """Return the form of a state; None if its shape does not follow from the parameter's.

    Args:
        value: The state.
        parameter: Its parameter.
        tried: The form of the state that a trial step shows, if any.
        number: Whether it is known to be a number, also where the parameter is one.
        first: Whether the first step makes it.
    """
    if isinstance(value, bool | int | float):
        return Form(number=True, dtype=None, device=None, shape=(), first=first)
    if isinstance(value, torch.Tensor):
        if tried is not None and not tried.number and value.shape == tried.shape_for(parameter.shape):
            return tried._replace(dtype=value.dtype)
        number |= tried is not None and tried.number
        if value.shape == parameter.shape and not number:
            return Form(number=False, dtype=value.dtype, device=None, shape=(), first=first)
        if value.numel() == 1 and value.dim() <= 1:
            local = getattr(parameter, "_local_tensor", parameter)
            own = None if value.device == local.device else value.device
            return Form(number=True, dtype=value.dtype, device=own, shape=tuple(value.shape), first=first)
    return None
