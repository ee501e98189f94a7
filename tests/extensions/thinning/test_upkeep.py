"""Decisions to thin checkpoints, to keep them whole or to remove them, and the reasons given."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.analysis.digest import same_weights
from ckpttool.catalog import pruning, retention
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.commit.marks import identity
from ckpttool.errors import ArgumentError, CkptError, PlanError, PruneError
from ckpttool.extensions.thinning import replacement
from ckpttool.extensions.thinning.action import Thin
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, THINNING
from tests import damage
from tests.catalog.decisions import DAY, decided, decisions, entry, four_commits, set_step, thin_entry
from tests.cli.command import ckpttool
from tests.faults.disks import watching
from tests.faults.rules import Fail, Rule
from tests.saving.checkpoints import save_version, version, whole
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from ckpttool.catalog.retention import Decision


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four commits, step1 to step4."""
    return four_commits(tmp_path / "run")


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
    entries = [entry(step) for step in (10, 20, 30, 40, 50)]
    assert decisions(entries, **rules) == list(zip((10, 20, 30, 40, 50), expected, strict=True))


def test_thin_checkpoints_are_not_counted_and_stay_unless_a_rule_is_about_them() -> None:
    entries = [thin_entry(10), thin_entry(20), entry(30), entry(40)]
    assert decisions(entries, last=1) == [(10, "stays"), (20, "stays"), (30, "goes"), (40, "stays")]
    assert decisions(entries, last=2, thin="bf16") == [(10, "stays"), (20, "stays"), (30, "stays"), (40, "stays")]
    assert decisions(entries, last=2, thin_every=20) == [(10, "goes"), (20, "stays"), (30, "stays"), (40, "stays")]
    assert decisions(entries, last=2, thin_every=20, age="95d")[0] == (10, "stays")
    assert decided(entries, last=1)[10].reason == "thin already"


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


def test_the_trainers_rotation_keeps_pinned_and_thin_ones(tmp_path: Path) -> None:
    for number in range(1, 7):
        save_version(LOCAL, str(tmp_path / f"checkpoint-{number}"), Alone(), f"global_step{number}", 0)
        set_step(tmp_path / f"checkpoint-{number}" / f"global_step{number}", number, number=number)
    api.pin(tmp_path / "checkpoint-1", why="the first")
    decisions = api.prune(tmp_path, keep_last=4, thin="bf16")
    assert [d.thin for d in decisions] == [None, "bf16", None, None, None, None]
    removed = rotate(LOCAL, str(tmp_path), 2, keep=(), grace=0)
    assert sorted(os.path.basename(path) for path in removed) == ["checkpoint-3", "checkpoint-4"]
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"checkpoint-1", "checkpoint-2", "checkpoint-5", "checkpoint-6"}


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


@pytest.mark.linux
def test_leftovers_that_cannot_be_removed_do_not_stop_a_prune(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = {"key": "x", "files": ["model.safetensors"], "old": []}
    (root / "step1" / THINNING).write_text(json.dumps(mark))
    (root / "step1" / "model.safetensors").write_bytes(b"begun")
    with watching(Rule(Fail("EACCES"), "unlink", "step1/model.safetensors$")):
        assert [d.keep for d in api.prune(root, keep_last=2)] == [False, False, True, True]
    assert "step1/model.safetensors: permission denied" in caplog.text


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

    monkeypatch.setattr(pruning, "decide", decide_and_save)
    done = api.prune(root, keep_last=1, thin="bf16")
    assert done[1].reason == "changed meanwhile: saved again"
    assert whole(second)["step2"] == version(7)


@pytest.mark.parametrize(
    ("owner", "moment"),
    [(replacement, "plan_thinning"), (replacement.Thinning, "carry_out"), (replacement, "recover")],
    ids=["plan", "thin", "recover"],
)
def test_a_checkpoint_that_another_prune_thins_meanwhile_is_left(
    owner: Any, moment: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two said that a file does not exist, or is in the way."""
    ours = getattr(owner, moment)
    begun: list[int] = []

    def slow(*arguments: Any, **options: Any) -> Any:
        if not begun:
            begun.append(1)
            api.prune(root, keep_last=3, thin="bf16")
        return ours(*arguments, **options)

    monkeypatch.setattr(owner, moment, slow)
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

    monkeypatch.setattr(replacement, "same_weights", compare)
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


def test_a_pinned_checkpoint_is_not_thinned_after_a_save(root: Path) -> None:
    api.pin(root / "step1", why="baseline of the ablation")
    rules = retention.Rules(last=1, action=Thin("bf16"))
    maintain(LOCAL, str(root), rules, grace=0)
    assert [api.inspect(root / f"step{n}").thin for n in (1, 2, 3, 4)] == [False, True, True, False]
    assert api.prune(root, keep_last=1, thin="bf16")[0].thin is None
    api.unpin(root / "step1")
    maintain(LOCAL, str(root), rules, grace=0)
    assert api.inspect(root / "step1").thin


@pytest.mark.parametrize(("name", "rules"), [("thin", {"thin": "fp16"}), ("thin_every", {"thin_every": 0})])
def test_a_wrong_rule_is_an_error_of_its_argument(name: str, rules: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        api.prune(tmp_path, **rules)
    assert (caught.value.path, bool(caught.value.hint)) == (name, True)
