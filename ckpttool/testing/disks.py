"""Inject faults into disk operations of ranks, and build the states that a power failure may leave."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.storage import direct_io, local, local_writer, posix, removal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    import pytest

CHANGES = ("create", "pwrite", "ftruncate", "fsync", "rename", "unlink", "mkdir", "rmdir")
"""Operations that change the disk; a crash may come before, during or after each of them."""
READS = ("open", "pread", "preadv", "scandir", "fstat", "statvfs")
"""Operations that change nothing, and may only fail."""


class Killed(BaseException):
    """A rank was killed; the code under test must not catch this."""


@dataclass(frozen=True)
class Fault:
    """A fault at one operation."""

    rank: int
    number: int
    """Number of the operation, counted from 0 for each rank."""
    how: str
    """"before", "amid" (half of the bytes are written) or "after": the rank dies. "short": half is written, and the
    caller told so. The name of an errno: the operation fails."""
    everyone: bool = False
    """Whether all ranks die, instead of only this one."""

    @property
    def kills(self) -> bool:
        return self.how in {"before", "amid", "after"}


@dataclass(frozen=True)
class Operation:
    """A change of the disk."""

    rank: int
    number: int
    name: str
    arguments: tuple[Any, ...]
    """Arguments of the call; a file descriptor is replaced by its path and a unique number of the file."""


@dataclass
class Machine:
    """Records the operations of all ranks since the last reset, and injects a fault."""

    fault: Fault | None = None
    dead: set[int] = field(default_factory=set)
    names: dict[int, list[str]] = field(default_factory=dict)
    """Operations of each rank, in order."""
    journal: list[Operation] = field(default_factory=list)
    """All changes of all ranks, in order."""
    struck: bool = False
    """Whether the fault has happened."""
    _local: threading.local = field(default_factory=threading.local)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _files: dict[int, tuple[str, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _created: dict[str, int] = field(default_factory=dict)

    def reset(self, fault: Fault | None = None) -> None:
        """Drop the recorded operations, and revive all ranks."""
        self.fault, self.struck = fault, False
        self.dead, self.names, self.journal = set(), {}, []

    @property
    def rank(self) -> int | None:
        """Rank of the calling thread; None for a thread of no rank."""
        return getattr(self._local, "rank", None)

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._local.rank = rank

    def living(self) -> None:
        """Raise Killed in a dead rank."""
        if self.rank in self.dead:
            raise Killed

    def kill(self, *, everyone: bool = False) -> None:
        assert self.rank is not None
        self.dead |= set(range(8)) if everyone else {self.rank}
        raise Killed

    def do(self, name: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run an operation, or inject the fault."""
        if self.rank is None:
            return real(*arguments, **options)
        if name == "close" and self.rank in self.dead:
            real(*arguments)  # as the kernel does when a process ends
        self.living()
        if name == "close":
            return real(*arguments)
        if name == "open" and arguments[1] & os.O_CREAT:
            name = "create"
        name = {"replace": "rename"}.get(name, name)
        with self._lock:  # so that the journal has the real order
            self.living()
            number = len(self.names.setdefault(self.rank, []))
            self.names[self.rank].append(name)
            fault = self.fault
            if fault is None or (fault.rank, fault.number) != (self.rank, number):
                return self._really(name, real, number, *arguments, **options)
            self.struck = True
            if fault.how in errno.errorcode.values():
                code = getattr(errno, fault.how)
                raise OSError(code, os.strerror(code))
            if fault.how in {"amid", "short"}:
                fd, data, start = arguments
                done = self._really(name, real, number, fd, data[: max(1, len(data) // 2)], start)
                return done if fault.how == "short" else self.kill(everyone=fault.everyone)
            if fault.how == "after":
                result = self._really(name, real, number, *arguments, **options)
                if name in {"create", "open"}:
                    os.close(result)
                if name == "scandir":
                    result.close()
            return self.kill(everyone=fault.everyone)

    def _really(self, name: str, real: Callable[..., Any], number: int, *arguments: Any, **options: Any) -> Any:
        # Without a real sync, which would only wear out the disk of the tests.
        result: Any = None if name == "fsync" else real(*arguments, **options)
        if name in {"create", "open"}:
            path = os.fspath(arguments[0])
            if name == "create" or path not in self._created:
                self._created[path] = next(self._numbers)
            self._files[result] = (path, self._created[path])
        if name in CHANGES:
            what: tuple[Any, ...] = arguments
            if name == "create":
                what = self._files[result]
            elif name in {"pwrite", "ftruncate", "fsync"}:
                what = (self._files[arguments[0]], *arguments[1:])
                if name == "pwrite":
                    what = (what[0], bytes(what[1]), what[2])
            self.journal.append(Operation(self.rank or 0, number, name, what))
        return result


class _Os:
    """Replaces the module ``os``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        watched = name in CHANGES or name in READS or name in {"replace", "close"}
        return partial(self._machine.do, name, real) if watched else real


def _remove_tree(recorded: _Os, path: str) -> None:
    """Replaces ``removal.remove_tree``, so that the machine records each operation."""
    with recorded.scandir(path) as found:
        entries = sorted(found, key=lambda e: e.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(recorded, entry.path)
        else:
            recorded.unlink(entry.path)
    recorded.rmdir(path)


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine record all disk operations of the code under test, with direct I/O also on tmpfs."""
    monkeypatch.setattr(local_writer, "PART_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(local_writer.LocalWriter, "part_bytes", mmap.PAGESIZE)
    monkeypatch.setattr(local_writer, "FILE_SYSTEMS", {*direct_io.FILE_SYSTEMS, "tmpfs"})
    for module in (local_writer, direct_io, posix, local, removal):
        monkeypatch.setattr(module, "os", _Os(machine))
    monkeypatch.setattr(removal, "remove_tree", partial(_remove_tree, _Os(machine)))
    monkeypatch.setattr(local_writer, "rename_new", partial(machine.do, "rename", posix.rename_new))


# ---------------------------------------------------------------------------------------------------- power failures


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None
    """Durable bytes; None if the file is not durable."""
    modified: int = 0


@dataclass(eq=False)
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    safe: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, _File | _Directory | None]] = field(default_factory=list)
    """Changes of names that are not durable: the removed name, the added name, and the file or directory."""

    def change(self, gone: str | None, come: str | None, what: _File | _Directory | None) -> None:
        self.pending.append((gone, come, what))
        _apply(self.entries, (gone, come, what))


def _apply(entries: dict[str, _File | _Directory], change: tuple[str | None, str | None, Any]) -> None:
    gone, come, what = change
    if gone is not None:
        entries.pop(gone, None)
    if come is not None:
        entries[come] = what


Tree = dict[str, "tuple[bytes, int] | None"]
"""Files (bytes, and the order of the last change) and directories (None), by path."""


class PowerFailure:
    """Builds the states of a disk that POSIX allows after a power failure: changes without a sync may be lost.

    Source: POSIX, fsync() and rename(): a rename is atomic; all other changes without a sync may be lost in any order.
    The sync of a file does not make its name durable.

    Args:
        root: A directory; its present content is durable.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._top = _Directory()
        self._open: dict[int, _File] = {}
        self._now = 1_000_000
        found = [os.path.join(above, n) for above, _, names in os.walk(root) for n in names]
        found.sort(key=lambda p: os.stat(p).st_mtime_ns)
        for above, directories, _ in os.walk(root):
            for name in directories:
                self._directory(os.path.join(above, name), make=True)
        for number, path in enumerate(found):
            with open(path, "rb") as file:
                data = file.read()
            directory, name = self._split(path)
            directory.entries[name] = directory.safe[name] = _File(bytearray(data), data, number)

    def _directory(self, path: str, *, make: bool = False) -> _Directory:
        at = self._top
        for part in [p for p in os.path.relpath(path, self.root).split("/") if p != "."]:
            if make and part not in at.entries:
                at.entries[part] = at.safe[part] = _Directory()
            below = at.entries[part]
            assert isinstance(below, _Directory)
            at = below
        return at

    def _split(self, path: str) -> tuple[_Directory, str]:
        return self._directory(os.path.dirname(path)), os.path.basename(path)

    def apply(self, operation: Operation) -> None:
        """Apply an operation."""
        self._now += 1
        name, arguments = operation.name, operation.arguments
        if name == "create":
            path, number = arguments
            directory, base = self._split(path)
            file = directory.entries.get(base)
            if file is None:
                file = _File(modified=self._now)
                directory.change(None, base, file)
            assert isinstance(file, _File)
            file.data.clear()  # O_TRUNC
            self._open[number] = file
        elif name in {"pwrite", "ftruncate"}:
            file = self._open[arguments[0][1]]
            file.modified = self._now
            if name == "pwrite":
                _, data, start = arguments
                file.data.extend(bytes(max(0, start + len(data) - len(file.data))))
                file.data[start : start + len(data)] = data
            else:
                file.data.extend(bytes(max(0, arguments[1] - len(file.data))))
                del file.data[arguments[1] :]
        elif name == "fsync":
            path, number = arguments[0]
            if number in self._open:
                self._open[number].synced = bytes(self._open[number].data)
            else:
                directory = self._directory(path)
                directory.safe, directory.pending = dict(directory.entries), []
        elif name == "rename":
            before, after = arguments
            (directory, gone), (other, come) = self._split(before), self._split(after)
            assert directory is other
            directory.change(gone, come, directory.entries[gone])
        elif name == "mkdir":
            directory, base = self._split(arguments[0])
            directory.change(None, base, _Directory())
        else:
            assert name in {"unlink", "rmdir"}
            directory, base = self._split(arguments[0])
            directory.change(base, None, None)

    def states(self, random: Random, *, some: int) -> Iterator[Tree]:
        """Yield possible states: all or no changes, each change of a name without a sync alone, and random ones."""
        changes = [(d, i) for d in self._directories(self._top) for i in range(len(d.pending))]
        everything, nothing = set(_keyed(changes)), set[tuple[int, int]]()
        for data in ("lost", "kept", "torn"):
            yield self._tree(everything, data, random)
            yield self._tree(nothing, data, random)
        for change in _keyed(changes):
            yield self._tree(everything - {change}, "lost", random)
            yield self._tree(everything - {change}, "kept", random)
            yield self._tree({change}, "lost", random)
            yield self._tree({change}, "kept", random)
        for _ in range(some):
            yield self._tree({c for c in _keyed(changes) if random.random() < 0.5}, "random", random)

    def _directories(self, directory: _Directory) -> Iterator[_Directory]:
        """Yield all directories that may exist, including removed ones that may reappear."""
        yield directory
        seen = set()
        inside = [*directory.safe.values(), *(what for _, _, what in directory.pending)]
        for entry in inside:
            if isinstance(entry, _Directory) and id(entry) not in seen:
                seen.add(id(entry))
                yield from self._directories(entry)

    def _tree(self, kept: set[tuple[int, int]], data: str, random: Random) -> Tree:
        tree: Tree = {}

        def visit(directory: _Directory, path: str) -> None:
            entries = dict(directory.safe)
            for i, change in enumerate(directory.pending):
                if (id(directory), i) in kept:
                    _apply(entries, change)
            for name, entry in entries.items():
                if isinstance(entry, _Directory):
                    tree[path + name] = None
                    visit(entry, f"{path}{name}/")
                else:
                    tree[path + name] = (_content(entry, data, random), entry.modified)

        visit(self._top, "")
        return tree


def _keyed(changes: list[tuple[_Directory, int]]) -> list[tuple[int, int]]:
    return [(id(directory), i) for directory, i in changes]


def _content(file: _File, data: str, random: Random) -> bytes:
    current, safe = bytes(file.data), file.synced
    if data == "random":
        data = random.choice(["lost", "kept", "torn", "zeros"])
    if current == safe or data == "kept":
        return current
    if data == "lost":
        return safe or b""
    if data == "zeros":
        return bytes(len(current))  # the disk has the size of the file, but not its bytes
    half = len(current) // 2
    return current[:half] + bytes(len(current) - half)


def build(tree: Tree, root: str) -> None:
    """Write a tree to disk, into a new directory."""
    os.mkdir(root)
    for name in sorted(tree):
        entry, path = tree[name], os.path.join(root, name)
        if entry is None:
            os.mkdir(path)
            continue
        with open(path, "wb") as file:
            file.write(entry[0])
        os.utime(path, (1_000_000_000 + entry[1],) * 2)
