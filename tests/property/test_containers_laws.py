"""Laws of the containers: written files are read back, and no bytes run code or crash a reader."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import pickle as python_pickle
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers import torch_zip, unpickler
from ckpttool.containers.pickler import pickle
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType, walk
from ckpttool.dtypes import BY_STORAGE_CLASS, DTYPES
from ckpttool.errors import CkptError, ContainerError
from tests.containers.cases import FILES, FIXTURES
from tests.damage import assembled
from tests.hostile import BytesReader, attacks, bombs, zip_file

if TYPE_CHECKING:
    from collections.abc import Iterator

# ------------------------------------------------------------------------------------------------- strategies

names = st.text(st.characters(codec="utf-8", exclude_characters="\n\r/\0"), min_size=1, max_size=8)
identifiers = st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,6}", fullmatch=True)
modules = st.builds(".".join, st.lists(identifiers, min_size=1, max_size=3))
texts = st.text(st.characters(), max_size=12)
integers = st.one_of(st.integers(-300, 70_000), st.integers(), st.integers(-(1 << 2100), 1 << 2100))
scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(), texts, st.binary(max_size=12))
keys = st.one_of(
    scalars, st.complex_numbers(), st.tuples(scalars, scalars), st.frozensets(st.integers(0, 99), max_size=3)
)


@st.composite
def tensors(draw: st.DrawFn) -> TensorRef:
    """A tensor that fits its storage, scalars and empty ones among them."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(draw(st.integers(0, 5)) for _ in shape)
    offset = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    storage_class = DTYPES[dtype].storage
    span = TensorRef(StorageRef("", "", dtype, "", 0), dtype, offset, shape, stride).span
    numel = span + draw(st.integers(0, 2))
    # One key always means one size, as in a file.
    if storage_class is None:
        nbytes = numel * DTYPES[dtype].itemsize
        storage = StorageRef(f"u{nbytes}", "UntypedStorage", "U8", "cpu", nbytes)
    else:
        storage = StorageRef(f"{dtype}{numel}", storage_class, dtype, draw(st.sampled_from(["cpu", "cuda:3"])), numel)
    parameter = draw(st.booleans())
    attributes = draw(st.none() | st.dictionaries(identifiers, scalars, max_size=2))
    return TensorRef(storage, dtype, offset, shape, stride, draw(st.booleans()), parameter, attributes)


def _ordered(content: dict[Any, Any], attributes: dict[str, Any] | None) -> OrderedDict:
    made = OrderedDict(content)
    made.attributes = attributes
    return made


def _object(module: str, name: str, how: str, args: tuple[Any, ...], state: Any, parts: tuple[Any, Any]) -> Opaque:
    made = Opaque(f"x{module}", name, how, () if how == "global" else args)
    if how != "global":
        made.items, made.appended = parts
        made.state, made.stated = state, state is not None
    return made


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    tuples = st.builds(tuple, lists)
    dicts = st.dictionaries(keys, inner, max_size=4)
    parts = st.tuples(st.lists(st.tuples(scalars, inner), max_size=2), st.lists(inner, max_size=2))
    qualified = st.builds(".".join, st.lists(identifiers, min_size=1, max_size=2))
    hows = st.sampled_from(["global", "call", "new"])
    objects = st.builds(_object, modules, qualified, hows, tuples, st.none() | dicts, parts)
    ordered = st.builds(_ordered, dicts, st.none() | dicts)
    return st.one_of(lists, tuples, dicts, objects, ordered)


leaves = st.one_of(
    scalars,
    st.complex_numbers(),
    st.builds(bytearray, st.binary(max_size=5)),
    st.builds(Size, st.lists(st.integers(0, 1 << 40), max_size=4)),
    st.sampled_from([TorchDType(d.torch) for d in DTYPES.values()]),
    st.sets(keys, max_size=3),
    st.frozensets(keys, max_size=3),
    tensors(),
)
structures = st.recursive(leaves, _containers, max_leaves=12)
plain = st.recursive(
    st.one_of(scalars, st.complex_numbers(), st.binary(), st.builds(bytearray, st.binary(max_size=5))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.builds(tuple, st.lists(inner, max_size=4)),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
    ),
    max_leaves=15,
)


