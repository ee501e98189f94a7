"""Rules of age, pins, thin and torn checkpoints: which stay, which go, and the reasons given."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.analysis.digest import same_weights
from ckpttool.catalog import cleanup, entries, retention, thinning
from ckpttool.catalog.cleanup import maintain, remove_left_over_files, rotate
from ckpttool.catalog.listing import CatalogEntry
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.retention import Decision, Rules, decide
from ckpttool.commit.manifest import Manifest, read_manifest
from ckpttool.commit.marks import Pin, find_pin, identity
from ckpttool.errors import CkptError, PlanError, PruneError
from ckpttool.formats.scan import scan
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import write_files
from ckpttool.storage import LOCAL, MANIFEST, MARK, PIN, THINNING
from ckpttool.storage.base import WHOLE
from ckpttool.storage.safe_files import temporary_name
from tests import damage, sampling
from tests.cli.command import ckpttool
from tests.faults.disks import CHANGES, watching
from tests.faults.rules import Before, Fail, Nothing, Rule
from tests.saving.checkpoints import Intercepted, save_version, version, whole
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_000_000_000.0
DAY = 86400.0


def _entry(step: int, **changes: Any) -> CatalogEntry:
    values: dict[str, Any] = {
        "name": f"step{step}", "path": f"run/step{step}", "format": "zero", "stage": 2, "world_size": 2, "step": step,
        "nbytes": 10, "modified": NOW - 100 * DAY, "whole": True, "problem": None, "latest": False, "link": None,
        "metrics": {}, "saved": NOW - (100 - step) * DAY, "of_run": True,
    }  # fmt: skip
    return CatalogEntry(**{**values, **changes})


def _thin(step: int, dtype: str = "bf16") -> CatalogEntry:
    return _entry(step, format="thin", stage=None, thin=dtype, of_run=False)


def _decided(entries: list[CatalogEntry], **rules: Any) -> dict[int | None, Decision]:
    return {d.entry.step: d for d in decide(entries, Rules(**rules), root="run", now=NOW)}


def _what(entries: list[CatalogEntry], **rules: Any) -> list[tuple[int | None, str]]:
    found = decide(entries, Rules(**rules), root="run", now=NOW)
    assert all(d.reason for d in found)
    return [(d.entry.step, "goes" if not d.keep else d.thin or "stays") for d in found]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"thin": "bf16"}, ["bf16", "bf16", "bf16", "bf16", "stays"]),
        ({"thin": "fp32", "last": 2}, ["fp32", "fp32", "fp32", "stays", "stays"]),
        ({"thin_every": 20}, ["goes", "bf16", "goes", "bf16", "stays"]),
        ({"thin_every": 20, "thin": "fp32", "every": 40}, ["goes", "fp32", "goes", "stays", "stays"]),
        ({"thin_every": 20, "last": 3}, ["goes", "bf16", "stays", "stays", "stays"]),
        ({"age": "61d"}, ["goes", "goes", "goes", "stays", "stays"]),
        ({"age": 71 * DAY, "thin": "bf16"}, ["bf16", "bf16", "stays", "stays", "stays"]),
        ({"torn": True}, ["stays", "stays", "stays", "stays", "stays"]),
        ({"torn": True, "last": 1}, ["goes", "goes", "goes", "goes", "stays"]),
    ],
    ids=str,
)
def test_what_no_rule_keeps_is_thinned_or_goes(rules: dict[str, Any], expected: list[str]) -> None:
    entries = [_entry(step) for step in (10, 20, 30, 40, 50)]
    assert _what(entries, **rules) == list(zip((10, 20, 30, 40, 50), expected, strict=True))


def test_thin_checkpoints_are_not_counted_and_stay_unless_a_rule_is_about_them() -> None:
    entries = [_thin(10), _thin(20), _entry(30), _entry(40)]
    assert _what(entries, last=1) == [(10, "stays"), (20, "stays"), (30, "goes"), (40, "stays")]
    assert _what(entries, last=2, thin="bf16") == [(10, "stays"), (20, "stays"), (30, "stays"), (40, "stays")]
    assert _what(entries, last=2, thin_every=20) == [(10, "goes"), (20, "stays"), (30, "stays"), (40, "stays")]
    assert _what(entries, last=2, thin_every=20, age="95d")[0] == (10, "stays")
    assert _decided(entries, last=1)[10].reason == "thin already"


@pytest.mark.parametrize(
    "rules", [{"last": 1}, {"thin": "bf16"}, {"thin_every": 7}, {"torn": True, "last": 1}], ids=str
)
def test_nothing_changes_what_is_pinned_newest_or_named(rules: dict[str, Any]) -> None:
    pin = Pin("me@here", NOW, "the paper's\n\x1b[31mtable")
    entries = [
        _entry(1, pin=pin), _entry(2, latest=True), _entry(3, reported=True), _thin(4),
        _entry(5, whole=False, problem="is missing", torn="incomplete", pin=pin), _entry(6),
    ]  # fmt: skip
    entries[3] = _entry(4, format="thin", stage=None, thin="bf16", pin=pin)
    assert {what for _, what in _what(entries, **rules)} == {"stays"}
    assert _decided(entries, **rules)[1].reason == "pinned by me@here: the paper's\\n\\x1b[31mtable"


@pytest.mark.parametrize(
    ("changes", "goes", "reason"),
    [
        ({"torn": "uncommitted"}, True, "torn: is missing"),
        ({"torn": "incomplete"}, True, "torn: is missing"),
        ({"torn": None}, False, "cannot be opened, which does not prove it torn"),
        ({"torn": "uncommitted", "being_saved": True}, False, "torn, or being saved"),
        ({"torn": "incomplete", "modified": NOW - 60}, False, "torn, or being saved"),
        ({"torn": "incomplete", "modified": NOW + 60}, False, "torn, or being saved"),
        ({"torn": "incomplete", "latest": True}, True, "torn: is missing"),
        ({"torn": "incomplete", "step": 99, "name": "step99", "sorts": frozenset("a")}, True, "torn: is missing"),
        ({"torn": "incomplete", "step": 99, "name": "step99", "sorts": frozenset("c")}, False, "torn, but no newer"),
        ({"torn": "incomplete", "reported": True}, False, "Ray Train's snapshot lists it"),
        ({"torn": "incomplete", "problem": "is a root of its own, with 2 checkpoints"}, False, "is a root of its own"),
        ({"torn": "incomplete", "step": 99, "name": "step99"}, False, "torn, but no newer checkpoint is whole"),
        ({"torn": "uncommitted", "step": 99, "name": "step99"}, True, "torn: is missing"),
        ({"torn": "incomplete, beside weights"}, False, "torn, but its weight files may be whole"),
    ],
    ids=str,
)
def test_torn_checkpoints_go_only_if_nothing_may_write_them(changes: dict[str, Any], goes: bool, reason: str) -> None:
    torn = _entry(**{"step": 5, "whole": False, "problem": "is missing", "stage": None, **changes})
    found = _decided([torn, _entry(50, sorts=frozenset("ab"))], torn=True)[torn.step]
    assert (not found.keep, found.reason.startswith(reason) or reason in found.reason) == (goes, True), found
    assert _decided([torn, _entry(50)], last=1)[torn.step].keep


def test_a_clock_that_was_ahead_keeps_rather_than_removes() -> None:
    entries = [_entry(1, saved=NOW + 300 * DAY), _entry(2, saved=None), _entry(3)]
    assert _what(entries, age="7d") == [(1, "stays"), (2, "goes"), (3, "stays")]


# ------------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four commits, step1 to step4."""
    for number in (1, 2, 3, 4):
        save_version(LOCAL, str(tmp_path / "run"), Alone(), f"step{number}", 0)
        _set_step(tmp_path / "run" / f"step{number}", number)
    return tmp_path / "run"


