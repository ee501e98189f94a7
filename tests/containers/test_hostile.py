"""Hostile files are refused or read as inert data: no code runs, and time and memory stay bounded."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.torch_file import FIRST_READ, read_torch_file
from ckpttool.containers.unpickler import unpickle
from ckpttool.containers.values import Opaque, TensorRef, walk
from ckpttool.errors import CkptError, ContainerError, StorageError
from tests import sampling
from tests.hostile import (
    BytesReader,
    attacks,
    bombs,
    flip,
    greedy,
    integer,
    integers,
    legacy_file,
    lying_tensors,
    name,
    overwrite,
    proto2,
    raw_zip,
    storage,
    tensor,
    text,
    truncate,
    without_checksum,
    zip_file,
)
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FORMS: dict[str, Callable[[bytes], bytes]] = {"zip": zip_file, "legacy": legacy_file}
SECONDS = 20
"""What no file of a few MB may take, with a wide margin for a busy machine: the worst takes under four."""


def read(data: bytes) -> Any:
    return read_torch_file(BytesReader(data)).root


# ------------------------------------------------------------------------------------------------- nothing runs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attack", attacks(""))
def test_attack_is_inert(attack: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = FORMS[form](attacks(str(tmp_path / "pwned"))[attack])
    before = set(sys.modules)
    try:
        root = read(data)
        pickle(root, path="again.pt")
    except ContainerError as error:
        assert str(error).startswith("run/file.pt: ")  # noqa: PT017
    else:
        names = [v.qualified_name for v in walk(root) if isinstance(v, Opaque)]
        assert names or "then a good value" in attack
    assert set(sys.modules) == before
    assert os.listdir(tmp_path) == []


AUDITED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from tests.hostile import BytesReader, attacks, legacy_file, zip_file
from ckpttool.containers.pickler import pickle
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError
cases = [form(a) for form in (zip_file, legacy_file) for a in attacks("pwned").values()]
read_torch_file(BytesReader(zip_file(b"N.")))  # what is imported lazily is imported now
seen, watching = [], False
def hook(event, arguments):
    if watching and event != "builtins.id":
        seen.append([event, repr(arguments)])
sys.addaudithook(hook)
watching = True
for case in cases:
    try:
        pickle(read_torch_file(BytesReader(case)).root, path="again.pt")
    except CkptError:
        pass
watching = False
print(json.dumps({"events": seen, "torch": "torch" in sys.modules, "files": os.listdir()}))
"""


