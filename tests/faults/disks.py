"""Inject faults into disk operations of ranks and commands, and record them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from ckpttool.storage import local_writer, removal, system_calls
from tests.faults.rules import Before, Fail, Kill, Nothing, Rule, Short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

CHANGES = ("create", "pwrite", "ftruncate", "fsync", "rename", "unlink", "mkdir", "rmdir")
"""Operations that change the disk; a crash may come before, during or after each of them."""
READS = ("open", "pread", "preadv", "scandir", "fstat", "statvfs")
"""Operations that change nothing, and may only fail."""
OF_COMMANDS = (
    "open", "create", "mkdir", "ftruncate", "pwrite", "pread", "preadv", "copy_file_range", "rename",
    "unlink", "listdir",
)  # fmt: skip
"""Operations by which a command reads its source and writes its output."""
_PATCHED = {name for name in ({*CHANGES, *READS, *OF_COMMANDS} | {"replace", "close"}) if hasattr(os, name)}
"""Functions of the module ``os``; ``open`` also creates files, and ``replace`` renames them."""


class Killed(BaseException):
    """A rank was killed; the code under test must not catch this."""


@dataclass(frozen=True)
class Fault:
    """A fault at one operation of one rank."""

    rank: int
    number: int
    """Number of the operation, counted from 0 for each rank."""
    how: str
    """``Kill.where`` (the rank dies), "short" (half is written), or ``Fail.code``."""
    everyone: bool = False
    """Whether all ranks die, instead of only this one."""

    def rule(self) -> Rule:
        """Return the rule that injects this fault."""
        action: Any = Short() if self.how == "short" else Fail(self.how)
        if self.how in {"before", "amid", "after"}:
            action = Kill(self.how, self.everyone)
        return Rule(action, when=lambda call: call.rank == self.rank, nth=self.number + 1)


@dataclass(frozen=True)
class DiskCall:
    """A disk operation before it is done; a ``faults.Call``."""

    rank: int
    number: int
    """Number of the operation, counted from 0 for each rank."""
    operation: str
    target: str
    """Path; "" if the operation takes only a descriptor that was opened elsewhere."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for repeats of one operation."""
        return str(self.rank), self.operation, self.target


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
    """Records the operations of all ranks since the last reset, and injects faults.

    A rank is a thread that has set ``rank``. In ``watching`` all threads together are rank 0.
    """

    rules: list[Rule] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    names: dict[int, list[str]] = field(default_factory=dict)
    """Operations of each rank, in order."""
    journal: list[Operation] = field(default_factory=list)
    """All changes of all ranks, in order."""
    keeps_journal: bool = True
    """Whether to record every operation with its bytes, in memory."""
    default_rank: int | None = None
    """Rank of a thread that has set none."""
    _local: threading.local = field(default_factory=threading.local)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _files: dict[int, tuple[str, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _created: dict[str, int] = field(default_factory=dict)

    def reset(self, *rules: Rule) -> None:
        """Drop the recorded operations, and revive all ranks."""
        self.rules = list(rules)
        self.dead, self.names, self.journal = set(), {}, []

    @property
    def rank(self) -> int | None:
        """Rank of the calling thread; None for a thread of no rank."""
        return getattr(self._local, "rank", self.default_rank)

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._local.rank = rank

    def living(self) -> None:
        """Raise Killed in a dead rank."""
        if self.rank in self.dead:
            raise Killed

    def kill(self, rank: int, *, everyone: bool = False) -> None:
        """Mark a rank, or all ranks, as dead."""
        self.dead |= set(range(8)) if everyone else {rank}

    def begin(self, rank: int, name: str, target: str = "") -> Rule | None:
        """Count an operation of a rank; return the rule that acts on it."""
        with self._lock:
            done = self.names.setdefault(rank, [])
            call = DiskCall(rank, len(done), name, target)
            done.append(name)
            due = [rule for rule in self.rules if rule.due(call)]
            for rule in due:
                rule.done += 1
                if isinstance(rule.action, Before):
                    rule.action.call(call)
            return next((rule for rule in due if not isinstance(rule.action, Before | Nothing)), None)

    def do(self, name: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run an operation, or inject the fault."""
        rank = self.rank
        if rank is None:
            return real(*arguments, **options)
        if name == "close" and rank in self.dead:
            real(*arguments)  # as the kernel does when a process ends
        self.living()
        if name == "close":
            return real(*arguments)
        if name == "open" and arguments[1] & os.O_CREAT:
            name = "create"
        name = {"replace": "rename"}.get(name, name)
        with self._lock:  # so that the journal has the real order
            self.living()
            rule = self.begin(rank, name, self._target(arguments))
            run = partial(self._really, rank, name, real)
            if rule is None:
                return run(*arguments, **options)
            match rule.action:
                case Fail(code=code):
                    number = getattr(errno, code)
                    raise OSError(number, os.strerror(number))
                case Short():
                    return run(*_half(arguments))
                case Kill(where="amid") if name == "pwrite":  # threads may have changed the order of calls
                    run(*_half(arguments))
                case Kill(where="after"):
                    result = run(*arguments, **options)
                    if name in {"create", "open"}:
                        os.close(result)
                    if name == "scandir":
                        result.close()
            self.kill(rank, everyone=rule.action.everyone)
            raise Killed

    def _target(self, arguments: tuple[Any, ...]) -> str:
        first = arguments[0] if arguments else ""
        if isinstance(first, int):
            return self._files.get(first, ("", 0))[0]
        return os.fsdecode(first)

    def _really(self, rank: int, name: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # Without a real sync, which would only wear out the disk of the tests.
        result: Any = None if name == "fsync" else real(*arguments, **options)
        if name in {"create", "open"}:
            path = os.fspath(arguments[0])
            if name == "create" or path not in self._created:
                self._created[path] = next(self._numbers)
            self._files[result] = (path, self._created[path])
        if name in CHANGES and self.keeps_journal:
            what: tuple[Any, ...] = arguments
            if name == "create":
                what = self._files[result]
            elif name in {"pwrite", "ftruncate", "fsync"}:
                what = (self._files[arguments[0]], *arguments[1:])
                if name == "pwrite":
                    what = (what[0], bytes(what[1]), what[2])
            self.journal.append(Operation(rank, len(self.names[rank]) - 1, name, what))
        return result


def _half(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    fd, data, start = arguments
    return fd, data[: max(1, len(data) // 2)], start


def _remove_tree(path: str) -> None:
    """Replaces ``removal.remove_tree``: its operations name paths, as the journal needs them."""
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda e: e.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine record the disk operations of all ranks, with direct I/O in small parts, also on tmpfs."""
    monkeypatch.setattr(local_writer, "PART_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(local_writer, "FILE_SYSTEMS", {*local_writer.FILE_SYSTEMS, "tmpfs"})
    for name in sorted(_PATCHED):
        monkeypatch.setattr(os, name, partial(machine.do, name, getattr(os, name)))
    monkeypatch.setattr(removal, "remove_tree", _remove_tree)
    monkeypatch.setattr(local_writer, "rename_new", partial(machine.do, "rename", system_calls.rename_new))


@contextlib.contextmanager
def watching(*rules: Rule) -> Iterator[Machine]:
    """Context manager: let rules act on the disk operations of the body, in all its threads.

    Args:
        *rules: Rules whose operations are of ``OF_COMMANDS``.
    """
    machine = Machine(list(rules), keeps_journal=False, default_rank=0)
    with contextlib.ExitStack() as stack:
        for name in sorted(_PATCHED):
            stack.enter_context(mock.patch.object(os, name, partial(machine.do, name, getattr(os, name))))
        yield machine


def is_no_cleanup(_: object) -> bool:
    """Return whether no staging directory is being removed; for ``Rule.when``."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module, name = frame.f_globals["__name__"], frame.f_code.co_name
        if module == "shutil" or (module.startswith("ckpttool.") and name.lstrip("_").startswith("remove")):
            return False
        frame = frame.f_back
    return True
