"""The output of a run in a bucket.

A bucket has no rename. Large files are multipart uploads, invisible until completed. After the last part all uploads
are completed, and the files that make OUT look complete (``latest``, an index) are written last. Then the output is
compared. Until then OUT contains an in-progress marker, and readers refuse a directory with a marker: its removal is
the commit.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.commit import MAX_MARK_BYTES
from ckpttool.concurrency import Lazy
from ckpttool.errors import ChecksumError, CkptError, LayoutError, StorageError
from ckpttool.execution.run import Output
from ckpttool.storage import MARK, Writer, read_json
from ckpttool.storage.base import NO_NAMES
from ckpttool.storage.staging import MAX_KEPT_BYTES, kept_name, not_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage import PartWriter
    from ckpttool.storage.fsspec import RemoteStorage


def check_target(storage: RemoteStorage, out: str, *, overwrite: bool | None) -> None:
    """Refuse an OUT that cannot or must not be written, before any work is done.

    Raises:
        StorageError: OUT is a file; or contains files other than leftovers of a killed run, and ``overwrite`` is not
            True; or the store cannot be reached.
    """
    if not storage.exists(out):
        return
    if not storage.is_dir(out):
        raise StorageError(out, "already exists and is not a directory", "choose another OUT")
    names = {e.name for e in storage.listing(out)}
    if MARK in names:  # ignore the files of the killed run, but not older files
        names -= {MARK, *(name.split("/")[0] for name in _read_mark(storage, out).new)}
    if names and not overwrite:
        raise not_empty(out, overwrite=overwrite)


class _Mark(NamedTuple):
    """The in-progress marker of a run."""

    key: str
    """Fingerprint of its plan."""
    new: list[str]
    """Files that did not exist before the run."""
    over: list[str]
    """Files that it replaces at the commit: until then they belong to an earlier run."""
    mixed: bool
    """Whether it has begun to replace or remove files of an earlier run."""

    def to_json(self) -> bytes:
        """Return the content of the marker."""
        return json.dumps({"key": self.key, "files": self.new, "over": self.over, "mixed": self.mixed}).encode()


def _read_mark(storage: RemoteStorage, out: str) -> _Mark:
    """Read the in-progress marker of an earlier run."""
    path = f"{out.rstrip('/')}/{MARK}"
    try:
        mark = read_json(storage, path, "", "", MAX_MARK_BYTES)
        new, over = (
            [str(name) for name in names if not NO_NAMES & set(str(name).split("/"))]
            for names in (mark["files"], mark.get("over", ()))
        )
        return _Mark(str(mark["key"]), new, over, bool(mark.get("mixed")))
    except (LayoutError, KeyError, TypeError) as error:
        problem = "was not written by ckpttool"
        raise StorageError(path, problem, "move it out of the way, or choose another OUT") from error


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What OUT contains when this run begins to write."""

    existing: set[str]
    """Names in it except leftovers of killed runs."""
    done: dict[str, int]
    """Files that the run which this one resumes has completed, with their bytes."""
    pending: dict[str, str]
    """Uploads that it has begun: name of the object to identifier."""


def check_apart(storage: RemoteStorage, out: str, source: str) -> None:
    """Refuse to overwrite the source.

    Raises:
        StorageError: OUT is the source or contains it.
    """
    # Compare object keys: URL schemes have several spellings.
    ours, theirs = storage.key(out).rstrip("/"), storage.key(source).rstrip("/")
    if f"{theirs}/".startswith(f"{ours}/"):
        raise StorageError(out, f"would be written over the checkpoint in {source}", "choose another OUT")


