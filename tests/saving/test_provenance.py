"""What a save records about its run: the revision of the code, and the command line without secrets."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckpttool.commit.manifest import Manifest, parse_manifest
from ckpttool.commit.provenance import parse_provenance
from ckpttool.saving.coordination import Alone
from ckpttool.saving.provenance import GitState, masked, run_provenance
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL
from tests.cli.command import ckpttool
from tests.saving.checkpoints import part, version

if TYPE_CHECKING:
    from pathlib import Path


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_revision_and_changes_are_those_that_git_tells(tmp_path: Path) -> None:
    assert GitState(str(tmp_path)).fields(20) == {}
    assert GitState(str(tmp_path / "nowhere")).fields(20) == {}
    _git(tmp_path, "init", "--quiet")
    assert GitState(str(tmp_path)).fields(20) == {}  # without a commit
    (tmp_path / "train.py").write_text("1")
    _git(tmp_path, "add", "train.py")
    _git(tmp_path, "commit", "--quiet", "-m", "one")
    revision = _git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("untracked")
    assert GitState(str(tmp_path)).fields(20) == {"git_revision": revision, "git_dirty": False}
    (tmp_path / "train.py").write_text("2")
    (tmp_path / "src").mkdir()
    assert GitState(str(tmp_path / "src")).fields(20) == {"git_revision": revision, "git_dirty": True}


def test_without_git_or_its_answer_a_save_records_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("ckpttool.saving.provenance.GIT_SECONDS", 0.2)
    assert GitState(str(tmp_path)).fields(0.0) == {}
    assert GitState(str(tmp_path)).fields(20) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert GitState(str(tmp_path)).fields(20) == {}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["train.py", "--token=abc", "--lr", "0.1"], ["train.py", "--token=...", "--lr", "0.1"]),
        (["--token", "abc", "x"], ["--token", "...", "x"]),
        (["--hf-token", "abc"], ["--hf-token", "..."]),
        (["--hub_token=abc"], ["--hub_token=..."]),
        (["--password", "-x"], ["--password", "-x"]),
        (["--wandb-api-key", "abc"], ["--wandb-api-key", "..."]),
        (["+wandb.apiKey=abc", "db.password=x"], ["+wandb.apiKey=...", "db.password=..."]),
        (["--secret", "s", "--auth=x", "AWS_SECRET_ACCESS_KEY=abc"], ["--secret", "...", "--auth=...",
            "AWS_SECRET_ACCESS_KEY=..."]),
        (["--data", "https://u:p@host/x?sig=abc"], ["--data", "https://host/x?..."]),
        (["hf_abcdefghijklmnopqrstuvwx"], ["..."]),
        (["ghp_abcdefghijklmnopqrstuvwxyz0123456789", "AKIAABCDEFGHIJKLMNOP"], ["...", "..."]),
        (["--tokenizer", "gpt2", "--max-tokens=5", "--keys", "a", "--monkey=1", "--key-dim", "8"],
            ["--tokenizer", "gpt2", "--max-tokens=5", "--keys", "a", "--monkey=1", "--key-dim", "8"]),
        (["a password is here", "/home/token/x=1"], ["a password is here", "/home/token/x=1"]),
    ],
    ids=str,
)  # fmt: skip
def test_secrets_on_the_command_line_are_masked(given: list[str], shown: list[str]) -> None:
    assert masked(given) == shown


def test_this_process_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--token", "abc"])
    assert run_provenance()["command"] == ["python", "train.py", "--token", "..."]


PROVENANCE = {
    "git_revision": "a" * 40, "git_dirty": True, "command": ["python", "train.py", "--data", "a b"],
    "restored_from": {"path": "/runs/1/global_step5", "tag": "global_step5", "step": 5, "attempt": "cafe"},
}  # fmt: skip


def test_inspect_shows_what_a_save_recorded(tmp_path: Path) -> None:
    request = Request("step7", 7, 2, metrics={"loss": 0.25}, provenance=PROVENANCE)
    save(LOCAL, str(tmp_path), Alone(), request, part(version(0), 0, 1), timeout=5.0)
    shown = ckpttool("inspect", tmp_path).stdout
    assert f"{'a' * 40} (and changes that were not committed)" in shown
    assert "python train.py --data 'a b'" in shown
    assert "/runs/1/global_step5, step 5" in shown
    assert "loss 0.25" in shown
    import json

    told = json.loads(ckpttool("inspect", tmp_path, "--json").stdout)
    assert (told["provenance"], told["metrics"], told["thin"]) == (PROVENANCE, {"loss": 0.25}, False)


def test_provenance_survives_the_manifest_and_unknown_fields_do_not() -> None:
    manifest = Manifest("t", 1, 0.0, "", 1, 1, provenance=PROVENANCE)
    assert parse_manifest(manifest.to_json()).provenance == PROVENANCE
    assert parse_provenance({"later": 1}) == {}


@pytest.mark.parametrize(
    "found", [[], {"command": "text"}, {"restored_from": 5}, {"restored_from": {"step": "five"}}], ids=str
)
def test_provenance_of_other_types_is_no_manifest(found: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_provenance(found)
