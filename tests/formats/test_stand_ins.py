"""Files in the place of a checkpoint's files are named, with what brings the content."""

from __future__ import annotations

import gzip
import shutil
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.errors import CkptError, ContainerError
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
CONTENT = {
    "git-lfs": LFS,
    "git-annex": b"/annex/objects/SHA256E-s9--00.pt\n",
    "HTML": b"<!DOCTYPE html>\n<html><title>404</title>",
    "XML": b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>',
    "gzip": gzip.compress(b"PK" * 100),
    "Zstandard": b"\x28\xb5\x2f\xfd" + bytes(9),
}


@pytest.mark.parametrize("where", ["a rank file", "safetensors", "an index"])
@pytest.mark.parametrize("what", CONTENT)
def test_a_stand_in_is_named(what: str, where: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy("zero2-dp2-bf16-sgd")
    if where == "a rank file":
        path = root / "global_step3" / "mp_rank_00_model_states.pt"
    else:
        root = tmp_path / "weights"
        root.mkdir()
        path = root / f"model.safetensors{'.index.json' if where == 'an index' else ''}"
    path.write_bytes(CONTENT[what])
    with refused(ContainerError):
        ckpttool.inspect(root)
    if where == "a rank file":
        assert [f"{e.torn}: {e.problem}" for e in ckpttool.ls(root).entries] == [f"None: {path.name}: {_problem(root)}"]


def _problem(root: Path) -> str:
    with pytest.raises(ContainerError) as caught:
        ckpttool.inspect(root)
    return caught.value.problem


@pytest.mark.parametrize("lost", ["all", "one"])
def test_a_cache_copied_without_its_blobs_is_named(lost: str, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    shutil.copytree(source("zero2-dp2-bf16-sgd"), snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    if lost == "all":
        shutil.rmtree(blobs)
    else:
        next(snapshot.rglob("mp_rank*")).resolve().unlink()
    with refused(CkptError):
        ckpttool.inspect(snapshot)
    assert lost == "all" or "is a link to" in str(ckpttool.verify(snapshot).findings[0])
