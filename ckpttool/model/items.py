"""The items of a training state, and their values: digests of tensors, and text of all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpttool.blocks import Table
from ckpttool.digests import kind_of
from ckpttool.messages import printable

if TYPE_CHECKING:
    from collections.abc import Callable

A = TypeVar("A")
B = TypeVar("B")
WEIGHTS = "weights"
"""A parameter's weights (the master, or the module's copy if it is newer or the only one), or a buffer's values."""
STEP = "step"
"""The number that counts steps of the optimizer."""
SHOWN = 60
"""Most characters of a value in a message."""
NOT_COMPARED = "?"
"""Begins the text of a value that cannot be compared."""
LONG = 200
"""Characters above which the text of plain data is replaced by its hash."""


class TensorDigest(NamedTuple):
    """The digest of a tensor."""

    dtype: str
    """Its type in safetensors' spelling. Equal values in F32, BF16 and F16 have one digest."""
    shape: tuple[int, ...]
    """Its shape before partitioning."""
    value: int
    """128 bits; see ``ckpttool.digests``."""

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or '-'} {self.value:032x}"

    @classmethod
    def parse(cls, text: str) -> TensorDigest:
        """Return the digest of ``str()``.

        Raises:
            ValueError: The text is none.
        """
        dtype, shape, value = text.split(" ")
        return cls(dtype, () if shape == "-" else tuple(map(int, shape.split("x"))), int(value, 16))


class Item(NamedTuple):
    """The name of one item of a state."""

    kind: str
    """STATE, TYPE, MEMBER, TIE, OPTION or VALUE."""
    key: str
    """State ("weights", "exp_avg", "step"), hyper-parameter, or name of a value: "scheduler.last_epoch"."""
    name: str = ""
    """Parameter or buffer; "" for a value."""

    @property
    def owner(self) -> str:
        """Whose it is, for messages."""
        return f"the group of {self.name}" if self.kind == OPTION else self.name


STATE = "state"
"""Kind of the tensors and numbers of a parameter or a buffer."""
OPTION = "option"
"""Kind of the hyper-parameters of a parameter."""


