"""Retention rules after a save: which checkpoints stay, and which directories are never removed."""

from __future__ import annotations

import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import CkptError, StorageError
from ckpttool.registry import carry_out
from ckpttool.saving.coordination import Alone
from ckpttool.saving.two_phase import settle
from ckpttool.storage import LOCAL, MANIFEST, MARK, aside_name
from ckpttool.storage.base import SET_ASIDE
from ckpttool.storage.safe_files import temporary_name
from tests.rooms import present
from tests.saving.checkpoints import Intercepted, save_version, version, whole
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path


def _save(root: Path, tags: list[str], metric: float = 0.5) -> None:
    for number, tag in enumerate(tags, 1):
        save_version(LOCAL, str(root), Alone(), tag, number, metrics={"loss": metric})


def _tidied(root: Path, rules: Rules) -> set[str]:
    maintain(LOCAL, str(root), rules, grace=0)
    return set(whole(str(root)))


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_metrics_without_meaning_do_not_keep_everything(metric: float, tmp_path: Path) -> None:
    _save(tmp_path, ["step1", "step2", "step3"], metric)
    assert _tidied(tmp_path, Rules(last=1, best="loss:min")) == {"step3"}


def test_nested_tags_are_counted(tmp_path: Path) -> None:
    _save(tmp_path, ["run/a/step1", "run/a/step2", "step3", "run/a/step4"])
    assert _tidied(tmp_path, Rules(last=2)) == {"step3", "run/a/step4"}


def test_leftovers_of_a_nested_tag_are_removed(tmp_path: Path) -> None:
    _save(tmp_path, ["run/step1"])
    (tmp_path / "run" / "step2").mkdir()
    (tmp_path / "run" / "step2" / ".ckpttool-staging").write_text("{}")
    assert _tidied(tmp_path, Rules(last=1)) == {"run/step1"}
    assert os.listdir(tmp_path / "run") == ["step1"]


def test_a_killed_removal_of_a_nested_tag_is_finished(tmp_path: Path) -> None:
    _save(tmp_path, ["run/step1", "run/step2"])
    (tmp_path / "run" / "step1").rename(tmp_path / "run" / aside_name("step1"))
    assert _tidied(tmp_path, Rules(last=1)) == {"run/step2"}
    assert os.listdir(tmp_path / "run") == ["step2"]


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
    assert "no checkpoint was removed, because the newest one cannot be read" in caplog.text


def _cut_short(root: Path, tag: str) -> None:
    """As a disk that has lost a commit's file, while the checkpoint that it replaced still lies beside it."""
    save_version(LOCAL, str(root), Alone(), tag, 1)
    shutil.copytree(root / tag, root / f"{tag}{REPLACED}")
    (root / f"{tag}{REPLACED}" / SET_ASIDE).touch()
    save_version(LOCAL, str(root), Alone(), "other", 2)
    os.truncate(root / tag / "mp_rank_00_model_states.pt", 100)


