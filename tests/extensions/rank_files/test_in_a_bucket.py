"""A run of FSDP2 in a bucket: read, listed and copied as on a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ckpttool
from tests.storage import places
from tests.storage.places import files_in
from tests.truth import HERE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket


def test_a_run_of_fsdp2_in_a_bucket_is_read_and_listed(s3: Bucket, tmp_path: Path) -> None:
    run, place = HERE / "fsdp" / "torch2.14.1-fsdp-3" / "verl", places.Remote(s3)
    stored = place.put(str(run))
    assert ckpttool.digest(stored) == ckpttool.digest(run)
    assert [(e.name, e.whole) for e in ckpttool.ls(stored).entries] == [("global_step_3", True)]
    for name, src in (("local", run), ("remote", stored)):
        ckpttool.consolidate(src, tmp_path / name, to="safetensors", optimizer=True)
    assert files_in(str(tmp_path / "local")) == files_in(str(tmp_path / "remote"))
    out = place.new()
    ckpttool.cp(run, out, prove=True)
    assert ckpttool.inspect(out).location == f"{out}/global_step_3/actor"
