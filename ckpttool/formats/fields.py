"""Typed access to unpickled mappings, whose errors name the key, and receivers of the readers' findings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.errors import CkptError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping


T = TypeVar("T")
OWN_WEIGHTS = '; the model\'s own weights are there: weights_from="module"'
"""End of the hint where files of the optimizer are missing."""
MAX_DIMENSIONS = 64
"""Maximum number of dimensions, as in torch."""
MAX_ELEMENTS = 1 << 52
"""Largest size of a tensor (4 petabytes in 8 bit): sums of thousands of them still fit in 64 bits."""
HINT = "it was written by an unknown version of DeepSpeed, or is damaged"


class Fields:
    """A mapping in a pickle, and its position in the file: the keys that lead to it."""

    def __init__(self, path: str, place: str, values: Mapping[Any, Any]) -> None:
        self.path = path
        self.place = place
        self.values = values

    def error(self, key: object, problem: str) -> LayoutError:
        """Return an error at a key of this mapping."""
        where = f"{self.place} > {key}" if self.place else str(key)
        return LayoutError(self.path, f"{where} {problem}", HINT)

    def __contains__(self, key: object) -> bool:
        return key in self.values

    def get(self, key: object, kind: type[T]) -> T:
        """Return the value at a key.

        Raises:
            LayoutError: The key is missing, or its value has another type.
        """
        if key not in self.values:
            raise self.error(key, "is missing")
        value = self.values[key]
        # bool is an int to Python, not to a checkpoint.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"is a {describe(value)}, not a {kind.__name__}")
        return value

    def optional(self, key: object, kind: type[T]) -> T | None:
        """Return the value at a key; None if the key is missing."""
        if self.values.get(key) is None:
            return None
        return self.get(key, kind)

    def count(self, key: object) -> int | None:
        """Return the whole number at a key, saved as an int or as a float; None if the key is missing.

        Under sequence parallelism DeepSpeed counts samples as floats, because it divides by the number of ranks.

        Source: DeepSpeed 0.19, runtime/config.py (``DeepSpeedConfig``: ``world_size``).
        """
        value = self.values.get(key)
        return int(value) if isinstance(value, float) and value.is_integer() else self.optional(key, int)

    def child(self, key: object) -> Fields:
        """Return the mapping at a key."""
        return Fields(self.path, f"{self.place} > {key}" if self.place else str(key), self.get(key, dict))

    def integers(self, key: object) -> list[int]:
        """Return the list of integers at a key."""
        values = self.get(key, list)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.error(key, "is not a list of integers")
        return values

    def tensors(self, key: object) -> list[TensorRef]:
        """Return the list of tensors at a key."""
        values = self.get(key, list)
        if not all(isinstance(v, TensorRef) for v in values):
            raise self.error(key, "is not a list of tensors")
        return values

    def tensor_mapping(self, key: object) -> dict[str, TensorRef]:
        """Return the mapping of names to tensors at a key, without its other values."""
        return {k: v for k, v in self.get(key, dict).items() if isinstance(k, str) and isinstance(v, TensorRef)}


def shape_of(value: object) -> tuple[int, ...] | None:
    """Convert a torch.Size, or the list or tuple that older versions and MoE saves write; None for other values."""
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        return None
    return tuple(value) if math.prod(value) <= MAX_ELEMENTS else None


MAX_PARTS = 300_000
"""Most parts of a value to compare."""


def fingerprint(value: object) -> list[object]:
    """List the parts of a value, to compare values of two files.

    ``==`` is unsuitable: an Opaque equals only itself, NaN not even that, and a few bytes of pickle can take unlimited
    time to compare. Parts beyond ``MAX_PARTS`` count as equal.
    """
    parts: list[object] = []
    stack: list[object] = [value]
    while stack and len(parts) < MAX_PARTS:
        item = stack.pop()
        if isinstance(item, dict):
            parts.append(("dict", len(item)))
            stack.extend(part for pair in item.items() for part in pair)
        elif isinstance(item, list | tuple):
            parts.append((type(item).__name__, len(item)))
            stack.extend(item)
        elif isinstance(item, Opaque):
            parts.append((item.qualified_name, len(item.args)))
            stack.extend((item.args, item.state))
        elif isinstance(item, float):
            parts.append(repr(item))
        elif item is None or isinstance(item, int | str | bytes):
            parts.append(item)
        else:
            parts.append(type(item).__name__)
    return parts


STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""Members of DeepSpeed's ``ZeroStageEnum``, which some Python versions pickle by name."""


def enum_value(value: object) -> int | None:
    """Convert an enum (DeepSpeed's ``ZeroStageEnum``) or an integer to its number; None for other values."""
    if isinstance(value, Opaque) and value.how == "global":
        return STAGES.get(value.name.rpartition(".")[2])
    if isinstance(value, Opaque) and value.how == "call" and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def describe(value: object) -> str:
    """Return the name of a value's type, for errors."""
    return value.qualified_name if isinstance(value, Opaque) else type(value).__name__


Report = Callable[[CkptError], None]
"""Receives a finding: raises it at once, or collects it so that reading continues as far as possible."""

RESTORE = "restore it from a copy, or choose another tag"
"""Advice for a missing or damaged file."""
WHOLE = "load it with its framework, and save whole weights or a checkpoint of torch.distributed.checkpoint"
"""Advice for the files of single ranks of other frameworks."""
WEIGHTS_ALONE = (
    "written from weights only: load it with load_module_only=True at stages 1 and 2, and with "
    "load_optimizer_states=False and load_lr_scheduler_states=False at stage 3; DeepSpeed makes the masters from the "
    "16-bit weights"
)
"""Remark on a checkpoint of DeepSpeed without an optimizer."""


def raise_at_once(error: CkptError) -> NoReturn:
    """Raise the finding: for callers that accept only sound checkpoints."""
    raise error