def test_python_itself_sees_no_import_no_code_and_no_file(tmp_path: Path) -> None:
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
    run = subprocess.run(
        [sys.executable, "-c", AUDITED, root], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert json.loads(run.stdout) == {"events": [], "torch": False, "files": []}


def test_opaque_says_what_would_have_run() -> None:
    root = read(zip_file(attacks("pwned")["os.system"]))
    assert repr(root) == "<opaque os.system>"
    assert root.args == ("touch pwned",)


# ------------------------------------------------------------------------------------------------- time and memory


LIMITED = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from tests.hostile import BytesReader, bombs, legacy_file, zip_file
from ckpttool.containers import unpickler
from ckpttool.containers.pickler import pickle
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import walk
from ckpttool.errors import CkptError
cases = {name: data for name, data in bombs().items() if name in sys.argv[2:]}
cases["a gigabyte and a half of sets"] = b"\\x80\\x04(" + b"\\x8f" * 5_000_000 + b"t."
allowed = unpickler.MAX_MEMORY_BYTES
for name, data in cases.items():
    # The one at the end may take all there is; the others take less of the tests' time.
    unpickler.MAX_MEMORY_BYTES = allowed if name.startswith("a gigabyte") else allowed >> 2
    for form in (zip_file,) if len(data) > 100_000 else (zip_file, legacy_file):
        start = time.process_time()
        try:
            root = read_torch_file(BytesReader(form(data))).root
            values = sum(1 for _ in walk(root))
            result = f"{values} values, {len(pickle(root, path='again.pt'))} bytes"
            del root
        except CkptError as error:
            result = str(error)
        print(json.dumps([name, form.__name__, result, time.process_time() - start]), flush=True)
"""


BOMBS = sampling.some(bombs(), 7)


@pytest.fixture(scope="module")
def explosions() -> dict[str, list[tuple[str, float]]]:
    """What each bomb did in a process that may take two gigabytes."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
    command = [sys.executable, "-c", LIMITED, root, *BOMBS]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    results: dict[str, list[tuple[str, float]]] = {}
    for line in run.stdout.splitlines():
        bomb, _, result, seconds = json.loads(line)
        results.setdefault(bomb, []).append((result, seconds))
    assert run.returncode == 0, (run.stderr[-2000:], run.stdout[-500:])
    return results


@pytest.mark.parametrize("bomb", [*BOMBS, "a gigabyte and a half of sets"])
def test_bomb_ends_soon_in_two_gigabytes(bomb: str, explosions: dict[str, list[tuple[str, float]]]) -> None:
    for result, seconds in explosions[bomb]:
        assert seconds < SECONDS
        assert result.startswith("run/file.pt: ") or result.endswith(" bytes")
        assert "more memory than there is" not in result


REFUSED = {
    "lists in lists": "more than 200 deep",
    "tuples in tuples as a key": "over 256 values as a key",
    "attributes of tensors": "more than 200 deep",
    "a deep list met first near the top": "more than 200 deep",
    "billion laughs in keys": "over 256 values as a key",
    "billion laughs in wide keys": "over 256 values as a key",
    "one huge list made a set often": "bytes of memory",
    "one huge text encoded often": "bytes of memory",
    "names that grow": "without a proper name",
    "BINBYTES8": "ends too early",
    "LONG4": "unreasonable length",
    "integers with one hash": "keys with one hash",
    "pairs with one hash": "keys with one hash",
    "pairs with one hash in a set": "keys with one hash",
    "complex numbers with one hash": "keys with one hash",
    "a gigabyte and a half of sets": "more than 1,610,612,736 bytes of memory",
    "billion laughs in lists": "151 values, ",
    "billion laughs in tuples": "151 values, ",
}


@pytest.mark.parametrize("bomb", [b for b in REFUSED if b in BOMBS or b.startswith("a gig")])
def test_bomb_is_refused_for_what_it_is(bomb: str, explosions: dict[str, list[tuple[str, float]]]) -> None:
    assert REFUSED[bomb] in explosions[bomb][0][0]


@pytest.mark.parametrize("what", greedy(1))
def test_memory_taken_is_less_than_memory_charged(what: str) -> None:
    data = greedy(8_000)[what]
    limit = 1 << 21
    tracemalloc.start()
    try:
        unpickle(data, path="greedy.pt", max_memory_bytes=limit)
    except ContainerError as error:
        assert "more than 2,097,152 bytes of memory" in str(error) or what == "marks"  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < limit


def test_time_is_in_proportion_to_length() -> None:
    rows = [
        text(f"layers.{i}.weight") + tensor(storage(str(i)), 0, integers(2, 2), integers(2, 1)) for i in range(4000)
    ]
    data = proto2(b"}(" + b"".join(rows) + b"u")
    start = time.process_time()
    unpickle(data, path="large.pt")
    assert time.process_time() - start < 5 * len(data) / 1e6


# ------------------------------------------------------------------------------------------------- tensors that lie


@pytest.mark.parametrize("lie", lying_tensors())
def test_lying_tensor_is_refused(lie: str) -> None:
    pickled = proto2(lying_tensors()[lie])
    payload = struct.pack("<q", 4) + bytes(16)
    with refused(ContainerError):
        read(zip_file(pickled, {"0": bytes(16)}))
    with refused(ContainerError):
        read(legacy_file(pickled, proto2(b"]" + text("0") + b"a"), payload))


def test_the_same_tensor_with_true_sizes_is_read() -> None:
    pickled = proto2(tensor(storage(), 0, integers(2, 2), integers(2, 1)))
    assert read(zip_file(pickled, {"0": bytes(16)})).shape == (2, 2)
    keys = proto2(b"]" + text("0") + b"a")
    assert read(legacy_file(pickled, keys, struct.pack("<q", 4) + bytes(16))).shape == (2, 2)


def test_a_tiny_storage_expanded_to_a_petabyte_has_no_range() -> None:
    pickled = proto2(tensor(storage(), 0, integers(1 << 50), integers(0)))
    file = read_torch_file(BytesReader(zip_file(pickled, {"0": bytes(16)})))
    with refused(ContainerError):
        file.locate(file.root)


# ------------------------------------------------------------------------------------------------- archives that lie

GOOD: list[tuple[str, bytes, dict[str, int]]] = [
    ("a/data.pkl", b"\x80\x02N.", {}),
    ("a/data/0", b"abcd" * 9, {}),
    ("a/version", b"3\n", {}),
]


def _with(index: int, **fields: int) -> list[tuple[str, bytes, dict[str, int]]]:
    return [(n, data, {**f, **fields} if i == index else f) for i, (n, data, f) in enumerate(GOOD)]


def _renamed(new: str) -> list[tuple[str, bytes, dict[str, int]]]:
    return [*GOOD[:1], (new, b"abcd", {}), *GOOD[2:]]


ARCHIVES = {
    "two records overlap": (raw_zip(_with(2, header=20)), "broken local header|overlap"),
    "a record is within another": (
        raw_zip([("a/data.pkl", raw_zip(GOOD[:1]), {}), ("a/b", b"", {"header": 40})]),
        "overlap|broken",
    ),
    "the same bytes under two names": (raw_zip([*GOOD, ("a/data.pkl", b"", {"header": 0})]), "occurs twice"),
    "two records of one name": (raw_zip([*GOOD, GOOD[1]]), "occurs twice"),
    "a record begins beyond the file": (raw_zip(_with(1, header=1 << 31)), "is outside the file"),
    "a record begins in the directory": (raw_zip(_with(2, header=180)), "is outside the file|broken local header"),
    "a record ends beyond the file": (raw_zip(_with(1, nbytes=1 << 30, packed=1 << 30)), "reaches beyond the data"),
    "a record ends in the next": (raw_zip(_with(0, nbytes=40, packed=40)), "overlap"),
    "a record ends with the first byte of the next": (raw_zip(_with(0, nbytes=5, packed=5)), "overlap"),
    "a record is compressed": (raw_zip(_with(1, method=8)), "is compressed or encrypted"),
    "a record is compressed in its own header": (raw_zip(_with(1, local_method=8)), "broken local header"),
    "a record is a zip bomb": (raw_zip(_with(1, method=8, nbytes=0xFFFFFFFE)), "is compressed or encrypted"),
    "a record unpacks to more than it is": (raw_zip(_with(1, nbytes=1 << 20)), "is compressed or encrypted"),
    "a record is encrypted": (raw_zip(_with(1, flags=1)), "is compressed or encrypted"),
    "a record is strongly encrypted": (raw_zip(_with(1, flags=0x40)), "is compressed or encrypted"),
    "a zip64 size that is not there": (raw_zip(_with(1, nbytes=0xFFFFFFFF)), "zip64 record is broken"),
    "a name climbs": (raw_zip(_renamed("a/../../b")), "points outside the archive"),
    "a name is absolute": (raw_zip(_renamed("/etc/passwd")), "points outside the archive"),
    "a name is only dots": (raw_zip(_renamed("..")), "points outside the archive"),
    "fewer records than it counts": (raw_zip(GOOD, count=4), "directory"),
    "more records than it counts": (raw_zip(GOOD, count=2), "lists more records than it counts"),
    "no records at all by its count": (raw_zip(GOOD, count=0), "lists more records than it counts"),
    "the directory is longer than the file": (raw_zip(GOOD, directory_nbytes=1 << 30), "is recorded outside the file"),
    "the directory begins beyond the file": (raw_zip(GOOD, directory_start=1 << 30), "is recorded outside the file"),
    "the directory begins elsewhere": (raw_zip(GOOD, directory_start=7), "directory"),
    "no data.pkl": (raw_zip(GOOD[1:]), "holds 0 data.pkl records"),
    "two data.pkl": (raw_zip([*GOOD, ("b/data.pkl", b"N.", {})]), "holds 2 data.pkl records"),
    "data.pkl at the top": (raw_zip([("data.pkl", b"N.", {})]), "holds 0 data.pkl records"),
    "TorchScript": (raw_zip([*GOOD, ("a/constants.pkl", b"N.", {})]), "is a TorchScript archive"),
    "big-endian": (raw_zip([*GOOD, ("a/byteorder", b"big", {})]), "big-endian"),
    "an endianness of its own": (raw_zip([*GOOD, ("a/byteorder", b"middle", {})]), "does not record its byte order"),
    "an endless endianness": (raw_zip([*GOOD, ("a/byteorder", b"x" * 99, {})]), "does not record its byte order"),
    "a pickle of another checksum": (raw_zip(_with(0, crc=1)), "does not match its checksum"),
    "a pickle without an end": (raw_zip([("a/data.pkl", b"\x80\x02N", {})]), "ends too early"),
    "a pickle of nothing": (raw_zip([("a/data.pkl", b"", {})]), "ends too early"),
    "an empty archive": (raw_zip([]), "was not written by torch.save"),
    "an empty file": (b"", "is empty"),
    "a file of zeros": (bytes(4096), "begins with zeros: it was never written"),
    "a text file": (b"global_step3\n", "was not written by torch.save"),
    "a git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "was not written by torch.save"),
    "a bare pickle": (b"\x80\x02N.", "was not written by torch.save"),
    "a magic number alone": (b"PK\x03\x04", "is only 4 bytes long"),
    "a legacy head alone": (legacy_file(b"", b""), "ends in the middle of a pickle"),
    "a legacy file of another version": (
        legacy_file(b"N.").replace(b"M\xe9\x03.", b"M\xea\x03.", 1),
        "unknown torch.save protocol",
    ),
    "a legacy file that is big-endian": (legacy_file(b"N.").replace(b"\x88u.", b"\x89u.", 1), "big-endian"),
    "a legacy file without a list of keys": (legacy_file(b"N.", b"N."), "unknown torch.save protocol"),
    "a legacy file with a key too many": (legacy_file(b"N.", b"](X\x01\0\0\0" + b"0e."), "names '0' without reason"),
    "a legacy file with a key that is none": (legacy_file(b"N.", b"]]a."), "without reason"),
}


@pytest.mark.parametrize("lie", ARCHIVES)
def test_lying_archive_is_refused(lie: str) -> None:
    data, problem = ARCHIVES[lie]
    with pytest.raises(ContainerError, match=rf"^run/file.pt: [^\n]*({problem})[^\n]*; [^\n]+$"):
        read(data)


def test_the_same_archive_with_true_sizes_is_read() -> None:
    assert read(raw_zip(GOOD)) is None


def _saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(3.0), "b": [1, "x", (2.5, None)], "c": torch.Size([2])}, stream)
    return stream.getvalue()


