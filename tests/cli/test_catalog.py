"""``ls``, ``cp`` and ``prune``: the listed, copied and removed checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.catalog import copy_plan
from ckpttool.catalog.listing import CatalogEntry
from ckpttool.catalog.retention import Rules, decide
from ckpttool.commit.marks import mark_damaged
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.storage import LOCAL, MARK, aside_name, open_storage
from tests import sampling
from tests.cli.command import ckpttool, remains
from tests.truth import HERE, NAMES, REPRESENTATIVE, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket

NAME = "zero2-dp2-bf16"
HALF = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of several steps, by name: the newest is torn, and latest names the one before it."""
    directory = tmp_path / "run"
    directory.mkdir()
    for step in (9, 10, 20, 100):
        shutil.copytree(f"{source(NAME)}/global_step3", directory / f"global_step{step}")
    (directory / "global_step100" / HALF).unlink()
    (directory / "latest").write_text("global_step20\n")
    (directory / "logs").mkdir()
    (directory / "logs" / "loss.txt").write_text("1.0")
    return directory


# ------------------------------------------------------------------------------------------------- ls


def test_checkpoints_are_listed_by_number_with_what_they_are(root: Path) -> None:
    found = api.ls(root).entries
    assert [e.name for e in found] == ["global_step9", "global_step10", "global_step20", "global_step100"]
    assert [(e.stage, e.world_size, e.step, e.whole, e.latest) for e in found[:3]] == [
        (2, 2, 3, True, False), (2, 2, 3, True, False), (2, 2, 3, True, True),
    ]  # fmt: skip
    files = list((root / "global_step9").iterdir())
    assert found[0].nbytes == sum(f.stat().st_size for f in files)
    assert found[0].modified == max(f.stat().st_mtime for f in files)
    assert not found[3].whole
    assert found[3].problem is not None
    assert found[3].problem.startswith(f"{HALF}: is missing")
    assert "more)" not in found[3].problem  # one file, one problem


def test_listing_is_printed_with_a_reason_for_what_is_torn(root: Path) -> None:
    lines = ckpttool("ls", root).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [e.name for e in api.ls(root).entries]
    assert lines[3].endswith("latest")
    assert "torn: " in lines[4]
    assert HALF in lines[4]
    assert json.loads(ckpttool("ls", root, "--json").stdout)["entries"][2]["latest"] is True


def test_a_tags_directory_alone_is_listed(root: Path) -> None:
    (found,) = api.ls(root / "global_step20").entries
    assert (found.name, found.latest, found.whole) == ("global_step20", True, True)


@pytest.mark.slow
def test_every_bundled_checkpoint_is_listed_as_what_it_is() -> None:
    for name in NAMES:
        (found,) = api.ls(source(name)).entries
        assert (found.whole, found.problem, found.link) == (True, None, None), name
        assert found.step == truth(name).facts["global_steps"], name
        assert found.latest == os.path.exists(os.path.join(source(name), "latest")) or found.format == "universal"
        assert found.metrics.get("epoch") == api.inspect(source(name)).client_state.get("epoch"), name


@pytest.mark.slow
def test_a_directory_of_runs_holds_no_checkpoints_of_its_own(tmp_path: Path) -> None:
    for name in {NAME, *sampling.some(REPRESENTATIVE, 8)} - {"zero2-dp2-bf16-trainer"}:
        shutil.copytree(source(name), tmp_path / name)
    found = {e.name: e for e in api.ls(tmp_path).entries}
    assert found[NAME].problem == "is a root of its own, with a checkpoint"
    assert not any(e.whole for e in found.values())
    assert all(d.keep for d in api.prune(tmp_path, keep_last=1))


def test_an_unfinished_root_is_not_a_checkpoint(root: Path, tmp_path: Path) -> None:
    os.rename(root / "global_step9", tmp_path / "elsewhere")
    os.mkdir(root / "global_step9")
    assert next(e.name for e in api.ls(root).entries) == "global_step10"


@pytest.mark.parametrize("name", ["empty", "missing", "file"])
def test_a_root_without_checkpoints_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    expected = {"empty": "holds no checkpoints", "missing": "does not exist", "file": "is not a directory"}[name]
    assert f"{tmp_path / name}: {expected}; " in ckpttool("ls", tmp_path / name).error


