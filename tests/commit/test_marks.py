"""Markers of outputs: a manifest that is still being copied commits nothing, and no upkeep removes what lies beside."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain
from ckpttool.commit import is_commit
from ckpttool.errors import CkptError
from ckpttool.formats.scan import commits, scan
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, MARK
from tests.cli.command import staging_of
from tests.faults.disks import watching
from tests.faults.rules import Before, Rule
from tests.faults.s3_faults import ACCESS_DENIED
from tests.faults.s3_proxy import Proxy
from tests.saving.checkpoints import save_version
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_version(LOCAL, str(tmp_path / "run"), Alone(), "step1", 0)
    return tmp_path / "run"


@pytest.mark.linux
def test_the_manifest_of_a_killed_copy_on_disk_commits_nothing(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException), watching(Rule(Before(lambda _: os._exit(9)), "rename")):
            ckpttool.cp(run, copy)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = staging_of(copy / "step1")
    assert {MANIFEST, MARK} <= set(os.listdir(left))
    assert commits(scan(LOCAL, str(copy))) == []
    with refused(CkptError):
        ckpttool.inspect(left)
    ckpttool.cp(run, copy, prove=True)
    assert [one.path for one in commits(scan(LOCAL, str(copy)))] == [str(copy / "step1")]


def test_the_manifest_of_a_killed_copy_in_a_bucket_commits_nothing(
    run: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(ACCESS_DENIED, "delete_object", times=None)
        with refused(CkptError):
            ckpttool.cp(run, s3.url("copy"), prove=True)
        proxy.clear()
        assert {f"copy/step1/{name}" for name in (MANIFEST, MARK)} <= set(s3.keys())
        with refused(CkptError):
            ckpttool.inspect(s3.url("copy/step1"))
        assert [entry.whole for entry in ckpttool.ls(s3.url("copy")).entries] == [False]
        ckpttool.cp(run, s3.url("copy"), prove=True)
        assert [entry.whole for entry in ckpttool.ls(s3.url("copy")).entries] == [True]


@pytest.mark.parametrize("manifest", [True, False])
def test_upkeep_leaves_a_checkpoint_into_which_a_command_was_writing(manifest: bool, run: Path) -> None:
    """Weights beside the shards: the command was killed, and its marker says nothing about the checkpoint."""
    directory = run / "step1"
    if not manifest:
        (directory / MANIFEST).unlink()
    (directory / MARK).write_text('{"key": "", "files": ["model.safetensors"], "over": []}')
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    maintain(LOCAL, str(run), None, grace=0)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert is_commit(LOCAL, str(directory)) == manifest


def test_a_directory_that_is_being_saved_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (run / "step1" / MARK).write_text('{"key": "save 1", "files": [], "machine": "x"}')
    with refused(CkptError):
        ckpttool.consolidate(source("zero2-dp2-bf16"), run / "step1", to="safetensors", overwrite=True)
