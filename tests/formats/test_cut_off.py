"""A checkpoint without any file of a sort is not called whole, and costs none that still has them."""

from __future__ import annotations

import posixpath
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.errors import CkptError, LayoutError
from ckpttool.storage import open_storage
from tests.cli.command import ckpttool as command
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from tests.storage.server import Bucket

OF_EXPERTS = ["moe-zero0-dp2-ep2-bf16", "moe-zero2-dp2-bf16", "autoep-zero2-dp2-ep2-bf16"]
SAYING = [
    "moe-zero0-dp2-ep2-bf16", "moe-zero0-dp2-ep2-fp32", "pipeline-zero0-pp2-dp2-bf16", "ds0.4.5-zero2-dp2-fp16",
    "ds0.5.8-zero1-dp2-fp16", "ds0.5.8-zero2-dp2-fp16", "ds0.5.10-zero2-dp2-fp16",
]  # fmt: skip
SILENT = ["ds0.3.16-zero2-dp2-fp16", "ds0.3.16-zero2-dp2-fp16-one-group"]


def _root(directory: Path, name: str, sort: str = "*optim_states.pt") -> Path:
    """A root with steps 1 to 3, of which the last lacks the files of one sort."""
    (tag,) = (path for path in Path(source(name)).iterdir() if path.is_dir())
    for step in (1, 2, 3):
        shutil.copytree(tag, directory / f"global_step{step}")
    (directory / "latest").write_text("global_step3")
    for path in (directory / "global_step3").glob(sort):
        path.unlink()
    return directory


@pytest.mark.parametrize("name", SAYING)
def test_a_checkpoint_that_says_it_has_an_optimizer_is_refused_without_one(name: str, tmp_path: Path) -> None:
    root = _root(tmp_path, name)
    for step in (1, 2):
        shutil.rmtree(root / f"global_step{step}")
    with refused(LayoutError):
        ckpttool.inspect(root)
    assert not ckpttool.ls(root).entries[0].whole
    ckpttool.consolidate(root, tmp_path / "weights", to="safetensors", weights_from="module")


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_the_files_of_all_experts_are_missed(name: str, tmp_path: Path) -> None:
    with refused(LayoutError):
        ckpttool.inspect(_root(tmp_path, name, "*expert_*_model_states.pt"))


@pytest.mark.parametrize("name", SILENT + SAYING)
def test_what_has_an_optimizer_is_the_newest_whole_one(name: str, tmp_path: Path) -> None:
    root = _root(tmp_path, name)
    assert [e.whole for e in ckpttool.ls(root).entries] == [True, True, False]
    assert ckpttool.verify(root).findings
    for torn in (False, True):
        ckpttool.prune(root, keep_last=1, torn=torn, grace=0)
        left = {path.name for path in root.iterdir() if path.is_dir()}
        assert left == {"global_step2", "global_step3"}


@pytest.mark.parametrize("name", SILENT)
def test_only_checkpoints_of_the_same_model_show_that_files_lack(name: str, tmp_path: Path) -> None:
    root = _root(tmp_path, name)
    with refused(LayoutError):
        ckpttool.inspect(root)
    for step in (1, 2):
        shutil.rmtree(root / f"global_step{step}")
    shutil.copytree(Path(source("zero2-dp2-bf16-trainer")) / "global_step3", root / "global_step2")
    assert any("no states of an optimizer" in remark for remark in ckpttool.inspect(root).remarks)


@pytest.mark.parametrize("name", SILENT)
def test_the_folders_of_a_trainer_are_asked(name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(Path(source(name)) / "global_step3", tmp_path / f"checkpoint-{step}" / f"global_step{step}")
        (tmp_path / f"checkpoint-{step}" / "latest").write_text(f"global_step{step}")
    for path in (tmp_path / "checkpoint-2").rglob("*optim_states.pt"):
        path.unlink()
    assert [e.whole for e in ckpttool.ls(tmp_path).entries] == [True, False]
    ckpttool.prune(tmp_path, keep_last=1)
    assert (tmp_path / "checkpoint-1").is_dir()
    with pytest.raises(LayoutError, match="but checkpoint-1/global_step1 has"):
        ckpttool.inspect(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("where", ["s3"])
def test_a_bucket_is_asked_alike(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bucket: Bucket = request.getfixturevalue(where)
    root = _root(tmp_path, SILENT[0])
    for path in root.rglob("*"):
        if path.is_file():
            bucket.put(f"run/{path.relative_to(root)}", path.read_bytes())
    url = bucket.url("run")
    assert [e.whole for e in ckpttool.ls(url).entries] == [True, True, False]
    ckpttool.prune(url, keep_last=1)
    storage = open_storage(url)
    left = [storage.is_dir(posixpath.join(url, f"global_step{step}")) for step in (1, 2, 3)]
    assert left == [False, True, True]
    with pytest.raises(CkptError):
        ckpttool.inspect(url)


def test_the_error_of_a_torn_newest_names_the_last_whole_tag(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in range(1, 6):
        shutil.copytree(Path(source("zero2-dp2-bf16"), "global_step3"), root / f"global_step{step}")
    (root / "latest").write_text("global_step5")
    (root / "global_step9").symlink_to("global_step1")
    for step in (4, 5):
        (root / f"global_step{step}" / "mp_rank_00_model_states.pt").unlink()
    for name, *more in (["inspect"], ["verify"], ["consolidate", tmp_path / "out", "--to", "safetensors"]):
        done = command(name, root, *more)
        assert "or choose --tag global_step3, which is whole" in done.stdout + done.stderr
    with pytest.raises(CkptError, match='or choose tag="global_step3", which is whole'):
        ckpttool.inspect(root)
    assert command("inspect", root, "--tag", "global_step3").code == 0
    done = command("inspect", root, "--tag", "global_step4")
    assert "choose another tag" in done.stderr
