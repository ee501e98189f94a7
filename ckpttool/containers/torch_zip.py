"""The ZIP form of ``torch.save``: parse and build archives.

Records are stored, never compressed, so a tensor is a byte range of the file. Reading takes the end of the file, the
central directory and the short local headers; no payload.

Source: torch 2.13, caffe2/serialize/inline_container.cc (PyTorchStreamWriter, alignment padding "FB") and PKWARE's
APPNOTE 6.3 (ZIP and ZIP64 records).
"""

from __future__ import annotations

import itertools
import operator
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checksums import Records
from ckpttool.errors import ContainerError, PlanError, TruncatedError
from ckpttool.messages import brief
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.storage import RangeReader

MAGIC = b"PK\x03\x04"
ALIGNMENT = 64
"""Alignment of the first byte of every record in torch's archives."""
MAX_DIRECTORY_BYTES = 1 << 26
"""Largest central directory: it has room for over half a million of torch's records."""

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_FIELDS = struct.Struct("<4s4xH16xHH")
"""Magic, method, and lengths of name and extra field."""
_CRC32_AT = 14
"""Offset of the CRC-32 in a local header."""
_CRC32_IN_ENTRY = 16
"""Offset of the CRC-32 in an entry of the central directory."""
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_CENTRAL_FIELDS = struct.Struct("<4s4x2H4x3I4H2x2I")
"""Magic, flags, method, CRC-32, sizes, lengths of name, extra field and comment, disk, attributes, and place of the
local header."""
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END64_MAGIC = b"PK\x06\x06"
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UTF8 = 0x800
_DESCRIBED = 0x8
_CLOSE = 256
"""Most bytes between two local headers that are read at once: an empty payload, as ZeRO-3 saves for each parameter."""
_OUTSIDE = 1 << 60
"""Stands for larger numbers, beyond the end of any file."""
_MAX_EXTRA = 36
"""Bytes in a local header's extra field besides padding: ZIP64 sizes, and the heads of two fields."""
_ENCRYPTED = 0x2061  # plainly, strongly, or with masked headers; or a patch of another file
_FOLDER = 0x10
"""Attribute of a directory, which has no bytes."""
_SERIALIZATION_ID = "/.data/serialization_id"
"""Source: torch 2.13, caffe2/serialize/inline_container.h (``kSerializationIdRecordName``)."""
_DESCRIPTOR = b"PK\x07\x08"
_DAMAGED_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"
_FOREIGN_HINT = "it was not written by torch.save; do not load it"


# ------------------------------------------------------------------------------------------------- parse


def parse(reader: RangeReader, max_directory_bytes: int = MAX_DIRECTORY_BYTES) -> Records:
    """Find every record of an archive, in the order of the central directory.

    Args:
        reader: The archive.
        max_directory_bytes: Largest central directory to read, in bytes.

    Raises:
        ContainerError: The archive is cut off, damaged, compressed or encrypted, a record is outside the file, or two
            overlap or share a name.
        StorageError: The file cannot be read.
    """
    directory, count = _read_directory(reader, max_directory_bytes)
    entries = _parse_directory(reader, directory, count)
    names, headers = entries.names, entries.headers
    known = _inferred_starts(entries, directory.start) if reader.remote else {}
    # The central directory does not contain the length of a local header: its extra field may differ.
    known |= _payload_starts(reader, entries, [n for n in range(len(names)) if n not in known])
    starts = [known[n] for n in range(len(names))]
    ends = list(map(operator.add, starts, entries.sizes))
    _refuse(reader, names, [end > directory.start for end in ends], "reaches beyond the data", _DAMAGED_HINT)
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ContainerError(reader.path, f"zip record {brief(twice)} occurs twice", _FOREIGN_HINT)
    spans = sorted(zip(headers, ends, range(len(names)), strict=True))
    for (_, end, n), (begin, _, following) in itertools.pairwise(spans):
        if begin < end:
            problem = f"zip records {brief(names[n])} and {brief(names[following])} overlap"
            raise ContainerError(reader.path, problem, _FOREIGN_HINT)
    return Records(names, zip(starts, ends, entries.crcs, strict=True))


