"""A checkpoint that a restore of the run has skipped is moved aside by the save of its step, and nothing is deleted."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import posixpath
import shutil
import time
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import read_manifest
from ckpttool.commit.marks import damage_of, mark_damaged, state_of
from ckpttool.errors import CkptError, PlanError, StorageError
from ckpttool.formats import open_whole
from ckpttool.saving.claim import Claim, Skipped, mark_skipped
from ckpttool.saving.coordination import Alone
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LATEST, LOCAL, MANIFEST, MARK, open_storage, walk
from ckpttool.storage.base import DAMAGED
from ckpttool.storage.removal import REMOVAL_MARK
from tests.faults.disks import CHANGES, Killed, watching
from tests.faults.rules import Kill, Rule
from tests.saving.checkpoints import SIDECARS, content, part, save_version, version, whole
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpttool.storage import WritableStorage
    from tests.storage.server import Bucket

Where = tuple["WritableStorage", str]


@pytest.fixture(params=["disk", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """A storage and a root in it."""
    if request.param == "disk":
        return LOCAL, str(tmp_path)
    bucket: Bucket = request.getfixturevalue("s3")
    return open_storage(bucket.url("run")), bucket.url("run")


def _plain(where: Where, tag: str, number: int, *, torn: bool = False) -> None:
    """Write what DeepSpeed writes; torn, without the file of one rank."""
    storage, root = where
    storage.make_directory(posixpath.join(root, tag))
    for name, data in list(version(number).items())[: -1 if torn else None]:
        storage.put(posixpath.join(root, tag, name), data)
    storage.put(posixpath.join(root, LATEST), tag.encode())


def _skipped(where: Where, tag: str) -> Skipped:
    storage, root = where
    storage.refresh([])
    path = posixpath.join(root, tag)
    with pytest.raises(CkptError) as caught:
        raise _problem(storage, path)
    return Skipped(state_of(storage, path), caught.value.problem)


def _problem(storage: WritableStorage, path: str) -> Exception:
    try:
        content(storage, path)
        ckpttool.inspect(path)
    except CkptError as error:
        return error
    return AssertionError("it is whole")


def _save(where: Where, tag: str, number: int, skipped: Skipped | None) -> None:
    storage, root = where
    request = Request(tag, number, 2, sidecars=SIDECARS, skipped=skipped)
    save(storage, root, Alone(), request, part(version(number), 0, 1))
    storage.refresh([])


def _files(where: Where, tag: str) -> dict[str, bytes]:
    storage, root = where
    directory = posixpath.join(root, tag)
    found = {}
    for name, _ in walk(storage, directory):
        with storage.open(posixpath.join(directory, name)) as reader:
            found[name] = bytes(reader.read(0, reader.nbytes))
    return found


def test_a_torn_one_of_deepspeed_is_moved_aside(where: Where, caplog: pytest.LogCaptureFixture) -> None:
    storage, root = where
    _plain(where, "step3", 3)
    _plain(where, "step6", 6, torn=True)
    before = _files(where, "step6")
    _save(where, "step6", 6, _skipped(where, "step6"))
    assert f"step 6 is saved as step6; the checkpoint there is now {root}/step6.damaged, because" in caplog.text
    after = _files(where, "step6.damaged")
    assert after.pop(DAMAGED)
    assert after == before
    assert [one.tag for one in candidates(storage, root)] == ["step6", "step3"]
    assert whole(root, storage) == {"step6": version(6), "step3": version(3)}
    listed = {e.name: e for e in ckpttool.ls(root).entries}
    assert "could not be restored" in str(listed["step6.damaged"].problem)
    assert ckpttool.prune(root, keep_last=1)[1].keep
    decisions = ckpttool.prune(root, torn=True, grace=0)
    assert {d.entry.name: d.keep for d in decisions} == {"step6.damaged": False, "step6": True}


def test_a_damaged_one_of_ours_is_moved_aside(where: Where) -> None:
    storage, root = where
    for number in (3, 6):
        save_version(storage, root, Alone(), f"step{number}", number)
    name = next(iter(version(6)))
    with storage.open(f"{root}/step6/{name}") as reader:
        data = bytearray(reader.read(0, reader.nbytes))
    data[len(data) // 2] ^= 1
    storage.put(f"{root}/step6/{name}", bytes(data))
    before = _files(where, "step6")
    parent = read_manifest(storage, f"{root}/step3").attempt
    _save(where, "step6", 6, _skipped(where, "step6"))
    assert read_manifest(storage, f"{root}/step6").parent == parent
    assert {n: d for n, d in _files(where, "step6.damaged").items() if n != DAMAGED} == before
    maintain(storage, root, Rules(last=2), grace=0)
    storage.refresh([])
    assert whole(root, storage) == {"step6": version(6), "step3": version(3)}
    assert MANIFEST in _files(where, "step6.damaged")


def test_the_order_of_commits_goes_on_after_a_damaged_manifest(where: Where) -> None:
    storage, root = where
    for number in (1, 3, 6):
        save_version(storage, root, Alone(), f"step{number}", number)
    last = read_manifest(storage, f"{root}/step3")
    storage.put(f"{root}/step6/{MANIFEST}", b"damaged")
    _save(where, "step6", 6, _skipped(where, "step6"))
    new = read_manifest(storage, f"{root}/step6")
    assert (new.parent, new.number) == (last.attempt, last.number + 1)


def test_a_repaired_checkpoint_is_read_again(where: Where) -> None:
    storage, root = where
    for number in (3, 6):
        save_version(storage, root, Alone(), f"step{number}", number)
    name = max(version(6))
    storage.put(f"{root}/step6/{name}", version(6)[name][:-1])
    mark_skipped(storage, {f"{root}/step6": _skipped(where, "step6")})
    storage.refresh([])
    assert [one.tag for one in candidates(storage, root)] == ["step3"]
    storage.put(f"{root}/step6/{name}", version(6)[name])
    storage.refresh([])
    assert [one.tag for one in candidates(storage, root)] == ["step6", "step3"]
    with pytest.raises(StorageError, match="is saved already"):
        _save(where, "step6", 6, None)


def test_a_run_that_was_restored_before_another_saved_abandons_nothing(where: Where) -> None:
    storage, root = where
    for number in (1, 3):
        save_version(storage, root, Alone(), f"step{number}", number)
    restored = read_manifest(storage, f"{root}/step1").attempt
    for tag, parent in (("step4", (restored, "step3")), ("step5", (restored, "step3"))):
        request = Request(tag, int(tag[-1]), 2, parent=parent)
        save(storage, root, Alone(), request, part(version(int(tag[-1])), 0, 1))
        storage.refresh([])
    first, second = (read_manifest(storage, f"{root}/{tag}") for tag in ("step4", "step5"))
    assert first.origin == restored  # what the run went back to
    assert (second.origin, second.parent) == (None, first.attempt)  # another process has saved since


def test_a_torn_one_that_no_save_writes_any_more_is_moved_without_a_restore(tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    _plain(where, "step6", 6, torn=True)
    with pytest.raises(StorageError, match="holds other files"):
        _save(where, "step6", 6, None)  # a save of DeepSpeed may still write it
    for file in (tmp_path / "step6").iterdir():
        os.utime(file, (1e9, 1e9))
    _save(where, "step6", 6, None)
    assert whole(str(tmp_path)) == {"step6": version(6)}
    assert (tmp_path / "step6.damaged").is_dir()


def test_a_checkpoint_of_a_later_release_is_not_moved(where: Where) -> None:
    storage, root = where
    save_version(storage, root, Alone(), "step6", 6)
    found = json.loads(storage.read_text(f"{root}/step6/{MANIFEST}")) | {"format": 99}
    storage.put(f"{root}/step6/{MANIFEST}", json.dumps(found).encode())
    with pytest.raises(PlanError, match="was written by a later release"):
        open_whole(storage, f"{root}/step6")
    with pytest.raises(StorageError, match="is saved already"):
        _save(where, "step6", 6, None)


def test_a_move_that_was_killed_goes_on(where: Where) -> None:
    storage, root = where
    _plain(where, "step3", 3)
    _plain(where, "step6", 6, torn=True)
    before = _files(where, "step6")
    mark_damaged(storage, f"{root}/step6", "why", for_good=True)
    if storage.remote:
        mark_damaged(storage, f"{root}/step6.damaged", "why", for_good=True)
        storage.put(f"{root}/step6.damaged/{min(before)}", before[min(before)])
    storage.refresh([])
    assert [one.tag for one in candidates(storage, root)] == ["step3"]
    _save(where, "step6", 6, None)
    moved = "step6.damaged.damaged" if storage.remote else "step6.damaged"
    assert {n: d for n, d in _files(where, moved).items() if n != DAMAGED} == before
    assert damage_of(storage, f"{root}/{moved}") == "why"
    assert whole(root, storage) == {"step6": version(6), "step3": version(3)}


@pytest.mark.slow
def test_a_death_at_any_operation_loses_no_file_of_the_torn_one(
    tmp_path: Path, crash_points: Callable[[int], None]
) -> None:
    tried = 0
    for how in ("before", "after"):
        for number in itertools.count(1):
            where = LOCAL, str(tmp_path / f"{how}{number}")
            _plain(where, "step3", 3)
            _plain(where, "step6", 6, torn=True)
            before = _files(where, "step6")
            rule, skipped = Rule(Kill(how), CHANGES, nth=number), _skipped(where, "step6")
            with watching(rule), contextlib.suppress(Killed):
                _save(where, "step6", 6, skipped)
            if not rule.done:
                break
            found = [one.tag for one in candidates(*where)]
            if "step6" not in found:
                _save(where, "step6", 6, None)
            elif "step6" not in whole(where[1]):  # the next restore skips it again
                _save(where, "step6", 6, _skipped(where, "step6"))
            assert whole(where[1]) == {"step3": version(3), "step6": version(6)}, (how, number)
            assert before.items() <= _files(where, "step6.damaged").items()
            tried += 1
    crash_points(tried)


def test_what_was_repaired_or_is_unknown_stays(where: Where) -> None:
    storage, _ = where
    _plain(where, "step6", 6, torn=True)
    skipped = _skipped(where, "step6")
    with refused(StorageError):
        _save(where, "step6", 6, None)
    _plain(where, "step6", 6)
    storage.refresh([])
    with pytest.raises(StorageError, match="holds other files, so that step 6 is not saved"):
        _save(where, "step6", 6, skipped)
    assert _files(where, "step6") == version(6)


def test_prune_takes_the_torn_one_that_latest_names(where: Where) -> None:
    storage, root = where
    _plain(where, "step6", 6, torn=True)
    assert [d.keep for d in ckpttool.prune(root, torn=True, grace=0)] == [True]
    _plain(where, "step3", 3)
    storage.put(f"{root}/{LATEST}", b"step6")
    shown = ckpttool.prune(root, torn=True, grace=0, dry_run=True)
    decisions = ckpttool.prune(root, torn=True, grace=0)
    assert [(d.entry.name, d.keep, d.reason) for d in decisions] == [(d.entry.name, d.keep, d.reason) for d in shown]
    assert {d.entry.name: d.keep for d in decisions} == {"step3": True, "step6": False}
    storage.refresh([])
    assert storage.read_text(f"{root}/{LATEST}") == "step3"
    assert whole(root, storage) == {"step3": version(3)}


def test_a_torn_one_with_files_of_another_sort_stays(where: Where) -> None:
    storage, root = where
    _plain(where, "step3", 3)
    _plain(where, "step6", 6, torn=True)
    storage.put(f"{root}/step6/new_sort_of_states.pt", b"?")
    (decision,) = (d for d in ckpttool.prune(root, torn=True, grace=0) if d.entry.name == "step6")
    assert decision.keep
    assert storage.read_text(f"{root}/{LATEST}") == "step6"


@pytest.mark.parametrize("spelled", ["relative", "dots", "link", "copy"])
def test_a_mark_holds_whatever_the_path_of_the_checkpoint_is(
    spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = tmp_path / "root/step3"
    (tag / "inner").mkdir(parents=True)
    for name in ("model.pt", "inner/optimizer.pt"):
        (tag / name).write_bytes(b"x")
    mark_damaged(LOCAL, str(tag), "why", for_good=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    path = {"relative": "root/step3", "dots": f"{tmp_path}/./root/step3", "link": "link/step3", "copy": "copy/step3"}[
        spelled
    ]
    assert damage_of(LOCAL, path) == "why"
    (tag / "model.pt").write_bytes(b"y")
    os.utime(tag / "model.pt", (1, 1))  # repaired
    assert damage_of(LOCAL, str(tag)) is None


def _killed(where: Where, tag: str, number: int) -> None:
    """Write what a killed save leaves: an old marker of a dead process, and one file."""
    storage, root = where
    claim = Claim(storage, root, tag)
    claim.take("free")
    claim.release()
    name, data = next(iter(version(number).items()))
    storage.put(f"{root}/{tag}/{name}", data)
    if storage.remote:
        time.sleep(1.1)  # objects have times in seconds
    else:
        os.utime(f"{root}/{tag}/{MARK}", (1e9, 1e9))


@pytest.mark.parametrize("later", [False, True])
def test_a_tag_that_deepspeed_saved_after_a_killed_save_is_its_checkpoint(where: Where, later: bool) -> None:
    storage, root = where
    save_version(storage, root, Alone(), "step3", 3)
    _killed(where, "step4", 4)
    storage.refresh([])
    assert [e.torn for e in ckpttool.ls(root).entries] == [None, "uncommitted"]
    _plain(where, "step4", 4)
    if later:
        _plain(where, "step5", 5)
    storage.refresh([])
    newest = "step5" if later else "step4"
    entries = {e.name: e for e in ckpttool.ls(root).entries}
    assert {name: e.whole for name, e in entries.items()} == dict.fromkeys(entries, True)
    assert max(entries, key=lambda name: entries[name].rank) == newest
    kept = [d.entry.name for d in ckpttool.prune(root, keep_last=1, dry_run=True) if d.keep]
    assert kept == [newest]
    assert ckpttool.inspect(root).tag == newest
    assert [one.tag for one in candidates(storage, root)][:2] == (["step5", "step4"] if later else ["step4", "step3"])
    before = _files(where, "step4")
    ckpttool.prune(root, torn=True, grace=0)
    maintain(storage, root, Rules(last=1), grace=0)
    save_version(storage, root, Alone(), "step6", 6)
    maintain(storage, root, Rules(last=3), grace=0)
    storage.refresh([])
    assert before.pop(MARK)
    assert _files(where, "step4") == before
    with pytest.raises(StorageError, match="holds other files"):
        _save(where, "step4", 4, None)


def test_a_torn_save_beside_a_later_one_of_deepspeed_is_not_its_checkpoint(where: Where) -> None:
    storage, root = where
    _killed(where, "step4", 4)
    _plain(where, "step5", 5)
    storage.refresh([])
    assert {e.name: e.torn for e in ckpttool.ls(root).entries} == {"step4": "uncommitted", "step5": None}
    ckpttool.prune(root, torn=True, grace=0)
    storage.refresh([])
    assert [e.name for e in ckpttool.ls(root).entries] == ["step5"]


def test_a_killed_save_whose_files_are_all_written_is_not_finished(where: Where) -> None:
    storage, root = where
    _plain(where, "step3", 3)
    if storage.remote:
        time.sleep(1.1)
    _plain(where, "step4", 4)
    storage.put(f"{root}/{LATEST}", b"step3")
    _killed(where, "step4", 4)
    for name in ("step3", "step4", "."):  # the marker is the newest
        if not storage.remote:
            for file in os.scandir(f"{root}/{name}"):
                os.utime(file, (9e8, 9e8))
    if not storage.remote:
        os.utime(f"{root}/step4/{MARK}", (1e9, 1e9))
    storage.refresh([])
    assert {e.name: e.torn for e in ckpttool.ls(root).entries} == {"step3": None, "step4": "uncommitted"}
    _save(where, "step4", 4, None)
    assert MANIFEST in _files(where, "step4")
    assert not storage.exists(f"{root}/step4.damaged")


@pytest.mark.parametrize("beside", ["step3", "critic9"])
def test_no_earlier_step_and_no_other_series_shows_that_a_killed_save_was_repeated(beside: str, tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    _plain(where, "step4", 4)
    _killed(where, "step4", 4)
    _plain(where, beside, 3)
    assert {e.name: e.torn for e in ckpttool.ls(tmp_path).entries} == {beside: None, "step4": "uncommitted"}


def test_another_killed_save_does_not_show_that_a_killed_save_was_repeated(tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    _plain(where, "step4", 4)
    for number in (4, 5):
        _killed(where, f"step{number}", number)
    assert {e.name: e.torn for e in ckpttool.ls(tmp_path).entries} == {"step4": "uncommitted", "step5": "uncommitted"}


def test_a_commit_of_a_later_step_does_not_show_that_a_killed_save_was_repeated(tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    _plain(where, "step4", 4)
    _killed(where, "step4", 4)
    save_version(LOCAL, str(tmp_path), Alone(), "step5", 5)
    assert {e.name: e.torn for e in ckpttool.ls(tmp_path).entries} == {"step4": "uncommitted", "step5": None}


def test_a_checkpoint_from_before_a_killed_save_does_not_show_that_it_was_repeated(tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    for number in (4, 5):  # a run that went back to an older step
        _plain(where, f"step{number}", number)
        for file in os.scandir(tmp_path / f"step{number}"):
            os.utime(file, (9e8, 9e8))
    _killed(where, "step4", 4)
    os.utime(tmp_path / "step4" / MARK, (1e9, 1e9))
    assert {e.name: e.torn for e in ckpttool.ls(tmp_path).entries} == {"step4": "uncommitted", "step5": None}


def test_a_tag_whose_optimizer_is_not_written_yet_is_not_repeated(tmp_path: Path) -> None:
    where = LOCAL, str(tmp_path)
    _plain(where, "step3", 3)
    _killed(where, "step4", 4)
    _plain(where, "step4", 4)
    for file in (tmp_path / "step4").glob("*optim_states.pt"):
        file.unlink()
    assert {e.name: e.torn for e in ckpttool.ls(tmp_path).entries} == {"step3": None, "step4": "uncommitted"}


def test_a_removal_that_has_begun_is_no_checkpoint_beside_a_later_one(s3: Bucket) -> None:
    storage, root = where = open_storage(s3.url("run")), s3.url("run")
    _plain(where, "step4", 4)
    storage.put(f"{root}/step4/{MARK}", REMOVAL_MARK.encode())
    time.sleep(1.1)
    _plain(where, "step5", 5)
    storage.refresh([])
    assert {e.name: e.whole for e in ckpttool.ls(root).entries} == {"step4": False, "step5": True}
    assert [one.tag for one in candidates(storage, root)] == ["step5"]


def test_the_next_save_deletes_the_marker_before_latest_moves_on(where: Where) -> None:
    storage, root = where
    _killed(where, "step4", 4)
    _plain(where, "step4", 4)
    storage.refresh([])
    save_version(storage, root, Alone(), "step5", 5)
    assert MARK not in _files(where, "step4")
    assert whole(root, storage) == {"step4": version(4), "step5": version(5)}
