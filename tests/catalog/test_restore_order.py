"""The checkpoint to resume from does not depend on clocks."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain
from ckpttool.catalog.restore_order import Saved, candidates, contradiction, find, newest_first
from ckpttool.catalog.retention import Rules
from ckpttool.catalog.runs import checkpoints_of_ray, last_commit, run_commits
from ckpttool.catalog.snapshot import directory_name
from ckpttool.commit import is_commit, marks
from ckpttool.commit.manifest import REPLACED, read_manifest
from ckpttool.saving.coordination import Alone
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL, MANIFEST, MARK, LocalStorage, open_storage
from tests.faults.rules import Before
from tests.faults.s3_proxy import Proxy
from tests.saving.checkpoints import SIDECARS, chosen, part, save_version, version
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.storage import Entry
    from tests.storage.server import Bucket


def _save(root: Path, tag: str, number: int, seconds: float = 0.0) -> None:
    """Save with a clock that is ahead, or behind."""
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(time, "time", lambda: now() + seconds)
        save_version(LOCAL, str(root), Alone(), tag, number)
    for above, _, names in os.walk(root / tag):
        for name in names:
            os.utime(os.path.join(above, name), (time.time() + seconds,) * 2)


def test_a_clock_that_was_ahead_makes_nothing_newer(tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1, seconds=1e6)
    _save(tmp_path, "step2", 2)
    _save(tmp_path, "step3", 3, seconds=-1e6)
    found = chosen(str(tmp_path))
    assert found is not None
    assert found[0] == "step3"
    assert [c.tag for c in candidates(LOCAL, str(tmp_path))] == ["step3", "step2", "step1"]


def test_a_commit_before_latest_was_written_is_found_whatever_the_clock_says(tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1)
    latest = (tmp_path / "latest").read_text()
    _save(tmp_path, "step2", 2, seconds=-1e6)
    (tmp_path / "latest").write_text(latest)
    (tmp_path / "step2" / MARK).write_text("{}")  # which goes after latest is written
    found = candidates(LOCAL, str(tmp_path))
    assert found[0].tag == "step2"
    assert contradiction(LOCAL, str(tmp_path), found) == "latest names step1, but step2 was committed after it"


def test_a_first_commit_with_its_mark_is_not_on_top_of_what_is_gone(tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1)
    (tmp_path / "step1" / MARK).write_text("{}")  # it was killed before it took the mark away
    _save(tmp_path, "step2", 2)
    (tmp_path / "step2").rename(tmp_path / "step2.replaced")  # and so was one that was to replace this
    assert [c.tag for c in candidates(LOCAL, str(tmp_path))] == ["step2.replaced", "step1"]


def test_a_manual_latest_is_followed_with_a_warning(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        _save(tmp_path, f"step{number}", number)
    (tmp_path / "latest").write_text("step1")
    os.utime(tmp_path / "latest", (1, 1))
    found = candidates(LOCAL, str(tmp_path))
    assert found[0].tag == "step1"
    assert contradiction(LOCAL, str(tmp_path), found) == "latest names step1 of step 1, but step3 has step 3"


def test_a_restore_looks_again_for_what_latest_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        _save(tmp_path, f"step{number}", number)
    (tmp_path / "step2").rename(tmp_path.parent / "late")
    late = threading.Timer(0.2, (tmp_path.parent / "late").rename, [tmp_path / "step2"])
    late.start()
    assert [one.tag for one in find(LOCAL, str(tmp_path), None)] == ["step2", "step1"]
    late.join()
    assert caplog.messages == []


@pytest.mark.parametrize("left", ["step1", "nothing"])
@pytest.mark.parametrize("how", ["gone", "unfinished"])
def test_a_restore_names_what_latest_names_and_what_it_takes(
    how: str, left: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        _save(tmp_path, f"step{number}", number)
    shutil.rmtree(tmp_path / ("step1" if left == "nothing" else "step2"))
    (tmp_path / "latest").write_text("step2")
    if how == "gone":
        shutil.rmtree(tmp_path / "step2", ignore_errors=True)
    else:
        (tmp_path / "step2").mkdir(exist_ok=True)
        (tmp_path / "step2" / "ckpttool.json").unlink(missing_ok=True)
        (tmp_path / "step2" / MARK).write_text("{}")
    assert [one.tag for one in find(LOCAL, str(tmp_path), None)] == ([left] if left == "step1" else [])
    why = "which is not there" if how == "gone" else "which holds no finished checkpoint"
    assert caplog.messages == [f"{tmp_path}: latest names 'step2', {why}; resuming from {left}"]


def test_each_commit_names_the_one_before_it(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        _save(tmp_path, f"step{number}", number)
    manifests = [read_manifest(LOCAL, str(tmp_path / f"step{number}")) for number in (1, 2, 3)]
    assert [m.number for m in manifests] == [1, 2, 3]
    assert [m.parent for m in manifests[1:]] == [m.attempt for m in manifests[:2]]


@pytest.mark.linux
def test_leftovers_with_future_times_are_removed_and_a_live_save_stays(tmp_path: Path) -> None:
    mark = {"key": "save 1", "files": [], **marks.identity()}
    for name, process in (("dead", -1), ("live", os.getppid())):
        (tmp_path / name).mkdir()
        began = {"process": process, "began": marks._began(process)}
        (tmp_path / name / MARK).write_text(json.dumps({**mark, **began}))
        os.utime(tmp_path / name / MARK, (time.time() + 1e8,) * 2)
    maintain(LOCAL, str(tmp_path), None, grace=900)
    assert os.listdir(tmp_path) == ["live"]
    os.utime(tmp_path / "live" / MARK, (1, 1))
    maintain(LOCAL, str(tmp_path), None, grace=900)
    assert os.listdir(tmp_path) == ["live"]


def test_nested_tags_are_found_though_latest_names_another(tmp_path: Path) -> None:
    _save(tmp_path, "a/b", 2)
    _save(tmp_path, "step1", 1)
    assert (tmp_path / "a" / "b" / MANIFEST).exists()
    assert [c.tag for c in candidates(LOCAL, str(tmp_path))] == ["step1", "a/b"]


# ------------------------------------------------------------------------------------------------- a run that went back


@pytest.fixture
def rewound(tmp_path: Path) -> Path:
    """A run that saved at steps 10 to 50, went back to step 20, and saved at steps 25 and 35."""
    for step in (10, 20, 30, 40, 50):
        save_version(LOCAL, str(tmp_path), Alone(), f"step{step}", step)
    (tmp_path / "latest").write_text("step20")
    for step in (25, 35):
        save_version(LOCAL, str(tmp_path), Alone(), f"step{step}", step)
    return tmp_path


def test_a_restore_prefers_what_the_newest_was_trained_from(rewound: Path) -> None:
    order = ["step35", "step25", "step20", "step10", "step50", "step40", "step30"]
    assert [c.tag for c in candidates(LOCAL, str(rewound))] == order
    os.rename(rewound / "step20", rewound.parent / "gone")  # the parents cannot be followed further
    order.remove("step20")
    assert [c.tag for c in candidates(LOCAL, str(rewound))] == order


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prune", "maintain"])
@pytest.mark.parametrize(("last", "kept"), [(1, {35}), (2, {35, 25}), (3, {35, 25, 20})])
def test_the_newest_saves_are_kept_and_not_the_last_steps(how: str, last: int, kept: set[int], rewound: Path) -> None:
    if how == "prune":
        ckpttool.prune(rewound, keep_last=last)
    else:
        maintain(LOCAL, str(rewound), Rules(last=last), grace=0)
    assert {p.name for p in rewound.iterdir() if p.is_dir()} == {f"step{step}" for step in kept}


def test_nothing_is_abandoned_until_a_run_that_went_back_saves(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save_version(LOCAL, str(tmp_path), Alone(), f"step{step}", step)
    (tmp_path / "latest").write_text("step20")
    assert candidates(LOCAL, str(tmp_path))[0].tag == "step20"
    ckpttool.prune(tmp_path, keep_last=2)
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"step20", "step40", "step50"}


def _rotated(root: Path, latest: str, gone: Sequence[int]) -> None:
    """A run that saved at steps 10 to 80; a copy has an older ``latest``, and some checkpoints are not there."""
    for step in range(10, 90, 10):
        save_version(LOCAL, str(root), Alone(), f"step{step}", step)
    (root / "latest").write_text(latest)
    for step in gone:
        shutil.rmtree(root / f"step{step}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prune", "maintain"])
@pytest.mark.parametrize(
    ("latest", "gone", "kept"),
    [
        ("step20", (30, 40, 50, 60), {20, 80}),  # latest of an older copy, after a rotation
        ("step10", (30,), {10, 20, 80}),
        ("step20", (30,), {20, 80}),
        ("step20", (), {20, 80}),
    ],
)
def test_the_last_commit_is_kept_though_commits_before_it_are_gone(
    how: str, latest: str, gone: tuple[int, ...], kept: set[int], tmp_path: Path
) -> None:
    _rotated(tmp_path, latest, gone)
    if how == "prune":
        ckpttool.prune(tmp_path, keep_last=1)
    else:
        maintain(LOCAL, str(tmp_path), Rules(last=1), grace=0)
    assert {int(p.name[4:]) for p in tmp_path.iterdir() if p.is_dir()} == kept


@pytest.mark.parametrize("gone", [(), (10, 50, 60)])
def test_a_prune_keeps_what_a_restore_takes_though_latest_names_a_torn_one(
    gone: tuple[int, ...], tmp_path: Path
) -> None:
    _rotated(tmp_path, "step30", gone)
    next((tmp_path / "step30").glob("*.pt")).unlink()
    ckpttool.prune(tmp_path, keep_last=1)
    assert {"step20", "step30", "step80"} <= {p.name for p in tmp_path.iterdir()}
    assert [one.tag for one in candidates(LOCAL, str(tmp_path))[:2]] == ["step30", "step20"]


def test_the_newest_one_before_a_mixture_of_two_saves_is_kept(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tags = [tmp_path / f"global_step{step}" for step in (1, 2, 3)]
    for tag in tags:
        shutil.copytree(Path(source("zero2-dp2-bf16")) / "global_step3", tag)
    state = tags[2] / "mp_rank_00_model_states.pt"
    values = torch.load(state, weights_only=False)
    torch.save({**values, "global_steps": 9}, state)
    (tmp_path / "latest").write_text("global_step3")
    decisions = ckpttool.prune(tmp_path, keep_last=1)
    assert [one.keep for one in decisions] == [False, True, True]
    assert decisions[1].reason == "global_step3 may be of two saves"


@pytest.mark.parametrize("latest", ["step35", "step25"])
def test_an_abandoned_branch_is_not_taken_for_later_commits(latest: str, rewound: Path) -> None:
    for name in {"step30", "step50", "step35"} - {latest}:
        shutil.rmtree(rewound / name)
    (rewound / "latest").write_text(latest)
    ckpttool.prune(rewound, keep_last=1)
    assert {p.name for p in rewound.iterdir() if p.is_dir()} == {latest}


def test_commits_in_a_run_of_ray_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    before = ("", 0)
    for number, step in enumerate((10, 20, 30, 15, 25), 1):
        request = Request("global", step, 2, before=before, sidecars=SIDECARS)
        root = str(tmp_path / directory_name(step, number, f"{10 - number:08x}"))
        save(LOCAL, root, Alone(), request, part(version(0), 0, 1))
        before = last_commit(LOCAL, str(tmp_path))
        assert before[1] == number
    assert [c.step for c in run_commits(LOCAL, str(tmp_path))] == [25, 15, 30, 20, 10]
    ckpttool.prune(tmp_path, keep_last=2)
    assert [c.step for c in run_commits(LOCAL, str(tmp_path))] == [25, 15]


class _Pruned(LocalStorage):
    """A disk on which another process removes two checkpoints and commits another, just before one is listed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def listing(self, path: str) -> list[Entry]:
        if path == str(self._root / "step1") and (self._root / "step1").exists():
            save_version(LOCAL, str(self._root), Alone(), "step3", 3)
            for name in ("step1", "step2"):
                LOCAL.remove_tree(str(self._root / name))
        return super().listing(path)