def _saved_legacy(more: str = "x") -> bytes:
    stream = io.BytesIO()
    value = {"a": torch.arange(3.0), "b": [1, more, (2.5, None)], "c": torch.Size([2])}
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.mark.parametrize("field", ["position", "start", "nbytes", "count"])
@pytest.mark.parametrize("value", [1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_false_zip64_record_is_refused(field: str, value: int) -> None:
    data = _saved()
    locator = data.rindex(b"PK\x06\x07")
    end64 = data.rindex(b"PK\x06\x06")
    at = {"position": locator + 8, "start": end64 + 48, "nbytes": end64 + 40, "count": end64 + 32}[field]
    with refused(ContainerError):
        read(overwrite(data, at, struct.pack("<Q", value)))


def test_a_false_zip64_size_is_refused() -> None:
    entry = struct.pack("<2H2Q", 1, 16, 1 << 63, 1 << 63)
    body = b"PK\x03\x04" + bytes(22) + struct.pack("<2H", 10, 0) + b"a/data.pkl" + b"N."
    central = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 10, len(entry), 0, 0, 0, 0, 0
    )
    central += b"a/data.pkl" + entry
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(central), len(body), 0)
    with refused(ContainerError):
        read(body + central + end)


def test_directory_too_large_is_refused_before_it_is_read() -> None:
    with refused(ContainerError):
        torch_zip.parse(BytesReader(_saved()), max_directory_bytes=100)


