"""Checkpoints of several models in one root: nothing that belongs to one of them is lost for the other."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain
from ckpttool.catalog.listing import CatalogEntry
from ckpttool.catalog.restore_order import newest
from ckpttool.catalog.retention import Rules, decide
from ckpttool.commit.manifest import read_manifest
from ckpttool.errors import LayoutError
from ckpttool.formats.locate import SeveralModelsError
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LATEST, LOCAL, MANIFEST, open_storage
from tests.catalog.drawn_roots import MODELS, commit
from tests.saving.checkpoints import save_version
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.storage.server import Bucket

    Put = Callable[[dict[str, str], str], str]

OF_SAVE = {"pytorch_model": "zero2-dp2-bf16", "pytorch_model_1": "zero2-dp2-bf16-sgd"}
GAN = {
    "gen_step1": "zero2-dp2-bf16", "gen_step2": "zero2-dp2-bf16", "gen_step3": "zero2-dp2-bf16",
    "disc_step1": "zero3-dp2-bf16-trainer", "disc_step2": "zero3-dp2-bf16-trainer",
}  # fmt: skip


def _make(root: Path, tags: dict[str, str], latest: str) -> None:
    for tag, name in tags.items():
        shutil.copytree(Path(source(name)) / "global_step3", root / tag)
    (root / LATEST).write_text(latest)


@pytest.fixture(params=["disk", "s3"])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Put:
    """Make a root with tags, copied from fixtures; return its path or URL."""

    def make(tags: dict[str, str], latest: str) -> str:
        _make(tmp_path / "root", tags, latest)
        if request.param == "disk":
            return str(tmp_path / "root")
        bucket: Bucket = request.getfixturevalue("s3")
        bucket.upload(tmp_path / "root", "root")
        return bucket.url("root")

    return make


def _left(root: str) -> set[str]:
    storage = open_storage(root)
    return {entry.name for entry in storage.listing(root) if entry.is_dir}


def test_the_models_of_a_save_are_kept_together(put: Put) -> None:
    root = put(OF_SAVE, "pytorch_model_1")
    decisions = ckpttool.prune(root, keep_last=1)
    assert decisions[0].reason == "the newest whole one of its model"
    assert _left(root) == {*OF_SAVE}


def test_a_torn_model_of_a_save_is_kept_with_the_others(tmp_path: Path) -> None:
    _make(tmp_path, OF_SAVE, "pytorch_model_1")
    next((tmp_path / "pytorch_model").glob("*optim_states.pt")).unlink()
    ckpttool.prune(tmp_path, torn=True, grace=0)
    assert _left(str(tmp_path)) == {*OF_SAVE}


def test_commands_ask_for_one_of_the_models_of_a_save(put: Put, tmp_path: Path) -> None:
    root = put(OF_SAVE, "pytorch_model_1")
    commands: list[Callable[[], object]] = [
        lambda: ckpttool.inspect(root),
        lambda: ckpttool.cp(root, tmp_path / "copy"),
        lambda: ckpttool.consolidate(root, tmp_path / "weights", to="safetensors"),
        lambda: ckpttool.convert(root, tmp_path / "universal", to="universal"),
        lambda: newest(open_storage(root), root),
    ]
    for command in commands:
        with refused(LayoutError):
            command()
    for tag in OF_SAVE:
        ckpttool.cp(root, tmp_path / "copy", tag=tag)
    assert _left(str(tmp_path / "copy")) == {*OF_SAVE}


def test_a_folder_with_the_models_of_a_save_is_one_checkpoint(tmp_path: Path) -> None:
    for number in (0, 1):
        _make(tmp_path / f"checkpoint_{number}", OF_SAVE, "pytorch_model_1")
    assert [e.whole for e in ckpttool.ls(tmp_path).entries] == [True, True]
    next((tmp_path / "checkpoint_1/pytorch_model").glob("*optim_states.pt")).unlink()
    assert {e.name: e.whole for e in ckpttool.ls(tmp_path).entries} == {"checkpoint_0": True, "checkpoint_1": False}
    ckpttool.prune(tmp_path, keep_last=1)
    assert _left(str(tmp_path)) == {"checkpoint_0", "checkpoint_1"}


def test_the_rules_hold_for_each_series(put: Put) -> None:
    root = put(GAN, "disc_step2")
    decisions = ckpttool.prune(root, keep_last=1)
    assert {d.entry.name for d in decisions if d.keep} == _left(root) == {"gen_step3", "disc_step2"}
    assert {d.entry.series for d in decisions if d.keep} == {e.series for e in ckpttool.ls(root).entries}


@pytest.mark.parametrize("latest", ["disc_step2", "gen_step3"])
def test_a_command_says_that_there_are_other_models(latest: str, put: Put, tmp_path: Path) -> None:
    root = put(GAN, latest)
    other = "gen_step3" if latest == "disc_step2" else "disc_step2"
    said = f"{root} has checkpoints of other models, too: {other}: only {latest}, which latest names, is read"
    assert said in ckpttool.inspect(root).remarks
    assert said in ckpttool.cp(root, tmp_path / "copy").notes
    assert said in ckpttool.consolidate(root, tmp_path / "weights", to="safetensors").notes
    assert said in ckpttool.convert(root, tmp_path / "universal", to="universal").notes
    assert not any("other models" in remark for remark in ckpttool.inspect(root, tag=latest).remarks)


def test_models_with_one_number_are_compared(tmp_path: Path) -> None:
    _make(
        tmp_path,
        {"m0_step2": GAN["gen_step1"], "m1_step2": GAN["disc_step1"], "m1_step1": GAN["disc_step1"]},
        "m0_step2",
    )
    assert any("other models, too: m1_step2: " in remark for remark in ckpttool.inspect(tmp_path).remarks)


def test_a_torn_one_goes_only_if_each_model_has_a_newer_one(tmp_path: Path) -> None:
    _make(tmp_path, {**GAN, "disc_step9": GAN["disc_step1"]}, "gen_step3")
    for path in (tmp_path / "disc_step9").glob("*model_states.pt"):
        path.unlink()
    (tmp_path / "disc_step9" / "a_new_sort.pt").touch()
    assert next(d for d in ckpttool.prune(tmp_path, torn=True, grace=0) if d.entry.name == "disc_step9").keep


def _as_of_model(root: Path, tag: str, model: str) -> None:
    manifest = read_manifest(LOCAL, str(root / tag))
    digests = {"tensors": {"weights": {f"{model}.weight": "BF16 4x4 00"}}}
    (root / tag / MANIFEST).write_bytes(replace(manifest, digests=digests).to_json())


def test_a_rotation_keeps_the_newest_of_each_model(tmp_path: Path) -> None:
    for number, model in enumerate(["actor", "critic", "actor", "critic", "critic"], 1):
        save_version(LOCAL, str(tmp_path), Alone(), f"{model}{number}", number)
        _as_of_model(tmp_path, f"{model}{number}", model)
    maintain(LOCAL, str(tmp_path), Rules(last=1), grace=0)
    assert _left(str(tmp_path)) == {"actor3", "critic5"}


def test_latest_of_another_model_abandons_nothing(tmp_path: Path) -> None:
    for step in (1, 4):
        commit(tmp_path, f"disc_step{step}", step, MODELS["b"])
    _make(tmp_path, {"global_step3": "zero2-dp2-bf16-sgd"}, "global_step3")
    ckpttool.prune(tmp_path, keep_last=1)
    assert _left(str(tmp_path)) == {"disc_step4", "global_step3"}


def test_a_torn_latest_of_an_unknown_model_abandons_nothing(tmp_path: Path) -> None:
    """The names of two models are of one pattern."""
    for tag, step in (("global_step6", 6), ("B_step7", 7), ("global_step8", 8)):
        commit(tmp_path, tag, step, MODELS["b"])
    _make(tmp_path, {"global_step4": "zero2-dp2-bf16-sgd", "global_step7": "zero2-dp2-bf16-sgd"}, "global_step7")
    next((tmp_path / "global_step7").glob("*rank_1*optim_states.pt")).unlink()
    ckpttool.prune(tmp_path, keep_last=1)
    assert _left(str(tmp_path)) >= {"global_step8", "global_step4", "global_step7"}


def test_the_error_has_the_directories(tmp_path: Path) -> None:
    _make(tmp_path, OF_SAVE, "pytorch_model_1")
    with pytest.raises(SeveralModelsError) as caught:
        ckpttool.inspect(tmp_path)
    assert caught.value.directories == [str(tmp_path / tag) for tag in OF_SAVE]
    (tmp_path / LATEST).write_text("another")
    with pytest.raises(LayoutError, match="another"):
        ckpttool.inspect(tmp_path)


def test_models_of_equal_parameters_are_told_apart_by_names_of_one_step(put: Put) -> None:
    model = "zero2-dp2-bf16"
    root = put({f"{name}_step{step}": model for name in ("gen", "disc") for step in (1, 2)}, "disc_step2")
    assert {d.entry.name for d in ckpttool.prune(root, keep_last=1) if d.keep} == {"gen_step2", "disc_step2"}
    assert _left(root) == {"gen_step2", "disc_step2"}


def test_the_last_step_of_plain_saves_is_kept_though_latest_names_an_older_one(tmp_path: Path) -> None:
    """DeepSpeed records nowhere that a run has gone back: somebody may have copied an old ``latest``."""

    def entry(step: int, *, committed: bool) -> CatalogEntry:
        return CatalogEntry(
            name=f"step{step}", path=str(tmp_path / f"step{step}"), format="zero", stage=2, world_size=2, step=step,
            nbytes=1, modified=0.0, whole=True, problem=None, latest=step == 1, link=None, metrics={},
            rank=4 if step == 1 else step, committed=committed, of_run=True,
        )  # fmt: skip

    for committed, kept in ((False, {1, 3}), (True, {1})):
        entries = [entry(step, committed=committed) for step in (1, 2, 3)]
        decisions = decide(entries, Rules(last=1), root=str(tmp_path))
        assert {d.entry.step for d in decisions if d.keep} == kept


@pytest.mark.parametrize("lost", ["pytorch_model_1", "trainer_state.json", "scheduler.pt"])
def test_a_folder_that_lacks_what_an_older_one_has_is_not_the_newest_whole_one(lost: str, tmp_path: Path) -> None:
    prefix = "checkpoint_" if lost == "pytorch_model_1" else "checkpoint-"
    for step in (1, 2, 3):
        if lost == "pytorch_model_1":
            _make(tmp_path / f"{prefix}{step}", OF_SAVE, "pytorch_model")
        else:
            shutil.copytree(Path(source("zero2-dp2-bf16-trainer")), tmp_path / f"{prefix}{step}")
            (tmp_path / f"{prefix}{step}" / lost).write_text("{}")
    whole = {entry.name for entry in ckpttool.ls(tmp_path).entries if entry.whole}
    assert whole == {f"{prefix}{step}" for step in (1, 2, 3)}
    gone = tmp_path / f"{prefix}3" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    last = ckpttool.ls(tmp_path).entries[-1]
    assert last.condition == "not whole"
    assert "it may be cut off" in str(last.problem)
    ckpttool.prune(tmp_path, keep_last=1, torn=True, grace=0)
    assert {path.name for path in tmp_path.iterdir()} == {f"{prefix}2", f"{prefix}3"}


def test_a_torn_one_of_an_unknown_model_is_kept_beside_others(tmp_path: Path) -> None:
    _make(tmp_path, {**{f"gen{step}": "zero2-dp2-bf16" for step in (1, 2)}, "disc1": "zero3-dp2-bf16-trainer"}, "gen2")
    cut = next((tmp_path / "disc1").glob("*optim_states.pt"))
    cut.write_bytes(cut.read_bytes()[:-100])
    ckpttool.prune(tmp_path, keep_last=1, torn=True, grace=0)
    assert (tmp_path / "disc1").is_dir()
    assert not (tmp_path / "gen1").exists()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("scheduler.pt", 100),
        ("scheduler.pt", 1),
        ("rng_state_1.pth", 22),
        ("rng_state_1.pth", 94),
        ("model.safetensors", 1),
    ],
)
def test_a_folder_with_a_file_that_is_cut_off_is_not_the_newest_whole_one(name: str, lost: int, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shutil.copytree(source("zero2-dp2-bf16-trainer"), tmp_path / f"checkpoint-{step}")
    assert all(entry.whole for entry in ckpttool.ls(tmp_path).entries)
    cut = tmp_path / "checkpoint-3" / name
    cut.write_bytes(cut.read_bytes()[:-lost])
    last = ckpttool.ls(tmp_path).entries[-1]
    assert (last.condition, str(last.problem).startswith(f"{name}: is cut off")) == ("torn", True)
    ckpttool.prune(tmp_path, keep_last=1, torn=True, grace=0)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-3"}
