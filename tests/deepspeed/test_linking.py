"""A restore follows no symbolic link out of the checkpoint's root, unless follow_links is set."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import CheckpointManager
from tests.deepspeed.engines import build, step
from tests.forked import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory


pytestmark = pytest.mark.deepspeed
RANKS = 2
REFUSED = "is reached through a link that leaves the checkpoint's root"
WAYS = ("restore", "restore b", "preview", "load", "load_state_dict")
FOLLOWING = ("restore and follow", "load and follow")


@on_ranks(RANKS)
def _restores(directory: Path) -> dict[str, dict[str, str]]:
    """What each way to restore says, by what is a link."""
    engine = build(2, "bf16", "two", "adamw")
    (directory / "disk").mkdir(exist_ok=True)
    root = _on_first(directory / "root", lambda path: path.symlink_to("disk"))  # the root itself is a link
    for tag in ("a", "b"):
        step(engine, 1)
        CheckpointManager(root).save(engine, tag=tag, client_state={"tag": tag})
    found = {"root is a link": _attempts(engine, root)}
    made: dict[str, Callable[[Path], None]] = {
        "file": lambda path: _moved(path, "b/mp_rank_00_model_states.pt", directory),
        "states": lambda path: _moved(path, "b/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", directory),
        "manifest": lambda path: _moved(path, "b/ckpttool.json", directory),
        "tag": lambda path: _moved(path, "b", directory),
        "latest": lambda path: _moved(path, "latest", directory),
        "older tag": lambda path: _moved(path, "a", directory),
        "inside": _moved_inside,
        "cache": lambda path: _cached(path, directory),
    }
    for name, change in made.items():
        copy = _on_first(directory / name, partial(_changed, root, change))
        src = copy / "models--a--b/snapshots/0123" if name == "cache" else copy
        found[name] = _attempts(engine, src)
    engine.destroy()
    return found


def _on_first(path: Path, make: Callable[[Path], None]) -> Path:
    """What the first rank makes for all."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        make(path)
    dist.barrier()
    return path


def _changed(root: Path, change: Callable[[Path], None], path: Path) -> None:
    shutil.copytree(root, path)
    change(path)


def _moved(root: Path, name: str, directory: Path) -> None:
    """Something of a checkpoint lies elsewhere, behind a link."""
    elsewhere = directory / "elsewhere" / root.name
    elsewhere.mkdir(parents=True)
    (root / name).rename(elsewhere / "it")
    (root / name).symlink_to(elsewhere / "it")


def _moved_inside(root: Path) -> None:
    (root / "store").mkdir()
    for file in list((root / "b").iterdir()):
        file.rename(root / "store" / file.name)
        file.symlink_to(f"../store/{file.name}")


def _cached(root: Path, directory: Path) -> None:
    """As Hugging Face's cache keeps the files of a repository: links into the directory of its blobs."""
    blobs, snapshot = root / "models--a--b/blobs", root / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted([*root.glob("b/*"), root / "latest"])):
        target = snapshot / file.relative_to(root)
        target.parent.mkdir(exist_ok=True)
        file.rename(blobs / str(number))
        target.symlink_to(blobs / str(number))
    shutil.rmtree(directory / "cache/b")


def _attempts(engine: Any, root: Path) -> dict[str, str]:
    """What each way to restore says."""
    return {
        "restore": _told(lambda: CheckpointManager(root).restore(engine)),
        "restore b": _told(lambda: CheckpointManager(root).restore(engine, tag="b")),
        "preview": _told(lambda: CheckpointManager(root).restore(engine, dry_run=True)),
        "load": _told(lambda: ckpttool.load(engine, root).client_state),
        "load_state_dict": _told(lambda: {"tag": "b"} if len(ckpttool.load_state_dict(root)) else None),
        "restore and follow": _told(lambda: CheckpointManager(root, follow_links=True).restore(engine)),
        "load and follow": _told(lambda: ckpttool.load(engine, root, follow_links=True).client_state),
    }


def _told(function: Callable[[], Mapping[str, Any] | None]) -> str:
    try:
        return str((function() or {}).get("tag"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def restored(tmp_path_factory: TempPathFactory) -> dict[str, dict[str, str]]:
    first, second = _restores(tmp_path_factory.mktemp("linking"))
    assert first == second
    return first


@pytest.mark.parametrize("what", ["file", "states", "manifest", "tag"])
def test_links_that_leave_the_root_are_refused(what: str, restored: dict[str, dict[str, str]]) -> None:
    found = restored[what]
    for way in ("restore b", "load", "load_state_dict"):
        assert REFUSED in found[way], way
    assert [found[way] for way in FOLLOWING] == ["b", "b"]


@pytest.mark.parametrize("what", ["file", "states", "manifest", "tag"])
def test_no_older_checkpoint_is_restored_instead(what: str, restored: dict[str, dict[str, str]]) -> None:
    assert REFUSED in restored[what]["restore"]
    assert REFUSED in restored[what]["preview"]


def test_latest_that_is_a_link_is_refused(restored: dict[str, dict[str, str]]) -> None:
    found = restored["latest"]
    assert all(REFUSED in found[way] for way in ("restore", "preview", "load", "load_state_dict"))
    assert found["restore b"] == "b"
    assert [found[way] for way in FOLLOWING] == ["b", "b"]


def test_another_checkpoint_that_is_a_link_is_passed_over(restored: dict[str, dict[str, str]]) -> None:
    assert [restored["older tag"][way] for way in WAYS] == ["b"] * len(WAYS)


@pytest.mark.parametrize("what", ["root is a link", "inside", "cache"])
def test_links_that_stay_inside_are_followed(what: str, restored: dict[str, dict[str, str]]) -> None:
    assert [restored[what][way] for way in (*WAYS, *FOLLOWING)] == ["b"] * 7