# ------------------------------------------------------------------------------------------------- prune


def test_only_checkpoints_without_a_rule_are_removed(root: Path) -> None:
    before = sorted(os.listdir(root))
    dry = ckpttool("prune", root, "--keep-last", 2, "--dry-run")
    assert sorted(os.listdir(root)) == before
    assert "would be removed" in dry.stdout
    done = ckpttool("prune", root, "--keep-last", 2)
    assert [line.split() for line in done.stdout.splitlines()] == [
        line.replace("would be removed", "removed").split() for line in dry.stdout.splitlines()
    ]
    assert sorted(set(before) - set(os.listdir(root))) == ["global_step9"]
    decisions = json.loads(ckpttool("prune", root, "--keep-last", 1, "--json").stdout)["decisions"]
    assert [(d["entry"]["name"], d["keep"]) for d in decisions] == [
        ("global_step10", False), ("global_step20", True), ("global_step100", True),
    ]  # fmt: skip
    assert decisions[1]["reason"] == "the newest whole one; latest names it"


@pytest.mark.parametrize("latest", ["last", "global_step20", ""])
def test_the_target_of_a_link_stays(root: Path, latest: str) -> None:
    for name in ("last", "z_best"):
        (root / name).symlink_to("global_step9" if name == "last" else root / "global_step10")
    (root / "latest").write_text(latest) if latest else (root / "latest").unlink()
    decisions = api.prune(root, keep_last=1)
    assert {d.entry.name: d.keep for d in decisions} == dict.fromkeys(
        ["last", "z_best", "global_step9", "global_step10", "global_step20", "global_step100"], True
    )
    assert "last is a link to it" in next(d.reason for d in decisions if d.entry.name == "global_step9")
    assert (root / "last" / HALF).exists()


def test_a_tag_within_a_directory_stays_while_latest_names_it(root: Path) -> None:
    os.makedirs(root / "epoch1")
    os.rename(root / "global_step20", root / "epoch1" / "step20")
    (root / "latest").write_text("epoch1/step20")
    (entry,) = (e for e in api.ls(root).entries if e.latest)
    assert entry.name == "epoch1"
    api.prune(root, keep_last=1)
    assert api.inspect(root).tag == "epoch1/step20"


@pytest.mark.parametrize("latest", [b"global_step20/", b"./global_step20", b"global_step20\n"])
def test_latest_is_understood_however_it_is_written(root: Path, latest: bytes) -> None:
    (root / "latest").write_bytes(latest)
    assert [d.entry.name for d in api.prune(root, keep_every=7) if d.keep] == ["global_step20", "global_step100"]
    assert (root / "global_step20" / HALF).exists()


@pytest.mark.parametrize("latest", [b"global_step7", b"", b"../run/global_step9", b"\xff\xfe"])
def test_nothing_is_removed_while_latest_means_nothing(root: Path, latest: bytes) -> None:
    (root / "latest").write_bytes(latest)
    before = sorted(os.listdir(root))
    assert "; repair or remove that file first" in ckpttool("prune", root, "--keep-last", 1).error
    assert "note: latest " in ckpttool("ls", root).stdout
    assert sorted(os.listdir(root)) == before


def test_a_latest_that_is_no_name_makes_one_clear_line(root: Path, s3: Bucket) -> None:
    (root / "latest").write_text("deep/" * 19_999 + "level")
    for path in sorted(root.rglob("*")):
        if path.is_file():
            s3.put(f"run/{path.relative_to(root)}", path.read_bytes())
    for where in (root, s3.url("run")):
        done = ckpttool("ls", where)
        assert (done.code, done.stderr) == (0, "")
        assert "note: latest has 100,000 characters, too many for the name of a checkpoint" in done.stdout.splitlines()
        assert f"{where}/latest: does not name a tag" in ckpttool("inspect", where).error
        assert "latest has 100,000 characters" in ckpttool("prune", where, "--keep-last", 1).error


