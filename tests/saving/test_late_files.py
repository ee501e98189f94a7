"""Late files of a run that seemed dead do not replace the files of another save."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import botocore.exceptions
import pytest

from ckpttool.commit import marks
from ckpttool.errors import CkptError
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import write_files
from ckpttool.storage import MANIFEST, is_url, local_writer, open_storage, system_calls, walk
from ckpttool.storage import s3 as s3_module
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.s3_client import BlockingClient, SingleAttemptFileSystem
from tests.saving.checkpoints import Intercepted, chosen, save_version, version
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(params=["disk", "one put", "parts", "parts without conditions", "memory"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, small_parts: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Where two runs save: each file in one request, or in parts; or in a store without conditional writes."""
    if request.param == "disk":
        return str(tmp_path / "root")
    if request.param == "memory":
        monkeypatch.setattr(RemoteStorage, "part_bytes", lambda self, nbytes: 8192)
        return f"memory://late-files-{uuid.uuid4().hex[:12]}/root"
    endpoint, client = small_parts
    if request.param == "parts without conditions":
        _know_no_conditions(monkeypatch)
    if request.param.startswith("parts"):
        monkeypatch.setattr(s3_module, "MIN_PART_BYTES", 8192)
    for name, value in (server.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    SingleAttemptFileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/root"


def _know_no_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server that refuses conditional writes."""
    request = BlockingClient.request

    def refusing(self: Any, method: str, **how: Any) -> Any:
        if {"IfNoneMatch", "IfMatch"} & how.keys() and method != "get_object":
            answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
            raise OSError("not implemented") from botocore.exceptions.ClientError(answer, method)
        return request(self, method, **how)

    monkeypatch.setattr(BlockingClient, "request", refusing)


@pytest.fixture
def other(root: str) -> Callable[[], None]:
    """Another run, which takes the directory over and commits, once."""
    left = [2]

    def save() -> None:
        if left:
            marks.ALIVE.clear()  # as if the first were a process that has ended
            save_version(open_storage(root), root, Alone(), "a", left.pop())

    return save


def _commits_nothing(place: Any, root: str) -> CkptError:
    """Let the late run save; what is there afterwards is the other's, and nothing else."""
    with pytest.raises(CkptError) as caught:
        save_version(place, root, Alone(), "a", 1)
    storage = open_storage(root)
    assert chosen(root, storage) == ("a", version(2))
    assert {name for name, _ in walk(storage, f"{root}/a")} == {*version(2), MANIFEST}
    return caught.value


def test_before_the_first_file_is_begun(root: str, other: Callable[[], None]) -> None:
    def late(*given: Any) -> Any:
        other()
        return write_files(*given)

    told = str(_commits_nothing(Intercepted(open_storage(root), late), root))
    assert "taken over" in told or "exists already" in told


def test_before_a_file_is_published(root: str, other: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other commits between the look at the mark and what follows it."""
    if root.startswith("memory"):
        return  # the last look is right before the file is begun: what comes after it cannot be seen
    place: Any = open_storage(root)
    if not is_url(root):
        rename = system_calls.rename_new

        def late_rename(partial: str, path: str) -> None:
            if path.endswith(".pt"):
                other()
            rename(partial, path)

        monkeypatch.setattr(local_writer, "rename_new", late_rename)
    else:
        _publish_late(place, other)
    _commits_nothing(place, root)


def _publish_late(storage: Any, other: Callable[[], None]) -> None:
    put_new, create = storage.put_new, storage.upload

    def late_put(path: str, data: bytes, **how: Any) -> Any:
        if path.endswith(".pt"):
            other()
        return put_new(path, data, **how)

    def late_create(*given: Any, **how: Any) -> Any:
        upload = create(*given, **how)
        commit = upload.commit

        def late_commit() -> None:
            other()
            commit()

        upload.commit = late_commit
        return upload

    storage.put_new, storage.upload = late_put, late_create
