"""A checkpoint with another run below it is not removed: the other run would go with it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.retention import Rules
from ckpttool.errors import StorageError
from ckpttool.formats.nested import others_below
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MARK, open_storage
from tests.saving.checkpoints import save_version, version, whole
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.storage import WritableStorage
    from tests.storage.server import Bucket


def _write(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name, data in version(0).items():
        (directory / name).write_bytes(data)


def _save(root: Path, tag: str, number: int, **options: Any) -> None:
    save_version(LOCAL, str(root), Alone(), tag, number, **options)


@pytest.mark.parametrize("below", ["sft", "finetune/checkpoint-60", "finetune/checkpoint-60/global_step60"])
@pytest.mark.parametrize("how", ["prune", "maintain", "rotate"])
def test_a_run_below_a_checkpoint_is_kept_with_it(how: str, below: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        tag = f"checkpoint-{number}/global_step{number}" if how == "rotate" else f"step{number}"
        _save(tmp_path / f"checkpoint-{number}" if how == "rotate" else tmp_path, tag.rpartition("/")[2], number)
    first, second = (tmp_path / (f"checkpoint-{n}" if how == "rotate" else f"step{n}") for n in (1, 2))
    _write(first / below)
    if how == "prune":
        (shown, *_) = ckpttool.prune(tmp_path, keep_last=1, dry_run=True)
        (decision, *_) = ckpttool.prune(tmp_path, keep_last=1)
        assert shown.reason == decision.reason == f"contains checkpoints: {below}"
    elif how == "maintain":
        maintain(LOCAL, str(tmp_path), Rules(last=1), grace=0)
    else:
        rotate(LOCAL, str(tmp_path), 1, keep=(), grace=0)
    assert {p.name for p in (first / below).iterdir()} == set(version(0))
    assert not second.exists()


RUNS = {
    "DCP": (["sft/.metadata", "sft/__0_0.distcp"], True),
    "torn DCP": (["sft/__0_0.distcp"], True),
    "steps of DCP": (["sft/checkpoint-60/pytorch_model_fsdp_0/.metadata"], True),
    "a step of torchtitan": (["run/step-60/.metadata"], True),
    "verl": (["run/global_step_6/actor/model_world_size_2_rank_0.pt"], True),
    "steps of weights": (["sft/checkpoint-60/model.safetensors"], True),
    "steps of pickled weights": (["sft/epoch=3/pytorch_model-00001-of-00002.bin"], True),
    "an adapter": (["critic/adapter_model.safetensors"], False),
    "a part of a model": (["unet/diffusion_pytorch_model.safetensors"], False),
    "other files": (["logs/events", "sft/checkpoint-60/notes"], False),
}
"""Files below a trainer's folder, and whether they are another checkpoint."""


@pytest.mark.parametrize("where", ["disk", "s3"])
@pytest.mark.parametrize("kind", RUNS)
def test_runs_of_every_format_are_kept(kind: str, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    names, kept = RUNS[kind]
    for number in (1, 2):
        _save(tmp_path / f"checkpoint-{number}", f"step{number}", number)
    for name in names:
        path = tmp_path / "checkpoint-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    storage, root = _at(where, tmp_path, request)
    rotate(storage, root, 1, keep=(), grace=0)
    storage.refresh([])
    assert storage.is_dir(f"{root}/checkpoint-1") == kept
    assert all(storage.exists(f"{root}/checkpoint-1/{name}") == kept for name in names)
    assert not kept or storage.is_dir(f"{root}/checkpoint-1/step1")


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_weights_below_a_tag_are_kept(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for number in (1, 2):
        _save(tmp_path, f"step{number}", number)
    (tmp_path / "step1" / "hf").mkdir()
    (tmp_path / "step1" / "hf" / "model.safetensors").write_bytes(b"mine")
    storage, root = _at(where, tmp_path, request)
    assert ckpttool.prune(root, keep_last=1)[0].reason == "contains checkpoints: hf"
    maintain(storage, root, Rules(last=1), grace=0)
    with refused(StorageError):
        save_version(storage, root, Alone(), "step1", 3, overwrite=True)
    storage.refresh([])
    assert storage.exists(f"{root}/step1/hf/model.safetensors")


def _at(where: str, directory: Path, request: pytest.FixtureRequest) -> tuple[WritableStorage, str]:
    """Return the storage and the path of a directory, in a bucket after a copy."""
    if where == "disk":
        return LOCAL, str(directory)
    bucket: Bucket = request.getfixturevalue(where)
    bucket.upload(directory, "root")
    return open_storage(bucket.url("root")), bucket.url("root")


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_save_does_not_replace_what_is_pinned(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for number in (1, 2):
        _save(tmp_path, f"step{number}", number)
    storage, root = _at(where, tmp_path, request)
    ckpttool.pin(f"{root}/step1", why="the paper")
    storage.refresh([])
    with pytest.raises(StorageError, match=r"step1: is pinned by .*: the paper; unpin it"):
        save_version(storage, root, Alone(), "step1", 3, overwrite=True)
    assert whole(root, storage)["step1"] == version(1)


@pytest.mark.parametrize("killed", [False, True])
def test_a_save_does_not_replace_a_checkpoint_above_a_run(killed: bool, tmp_path: Path) -> None:
    _save(tmp_path, "step1", 1)
    if killed:
        (tmp_path / "step1" / "ckpttool.json").unlink()
        (tmp_path / "step1" / MARK).write_text("{}")
    _write(tmp_path / "step1" / "a" / "b" / "step60")
    with refused(StorageError):
        _save(tmp_path, "step1", 2, overwrite=True)
    assert {p.name for p in (tmp_path / "step1/a/b/step60").iterdir()} == set(version(0))


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero2-dp2-bf16-trainer"])
def test_own_directories_are_no_other_checkpoints(name: str, tmp_path: Path) -> None:
    shutil.copytree(source(name), tmp_path / "root")
    assert others_below(LOCAL, str(tmp_path / "root")) == []
    next((tmp_path / "root").rglob("*optim_states.pt")).unlink()
    assert others_below(LOCAL, str(tmp_path / "root")) == []
