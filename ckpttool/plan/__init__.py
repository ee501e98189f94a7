"""Copy plans: the source of every byte of each target file, and the consistency checks before the first write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.model.extents import stored_blocks
from ckpttool.ranges import exact_cover_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.checksums import Record
    from ckpttool.model import State
    from ckpttool.storage import StorageSpec

COPY = np.dtype(
    [
        ("source", "<u4"),  # index into CopyPlan.sources
        ("start", "<u8"),  # first byte, counted from the start of the source
        ("numel", "<u8"),  # elements to copy
        ("target", "<u8"),  # first byte, counted from the start of the target file
        ("cast", "<u2"),  # index into CopyPlan.casts
    ]
)
"""One row: a run of elements to copy, and to cast if its types differ."""

CHECK = np.dtype(
    [
        ("source", "<u4"),  # file of the master: index into sources
        ("start", "<u8"),  # its first byte
        ("copy_source", "<u4"),  # file of the module's copy
        ("copy_start", "<u8"),  # its first byte
        ("numel", "<u8"),  # elements to compare
        ("cast", "<u2"),  # index into casts: the master's type, the copy's type
        ("name", "<u4"),  # index into names
    ]
)
"""One row: a run of elements where the cast of the master must equal the module's copy."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file, with its size and version at the time of planning."""

    path: str
    """Path or URL."""
    nbytes: int
    """Its size in bytes."""
    version: str
    """ETag or modification time: changes when the file is rewritten; see ``storage.Entry``."""
    storage: StorageSpec = field(repr=False, compare=False)
    """Its storage, as data; ``storage.connect`` opens it."""
    records: Sequence[Record] = field(default=(), repr=False, compare=False)
    """Ranges of its bytes with the CRC-32 that the save recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class ConsistencyChecks:
    """Consistency checks: each module copy must equal the cast of its master.

    If one differs, offsets were misread or the files are of two saves.
    """

    sources: tuple[SourceFile, ...]
    """Files to read."""
    casts: tuple[tuple[str, str], ...]
    """Pairs of types: the master's, the copy's."""
    names: tuple[str, ...]
    """Parameters."""
    rows: NDArray[np.void]
    """Rows of CHECK."""
    guessed: frozenset[int] = frozenset()
    """Indexes of the masters whose names were derived only from shapes and the order of the model."""

    @property
    def nbytes(self) -> int:
        """Bytes to read, on both sides."""
        return _nbytes(self.rows, [itemsize(a) + itemsize(b) for a, b in self.casts])


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A tensor whose elements are scattered or computed: it is assembled in memory, a chunk at a time."""

    state: State
    """The state to read."""
    dtype: str
    """Type to write."""
    target: int
    """First byte, counted from the start of the target file."""
    first: int
    """First element to write."""
    numel: int
    """Elements to write."""

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TargetFile:
    """One file to write."""

    name: str
    """Relative to the output directory, with "/" between directories."""
    nbytes: int
    """Its size."""
    literals: tuple[tuple[int, bytes], ...]
    """(offset, bytes) of headers and the like."""
    copies: NDArray[np.void]
    """Rows of COPY."""
    gathers: tuple[Gather, ...] = ()
    """Tensors that need assembly in memory."""
    zeros: tuple[tuple[int, int], ...] = ()
    """(offset, number of bytes) of padding, which is zero."""
    mode: int = 0o666
    """Permissions, before the umask."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Files to write, byte for byte.

    Raises:
        PlanError: A byte of a target would be written twice or never, or the name of a target is outside the directory.
    """

    sources: tuple[SourceFile, ...]
    """Files to read."""
    casts: tuple[tuple[str, str], ...]
    """Pairs of types in safetensors' spelling; equal types are a plain copy."""
    files: tuple[TargetFile, ...]
    """Files to write; a file that makes the others look complete (an index) is last."""
    consistency: ConsistencyChecks | None = None
    """Consistency checks to make before the first write."""

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[PlanError]:
        """Find target files that are not filled exactly once, or have unsafe names."""
        widths = np.array([itemsize(target) for _, target in self.casts], dtype=np.uint64)
        for file in self.files:
            if "\0" in file.name or any(part in {"", ".", ".."} for part in file.name.split("/")):
                yield PlanError(file.name, "is not a plain file name", "this is a bug in ckpttool")
            starts = [offset for offset, _ in (*file.literals, *file.zeros)] + [g.target for g in file.gathers]
            lengths = [len(data) for _, data in file.literals] + [nbytes for _, nbytes in file.zeros]
            lengths += [g.nbytes for g in file.gathers]
            begin = np.concatenate([np.array(starts, np.uint64), file.copies["target"]])
            size = np.concatenate([np.array(lengths, np.uint64), file.copies["numel"] * widths[file.copies["cast"]]])
            gap = exact_cover_problem(begin, size, file.nbytes)
            if gap is not None:
                yield PlanError(file.name, f"{gap.kind} at bytes {gap.start} to {gap.end}", "this is a bug in ckpttool")

    def fingerprint(self, changed: Sequence[int] = ()) -> str:
        """A digest that is equal for two plans that write the same bytes from the same files.

        Args:
            changed: Times of the last change of the sources.
        """
        import hashlib  # importing it takes longer than making most plans

        sha = hashlib.sha256(repr((self.sources, self.casts, list(changed))).encode())
        for file in self.files:
            sha.update(repr((file.name, file.nbytes, file.zeros)).encode())
            for offset, data in file.literals:
                sha.update(f"{offset}:{len(data)}".encode())
                sha.update(data)
            sha.update(file.copies.tobytes())
            for gather in file.gathers:
                formula = gather.state.formula
                key = (gather.dtype, gather.target, gather.first, gather.numel, *((formula.key,) if formula else ()))
                sha.update(repr(key).encode())
                for state in gather.state.stored:
                    sha.update(state.extents.tobytes())
        return sha.hexdigest()

    @property
    def nbytes_written(self) -> int:
        """Bytes of all targets."""
        return sum(f.nbytes for f in self.files)

    @property
    def nbytes_read(self) -> int:
        """Bytes read from the sources, comparisons included."""
        widths = [itemsize(source) for source, _ in self.casts]
        copied = sum(_nbytes(file.copies, widths) for file in self.files)
        for gather in (g for f in self.files for g in f.gathers):
            copied += sum(gather.numel * itemsize(state.dtype) for state in gather.state.stored)
        return copied + (self.consistency.nbytes if self.consistency else 0)


