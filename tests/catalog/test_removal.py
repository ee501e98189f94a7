"""Removals that fail: a checkpoint stays as it was, or the error names what is left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.catalog.cleanup import rotate
from ckpttool.errors import PruneError
from ckpttool.storage import LOCAL, aside_name
from tests.cli.command import ckpttool, ckpttool_without_privileges, without_privileges
from tests.rooms import present
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RULES = ("--keep-last", 1)


@pytest.fixture
def root() -> Iterator[Path]:
    """Plain checkpoints step1 to step3 that every user may change."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-test-") as name:
        directory = Path(name)
        for number in (1, 2, 3):
            shutil.copytree(f"{source('zero2-dp2-bf16')}/global_step3", directory / f"step{number}")
            (directory / f"step{number}" / "notes").mkdir()
            (directory / f"step{number}" / "notes" / "mine.txt").write_text("mine")
        (directory / "latest").write_text("step3")
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield directory


def _files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def _closed_tag(root: Path) -> str:
    (root / "step1").chmod(0o555)
    return "permission denied"


def _closed_below(root: Path) -> str:
    (root / "step1" / "notes").chmod(0o555)
    return "notes: permission denied"


def _closed_root(root: Path) -> str:
    root.chmod(0o555)
    return "permission denied"


def _sticky_root(root: Path) -> str:
    root.chmod(0o1777)
    return "permission denied"


def _sticky_below(root: Path) -> str:
    (root / "step1" / "notes").chmod(0o1777)
    return "notes/mine.txt: permission denied"


@pytest.mark.skipif(os.geteuid() != 0, reason="the files of another user take root")
@pytest.mark.parametrize("forbid", [_closed_tag, _closed_below, _closed_root, _sticky_root, _sticky_below])
def test_what_may_not_be_removed_stays_as_it_was(forbid: Callable[[Path], str], root: Path) -> None:
    before, problem = _files(root), forbid(root)
    done = ckpttool_without_privileges("prune", root, *RULES)
    assert done.code == 3
    assert f"{root}/step1: cannot be removed: {problem}" in done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("step1"))
    assert "kept" in row
    assert f"cannot be removed: {problem}" in row
    gone = {name: data for name, data in before.items() if not name.startswith("step2/")}
    assert _files(root) == (before if forbid in (_closed_root, _sticky_root) else gone)
    root.chmod(0o777)
    assert ckpttool("prune", root, "--keep-last", 3).code == 0
    assert {name.split("/")[0] for name in _files(root)} >= {"step1", "step3"}


@pytest.mark.skipif(os.geteuid() != 0, reason="the files of another user take root")
@pytest.mark.parametrize("how", ["torn", "rotate"])
def test_other_removals_leave_it_as_it_was_too(how: str, root: Path) -> None:
    for number in (1, 2, 3):
        (root / f"checkpoint-{number}").mkdir()
        os.rename(root / f"step{number}", root / f"checkpoint-{number}" / "step")
        (root / f"checkpoint-{number}").chmod(0o777)
    (root / "latest").unlink()
    if how == "torn":
        next((root / "checkpoint-1" / "step").glob("*optim_states.pt")).unlink()
    (root / "checkpoint-1" / "step" / "notes").chmod(0o555)
    before = _files(root)
    if how == "torn":
        assert ckpttool_without_privileges("prune", root, "--torn", "--grace", 0).code == 3
    else:
        assert without_privileges(lambda: rotate(LOCAL, str(root), 2, keep=(), grace=0.0)) == []
    assert _files(root) == before


def _lock(path: Path, flag: str) -> None:
    if subprocess.run(["chattr", flag, path], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no immutable files, or only root may make them")


def test_an_immutable_file_protects_its_checkpoint(root: Path) -> None:
    locked = next((root / "step1").glob("*optim_states.pt"))
    before = _files(root)
    _lock(locked, "+i")
    try:
        with refused(PruneError):
            api.prune(root, keep_last=2)
    finally:
        _lock(locked, "-i")
    assert _files(root) == before


def _refusing(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk refuse to unlink further files."""
    real, count = os.unlink, [0]

    def unlink(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] > after:
            raise PermissionError(1, "Operation not permitted")
        real(*arguments, **options)

    monkeypatch.setattr(os, "unlink", unlink)


def test_a_removal_that_fails_before_any_file_is_gone_is_undone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _files(root)
    _refusing(0, monkeypatch)
    with refused(PruneError) as caught:
        api.prune(root, keep_last=2)
    assert [d.keep for d in caught.value.decisions] == [True, True, True]
    assert _files(root) == before


def test_a_removal_that_fails_later_names_what_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(list((root / "step1").rglob("*")))
    aside = root / aside_name("step1")
    _refusing(1, monkeypatch)  # the directory of the first file goes too
    done = ckpttool("prune", root, "--keep-last", 2)
    monkeypatch.undo()
    told = f"only in part: permission denied, when 2 of its {count} files and directories were removed"
    told += f"; the others are in {aside}"
    assert done.code == 3
    assert f"{root}/step1: is removed {told}" in done.stderr
    assert told in " ".join(done.stdout.split())
    assert not (root / "step1").exists()
    assert len(list(aside.rglob("*"))) == count - 2
    assert [d.entry.name for d in api.prune(root, keep_last=2) if not d.keep] == [aside.name]
    assert not aside.exists()


def test_a_removal_that_cannot_be_undone_names_where_the_checkpoint_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _files(root / "step1")

    def unlink(*_: Any, **__: Any) -> None:
        (root / "step1").mkdir()  # a save of the same tag has begun
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", unlink)
    aside = root / aside_name("step1")
    with refused(PruneError):
        api.prune(root, keep_last=2)
    assert _files(aside) == before
    assert list((root / "step1").iterdir()) == []


def test_only_what_ckpttool_renamed_is_removed(root: Path) -> None:
    for name in (".notes.removed", ".step1.removed", ".step1.0123456789abcdef.removed"):
        (root / name).mkdir()
        (root / name / "mine.txt").write_text("mine")
    before = _files(root)
    api.prune(root, keep_last=3)
    api.prune(root, torn=True, grace=0)
    rotate(LOCAL, str(root), None, keep=(), grace=0.0)
    assert _files(root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="the files of another user take root")
@pytest.mark.parametrize("closed", ["step1", "step1/notes"])
def test_a_tag_that_cannot_be_listed_is_an_entry_that_stays(closed: str, root: Path) -> None:
    (root / closed).chmod(0)
    problem = "permission denied" if closed == "step1" else "notes: permission denied"
    listed = ckpttool_without_privileges("ls", root)
    assert listed.code == 0, listed
    assert problem in next(line for line in listed.stdout.splitlines() if line.startswith("step1"))
    for rules in [("--keep-last", 1), ("--torn", "--grace", 0), *[("--thin-every", 7)] * present("thinning")]:
        done = ckpttool_without_privileges("prune", root, *rules)
        assert done.code == 0, done
        row = next(line for line in done.stdout.splitlines() if line.startswith("step1"))
        assert "kept" in row
        assert problem in row
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step1", "step3"]
    (root / closed).chmod(0o777)
    assert len(api.verify(root / "step1").findings) == 0
