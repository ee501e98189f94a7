"""What rules keep after a save, and what they leave alone."""

from __future__ import annotations

import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import CkptError, StorageError
from ckpttool.retention import Rules
from ckpttool.saving.disk import Disk
from ckpttool.saving.ranks import Alone
from ckpttool.saving.upkeep import tidy
from ckpttool.storage import LOCAL
from tests.saving.checkpoints import save_version, version, whole

if TYPE_CHECKING:
    from pathlib import Path


def _save(root: Path, tags: list[str], metric: float = 0.5) -> None:
    for number, tag in enumerate(tags, 1):
        save_version(Disk(), str(root), Alone(), tag, number, metrics={"loss": metric})


def _tidied(root: Path, rules: Rules) -> set[str]:
    tidy(Disk(), str(root), rules, grace=0)
    return set(whole(str(root)))


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_metrics_without_meaning_do_not_keep_everything(metric: float, tmp_path: Path) -> None:
    _save(tmp_path, ["step1", "step2", "step3"], metric)
    assert _tidied(tmp_path, Rules(last=1, best="loss:min")) == {"step3"}


def test_nested_tags_are_counted(tmp_path: Path) -> None:
    _save(tmp_path, ["run/a/step1", "run/a/step2", "step3", "run/a/step4"])
    assert _tidied(tmp_path, Rules(last=2)) == {"step3", "run/a/step4"}


def test_what_a_killed_save_left_of_a_nested_tag_goes(tmp_path: Path) -> None:
    _save(tmp_path, ["run/step1"])
    (tmp_path / "run" / "step2").mkdir()
    (tmp_path / "run" / "step2" / ".ckpttool-staging").write_text("{}")
    assert _tidied(tmp_path, Rules(last=1)) == {"run/step1"}
    assert os.listdir(tmp_path / "run") == ["step1"]


def test_a_long_name_can_be_removed(tmp_path: Path) -> None:
    long = "x" * 250
    _save(tmp_path, [long, "step2"])
    assert _tidied(tmp_path, Rules(last=1)) == {"step2"}
    assert not LOCAL.exists(str(tmp_path / long))


def test_nothing_goes_while_the_newest_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(tmp_path, ["step1", "step2", "step3"])
    damaged = tmp_path / "step3" / "mp_rank_00_model_states.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert _tidied(tmp_path, Rules(last=1)) == {"step1", "step2"}
    assert "no checkpoint was removed, for the newest one cannot be read" in caplog.text


def _cut_short(root: Path, tag: str) -> None:
    """As a disk that has lost a commit's file, while the checkpoint that it replaced still lies beside it."""
    save_version(Disk(), str(root), Alone(), tag, 1)
    shutil.copytree(root / tag, root / f"{tag}.replaced")
    save_version(Disk(), str(root), Alone(), "other", 2)
    os.truncate(root / tag / "mp_rank_00_model_states.pt", 100)


def test_what_was_set_aside_stays_while_what_replaced_it_is_damaged(tmp_path: Path) -> None:
    _cut_short(tmp_path, "step1")
    tidy(Disk(), str(tmp_path), None, grace=0)
    assert whole(str(tmp_path))["step1.replaced"] == version(1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_set_aside_is_what_a_failed_save_brings_back(fails: bool, tmp_path: Path) -> None:
    _cut_short(tmp_path, "step1")
    place: Any = Disk()
    if fails:

        def write(*given: Any) -> Any:
            raise StorageError("the disk", "is full", "free some space")

        place.write = write
        with pytest.raises(CkptError, match="is full"):
            save_version(place, str(tmp_path), Alone(), "step1", 3, overwrite=True)
    else:
        save_version(place, str(tmp_path), Alone(), "step1", 3, overwrite=True)
    found = whole(str(tmp_path))
    assert found == {"step1": version(1 if fails else 3), "other": version(2)}


@pytest.mark.parametrize("value", [1.5, True, 0, -1, "2"])
def test_rules_that_make_no_sense(value: object) -> None:
    with pytest.raises(ValueError, match="not a whole number above 0"):
        Rules(last=value)  # type: ignore[arg-type]
