"""A flipped bit in a bucket, or in transfer, is reported by the reading command."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.analysis import verify
from ckpttool.errors import ChecksumError
from ckpttool.storage import MANIFEST
from tests import damage
from tests.cli.command import staging_of
from tests.commit.test_signed import SIGNED
from tests.storage.places import files_in
from tests.truth import HERE
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.storage.places import Place
    from tests.storage.server import Bucket

pytestmark = pytest.mark.slow

COMMANDS: dict[str, Callable[[str, str], Any]] = {
    "consolidate": lambda src, out: ckpttool.consolidate(src, out, to="safetensors"),
    "consolidate bf16": lambda src, out: ckpttool.consolidate(src, out, to="torch", dtype="bf16"),
    "convert zero": lambda src, out: ckpttool.convert(src, out, to="zero", world_size=3),
    "convert universal": lambda src, out: ckpttool.convert(src, out, to="universal"),
    "cp": lambda src, out: ckpttool.cp(src, out),
    "load_state_dict": lambda src, out: dict(ckpttool.load_state_dict(src)),
}


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """A checkpoint with one flipped bit in the masters of rank 1."""
    copy = tmp_path / "flipped"
    shutil.copytree(HERE / "checkpoints" / "zero3-dp4-bf16", copy)
    damage.flip_in_master(damage.optimizer_file(copy, 1))
    return copy


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flipped_bit_of_a_source_is_refused(name: str, place: Place, flipped: Path) -> None:
    src, out = place.put(flipped), place.new()
    with refused(ChecksumError):
        COMMANDS[name](src, out)
    assert not place.files(out)


@pytest.mark.parametrize("saved", [False, True])
def test_a_deep_check_that_reads_many_pieces_at_once_finds_the_same_as_on_a_disk(
    saved: bool, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    shutil.copytree(HERE / "checkpoints" / ("zero2-dp2-bf16-sgd" if saved else "zero3-dp4-bf16"), root)
    if saved:  # with the checksums that a save of ckpttool records
        shutil.copyfile(SIGNED, root / "global_step3" / MANIFEST)
    else:
        for number, file in enumerate(sorted(root.rglob("*optim_states.pt"))[1:]):
            data = bytearray(file.read_bytes())
            for place_of_bit in (len(data) // 4 + 700 * number, len(data) * 2 // 3):
                data[place_of_bit] ^= 1
            file.write_bytes(data)

    def found(where: str) -> tuple[list[tuple[str, str]], int, int]:
        report = ckpttool.verify(where, deep=True)
        findings = [(os.path.basename(finding.path), finding.problem) for finding in report.findings]
        return findings, report.records_checked, report.records_unrecorded

    expected = found(str(root))
    assert expected == ([], 3, 0) if saved else len(expected[0]) >= 3
    monkeypatch.setattr(verify, "PIECE_BYTES", 1 << 9)
    monkeypatch.setattr(verify, "REMOTE_BYTES", 1 << 13)
    at_once, batches = [0], verify._batches

    def batched(cut: Iterable[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
        for batch in batches(cut, most):
            at_once.append(sum(end - start for _, start, end in batch))
            yield batch

    monkeypatch.setattr(verify, "_batches", batched)
    url = place.put(root)
    assert found(url) == expected
    assert max(at_once) > verify.PIECE_BYTES or "://" not in url


@pytest.mark.parametrize("name", ["consolidate", "convert zero", "cp"])
def test_a_bucket_to_disk_and_back(name: str, s3: Bucket, flipped: Path, tmp_path: Path) -> None:
    s3.upload(flipped, "run")
    for src, out in ((s3.url("run"), str(tmp_path / "out")), (str(flipped), s3.url("out"))):
        with pytest.raises(ChecksumError):
            COMMANDS[name](src, out)
    assert not s3.keys("out")
    assert not s3.uploads()
    assert not (tmp_path / "out").exists()
    assert staging_of(tmp_path / "out") == []
    assert files_in(flipped)  # the source is as it was
