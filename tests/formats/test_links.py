"""Symbolic links in a checkpoint: links out of its root are refused by name, unless follow_links is set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.errors import CkptError, LinkError
from ckpttool.storage.confined import local_storage
from tests.cli.command import EXTENSIONS_READING, remains
from tests.cli.command import ckpttool as command
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable


SRC = "zero2-dp2-bf16"
CONTENT = "-----BEGIN PRIVATE KEY-----"
REFUSED = "is reached through a link that leaves the checkpoint's root"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """What lies outside of the checkpoint."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home/secret"
    path.write_text(CONTENT)
    return path


def _commands(root: Path, out: Path) -> list[tuple[object, ...]]:
    return [
        ("cp", root, out),
        ("consolidate", root, out, "--to", "safetensors"),
        ("convert", root, out, "--to", "zero", "--world-size", "3"),
    ]


@pytest.mark.parametrize("where", [".", "global_step3"])
def test_companion_that_is_a_link_is_not_exported(
    where: str, checkpoint_copy: Callable[[str], Path], secret: Path, tmp_path: Path
) -> None:
    root = checkpoint_copy(SRC)
    (root / "vocab.txt").symlink_to(secret)
    for command_line in _commands(root / where, tmp_path / "made"):
        done = command(*command_line)
        assert done.code == 3
        assert f"vocab.txt: {REFUSED}; copy it here, or pass --follow-links" in done.error
        assert CONTENT not in done.stdout + done.stderr
        assert not [p for p in (tmp_path / "made").rglob("*") if p.is_file() and CONTENT in p.read_text("latin-1")]
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
    assert command(*_commands(root / where, tmp_path / "made")[1], "--follow-links").code == 0
    assert (tmp_path / "made/vocab.txt").read_text() == CONTENT


@pytest.mark.parametrize("where", [".", "global_step3"])
@pytest.mark.parametrize("target", ["home", "/"])
def test_directory_that_is_a_link_is_not_copied(
    where: str, target: str, checkpoint_copy: Callable[[str], Path], secret: Path, tmp_path: Path
) -> None:
    root = checkpoint_copy(SRC)
    (root / "global_step3/extra").symlink_to(tmp_path / target)
    done = command("cp", root / where, tmp_path / "made")
    assert done.code == 3
    assert f"global_step3/extra: {REFUSED}" in done.error
    assert remains(tmp_path / "made") == [] or not (tmp_path / "made").exists()
    if target == "home":
        assert command("cp", root / where, tmp_path / "made", "--follow-links").code == 0
        assert (tmp_path / "made/global_step3/extra/secret").read_text() == secret.read_text()


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
def test_latest_that_is_a_link_shows_nothing(
    name: str, checkpoint_copy: Callable[[str], Path], secret: Path, tmp_path: Path
) -> None:
    root = checkpoint_copy(SRC)
    (root / "latest").unlink()
    (root / name).symlink_to(secret)
    for arguments in [("inspect", root), ("verify", root), ("ls", root), ("cp", root, tmp_path / "made")]:
        done = command(*arguments)
        assert CONTENT not in done.stdout + done.stderr
        assert REFUSED in done.stdout + done.stderr
    assert REFUSED in command("inspect", root).error