def test_a_trainers_checkpoints_go_whole_and_runs_do_not(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-20", "runA"):
        shutil.copytree(source("zero2-dp2-bf16-trainer"), tmp_path / name)
    for name in ("trainer_state.json",):
        (tmp_path / "runA" / name).unlink()
    two = tmp_path / "checkpoint-5"  # by its name a trainer's, but it holds two
    shutil.copytree(tmp_path / "checkpoint-3", two)
    shutil.copytree(two / "global_step3", two / "global_step4")
    assert {d.entry.name: d.keep for d in api.prune(tmp_path, keep_last=1)} == {
        "checkpoint-3": False, "checkpoint-5": True, "checkpoint-20": True, "runA": True,
    }  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-20", "checkpoint-5", "runA"]


def test_leftovers_of_a_killed_prune_are_removed_by_the_next(root: Path) -> None:
    os.rename(root / "global_step9", root / aside_name("global_step9"))
    (entry,) = (e for e in api.ls(root).entries if e.name.startswith("."))
    assert (entry.whole, entry.problem) == (False, "half removed by a run that was killed")
    decisions = {d.entry.name: d.keep for d in api.prune(root, keep_last=2)}
    assert decisions == {
        aside_name("global_step9"): False, "global_step10": True, "global_step20": True, "global_step100": True,
    }  # fmt: skip
    assert not (root / aside_name("global_step9")).exists()


def test_links_that_lead_back_are_followed_once(root: Path) -> None:
    (root / "global_step9" / "loop").symlink_to(".")
    held = sum(p.stat().st_size for p in (root / "global_step9").iterdir() if p.is_file())
    assert next(e.nbytes for e in api.ls(root).entries if e.name == "global_step9") == held


def test_without_a_rule_nothing_is_removed(root: Path) -> None:
    before = sorted(os.listdir(root))
    assert ckpttool("prune", root).code == 2
    assert ckpttool("prune", root, "--keep-best", "loss:most").code == 2
    assert "these have numbers: epoch, nested.tokens" in ckpttool("prune", root, "--keep-best", "loss").error
    assert sorted(os.listdir(root)) == before


def test_a_failed_removal_is_an_error_that_names_the_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    found = ckpttool("prune", root, "--keep-last", 1)
    assert found.code == 3
    assert f"{root}/global_step9: cannot be removed: permission denied" in found.stderr
    assert "kept  52.7 kB  cannot be removed" in found.stdout


def _entry(step: int, **changes: object) -> CatalogEntry:
    values = {
        "name": f"global_step{step}", "path": f"run/global_step{step}", "format": "zero", "stage": 2, "world_size": 2,
        "step": step, "nbytes": 10, "modified": None, "whole": True, "problem": None, "latest": False, "link": None,
        "metrics": {"loss": 1 / step, "acc": 1 / step}, "of_run": True,
    }  # fmt: skip
    return CatalogEntry(**{**values, **changes})  # type: ignore[arg-type]


def _kept(entries: list[CatalogEntry], **rules: object) -> list[int | None]:
    decisions = decide(entries, Rules(**rules), root="run")  # type: ignore[arg-type]
    assert [d.entry for d in decisions] == sorted(entries, key=lambda e: e.order)
    assert all(d.reason for d in decisions)
    return [d.entry.step for d in decisions if d.keep]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"last": 1}, [1000]),
        ({"last": 2}, [900, 1000]),
        ({"last": 99}, [90, 100, 500, 900, 1000]),
        ({"every": 500}, [500, 1000]),
        ({"every": 7}, [1000]),
        ({"best": "acc:max"}, [90, 1000]),
        ({"best": "loss"}, [1000]),
        ({"last": 2, "every": 500, "best": "acc:max"}, [90, 500, 900, 1000]),
    ],
)
def test_rules_keep_by_number_not_by_alphabet(rules: dict[str, object], kept: list[int]) -> None:
    entries = [_entry(step) for step in (1000, 90, 900, 100, 500)]
    assert _kept(entries, **rules) == kept


def test_checkpoints_that_always_stay() -> None:
    entries = [_entry(1), _entry(2, latest=True), _entry(3), _entry(4, whole=False, problem="is missing")]
    entries.append(_entry(5, format="universal", stage=None, of_run=False))
    assert _kept(entries, last=1) == [2, 3, 4, 5]


