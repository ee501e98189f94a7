"""Saves of training frameworks, each in a folder of its own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import ckpttool
from ckpttool.commit.marks import Pin, write_pin
from ckpttool.errors import LayoutError, StorageError
from ckpttool.integrations.live.folders import Folders, candidates_in, check_no_foreign
from ckpttool.integrations.live.options import SaveOptions
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, MARK, walk
from tests.rooms import present
from tests.saving.checkpoints import save_version
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket


@pytest.mark.parametrize(
    "others",
    [*(["s3: thin"] * present("thinning")), "s3: none", "s3: nested", "s3: pinned", "s3: whole", "disk: nested"],
)
def test_nothing_is_removed_before_a_save_that_is_refused(
    others: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where, what = others.split(": ")
    for number in (1, 2) if what != "none" else (2,):
        save_version(LOCAL, str(tmp_path / f"checkpoint-{number}"), Alone(), "step", number - 1)
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"weights")
    if what == "thin":
        _thin(tmp_path / "checkpoint-1" / "step")
    if what == "nested":
        shutil.copytree(tmp_path / "checkpoint-1" / "step", tmp_path / "checkpoint-2" / "step" / "sft" / "step60")
    if what == "pinned":
        write_pin(LOCAL, str(tmp_path / "checkpoint-2" / "step"), Pin("me", 1.0, "mine"))
    root = str(tmp_path)
    if where == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        bucket.upload(tmp_path, "root")
        root = bucket.url("root")
    folders = Folders(root, SaveOptions())
    before = dict(walk(folders.storage, f"{root}/checkpoint-2")).keys()
    if what == "whole":
        folders._begin(f"{root}/checkpoint-2", is_folder=False)
    else:
        with refused(StorageError):
            folders._begin(f"{root}/checkpoint-2", is_folder=False)
    folders.storage.refresh([])
    gone = what == "whole" and where == "s3"
    assert dict(walk(folders.storage, f"{root}/checkpoint-2")).keys() == (set() if gone else before)


def _thin(path: Path) -> None:
    from ckpttool.extensions.thinning.replacement import ThinOptions, plan_thinning

    plan_thinning(LOCAL, str(path), ThinOptions(dtype="bf16", grace=0.0)).carry_out(LOCAL)


@pytest.mark.skipif(not present("thinning"), reason="the extension that thins checkpoints was removed")
def test_a_run_goes_on_from_whole_checkpoints_before_thin_ones(tmp_path: Path) -> None:
    names = [f"checkpoint-{n}" for n in (3, 2, 1)]
    for number, name in enumerate(names):
        save_version(LOCAL, str(tmp_path / name), Alone(), "step", number)
    _thin(tmp_path / names[0] / "step")
    found = candidates_in(LOCAL, [str(tmp_path / name) for name in names])
    assert found == [str(tmp_path / name / "step") for name in (names[1], names[2], names[0])]


def test_a_folder_of_fsdp2_counts_while_it_is_committed(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 3)
    manager = ckpttool.CheckpointManager(tmp_path, layout="accelerate")
    manager.save(net, optimizer=torch.optim.SGD(net.parameters()), step=1, tag="checkpoint-1", save_latest=False)
    folder = tmp_path / "checkpoint-1"
    (folder / MARK).write_text("{}")  # the save died after the commit
    assert candidates_in(LOCAL, [str(folder)]) == [str(folder)]
    (folder / MANIFEST).unlink()
    assert candidates_in(LOCAL, [str(folder)]) == []
    check_no_foreign(LOCAL, [str(folder)])
    (folder / MARK).unlink()
    with refused(LayoutError):
        check_no_foreign(LOCAL, [str(folder)])