def described(value: Any) -> Any:
    """A value in a form in which equal means the same: types, order, NaN and -0.0 included."""
    if isinstance(value, float | complex):
        return type(value).__name__, repr(value)
    if isinstance(value, dict):
        attributes = described(getattr(value, "attributes", None))
        return type(value).__name__, [(described(k), described(v)) for k, v in value.items()], attributes
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(v) for v in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(described(v)) for v in value)
    if isinstance(value, Opaque):
        content = [described(v) for v in (value.args, value.state, list(value.items), list(value.appended))]
        return value.how, value.module, value.name, value.stated, content
    if isinstance(value, TensorRef):
        return value, described(value.attributes)
    return type(value).__name__, value


# ------------------------------------------------------------------------------------------------- pickles


@given(structures)
def test_unpickle_undoes_pickle(value: Any) -> None:
    written = pickle(value, path="x")
    read = unpickle(written, path="x")
    assert described(read.value) == described(value)
    assert read.end == len(written)
    assert set(read.storages.values()) == {v for v in walk(read.value) if isinstance(v, StorageRef)}


@given(structures)
def test_pickle_undoes_unpickle(value: Any) -> None:
    written = pickle(value, path="x")
    assert pickle(unpickle(written, path="x").value, path="x") == written


@given(structures, st.binary(max_size=5), st.binary(max_size=5))
def test_pickle_between_other_bytes_is_read_alone(value: Any, before: bytes, after: bytes) -> None:
    written = pickle(value, path="x")
    read = unpickle(before + written + after, path="x", start=len(before))
    assert described(read.value) == described(value)
    assert read.end == len(before) + len(written)


@given(plain, st.integers(0, 5))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    written = python_pickle.dumps(value, protocol)
    assert described(unpickle(written, path="x").value) == described(python_pickle.loads(written))


@given(plain)
def test_plain_data_is_written_for_python_to_read(value: Any) -> None:
    assert described(python_pickle.loads(pickle(value, path="x"))) == described(value)


@given(structures, st.data())
def test_pickle_cut_off_anywhere_is_truncated(value: Any, data: st.DataObject) -> None:
    written = pickle(value, path="x")
    with pytest.raises(Truncated):
        unpickle(written[: data.draw(st.integers(0, len(written) - 1))], path="x")


# ------------------------------------------------------------------------------------------------- whatever the bytes