@pytest.mark.parametrize("data", [_saved(), _saved_legacy()], ids=["zip", "legacy"])
def test_pickle_too_large_is_refused(data: bytes) -> None:
    with refused(ContainerError):
        read_torch_file(BytesReader(data), max_pickle_bytes=100)


def test_legacy_pickle_is_read_in_growing_pieces() -> None:
    reader = BytesReader(_saved_legacy(more="x" * 5 * FIRST_READ))
    assert read_torch_file(reader).root["a"].shape == (3,)


# ------------------------------------------------------------------------------------------------- damage


def _outcomes(damaged: Iterator[bytes]) -> dict[str, int]:
    outcomes = {"read": 0, "refused": 0}
    for data in damaged:
        try:
            file = read_torch_file(BytesReader(data))
            for value in walk(file.root):
                if isinstance(value, TensorRef) and value.contiguous:
                    where = file.locate(value)
                    assert 0 <= where.start <= where.end <= len(data)
            pickle(file.root, path="again.pt")
            outcomes["read"] += 1
        except CkptError as error:
            assert isinstance(error, ContainerError | StorageError)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            outcomes["refused"] += 1
    return outcomes


@pytest.mark.parametrize("saved", [_saved, _saved_legacy], ids=["zip", "legacy"])
def test_file_cut_off_anywhere_is_refused(saved: Any) -> None:
    data = saved()
    outcomes = _outcomes(truncate(data, n) for n in range(len(data)))
    assert outcomes["read"] == 0


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize(
    "saved",
    [_saved, lambda: without_checksum(_saved()), _saved_legacy],
    ids=["zip", "zip without checksums", "legacy"],
)
def test_file_with_any_byte_flipped_is_refused_or_read(saved: Any, mask: int) -> None:
    data = saved()
    assert len(data) < 4000
    outcomes = _outcomes(flip(data, i, mask) for i in range(len(data)))
    assert outcomes["refused"] > 100
    assert outcomes["read"] > 10  # tensor bytes, padding and time stamps are not ours to judge


