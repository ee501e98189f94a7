"""How many requests it takes to find the checkpoints of a root in a bucket."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.restore_order import find
from ckpttool.catalog.retention import Rules
from ckpttool.catalog.runs import last_commit, run_commits
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, open_storage
from tests.faults.s3_proxy import Proxy
from tests.saving.checkpoints import save_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.server import Bucket

FOLDERS = {
    "tags": "step{}",
    "trainer": "checkpoint-{0}/step{0}",
    "ray": "ckpttool_0000000{0}_a/step{0}",
}
"""Directories of the commits, by the kind of the root."""
WORK: dict[str, tuple[str, Callable[[str, Any], object], int, int]] = {
    "ls": ("tags", lambda url, _: ckpttool.ls(url), 14, 21),
    "ls of a trainer": ("trainer", lambda url, _: ckpttool.ls(url), 10, 24),
    "prune": ("tags", lambda url, _: ckpttool.prune(url, keep_last=2, dry_run=True), 16, 21),
    "inspect": ("tags", lambda url, _: ckpttool.inspect(url), 2, 5),
    "inspect of a trainer": ("trainer", lambda url, _: ckpttool.inspect(url), 14, 5),
    "restore": ("tags", lambda url, storage: find(storage, url, None), 5, 6),
    "maintain": ("tags", lambda url, storage: maintain(storage, url, Rules(last=4), grace=1e9), 5, 5),
    "rotate": ("trainer", lambda url, storage: rotate(storage, url, 4, keep=(), grace=1e9), 5, 8),
    "restore from a run of Ray": ("ray", lambda url, storage: run_commits(storage, url), 17, 4),
    "report to Ray": ("ray", lambda url, storage: last_commit(storage, url), 17, 4),
}
"""The kind of the root, the work, and the most requests for listings and for bytes."""


@pytest.mark.parametrize("work", WORK)
def test_each_listing_of_checkpoints_takes_few_requests(
    work: str, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, do, listings, gets = WORK[work]
    for number in (1, 2, 3, 4):
        folder, _, tag = FOLDERS[kind].format(number).rpartition("/")
        save_version(LOCAL, str(tmp_path / folder), Alone(), tag, number)
    s3.upload(tmp_path, "root")
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        do(s3.url("root"), open_storage(s3.url("root")))
        asked = collections.Counter(request.operation for request in proxy.requests())
    assert asked.keys() <= {"list_objects_v2", "get_object"}
    assert asked["list_objects_v2"] <= listings
    assert asked["get_object"] <= gets