def _real_pickles() -> Iterator[bytes]:
    for name in FILES[:: len(FILES) // 8]:
        path = os.path.join(FIXTURES, name)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
    yield from attacks("pwned").values()
    yield from (data for data in bombs().values() if len(data) < 5000)


REAL = st.deferred(lambda: st.sampled_from(list(_real_pickles())))
OPCODES = bytes(i for i, (handler, _) in enumerate(unpickler.OPCODES) if handler is not unpickler.unknown) + b"."


def _is_safe(data: bytes) -> None:
    before = set(sys.modules)
    try:
        value = unpickle(data, path="x").value
        pickle(value, path="y")
    except Truncated:
        pass
    except CkptError as error:
        assert "\n" not in str(error)  # noqa: PT017
    assert set(sys.modules) == before


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_data(data: bytes) -> None:
    _is_safe(data)


@given(st.lists(st.sampled_from(OPCODES) | st.integers(0, 6), max_size=60))
def test_any_opcodes_are_refused_or_data(data: list[int]) -> None:
    _is_safe(bytes(data) + b".")


@given(REAL, st.data())
def test_real_pickle_with_any_damage_is_refused_or_data(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        start = draw.draw(st.integers(0, len(damaged)))
        end = min(len(damaged), start + draw.draw(st.integers(0, 8)))
        patch = draw.draw(st.binary(max_size=8) | st.lists(st.sampled_from(OPCODES), max_size=8).map(bytes))
        damaged[start:end] = patch
    _is_safe(bytes(damaged))


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02\x8a\x0alQ\xfc\x9cF\xf9 j\xa8P\x19."]),
)
def test_any_file_is_refused_or_read(data: bytes, head: bytes) -> None:
    try:
        read_torch_file(BytesReader(head + data))
    except ContainerError as error:
        assert str(error).startswith("run/file.pt: ")  # noqa: PT017


@given(st.data())
def test_archive_with_any_damage_is_refused_or_read(draw: st.DataObject) -> None:
    data = bytearray(zip_file(b"\x80\x02N.", {"0": b"abcdefgh"}))
    for _ in range(draw.draw(st.integers(1, 5))):
        at = draw.draw(st.integers(0, len(data) - 4))
        width = draw.draw(st.sampled_from([1, 2, 4]))
        data[at : at + width] = draw.draw(st.integers(0, (1 << 8 * width) - 1)).to_bytes(width, "little")
    try:
        file = read_torch_file(BytesReader(bytes(data)))
    except CkptError:
        return
    spans = sorted((r.where.start, r.where.end) for r in file.records)
    assert all(0 <= start <= end <= len(data) for start, end in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


# ------------------------------------------------------------------------------------------------- archives

archives = st.dictionaries(names.filter(lambda n: n not in {".", ".."}), st.binary(max_size=200), max_size=6)
prefixes = names.filter(lambda n: n not in {".", ".."})


@given(st.binary(max_size=300), archives, prefixes, st.booleans())
def test_parse_undoes_build(pickled: bytes, payloads: dict[str, bytes], prefix: str, with_checksums: bool) -> None:
    sizes = {key: len(data) for key, data in payloads.items()}
    built = torch_zip.build(pickled, sizes, prefix=prefix, path="x.pt")
    spans = [(offset, offset + len(data)) for offset, data in built.literals if data]
    spans += [(r.start, r.end) for r in built.payloads.values() if r.nbytes]
    spans.sort()
    # Literals and payloads fill the file exactly once.
    assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), built.nbytes]
    out = assembled(built, payloads, checksums=with_checksums)
    records = torch_zip.parse(BytesReader(out))
    assert {r.name: r.where for r in records if r.name.startswith(f"{prefix}/data/")} == {
        f"{prefix}/data/{key}": where for key, where in built.payloads.items()
    }
    assert all(where.start % torch_zip.ALIGNMENT == 0 for where in built.payloads.values())
    with zipfile.ZipFile(io.BytesIO(out)) as archive:
        assert archive.namelist() == records.names
        assert archive.read(f"{prefix}/data.pkl") == pickled
        if with_checksums:
            assert archive.testzip() is None


def test_every_typed_storage_is_drawn() -> None:
    assert {d.name for d in BY_STORAGE_CLASS.values()} < set(DTYPES)


@pytest.mark.parametrize("count", [1, 300], ids=["short references", "long references"])
def test_a_pickle_that_ends_in_any_opcode_is_cut_off(count: int) -> None:
    """A reader then fetches more bytes: a reference that is cut off must not be taken for a smaller one."""
    texts = [f"text {n}" for n in range(count)]
    data = python_pickle.dumps([*texts, *texts, 7, (1,), None], protocol=4)
    assert unpickle(data, path="x").value == [*texts, *texts, 7, (1,), None]
    for end in range(len(data)):
        with pytest.raises(Truncated):
            unpickle(data[:end], path="x")


def test_opcodes_without_a_handler_are_charged() -> None:
    data = b"\x80\x04N" + b"\x94" * 100_000 + b"."
    with pytest.raises(ContainerError, match="may take more than"):
        unpickle(data, path="x", max_memory_bytes=1 << 20)


def test_python_collects_cycles_again_after_a_large_pickle() -> None:
    data = python_pickle.dumps(bytes(unpickler.LARGE + 1))
    for cut in (0, 1):  # also after an error
        with contextlib.suppress(Truncated):
            unpickle(data[: len(data) - cut], path="x")
        assert gc.isenabled()


@given(structures)
def test_values_can_be_sent_to_other_ranks(value: Any) -> None:
    assert described(python_pickle.loads(python_pickle.dumps(value))) == described(value)
