"""Rebuilders: the data that a call in a pickle would return, without the call.

Each function is named after the function of torch or Python that it stands in for. It returns None to leave the call as
an Opaque.

Source: torch 2.13, torch/_utils.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.pickle_machine import MAX_NAME, RefusedError
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType
from ckpttool.dtypes import BY_STORAGE_CLASS, BY_TORCH_NAME, itemsize
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.containers.pickle_machine import Machine

MAX_DIMENSIONS = 64
"""torch's own limit."""


# ------------------------------------------------------------------------------------------------- storages, tensors


def rebuild_storage(m: Machine, pid: Any) -> StorageRef | Opaque:
    """Return the object of a persistent id: a storage, or the class of a module that was saved with its source.

    Source: torch 2.13, torch/serialization.py (``persistent_id``, in ``_save`` and in ``_legacy_save``).
    """
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Opaque):
        return pid[1]
    if not isinstance(pid, tuple) or len(pid) not in {5, 6} or pid[0] != "storage":
        raise RefusedError("a persistent id that is not a storage")
    _, cls, key, location, numel = pid[:5]
    if not isinstance(cls, Opaque) or cls.how != "global" or cls.module not in {"torch", "torch.storage", "torch.cuda"}:
        raise RefusedError("a storage of no known class")
    if not isinstance(key, str) or not isinstance(location, str) or not _is_count(numel):
        raise RefusedError("a storage whose key, location or size makes no sense")
    if cls.name == "UntypedStorage":
        dtype = "U8"
    elif cls.name in BY_STORAGE_CLASS:
        dtype = BY_STORAGE_CLASS[cls.name].name
    else:
        problem = f"a storage of class {cls.qualified_name}, a type that ckpttool does not read"
        raise RefusedError(problem, "save the tensor in another type, or in a file of its own")
    if len(pid) == 6 and pid[5] is not None:
        raise RefusedError("a view of a storage (torch before 0.4), which is not supported")
    ref = StorageRef(key, cls.name, dtype, location, numel)
    first = m.storages.setdefault(key, ref)
    if first.nbytes != ref.nbytes:
        raise RefusedError(f"storage {brief(key)} has two sizes")
    return first if first == ref else ref


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMENSIONS or not all(_is_count(v) for v in values):
        raise RefusedError("a tensor whose sizes or strides make no sense")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, requires_grad: Any) -> TensorRef:
    if not isinstance(storage, StorageRef) or not _is_count(offset):
        raise RefusedError("a tensor without a storage")
    shape, stride = _counts(shape), _counts(stride)
    if len(shape) != len(stride):
        raise RefusedError("a tensor with more strides than sizes")
    ref = TensorRef(storage, dtype, offset, shape, stride, requires_grad=bool(requires_grad))
    if ref.numel >= 1 << 62 or ref.span * itemsize(dtype) > storage.nbytes:
        raise RefusedError(
            f"a tensor of shape {shape} reaches beyond its storage {brief(storage.key)} of {storage.numel} elements"
        )
    return ref


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), requires_grad=False)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    _hooks: Any = None,
    flags: Any = None,
) -> TensorRef | None:
    if flags:  # conjugated or negated on reading: its bytes are not its values
        return None
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), requires_grad)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> TensorRef | None:
    if flags or not isinstance(dtype, TorchDType):  # or of a dtype that ckpttool does not know
        return None
    return _tensor(storage, offset, shape, stride, BY_TORCH_NAME[dtype.name].name, requires_grad)


def _rebuild_parameter(data: Any, requires_grad: Any = True, _hooks: Any = None) -> TensorRef | None:
    return _as_parameter(data, requires_grad, None)


def _rebuild_parameter_with_state(data: Any, requires_grad: Any, _hooks: Any, state: Any) -> TensorRef | None:
    return _as_parameter(data, requires_grad, state) if isinstance(state, dict) else None


