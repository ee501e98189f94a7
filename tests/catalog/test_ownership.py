"""What is removed as a leftover of ckpttool is known by a mark, so that a user's files of such names stay."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import StorageError
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL
from ckpttool.storage.base import WHOLE
from ckpttool.storage.safe_files import is_temporary, temporary_name
from tests.saving.checkpoints import save_version, version, whole
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = ["notes.20261126.partial", ".ckpttool-notes.20261126.partial", "latest.0badcafe.partial"]
DIRECTORIES = [
    "data.20261126.partial", ".data.0123456789abcdef.partial", "data.removed", ".data.0123456789abcdef.removed",
    "step1.replaced", "step3.replaced", "step9.replaced", ".ckpttool-scratch-mine", ".ckpttool-scratch-",
]  # fmt: skip


def _save(root: Path, number: int, **options: Any) -> None:
    save_version(LOCAL, str(root), Alone(), f"step{number}", number, **options)


def _copy(root: Path) -> None:
    ckpttool.cp(source("zero2-dp2-bf16"), root)


def _prune(root: Path) -> None:
    ckpttool.prune(root, keep_last=1, torn=True, grace=0)


def _maintain(root: Path) -> None:
    maintain(LOCAL, str(root), Rules(last=1), grace=0)


def _rotate(root: Path) -> None:
    rotate(LOCAL, str(root), 1, keep=(), grace=0)


def _save_again(root: Path) -> None:
    _save(root, 9)
    maintain(LOCAL, str(root), None, grace=0)


@pytest.mark.parametrize("act", [_copy, _prune, _maintain, _rotate, _save_again], ids=lambda f: f.__name__[1:])
def test_a_users_files_with_such_names_stay(act: Callable[[Path], None], tmp_path: Path) -> None:
    for number in (1, 2, 3):
        _save(tmp_path, number)
    for name in FILES:
        (tmp_path / name).write_text("mine")
        (tmp_path / "step3" / name).write_text("mine")
    for name in DIRECTORIES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    (tmp_path / "step3" / f"{WHOLE}.notes").write_text("mine")
    begun = tmp_path / temporary_name("latest")
    begun.write_text("")
    act(tmp_path)
    assert {name for name in FILES if not (tmp_path / name).is_file()} == set()
    assert {name for name in DIRECTORIES if not (tmp_path / name / "notes").is_file()} == set()
    assert (tmp_path / "step3" / f"{WHOLE}.notes").is_file()
    assert begun.exists() == (act is _rotate)


def test_a_copy_beside_a_checkpoint_is_not_the_one_that_was_replaced(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    shutil.copytree(tmp_path / "step1", tmp_path / f"step1{REPLACED}")
    with refused(StorageError):
        _save(tmp_path, 1, overwrite=True)
    maintain(LOCAL, str(tmp_path), None, grace=0)
    assert whole(str(tmp_path)) == {"step1": version(1), f"step1{REPLACED}": version(1)}


def test_a_failed_save_moves_no_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"step1{REPLACED}").mkdir()
    monkeypatch.setattr(type(LOCAL), "free_bytes", lambda self, directory: 0)
    with pytest.raises(StorageError):
        _save(tmp_path, 1)
    assert os.listdir(tmp_path) == [f"step1{REPLACED}"]


@pytest.mark.parametrize("name", ["latest", "x" * 255, "ä" * 127, ".partial", "a.0badcafe.partial"])
def test_temporary_names_are_known(name: str) -> None:
    made = temporary_name(name)
    assert is_temporary(made)
    assert len(os.fsencode(made)) <= 255
    assert not is_temporary(name)
    assert not is_temporary(f"x{made}")
