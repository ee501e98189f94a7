"""The metadata of a delta file, parsed and built: what it begins at, what it ends at, and all tensors of the result.

The documentation describes all keys: "Deltas".

Source for the names of tensors, ``sparse``, ``model_version``, ``sparsity`` and ``changed_params``: the wire format of
TRL's delta weight sync, https://huggingface.co/blog/delta-weight-sync, section 4.1.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckpttool.budget import MEMORY, spend
from ckpttool.containers.safetensors import MAX_DIMENSIONS, MEMORY_OF_JSON
from ckpttool.dtypes import DTYPES, TRAINING_DTYPES
from ckpttool.errors import LayoutError
from ckpttool.messages import brief
from ckpttool.model.derived.delta import DeltaHeader, End, TensorType

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

DELTA = "ckpttool.delta"
"""Key of the description, JSON, in the metadata."""
VERSION = 1
"""Version of the description."""
INDICES = ".indices"
"""Behind the name of a tensor: the flat indices of its changed elements."""
VALUES = ".values"
"""Behind the name of a tensor: their new values."""
MAKE_AGAIN = "make the delta again, or copy it again"


def metadata_of(header: DeltaHeader) -> dict[str, str]:
    """Return the metadata of a delta, apart from ``changed_params``."""
    elements = sum(t.numel for t in header.tensors.values())
    description = {
        "version": VERSION,
        "begins": _end_as_json(header.begins),
        "ends": _end_as_json(header.ends),
        "dtype": header.dtype,
        "tensors": _types_as_json(header.tensors),
        "removed": _types_as_json(header.removed),
        "aliases": dict(header.aliases),
        "changed": header.changed,
    }
    return {
        "format": "sparse_weight_patch",
        "sparse": "True",
        "encoding": "raw",
        "model_version": str(header.ends.step or 0),
        "sparsity": f"{1 - header.changed / max(elements, 1):.6f}",
        DELTA: json.dumps(description, separators=(",", ":"), ensure_ascii=False),
    }


def parse_header(metadata: Mapping[str, str], path: str) -> DeltaHeader:
    """Return the description in the metadata of a file.

    Args:
        metadata: The metadata.
        path: The file, for errors.

    Raises:
        LayoutError: The file is not a delta, or its description is damaged or of a newer version.
    """
    if DELTA not in metadata:
        raise LayoutError(path, "holds no delta that ckpttool wrote", "pass the output of delta")
    spend(MEMORY, MEMORY_OF_JSON * len(metadata[DELTA]), path)
    try:
        data = json.loads(metadata[DELTA])
        version = data["version"]
        if version == VERSION:
            return DeltaHeader(
                begins=_end(data["begins"]),
                ends=_end(data["ends"]),
                dtype=_one_of(data["dtype"], TRAINING_DTYPES.values()),
                tensors=_types(data["tensors"]),
                removed=_types(data["removed"]),
                aliases={_text(k): _text(v) for k, v in data["aliases"].items()},
                changed=_size(data["changed"]),
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(path, f"its description of the delta is damaged ({error})", MAKE_AGAIN) from error
    raise LayoutError(path, f"is a delta of version {brief(version)}", "update ckpttool")


def _end_as_json(end: End) -> dict[str, Any]:
    return {"fingerprint": end.fingerprint, "digest": end.digest, "step": end.step}


def _types_as_json(tensors: Mapping[str, TensorType]) -> dict[str, Any]:
    return {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in tensors.items()}


def _end(value: Any) -> End:
    digest, step = value["digest"], value["step"]
    return End(
        _text(value["fingerprint"]),
        None if digest is None else _text(digest),
        None if step is None else _size(step),
    )


def _types(value: Any) -> dict[str, TensorType]:
    return {_text(name): TensorType(_one_of(t["dtype"], DTYPES), _shape(t["shape"])) for name, t in value.items()}


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"{brief(value)} is not a shape")
    return tuple(map(_size, value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{brief(value)} is not a text")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{brief(value)} is not a size")
    return value


def _one_of(value: Any, known: Collection[str]) -> str:
    if value not in known:
        raise ValueError(f"type {brief(value)} is not known")
    return _text(value)
