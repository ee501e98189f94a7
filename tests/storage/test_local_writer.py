"""Files are written byte for byte, with direct I/O or through the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import StorageError
from ckpttool.storage import local, local_writer
from ckpttool.storage.local_writer import LocalWriter
from ckpttool.storage.streams import write_stream
from tests.saving.conftest import in_memory
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

PAGE = mmap.PAGESIZE


class _Os:
    """The module ``os``, but for how files are written."""

    def __init__(self, pwrite: Callable[[int, Any, int], int]) -> None:
        self.pwrite = pwrite
        self.direct: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        if flags & os.O_DIRECT:
            self.direct.append(fd)
        return fd


def _use(fake: _Os, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local_writer, local_writer, local):
        monkeypatch.setattr(module, "os", fake)


def _write(path: Path, parts: Iterable[bytes], nbytes: int, file_system: str = "ext4") -> bytes:
    writer = LocalWriter(str(path), nbytes, reserved=True, part_bytes=PAGE, file_system=file_system)
    try:
        write_stream(writer, parts, at_once=1)
        writer.commit()
    except BaseException:
        writer.discard()
        raise
    return path.read_bytes()


@pytest.mark.linux
@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 100, 20 * PAGE])
@pytest.mark.parametrize("kind", ["ext4", "nfs4", ""])
def test_sizes(nbytes: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def pwrite(fd: int, data: Any, start: int) -> int:
        if fd in fake.direct:
            written.append(start)
        return os.pwrite(fd, data, start)

    fake = _Os(pwrite)
    _use(fake, monkeypatch)
    data = os.urandom(nbytes)
    assert _write(tmp_path / "f", [data], len(data), kind) == data
    # Only whole blocks, and only where the file system is known for it.
    assert written == (list(range(0, nbytes - PAGE + 1, PAGE)) if kind == "ext4" and fake.direct else [])
    assert bool(fake.direct) <= (kind == "ext4" and nbytes >= PAGE)


@given(parts=st.lists(st.integers(0, 3 * PAGE), max_size=8), again=st.lists(st.integers(0, 2 * PAGE), max_size=3))
def test_parts_are_joined(parts: list[int], again: list[int]) -> None:
    with in_memory() as directory:
        for sizes in (parts, again):  # what a file before has left in memory is not to be seen
            sent = [os.urandom(n) for n in sizes]
            assert _write(directory / "f", sent, sum(sizes)) == b"".join(sent)


@pytest.mark.linux
@pytest.mark.parametrize("how", ["another alignment", "short", "none"])
def test_a_disk_that_takes_less(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: Any, start: int) -> int:
        if fd in fake.direct:
            if how == "another alignment":
                raise OSError(errno.EINVAL, "no")
            return os.pwrite(fd, data[:512], start) if how == "short" else 0
        return os.pwrite(fd, data[: 1 + len(data) // 2], start)

    fake = _Os(pwrite)
    _use(fake, monkeypatch)
    data = os.urandom(5 * PAGE + 7)
    assert _write(tmp_path / "f", [data[:9], data[9:]], len(data)) == data


@pytest.mark.linux
def test_a_file_system_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDirect(_Os):
        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return super().open(path, flags, mode)

    _use(NoDirect(os.pwrite), monkeypatch)
    data = os.urandom(3 * PAGE)
    assert _write(tmp_path / "f", [data], len(data)) == data


@pytest.mark.linux
@pytest.mark.parametrize("at", [0, PAGE, 4 * PAGE])
def test_a_disk_that_fails(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: Any, start: int) -> int:
        if start == at:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(fd, data, start)

    _use(_Os(pwrite), monkeypatch)
    path = tmp_path / "f"
    before = len(os.listdir("/proc/self/fd"))
    with refused(StorageError):
        _write(path, (bytes(PAGE) for _ in range(8)), 8 * PAGE)
    assert os.listdir(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpttool-pack")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_fails(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(PAGE)
        raise RuntimeError("the device is gone")

    path = tmp_path / "f"
    with pytest.raises(RuntimeError, match="the device is gone"):
        _write(path, parts(), 2 * PAGE)