def _set_step(directory: Path, step: int, **changes: Any) -> None:
    manifest = read_manifest(LOCAL, str(directory))
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    (directory / MANIFEST).write_bytes(Manifest(**{**fields, "step": step, **changes}).to_json())


def test_dry_run_says_which_why_and_how_much(root: Path) -> None:
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    done = ckpttool("prune", root, "--keep-last", 2, "--thin", "bf16", "--dry-run", "--json")
    told = json.loads(done.stdout)["decisions"]
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
    assert [(d["keep"], d["thin"], d["freed"] > 0) for d in told] == [
        (True, "bf16", True), (True, "bf16", True), (True, None, False), (True, None, False),
    ]  # fmt: skip
    sizes = {e.name: e.nbytes for e in api.ls(root).entries}
    made = api.prune(root, keep_last=2, thin="bf16")
    assert [d.freed for d in made] == [d["freed"] for d in told]
    after = {e.name: e.nbytes for e in api.ls(root).entries}
    for d in made:  # but for the manifest, which lists other files
        assert abs(sizes[d.entry.name] - after[d.entry.name] - d.freed) < 2000
    lines = ckpttool("ls", root).stdout.splitlines()
    assert "thin bf16" in lines[1]


def test_progress_counts_the_bytes_of_thin_checkpoints(root: Path) -> None:
    told: list[tuple[int, int]] = []
    api.prune(root, keep_last=2, thin="bf16", progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert {total for _, total in told} == {told[-1][1]}
    thin = [p for n in (1, 2) for p in (root / f"step{n}").iterdir() if p.name != MANIFEST]
    assert told[-1][1] == sum(p.stat().st_size for p in thin)


def test_age_is_that_of_the_save_not_of_the_files(root: Path) -> None:
    for number in (1, 2):
        _set_step(root / f"step{number}", number, created=time.time() - number * DAY)
    decisions = api.prune(root, keep_for="36h", dry_run=True)
    assert [d.keep for d in decisions] == [True, False, True, True]
    assert decisions[0].reason == "saved 24 h ago, less than 36h"


def test_pins_are_shown_and_keep(root: Path) -> None:
    made = ckpttool("pin", root / "step1", "--why", "baseline of the ablation")
    assert made.code == 0
    assert made.stdout.startswith(f"{root}/step1: pinned by ")
    assert "pinned by" in ckpttool("ls", root).stdout
    told = json.loads(ckpttool("ls", root, "--json").stdout)["entries"][0]["pin"]
    assert (told["why"], abs(told["when"] - time.time()) < 60) == ("baseline of the ablation", True)
    maintain(LOCAL, str(root), Rules(last=1), grace=0)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step1", "step4"]
    maintain(LOCAL, str(root), Rules(last=1, thin="bf16"), grace=0)
    assert not api.inspect(root / "step1").thin
    assert ckpttool("unpin", root, "--tag", "step1").stdout.startswith(f"{root}/step1: ")
    assert (
        ckpttool("unpin", root / "step1").error == f"Error: {root}/step1: is not pinned; ls shows which checkpoints are"
    )
    maintain(LOCAL, str(root), Rules(last=1, thin="bf16"), grace=0)
    assert api.inspect(root / "step1").thin


def test_a_pin_is_not_copied_and_does_not_hinder(root: Path, tmp_path: Path) -> None:
    api.pin(root / "step1", why="mine")
    assert ckpttool("cp", root, tmp_path / "copy", "--tag", "step1").code == 0
    assert PIN not in {p.name for p in (tmp_path / "copy" / "step1").iterdir()}
    api.pin(tmp_path / "copy", tag="step1", why="mine too")
    assert "was there already" in ckpttool("cp", root, tmp_path / "copy", "--tag", "step1").stdout
    assert api.verify(root / "step1", deep=True).findings == ()


def test_a_damaged_pin_keeps_and_can_be_removed(root: Path) -> None:
    (root / "step1" / PIN).write_text("{")
    (decision, *_) = api.prune(root, keep_last=1, dry_run=True)
    assert (decision.keep, decision.reason) == (True, "pinned by ?: its pin cannot be read")
    api.unpin(root / "step1")
    assert not api.prune(root, keep_last=1, dry_run=True)[0].keep


@pytest.mark.parametrize("where", ["", "notes"])
@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_whatever_has_the_name_of_a_pin_keeps(
    kind: str, where: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = root / "step1" / where / PIN
    pin.parent.mkdir(exist_ok=True)

    def make() -> None:
        if kind == "directory":
            pin.mkdir()
        elif kind == "pipe":
            os.mkfifo(pin)
        else:
            pin.symlink_to("nowhere")

    def find(*arguments: Any) -> Pin | None:
        make()  # after the decision
        return find_pin(*arguments)

    monkeypatch.setattr(cleanup, "find_pin", find)
    assert api.prune(root, keep_last=3)[0].reason == "pinned meanwhile"
    monkeypatch.undo()
    for rules in ({"keep_last": 1}, {"keep_last": 1, "thin": "bf16"}):
        (decision, *_) = api.prune(root, **rules)
        assert (decision.keep, decision.thin, decision.reason) == (True, None, "pinned by ?: its pin cannot be read")
    maintain(LOCAL, str(root), Rules(last=1), grace=0)
    assert api.verify(root / "step1", deep=True).findings == ()


@pytest.mark.parametrize("text", ["\ufeffstep2\r\n", "./step2/", " step2 "])
def test_all_read_latest_alike(text: str, root: Path) -> None:
    (root / "latest").write_bytes(text.encode())
    assert api.inspect(root).tag == "step2"
    found = api.ls(root)
    assert found.problems == ()
    assert [e.name for e in found.entries if e.latest] == ["step2"]
    assert [e.name for e in entries.committed(LOCAL, str(root), scan(LOCAL, str(root))) if e.latest] == ["step2"]
    assert cleanup.changed_since(LOCAL, str(root / "step2"), "", str(root)) == "latest names it meanwhile"
    assert candidates(LOCAL, str(root))[0].tag == "step2"
    maintain(LOCAL, str(root), Rules(last=1), grace=0)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step2", "step4"]
    parent = read_manifest(LOCAL, str(root / "step2")).attempt
    save_version(LOCAL, str(root), Alone(), "step5", 1)
    assert read_manifest(LOCAL, str(root / "step5")).parent == parent


def test_a_damaged_checkpoint_can_be_unpinned_but_not_pinned(root: Path) -> None:
    api.pin(root / "step1", why="mine")
    for number in (1, 2):
        (root / f"step{number}" / "mp_rank_00_model_states.pt").unlink()
    api.unpin(root / "step1")
    with refused(CkptError):
        api.pin(root / "step2", why="mine")


def test_the_trainers_rotation_keeps_pinned_and_thin_ones(tmp_path: Path) -> None:
    for number in range(1, 7):
        save_version(LOCAL, str(tmp_path / f"checkpoint-{number}"), Alone(), f"global_step{number}", 0)
        _set_step(tmp_path / f"checkpoint-{number}" / f"global_step{number}", number, number=number)
    api.pin(tmp_path / "checkpoint-1", why="the first")
    decisions = api.prune(tmp_path, keep_last=4, thin="bf16")
    assert [d.thin for d in decisions] == [None, "bf16", None, None, None, None]
    removed = rotate(LOCAL, str(tmp_path), 2, keep=(), grace=0)
    assert sorted(os.path.basename(path) for path in removed) == ["checkpoint-3", "checkpoint-4"]
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"checkpoint-1", "checkpoint-2", "checkpoint-5", "checkpoint-6"}


# ------------------------------------------------------------------------------------------------- torn


@pytest.mark.linux
def test_prune_removes_what_is_torn_and_nothing_that_may_be_being_saved(root: Path) -> None:
    fixture = Path(source("zero2-dp2-bf16"), "global_step3")
    for name in ("step0_cut", "step0_fresh", "step9_dead", "step9_alive", "step9_far"):
        shutil.copytree(fixture, root / name)
    for name in ("step0_cut", "step0_fresh", "step9_dead"):
        (root / name / "mp_rank_00_model_states.pt").unlink()
    began = identity()
    marks = {"dead": {**began, "process": 1, "began": "0"}, "alive": {**began, "process": os.getppid()}}
    with open(f"/proc/{os.getppid()}/stat") as file:
        marks["alive"]["began"] = file.read().rpartition(")")[2].split()[19]
    marks["far"] = {**began, "machine": "another"}
    for name, mark in marks.items():
        (root / f"step9_{name}" / MARK).write_text(json.dumps({"key": "save x", "files": [], **mark}))
    old = time.time() - 7200
    for path in root.rglob("*"):
        if path.parent.name not in {"step0_fresh", "step9_far"}:
            os.utime(path, (old, old))
    for path in (root / "step0_fresh").iterdir():
        os.utime(path, None)
    for path in (root / "step9_far").iterdir():
        os.utime(path, None)
    told = {d.entry.name: d for d in api.prune(root, torn=True, dry_run=True)}
    assert {name for name, d in told.items() if not d.keep} == {"step0_cut", "step9_dead"}
    assert "is being written, or was left half-written by a killed run" in told["step9_dead"].reason
    done = ckpttool("prune", root, "--torn")
    assert "2 of 9 removed" in done.stdout
    assert {p.name for p in root.iterdir() if p.is_dir()} == {
        "step0_fresh", "step9_alive", "step9_far", "step1", "step2", "step3", "step4",
    }  # fmt: skip
    assert "step0_fresh" in {d.entry.name for d in api.prune(root, torn=True, grace=0) if not d.keep}
    assert (root / "step9_alive").exists()


def test_a_reader_that_does_not_know_the_files_removes_nothing(tmp_path: Path) -> None:
    """If none of the run's checkpoints opens, the reader may be what is wrong."""
    shutil.copytree(Path(source("zero2-dp2-bf16"), "global_step3"), tmp_path / "step1")
    path = tmp_path / "step1" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    (decision,) = api.prune(tmp_path, torn=True, grace=0)
    assert decision.keep
    assert decision.reason.startswith("torn, but no newer checkpoint is whole: ")


# ------------------------------------------------------------------------------------------------- after a crash


@pytest.mark.linux
@pytest.mark.parametrize("committed", [False, True], ids=["before the commit", "after it"])
def test_the_next_prune_and_the_next_save_clear_away(committed: bool, root: Path, tmp_path: Path) -> None:
    """A prune that was killed leaves a marker; prune and manager finish what it began."""
    whole = {p.name: p.read_bytes() for p in (root / "step1").iterdir()}
    api.prune(root, keep_last=3, thin="bf16")
    thin = {p.name: p.read_bytes() for p in (root / "step1").iterdir()}
    new = sorted(thin.keys() - {MANIFEST})
    mark = {"key": "x", "files": new, "old": sorted(whole.keys() - {MANIFEST}), **identity(), "process": 1, "began": ""}
    killed = {**whole, **{n: thin[n] for n in new}, MANIFEST: (thin if committed else whole)[MANIFEST]}
    for how in ("prune", "manager"):
        run = tmp_path / how
        shutil.copytree(root, run)
        for name, data in killed.items():
            (run / "step1" / name).write_bytes(data)
        (run / "step1" / THINNING).write_text(json.dumps(mark))
        assert api.inspect(run / "step1").thin == committed
        if how == "prune":
            api.prune(run, keep_last=4)
        else:
            maintain(LOCAL, str(run), None, grace=0)
        assert {p.name for p in (run / "step1").iterdir()} == (thin if committed else whole).keys()
        assert api.verify(run / "step1", deep=True).findings == ()


def test_what_cannot_be_thinned_stays_with_the_reason(root: Path) -> None:
    (root / "step1" / "model.safetensors").write_text("mine")
    with refused(CkptError):
        api.prune(root, keep_last=3, thin="bf16")
    assert not api.inspect(root / "step1").thin
    with pytest.raises(PlanError):
        api.unpin(root / "step1")


def test_prune_goes_on_after_a_checkpoint_that_cannot_be_thinned(root: Path) -> None:
    (root / "step1" / "model.safetensors").write_text("mine")
    found = ckpttool("prune", root, "--keep-last", 2, "--thin", "bf16", "--json")
    assert found.code == 3
    assert "step1: cannot be thinned: holds model.safetensors, which is in the way" in found.stderr
    told = [(d["entry"]["name"], d["thin"], d["keep"]) for d in json.loads(found.stdout)["decisions"]]
    assert told == [("step1", None, True), ("step2", "bf16", True), ("step3", None, True), ("step4", None, True)]
    assert not api.inspect(root / "step1").thin
    assert api.inspect(root / "step2").thin
    (root / "step3" / "model.safetensors").write_text("mine too")
    with refused(PruneError) as caught:
        api.prune(root, keep_last=1, thin="bf16")
    assert [d.reason.startswith("cannot be thinned") for d in caught.value.decisions] == [True, False, True, False]


def test_a_checkpoint_that_another_process_removes_is_left_out(root: Path) -> None:
    """A run removes old checkpoints while ``prune`` looks at them, and then while it works."""
    with watching(Rule(Before(lambda _: shutil.rmtree(root / "step1")), "open", r"step1/.*_states\.pt$")) as machine:
        assert [d.entry.name for d in api.prune(root, keep_last=1, dry_run=True)] == ["step2", "step3", "step4"]
        assert machine.rules[0].done
    with watching(Rule(Before(lambda _: shutil.rmtree(root / "step2")), "rename", "step2$")):
        done = {d.entry.name: d.reason for d in api.prune(root, keep_last=1)}
    assert (done["step2"], done["step3"]) == ("removed by another process", "no rule keeps it")
    assert {p.name for p in root.iterdir() if p.is_dir()} == {"step4"}


def _aged(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path, (NOW, NOW))


def test_a_damaged_checkpoint_is_not_torn(tmp_path: Path) -> None:
    for name in ("step1", "step2", "step3"):
        shutil.copytree(os.path.join(source("zero2-dp2-bf16"), "global_step3"), tmp_path / name)
    path = tmp_path / "step1" / "mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    data[data.index(b"0.19.") + 5] ^= 1
    path.write_bytes(data)
    path = tmp_path / "step2" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    path = tmp_path / "step3" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-22] + bytes(22))  # the end record of the archive alone
    shutil.copytree(os.path.join(source("zero2-dp2-bf16"), "global_step3"), tmp_path / "step4")
    _aged(tmp_path)
    first, second, third, _ = api.prune(tmp_path, torn=True)
    assert (third.keep, third.reason.startswith("cannot be opened, which does not prove it torn: ")) == (True, True)
    assert first.keep
    assert first.reason.startswith("cannot be opened, which does not prove it torn: ")
    assert (second.keep, "torn: " in second.reason) == (False, True)