class Template:
    """The structure of an archive, for archives that differ from it in the bytes of one storage alone.

    Such archives have all other bytes in common but for the checksum of the storage and torch's serialization ID, a
    hash of the content. The bytes are compared, so that an archive with another structure is found.

    Args:
        reader: The archive.
        records: Its records.
        storage: Index of the record of the storage.
    """

    def __init__(self, reader: RangeReader, records: Records, storage: int) -> None:
        self.nbytes = reader.nbytes
        self._names = records.names
        self._places = [record.where for record in records]
        self._storage = self._places[storage]
        around = self._read(reader)
        directory, _ = _read_directory(reader, MAX_DIRECTORY_BYTES)
        self._crcs: list[int] = []
        """Offset of the checksum of each record, in the bytes around the storage."""
        self._free: list[tuple[int, int]] = []
        """Ranges of the bytes around the storage in which archives may differ."""
        at = self._around(directory.start)
        for n, (name, where) in enumerate(zip(self._names, self._places, strict=True)):
            row = _CENTRAL_FIELDS.unpack_from(around, at)
            self._crcs.append(at + _CRC32_IN_ENTRY)
            content = name.endswith(_SERIALIZATION_ID)
            if content or n == storage:
                header = self._around(int(row[11]))
                end = self._around(where.end)
                self._free += [(place, place + 4) for place in (header + _CRC32_AT, at + _CRC32_IN_ENTRY)]
                if row[1] & _DESCRIBED and around[end : end + 4] == _DESCRIPTOR:
                    self._free.append((end + 4, end + 8))
                if content:
                    self._free.append((self._around(where.start), end))
            at += _CENTRAL.size + sum(row[6:9])
        self._common = self._without_free(around)

    def records_of(self, reader: RangeReader) -> Records | None:
        """Return the records of an archive of the same size; None if it has another structure.

        Raises:
            StorageError: The file cannot be read.
        """
        around = self._read(reader)
        if self._without_free(around) != self._common:
            return None
        crcs = (int.from_bytes(around[at : at + 4], "little") for at in self._crcs)
        return Records(self._names, ((*where, crc) for where, crc in zip(self._places, crcs, strict=True)))

    def _read(self, reader: RangeReader) -> bytes:
        """Return the bytes before and after the storage."""
        return reader.read(0, self._storage.start) + reader.read(self._storage.end, self.nbytes)

    def _around(self, at: int) -> int:
        """Return the place of a byte of the archive in the bytes around the storage."""
        return at if at <= self._storage.start else at - self._storage.nbytes

    def _without_free(self, around: bytes) -> bytearray:
        changed = bytearray(around)
        for start, end in self._free:
            changed[start:end] = bytes(end - start)
        return changed


class _Directory(NamedTuple):
    """The entries of a central directory, by column: archives of large models have thousands of records."""

    names: list[str]
    raw_names: list[bytes]
    headers: list[int]
    """Offset of each local header."""
    sizes: list[int]
    """Bytes of each payload."""
    crcs: list[int]
    described: list[bool]
    """Whether a data descriptor, 16 bytes or 24, follows the payload."""
    least_starts: list[int]
    """First byte of each payload if its local header has no extra field."""


def _refuse(reader: RangeReader, names: list[str], bad: list[bool], problem: str, hint: str) -> None:
    """Raise an error that names the first bad record, if there is one."""
    if True in bad:
        raise ContainerError(reader.path, f"zip record {brief(names[bad.index(True)])} {problem}", hint)


def _payload_starts(reader: RangeReader, entries: _Directory, which: list[int]) -> dict[int, int]:
    """Return where the payloads of some records begin, by their local headers; close headers are read together."""
    headers = entries.headers
    groups: list[list[int]] = []
    last = -_CLOSE - 1
    for n in sorted(which, key=headers.__getitem__):
        if headers[n] - last > _CLOSE:
            groups.append([])
        groups[-1].append(n)
        last = headers[n]
    ends = [max(entries.least_starts[n] for n in group) for group in groups]
    spans = [ByteRange(headers[group[0]], end) for group, end in zip(groups, ends, strict=True)]
    starts: dict[int, int] = {}
    for group, span, data in zip(groups, spans, reader.read_many(spans), strict=True):
        for n in group:
            at, raw_name = headers[n] - span.start, entries.raw_names[n]
            magic, method, name_length, extra_length = _LOCAL_FIELDS.unpack_from(data, at)
            begin = at + _LOCAL.size
            end = begin + name_length
            if magic != MAGIC or method or data[begin:end] != raw_name:
                problem = f"zip record {brief(entries.names[n])} has a broken local header"
                raise ContainerError(reader.path, problem, _DAMAGED_HINT)
            starts[n] = span.start + end + extra_length
    return starts


