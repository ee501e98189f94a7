"""Two runs save the same tag at once: at most one commits, and the commit has only its own files."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.commit import marks
from ckpttool.commit.marks import TakenError
from ckpttool.errors import CkptError
from ckpttool.saving import claim
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import write_files
from ckpttool.storage import LOCAL, MARK, open_storage
from ckpttool.storage.s3_client import SingleAttemptFileSystem
from tests.saving.checkpoints import Intercepted, chosen, save_version, version
from tests.storage import server
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpttool.checksums import Checksums
    from ckpttool.saving.files import OutgoingFile


@pytest.fixture(params=["disk", "bucket"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Where two runs save."""
    if request.param == "disk":
        return str(tmp_path / "root")
    endpoint, client = s3_server
    for name, value in (server.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    SingleAttemptFileSystem.clear_instance_cache()  # those of other tests may lead to a proxy that is gone
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/root"


def _place(root: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> Any:
    """A run's own way to a root; something happens right before or after it writes its files."""

    def interrupted(storage: Any, directory: str, files: Sequence[OutgoingFile], *checks: Any) -> list[Checksums]:
        if before is not None:
            before()
        sums = write_files(storage, directory, files, *checks)
        if after is not None:
            after()
        return sums

    return Intercepted(open_storage(root), interrupted)


def _seems_dead() -> None:
    """As if the runs that save were processes that have ended."""
    marks.ALIVE.clear()


def test_a_live_save_is_not_cleared_away(root: str) -> None:
    told: list[str] = []

    def other() -> None:
        with pytest.raises(TakenError) as caught:
            save_version(open_storage(root), root, Alone(), "a", 2)
        told.append(str(caught.value))

    save_version(_place(root, after=other), root, Alone(), "a", 1)
    assert "is being saved by process" in told[0]
    assert chosen(root, open_storage(root)) == ("a", version(1))


def test_a_save_that_seemed_dead_commits_nothing(root: str) -> None:
    def other() -> None:
        _seems_dead()
        save_version(open_storage(root), root, Alone(), "a", 2)

    with pytest.raises(CkptError, match=r"taken over|exists already"):
        save_version(_place(root, after=other), root, Alone(), "a", 1)
    assert chosen(root, open_storage(root)) == ("a", version(2))


def test_a_save_that_seemed_dead_writes_into_a_directory_taken_over(root: str) -> None:
    errors: list[CkptError] = []

    def other() -> None:
        _seems_dead()
        threads = threading.Thread(target=second)
        threads.start()
        claimed.wait(30)

    def second() -> None:
        try:
            save_version(_place(root, before=wait), root, Alone(), "a", 2)
        except CkptError as error:
            errors.append(error)
        ended.set()

    def wait() -> None:
        claimed.set()
        written.wait(30)

    claimed, written, ended = threading.Event(), threading.Event(), threading.Event()
    with pytest.raises(CkptError, match=r"taken over|exists already"):
        save_version(_place(root, before=other), root, Alone(), "a", 1)
    written.set()
    assert ended.wait(30)
    storage = open_storage(root)
    if errors:
        assert chosen(root, storage) is None
        _seems_dead()
        save_version(open_storage(root), root, Alone(), "a", 2)
    assert chosen(root, storage) == ("a", version(2))


def test_runs_with_tags_of_their_own_do_not_meet(tmp_path: Path) -> None:
    root, errors = str(tmp_path), []

    def run(name: str) -> None:
        for number in range(15):
            try:
                save_version(LOCAL, root, Alone(), f"{name}{number}", 1)
            except CkptError as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = chosen(root)
    assert found is not None
    assert found[1] == version(1)


@pytest.mark.parametrize("changes", [False, True])
def test_a_save_of_another_machine_is_watched(changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "WATCH_SECONDS", 2.0)
    (tmp_path / "a").mkdir()
    mark = {"key": "save 1", "files": [], "host": "elsewhere", "machine": "another", "process": 1, "began": "1"}
    (tmp_path / "a" / MARK).write_text(json.dumps(mark))
    timer = threading.Timer(0.5, lambda: (tmp_path / "a" / "file").write_text("x"))
    if changes:
        timer.start()
        with refused(TakenError):
            save_version(LOCAL, str(tmp_path), Alone(), "a", 1)
        return
    save_version(LOCAL, str(tmp_path), Alone(), "a", 1)
    assert chosen(str(tmp_path)) == ("a", version(1))