def test_a_committed_file_that_has_grown_is_not_torn(root: Path) -> None:
    for name in ("step1", "step2"):
        path = next((root / name).glob("*optim_states.pt"))
        data = path.read_bytes()
        path.write_bytes(data + b"x" if name == "step1" else data[:-1])
    _aged(root)
    assert [d.entry.name for d in api.prune(root, torn=True) if not d.keep] == ["step2"]


def test_a_removal_that_fails_halfway_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with refused(PruneError):
        api.prune(root, keep_last=3)


def test_what_is_pinned_or_named_while_prune_works_stays(root: Path) -> None:
    def meanwhile(_: object) -> None:
        api.pin(root / "step2", why="the best so far")
        (root / "latest").write_text("step3\n")

    with watching(Rule(Before(meanwhile), "rename", "step1$")):
        done = [(d.entry.name, d.keep, d.reason) for d in api.prune(root, keep_last=1)]
    assert done[:3] == [
        ("step1", False, "no rule keeps it"), ("step2", True, "pinned meanwhile"),
        ("step3", True, "latest names it meanwhile"),
    ]  # fmt: skip


@pytest.mark.linux
def test_leftovers_that_cannot_be_removed_do_not_stop_a_prune(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = {"key": "x", "files": ["model.safetensors"], "old": []}
    (root / "step1" / THINNING).write_text(json.dumps(mark))
    (root / "step1" / "model.safetensors").write_bytes(b"begun")
    with watching(Rule(Fail("EACCES"), "unlink", "step1/model.safetensors$")):
        assert [d.keep for d in api.prune(root, keep_last=2)] == [False, False, True, True]
    assert "step1/model.safetensors: permission denied" in caplog.text


def test_torn_checkpoints_of_other_formats_and_with_weights_stay(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        shutil.copytree(source("zero3-dp2-bf16-trainer"), tmp_path / name)
    for name in ("checkpoint-1", "checkpoint-2"):
        next((tmp_path / name).glob("global_step*/*rank_1*optim_states.pt")).unlink()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"of the Trainer")
    shutil.copytree(source("zero3-dp2-bf16-trainer"), tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-0" / "adapter").mkdir()
    (tmp_path / "checkpoint-0" / "adapter" / "adapter_model.safetensors").write_bytes(b"of PEFT")
    (tmp_path / "checkpoint-0" / "global_step3" / MARK).write_text('{"key": "save x", "files": [], "host": "x"}')
    _aged(tmp_path)
    assert [(d.entry.name, d.keep) for d in api.prune(tmp_path, torn=True)] == [
        ("checkpoint-0", True), ("checkpoint-1", False), ("checkpoint-2", True), ("checkpoint-3", True),
    ]  # fmt: skip
    universal = Path(source("universal-zero2-dp2-bf16"))
    shutil.copytree(source("zero2-dp2-bf16"), tmp_path / "run")
    (torn,) = (path for path in universal.iterdir() if path.is_dir())
    shutil.copytree(torn, tmp_path / "run" / "global_step1_universal")
    next((tmp_path / "run" / "global_step1_universal" / "zero").rglob("exp_avg.pt")).unlink()
    _aged(tmp_path / "run")
    found = {d.entry.name: d for d in api.prune(tmp_path / "run", torn=True)}["global_step1_universal"]
    assert found.keep
    assert not found.entry.whole


def test_a_checkpoint_that_is_not_understood_is_not_torn(tmp_path: Path) -> None:
    """Its files are all there: a later release may read it, and DeepSpeed may already."""
    torch = pytest.importorskip("torch", reason="a file of torch is changed")
    for name in ("step3", "step3-again"):
        shutil.copytree(os.path.join(source("zero2-dp2-bf16"), "global_step3"), tmp_path / name)
    for path in (tmp_path / "step3").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        state["shared_params"]["lost.weight"] = "nowhere"
        torch.save(state, path)
    old, new = api.ls(tmp_path).entries
    assert (old.name, old.whole, old.torn, new.whole) == ("step3", False, None, True)
    assert all(decision.keep for decision in api.prune(tmp_path, torn=True, grace=0))
    assert (tmp_path / "step3").is_dir()


# ------------------------------------------------------------------------------------------------- a save meanwhile


def _prune(root: str, thin: str | None) -> None:
    api.prune(root, keep_last=1, thin=thin)


def _maintain(root: str, thin: str | None) -> None:
    maintain(LOCAL, root, Rules(last=1, thin=thin), grace=0)


def _rotate(root: str, _: object) -> None:
    rotate(LOCAL, root, 1, keep=(), grace=0)


@pytest.fixture
def rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[str, list[str]]]:
    """Checkpoints of which a run saves the second again while another process removes the first."""

    def make(remover: str, moment: str) -> tuple[str, list[str]]:
        root = str(tmp_path / "run")
        trainer = remover == "rotate"
        for n in (1, 2, 3, 4):
            save_version(LOCAL, f"{root}/checkpoint-{n}" if trainer else root, Alone(), f"step{n}", 0)
            manifest = f"{root}/checkpoint-{n}/step{n}" if trainer else f"{root}/step{n}"
            _set_step(Path(manifest), n, number=n)
        second = f"{root}/checkpoint-2" if trainer else root
        latest = Path(second, "latest")
        began, go_on = threading.Event(), threading.Event()

        def write(storage: Any, *given: Any) -> Any:
            began.set()
            go_on.wait(60)
            return write_files(storage, *given)

        def save() -> None:
            save_version(Intercepted(LOCAL, write), second, Alone(), "step2", 7, overwrite=True)

        saving = threading.Thread(target=save)
        removed = LOCAL.remove_tree

        def slow(_: object, path: str, **options: Any) -> None:
            removed(path, **options)
            if path in {f"{root}/step1", f"{root}/checkpoint-1"} and not saving.ident:
                before = latest.read_text()
                saving.start()
                began.wait(60)
                if moment == "between its commit and latest":
                    go_on.set()
                    saving.join()
                    latest.write_text(before)

        monkeypatch.setattr(type(LOCAL), "remove_tree", slow)
        return root, [second, go_on, saving]  # type: ignore[list-item]

    return make


@pytest.mark.parametrize("moment", ["while it is saved", "between its commit and latest"])
@pytest.mark.parametrize("remove", [_prune, _maintain, _rotate], ids=lambda f: f.__name__[1:])
def test_a_checkpoint_that_is_saved_again_meanwhile_stays(remove: Any, moment: str, rewound: Any) -> None:
    root, (second, go_on, saving) = rewound(remove.__name__[1:], moment)
    remove(root, None)
    go_on.set()
    saving.join()
    assert whole(second)["step2"] == version(7)
    assert not Path(root, "step1").exists()
    assert not Path(root, "checkpoint-1").exists()


def test_a_checkpoint_that_is_saved_again_meanwhile_stays_whole(rewound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, (second, go_on, saving) = rewound("prune", "between its commit and latest")
    go_on.set()
    decided = retention.decide

    def decide_and_save(*given: Any, **options: Any) -> Any:
        found = decided(*given, **options)
        saving.start()
        saving.join()
        Path(root, "latest").write_text("step4")
        return found

    monkeypatch.setattr(retention, "decide", decide_and_save)
    done = api.prune(root, keep_last=1, thin="bf16")
    assert done[1].reason == "changed meanwhile: saved again"
    assert whole(second)["step2"] == version(7)


def test_a_small_file_that_a_killed_process_began_is_removed(root: Path, tmp_path: Path) -> None:
    """Killed while it wrote ``latest``, cp leaves a temporary file in a root that no run may ever save in."""
    files = {p.name for p in root.iterdir() if p.is_file()}
    for how in ("cp", "prune"):
        begun, users = temporary_name("latest"), "notes.20261126.partial"
        for name in (begun, users, "new.0badcafe.txt"):
            (root / name).write_text("step")
        if how == "cp":
            shutil.copytree(root / "step1", tmp_path / "other" / "step5")
            api.cp(tmp_path / "other", root, tag="step5")
        else:
            api.prune(root, keep_last=4, dry_run=True)
            assert (root / begun).exists()
            api.prune(root, keep_last=4)
        left = {p.name for p in root.iterdir() if p.is_file()}
        assert left - {"zero_to_fp32.py"} == files - {"zero_to_fp32.py"} | {
            users,
            "new.0badcafe.txt",
        }


@pytest.mark.parametrize("moment", ["plan_thinning", "thin", "recover"])
def test_a_checkpoint_that_another_prune_thins_meanwhile_is_left(
    moment: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two said that a file does not exist, or is in the way."""
    ours = getattr(thinning, moment)
    begun: list[int] = []

    def slow(*arguments: Any, **options: Any) -> Any:
        if not begun:
            begun.append(1)
            api.prune(root, keep_last=3, thin="bf16")
        return ours(*arguments, **options)

    monkeypatch.setattr(thinning, moment, slow)
    first, *_ = api.prune(root, keep_last=3, thin="bf16")
    assert (first.keep, first.thin, first.reason) == (True, None, "thinned by another process")
    assert api.inspect(root / "step1").thin
    assert api.verify(root / "step1", deep=True).findings == ()


def test_a_checkpoint_that_another_prune_is_thinning_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower: list[Decision] = []

    def compare(*arguments: Any) -> str:
        if not slower:
            slower.append(api.prune(root, keep_last=3, thin="bf16")[0])
        return same_weights(*arguments)

    monkeypatch.setattr(thinning, "same_weights", compare)
    assert api.prune(root, keep_last=3, thin="bf16")[0].thin == "bf16"
    assert (slower[0].keep, slower[0].thin) == (True, None)
    assert slower[0].reason.startswith("is being thinned by process")
    assert api.inspect(root / "step1").thin


@pytest.mark.linux
def test_old_files_that_stay_after_a_thinning_are_named(root: Path) -> None:
    rule = Rule(Fail("EACCES"), "unlink", r"optim_states\.pt$", times=None)
    with watching(rule), refused(PruneError):
        api.prune(root, keep_last=3, thin="bf16")
    assert api.prune(root, keep_last=3, thin="bf16")[0].reason == "thin already"
    assert not list((root / "step1").glob("*optim_states.pt"))


@pytest.mark.parametrize("left", [False, True])
def test_a_dry_run_says_what_is_in_the_way_of_a_thin_checkpoint(left: bool, root: Path) -> None:
    (root / "step1" / "model.safetensors").write_bytes(b"mine")
    if left:  # by a killed replacement, so that the real run removes it
        mark = {"key": "x", "files": ["model.safetensors"], "old": []}
        (root / "step1" / THINNING).write_text(json.dumps(mark))
    rules = ("prune", root, "--keep-last", 3, "--thin", "bf16", "--grace", 0)
    told = ckpttool(*rules, "--dry-run")
    assert ("1 would be thinned" in told.stdout) == left
    done = ckpttool(*rules)
    assert done.code == (0 if left else 3), done
    if not left:
        problem = "cannot be thinned: holds model.safetensors, which is in the way of the thin checkpoint's file"
        assert problem in " ".join(told.stdout.split())
        assert f"{root}/step1: {problem}" in done.stderr
        assert (root / "step1" / "model.safetensors").read_bytes() == b"mine"


def test_a_dry_run_does_not_promise_to_thin_what_is_damaged(tmp_path: Path) -> None:
    for name in ("step1", "step2"):
        shutil.copytree(os.path.join(source("zero2-dp2-bf16"), "global_step3"), tmp_path / name)
    damage.flip_in_master(next((tmp_path / "step1").glob("*optim_states.pt")))
    (tmp_path / "latest").write_text("step2")
    shown = ckpttool("prune", tmp_path, "--keep-last", 1, "--thin", "bf16", "--dry-run").stdout
    assert "1 would be thinned" in shown
    assert "a checkpoint whose values are damaged is kept whole" in shown
    with refused(PruneError):
        api.prune(tmp_path, keep_last=1, thin="bf16")
    assert not api.inspect(tmp_path / "step1").thin
    assert "damaged" not in ckpttool("prune", tmp_path, "--keep-last", 2, "--dry-run").stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tag", "weights", "dcp"])
def test_what_a_cp_leaves_that_is_killed_at_any_unlink_is_removed(what: str, root: Path, tmp_path: Path) -> None:
    src, made = root / "step4", tmp_path / "made"
    if what == "weights":
        api.consolidate(src, made, to="safetensors", max_shard_size="3kB")
    elif what == "dcp":
        api.convert(src, made, to="dcp")
    source_of_copy = src if what == "tag" else made
    operations = ("rename", "unlink")
    recorded = Rule(Nothing(), operations)
    with watching(recorded):
        assert ckpttool("cp", source_of_copy, tmp_path / "good").code == 0
    good = {p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*")}
    for number, then in itertools.product(range(len(recorded.matched)), ("cp", "prune")):
        copy = tmp_path / f"{then}{number}" / "copy"
        if (child := os.fork()) == 0:
            with (
                contextlib.suppress(BaseException),
                watching(Rule(Before(lambda _: os._exit(9)), operations, nth=number + 1)),
            ):
                ckpttool("cp", source_of_copy, copy)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        if then == "prune" and what == "tag" and copy.is_dir():
            api.prune(copy, keep_last=1)
            assert not (copy / "step4" / WHOLE).exists()
            assert list(copy.glob("latest.*")) == []
        assert ckpttool("cp", source_of_copy, copy).code == 0
        assert {p.relative_to(copy) for p in copy.rglob("*")} == good, (number, recorded.matched[number])
        assert [p.name for p in copy.parent.iterdir()] == ["copy"]


def test_a_small_file_is_written_again_if_its_incomplete_file_is_removed(root: Path) -> None:
    """A clean-up cannot tell the incomplete file of a killed process from that of a running one."""
    removed: list[str] = []

    def clear(_: object) -> None:
        if len(removed) < 3:
            removed.extend(p.name for p in root.glob("latest.*.partial"))
            remove_left_over_files(LOCAL, str(root), ())

    with watching(Rule(Before(clear), "rename", times=None)):
        save_version(LOCAL, str(root), Alone(), "step9", 0)
    assert len(removed) == 3
    assert (root / "latest").read_text() == "step9"
    assert {p.name for p in root.iterdir() if p.is_file()} == {"latest", "zero_to_fp32.py"}


def _states(root: Path) -> dict[str, str]:
    """What readers accept of a root, with every byte compared: "whole" or "thin" by name."""
    found = {}
    for entry in api.ls(root).entries:
        if entry.whole:
            assert api.verify(entry.path, deep=True).findings == ()
            found[entry.name] = "thin" if entry.thin else "whole"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_best": "loss"}, {"step2", "step4"}),
        ({"keep_for": "36h"}, {"step4"}),
        ({"keep_best": "loss", "thin": "bf16"}, {"step2", "step4"}),
    ],
    ids=["best", "young", "best, thin"],
)
def test_a_kill_at_any_operation_of_a_prune_loses_nothing(
    rules: dict[str, Any], kept: set[str], tmp_path: Path, crash_points: Callable[[int], None]
) -> None:
    base, root, operations = tmp_path / "base", tmp_path / "root", (*CHANGES, "listdir")
    for number, loss in enumerate((3.0, 1.0, 4.0, 2.0), 1):
        save_version(LOCAL, str(base), Alone(), f"step{number}", 0, metrics={"loss": loss})
        _set_step(base / f"step{number}", number, created=time.time() - (4 - number) * 2 * DAY)
    shutil.copytree(base, root)
    recorded = Rule(Nothing(), operations)
    with watching(recorded):
        api.prune(root, grace=0, jobs=1, **rules)
    after, files = _states(root), {p.relative_to(root) for p in root.rglob("*")}
    assert {name for name, state in after.items() if state == "whole"} == kept
    points = sampling.some(range(len(recorded.matched)), 4, key=str(rules))
    for at in points:
        shutil.rmtree(root)
        shutil.copytree(base, root)
        if (child := os.fork()) == 0:
            with (
                contextlib.suppress(BaseException),
                watching(Rule(Before(lambda _: os._exit(9)), operations, nth=at + 1)),
            ):
                api.prune(root, grace=0, jobs=1, **rules)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        left = _states(root)
        assert after.keys() <= left.keys(), (at, recorded.matched[at])
        assert all(state in ("whole", after.get(name)) for name, state in left.items()), (at, recorded.matched[at])
        api.prune(root, grace=0, jobs=1, **rules)
        assert _states(root) == after, (at, recorded.matched[at])
        assert {p.relative_to(root) for p in root.rglob("*")} == files, (at, recorded.matched[at])
    crash_points(len(points))
