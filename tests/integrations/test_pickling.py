"""Our files against those of torch.save, by torch's own reader."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ckpttool import checksums  # noqa: E402
from ckpttool.checksums import of_bytes  # noqa: E402
from ckpttool.integrations.torch.pickling import describe  # noqa: E402
from ckpttool.saving.files import ArchiveFile, PlainFile  # noqa: E402

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def _file(value: Any, name: str = "file.pt") -> bytes:
    pickled = describe(value)
    file = ArchiveFile(name, pickled.structure, pickled.storages)
    data = b"".join(file.stream())
    assert len(data) == file.nbytes
    assert file.checksums._replace(directory=None) == of_bytes(data)
    assert file.checksums.directory is not None
    start, crc = file.checksums.directory
    assert (data[start : start + 4], checksums.crc32(data[start:])) == (b"PK\x01\x02", crc)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        for record in archive.infolist():  # what stands before a record says the same as the directory
            assert data[record.header_offset + 14 :][:4] == record.CRC.to_bytes(4, "little")
    with ThreadPoolExecutor(1) as pool:
        assert b"".join(file.stream(pool.map)) == data
    assert file.checksums._replace(directory=None) == of_bytes(data)
    return data


def _ours(value: Any) -> Any:
    return torch.load(io.BytesIO(_file(value)), weights_only=False)


def _theirs(value: Any) -> Any:
    out = io.BytesIO()
    torch.save(value, out)
    return torch.load(io.BytesIO(out.getvalue()), weights_only=False)


def _same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.size() == b.size()
        assert a.stride() == b.stride()
        assert a.requires_grad == b.requires_grad
        assert a.is_conj() == b.is_conj()
        assert torch.equal(a.resolve_conj(), b.resolve_conj())
        assert vars(a).keys() == vars(b).keys()
        for name, value in vars(a).items():
            _same(value, vars(b)[name])
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            _same(one, other)
    else:
        assert a == b


def _check(value: Any) -> Any:
    found = _ours(value)
    _same(found, _theirs(value))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 3)], ids=str)
def test_types_and_shapes(dtype: Any, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    _check({"x": torch.arange(numel).to(dtype).reshape(shape)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_types_without_a_storage_class(dtype: Any) -> None:
    value = torch.arange(8, dtype=torch.uint8).view(dtype) if dtype.itemsize > 1 else torch.arange(8).to(dtype)
    found = _ours({"x": value})["x"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_views() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    _check([base.t(), base[1], base[:, 2], base[::2, ::3], base.expand(2, 4, 6), base[1:3, 1:3], base.view(-1)])


def test_expanded_and_conjugated() -> None:
    _check(torch.ones(1).expand(1000))
    _check(torch.tensor([1 + 2j, 3 - 1j]).conj())
    _check(torch.tensor([1 + 2j, 3 - 1j]).conj().imag)


def test_shared_memory_stays_shared() -> None:
    base = torch.arange(10.0)
    found = _check({"all": base, "part": base[2:5], "again": base, "flat": base.view(2, 5)})
    found["all"][3] = 99
    assert found["part"][1] == 99
    assert found["flat"][0, 3] == 99
    assert found["again"] is found["all"]


def test_tied_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    found = _check(OrderedDict(a=weight, b=weight))
    assert found["a"] is found["b"]
    assert isinstance(found["a"], torch.nn.Parameter)


def test_little_of_a_large_storage_is_all_that_is_written() -> None:
    large = torch.arange(1_000_000, dtype=torch.float32)
    views = {"first": large[10:20], "last": large[-5:], "middle": large[500_000:500_100].reshape(10, 10)}
    data = _file(views)
    assert len(data) < 20_000
    found = torch.load(io.BytesIO(data), weights_only=False)
    for name, view in views.items():
        assert torch.equal(found[name], view)
        assert found[name].stride() == view.stride()


def test_views_that_overlap_in_a_large_storage_share_what_is_written() -> None:
    large = torch.zeros(1_000_000)
    found = _ours([large[100:200], large[150:250]])
    found[0][60] = 7
    assert found[1][10] == 7


class _Counted:
    """Says how often it was pickled, and makes what it holds when it is."""

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> Any:
        self.count += 1
        return list, ([torch.arange(3.0)],)


@pytest.mark.parametrize(("used", "count"), [(slice(None), 1), (slice(0, 600), 1), (slice(0, 10), 2)], ids=str)
def test_only_where_little_of_a_storage_is_used_it_is_pickled_twice(used: slice, count: int) -> None:
    counted, large = _Counted(), torch.arange(1000.0)
    found = _ours([counted, large[used], counted])
    assert counted.count == count
    assert found[0][0].tolist() == [0, 1, 2]
    assert torch.equal(found[1], large[used])
    assert found[2] is found[0]


def test_little_and_much_of_several_storages() -> None:
    little, much, itself = torch.arange(1000.0), torch.arange(1000.0), torch.arange(8, dtype=torch.uint8)
    value = {"much": much[:800], "little": little[5:9], "more": much[100:900], "itself": itself.untyped_storage()}
    value["view"] = itself[2:4]
    pickled = describe(value)
    assert [one.nbytes for one in pickled.storages.values()] == [4000, 16, 8]
    assert list(pickled.storages) == ["0", "1", "2"]
    found = _ours({name: one for name, one in value.items() if name != "itself"})
    assert torch.equal(found["little"], little[5:9])
    found["much"][100] = -1
    assert found["more"][0] == -1


def test_storage_used_as_two_types() -> None:
    raw = torch.arange(100_000, dtype=torch.uint8)
    found = _ours({"bytes": raw[4:8], "floats": raw[8:16].view(torch.float32), "odd": raw[1:3]})
    assert found["bytes"].tolist() == [4, 5, 6, 7]
    assert torch.equal(found["floats"].view(torch.uint8), raw[8:16])
    assert found["odd"].tolist() == [1, 2]


def test_storages_themselves() -> None:
    tensor = torch.arange(6, dtype=torch.uint8)
    value = {"storage": tensor.untyped_storage(), "tensor": tensor}
    found, expected = _ours(value), _theirs(value)
    assert type(found["storage"]) is type(expected["storage"])
    ours, theirs = (one["storage"]._untyped_storage for one in (found, expected))  # loading wraps it
    assert bytes(ours) == bytes(theirs) == bytes(range(6))
    assert found["tensor"].untyped_storage().data_ptr() == ours.data_ptr()


def test_attributes_of_tensors() -> None:
    tensor = torch.ones(3)
    tensor.ds_id = 7
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.ds_shape = torch.Size([2, 1])
    found = _check([tensor, parameter])
    assert found[0].ds_id == 7
    assert found[1].ds_shape == (2, 1)


def test_other_content_of_a_checkpoint() -> None:
    _check({
        "none": None, "text": "é", "bytes": b"\0\xff", "big": 2**100, "float": 0.1, "tuple": (1, (2,)), "set": {1, 2},
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), 3: [], "path": Path("a"),
    })  # fmt: skip


def test_layouts_that_are_no_plain_memory() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(_ours(sparse).to_dense(), torch.eye(3))


def test_modules_and_states() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    _check({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize(
    "value", [lambda: 0, (x for x in "ab"), {"module": io}], ids=["function", "generator", "module"]
)
def test_unpicklable_values(value: Any) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        describe(value)


def test_checksums_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "MIN_CHUNK_BYTES", 128)
    for sizes in ([1, 1000, 3], [128, 64, 0, 500], [7] * 30):
        data = _file([torch.arange(n, dtype=torch.int16) for n in sizes])
        assert len(of_bytes(data).crcs) > 5


def test_plain_file_is_its_bytes() -> None:
    file = PlainFile("raw", describe(torch.arange(9, dtype=torch.uint8)).storages["0"])
    assert b"".join(file.stream()) == bytes(range(9))
    assert file.checksums._replace(directory=None) == of_bytes(bytes(range(9)))
