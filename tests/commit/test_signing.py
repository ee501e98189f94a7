"""Signed saves: changes without the key are refused, also with recomputed checksums."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.checksums import MIN_CHUNK_BYTES, of_bytes
from ckpttool.commit.manifest import CHECKSUM, SIGNATURE, Manifest, checksum, read_manifest
from ckpttool.commit.signing import read_key, signature
from ckpttool.errors import CkptError, PlanError
from ckpttool.formats import open_whole
from ckpttool.integrations.live.manager import CheckpointManager
from ckpttool.integrations.torch.collectives import open_together
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import HashedFile, HostPayload, PlainFile
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL, MANIFEST, connect
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.saving.checkpoints import part, version
from tests.storage.large import write_weights
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpttool.model import Checkpoint

KEY = b"canary-0123456789abcdef"
OTHER = b"another-0123456789abcdef"


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """A signed commit."""
    root, files = tmp_path / "root", part(version(1), 0, 1)
    save(LOCAL, str(root), Alone(), Request("t", 1, 2, sign_key=KEY), files)
    return root / "t"


def _manifest(directory: Path, change: Callable[[dict[str, Any]], object], key: bytes | None = None) -> None:
    """Change a manifest, as whoever can write the files can: its checksums fit again."""
    found = json.loads((directory / MANIFEST).read_text())
    change(found)
    if key is not None:
        said = {k: v for k, v in found.items() if k not in {CHECKSUM, SIGNATURE}}
        found[SIGNATURE] = signature(json.dumps(said, sort_keys=True, separators=(",", ":")).encode(), key)
    found[CHECKSUM] = checksum(found)
    (directory / MANIFEST).write_text(json.dumps(found))


def _read_all(directory: Path, key: bytes | None) -> None:
    _read_files(open_whole(LOCAL, str(directory), key=key))


def _read_files(checkpoint: Checkpoint) -> None:
    for n in range(len(checkpoint.files)):
        with connect(checkpoint.storage).open(checkpoint.path(n)) as reader:
            reader.read(0, reader.nbytes)


def test_a_signed_commit_is_read(signed: Path) -> None:
    manifest = read_manifest(LOCAL, str(signed), KEY)
    for name, sums in manifest.files.items():
        assert sums.sha256 == (hashlib.sha256((signed / name).read_bytes()).digest(),)  # smaller than a chunk
    _read_all(signed, KEY)
    _read_all(signed, None)
    assert ckpttool.verify(signed, sign_key=KEY).findings == ckpttool.verify(signed, deep=True).findings


def _exchange(directory: Path, key: bytes | None) -> None:
    """Other weights, with all checksums as they must be."""
    other = version(2)
    changed = next(name for name in sorted(other) if other[name] != version(1)[name])
    (directory / changed).write_bytes(other[changed])
    sums = of_bytes(other[changed])

    def change(found: dict[str, Any]) -> None:
        made = json.loads(Manifest("t", 1, 0.0, "", 1, 2, files={changed: sums}).to_json())["files"][changed]
        found["files"][changed] |= made

    _manifest(directory, change, key)


ATTACKS: dict[str, Callable[[Path], object]] = {
    "other weights": lambda d: _exchange(d, None),
    "other weights, and another key": lambda d: _exchange(d, OTHER),
    "another step": lambda d: _manifest(d, lambda m: m.update(step=7)),
    "another tag": lambda d: _manifest(d, lambda m: m.update(tag="u")),
    "a file left out": lambda d: _manifest(d, lambda m: m["files"].popitem()),
    "no signature": lambda d: _manifest(d, lambda m: m.pop(SIGNATURE)),
    "a signature of no text": lambda d: _manifest(d, lambda m: m.update({SIGNATURE: [1]})),
    "an odd signature": lambda d: _manifest(d, lambda m: m.update({SIGNATURE: "\ud800é"})),
    "no manifest": lambda d: (d / MANIFEST).unlink(),
    "signed without SHA-256": lambda d: _manifest(d, lambda m: [f.pop("sha256") for f in m["files"].values()], KEY),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_foreign_file_is_refused(attack: str, signed: Path) -> None:
    ATTACKS[attack](signed)
    with pytest.raises(PlanError) as caught:  # so that a restore takes no older one instead
        _read_all(signed, KEY)
    assert str(signed) in str(caught.value)
    findings = [f.problem for f in ckpttool.verify(signed, sign_key=KEY).findings]
    assert [p for p in findings if "sign" in p]
    assert "canary" not in str(caught.value) + str(findings)


def test_bytes_that_have_another_sha256_are_refused(signed: Path) -> None:
    """Though their CRC-32 is the same, which is easy to make."""
    other = version(2)
    changed = next(name for name in sorted(other) if other[name] != version(1)[name])
    sums = of_bytes(other[changed])
    (signed / changed).write_bytes(other[changed])

    def change(found: dict[str, Any]) -> None:
        made = json.loads(Manifest("t", 1, 0.0, "", 1, 2, files={changed: sums}).to_json())["files"][changed]
        found["files"][changed] |= made  # CRC-32 of what is there now; SHA-256 of what was saved

    _manifest(signed, change, KEY)
    _read_all(signed, None)
    with refused(CkptError):
        _read_all(signed, KEY)
    assert [f for f in ckpttool.verify(signed, sign_key=KEY).findings if f.path.endswith(changed)]


def test_tensor_bytes_of_the_same_crc32_are_refused_on_the_ranks_of_a_restore(tmp_path: Path) -> None:
    """Each rank has its own storage, and opening reads only the chunks with the structure of a file."""
    pytest.importorskip("torch", reason="a restore opens the checkpoint, which sends errors between ranks with torch")
    weights = write_weights(tmp_path / "weights", {"weight": MIN_CHUNK_BYTES}) / "model.safetensors"
    files = [PlainFile(weights.name, HostPayload(weights.read_bytes()))]
    save(LOCAL, str(tmp_path), Alone(), Request("t", 1, 2, sign_key=KEY), files)
    directory = str(tmp_path / "t")

    def opened(key: bytes | None) -> Checkpoint:
        return open_together(directory, LOCAL, lambda: open_whole(LOCAL, directory, key=key), Alone())

    _read_files(opened(KEY))
    path = tmp_path / "t" / weights.name
    data = bytearray(path.read_bytes())
    before, at = zlib.crc32(data), 2 * MIN_CHUNK_BYTES
    # CRC-32 is the remainder of a division: adding the divisor does not change it.
    data[at : at + 5] = (int.from_bytes(data[at : at + 5], "little") ^ 0x1DB710641).to_bytes(5, "little")
    assert zlib.crc32(data) == before
    path.write_bytes(data)
    _read_files(opened(None))
    with refused(CkptError):
        _read_files(opened(KEY))


def test_a_signed_checkpoint_under_another_name_is_refused(signed: Path) -> None:
    signed.rename(signed.with_name("newer"))
    with refused(PlanError):
        _read_all(signed.with_name("newer"), KEY)
    signed.with_name("newer").rename(signed.with_name("t.replaced"))  # while it is saved anew
    _read_all(signed.with_name("t.replaced"), KEY)


def test_a_damaged_signature_is_found_without_the_key(signed: Path) -> None:
    path = signed / MANIFEST
    told = json.loads(path.read_text())
    told[SIGNATURE] = told[SIGNATURE][::-1]
    path.write_text(json.dumps(told))
    with refused(CkptError):
        read_manifest(LOCAL, str(signed))


def test_another_key_is_refused(signed: Path) -> None:
    with refused(PlanError):
        _read_all(signed, OTHER)


def test_the_command(signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    monkeypatch.setenv("SIGN_KEY", OTHER.decode())
    plain = command("verify", signed, "--deep")
    good = command("verify", signed, "--sign-key", tmp_path / "key")
    assert (good.code, good.stdout) == (plain.code, plain.stdout)
    bad = command("verify", signed, "--sign-key", "env:SIGN_KEY")
    assert bad.code == 1
    assert "is not signed with this key" in bad.stdout
    for where in (tmp_path / "none", "env:NOTHING", "env:"):
        told = command("verify", signed, "--sign-key", where)
        assert told.code == 3
        assert str(where) in told.error
    assert "0123456789abcdef" not in good.stdout + good.stderr + bad.stdout + bad.stderr


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    assert read_key(None) is None
    assert read_key(KEY) == KEY
    for given_key in (b"abc", tmp_path / "short", str(tmp_path / "short")):
        with refused(PlanError) as caught:
            read_key(given_key)
        assert "'abc'" not in str(caught.value)


def test_a_manager_without_a_key_cannot_require_signatures(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a restore needs torch")
    with refused(PlanError):
        CheckpointManager(tmp_path).restore(None, require_signed=True)


def test_a_missing_manifest_is_refused_if_required(signed: Path) -> None:
    open_whole(LOCAL, str(signed), committed=True)
    os.unlink(signed / MANIFEST)
    open_whole(LOCAL, str(signed))
    with refused(PlanError):
        open_whole(LOCAL, str(signed), committed=True)


@pytest.mark.slow
@settings(max_examples=400 if sampling.thorough() else 15)
@given(st.integers(0, 3 * MIN_CHUNK_BYTES + 5), st.lists(st.integers(1, 2 * MIN_CHUNK_BYTES), min_size=1, max_size=4))
def test_each_chunk_has_its_sha256_however_the_bytes_come(nbytes: int, sizes: list[int]) -> None:
    data = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    file = HashedFile(PlainFile("f", HostPayload(data)))
    assert b"".join(bytes(piece) for piece in file.stream()) == data
    expected = [data[n : n + MIN_CHUNK_BYTES] for n in range(0, nbytes, MIN_CHUNK_BYTES)]
    assert file.checksums.sha256 == tuple(hashlib.sha256(chunk).digest() for chunk in expected)
    pieces = iter(sizes * (nbytes // sum(sizes) + 1))
    cut = HashedFile(_Cut(data, pieces))
    assert b"".join(bytes(piece) for piece in cut.stream()) == data
    assert cut.checksums.sha256 == file.checksums.sha256


class _Cut(PlainFile):
    """A file whose bytes come in pieces of any sizes."""

    def __init__(self, data: bytes, sizes: Any) -> None:
        super().__init__("f", HostPayload(data))
        self._data, self._sizes = data, sizes

    @property
    def checksums(self) -> Any:
        return of_bytes(self._data)

    def stream(self, mapped: Any = map) -> Any:
        at = 0
        while at < len(self._data):
            size = next(self._sizes)
            yield memoryview(self._data)[at : at + size]
            at += size