class BucketOutput(Output):
    """The output of a plan in a bucket.

    Args:
        storage: Storage of OUT.
        out: URL of OUT.
        plan: The plan to write.
        overwrite: As for ``check_target``: another run may have written OUT meanwhile.
        replaces: Whether a file name in an existing OUT belongs to the files being replaced.
        last: Names of files to write last, in this order.
        key: Fingerprint of the plan: a run with the same key can resume the upload.
        resume: Whether to resume an earlier run with the same key, and to keep the files if the body fails.
    """

    def __init__(
        self,
        storage: RemoteStorage,
        out: str,
        plan: CopyPlan,
        *,
        overwrite: bool | None,
        replaces: Callable[[str], bool],
        last: Sequence[str] = (),
        key: str = "",
        resume: bool = False,
    ) -> None:
        self._storage = storage
        self.path = out.rstrip("/")
        """URL of OUT, for readers before the commit."""
        self._overwrite = overwrite
        self._replaces = replaces
        self._last = tuple(last)
        self._key = key
        self._resume = resume
        self._lock = threading.Lock()
        self._has_marker = False
        self._mixed = False
        self._begun = False
        self._uploads: list[Writer] = []
        self._written: list[str] = []
        self._held_back: dict[str, bytes] = {}
        self._names = [f.name for f in plan.files]
        self.claimed = Lazy(self._claim)
        """Computed before the first write, in parallel with reads."""

    @contextlib.contextmanager
    def committed(self) -> Iterator[BucketOutput]:
        """Context manager: commit the output if the body succeeds, discard it if not.

        The body calls ``complete`` after the last write.

        Raises:
            StorageError: Writing failed.
        """
        try:
            yield self
            self.commit()
        except BaseException as error:
            if not self._resume or isinstance(error, LayoutError | ChecksumError):  # resume must not keep wrong files
                self.discard()
            raise

    def url(self, name: str) -> str:
        """URL of a file of OUT."""
        return f"{self.path}/{name}"

    def _claim(self) -> _Claimed:
        """Take over or remove the files of a killed run, and write the in-progress marker."""
        found = self._take_over()
        if found.existing and not self._overwrite:
            raise not_empty(self.path, overwrite=self._overwrite)
        self._has_marker = True  # set first: if the request fails, the store may still have written it
        self._put_mark(found.existing)
        return found

    def _put_mark(self, existing: set[str]) -> None:
        over = {name for name in self._names if name.split("/")[0] in existing}
        new = [name for name in self._names if name not in over]
        self._storage.put(self.url(MARK), _Mark(self._key, new, sorted(over), self._mixed).to_json())

    def _take_over(self) -> _Claimed:
        self._storage.forget()
        names = {e.name for e in self._storage.listing(self.path)} if self._storage.is_dir(self.path) else set()
        if MARK not in names:
            return _Claimed(names, {}, {})
        key, left, over, self._mixed = _read_mark(self._storage, self.path)
        existing = names - {MARK} - {name.split("/")[0] for name in left}
        if self._resume and key == self._key:
            pending = self._storage.uploads(self.path)
            self._storage.list_tree(self.path)
            done = {name: self._storage.entry(self.url(name)).nbytes for name in left if self._exists(name)}
            return _Claimed(existing, done, pending)
        self._storage.abort_uploads(self.path, [*left, *over])
        self._storage.delete([self.url(name) for name in left])
        return _Claimed(existing, {}, {})

    def _exists(self, name: str) -> bool:
        return self._storage.exists(self.url(name))

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""
        if not self._resume:
            return False
        return file.name not in self._last and self.claimed().done.get(file.name) == file.nbytes

    def begin(self, file: TargetFile) -> Writer:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """
        part = self._storage.part_bytes(file.nbytes)
        if file.nbytes <= part:
            return _SmallFile(self, file.name, part)
        target = _LargeFile(self.url(file.name), partial(self._create, file), part)
        if self._resume:
            target.open()  # list the uploaded parts before their sources are read
        return target

    def _create(self, file: TargetFile) -> Writer:
        path = self.url(file.name)
        number = self.claimed().pending.get(self._storage.object_name(path), "")
        self._begun = True
        upload = self._storage.upload(path, file.nbytes, number)
        with self._lock:
            self._uploads.append(upload)
        return upload

    def hold_back(self, name: str, data: bytes) -> None:
        """Keep the bytes of a small file until the commit."""
        self._held_back[name] = data

    def part_writer(self, name: str) -> PartWriter:
        """Return the part writer of a small file.

        One that replaces another, or is one of ``last``, is held back: its writer returns the bytes to this process.
        """
        held = name in self.claimed().existing or name in self._last
        if not held:
            with self._lock:
                self._written.append(name)
        return _SmallFileWriter(self._storage, self.url(name), held)

    def complete(self) -> None:
        """Make all files visible, the files of ``last`` at the end; readers refuse them until the commit."""
        claimed = self.claimed()
        existing = claimed.existing
        if not self._mixed and (any(map(self._replaces, existing)) or not existing.isdisjoint(self._names)):
            self._mixed = True
            self._put_mark(existing)
        self._storage.delete([self.url(name) for name in self._last if name in existing])
        self._storage.at_once([partial(upload.commit) for upload in self._uploads])
        new = {*self._written, *self._held_back, *self._last, *claimed.done}
        written = {upload.path for upload in self._uploads}
        old = (n for n in existing if self._replaces(n) and n not in new and self.url(n) not in written)
        self._storage.delete([self.url(name) for name in old])
        for name in sorted(self._held_back, key=lambda n: self._last.index(n) if n in self._last else -1):
            if name in existing and not self._replaces(name):
                self._keep_other(name, self._held_back[name], existing)
            self._written.append(name)
            self._storage.put(self.url(name), self._held_back[name])

    def _keep_other(self, name: str, data: bytes, taken: set[str]) -> None:
        """Copy a sidecar file of OUT to another name, if ``data`` differs: a user may have edited it."""
        with self._storage.open(self.url(name)) as reader:
            held = reader.read(0, min(reader.nbytes, MAX_KEPT_BYTES))
        if held != data:
            self._storage.put_new(self.url(kept_name(name, taken)), held)

    def commit(self) -> None:
        """Remove the in-progress marker, so that readers accept the files."""
        self._storage.delete([self.url(MARK)])

    def discard(self) -> None:
        """Remove all files of this output, then the in-progress marker.

        The marker is kept if the store fails, or if an earlier output of OUT is not whole any more.
        """
        if not self._has_marker:
            return
        claimed = self.claimed.value or _Claimed(set(), {}, {})  # its marker may not have been written
        with contextlib.suppress(CkptError):
            self._storage.at_once([partial(upload.discard) for upload in self._uploads])
            self._storage.delete([self.url(name) for name in {*self._written, *claimed.done}])
            if self._begun or claimed.pending:
                # The store may have started uploads whose id never arrived.
                self._storage.abort_uploads(self.path, self._names)
            if not self._mixed:
                self._storage.delete([self.url(MARK)])


class _SmallFile(Writer):
    """A file written by one request."""

    def __init__(self, output: BucketOutput, name: str, part_bytes: int) -> None:
        self.path = output.url(name)
        self.part_bytes = part_bytes
        self._output = output
        self._name = name

    def open(self) -> None:
        self._output.claimed()

    def write(self, start: int, data: bytes | memoryview) -> None:
        self.accept(start, len(data), self.part_writer().write(start, memoryview(data)))

    def part_writer(self) -> PartWriter:
        return self._output.part_writer(self._name)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        if result is not None:
            self._output.hold_back(self._name, result)


@dataclass(frozen=True, slots=True)
class _SmallFileWriter:
    """Part writer of a small file: one request, or the bytes of a file that is held back, which this process writes."""

    storage: RemoteStorage
    path: str
    held: bool

    def write(self, start: int, data: memoryview) -> bytes | None:
        if self.held:
            return bytes(data)
        self.storage.put(self.path, bytes(data))
        return None


class _LargeFile(Writer):
    """A multipart upload, begun on first use."""

    def __init__(self, path: str, create: Callable[[], Writer], part_bytes: int) -> None:
        self.path = path
        self.part_bytes = part_bytes
        self._writer = Lazy(create)
        self._failed: BaseException | None = None

    def open(self) -> None:
        self._upload()

    def has(self, start: int, nbytes: int) -> bool:
        return self._writer.value is not None and self._writer.value.has(start, nbytes)

    def write(self, start: int, data: bytes | memoryview) -> None:
        self._upload().write(start, data)

    def fail(self, error: BaseException) -> None:
        self._failed = error
        if self._writer.value is not None:
            self._writer.value.fail(error)

    def part_writer(self) -> PartWriter:
        return self._upload().part_writer()

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        self._upload().accept(start, nbytes, result)

    def _upload(self) -> Writer:
        upload = self._writer()
        if self._failed is not None:  # ``fail`` may have run before the upload began
            upload.fail(self._failed)
        return upload
