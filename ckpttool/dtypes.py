"""Table of element types: names in safetensors, torch, torch's typed storages and numpy, and the size of each."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class DType(NamedTuple):
    """An element type under all of its names."""

    name: str
    """Name in safetensors, used everywhere in ckpttool: "F32", "BF16"."""
    torch: str
    """Name in the torch module: "float32"."""
    storage: str | None
    """Typed storage class of torch; None for types newer than typed storages."""
    numpy: str
    """Name in numpy or ml_dtypes."""
    itemsize: int
    """Bytes per element."""
    floating: bool
    """True for real floating-point types."""


_TABLE = (
    DType("F64", "float64", "DoubleStorage", "float64", 8, True),
    DType("F32", "float32", "FloatStorage", "float32", 4, True),
    DType("F16", "float16", "HalfStorage", "float16", 2, True),
    DType("BF16", "bfloat16", "BFloat16Storage", "bfloat16", 2, True),
    DType("F8_E4M3", "float8_e4m3fn", None, "float8_e4m3fn", 1, True),
    DType("F8_E5M2", "float8_e5m2", None, "float8_e5m2", 1, True),
    DType("I64", "int64", "LongStorage", "int64", 8, False),
    DType("I32", "int32", "IntStorage", "int32", 4, False),
    DType("I16", "int16", "ShortStorage", "int16", 2, False),
    DType("I8", "int8", "CharStorage", "int8", 1, False),
    DType("U64", "uint64", None, "uint64", 8, False),
    DType("U32", "uint32", None, "uint32", 4, False),
    DType("U16", "uint16", None, "uint16", 2, False),
    DType("U8", "uint8", "ByteStorage", "uint8", 1, False),
    DType("BOOL", "bool", "BoolStorage", "bool", 1, False),
    DType("C64", "complex64", "ComplexFloatStorage", "complex64", 8, False),
)

DTYPES: dict[str, DType] = {d.name: d for d in _TABLE}
"""Types by name in safetensors."""

BY_TORCH_NAME: dict[str, DType] = {d.torch: d for d in _TABLE}
"""Types by name in the torch module."""

BY_STORAGE_CLASS: dict[str, DType] = {d.storage: d for d in _TABLE if d.storage}
"""Types by typed storage class of torch."""

TRAINING_DTYPES: dict[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Names in safetensors by the short names of users and DeepSpeed configurations."""

SHORT_NAMES: dict[str, str] = {name: short for short, name in TRAINING_DTYPES.items()}
"""Short names by names in safetensors."""

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}
"""Short names by names in the torch module."""

_FROM_ML_DTYPES = {"BF16", "F8_E4M3", "F8_E5M2"}
_STRUCT_CODES = {
    "F64": "d",
    "F32": "f",
    "F16": "e",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
    "BOOL": "?",
}
"""Codes of the struct module, for the types that it knows."""


def short_name(dtype: Any) -> Any:
    """Return the short name of torch's types and of their names: "bf16" for "bfloat16"; other values unchanged."""
    return _SHORT.get(str(dtype).removeprefix("torch."), dtype)


def itemsize(name: str) -> int:
    """Return the bytes per element of a type by its name in safetensors."""
    return DTYPES[name].itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype by name in safetensors; import ml_dtypes only for types that numpy lacks."""
    import numpy as np

    if name in _FROM_ML_DTYPES:
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, DTYPES[name].numpy))
        return kind
    return np.dtype(DTYPES[name].numpy)


def parse_number(data: bytes | memoryview, name: str) -> Any:
    """Return the one element of a type in ``data`` (little-endian) as a Python number."""
    if name == "BF16":  # the upper half of an fp32
        return struct.unpack("<f", b"\0\0" + data)[0]
    if (code := _STRUCT_CODES.get(name)) is not None:
        return struct.unpack(f"<{code}", data)[0]
    import numpy as np

    return np.frombuffer(data, numpy_dtype(name))[0].item()


def castable(source: str, target: str) -> bool:
    """Return whether ``ckpttool.plan.casts`` can cast from one type to the other (safetensors' spelling)."""
    return source == target or (source in {"F64", "F32", "F16", "BF16"} and target in {"F32", "F16", "BF16"})