def _inferred_starts(entries: _Directory, end: int) -> dict[int, int]:
    """Return where payloads begin, by index, without a round trip for each local header.

    A payload ends where the next header begins, but for its data descriptor, and torch puts its first byte on a
    multiple of 64 with a fill shorter than that. Payloads that do not fit both in exactly one way are left out. So is
    the first record: its header begins the file, and must be read to check that the file is an archive.
    """
    starts: dict[int, int] = {}
    ordered = sorted(range(len(entries.names)), key=entries.headers.__getitem__)
    for n, following in zip(ordered, [*(entries.headers[n] for n in ordered[1:]), end], strict=True):
        ends = (following - 16, following - 24) if entries.described[n] else (following,)
        fits = [
            at
            for at in (e - entries.sizes[n] for e in ends)
            if at % ALIGNMENT == 0 and 0 <= at - entries.least_starts[n] < ALIGNMENT + _MAX_EXTRA
        ]
        if len(fits) == 1 and entries.headers[n] > 0:
            starts[n] = fits[0]
    return starts


def bytes_with_crc(crc32: int) -> bytes:
    """The only four bytes with a given CRC-32: a number can be derived without reading it."""
    remainder = crc32 ^ _MAX32
    for _ in range(4):
        index = _CRC_INDEX[remainder >> 24]
        remainder = ((remainder ^ _CRC_TABLE[index]) << 8 | index) & _MAX32
    return (remainder ^ _MAX32).to_bytes(4, "little")


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()
_CRC_INDEX = {value >> 24: index for index, value in enumerate(_CRC_TABLE)}


def _read_directory(reader: RangeReader, max_nbytes: int) -> tuple[ByteRange, int]:
    """Place of the central directory, and its number of records."""
    size = reader.nbytes
    if size < _END.size:
        raise TruncatedError(reader.path, f"is only {size} bytes long", _DAMAGED_HINT)
    tail_start = max(0, size - _END.size - _LOCATOR64.size - _END64.size - _MAX16)
    tail = reader.read(max(tail_start, size - 4096), size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 and len(tail) < size - tail_start:
        tail = reader.read(tail_start, size)
        at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        last = tail.rfind(_END64_MAGIC)
        if last >= 0 and len(tail) - last >= _END64.size + _LOCATOR64.size + _END.size:  # no byte is missing
            raise ContainerError(reader.path, "the end of its zip directory is damaged", _DAMAGED_HINT)
        raise TruncatedError(reader.path, f"is cut off: only its first {size:,} bytes are there", _DAMAGED_HINT)
    end_start = size - len(tail) + at
    _, *disks, on_disk, count, nbytes, start, _ = _END.unpack_from(tail, at)
    _check_one_disk(reader, whole={*disks} <= {0, _MAX16} and on_disk == count)
    limit = end_start
    end64 = _read_end64(reader, end_start)
    if end64 is not None:  # torch always writes it, in small files too
        start, nbytes, count, limit = end64
    if start + nbytes > limit or count * _CENTRAL.size > nbytes:
        raise ContainerError(reader.path, "the zip directory is recorded outside the file", _DAMAGED_HINT)
    if nbytes > max_nbytes:
        problem = f"the zip directory is larger than {max_nbytes:,} bytes"
        raise ContainerError(reader.path, problem, _FOREIGN_HINT)
    return ByteRange(start, start + nbytes), count


def _read_end64(reader: RangeReader, end_start: int) -> tuple[int, int, int, int] | None:
    """Start, length and number of records of the directory, and the end of the payloads."""
    at = end_start - _LOCATOR64.size
    if at < 0:
        return None
    magic, disk, position, disks = _LOCATOR64.unpack(reader.read(at, end_start))
    if magic != b"PK\x06\x07":
        return None
    if position + _END64.size > at:
        raise ContainerError(reader.path, "the zip64 directory is missing", _DAMAGED_HINT)
    fields = _END64.unpack(reader.read(position, position + _END64.size))
    if fields[0] != _END64_MAGIC or fields[1] < _END64.size - 12:  # magic and length are not counted
        raise ContainerError(reader.path, "the zip64 directory is broken", _DAMAGED_HINT)
    this_disk, first_disk, on_disk, count, nbytes, start = fields[4:]
    _check_one_disk(reader, whole=(disk, disks, this_disk, first_disk, on_disk) == (0, 1, 0, 0, count))
    return start, nbytes, count, position


def _check_one_disk(reader: RangeReader, *, whole: bool) -> None:
    """Refuse an archive in several files: torch writes none, so a bit of its disk numbers has changed."""
    if not whole:
        raise ContainerError(reader.path, "the zip directory does not describe one whole file", _DAMAGED_HINT)


def _parse_directory(reader: RangeReader, where: ByteRange, count: int) -> _Directory:
    data = reader.read(where.start, where.end)
    rows: list[tuple[Any, ...]] = []
    places: list[int] = []
    raw_names: list[bytes] = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(data):
            raise ContainerError(reader.path, "the zip directory ends too early", _DAMAGED_HINT)
        row = _CENTRAL_FIELDS.unpack_from(data, at)
        name_at = at + _CENTRAL.size
        extra_at = name_at + row[6]
        rows.append(row)
        raw_names.append(data[name_at:extra_at])
        places.append(extra_at)
        at = extra_at + row[7] + row[8]
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(12)]
    magics, flags, methods, crcs, packed, sizes, _, extras, _, disks, attributes, headers = columns
    if at > len(data) or {*magics} - {b"PK\x01\x02"}:
        raise ContainerError(reader.path, "the zip directory is broken", _DAMAGED_HINT)
    _check_one_disk(reader, whole=not any(disks))
    if at != len(data):
        raise ContainerError(reader.path, "the zip directory lists more records than it counts", _DAMAGED_HINT)
    names = [name.decode("utf-8", "replace") for name in raw_names]
    for n, numbers in enumerate(zip(sizes, packed, headers, strict=True)):
        if _MAX32 in numbers:
            extra = data[places[n] : places[n] + extras[n]]
            found = _zip64_sizes(reader, extra, *numbers)
            sizes[n], packed[n], headers[n] = (min(number, _OUTSIDE) for number in found)
    packs = [
        pack != size or bool(method) or flag & _ENCRYPTED != 0
        for method, pack, size, flag in zip(methods, packed, sizes, flags, strict=True)
    ]
    _refuse(reader, names, packs, "is compressed or encrypted", _FOREIGN_HINT)
    folders = [
        value & _FOLDER != 0 and (size > 0 or not name.endswith("/"))
        for value, size, name in zip(attributes, sizes, names, strict=True)
    ]
    _refuse(reader, names, folders, "is marked as a directory", _DAMAGED_HINT)
    leaves = [name.startswith("/") or (".." in name and ".." in name.split("/")) for name in names]
    _refuse(reader, names, leaves, "points outside the archive", _FOREIGN_HINT)
    least = [header + _LOCAL.size + len(name) for header, name in zip(headers, raw_names, strict=True)]
    _refuse(reader, names, [start > where.start for start in least], "is outside the file", _DAMAGED_HINT)
    return _Directory(names, raw_names, headers, sizes, crcs, [flag & _DESCRIBED != 0 for flag in flags], least)