def _as_parameter(data: Any, requires_grad: Any, attributes: dict[str, Any] | None) -> TensorRef | None:
    if not isinstance(data, TensorRef) or data.attributes is not None:
        return None
    return replace(data, requires_grad=bool(requires_grad), parameter=True, attributes=attributes)


TENSOR_REBUILDERS: dict[tuple[str, str], Callable[..., TensorRef | None]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter_with_state,
}


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef | None:
    if not (isinstance(function, Opaque) and isinstance(cls, Opaque) and isinstance(args, tuple)):
        return None
    rebuild = TENSOR_REBUILDERS.get((function.module, function.name))
    # Never through itself: hostile nesting of this call would recurse without limit.
    if rebuild is None or rebuild is _rebuild_from_type or (cls.module, cls.name) not in _TENSOR_CLASSES:
        return None
    made = rebuild(*args)
    if made is None or made.attributes is not None or not isinstance(state, dict):
        return None
    return replace(made, parameter=cls.name == "Parameter", attributes=state)


_TENSOR_CLASSES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}
TENSOR_REBUILDERS["torch._tensor", "_rebuild_from_type_v2"] = _rebuild_from_type


# ------------------------------------------------------------------------------------------------- Python data
#
# These functions copy their arguments, which a pickle may name again and again: each copy is charged.


def _rebuild_size(_: Machine, values: Any = ()) -> Size:
    return Size(_counts(values))


def _rebuild_ordered_dict(m: Machine, pairs: Any = ()) -> OrderedDict | None:
    # Python 2 passed the content this way; Python 3 stores it item by item.
    if not isinstance(pairs, list | tuple):
        return None
    made = OrderedDict()
    for key, value in pairs:
        m.check_keys([key])
        made[key] = value
    return made


def _rebuild_set(m: Machine, values: Any = ()) -> set[Any] | None:
    if not isinstance(values, list | tuple):
        return None
    m.check_keys(values)
    return set(values)


def _rebuild_frozenset(m: Machine, values: Any = ()) -> frozenset[Any] | None:
    made = _rebuild_set(m, values)
    return None if made is None else frozenset(made)


def _rebuild_encoded(m: Machine, text: Any, encoding: Any = "") -> bytes | None:
    """Protocol 2 writes bytes as latin-1 text to be encoded."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        return None
    m.charge(len(text))
    return text.encode("latin-1")


def _rebuild_bytes(_: Machine, *args: Any) -> bytes | None:
    return None if args else b""


def _rebuild_bytearray(m: Machine, value: Any = b"", encoding: Any = "latin-1") -> bytearray | None:
    if not isinstance(value, str | bytes) or encoding != "latin-1":
        return None
    m.charge(2 * len(value))
    return bytearray(value if isinstance(value, bytes) else value.encode("latin-1"))


def _rebuild_complex(_: Machine, real: Any = 0.0, imaginary: Any = 0.0) -> complex | None:
    return complex(real, imaginary) if isinstance(real, float) and isinstance(imaginary, float) else None


def _rebuild_attribute(m: Machine, owner: Any = None, name: Any = None, *more: Any) -> Opaque | TorchDType | None:
    """Protocols up to 3 can name a nested class only in this way."""
    if not isinstance(owner, Opaque) or owner.how != "global" or not isinstance(name, str) or more:
        return None
    if len(name) > MAX_NAME:
        raise RefusedError("a class or function without a proper name")
    return m.find(owner.module, f"{owner.name}.{name}")


DATA_REBUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _rebuild_size,
    ("collections", "OrderedDict"): _rebuild_ordered_dict,
    ("_codecs", "encode"): _rebuild_encoded,
}
for _builtins in ("builtins", "__builtin__"):
    DATA_REBUILDERS |= {
        (_builtins, "set"): _rebuild_set,
        (_builtins, "frozenset"): _rebuild_frozenset,
        (_builtins, "bytes"): _rebuild_bytes,
        (_builtins, "bytearray"): _rebuild_bytearray,
        (_builtins, "complex"): _rebuild_complex,
        (_builtins, "getattr"): _rebuild_attribute,
    }
