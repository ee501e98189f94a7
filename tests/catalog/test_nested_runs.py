"""A checkpoint with another run below it is not removed: the other run would go with it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.retention import Rules
from ckpttool.errors import StorageError
from ckpttool.formats.nested import others_below
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MARK
from tests.saving.checkpoints import save_version, version
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path


def _write(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name, data in version(0).items():
        (directory / name).write_bytes(data)


def _save(root: Path, tag: str, number: int, **options: Any) -> None:
    save_version(LOCAL, str(root), Alone(), tag, number, **options)


@pytest.mark.parametrize("below", ["sft", "finetune/checkpoint-60", "finetune/checkpoint-60/global_step60"])
@pytest.mark.parametrize("how", ["prune", "maintain", "rotate"])
def test_a_run_below_a_checkpoint_is_kept_with_it(how: str, below: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        tag = f"checkpoint-{number}/global_step{number}" if how == "rotate" else f"step{number}"
        _save(tmp_path / f"checkpoint-{number}" if how == "rotate" else tmp_path, tag.rpartition("/")[2], number)
    first, second = (tmp_path / (f"checkpoint-{n}" if how == "rotate" else f"step{n}") for n in (1, 2))
    _write(first / below)
    if how == "prune":
        (shown, *_) = ckpttool.prune(tmp_path, keep_last=1, dry_run=True)
        (decision, *_) = ckpttool.prune(tmp_path, keep_last=1)
        assert shown.reason == decision.reason == f"contains checkpoints: {below}"
    elif how == "maintain":
        maintain(LOCAL, str(tmp_path), Rules(last=1), grace=0)
    else:
        rotate(LOCAL, str(tmp_path), 1, keep=(), grace=0)
    assert {p.name for p in (first / below).iterdir()} == set(version(0))
    assert not second.exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_save_does_not_replace_a_checkpoint_above_a_run(killed: bool, tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1)
    if killed:
        (tmp_path / "step1" / "ckpttool.json").unlink()
        (tmp_path / "step1" / MARK).write_text("{}")
    _write(tmp_path / "step1" / "a" / "b" / "step60")
    with refused(StorageError):
        _save(tmp_path, "step1", 2, overwrite=True)
    assert {p.name for p in (tmp_path / "step1/a/b/step60").iterdir()} == set(version(0))


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero2-dp2-bf16-trainer"])
def test_own_directories_are_no_other_checkpoints(name: str, tmp_path: Path) -> None:
    shutil.copytree(source(name), tmp_path / "root")
    assert others_below(LOCAL, str(tmp_path / "root")) == []
    next((tmp_path / "root").rglob("*optim_states.pt")).unlink()
    assert others_below(LOCAL, str(tmp_path / "root")) == []
