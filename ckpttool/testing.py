"""Test the conformance of a ``WritableStorage``.

Subclass ``StorageTests`` in a test module and override the fixtures ``storage`` and ``root``::

    class TestMine(StorageTests):
        @pytest.fixture
        def storage(self):
            return MyStorage()

        @pytest.fixture
        def root(self):
            return "mine://bucket/run"
"""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckpttool.errors import StorageError
from ckpttool.ranges import ByteRange
from ckpttool.storage import MANIFEST, ExistsError, find_text, walk
from ckpttool.storage.base import MAX_TEXT_BYTES
from ckpttool.storage.streams import write_stream

if TYPE_CHECKING:
    from ckpttool.storage import WritableStorage


class StorageTests:
    """Conformance tests of one storage; override ``storage`` and ``root``."""

    hides_unfinished = True
    """Whether no reader sees a large file before its commit; some fsspec storages write to the final name."""

    @pytest.fixture
    def storage(self) -> WritableStorage:
        """The storage."""
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> str:
        """Path or URL of a directory that does not exist yet."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, storage: WritableStorage, root: str) -> str:
        """The root, after its creation."""
        storage.make_directory(root)
        return root

    # ------------------------------------------------------------------------------------------- small files

    def test_put_writes_all_bytes(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file", b"some", memoryview(b" bytes"))
        assert _content(storage, f"{made}/file") == b"some bytes"

    def test_put_writes_an_empty_file(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file")
        assert _content(storage, f"{made}/file") == b""

    def test_put_replaces(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file", b"the first, and longer")
        storage.put(f"{made}/file", b"the second")
        assert _content(storage, f"{made}/file") == b"the second"
        assert _names(storage, made) == {"file"}

    def test_put_new_replaces_nothing(self, storage: WritableStorage, made: str) -> None:
        assert storage.put_new(f"{made}/file", b"first") is True
        assert storage.put_new(f"{made}/file", b"second") is False
        assert _content(storage, f"{made}/file") == b"first"
        assert _names(storage, made) == {"file"}

    def test_put_new_replaces_the_version_it_was_told(self, storage: WritableStorage, made: str) -> None:
        path = f"{made}/file"
        storage.put(path, b"first")
        seen = _version(storage, made)
        assert storage.put_new(path, b"second", over=seen) is True
        assert _version(storage, made) != seen
        assert storage.put_new(path, b"third", over=seen) is False
        assert _content(storage, path) == b"second"

    def test_put_new_over_a_missing_file_writes_nothing(self, storage: WritableStorage, made: str) -> None:
        assert storage.put_new(f"{made}/file", b"x", over="a version") is False
        assert not storage.exists(f"{made}/file")

    def test_delete_ignores_missing_files(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/a", b"a")
        storage.put(f"{made}/b", b"b")
        storage.delete([f"{made}/a", f"{made}/missing"])
        assert _names(storage, made) == {"b"}

    # ------------------------------------------------------------------------------------------- files in parts

    @pytest.mark.parametrize("parts", [0, 0.3, 1, 2.4])
    def test_writer_writes_all_parts(self, storage: WritableStorage, made: str, parts: float) -> None:
        data = _bytes(int(parts * _part_bytes(storage, made)))
        writer = storage.writer(f"{made}/file", len(data))
        pieces = (data[at : at + 100_000] for at in range(0, len(data), 100_000))
        write_stream(writer, pieces, at_once=storage.parts_at_once)
        writer.commit()
        storage.sync(made)
        assert _content(storage, f"{made}/file") == data
        assert _names(storage, made) == {"file"}

    def test_nobody_sees_a_file_before_its_commit(self, storage: WritableStorage, made: str) -> None:
        data = _bytes(2 * _part_bytes(storage, made))
        writer = storage.writer(f"{made}/file", len(data))
        write_stream(writer, [data], at_once=storage.parts_at_once)
        storage.refresh([])
        assert not (self.hides_unfinished and storage.exists(f"{made}/file"))
        writer.commit()
        storage.refresh([])
        assert storage.exists(f"{made}/file")

    @pytest.mark.parametrize("parts", [0.3, 2])
    def test_discard_leaves_nothing(self, storage: WritableStorage, made: str, parts: float) -> None:
        data = _bytes(int(parts * _part_bytes(storage, made)))
        storage.put(f"{made}/other", b"x")
        writer = storage.writer(f"{made}/file", len(data))
        writer.write(0, data[: writer.part_bytes])
        writer.discard()
        assert _names(storage, made) == {"other"}

    @pytest.mark.parametrize("parts", [0.3, 2])
    def test_new_file_replaces_nothing(self, storage: WritableStorage, made: str, parts: float) -> None:
        path, data = f"{made}/file", _bytes(int(parts * _part_bytes(storage, made)))
        storage.put(path, b"another's")
        with pytest.raises(ExistsError):
            self._write_new(storage, path, data)
        storage.refresh([])
        assert _content(storage, path) == b"another's"
        assert _names(storage, made) == {"file"}

    @staticmethod
    def _write_new(storage: WritableStorage, path: str, data: bytes) -> None:
        writer = storage.writer(path, len(data), new=True)
        try:
            write_stream(writer, [data], at_once=storage.parts_at_once)
            writer.commit()
        except BaseException:
            writer.discard()
            raise

    # ------------------------------------------------------------------------------------------- reading

    def test_ranges(self, storage: WritableStorage, made: str) -> None:
        data = _bytes(300_000)
        storage.put(f"{made}/file", data)
        with storage.open(f"{made}/file") as reader:
            assert reader.nbytes == len(data)
            assert reader.read(1, 299_999) == data[1:299_999]
            wanted = [ByteRange(5, 9), ByteRange(200_000, 200_001), ByteRange(0, 0)]
            assert [bytes(found) for found in reader.read_many(wanted)] == [data[5:9], data[200_000:200_001], b""]
            into = bytearray(10)
            reader.read_into(7, memoryview(into))
            assert into == data[7:17]
            with pytest.raises(StorageError):
                reader.read(0, len(data) + 1)

    def test_a_file_that_was_replaced_is_noticed(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file", b"first")
        with storage.open(f"{made}/file") as reader:
            storage.put(f"{made}/file", b"other")
            storage.refresh([])
            other = storage.open(f"{made}/file")
            assert other.version != reader.version
            other.close()

    def test_a_small_text_or_none(self, storage: WritableStorage, made: str) -> None:
        assert find_text(storage, f"{made}/missing") is None
        storage.put(f"{made}/latest", b"")
        storage.refresh([])
        assert find_text(storage, f"{made}/latest") == ""
        storage.put(f"{made}/latest", "gr\u00fcn".encode())
        storage.refresh([])
        assert find_text(storage, f"{made}/latest") == "gr\u00fcn"
        storage.put(f"{made}/latest", b"\xff")
        storage.refresh([])
        with pytest.raises(StorageError, match="is not text"):
            find_text(storage, f"{made}/latest")
        storage.put(f"{made}/latest", bytes(MAX_TEXT_BYTES + 1))
        storage.refresh([])
        with pytest.raises(StorageError, match="too large"):
            find_text(storage, f"{made}/latest")

    def test_missing_file_is_an_error(self, storage: WritableStorage, made: str) -> None:
        assert not storage.exists(f"{made}/missing")
        with pytest.raises(StorageError):
            storage.open(f"{made}/missing").read(0, 1)

    def test_listing(self, storage: WritableStorage, made: str) -> None:
        storage.make_directory(f"{made}/below")
        storage.put(f"{made}/below/b", b"bb")
        storage.put(f"{made}/a", b"a")
        storage.refresh([])
        assert [(e.name, e.is_dir, e.nbytes) for e in storage.listing(made)] == [("a", False, 1), ("below", True, 0)]
        assert {name: e.nbytes for name, e in walk(storage, made)} == {"a": 1, "below/b": 2}
        assert storage.is_dir(f"{made}/below")
        assert not storage.is_dir(f"{made}/a")

    def test_another_process_can_read(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file", b"x")
        assert _content(pickle.loads(pickle.dumps(storage)), f"{made}/file") == b"x"

    # ------------------------------------------------------------------------------------------- directories

    def test_make_directory_twice(self, storage: WritableStorage, made: str) -> None:
        storage.make_directory(made)
        storage.make_directory(f"{made}/one/two")
        storage.put(f"{made}/one/two/file", b"x")
        assert _names(storage, made) == {"one/two/file"}

    def test_remove_tree(self, storage: WritableStorage, made: str) -> None:
        storage.make_directory(f"{made}/gone/below")
        for name in ("gone/a", f"gone/{MANIFEST}", "gone/below/b", "kept"):
            storage.make_directory(f"{made}/{name}".rpartition("/")[0])
            storage.put(f"{made}/{name}", b"x")
        storage.remove_tree(f"{made}/gone")
        assert _names(storage, made) == {"kept"}

    def test_rename_moves_all_or_says_no(self, storage: WritableStorage, made: str) -> None:
        storage.make_directory(f"{made}/before")
        storage.put(f"{made}/before/file", b"x")
        moved = storage.rename(f"{made}/before", f"{made}/after")
        assert _names(storage, made) == {"after/file" if moved else "before/file"}

    def test_move_tree_moves_all(self, storage: WritableStorage, made: str) -> None:
        storage.make_directory(f"{made}/before/below")
        storage.put(f"{made}/before/file", b"x")
        storage.put(f"{made}/before/below/file", b"y")
        storage.move_tree(f"{made}/before", f"{made}/after")
        assert _names(storage, made) == {"after/file", "after/below/file"}

    def test_abandon_leaves_committed_files(self, storage: WritableStorage, made: str) -> None:
        storage.put(f"{made}/file", b"x")
        storage.abandon(made)
        assert _names(storage, made) == {"file"}

    def test_free_bytes(self, storage: WritableStorage, made: str) -> None:
        free = storage.free_bytes(made)
        assert free is None or free > 0


class ConditionalWrites(StorageTests):
    """Conformance tests of a storage with atomic conditional writes: exactly one of several writers succeeds."""

    def test_one_of_many_writers_wins(self, storage: WritableStorage, made: str) -> None:
        path = f"{made}/file"
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n: storage.put_new(path, bytes([n]) * 100), range(8)))
        assert sum(won) == 1
        storage.refresh([])
        assert _content(storage, path) == bytes([won.index(True)]) * 100


def _bytes(count: int) -> bytes:
    return bytes(range(256)) * (count // 256) + bytes(range(count % 256))


def _part_bytes(storage: WritableStorage, root: str) -> int:
    """Return the part size of the storage."""
    writer = storage.writer(f"{root}/probe", 1)
    writer.discard()
    return writer.part_bytes


def _content(storage: WritableStorage, path: str) -> bytes:
    storage.refresh([])
    with storage.open(path) as reader:
        return reader.read(0, reader.nbytes)


def _names(storage: WritableStorage, path: str) -> set[str]:
    storage.refresh([])
    return {name for name, _ in walk(storage, path)}


def _version(storage: WritableStorage, root: str) -> str:
    storage.refresh([])
    return next(entry.version for entry in storage.listing(root) if entry.name == "file")
