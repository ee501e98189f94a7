"""Files written back from their parsed structure: torch loads them like the originals."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import importlib
import os
import pathlib
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.unpickler import MAX_DEPTH, unpickle
from ckpttool.containers.values import Opaque, StorageRef, TensorRef
from ckpttool.errors import ContainerError, PlanError
from tests import sampling
from tests.containers.cases import CASES, FIXTURES, OF_CHECKPOINTS, Case
from tests.containers.oracle import assert_torch_equal, load, read
from tests.damage import assembled
from tests.hostile import BytesReader
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path


def write_back(source: str, target: str, *, checksums: bool = True) -> torch_zip.BuiltArchive:
    """Read a file and write it anew, each payload byte where the plan says."""
    file = read(source)
    with open(source, "rb") as stream:
        data = stream.read()
    payloads = {key: data[r.start : r.end] for key, r in file.storages.items()}
    prefix = os.path.splitext(os.path.basename(target))[0]
    sizes = {key: len(payload) for key, payload in payloads.items()}
    built = torch_zip.build(pickle(file.root, path=target), sizes, prefix=prefix, path=target)
    with open(target, "wb") as stream:
        stream.write(assembled(built, payloads, checksums=checksums))
    return built


SAFE = [ZeroStageEnum, DynamicLossScaler, LossScaler, SubparamShape, fragment_address]
# Some Pythons pickle an enum's member by name: getattr(ZeroStageEnum, "gradients").
SAFE.append(getattr)
# The states of data samplers have numbers and arrays of numpy.
_multiarray = importlib.import_module("numpy._core.multiarray")
SAFE += [_multiarray.scalar, _multiarray._reconstruct, np.ndarray, np.dtype]
SAFE += [type(np.dtype(kind)) for kind in ("i8", "u4")]


@pytest.mark.parametrize("checkpoint", sampling.some(OF_CHECKPOINTS, 40, key="pickler"))
def test_fixtures_come_back(checkpoint: str, tmp_path: Path) -> None:
    target, again = str(tmp_path / "again.pt"), str(tmp_path / "b" / "again.pt")
    os.mkdir(tmp_path / "b")
    for name in OF_CHECKPOINTS[checkpoint]:
        source = os.path.join(FIXTURES, name)
        write_back(source, target)
        expected = load(source)
        assert_torch_equal(load(target), expected)
        with torch.serialization.safe_globals(SAFE):
            assert_torch_equal(load(target, weights_only=True), expected)
        # The second time there is nothing left to change.
        write_back(target, again)
        assert pathlib.Path(again).read_bytes() == pathlib.Path(target).read_bytes(), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_value_comes_back(case: Case, tmp_path: Path) -> None:
    source, target = str(tmp_path / "source.pt"), str(tmp_path / "target.pt")
    torch.save(case.make(), source)
    write_back(source, target)
    assert_torch_equal(load(target), load(source))
    assert_torch_equal(load(target, mmap=True), load(source, mmap=True))
    try:
        expected = load(source, weights_only=True)
    except Exception:
        return
    assert_torch_equal(load(target, weights_only=True), expected)


class Colour(enum.Enum):
    RED = "red"


class Outer:
    class Mode(enum.IntEnum):
        FAST = 3

    class Inner:
        def __init__(self) -> None:
            self.x = [torch.ones(2)]


class Described(dict[str, int]):
    pass


class Rows(list[int]):
    pass


class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: list[int]


Point = collections.namedtuple("Point", "x y")


def function(*_: Any, **__: Any) -> None:
    pass


def _slotted() -> Slotted:
    made = Slotted()
    made.a, made.b = 1, [2]
    return made


def _rows() -> Rows:
    made = Rows([1, 2])
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def _described() -> Described:
    made = Described(a=1)
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def _ordered() -> collections.OrderedDict[str, int]:
    made = collections.OrderedDict(a=1)
    made._metadata = {"version": 1}  # type: ignore[attr-defined]
    return made


OBJECTS = [
    Case("a LossScaler's state", lambda: DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False, dtype=torch.float16)),
    Case("ZeroStageEnum", lambda: [ZeroStageEnum.weights, ZeroStageEnum.weights, ZeroStageEnum.disabled]),
    Case("fragment_address", lambda: {"a.weight": fragment_address(numel=3, start=5)}),
    Case("argparse.Namespace", lambda: argparse.Namespace(lr=0.1, nested=argparse.Namespace(t=torch.ones(2)))),
    Case("numpy arrays", lambda: [np.arange(6.0).reshape(2, 3), np.zeros(0, np.int8), np.array(["a", "bc"])]),
    Case(
        "numpy scalars", lambda: {"a": np.float64(1.5), "b": np.int64(7), "c": np.bool_(True), "d": np.float32("nan")}
    ),
    Case("numpy random state", lambda: np.random.RandomState(3).get_state()),
    Case("a numpy generator", lambda: np.random.default_rng(3).bit_generator.state),
    Case("torch's random state", lambda: torch.Generator().manual_seed(5).get_state()),
    Case("enums", lambda: [Colour.RED, Colour.RED, {Colour.RED: 1}]),
    Case("enum within a class", lambda: {Outer.Mode.FAST: [Outer.Mode.FAST]}),
    Case("object of a class within a class", Outer.Inner),
    Case("classes and functions", lambda: [Colour, Outer.Inner, function, dict, torch.nn.Linear]),
    Case("defaultdict", lambda: collections.defaultdict(list, {"a": [1], "b": []})),
    Case("Counter", lambda: collections.Counter("abca")),
    Case("deque", lambda: collections.deque([1, 2], maxlen=3)),
    Case("OrderedDict with attributes", _ordered),
    Case("subclass of dict with attributes", _described),
    Case("subclass of list with attributes", _rows),
    Case("namedtuple", lambda: Point(1, [2])),
    Case("object with slots", _slotted),
    Case("functools.partial", lambda: functools.partial(function, 1, a=2)),
    Case(
        "pathlib, datetime and range",
        lambda: [pathlib.PurePosixPath("/a/b"), datetime.timedelta(1, 2), range(3), slice(1)],
    ),
    Case("sets of objects", lambda: [{Colour.RED, *Outer.Mode}, {(1, Colour.RED)}, frozenset([function])]),
    Case("a whole module", lambda: torch.nn.Linear(2, 3)),
    Case("a whole optimizer", lambda: torch.optim.AdamW(torch.nn.Linear(2, 3).parameters(), lr=0.1)),
    Case("a scheduler's state", lambda: _scheduler().state_dict()),
]


def _scheduler() -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("case", OBJECTS, ids=lambda c: c.id)
def test_object_comes_back(case: Case, protocol: int, tmp_path: Path) -> None:
    source, target = str(tmp_path / "source.pt"), str(tmp_path / "target.pt")
    torch.save(case.make(), source, pickle_protocol=protocol)
    write_back(source, target)
    assert_torch_equal(load(target), load(source))


def _list_in_itself() -> Any:
    made: dict[str, Any] = {"list": []}
    made["list"].append(made)
    return made


def _tuple_in_itself() -> Any:
    inner: list[Any] = []
    made = (1, inner, 2, 3)
    inner.append(made)
    return made


def _pair_in_itself() -> Any:
    inner: list[Any] = []
    made = (inner, 1)
    inner.append(made)
    return made


def _object_in_itself() -> Any:
    made = argparse.Namespace()
    made.me = made
    return made


def test_cycles_and_sharing_come_back(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source.pt"), str(tmp_path / "target.pt")
    shared = {"x": [1]}
    makers = [_list_in_itself, _tuple_in_itself, _pair_in_itself, _object_in_itself]
    torch.save([shared, [shared], (shared,), *(make() for make in makers)], source)
    write_back(source, target)
    first, second, third, in_dict, in_four, in_two, in_object = load(target)
    assert first is second[0] is third[0]
    assert in_dict["list"][0] is in_dict
    assert (in_four[1][0], len(in_four)) == (in_four, 4)
    assert in_four[1][0] is in_four
    assert in_two[0][0] is in_two
    assert in_object.me is in_object


@pytest.mark.parametrize("checksums", [True, False])
def test_archive_is_what_zipfile_and_torch_expect(checksums: bool, tmp_path: Path) -> None:
    source, target = str(tmp_path / "source.pt"), str(tmp_path / "target.pt")
    torch.save({str(i): torch.arange(float(i)) for i in range(40)}, source)
    built = write_back(source, target, checksums=checksums)
    ours = {r.name: r for r in read(target).records}
    with zipfile.ZipFile(target) as archive, zipfile.ZipFile(source) as original:
        assert archive.testzip() is None if checksums else True
        assert list(ours) == archive.namelist()
        assert [n.split("/", 1)[1] for n in archive.namelist()] == [n.split("/", 1)[1] for n in original.namelist()]
        for info in archive.infolist():
            record = ours[info.filename]
            assert (info.file_size, info.CRC) == (record.where.nbytes, record.crc32)
            assert record.where.start % torch_zip.ALIGNMENT == 0
            if checksums or "/data/" not in info.filename:
                with archive.open(info) as member, open(target, "rb") as raw:
                    raw.seek(record.where.start)
                    assert member.read() == raw.read(record.where.nbytes)
        assert zlib.crc32(archive.read("target/data.pkl")) == archive.getinfo("target/data.pkl").CRC
    assert {f"target/data/{key}": where for key, where in built.payloads.items()} == {
        n: r.where for n, r in ours.items() if "/data/" in n
    }


def test_same_input_gives_the_same_bytes() -> None:
    # Python salts the hash of text in each process, so the order of a set differs from run to run.
    data = pickle(
        {"set": {"a", "b", "c", (1, "x"), 2.5, None, frozenset("xyz")}, "big": 1 << 100, "list": [1 << 100]}, path="a"
    )
    assert data.index(b"X\x01\x00\x00\x00a") < data.index(b"X\x01\x00\x00\x00b") < data.index(b"X\x01\x00\x00\x00c")
    built = [torch_zip.build(data, {"0": 8, "1": 0}, prefix="p", path="p") for _ in range(2)]
    assert built[0] == built[1]


def test_set_of_objects_is_written_in_the_order_it_was_read_in() -> None:
    made = [Opaque("m", "Enum", "call", (i,)) for i in range(50)]
    written = pickle(set(made), path="a")
    made.reverse()
    assert pickle(set(made), path="a") == written
    assert pickle(unpickle(written, path="a").value, path="a") == written


def test_keyword_arguments_of_a_class_are_refused() -> None:
    made = Opaque("m", "C", "new")
    made.kwargs = {"a": 1}
    with refused(PlanError):
        pickle(made, path="out.pt")


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "a object cannot be written into it"),
        (np.float32(1), "a float32 cannot be written into it"),
        (_nested([], 1000), "nested more than 200 deep"),
        (Opaque("m\nos", "system"), r"holds a class named 'm\\nos', 'system'"),
        (Opaque("m", ""), "holds a class named 'm', ''"),
        (Opaque("m", "\ud800"), "holds a class named"),
    ],
)
def test_an_unwritable_tensor_is_a_plan_error(value: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=rf"^out.pt: .*{problem}"):
        pickle(value, path="out.pt")


def _is_read(value: Any) -> bool:
    """Whether a value as deep as this is read; it can be written in any case."""
    written = pickle(value, path="x")
    try:
        return pickle(unpickle(written, path="x").value, path="x") == written
    except ContainerError:
        return False


def test_values_at_the_maximum_depth_can_be_written() -> None:
    storage = StorageRef("0", "FloatStorage", "F32", "cpu", 1)
    tensor = TensorRef(storage, "F32", 0, (1,), (1,), parameter=True, attributes={})
    leaves: list[Any] = [{}, (1,), 1.5, b"x", tensor, Opaque("m", "C", "new", ())]
    for leaf in leaves:
        deepest = next(n for n in range(MAX_DEPTH, 0, -1) if _is_read(_nested(leaf, n)))
        assert deepest >= MAX_DEPTH - 3


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "a\0", "\ud800", "x" * 1000])
def test_name_of_a_record_must_be_one_component(bad: str) -> None:
    with refused(PlanError):
        torch_zip.build(b"", {}, prefix=bad, path="out.pt")
    with refused(PlanError):
        torch_zip.build(b"", {bad: 4}, prefix="a", path="out.pt")


def write_sparse(target: str, built: torch_zip.BuiltArchive, payloads: dict[str, bytes]) -> None:
    with open(target, "wb") as stream:
        stream.truncate(built.nbytes)
        for n, (offset, _) in enumerate(built.literals):
            stream.seek(offset)
            stream.write(built.literal(n, {key: zlib.crc32(payload) for key, payload in payloads.items()}))
        for key, payload in payloads.items():
            stream.seek(built.payloads[key].start)
            stream.write(payload)


def test_file_of_more_than_four_gigabytes_is_read_by_us_and_torch_and_zipfile(tmp_path: Path) -> None:
    target = str(tmp_path / "large.pt")
    numel = (5 << 30) // 4
    refs = {
        key: TensorRef(StorageRef(key, "FloatStorage", "F32", "cpu", n), "F32", 0, (n,), (1,))
        for key, n in (("small", 4), ("large", numel), ("after", 4))
    }
    sizes = {key: ref.storage.nbytes for key, ref in refs.items()}
    numbers = np.array([1, 2, 3, 4], "<f4").tobytes()
    built = torch_zip.build(pickle(refs, path=target), sizes, prefix="large", path=target)
    write_sparse(target, built, {"small": numbers, "after": numbers})
    assert os.stat(target).st_size > 5 << 30

    file = read(target)
    assert file.storages == built.payloads
    assert file.locate(file.root["after"]).start > 5 << 30
    with zipfile.ZipFile(target) as archive:
        assert archive.getinfo("large/data/large").file_size == 5 << 30
        with archive.open("large/data/small") as member:
            assert member.read() == numbers
    loaded = load(target, mmap=True)
    assert loaded["large"].shape == (numel,)
    assert loaded["large"][-1] == 0
    assert loaded["after"].tolist() == [1, 2, 3, 4]


def test_more_records_than_sixteen_bits_count() -> None:
    sizes = {str(i): 0 for i in range(70_000)}
    built = torch_zip.build(b"\x80\x02N.", sizes, prefix="many", path="many.pt")
    data = assembled(built, dict.fromkeys(sizes, b""))
    assert len(torch_zip.parse(BytesReader(data))) == 70_006
