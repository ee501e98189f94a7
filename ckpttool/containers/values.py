"""Values of an unpickled file: plain Python data, and inert classes for all other objects."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


class OrderedDict(collections.OrderedDict[Any, Any]):
    """A ``collections.OrderedDict`` with the attributes it was saved with (torch's ``_metadata``)."""

    attributes: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TorchDType:
    """A ``torch.dtype`` as a value."""

    name: str
    """The attribute of the torch module: "bfloat16"."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: the bytes of one or several tensors, by the name of its record."""

    key: str
    """Name of the record."""
    storage_class: str
    """torch's class: "FloatStorage", "UntypedStorage"."""
    dtype: str
    """Element type in safetensors' spelling; "U8" for an untyped storage."""
    location: str
    """Device of the tensor when it was saved: "cpu", "cuda:3"."""
    numel: int
    """Elements of ``dtype``."""

    @property
    def nbytes(self) -> int:
        """Size of the record in bytes."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: the place of its bytes, without its values."""

    storage: StorageRef
    """The record that contains its elements."""
    dtype: str
    """safetensors' spelling."""
    offset: int
    """First element, in elements of ``dtype`` from the start of the storage."""
    shape: tuple[int, ...]
    """Sizes; () is a scalar."""
    stride: tuple[int, ...]
    """Strides in elements."""
    requires_grad: bool = False
    """As saved."""
    parameter: bool = False
    """True for a ``torch.nn.Parameter``."""
    attributes: dict[str, Any] | None = field(default=None, compare=False)
    """Python attributes saved with the tensor (DeepSpeed's ``ds_id``)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in C order without holes."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n == 0:
                return True
            if n != 1 and s != expected:
                return False
            expected *= n
        return True

    @property
    def span(self) -> int:
        """One past the last element used, counted from the start of the storage; 0 if it uses none."""
        if self.numel == 0:
            return 0
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


_serials = itertools.count()
NOTHING: Mapping[str, Any] = {}
"""The keyword arguments of every object without any; never changed. Large checkpoints have millions of objects."""


class Opaque:
    """An object of an unknown class, kept as the pickle describes it and never built.

    It can be written back unchanged. Attribute ``how`` is the operation of the pickle: "global" (the class or function
    itself), "call" (``name(*args)``), "new" (``name.__new__(name, *args, **kwargs)``).
    """

    __slots__ = (
        "appended",
        "args",
        "function",
        "how",
        "items",
        "kwargs",
        "module",
        "name",
        "serial",
        "state",
        "stated",
    )

    def __init__(self, module: str, name: str, how: str = "global", args: tuple[Any, ...] = ()) -> None:
        self.module = module
        self.name = name
        """Its name in the module; dotted for a class within a class."""
        self.how = how
        self.args = args
        self.function: Opaque | None = None
        """The called function, if it is itself the result of a call and not ``module.name``."""
        self.serial = next(_serials)
        """Ascending in the order of creation: gives sets of Opaque an order when they are written."""
        self.kwargs: Mapping[str, Any] = NOTHING
        self.stated = False
        """Whether a state was given."""
        self.state: Any = None
        """The argument of ``__setstate__``."""
        self.items: Sequence[tuple[Any, Any]] = ()
        """Keys and values stored into it, for subclasses of dict."""
        self.appended: Sequence[Any] = ()
        """Values appended to it, for subclasses of list."""

    @property
    def qualified_name(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<{'global' if self.how == 'global' else 'opaque'} {self.qualified_name}>"


_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS = (dict, *_SEQUENCES, Opaque)
_PARENTS = (*_CONTAINERS, TensorRef)


def children(value: object) -> Iterator[Any]:
    """The values directly inside a container, a tensor or an Opaque.

    Shared attributes and arguments are yielded as one container, so that a caller that remembers visited containers
    runs in linear time.
    """
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
        if isinstance(value, OrderedDict) and value.attributes is not None:
            yield value.attributes
    elif isinstance(value, _SEQUENCES):
        yield from value
    elif isinstance(value, Opaque):
        if value.function is not None:
            yield value.function
        yield value.args
        if value.kwargs:
            yield value.kwargs
        yield value.state
        for pair in value.items:
            yield from pair
        yield from value.appended
    elif isinstance(value, TensorRef):
        yield value.storage
        if value.attributes is not None:
            yield value.attributes


def walk(root: object) -> Iterator[Any]:
    """Every value inside ``root``, itself included, each container once; not recursive, so no depth can break it."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, _CONTAINERS):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield value
        if isinstance(value, _PARENTS):
            stack.extend(children(value))
