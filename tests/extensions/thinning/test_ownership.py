"""A replacement of a checkpoint keeps a pin that is set meanwhile, and the files of users."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.extensions.thinning import replacement
from ckpttool.extensions.thinning.replacement import recover
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, THINNING, open_storage
from ckpttool.storage.safe_files import temporary_name
from tests.saving.checkpoints import save_version, version, whole

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_pin_after_the_last_look_keeps_it_whole(
    where: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "own")
    if where == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        root = bucket.url("run/own")
    storage = open_storage(root)
    for number in (0, 1):  # the values of the first agree
        save_version(storage, root, Alone(), f"step{number}", number)
    claim = replacement._Work._claim

    def pin_and_claim(*given: Any) -> None:
        if given[0].directory.endswith("step0"):
            ckpttool.pin(f"{root}/step0", why="mine")
        claim(*given)

    monkeypatch.setattr(replacement._Work, "_claim", pin_and_claim)
    assert ckpttool.prune(root, keep_last=1, thin="bf16")[0].reason == "pinned meanwhile"
    storage.refresh([])
    assert whole(root, open_storage(root))["step0"] == version(0)


def test_a_thinning_that_is_finished_takes_no_file_of_the_user(tmp_path: Path) -> None:
    save_version(LOCAL, str(tmp_path), Alone(), "step1", 1)
    users = ["model.safetensors.0badcafe.partial", f"{THINNING}.0badcafe.partial", "model.safetensors.mine.partial"]
    for name in users:
        (tmp_path / "step1" / name).write_text("mine")
    recover(LOCAL, str(tmp_path / "step1"), grace=0)
    ours = [temporary_name(name) for name in ("model.safetensors", THINNING)]
    for name in ours:
        (tmp_path / "step1" / name).write_text("")
    (tmp_path / "step1" / THINNING).write_text('{"key": "x", "files": ["model.safetensors"], "old": []}')
    recover(LOCAL, str(tmp_path / "step1"), grace=0)
    left = set(os.listdir(tmp_path / "step1"))
    assert left.issuperset(users)
    assert left.isdisjoint([*ours, THINNING])