def test_flip_in_the_pickle_is_caught_by_its_checksum() -> None:
    data = _saved()
    (record,) = (r for r in torch_zip.parse(BytesReader(data)) if r.name == "archive/data.pkl")
    outcomes = _outcomes(flip(data, i) for i in range(record.where.start, record.where.end))
    assert outcomes == {"read": 0, "refused": record.where.nbytes}


# ------------------------------------------------------------------------------------------------- odd pickles

ODD = {
    "a mark as the value": b"(.",
    "a mark below the value": b"(N.",
    "two values": b"NN.",
    "no value": b".",
    "a tuple without its values": b"N\x86.",
    "a tuple across a mark": b"N(N\x86.",
    "an item without a list": b"NNa.",
    "items without a mark": b"]Ne.",
    "a key without a value": b"}(Nu.",
    "a value without a dict": b"NNNs.",
    "a list as a key": b"}]Ns.",
    "a dict as a key": b"}}Ns.",
    "a tuple of a thousand values as a key": b"}(" + b"N" * 1000 + b"tNs.",
    "a memo entry that is not there": b"h\x05.",
    "an unknown opcode": b"\xff.",
    "a buffer from outside": b"\x97.",
    "text that is no UTF-8": b"X\x01\0\0\0\xff.",
    "an integer that is none": b"Ix\n.",
    "a float that is none": b"Fx\n.",
    "a string without quotes": b"Sx\n.",
    "a string with an unknown escape": b"S'\\q'\n.",
    "a string that ends in an escape": b"S'\\'\n.",
    "a call of a number": b"K\x01)R.",
    "a call with a list": b"ca\nb\n]R.",
    "an object of a number": b"K\x01)\x81.",
    "a state for a list": b"]}b.",
    "a state for a class": b"ca\nb\n}b.",
    "two states": b"ca\nb\n)\x81}b}b.",
    "items for a class": b"ca\nb\nNa.",
    "members for a list": b"\x80\x04](N\x90.",
    "a class without a name": b"c\n\n.",
    "a class of two lines": b"\x80\x04X\x03\0\0\0a\nbX\x01\0\0\0c\x93.",
    "a class named by a number": b"\x80\x04K\x01K\x01\x93.",
    "a class of no characters": b"c\xff\nb\n.",
    "a size of text": proto2(name("torch", "Size") + text("a") + b"\x85R"),
    "a size of negative numbers": proto2(name("torch", "Size") + integers(-1) + b"\x85R"),
    "an ordered dict of triples": proto2(name("collections", "OrderedDict") + integers(1, 2, 3) + b"\x85\x85R"),
    "a tensor without arguments": proto2(name("torch._utils", "_rebuild_tensor_v2") + b")R"),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_pickle_is_refused(odd: str) -> None:
    with refused(ContainerError):
        unpickle(ODD[odd], path="odd.pt")


def test_error_names_the_byte() -> None:
    with pytest.raises(ContainerError) as caught:
        unpickle(b"\x80\x02N0\xff.", path="odd.pt")
    assert str(caught.value) == (
        "odd.pt: pickle refused at byte 5: opcode 0xff has no place in a checkpoint; "
        "it was not written by torch.save; do not load it"
    )


def test_huge_integer_as_a_value_is_kept() -> None:
    assert unpickle(proto2(integer(1 << 1500)), path="x").value == 1 << 1500


@pytest.mark.parametrize(
    ("pickled", "expected"),
    [
        (b"S'a\\'b\\\\c\\n\\x41'\n.", "a'b\\c\nA"),
        (b'S"it\'s"\n.', "it's"),
        (b"U\x03caf.", "caf"),
        (b"U\x05caf\xc3\xa9.", "caf\u00e9"),
        (b"U\x04caf\xe9.", "caf\u00e9"),
        (b"T\x02\0\0\0ab.", "ab"),
        (b"Va\\u00e9\n.", "a\u00e9"),
        (b"I01\n.", True),
        (b"I12\n.", 12),
        (b"L-7L\n.", -7),
        (b"F1.5\n.", 1.5),
        (b"(I1\nI2\nt.", (1, 2)),
        (b"(lp0\nI1\na.", [1]),
        (b"(dp0\nI1\nI2\ns.", {1: 2}),
    ],
)
def test_strings_and_numbers_of_older_protocols_are_read(pickled: bytes, expected: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = unpickle(pickled, path="old.pt").value
    assert (type(value), value) == (type(expected), expected)
