"""Rules of age, pins, thin and torn checkpoints: which stay, which go, and the reasons given."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.catalog import cleanup, entries
from ckpttool.catalog.cleanup import maintain, remove_left_over_files, rotate
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import read_manifest
from ckpttool.commit.marks import Pin, find_pin, identity
from ckpttool.errors import CkptError, PruneError
from ckpttool.formats.scan import scan
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MARK, PIN
from ckpttool.storage.base import WHOLE
from ckpttool.storage.safe_files import temporary_name
from tests import sampling
from tests.catalog.decisions import DAY, NOW, decided, decisions, entry, four_commits, set_step, thin_entry
from tests.cli.command import ckpttool
from tests.faults.disks import CHANGES, watching
from tests.faults.rules import Before, Nothing, Rule
from tests.rooms import present
from tests.saving.checkpoints import save_version, version, whole
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "rules", [{"last": 1}, {"thin": "bf16"}, {"thin_every": 7}, {"torn": True, "last": 1}], ids=str
)
def test_nothing_changes_what_is_pinned_newest_or_named(rules: dict[str, Any]) -> None:
    pin = Pin("me@here", NOW, "the paper's\n\x1b[31mtable")
    entries = [
        entry(1, pin=pin), entry(2, latest=True), entry(3, reported=True), thin_entry(4),
        entry(5, whole=False, problem="is missing", torn="incomplete", pin=pin), entry(6),
    ]  # fmt: skip
    entries[3] = entry(4, format="thin", stage=None, thin="bf16", pin=pin)
    assert {what for _, what in decisions(entries, **rules)} == {"stays"}
    assert decided(entries, **rules)[1].reason == "pinned by me@here: the paper's\\n\\x1b[31mtable"


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
    torn = entry(**{"step": 5, "whole": False, "problem": "is missing", "stage": None, **changes})
    found = decided([torn, entry(50, sorts=frozenset("ab"))], torn=True)[torn.step]
    assert (not found.keep, found.reason.startswith(reason) or reason in found.reason) == (goes, True), found
    assert decided([torn, entry(50)], last=1)[torn.step].keep


def test_a_clock_that_was_ahead_keeps_rather_than_removes() -> None:
    entries = [entry(1, saved=NOW + 300 * DAY), entry(2, saved=None), entry(3)]
    assert decisions(entries, age="7d") == [(1, "stays"), (2, "goes"), (3, "stays")]


# ------------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four commits, step1 to step4."""
    return four_commits(tmp_path / "run")


def test_age_is_that_of_the_save_not_of_the_files(root: Path) -> None:
    for number in (1, 2):
        set_step(root / f"step{number}", number, created=time.time() - number * DAY)
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
    assert ckpttool("unpin", root, "--tag", "step1").stdout.startswith(f"{root}/step1: ")
    assert (
        ckpttool("unpin", root / "step1").error == f"Error: {root}/step1: is not pinned; ls shows which checkpoints are"
    )
    maintain(LOCAL, str(root), Rules(last=1), grace=0)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step4"]


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
    (decision, *_) = api.prune(root, keep_last=1)
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


@pytest.mark.parametrize(("stage", "keep"), [(2, True), (3, False)])
def test_model_states_alone_are_torn_if_they_hold_no_weights(stage: int, keep: bool, tmp_path: Path) -> None:
    """DeepSpeed writes them first: a killed save leaves them."""
    for name in ("step1", "step2"):
        shutil.copytree(Path(source(f"zero{stage}-dp2-bf16"), "global_step3"), tmp_path / name)
    for path in (tmp_path / "step1").glob("*optim_states.pt"):
        path.unlink()
    _aged(tmp_path)
    assert [(d.entry.name, d.keep) for d in api.prune(tmp_path, torn=True)] == [("step1", keep), ("step2", True)]


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


def _prune(root: str) -> None:
    api.prune(root, keep_last=1)


def _maintain(root: str) -> None:
    maintain(LOCAL, root, Rules(last=1), grace=0)


def _rotate(root: str) -> None:
    rotate(LOCAL, root, 1, keep=(), grace=0)


@pytest.mark.parametrize("moment", ["while it is saved", "between its commit and latest"])
@pytest.mark.parametrize("remove", [_prune, _maintain, _rotate], ids=lambda f: f.__name__[1:])
def test_a_checkpoint_that_is_saved_again_meanwhile_stays(remove: Any, moment: str, rewound: Any) -> None:
    root, (second, go_on, saving) = rewound(remove.__name__[1:], moment)
    remove(root)
    go_on.set()
    saving.join()
    assert whole(second)["step2"] == version(7)
    assert not Path(root, "step1").exists()
    assert not Path(root, "checkpoint-1").exists()


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
    for one in api.ls(root).entries:
        if one.whole:
            assert api.verify(one.path, deep=True).findings == ()
            found[one.name] = "thin" if one.thin else "whole"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_best": "loss"}, {"step2", "step4"}),
        ({"keep_for": "36h"}, {"step4"}),
        *([({"keep_best": "loss", "thin": "bf16"}, {"step2", "step4"})] if present("thinning") else []),
    ],
    ids=["best", "young", *["best, thin"] * present("thinning")],
)
def test_a_kill_at_any_operation_of_a_prune_loses_nothing(
    rules: dict[str, Any], kept: set[str], tmp_path: Path, crash_points: Callable[[int], None]
) -> None:
    base, root, operations = tmp_path / "base", tmp_path / "root", (*CHANGES, "listdir")
    for number, loss in enumerate((3.0, 1.0, 4.0, 2.0), 1):
        save_version(LOCAL, str(base), Alone(), f"step{number}", 0, metrics={"loss": loss})
        set_step(base / f"step{number}", number, created=time.time() - (4 - number) * 2 * DAY)
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
