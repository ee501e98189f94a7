"""The safetensors header, compared with the library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from ckpttool.containers.safetensors import Tensor, build, parse
from ckpttool.dtypes import itemsize
from ckpttool.errors import ContainerError
from tests.hostile import BytesReader

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = st.lists(
    st.builds(
        Tensor,
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL"]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda t: t.name,
)


@given(TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_built_archive_is_parsed_to_the_same(tensors: list[Tensor], metadata: dict[str, str]) -> None:
    header, begin = build(tensors, metadata)
    data = header + b"\0" * sum(t.nbytes for t in tensors)
    entries, found = parse(BytesReader(data))
    assert found == metadata
    assert {name: tensor for name, (tensor, _) in entries.items()} == {t.name: t for t in tensors}
    assert {name: where.start for name, (_, where) in entries.items()} == begin
    for t in tensors:
        assert begin[t.name] % itemsize(t.dtype) == 0 or t.nbytes == 0


def test_the_library_reads_what_is_built(tmp_path: Path) -> None:
    tensors = [
        Tensor("flag", "BOOL", (3,)),
        Tensor("w", "F32", (2, 2)),
        Tensor("s", "F64", ()),
        Tensor("e", "F16", (0, 3)),
    ]
    header, begin = build(tensors, {"format": "pt", "other": "w"})
    data = bytearray(header + b"\0" * sum(t.nbytes for t in tensors))
    data[begin["w"] : begin["w"] + 16] = np.arange(4, dtype=np.float32).tobytes()
    data[begin["s"] : begin["s"] + 8] = np.float64(7).tobytes()
    data[begin["flag"] : begin["flag"] + 3] = b"\1\0\1"
    (tmp_path / "x").write_bytes(data)
    with safe_open(tmp_path / "x", "np") as file:
        assert file.metadata() == {"format": "pt", "other": "w"}
        assert file.get_tensor("w").tolist() == [[0, 1], [2, 3]]
        assert file.get_tensor("s") == 7
        assert file.get_tensor("flag").tolist() == [True, False, True]
        assert file.get_tensor("e").shape == (0, 3)


def test_files_of_the_library_are_parsed() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.ones((), np.float32),
        "c": np.zeros((0, 2)),
    }
    data = save(arrays, metadata={"k": "v"})
    entries, metadata = parse(BytesReader(data))
    assert metadata == {"k": "v"}
    for name, array in arrays.items():
        tensor, where = entries[name]
        assert tensor.shape == array.shape
        assert data[where.start : where.end] == array.tobytes()


def _file(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


def _one(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        _file({}, length=1 << 40),
        _file(b"not json"),
        _file(b"[]"),
        _file(b'{"x":1}'),
        _file(b"[" * 100_000),
        _file(_one()),
        _file(_one(), b"\0" * 5),
        _file(_one(dtype="F33"), b"\0" * 4),
        _file(_one(shape=[2]), b"\0" * 4),
        _file(_one(shape=[-1]), b"\0" * 4),
        _file(_one(shape=[True]), b"\0" * 4),
        _file(_one(shape=[1 << 40, 1 << 40]), b"\0" * 4),
        _file(_one(shape="1"), b"\0" * 4),
        _file(_one(data_offsets=[4, 0]), b"\0" * 4),
        _file(_one(data_offsets=[4, 8]), b"\0" * 8),
        _file({**_one(), "y": _one()["x"]}, b"\0" * 4),
        _file(
            b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            b"\0",
        ),
    ],
)
def test_a_header_that_does_not_describe_the_file_exactly_is_refused(data: bytes) -> None:
    with pytest.raises(ContainerError):
        parse(BytesReader(data))