def tied_names(*aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the other names of each tied parameter.

    Args:
        aliases: The stored name of each other name; of several states.
    """
    result: dict[str, dict[str, None]] = {}
    for one in aliases:
        sets: dict[str, list[str]] = {}
        for alias, name in one.items():
            sets.setdefault(name, [name]).append(alias)
        for names in sets.values():
            for name in names:
                result.setdefault(name, {}).update((other, None) for other in names if other != name)
    return {name: list(others) for name, others in result.items()}


def paired(
    a: Mapping[Item, A], b: Mapping[Item, B], tied: Mapping[str, Sequence[str]]
) -> list[tuple[Item, A | None, B | None]]:
    """Pair all items of two states.

    Args:
        a: The items of one state.
        b: The items of the other.
        tied: ``tied_names``: a state may have a tied parameter under one of its names, or under several.

    Returns:
        The items of ``a`` in their order, then the others of ``b``: each with its value in ``a`` and in ``b``, or None.
    """

    def other(item: Item, there: Mapping[Item, Any]) -> Item | None:
        names = () if item in there else tied.get(item.name, ())
        return item if item in there else next((i for n in names if (i := item._replace(name=n)) in there), None)

    partners = {item: other(item, b) for item in a}
    pairs = [(item, a[item], None if there is None else b[there]) for item, there in partners.items()]
    taken = set(partners.values())
    rest = ((item, other(item, a)) for item in b if item not in taken)
    return [*pairs, *((item, None if there is None else a[there], b[item]) for item, there in rest)]


def difference(saved: Fact | None, live: Fact | None, on: str = "") -> str:
    """Return how a value differs from the saved one, as text; "" if it does not.

    Args:
        saved: The saved value; None if it was not saved.
        live: The other value; None if it is missing.
        on: The ranks that have it, as text.
    """
    if saved is None:
        return f"is {told(live)}{on}, and was not saved"
    if live is None and isinstance(saved, TensorDigest):
        return f"is missing{on}"
    if not isinstance(saved, TensorDigest) or not isinstance(live, TensorDigest):
        return "" if saved == live else f"is {told(live)}{on}, but was saved as {told(saved)}"
    if not same_form(saved, live):
        return f"is {told(live)}{on}, but was saved as {told(saved)}"
    types = "" if saved.dtype == live.dtype else f": it is {live.dtype}, and was {saved.dtype}"
    if saved.value != live.value:
        return f"has other values than were saved{on}{types}"
    return f"has another type than was saved, with equal values{on}{types}" if types else ""


def same_form(a: TensorDigest, b: TensorDigest) -> bool:
    """Return whether two tensors have one shape, and types whose equal values have one digest."""
    same = a.shape == b.shape or {a.shape, b.shape} == {(), (1,)}  # universal: no 0-dim tensors
    return same and kind_of(a.dtype) == kind_of(b.dtype)


def equal_values(a: Fact | None, b: Fact | None) -> bool:
    """Return whether two values are equal, tensors of any type."""
    if not isinstance(a, TensorDigest) or not isinstance(b, TensorDigest):
        return a == b
    return same_form(a, b) and a.value == b.value


Fact = TensorDigest | str
"""A digest, or the text of a number, a hyper-parameter or a value."""


def told(fact: Fact | None) -> str:
    """Return a value as text for a message."""
    if isinstance(fact, TensorDigest):
        return f"{fact.dtype} {list(fact.shape)}"
    return "missing" if fact is None else short(fact)


class Mismatch(NamedTuple):
    """A part of a live state that differs from the saved one."""

    key: str
    """State: "weights", "exp_avg", "step", or the name of a value: "scheduler.last_epoch"."""
    name: str
    """Parameter or buffer; "" for a value of the run."""
    problem: str
    """The difference, as text."""
    of_values: bool = False
    """True if elements of a tensor differ."""

    def __str__(self) -> str:
        return f"{self.key}{' of ' if self.name else ''}{self.name} {self.problem}"


def tensor_table(tensors: Mapping[str, Mapping[str, TensorDigest]]) -> Table:
    """Return a row for each tensor, from digests by state and name."""
    rows = [[name, key, *str(one).split()] for key, own in tensors.items() for name, one in own.items()]
    columns = ["tensor", "state", "type", "shape", "digest"]
    return Table(columns, rows, whole=["type", "shape", "digest"], rare=["shape", "type"])


def short(text: str) -> str:
    """Return a value's text for a message."""
    return printable(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")


def canonical(value: Any, tensor: Callable[[Any], str | None] | None = None) -> str:
    """Return a value as text, or the hash of a long text: equal values have one, whatever the types of containers.

    Objects count by what pickle would store of them.

    Args:
        value: The value.
        tensor: Function that returns the text of a tensor or an array, and None for any other object.

    Returns:
        The text; ``NOT_COMPARED`` and the name of a class for a value that cannot be written as text.
    """
    try:
        text = _text(value, tensor)
    except Exception as error:  # an object may raise any
        return NOT_COMPARED + (str(error) if isinstance(error, _NoTextError) else _class(value))
    if len(text) <= LONG:
        return text
    import hashlib  # importing it takes longer than reading most checkpoints

    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _NoTextError(Exception):
    """A value has no text; the message is the name of its class."""


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(value: Any, tensor: Callable[[Any], str | None] | None) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and (value or math.copysign(1, value) > 0) else repr(float(value))
    if isinstance(value, str | bytes | range):
        return repr(value)
    if isinstance(value, complex):
        return f"complex({_text(value.real, tensor)}, {_text(value.imag, tensor)})"
    if (found := None if tensor is None else tensor(value)) is not None:
        if found.startswith(NOT_COMPARED):
            raise _NoTextError(found.removeprefix(NOT_COMPARED))
        return found
    if isinstance(value, Mapping):
        pairs = sorted((_text(k, tensor), _text(v, tensor)) for k, v in value.items())
        return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_text(item, tensor) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_text(item, tensor) for item in value)) + "}"
    return _object(value, tensor)


def _object(value: Any, tensor: Callable[[Any], str | None] | None) -> str:
    """Return the text of an object: its class, and what pickle stores of it."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        if "<" in value.__qualname__:  # a lambda, or a function in a function
            raise _NoTextError(f"{value.__module__}.{value.__qualname__}")
        return f"{value.__module__}.{value.__qualname__}"
    try:
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise _NoTextError(_class(value)) from error
    if isinstance(reduced, str):
        return f"{_class(value)}({reduced})"
    made, arguments, state, *parts = (*reduced, None, None, None)[:5]
    if isinstance(state, tuple) and len(state) == 2 and not state[0]:
        state = state[1]  # of slots
    arguments = arguments[getattr(made, "__name__", "") == "__newobj__" :]  # without the class
    stored = [*arguments, state, *(None if part is None else [*part] for part in parts)]
    return f"{_class(value)}({', '.join(_text(part, tensor) for part in stored if part is not None)})"