def _zip64_sizes(reader: RangeReader, extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = [extra[i : i + 8] for i in range(at + 4, min(at + 4 + length, len(extra)) - 7, 8)]
            numbers = [int.from_bytes(v, "little") for v in values]
            wanted = [nbytes == _MAX32, packed == _MAX32, header == _MAX32]
            if len(numbers) >= sum(wanted):
                take = iter(numbers)
                nbytes, packed, header = (
                    next(take) if want else old for want, old in zip(wanted, (nbytes, packed, header), strict=True)
                )
                return nbytes, packed, header
        at += 4 + length
    raise ContainerError(reader.path, "a zip64 record is broken", _DAMAGED_HINT)


# ------------------------------------------------------------------------------------------------- build

_NAME = r"(?!\.\.?$)[^/\0\ud800-\udfff]{1,255}"
"""Allowed characters between two slashes of a record's name."""


class BuiltArchive(NamedTuple):
    """The layout of an archive, without its payloads."""

    nbytes: int
    """Size of the whole file."""
    literals: tuple[tuple[int, bytes], ...]
    """(offset, bytes) of headers and small records: one before each storage, and one after all."""
    payloads: dict[str, ByteRange]
    """Byte range of the payload of each storage, by key, in order."""
    checksums: dict[str, tuple[int, int]]
    """Offsets of the CRC-32 of each storage, by key: in its header, and in the central directory."""
    directory: int
    """Offset of the central directory; it ends with the file."""

    def literal(self, number: int, known: Mapping[str, int]) -> bytes:
        """Return the bytes of a literal, with the CRC-32 of storages, by key, where it has them."""
        start, data = self.literals[number]
        changed = bytearray(data)
        for key, crc32 in known.items():
            for at in self.checksums[key]:
                if 0 <= at - start < len(data):
                    changed[at - start : at - start + 4] = crc32.to_bytes(4, "little")
        return bytes(changed)


def build(pickled: bytes, sizes: Mapping[str, int], *, prefix: str, path: str) -> BuiltArchive:
    """Lay out an archive that ``torch.load`` reads, also with ``mmap=True``.

    The CRC-32 of each storage is recorded as 0, "not computed", as torch itself does after
    ``torch.serialization.set_crc32_options(False)``; ``BuiltArchive.literal`` replaces it.

    Args:
        pickled: ``data.pkl``.
        sizes: Bytes of each storage, by key, in the order they are to be stored.
        prefix: First component of every record name; torch uses the file name without its extension.
        path: Name of the file in errors.

    Raises:
        PlanError: The prefix or a storage key cannot be part of a record's name.
    """
    if not re.fullmatch(_NAME, prefix):
        raise PlanError(path, f"{brief(prefix)} cannot be the name of an archive", "choose another file name")
    writer = _ArchiveWriter()
    writer.literal(f"{prefix}/data.pkl", pickled)
    writer.literal(f"{prefix}/.format_version", b"1")
    writer.literal(f"{prefix}/.storage_alignment", str(ALIGNMENT).encode())
    writer.literal(f"{prefix}/byteorder", b"little")
    payloads: dict[str, ByteRange] = {}
    entries: dict[str, tuple[int, int]] = {}
    for key, nbytes in sizes.items():
        if not re.fullmatch(_NAME, key):
            raise PlanError(path, f"storage key {brief(key)} cannot name a record", "this is a bug in ckpttool")
        entries[key] = writer.position + _CRC32_AT, len(writer.central) + _CRC32_IN_ENTRY
        payloads[key] = writer.payload(f"{prefix}/data/{key}", nbytes)
    writer.literal(f"{prefix}/version", b"3\n")
    import hashlib  # importing it takes longer than reading a file

    # torch puts a hash of the content here; before the payload is written, the structure and sizes are known.
    digest = hashlib.sha256(pickled + repr(sorted(sizes.items())).encode()).digest()
    identity = f"{int.from_bytes(digest[:16], 'little') % 10**40:040d}"
    writer.literal(f"{prefix}/.data/serialization_id", identity.encode())
    directory, nbytes = writer.position, writer.finish()
    checksums = {key: (header, directory + entry) for key, (header, entry) in entries.items()}
    return BuiltArchive(nbytes, tuple(writer.literals), payloads, checksums, directory)


class _ArchiveWriter:
    def __init__(self) -> None:
        self.position = 0
        self.literals: list[tuple[int, bytes]] = []
        """The literals before the storages so far."""
        self.central = bytearray()
        self.count = 0
        self._start = 0
        self._literal = bytearray()
        """The bytes since the last storage."""

    def literal(self, name: str, data: bytes) -> None:
        """Write a small record."""
        self._header(name, len(data), zlib.crc32(data))
        self._literal += data
        self.position += len(data)

    def payload(self, name: str, nbytes: int) -> ByteRange:
        """Write the header of a storage, and leave room for its bytes."""
        self._header(name, nbytes, 0)
        self.literals.append((self._start, bytes(self._literal)))
        start = self.position
        self.position = self._start = start + nbytes
        self._literal.clear()
        return ByteRange(start, start + nbytes)

    def _header(self, name: str, nbytes: int, crc32: int) -> None:
        """Write the header of a record, and its entry in the directory."""
        raw = name.encode()
        large = nbytes >= _MAX32
        zip64 = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if large else b""
        plain = self.position + _LOCAL.size + len(raw) + len(zip64) + 4
        fill = -plain % ALIGNMENT
        extra = zip64 + b"FB" + struct.pack("<H", fill) + b"Z" * fill
        shown = _MAX32 if large else nbytes
        version = 45 if large else 0
        header = _LOCAL.pack(MAGIC, version, _UTF8, 0, 0, 0, crc32, shown, shown, len(raw), len(extra)) + raw + extra
        self._literal += header
        numbers = [nbytes, nbytes] if large else []
        at = self.position
        if at >= _MAX32:
            numbers.append(at)
            at = _MAX32
        central_extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        sizes = (shown, shown, len(raw), len(central_extra), 0)
        self.central += _CENTRAL.pack(b"PK\x01\x02", version, version, _UTF8, 0, 0, 0, crc32, *sizes, 0, 0, 0, at)
        self.central += raw + central_extra
        self.count += 1
        self.position += len(header)

    def finish(self) -> int:
        """Write the directory; returns the size of the file. ZIP64 records are always written, as torch does."""
        start, nbytes = self.position, len(self.central)
        end64 = start + nbytes
        tail = bytes(self.central)
        tail += _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, self.count, self.count, nbytes, start)
        tail += _LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1)
        count = min(self.count, _MAX16)
        tail += _END.pack(b"PK\x05\x06", 0, 0, count, count, min(nbytes, _MAX32), min(start, _MAX32), 0)
        self.literals.append((self._start, bytes(self._literal + tail)))
        return start + len(tail)
