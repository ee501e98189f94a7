"""``extract``: read one tensor or a slice of it, and encode it as a file."""

from __future__ import annotations

import io
import itertools
import math
import posixpath
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.containers import safetensors, torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import StorageRef, TensorRef
from ckpttool.dtypes import DTYPES, SHORT_NAMES, numpy_dtype
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import GATHER_ELEMENTS, StateReader
from ckpttool.messages import brief
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.model import Checkpoint, State


def read_part(checkpoint: Checkpoint, state: State, index: Any, checks: ReadChecks | None = None) -> NDArray[Any]:
    """Read only the bytes of a tensor or of a part of it.

    Args:
        checkpoint: The checkpoint.
        state: The tensor.
        index: Integers and slices of step 1, one for each dimension from the first on; None for all.
        checks: Compares the bytes read with recorded checksums; None to read without.

    Raises:
        ChecksumError: The bytes read differ from those saved.
        StorageError: Reading failed.
        ArgumentError: ``index`` does not fit the shape.
    """
    ranges, dropped = _ranges(state.shape, index)
    shape = tuple(stop - start for start, stop in ranges)
    out = np.empty(math.prod(shape), dtype=numpy_dtype(state.dtype))
    # From the last sliced dimension on, elements are contiguous.
    last = max((d for d, (r, n) in enumerate(zip(ranges, state.shape, strict=True)) if r != (0, n)), default=0)
    strides = [math.prod(state.shape[d + 1 :]) for d in range(len(shape))]
    run = shape[last] * strides[last] if shape else 1
    with Sources(source_files(checkpoint), checks) as sources:
        gatherer = StateReader(sources)
        at = 0
        for index in itertools.product(*(range(*r) for r in ranges[:last])) if out.size else ():
            first = sum(i * s for i, s in zip((*index, *(r[0] for r in ranges[last:])), strides, strict=True))
            for begin in range(0, run, GATHER_ELEMENTS):
                count = min(GATHER_ELEMENTS, run - begin)
                gatherer.fill(state, first + begin, out[at + begin : at + begin + count])
            at += run
        sources.finish()
    return out.reshape([n for d, n in enumerate(shape) if d not in dropped])


def _ranges(shape: tuple[int, ...], index: Any) -> tuple[list[tuple[int, int]], set[int]]:
    """Return (start, stop) of every dimension, and the dimensions removed by an integer index."""
    wanted = () if index is None else index if isinstance(index, tuple) else (index,)
    if len(wanted) > len(shape):
        raise ArgumentError("index", f"has {len(wanted)} indices, but the shape is {shape}", "leave out the last ones")
    ranges = [(0, n) for n in shape]
    dropped = set()
    for d, item in enumerate(wanted):
        if isinstance(item, slice):
            start, stop, step = item.indices(shape[d])
            if step != 1:
                raise ArgumentError("index", f"has a slice of step {step}", "choose slices of step 1")
            ranges[d] = (start, max(start, stop))
        elif isinstance(item, int) and not isinstance(item, bool) and -shape[d] <= item < shape[d]:
            ranges[d] = (item % shape[d], item % shape[d] + 1)
            dropped.add(d)
        else:
            raise ArgumentError(
                "index", f"has {brief(item)} for a dimension of {shape[d]}", "choose an index or a slice in it"
            )
    return ranges, dropped


def encode(values: NDArray[Any], name: str, out: str) -> list[bytes | memoryview]:
    """Encode one tensor as a file, in the format of the file's suffix; return the file's content in pieces.

    Args:
        values: The tensor.
        name: Its name, for safetensors files.
        out: Name of the file: ``.safetensors``, ``.npy``, ``.pt`` or ``.bin``.

    Raises:
        PlanError: The suffix is unknown, or the format cannot store the tensor's dtype.
    """
    dtype = next(d for d in DTYPES.values() if numpy_dtype(d.name) == values.dtype)
    # In one dimension: a view of a scalar in another type is not possible.
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    suffix = posixpath.splitext(out)[1]
    if suffix == ".safetensors":
        header, _ = safetensors.build([safetensors.Tensor(name, dtype.name, values.shape)], {"format": "pt"})
        return [header, data]
    if suffix == ".npy":
        if values.dtype.kind not in "biufc":
            hint = "choose .safetensors or .pt"
            raise PlanError(out, f"cannot hold {SHORT_NAMES.get(dtype.name, dtype.name)}, which numpy lacks", hint)
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
        )
        return [head.getvalue(), data]
    if suffix in {".pt", ".bin"}:
        numel = values.size
        strides = tuple(math.prod(values.shape[d + 1 :]) for d in range(values.ndim))
        typed = dtype.storage is not None
        storage = StorageRef(
            "0", dtype.storage or "UntypedStorage", dtype.name if typed else "U8", "cpu", numel if typed else len(data)
        )
        ref = TensorRef(storage, dtype.name, 0, values.shape, strides)
        built = torch_zip.build(pickle(ref, path=out), {"0": len(data)}, prefix="archive", path=out)
        where = built.payloads["0"]
        before, behind = bytearray(where.start), bytearray(built.nbytes - where.end)
        for offset, literal in built.literals:
            side, at = (before, offset) if offset < where.start else (behind, offset - where.end)
            side[at : at + len(literal)] = literal
        return [bytes(before), data, bytes(behind)]
    raise PlanError(out, "has an unknown suffix", "choose .safetensors, .npy or .pt")
