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
from ckpttool.model.state_digest import STEP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DISTINCT_SIZES = 6
"""Dimensions of a trial parameter that differ in size: the sizes of a state then show which of them it has."""
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
    """Whether it is one number; otherwise it is a tensor."""
    dtype: torch.dtype | None
    """Its type; None for a Python number."""
    device: torch.device | None
    """Device of a number; None if it is the parameter's, or for a Python number."""
    shape: tuple[int, ...]
    """Shape of a number: () or (1,)."""
    first: bool
    """Whether the first step makes it."""
    dims: tuple[int | None, ...] | None = None
    """Of a tensor of another shape than the parameter's, such as the row sums of Adafactor: for each of its dimensions
    the one of the parameter with that size, or None for size 1."""

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the state, a tensor, of a parameter of some shape."""
        return tuple(shape) if self.dims is None else tuple(1 if dim is None else shape[dim] for dim in self.dims)


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
    """

    def __init__(self, optimizer: Any, group: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._known: dict[tuple[int, torch.dtype, str], dict[str, Form] | None] = {}
        self.options = {*group}
        """Options that the group has, or gets in the first steps."""

    def of(self, parameter: Any) -> dict[str, Form] | None:
        """Return the forms of the states of a parameter, by name; its own states win over the states of a trial step.

        Returns:
            None if neither shows them.

        Raises:
            ArgumentError: One is neither a number nor a tensor of the parameter's sizes.
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
            sizes = [2 + dim if dim < DISTINCT_SIZES else 2 for dim in range(dims)]
            tiny = torch.nn.Parameter(torch.zeros(sizes, dtype=parameter.dtype, device=device))
            on_cpu = {"capturable": False} if device.type == "cpu" and "capturable" in self._group else {}
            found = trial(self._optimizer, {**self._group, **on_cpu}, [tiny])
            self._known[key] = None if found is None else self._forms(found, tiny)
            self.options |= {*found.options} if found is not None else {*()}
        return self._known[key]

    def _forms(self, found: Trial, tiny: Any) -> dict[str, Form]:
        first, last = found.first[0], found.last[0]
        forms = {}
        for key, value in {**first, **last}.items():
            dims = _dims(value, tiny)
            made = (
                Form(number=False, dtype=None, device=None, shape=(), first=key in first, dims=dims) if dims else None
            )
            forms[key] = self._form(key, value, tiny, made, first=key in first)
        return forms

    def _form(self, key: str, value: Any, parameter: Any, tried: Form | None, *, first: bool = True) -> Form:
        """Return the form of a state; errors as for ``of``."""
        found = _form(value, parameter, tried, number=key == STEP, first=first)
        if found is None:
            problem = (
                f"is {type(self._optimizer).__name__}, whose {key} has neither one element nor the parameter's sizes"
            )
            raise ArgumentError("optimizer", problem, "load it with torch, or pass weights_only=True")
        return found


def _dims(value: Any, tiny: Any) -> tuple[int | None, ...] | None:
    """Return ``Form.dims`` of the state of a trial parameter; None if it has the same shape, or one element."""
    sizes = [*tiny.shape]
    if not isinstance(value, torch.Tensor) or value.numel() == 1 or value.shape == tiny.shape:
        return None
    known = all(size == 1 or sizes.count(size) == 1 for size in value.shape)
    return tuple(None if size == 1 else sizes.index(size) for size in value.shape) if known else None


def _form(value: Any, parameter: Any, tried: Form | None, *, number: bool, first: bool) -> Form | None:
    """Return the form of a state; None if it has neither one element nor the parameter's sizes.

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
