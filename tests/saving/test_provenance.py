"""What a save records about its run: the git revision of its code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ckpttool.commit.manifest import Manifest, parse_manifest
from ckpttool.saving.coordination import Alone
from ckpttool.saving.provenance import GitState
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
    assert GitState(str(tmp_path), seconds=0.2).fields(0.0) == {}
    assert GitState(str(tmp_path), seconds=0.2).fields(20) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert GitState(str(tmp_path)).fields(20) == {}


def test_a_script_among_installed_packages_is_not_the_users_code(tmp_path: Path) -> None:
    """As that of a worker of Ray, where the virtual environment is in a repository."""
    directory = tmp_path / ".venv" / "site-packages"
    directory.mkdir(parents=True)
    script = "import ckpttool.saving.provenance as p; print(p.git_state().fields(20))"
    for path in (tmp_path / "train.py", directory / "worker.py"):
        path.write_text(script)
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "train.py")
    _git(tmp_path, "commit", "--quiet", "-m", "one")
    for path, count in ((tmp_path / "train.py", 1), (directory / "worker.py", 0)):
        told = subprocess.run([sys.executable, str(path)], check=True, capture_output=True, text=True).stdout
        assert told.count("git_revision") == count, told


PROVENANCE = {
    "git_revision": "a" * 40, "git_dirty": True,
    "restored_from": {"path": "/runs/1/global_step5", "tag": "global_step5", "step": 5, "attempt": "cafe"},
}  # fmt: skip


def test_inspect_shows_what_a_save_recorded(tmp_path: Path) -> None:
    request = Request("step7", 7, 2, metrics={"loss": 0.25}, provenance=PROVENANCE)
    save(LOCAL, str(tmp_path), Alone(), request, part(version(0), 0, 1))
    shown = ckpttool("inspect", tmp_path).stdout
    assert f"{'a' * 40} (and changes that were not committed)" in shown
    assert "/runs/1/global_step5, step 5" in shown
    assert "loss 0.25" in shown
    import json

    told = json.loads(ckpttool("inspect", tmp_path, "--json").stdout)
    assert (told["provenance"], told["metrics"], told["thin"]) == (PROVENANCE, {"loss": 0.25}, False)


def test_provenance_survives_the_manifest_and_unknown_fields_do_not() -> None:
    manifest = Manifest("t", 1, 0.0, "", 1, 1, provenance=PROVENANCE)
    assert parse_manifest(manifest.to_json()).provenance == PROVENANCE
    assert parse_manifest(replace(manifest, provenance={"later": 1}).to_json()).provenance == {}


@pytest.mark.parametrize("found", [[1], {"restored_from": 5}, {"restored_from": {"step": "five"}}], ids=str)
def test_provenance_of_other_types_is_no_manifest(found: object) -> None:
    manifest = Manifest("t", 1, 0.0, "", 1, 1, provenance=found)  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError)):
        parse_manifest(manifest.to_json())
