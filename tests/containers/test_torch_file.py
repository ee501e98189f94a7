"""Our reader, without torch, reads every file of ``torch.save`` like ``torch.load``."""

from __future__ import annotations

import collections
import io
import itertools
import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import Opaque, StorageRef, TensorRef, walk
from ckpttool.errors import CkptError, ContainerError
from ckpttool.storage import LocalReader
from tests import sampling
from tests.containers.cases import CASES, FILES, FIXTURES, OF_CHECKPOINTS, Case, module_state
from tests.containers.oracle import assert_reads_as_torch_loads, read
from tests.hostile import BytesReader
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpttool.containers.unpickler import Unpickled


@pytest.mark.parametrize("checkpoint", sampling.some(OF_CHECKPOINTS, 66, key="files"))
def test_fixtures_read_as_torch_loads(checkpoint: str) -> None:
    for name in OF_CHECKPOINTS[checkpoint]:
        assert_reads_as_torch_loads(os.path.join(FIXTURES, name))


def test_fixtures_are_there_in_both_forms() -> None:
    forms = collections.Counter(read(os.path.join(FIXTURES, name)).form for name in FILES)
    assert forms["zip"] >= 70
    assert forms["legacy"] >= 3


in_both_forms = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@in_both_forms
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_reads_as_torch_loads(case: Case, zipped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.save(case.make(), path, _use_new_zipfile_serialization=zipped)
    if not zipped and any(
        r.storage_class == "UntypedStorage" for r in walk(read(path).root) if isinstance(r, StorageRef)
    ):
        pytest.skip("torch.load itself fails on the newer dtypes in the legacy form")
    assert_reads_as_torch_loads(path)


@in_both_forms
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int, zipped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    value = {
        "t": torch.ones(3),
        "s": {1, 2},
        "b": b"x" * 300,
        "f": frozenset([1]),
        "shape": torch.Size([1]),
        "o": module_state(),
    }
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert_reads_as_torch_loads(path)


def test_a_file_written_without_checksums_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3), "empty": torch.empty(0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_reads_as_torch_loads(path)
    assert not any(r.crc_recorded for r in read(path).records if r.where.nbytes)


def test_a_file_written_to_a_stream_is_read() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    file = read_torch_file(BytesReader(stream.getvalue()))
    assert {r.name.split("/")[0] for r in file.records} == {"archive"}
    assert file.root["a"].shape == (3,)


def test_reading_takes_no_tensor_bytes() -> None:
    stream = io.BytesIO()
    torch.save({str(i): torch.ones(10_000) for i in range(50)}, stream)
    reader = BytesReader(stream.getvalue())
    read_torch_file(reader)
    assert reader.bytes_read < 50_000 < reader.nbytes


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "_rebuild_tensor_v2"),
        (lambda: torch.empty(3, device="meta"), "_rebuild_meta_tensor_no_storage"),
    ],
    ids=["sparse", "quantized", "conjugated", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_of_another_kind_is_opaque_or_refused(make: Callable[[], Any], function: str, tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.save({"odd": make(), "plain": torch.ones(2)}, path)
    try:
        root = read(path).root
    except ContainerError as error:
        assert "QInt8Storage, a type that ckpttool does not read" in str(error)  # noqa: PT017
        return
    assert isinstance(root["odd"], Opaque)
    assert root["odd"].name == function
    assert isinstance(root["plain"], TensorRef)


def test_every_container_is_walked_once() -> None:
    shared = [torch.ones(2)]
    stream = io.BytesIO()
    torch.save({"a": shared, "b": shared}, stream)
    root = read_torch_file(BytesReader(stream.getvalue())).root
    assert root["a"] is root["b"]
    assert sum(isinstance(v, TensorRef) for v in walk(root)) == 1


def test_a_tensor_that_is_not_contiguous_has_no_one_range(tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.save(torch.arange(6).view(2, 3).t(), path)
    file = read(path)
    with refused(ContainerError):
        file.locate(file.root)


def test_equal_pickles_are_read_once_and_each_file_keeps_its_own_places(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"]
    torch.save({"x": torch.zeros(3), "pad": torch.zeros(1)}, paths[0])
    torch.save({"x": torch.ones(3), "pad": torch.zeros(1)}, paths[1])
    torch.save({"x": torch.ones(4), "pad": torch.zeros(1)}, paths[2])
    known: dict[bytes, Unpickled] = {}
    files = []
    for path in paths:
        with LocalReader(str(path)) as reader:
            files.append(read_torch_file(reader, known))
    assert files[0].root is files[1].root
    assert files[0].root is not files[2].root
    data = [path.read_bytes() for path in paths]
    read = [d[w.start : w.end] for f, d in zip(files, data, strict=True) for w in [f.locate(f.root["x"])]]
    assert read == [np.full(n, v, np.float32).tobytes() for n, v in ((3, 0), (3, 1), (4, 1))]


def test_a_bit_of_the_directory_that_torch_needs_is_never_accepted() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(5.0), "b": [torch.ones(2, dtype=torch.bfloat16), "text"]}, file)
    sound = file.getvalue()
    refused = 0
    for at, bit in itertools.product(range(sound.index(b"PK\x01\x02"), len(sound)), range(8)):
        changed = bytearray(sound)
        changed[at] ^= 1 << bit
        try:
            torch.load(io.BytesIO(changed), weights_only=True)
        except Exception:
            with pytest.raises(CkptError):
                read_torch_file(BytesReader(bytes(changed)))
            refused += 1
    assert refused > 1000


def test_an_entry_of_a_directory_is_no_fault() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(5.0)}, file)
    with zipfile.ZipFile(file) as saved, zipfile.ZipFile(io.BytesIO(), "w") as again:
        directory = zipfile.ZipInfo("archive/")
        directory.external_attr = 0x10
        again.writestr(directory, b"")
        for record in saved.infolist():
            again.writestr(record.filename, saved.read(record))
        changed = again.fp
        assert changed is not None
    changed.seek(0)
    data = changed.read()
    assert torch.load(io.BytesIO(data))["a"].tolist() == [0, 1, 2, 3, 4]
    assert "a" in read_torch_file(BytesReader(data)).root
