"""Other users of a shared disk: files that they plant in our directories are refused by name, and never followed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.errors import StorageError
from ckpttool.storage import MARK
from ckpttool.storage.journal import JOURNAL
from ckpttool.storage.safe_files import MOVE
from ckpttool.storage.staging import ASIDE, MOVES
from tests.cli.command import ckpttool as command
from tests.cli.command import leftover, remains, staging_of
from tests.faults.disks import watching
from tests.faults.rules import Before, Nothing, Rule, interrupt
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SRC = "zero2-dp2-bf16"
CONTENT = "not to be touched"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside of all that a command is to write."""
    path = tmp_path / "victim"
    path.write_text(CONTENT)
    yield path
    assert path.read_text() == CONTENT


def _consolidate(out: Path) -> tuple[object, ...]:
    return ("consolidate", source(SRC), out, "--to", "safetensors")


def test_mark_that_is_a_link_is_not_written_through(tmp_path: Path, victim: Path) -> None:
    planted = leftover(tmp_path / "out")
    (planted / MARK).symlink_to(victim)
    assert command(*_consolidate(tmp_path / "out"), "--resume").error == f"Error: {planted}/{MARK}: is a link; {MOVE}"
    assert remains(tmp_path) == [planted.name, f"{planted.name}/{MARK}", "victim"]
    assert command(*_consolidate(tmp_path / "out")).code == 0
    assert remains(tmp_path) == ["out", "out/model.safetensors", "victim"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("whose", ["open to others", "of another user"])
def test_directory_that_others_may_have_changed_is_left_alone(whose: str, resume: bool, tmp_path: Path) -> None:
    if resume:
        _stopped(tmp_path / "out")
        (planted,) = staging_of(tmp_path / "out")
    else:
        planted = leftover(tmp_path / "out")
        (planted / MARK).touch()
    if whose == "open to others":
        planted.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(planted, 12345, 12345)
    else:
        pytest.skip("only root can give a directory to another user")
    before = _files(planted)
    assert before
    _convert(tmp_path / "out", resume=resume)
    assert _files(planted) == before
    if not resume:
        _convert(tmp_path / "whole")
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


def test_files_that_a_neighbour_says_were_moved_are_not_overwritten(tmp_path: Path) -> None:
    """A planted leftover of a commit, which would make an OUT with files look as if it were empty."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text(CONTENT)
    planted = leftover(out, 0o777)
    (planted / ASIDE).mkdir()
    (planted / MOVES).mkdir()
    (planted / MARK).touch()
    (planted / MOVES / "notes.txt").touch()
    assert "already exists and is not empty" in command(*_consolidate(out)).error
    assert (out / "notes.txt").read_text() == CONTENT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_link_of_another_user_at_the_output_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.safetensors").write_text(CONTENT)
    (tmp_path / "out").symlink_to("mine")
    os.chown(tmp_path / "out", 12345, 12345, follow_symlinks=False)
    error = command(*_consolidate(tmp_path / "out"), "--overwrite").error
    assert f"{tmp_path}/out: is a link of another user (number 12345)" in error
    assert (tmp_path / "mine/model.safetensors").read_text() == CONTENT
    os.chown(tmp_path / "out", os.geteuid(), -1, follow_symlinks=False)
    assert command(*_consolidate(tmp_path / "out"), "--overwrite").code == 0  # one's own is followed


@pytest.mark.parametrize("what", ["link", "directory"])
@pytest.mark.parametrize("operation", ["create", "ftruncate", "pwrite"])
def test_files_do_not_go_where_a_neighbour_puts_another_directory(operation: str, what: str, tmp_path: Path) -> None:
    out, planted = tmp_path / "out", tmp_path / "planted"
    planted.mkdir()

    def swap(_: object) -> None:
        (staging,) = staging_of(out)
        staging.rename(tmp_path / "moved")
        staging.symlink_to(planted) if what == "link" else planted.rename(staging)

    with watching(Rule(Before(swap), operation, when=lambda call: "model.safetensors" in str(call.target))):
        error = command(*_consolidate(out)).error
    (staging,) = staging_of(out)
    assert error == f"Error: {staging}: was renamed by another process while it was being written; try again"
    assert remains(staging) == []
    assert (tmp_path / "moved" / "model.safetensors").stat().st_size > 1000
    assert not out.exists()


def test_nobody_may_enter_the_directory_before_it_is_whole(tmp_path: Path) -> None:
    seen: set[int] = set()

    def look(_: int, __: int) -> None:
        seen.update(stat.S_IMODE(path.stat().st_mode) for path in staging_of(tmp_path / "out"))

    ckpttool.consolidate(source(SRC), tmp_path / "out", to="safetensors", progress=look)
    assert seen == {0o700}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["latest", "config.json"])
def test_cp_does_not_write_through_a_link_in_the_root_of_the_copy(name: str, tmp_path: Path, victim: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    (root / f"{name}.partial").symlink_to(victim)
    src = tmp_path / "src"
    shutil.copytree(source(SRC), src)
    (src / "config.json").write_text("{}")
    assert command("cp", src, root).code == 0
    assert (root / "latest").read_text() == "global_step3"
    assert (root / "config.json").read_text() == "{}"


def test_extract_does_not_write_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "up.npy.partial").symlink_to(victim)
    assert command("extract", source(SRC), "up.weight", tmp_path / "up.npy").code == 0
    (tmp_path / "up.npy").unlink()
    (tmp_path / "up.npy").symlink_to(victim)
    assert command("extract", source(SRC), "up.weight", tmp_path / "up.npy", "--overwrite").code == 0
    assert not (tmp_path / "up.npy").is_symlink()


# ------------------------------------------------------------------------------------------------- going on


def _convert(out: Path, *, resume: bool = True) -> None:
    ckpttool.convert(source(SRC), out, to="zero", world_size=3, stage=3, resume=resume)


def _files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def _stopped(out: Path) -> None:
    """Run a conversion that is interrupted near its end."""
    writes = Rule(Nothing(), "pwrite")
    with watching(writes):
        _convert(out.with_name("whole"), resume=False)
    at = int(0.9 * len(writes.matched))
    with watching(Rule(Before(interrupt), "pwrite", nth=at + 1)), pytest.raises(KeyboardInterrupt):
        _convert(out)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a conversion leaves that was interrupted near its end."""
    _stopped(tmp_path / "out")
    (path,) = staging_of(tmp_path / "out")
    return path


def _done(left: Path) -> list[str]:
    """Files that the journal lists."""
    return [line.split(" ", 2)[-1] for line in (left / JOURNAL).read_text().splitlines()]


def test_zeros_in_place_of_a_finished_file_are_not_committed(left: Path, tmp_path: Path) -> None:
    file = left / _done(left)[0]
    file.write_bytes(bytes(file.stat().st_size))
    _convert(tmp_path / "out")
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


@pytest.mark.parametrize("what", ["file", "directory", "unknown", "hard link", "pipe"])
def test_conversion_does_not_go_on_through_a_link(what: str, left: Path, tmp_path: Path, victim: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if what == "directory":
        (left / "global_step3").rename(left / "kept")
        (left / "global_step3").symlink_to(elsewhere)
    elif what == "file":
        path = left / _done(left)[0]
        path.unlink()
        path.symlink_to(victim)
    elif what == "unknown":
        (left / "global_step3" / "unknown").symlink_to(victim)
    elif what == "pipe":
        os.mkfifo(left / "global_step3" / "pipe")
    else:
        os.link(victim, left / "global_step3" / "second")
    # Several threads look at files: the first that one meets is named.
    with pytest.raises(
        StorageError, match=r"partial/global_step3/?\S*: .*; move it out of the way, or choose another OUT"
    ):
        _convert(tmp_path / "out")
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_journal_of_other_text_is_not_believed(left: Path, tmp_path: Path) -> None:
    (left / JOURNAL).write_bytes(b"\xff\xfe\n" + "".join(f"{n}\n" for n in _done(left)).encode() + b"0 -1 x\n")
    _convert(tmp_path / "out")
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------- permissions


def _private(root: Path, mode: int = 0o600) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _modes(path: Path) -> set[int]:
    return {stat.S_IMODE(p.stat().st_mode) for p in [path, *path.rglob("*")] if p.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("consolidate", "--to", "safetensors"),
        ("consolidate", "--to", "torch"),
        ("convert", "--to", "zero", "--world-size", "3"),
        ("convert", "--to", "universal"),
        ("convert", "--to", "dcp"),
        ("cp",),
        ("extract", "up.weight"),
    ],
    ids=" ".join,
)
def test_private_sources_make_private_outputs(
    arguments: tuple[str, ...], checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(SRC)
    (root / "config.json").write_text(json.dumps({"model_type": "none"}))
    out = tmp_path / "made"
    name, *options = arguments
    last = [tmp_path / "made.npy"] if name == "extract" else [out]
    _private(root)
    rest = [options[0], *last] if name == "extract" else [*last, *options]
    assert command(name, root, *rest).code == 0
    path = tmp_path / "made.npy" if name == "extract" else out
    assert _modes(path) == {0o600}


def test_one_private_source_is_enough(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    next((root / "global_step3").glob("*optim*")).chmod(0o640)
    assert command("consolidate", root, tmp_path / "made", "--to", "safetensors").code == 0
    assert _modes(tmp_path / "made") == {0o640}


def test_permissions_of_directories_are_not_widened(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    (root / "global_step3").chmod(0o700)
    root.chmod(0o710)
    copy = tmp_path / "new" / "copy"
    assert command("cp", root, copy).code == 0
    assert stat.S_IMODE((copy / "global_step3").stat().st_mode) == 0o700
    assert stat.S_IMODE(copy.stat().st_mode) == 0o710


def test_copy_keeps_the_mode_of_latest(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    (root / "latest").chmod(0o640)
    assert command("cp", root, tmp_path / "copy").code == 0
    assert stat.S_IMODE((tmp_path / "copy/latest").stat().st_mode) == 0o640