def test_the_best_is_of_those_that_have_the_number() -> None:
    entries = [_entry(1, metrics={}), _entry(2, metrics={"loss": float("nan")}), _entry(3, metrics={"loss": 0.5})]
    entries += [_entry(4, metrics={"loss": 0.5}), _entry(5, metrics={"loss": 0.7}), _entry(6, metrics={})]
    assert _kept(entries, best="loss") == [4, 6]
    with refused(PlanError):
        _kept(entries, best="accuracy")
    with pytest.raises(ArgumentError, match="is missing, and so is any other rule"):
        Rules()


# ------------------------------------------------------------------------------------------------- cp


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_copy_is_the_same_files_and_is_read_as_the_same(name: str, tmp_path: Path) -> None:
    report = api.cp(source(name), tmp_path / "copy", prove=True)
    found = api.inspect(source(name))
    assert (report.tag, report.latest) == (found.tag, True)
    ours = {p.relative_to(report.written.out): p.read_bytes() for p in _files(tmp_path / "copy" / found.tag)}
    theirs = {p.relative_to(found.location): p.read_bytes() for p in _files(found.location)}
    assert ours == theirs
    assert api.diff(source(name), tmp_path / "copy").equal


def _files(directory: str | Path) -> list[Path]:
    from pathlib import Path

    return [p for p in Path(directory).rglob("*") if p.is_file()]


def test_latest_names_the_newest_copy(root: Path, tmp_path: Path) -> None:
    for tag, named in (("global_step10", "global_step10"), ("global_step20", "global_step20"), ("global_step9", "")):
        report = api.cp(root, tmp_path / "copies", tag=tag)
        assert report.latest == bool(named)
    assert (tmp_path / "copies" / "latest").read_text() == "global_step20"
    assert [e.name for e in api.ls(tmp_path / "copies").entries] == ["global_step9", "global_step10", "global_step20"]


def test_only_sidecar_files_of_a_trainer_are_copied(tmp_path: Path) -> None:
    src = tmp_path / "checkpoint-3"
    shutil.copytree(source("zero2-dp2-bf16-trainer"), src)
    for name in (".netrc", "id_rsa", "notes.txt"):
        (src / name).write_text("secret")
    done = ckpttool("cp", src, tmp_path / "copy")
    beside = {p.name for p in (tmp_path / "copy").iterdir() if p.is_file()}
    assert {"latest", "trainer_state.json", "scheduler.pt", "config.json"} <= beside
    assert not {".netrc", "id_rsa", "notes.txt"} & beside
    assert "note: not copied: other files in the checkpoint's root (" in done.stdout
    assert "id_rsa" in done.stdout


