"""Find the tag from the path of a source."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.commit.marks import mark_damaged
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.fields import WHOLE
from ckpttool.formats.layouts import Place
from ckpttool.formats.locate import NoCheckpointError
from ckpttool.formats.locate import locate as locate_in
from ckpttool.formats.scan import natural_order
from ckpttool.formats.zero.files import parse_name
from ckpttool.storage import MARK, LocalStorage
from tests.truth import source, tag_directory
from tests.wording import refused

if TYPE_CHECKING:
    from ckpttool.formats.location import Location

STORAGE = LocalStorage()


def locate(storage: LocalStorage, src: str, tag: str | None) -> Location:
    return locate_in(Place(storage, src), tag)


def test_a_root_gives_the_tag_that_latest_names() -> None:
    where = locate(STORAGE, source("zero1-dp1-bf16"), None)
    assert where.tag == "global_step3"
    assert where.directory == tag_directory("zero1-dp1-bf16")


def test_a_trailing_slash_changes_nothing() -> None:
    opened = open_checkpoint(source("zero1-dp1-bf16") + "/")
    assert (opened.root, opened.tag) == (source("zero1-dp1-bf16"), "global_step3")


def test_a_tags_directory_is_taken_as_it_is() -> None:
    where = locate(STORAGE, tag_directory("zero1-dp1-bf16"), None)
    assert (where.tag, where.root) == ("global_step3", source("zero1-dp1-bf16"))


def test_the_current_directory_may_be_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tag_directory("zero1-dp1-bf16"))
    assert locate(STORAGE, ".", None).tag == "global_step3"


def test_a_trainers_checkpoint_is_a_root() -> None:
    assert locate(STORAGE, source("zero3-dp2-bf16-trainer"), None).tag == "global_step3"


def test_a_trainers_output_directory_opens_its_newest_checkpoint(tmp_path: Path) -> None:
    whole = Path(source("zero3-dp2-bf16-trainer"))
    assert locate(STORAGE, str(whole.parent), None).directory == tag_directory("zero3-dp2-bf16-trainer")
    for number in (9, 10, 11, 12):
        shutil.copytree(whole, tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-12" / "latest").unlink()  # killed while it was saved: that is written last
    shutil.rmtree(tmp_path / "checkpoint-11" / "global_step3")
    assert locate(STORAGE, str(tmp_path), None).root == str(tmp_path / "checkpoint-10")
    assert open_checkpoint(str(tmp_path), tag="checkpoint-9").root == str(tmp_path / "checkpoint-9")
    with refused(CkptError):
        open_checkpoint(str(tmp_path), tag="checkpoint-8")
    run = tmp_path / "ray"
    for number in (1, 2):
        shutil.copytree(whole, run / f"ckpttool_{number:08}_000001_0badcafe")
    assert open_checkpoint(str(run), tag="ckpttool_00000001_000001_0badcafe").root.endswith("1_000001_0badcafe")


def test_a_trainers_output_directory_without_a_whole_one_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    with refused(CkptError):
        locate(STORAGE, str(tmp_path), None)


def test_a_directory_of_runs_names_those_with_a_checkpoint(tmp_path: Path) -> None:
    for name in ("run10", "run2"):
        shutil.copytree(source("zero2-dp2-bf16"), tmp_path / name)
    (tmp_path / "logs").mkdir()
    with refused(CkptError):
        ckpttool.inspect(tmp_path)


@pytest.mark.parametrize("kind", ["*_optim_states.pt", "*_model_states.pt"])
def test_a_single_file_is_distinguished_from_its_folder(kind: str) -> None:
    path = next(Path(tag_directory("zero3-dp2-bf16")).glob(kind))
    with refused(CkptError):
        locate(STORAGE, str(path), None)


@pytest.mark.parametrize("content", ["\ufeffglobal_step3", "global_step3/", "./global_step3", "./global_step3/\r\n"])
def test_latest_is_read_like_deepspeed_reads_it(tmp_path: Path, content: str) -> None:
    shutil.copytree(tag_directory("zero1-dp1-bf16"), tmp_path / "global_step3")
    (tmp_path / "latest").write_bytes(content.encode())
    where = locate(STORAGE, str(tmp_path), None)
    assert (where.tag, where.directory) == ("global_step3", str(tmp_path / "global_step3"))


def test_a_tag_can_be_chosen(tmp_path: Path) -> None:
    for tag in ("global_step9", "global_step10"):
        shutil.copytree(tag_directory("zero1-dp1-bf16"), tmp_path / tag)
    (tmp_path / "latest").write_text("global_step10\n")
    assert locate(STORAGE, str(tmp_path), None).tag == "global_step10"
    assert locate(STORAGE, str(tmp_path), "global_step9").tag == "global_step9"
    with refused(CkptError):
        locate(STORAGE, str(tmp_path), "../x")
    (tmp_path / "latest").unlink()
    with refused(CkptError):
        locate(STORAGE, str(tmp_path), None)


@pytest.mark.parametrize("content", ["", "gone", "../global_step3", "..", "/", "a\x1b[31m", "x" * 5000])
def test_a_latest_that_names_nothing_sensible_is_refused(tmp_path: Path, content: str) -> None:
    shutil.copytree(tag_directory("zero1-dp1-bf16"), tmp_path / "global_step3")
    (tmp_path / "latest").write_text(content)
    with refused(CkptError):
        locate(STORAGE, str(tmp_path), None)


def test_numbers_in_names_are_ordered_as_numbers() -> None:
    names = ["global_step10", "global_step9", "a", "global_step9b", "global_step100", "2", "10"]
    ordered = ["2", "10", "a", "global_step9", "global_step9b", "global_step10", "global_step100"]
    assert sorted(names, key=natural_order) == ordered


@pytest.mark.parametrize(
    ("name", "kind", "data_rank", "model_rank"),
    [
        ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "optimizer", 3, 0),
        ("zero_pp_rank_12_mp_rank_01_optim_states.pt", "optimizer", 12, 1),
        ("zero_pp_rank_0_mp_rank_00optim_states.pt", "optimizer", 0, 0),
        ("zero_pp_rank_1023_mp_rank_100_model_states.pt", "model", 1023, 100),
        ("mp_rank_00_model_states.pt", "model", None, 0),
        ("layer_03-model_01-model_states.pt", "layer", None, 1),
        ("layer_03-model_states.pt", "layer", None, 0),
        ("layer_0_expert_7_mp_rank_00_model_states.pt", "expert", None, 0),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "expert optimizer", None, 0),
    ],
)
def test_file_names_are_understood(name: str, kind: str, data_rank: int | None, model_rank: int) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.kind, parsed.data_rank, parsed.model_rank) == (kind, data_rank, model_rank)


@pytest.mark.parametrize(
    "name", ["latest", "mp_rank_00_model_states.pt.tmp", "x_mp_rank_00_model_states.pt", "rng_state_0.pth"]
)
def test_other_files_are_not_taken_for_checkpoint_files(name: str) -> None:
    assert parse_name(name) is None


def test_a_tag_may_have_parts(tmp_path: Path) -> None:
    """DeepSpeed takes any text for a tag."""
    shutil.copytree(tag_directory("zero1-dp1-bf16"), tmp_path / "epoch1" / "step5")
    (tmp_path / "latest").write_text("epoch1/step5")
    assert locate(STORAGE, str(tmp_path), None).directory == str(tmp_path / "epoch1" / "step5")
    assert locate(STORAGE, str(tmp_path), "epoch1/step5").tag == "epoch1/step5"


def test_the_root_of_the_current_directory_is_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tag_directory("zero3-dp2-bf16-trainer"))
    assert locate(STORAGE, ".", None).root == source("zero3-dp2-bf16-trainer")


def test_a_hint_names_no_unfinished_and_no_damaged_tag(tmp_path: Path) -> None:
    for name in ("step3", "step6", "step9", "step9.damaged"):
        shutil.copytree(tag_directory("zero2-dp2-bf16"), tmp_path / name)
    (tmp_path / "step9" / MARK).write_text("{}")
    mark_damaged(LocalStorage(), str(tmp_path / "step9.damaged"), "torn", for_good=True)
    with pytest.raises(LayoutError) as caught:
        ckpttool.inspect(tmp_path)
    assert caught.value.hint == "choose one with tag: step3, step6 (newest whole one: step6)"


def test_a_trainers_output_directory_passes_over_what_is_torn(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        shutil.copytree(source("zero2-dp2-bf16-trainer"), tmp_path / f"checkpoint-{number}")
    next((tmp_path / "checkpoint-10").rglob("*rank_1*optim_states.pt")).unlink()
    (tmp_path / "checkpoint-9" / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    found = ckpttool.inspect(tmp_path)
    assert found.root == str(tmp_path / "checkpoint-8")
    assert [e.whole for e in ckpttool.ls(tmp_path).entries] == [True, False, False]
    remarks = [r for r in found.remarks if "the newest complete checkpoint was opened instead" in r]
    assert ["checkpoint-10" in remarks[0], "checkpoint-9" in remarks[1], len(remarks)] == [True, True, 2]
    next((tmp_path / "checkpoint-8").rglob("*rank_1*optim_states.pt")).unlink()
    with refused(CkptError) as caught:
        ckpttool.inspect(tmp_path)
    assert "checkpoint-10" in caught.value.path  # none is whole: the newest is told of


FOREIGN = {
    "verl's run": (
        ["global_step_9/data.pt", "global_step_10/data.pt"],
        "a run of verl",
        "pass {}/global_step_10",
    ),
    "verl's optimizer": (["optim_world_size_2_rank_0.pt"], "the optimizer's files of verl without its model", WHOLE),
    "Accelerate, whole": (
        ["pytorch_model_fsdp.bin", "optimizer.bin"], "the weights of FSDP", "pass {}/pytorch_model_fsdp.bin",
    ),
    "torchtitan": (["step-9/a", "step-10/a"], "a run of torchtitan", "pass {}/step-10"),
    "Megatron": (["mp_rank_00_001/a.pt", "mp_rank_00_000/a.pt"], "ranks of Megatron", WHOLE),
    "Megatron's run": (
        ["latest_checkpointed_iteration.txt", "iter_0000005/.metadata"], "a run of Megatron", "pass {}/iter_0000005",
    ),
    "dcp.save, killed": (
        ["__0_0.distcp", "__1_0.distcp"],
        "shards of a distributed checkpoint without .metadata",
        "torch writes that file last: the save was interrupted; use another checkpoint",
    ),
    "Orbax": (
        ["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "d/0"],
        "a checkpoint of Orbax",
        "restore it with orbax-checkpoint, and save the weights as safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_the_layout_of_another_framework_is_named(name: str, tmp_path: Path) -> None:
    files, what, hint = FOREIGN[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(NoCheckpointError, match=f"contains .*{what}.*, which ckpttool does not read") as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.hint == hint.format(tmp_path)


def test_megatron_core_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"x")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with refused(LayoutError) as caught:
        open_checkpoint(str(tmp_path))
    assert "Megatron-LM" in caught.value.hint
