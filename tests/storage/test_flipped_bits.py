"""A flipped bit in a bucket, or in transfer, is reported by the reading command."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.errors import ChecksumError
from tests import damage
from tests.cli.command import staging_of
from tests.storage.places import files_in
from tests.truth import HERE
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
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