def test_a_trainers_checkpoints_are_not_mixed_in_one_root(tmp_path: Path) -> None:
    for step in (3, 10):
        shutil.copytree(source("zero2-dp2-bf16-trainer"), tmp_path / f"checkpoint-{step}")
    os.rename(tmp_path / "checkpoint-10" / "global_step3", tmp_path / "checkpoint-10" / "global_step10")
    (tmp_path / "checkpoint-10" / "latest").write_text("global_step10")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{}")
    assert ckpttool("cp", tmp_path / "checkpoint-3", tmp_path / "copy").code == 0
    before = sorted(os.listdir(tmp_path / "copy"))
    error = ckpttool("cp", tmp_path / "checkpoint-10", tmp_path / "copy").error
    assert f"{tmp_path}/copy/trainer_state.json: differs from the file of that name in " in error
    assert sorted(os.listdir(tmp_path / "copy")) == before


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_latest_names_the_newest_of_copies_made_at_once(
    place: str, root: Path, tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cp commits a newer checkpoint, and writes ``latest``, after this one has looked at it."""
    out = str(tmp_path / "copy") if place == "disk" else s3.url("copy")
    assert api.cp(root, out, tag="global_step9").latest
    looked = copy_plan.is_newest
    copied: list[str] = []

    def late(*arguments: Any) -> bool:
        found = looked(*arguments)
        if not copied:
            copied.append("global_step20")
            assert api.cp(root, out, tag="global_step20").latest
        return found

    monkeypatch.setattr(copy_plan, "is_newest", late)
    assert not api.cp(root, out, tag="global_step10").latest
    assert open_storage(out, {}).read_text(f"{out}/latest") == "global_step20"


def test_a_copy_that_lacked_only_latest_is_finished(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "global_step20", tmp_path / "copy" / "global_step20")
    report = api.cp(root, tmp_path / "copy")
    assert (report.latest, report.written.there, report.notes) == (True, True, ())
    assert (tmp_path / "copy" / "latest").read_text() == "global_step20"


def test_a_dangling_latest_is_rewritten(root: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "latest").write_text("global_step999")
    assert api.cp(root, tmp_path / "copy").latest


def test_torn_checkpoints_are_not_copied(root: Path, tmp_path: Path) -> None:
    assert f"{HALF}: is missing" in ckpttool("cp", root, tmp_path / "copy", "--tag", "global_step100").error
    assert not (tmp_path / "copy").exists()


def test_a_copy_over_what_is_there_is_refused(root: Path, tmp_path: Path) -> None:
    assert ckpttool("cp", root, tmp_path / "copy").code == 0
    other = tmp_path / "copy" / "global_step20" / HALF
    data = other.read_bytes()
    at = int(api.inspect(root).parameters[0].states["exp_avg"].extents["offset"][-1])
    for changed in (data + b"x", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
        other.write_bytes(changed)
        assert ckpttool("cp", root, tmp_path / "copy").code == 3
        assert other.read_bytes() == changed
    assert ckpttool("cp", root, root).code == 3
    assert (root / "global_step20" / HALF).exists()


def test_a_copy_into_a_checkpoint_is_refused(root: Path, tmp_path: Path, s3: Bucket) -> None:
    api.consolidate(root, tmp_path / "model", to="safetensors")
    api.cp(root, s3.url("run"))
    shutil.copytree(root, tmp_path / "other")
    places = [
        (root, root / "global_step20"),
        (root, root / "global_step20" / "copies"),
        (root, tmp_path / "other" / "global_step20"),
        (tmp_path / "model", tmp_path / "model" / "copy"),
        (s3.url("run"), s3.url("run/global_step20")),
        (s3.url("run"), s3.url("run/global_step20/copies")),
        (root, s3.url("run/global_step20")),
    ]
    before = remains(tmp_path), s3.keys()
    for src, dst in places:
        error = ckpttool("cp", src, dst).error
        assert error.startswith(f"Error: {dst}: "), error
        assert error.endswith("; pass another root"), error
    assert (remains(tmp_path), s3.keys()) == before


def test_a_half_written_directory_is_refused_here_too(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "global_step20", tmp_path / "out.partial" / "global_step20")
    (tmp_path / "out.partial" / MARK).write_text("")
    for name in ("inspect", "verify"):
        done = ckpttool(name, tmp_path / "out.partial")
        assert done.code == (1 if name == "verify" else 3)
        assert "left half-written by a killed run" in done.stdout + done.stderr


def test_a_directory_of_roots_says_what_is_not_listed_and_why_a_row_has_no_format(tmp_path: Path) -> None:
    for name in ("zero2-dp2-bf16", "zero2-dp2-bf16-trainer", "ds0.3.16-zero3-dp2-fp16"):
        shutil.copytree(HERE / "checkpoints" / name, tmp_path / name)
    (tmp_path / "logs").mkdir()
    lines = ckpttool("ls", tmp_path, "--wide").stdout.splitlines()
    assert len(lines) == 4
    (unread,) = (line for line in lines if line.startswith("ds0.3.16"))
    assert "a root of its own, with a checkpoint; lists its parameters without their groups" in unread
    assert lines[-1].startswith("note: not listed: zero2-dp2-bf16-trainer, with checkpoints of their own")


def test_a_folder_of_the_trainer_with_a_checkpoint_that_was_moved_aside_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(source("zero2-dp2-bf16-trainer"), folder)
    shutil.copytree(folder / "global_step3", folder / "global_step3.damaged")
    next((folder / "global_step3.damaged").glob("*optim_states.pt")).unlink()
    mark_damaged(LOCAL, str(folder / "global_step3.damaged"), "a file is missing", for_good=True)
    (entry,) = api.ls(tmp_path).entries
    assert (entry.whole, entry.problem) == (True, None)
    assert api.inspect(tmp_path).step == 3
