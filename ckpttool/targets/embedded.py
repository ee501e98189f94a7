"""Copy or remove the tensors inside plain data (client state, scheduler)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import Opaque, OrderedDict, TensorRef, walk
from ckpttool.errors import PlanError
from ckpttool.plan.builder import Placement

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.model import Checkpoint
    from ckpttool.targets.torch_file import TorchFileBuilder


def holds_tensors(value: object) -> bool:
    """Whether a value contains tensors."""
    return any(isinstance(v, TensorRef) for v in walk(value))


def lacks_tensors(checkpoint: Checkpoint, value: object) -> bool:
    """Whether a value contains tensors whose bytes the reader has not located."""
    return any(isinstance(v, TensorRef) and v.storage.key not in checkpoint.embedded for v in walk(value))


def copy_embedded(file: TorchFileBuilder, checkpoint: Checkpoint, value: Any) -> Any:
    """Copy the storages of the tensors inside a value into a new file.

    Args:
        file: The new file.
        checkpoint: The source.
        value: Plain data.

    Returns:
        The same data, its tensors views of the new storages.

    Raises:
        PlanError: The reader has not located the bytes of a tensor.
    """
    storages: dict[str, Any] = {}

    def copied(item: Any) -> Any:
        if isinstance(item, TensorRef):
            ref = item.storage
            if ref.key not in storages:
                where = checkpoint.embedded.get(ref.key)
                if where is None:
                    raise PlanError(
                        checkpoint.location,
                        "holds a tensor in its client state or scheduler whose bytes were not found",
                        "",
                    )
                storages[ref.key] = file.storage(ref.dtype, ref.numel, [Placement(where, ref.dtype, 0)])
            return TensorRef(
                storages[ref.key], item.dtype, item.offset, item.shape, item.stride, item.requires_grad, item.parameter
            )
        if isinstance(item, OrderedDict):
            return OrderedDict((k, copied(v)) for k, v in item.items())
        if isinstance(item, dict):
            return {k: copied(v) for k, v in item.items()}
        if type(item) in {list, tuple}:
            return type(item)(copied(v) for v in item)
        if isinstance(item, Opaque) and item.how != "global":
            made = copy.copy(item)
            made.args, made.state = tuple(copied(a) for a in item.args), copied(item.state)
            made.items = [(k, copied(v)) for k, v in item.items]
            made.appended = [copied(v) for v in item.appended]
            return made
        return item

    return copied(value)


def without_tensors(value: Any, within: frozenset[int] = frozenset(), keep: Collection[str] = ()) -> Any:
    """Remove tensors from a value: a new file cannot refer to storages in files of the source.

    Args:
        value: Plain data.
        within: Identities of the containers around the value.
        keep: Keys of storages whose tensors stay.
    """
    if not any(isinstance(v, TensorRef) and v.storage.key not in keep for v in walk(value)):
        return value

    def stays(item: object) -> bool:
        return not (isinstance(item, TensorRef) and item.storage.key not in keep) and id(item) not in within

    within |= {id(value)}
    if isinstance(value, dict):
        return {k: without_tensors(v, within, keep) for k, v in value.items() if stays(v)}
    if isinstance(value, list | tuple):
        kept = [without_tensors(v, within, keep) for v in value if stays(v)]
        return kept if isinstance(value, list) else tuple(kept)
    return None  # an object that is incomplete without its tensors
