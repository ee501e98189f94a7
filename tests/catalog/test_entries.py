"""The checkpoints of a trainer's run, while another process removes some of them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.catalog.cleanup import rotate
from ckpttool.catalog.runs import trainer_commits
from ckpttool.formats.layouts import Place
from ckpttool.formats.scan import commits, scan
from ckpttool.storage import aside_name
from ckpttool.storage.local import LocalStorage
from tests.faults.disks import watching
from tests.faults.rules import Fail, Rule
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.storage.base import Entry


class _Removing(LocalStorage):
    """A disk on which another process removes a directory just before it is listed."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self._victim = victim

    def listing(self, path: str) -> list[Entry]:
        if path == self._victim:
            shutil.rmtree(path, ignore_errors=True)
        return super().listing(path)


def _run(root: Path) -> None:
    for step in (3, 6):
        shutil.copytree(source("zero2-dp2-bf16"), root / f"checkpoint-{step}")


@pytest.mark.parametrize("victim", ["checkpoint-3", "checkpoint-3/global_step3"])
def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(victim: str, tmp_path: Path) -> None:
    _run(tmp_path)
    storage = _Removing(os.path.join(tmp_path, victim))
    found = trainer_commits(Place(storage, str(tmp_path)).folders)
    assert [one.step for one in found] == [6]


def test_a_rotation_finishes_the_removals_of_a_killed_one(tmp_path: Path) -> None:
    _run(tmp_path)
    for name in (aside_name("checkpoint-1"), aside_name("checkpoint_2"), ".git", ".removed"):
        (tmp_path / name / "global_step1").mkdir(parents=True)
        (tmp_path / name / "global_step1" / "half").write_bytes(b"x")
    rotate(LocalStorage(), str(tmp_path), None, keep=(), grace=3600.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".git", ".removed", "checkpoint-3", "checkpoint-6"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    _run(tmp_path)
    with watching(Rule(Fail("EIO"), "scandir", "global_step3$")), refused(ckpttool.StorageError):
        trainer_commits(Place(LocalStorage(), str(tmp_path)).folders)


def test_a_tag_that_is_removed_meanwhile_is_no_commit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpttool.json").write_text("{}")
    storage = _Removing(os.path.join(tmp_path, "a"))
    assert [one.tag for one in commits(scan(storage, str(tmp_path)))] == ["b"]