def test_the_replaced_checkpoint_stays_while_the_new_one_is_damaged(tmp_path: Path) -> None:
    _cut_short(tmp_path, "step1")
    maintain(LOCAL, str(tmp_path), None, grace=0)
    assert whole(str(tmp_path))["step1.replaced"] == version(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_save_restores_the_replaced_checkpoint(fails: bool, tmp_path: Path) -> None:
    _cut_short(tmp_path, "step1")
    place: Any = LOCAL
    if fails:

        def write(*given: Any) -> Any:
            raise StorageError("the disk", "is full", "free some space")

        place = Intercepted(LOCAL, write)
        with refused(CkptError):
            save_version(place, str(tmp_path), Alone(), "step1", 3, overwrite=True)
    else:
        save_version(place, str(tmp_path), Alone(), "step1", 3, overwrite=True)
    found = whole(str(tmp_path))
    assert found == {"step1": version(1 if fails else 3), "other": version(2)}


@pytest.mark.parametrize("value", [1.5, True, 0, -1, "2"])
def test_rules_that_make_no_sense(value: object) -> None:
    with refused(ValueError):
        Rules(last=value)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- links


def test_nothing_outside_the_root_is_cleared_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    _save(root, ["step8", "step9"])
    _save(elsewhere, ["step1", "step2", "nested/step3", "nested/step4"])
    for name in ("step1", "step2", "nested/step3"):
        (elsewhere / name / MARK).write_text("{}")
    (elsewhere / "step2" / MANIFEST).unlink()  # a save that was killed
    before = sorted(str(p) for p in elsewhere.rglob("*"))
    for name in ("step1", "step2", "nested"):
        (root / name).symlink_to(elsewhere / name)
    maintain(LOCAL, str(root), Rules(last=1), grace=0)
    assert sorted(str(p) for p in elsewhere.rglob("*")) == before
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["nested", "step1", "step2", "step9"]
    assert f"{root}/step2 is reached through a link and is not removed" in caplog.text
    settle(LOCAL, str(root), "step1")
    assert (elsewhere / "step1" / MARK).exists()


@pytest.mark.parametrize("name", [aside_name("evil"), aside_name("step1")])
def test_link_called_as_what_is_being_removed_stops_nobody(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    _save(root, ["step1", "step2", "step3"])
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (root / name).symlink_to(elsewhere)
    assert _tidied(root, Rules(last=2)) == {"step2", "step3"}
    assert f"{root}/{name} is reached through a link and is not removed" in caplog.text
    decisions = ckpttool.prune(root, keep_last=1)
    assert {d.entry.name: d.reason for d in decisions if d.entry.link} == {name: f"a link to {elsewhere}"}
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == [name, "step3"]
    assert (elsewhere / "mine").exists()


def test_a_save_does_not_go_through_a_link(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    _save(root, ["step1"])
    elsewhere.mkdir()
    (root / "step2").symlink_to(elsewhere)
    with refused(CkptError):
        save_version(LOCAL, str(root), Alone(), "step2", 2)
    assert os.listdir(elsewhere) == []


def test_planted_temporary_files_are_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda size: bytes.fromhex("0badcafe")[:size])  # names that could be guessed
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "root"
    root.mkdir()
    (root / temporary_name("latest")).symlink_to(victim)
    with refused(CkptError):
        LOCAL.put(str(root / "latest"), b"step1")
    assert victim.read_text() == "mine"


def test_log_lines_have_no_terminal_controls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ckpttool")
    _save(tmp_path, ["step1"])
    (tmp_path / aside_name("a\x1b[31mb")).mkdir()
    assert _tidied(tmp_path, Rules(last=1)) == {"step1"}
    assert "removed" in caplog.text
    assert all(c.isprintable() for record in caplog.records for c in record.getMessage())


@pytest.mark.slow
@pytest.mark.parametrize("thin", [None, *["bf16"] * present("thinning")])
@pytest.mark.parametrize("how", ["prune", "maintain", "rotate"])
@pytest.mark.parametrize("kind", ["files", "files by links", "best/", "beside", "inside a tag", "directory above"])
def test_what_a_link_needs_stays(kind: str, how: str, thin: str | None, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for number in (5, 6, 7):
        save_version(LOCAL, str(root / f"checkpoint-{number}"), Alone(), "step", 0)
    first, last = root / "checkpoint-5", root / "checkpoint-7"
    if how != "rotate":
        above = root / "nested" if kind == "directory above" else root
        for number in (5, 6, 7):
            shutil.copytree(root / f"checkpoint-{number}" / "step", above / f"step{number}")
            shutil.rmtree(root / f"checkpoint-{number}")
        first, last = above / "step5", above / "step7"
        (above / "latest").write_text("step7")
    elif kind == "directory above":
        pytest.skip("the folders of a trainer lie in the root")
    name = next(p.relative_to(first) for p in first.rglob("*optim_states.pt"))
    link = {
        "files": last / name, "files by links": last / name, "best/": root / "best" / "here",
        "beside": root / "best.pt", "inside a tag": last / "extra", "directory above": root / "all",
    }[kind]  # fmt: skip
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    target = {"inside a tag": first, "directory above": first.parent}.get(kind, first / name)
    if kind == "files by links":  # each of the two checkpoints holds a link, and the file lies elsewhere
        (root / "blobs").mkdir()
        target.rename(root / "blobs" / "one")
        target.symlink_to("../blobs/one" if how != "rotate" else "../../blobs/one")
    link.symlink_to(os.path.relpath(target, link.parent))
    before = sorted(str(p) for p in first.rglob("*"))
    given: dict[str, Any] = {} if thin is None else {"thin": thin}
    if how == "prune":
        done = ckpttool.prune(root, keep_last=1, **given)
        reasons = {d.entry.name: d.reason for d in done}
        if kind != "directory above":
            assert reasons["step5"] == f"{link.relative_to(root)} is a link to it"
    elif how == "maintain":
        maintain(LOCAL, str(root), Rules(last=1, action=next(iter(carry_out("prune", given)), None)), grace=0)
    else:
        rotate(LOCAL, str(root), 1, keep=(), grace=0)
    assert sorted(str(p) for p in first.rglob("*")) == before
    assert os.path.exists(link)
