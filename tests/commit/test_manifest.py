from __future__ import annotations

import base64
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.checksums import MIN_CHUNK_BYTES, Checksums, of_bytes
from ckpttool.commit.manifest import CHECKSUM, Manifest, checksum, parse_manifest, read_manifest, size_problems
from ckpttool.errors import LayoutError, PlanError, StorageError
from ckpttool.storage import LOCAL, MANIFEST
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

GOOD = Manifest(
    tag="step1", step=1, created=1e9, attempt="ab", world_size=2, stage=3, metrics={"loss": 0.5, "nan": float("inf")},
    versions={"torch": "2"}, files={"a/b.pt": of_bytes(b"hello"), "empty": of_bytes(b"")},
)  # fmt: skip


@settings(max_examples=25)
@given(
    st.builds(
        Manifest,
        tag=st.text(), step=st.integers(-1, 2**70), created=st.floats(0, 1e10), attempt=st.text(),
        world_size=st.integers(1, 10**6), stage=st.integers(0, 3),
        metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
        versions=st.dictionaries(st.text(), st.text()),
        files=st.dictionaries(st.text("abc.-_é", min_size=3), st.binary(max_size=50).map(of_bytes)),
    )
)  # fmt: skip
def test_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(manifest.to_json()) == manifest


def test_large_files_have_many_chunks() -> None:
    sums = Checksums(3 * MIN_CHUNK_BYTES + 1, MIN_CHUNK_BYTES, (1, 2, 3, 0xFFFFFFFF))
    found = parse_manifest(Manifest("t", 1, 0.0, "", 1, 1, files={"f": sums}).to_json())
    assert found.files == {"f": sums}
    assert found.nbytes == sums.nbytes


def _changed(*keys: str, value: Any) -> bytes:
    data = json.loads(GOOD.to_json())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    data[CHECKSUM] = checksum(data)  # what is wrong was written so
    return json.dumps(data).encode()


_EMPTY = {"nbytes": 0, "chunk_bytes": MIN_CHUNK_BYTES, "crc32": ""}
DAMAGED = {
    "empty": b"",
    "zeros": bytes(500),
    "cut off": GOOD.to_json()[:-30],
    "no object": b"[1]",
    "null": b"null",
    "not text": b"\xff\xfe{}",
    "deep": b"[" * 100_000,
    "huge number": b'{"format": ' + b"9" * 5000 + b"}",
    "infinite step": _changed("step", value=float("inf")),
    "no step": _changed("step", value=None),
    "files are a list": _changed("files", value=[]),
    "metrics are text": _changed("metrics", value="loss"),
    "metric is a list": _changed("metrics", "loss", value=[]),
    "negative size": _changed("files", "a/b.pt", "nbytes", value=-5),
    "another size": _changed("files", "a/b.pt", "nbytes", value=MIN_CHUNK_BYTES + 1),
    "endless size": _changed("files", "a/b.pt", "nbytes", value=2**200),
    "no chunks": _changed("files", "a/b.pt", "chunk_bytes", value=0),
    "tiny chunks": _changed("files", "a/b.pt", "chunk_bytes", value=1),
    "negative chunks": _changed("files", "a/b.pt", "chunk_bytes", value=-4),
    "no base64": _changed("files", "a/b.pt", "crc32", value="!!!!"),
    "half a checksum": _changed("files", "a/b.pt", "crc32", value=base64.b64encode(b"ab").decode()),
    "upwards": _changed("files", value={"../../etc/passwd": _EMPTY}),
    "absolute": _changed("files", value={"/etc/passwd": _EMPTY}),
    "later": _changed("format", value=3),
}  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_one_clear_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(PlanError if data == DAMAGED["later"] else LayoutError) as caught:
        read_manifest(LOCAL, str(tmp_path))
    assert caught.value.path == str(tmp_path / MANIFEST)
    assert ("later release" in str(caught.value)) == (data == DAMAGED["later"])


def test_every_truncation_and_many_flips(tmp_path: Path) -> None:
    good, chance = GOOD.to_json(), random.Random(0)  # noqa: S311
    cases = [good[:n] for n in range(len(good))]
    for _ in range(500):
        flipped = bytearray(good)
        flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        cases.append(bytes(flipped))
    refused = 0
    for data in cases:
        (tmp_path / MANIFEST).write_bytes(data)
        try:
            assert read_manifest(LOCAL, str(tmp_path)) == GOOD
        except LayoutError:
            refused += 1
    assert refused >= len(good) + 400  # white space may change


def test_a_manifest_of_an_earlier_release_has_no_checksum() -> None:
    data = json.loads(GOOD.to_json())
    for name in (CHECKSUM, "parent", "number"):
        del data[name]
    assert parse_manifest(json.dumps(data).encode()) == GOOD
    del (without := json.loads(GOOD.to_json()))[CHECKSUM]
    with refused(ValueError):
        parse_manifest(json.dumps(without).encode())


def test_missing_manifest(tmp_path: Path) -> None:
    with refused(StorageError):
        read_manifest(LOCAL, str(tmp_path))


def test_files_that_are_not_there_in_full(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.pt").write_bytes(b"hell")
    problems = [str(p) for p in size_problems(LOCAL, str(tmp_path), GOOD)]
    assert [p.split("; ")[0] for p in problems] == [
        f"{tmp_path}/a/b.pt: is 4 bytes long, but 5 in the manifest",
        f"{tmp_path}/empty: is missing, but the manifest lists it",
    ]
    (tmp_path / "a" / "b.pt").write_bytes(b"hello")
    (tmp_path / "empty").touch()
    assert size_problems(LOCAL, str(tmp_path), GOOD) == []