def ranges_read(plan: CopyPlan, file: TargetFile) -> Iterator[tuple[int, int, int]]:
    """Yield the source ranges of a file as (source, first byte, byte after the last); ranges may overlap."""
    widths = np.array([itemsize(source) for source, _ in plan.casts], dtype=np.uint64)
    ends = file.copies["start"] + file.copies["numel"] * widths[file.copies["cast"]]
    yield from zip(file.copies["source"].tolist(), file.copies["start"].tolist(), ends.tolist(), strict=True)
    for gather in file.gathers:
        for state in gather.state.stored:
            for row in stored_blocks(state.extents, itemsize(state.dtype)):
                start = int(row["offset"])
                yield int(row["file"]), start, start + int(row["numel"]) * itemsize(state.dtype)


def _nbytes(rows: NDArray[np.void], widths: Sequence[int]) -> int:
    return int((rows["numel"] * np.array(widths, dtype=np.uint64)[rows["cast"]]).sum()) if rows.size else 0


def merge_literals(literals: Iterable[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Join adjacent (offset, bytes): a file may have dozens, and fewer writes are faster."""
    merged: list[tuple[int, list[bytes]]] = []
    end = -1
    for offset, data in sorted(literals):
        if offset == end:
            merged[-1][1].append(data)
        else:
            merged.append((offset, [data]))
        end = offset + len(data)
    return tuple((offset, b"".join(parts)) for offset, parts in merged)


def merge_copies(rows: NDArray[np.void], casts: Sequence[tuple[str, str]]) -> NDArray[np.void]:
    """Join rows that are adjacent in both the source and the target: fewer, longer copies."""
    if len(rows) < 2:
        return rows
    source_width = np.array([itemsize(a) for a, _ in casts], dtype=np.uint64)[rows["cast"]]
    target_width = np.array([itemsize(b) for _, b in casts], dtype=np.uint64)[rows["cast"]]
    goes_on = (
        (rows["source"][1:] == rows["source"][:-1])
        & (rows["cast"][1:] == rows["cast"][:-1])
        & (rows["start"][1:] == (rows["start"] + rows["numel"] * source_width)[:-1])
        & (rows["target"][1:] == (rows["target"] + rows["numel"] * target_width)[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    merged: NDArray[np.void] = rows[first].copy()
    merged["numel"] = np.add.reduceat(rows["numel"], first)
    return merged