def test_checkpoints_that_are_removed_meanwhile_make_no_restore_fail(tmp_path: Path) -> None:
    for number in (1, 2):
        _save(tmp_path, f"step{number}", number)
    assert [c.tag for c in candidates(_Pruned(tmp_path), str(tmp_path))] == ["step3"]


class _Replaced(LocalStorage):
    """A disk on which another process begins to save the only checkpoint anew, before its manifest is looked for."""

    def exists(self, path: str) -> bool:
        directory = os.path.dirname(path)
        aside = f"{directory}{REPLACED}"
        if path.endswith(f"step1/{MANIFEST}") and not os.path.exists(aside):
            os.rename(directory, aside)
            os.mkdir(directory)
            LOCAL.put(os.path.join(directory, MARK), b"{}")
        return super().exists(path)


def test_the_only_checkpoint_is_found_while_it_is_replaced(tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1)
    assert [c.tag for c in candidates(_Replaced(), str(tmp_path))] == [f"step1{REPLACED}"]


def test_a_save_that_deletes_its_marker_meanwhile_is_a_commit(bucket: Bucket) -> None:
    root = bucket.url("run")
    save_version(open_storage(root), root, Alone(), "step1", 1)
    bucket.put(f"run/step1/{MARK}", b"{}")
    with Proxy(bucket.endpoint) as proxy:
        deleted = proxy.add(Before(lambda _: bucket.delete(f"run/step1/{MARK}")), "get_object", MARK)
        assert is_commit(open_storage(root, {"endpoint_url": proxy.url}), f"{root}/step1")
        assert deleted.fired == 1


def test_saves_that_died_before_latest_was_written_come_first() -> None:
    """Also of a run that had gone back before, and several of them, each restored by the next start."""
    five = Saved("step5", 5, 5, "a5", "a4", "a4")
    four = Saved("step4", 4, 4, "a4", "a3", "a3")
    back = Saved("step6", 6, 6, "a6", "a5", "a4", marked=True)  # restored from step4, while latest named step5
    later = Saved("step7", 7, 6, "a7", "a5", "a6", marked=True)  # restored from step6; latest still names step5
    assert newest_first([four, five, back], "step5")[0].name == "step6"
    assert [one.name for one in newest_first([four, five, back, later], "step5")][:2] == ["step7", "step6"]


def test_a_checkpoint_of_ray_may_be_a_distributed_checkpoint_itself(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / ".metadata").write_bytes(b"")
    for path in (f"{tmp_path}/checkpoint_1", f"{tmp_path}/checkpoint_1/"):
        assert [found.path for found in checkpoints_of_ray(LOCAL, path)] == [f"{tmp_path}/checkpoint_1"]
    (tmp_path / "checkpoint_1" / ".metadata").unlink()
    assert checkpoints_of_ray(LOCAL, f"{tmp_path}/checkpoint_1") == []
