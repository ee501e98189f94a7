"""Build the states of a disk that a power failure may leave, from a journal of disk operations."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tests.faults.disks import Operation


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