def test_weights_that_are_a_link_are_not_read(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    file = next((root / "global_step3").glob("*optim*"))
    file.rename(tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    for arguments in [("inspect", root), *((name, root) for name in EXTENSIONS_READING)]:
        assert f"{file}: {REFUSED}" in command(*arguments).error
    assert command("inspect", root, "--follow-links").code == 0
    assert ckpttool.inspect(root, follow_links=True).tag == "global_step3"


def test_links_that_stay_inside_are_followed(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    (root / "store").mkdir()
    for file in (root / "global_step3").glob("*.pt"):
        file.rename(root / "store" / file.name)
        file.symlink_to(f"../store/{file.name}")
    (root / "newest").symlink_to("global_step3")
    (tmp_path / "way").symlink_to(root)  # what the user names may be a link
    for src in (root, root / "global_step3", root / "newest", tmp_path / "way"):
        assert command("consolidate", src, tmp_path / "made", "--to", "safetensors", "--overwrite").code == 0


@pytest.mark.parametrize("src", ["", "model.safetensors"])
def test_hugging_face_cache_is_read(src: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    size = "1GB" if src == "model.safetensors" else "4kB"
    assert command("consolidate", source(SRC), made, "--to", "safetensors", "--max-shard-size", size).code == 0
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert command("inspect", snapshot / src if src else snapshot).code == 0
    (tmp_path / "elsewhere").write_text("{}")
    name = src or "model.safetensors.index.json"
    (snapshot / name).unlink()
    (snapshot / name).symlink_to("../../blobs/../../elsewhere")
    if not src:
        with pytest.raises(CkptError, match=REFUSED):
            ckpttool.inspect(snapshot)


def test_ls_does_not_follow_a_link_out_of_the_root(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(SRC)
    (tmp_path / "other").mkdir()
    (root / "global_step3").rename(tmp_path / "other/global_step3")
    (root / "global_step3").symlink_to(tmp_path / "other/global_step3")
    (root / "disk").symlink_to("/")
    entries = {e.name: e for e in ckpttool.ls(root).entries}
    assert all("leaves the root: follow_links is not set" in str(e.problem) for e in entries.values())
    assert sorted(entries) == ["disk", "global_step3"]
    assert "not read (--follow-links), a link to /\n" in command("ls", root, "--wide").stdout
    assert f"global_step3: {REFUSED}" in command("inspect", root).error
    (root / "disk").unlink()
    assert [e.whole for e in ckpttool.ls(root, follow_links=True).entries] == [True]


def test_a_checkpoint_below_a_snapshot_of_the_hub_is_read(tmp_path: Path) -> None:
    cache, src = tmp_path / "models--a--b", Path(source("zero3-dp2-bf16-trainer"))
    snapshot, blobs = cache / "snapshots/0123", cache / "blobs"
    shutil.copytree(src, snapshot / "checkpoint-3")
    blobs.mkdir()
    for number, file in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    for path in (snapshot, snapshot / "checkpoint-3", snapshot / "checkpoint-3/global_step3"):
        assert ckpttool.inspect(path).tag == "global_step3"
    assert command("verify", snapshot / "checkpoint-3").code == 0
    assert [entry.problem for entry in ckpttool.ls(snapshot).entries] == [None]
    (snapshot / "checkpoint-3/global_step3/secret").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text(CONTENT)
    assert REFUSED in command("cp", snapshot / "checkpoint-3", tmp_path / "made").error


def test_a_checkpoint_of_links_out_of_the_root_is_not_read_and_not_torn(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(SRC)
    shutil.copytree(root / "global_step3", root / "global_step6")
    (root / "global_step3").rename(tmp_path / "disk")
    (root / "global_step3").mkdir()
    for file in (tmp_path / "disk").iterdir():
        (root / "global_step3" / file.name).symlink_to(file)
    entry = next(e for e in ckpttool.ls(root).entries if e.latest)
    assert (entry.torn, entry.is_unread) == (None, True)
    assert "latest, not read (--follow-links): " in command("ls", root).stdout
    assert command("verify", root).code == 3
    assert command("verify", root, "--follow-links").code == 0
    decisions = ckpttool.prune(root, torn=True, grace=0, keep_last=1)
    assert all(d.keep for d in decisions)
    assert ["not read: " in d.reason for d in decisions if d.entry.latest] == [True]
    assert (root / "global_step3").is_dir()


def test_a_storage_that_is_in_use_sees_how_links_and_the_root_have_changed(tmp_path: Path, secret: Path) -> None:
    root, storage = tmp_path / "run", local_storage([str(tmp_path / "run" / "step1")], follow_links=False)
    for name in ("step1", "step2"):
        (root / name).mkdir(parents=True)
        (root / name / "own").write_text(name)
    (root / "latest").write_text("step1")
    (root / "step1" / "link").symlink_to(root / "step2" / "own")
    storage.open(str(root / "step1" / "link")).close()  # latest makes its directory the root
    (root / "latest").unlink()
    with pytest.raises(LinkError, match=REFUSED):
        storage.open(str(root / "step1" / "link"))
    (root / "step1").rename(root / "aside")
    (root / "step1").symlink_to(secret.parent)
    storage.open(str(root / "step1" / "secret")).close()  # the path to a root may be a link
    (root / "step1").unlink()
    (root / "aside").rename(root / "step1")
    (root / "step1" / "found").symlink_to(secret)
    with pytest.raises(LinkError, match=REFUSED):
        storage.open(str(root / "step1" / "found"))
