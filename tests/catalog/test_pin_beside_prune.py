"""A pin that is set while another process removes or thins: the checkpoint is kept, or the pin is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog import cleanup, pruning
from ckpttool.catalog.retention import Rules
from ckpttool.commit import marks
from ckpttool.errors import StorageError
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MARK, PIN, open_storage
from ckpttool.storage.removal import REMOVAL_MARK
from tests.saving.checkpoints import save_version, version, whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpttool.storage import WritableStorage
    from tests.storage.server import Bucket

Place = tuple["WritableStorage", str]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A root with two checkpoints."""
    storage: WritableStorage
    if request.param == "disk":
        storage, root = LOCAL, str(tmp_path)
    else:
        bucket: Bucket = request.getfixturevalue("s3")
        root = bucket.url("run")
        storage = open_storage(root)
    for number in (1, 2):
        save_version(storage, root, Alone(), f"step{number}", number)
    return storage, root


def _prune(_: WritableStorage, root: str) -> str:
    return ckpttool.prune(root, keep_last=1)[0].reason


def _maintain(storage: WritableStorage, root: str) -> str:
    cleanup.maintain(storage, root, Rules(last=1), grace=0)
    return "pinned meanwhile"


@pytest.mark.parametrize("remove", [_prune, _maintain], ids=lambda f: f.__name__[1:])
def test_a_pin_after_the_last_look_keeps_the_checkpoint(
    remove: Callable[..., str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, root = place
    looked = marks.state_of

    def look_and_pin(*given: Any) -> str:
        found = looked(*given)
        if given[1].endswith("step1"):
            ckpttool.pin(f"{root}/step1", why="mine")
        return found

    def last_look(*given: Any) -> str | None:
        with monkeypatch.context() as patch:
            patch.setattr(cleanup, "state_of", look_and_pin)
            return changed(*given)

    changed = cleanup.changed_since
    for module in (cleanup, pruning):
        monkeypatch.setattr(module, "changed_since", last_look)
    assert remove(storage, root) == "pinned meanwhile"
    storage.refresh([])
    assert whole(root, open_storage(root)) == {"step1": version(1), "step2": version(2)}
    assert {e.name: e.pin is not None for e in ckpttool.ls(root).entries} == {"step1": True, "step2": False}


@pytest.mark.parametrize("moment", ["removed", "being removed"])
def test_a_pin_is_not_said_of_what_is_removed(moment: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, root = place
    write = marks.write_pin

    def late(where: WritableStorage, directory: str, pin: marks.Pin) -> None:
        if moment == "removed" or not where.remote:
            open_storage(root).remove_tree(directory)
            write(where, directory, pin)
        else:
            open_storage(root).put(f"{directory}/{MARK}", REMOVAL_MARK.encode())
            write(where, directory, pin)

    monkeypatch.setattr(marks, "write_pin", late)
    with pytest.raises(StorageError, match=f"^{root}/step1"):
        ckpttool.pin(f"{root}/step1", why="mine")
    storage.refresh([])
    assert not storage.exists(f"{root}/step1/{PIN}")
