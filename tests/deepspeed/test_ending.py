"""A background save is committed after its script has ended; a failure sets the exit status."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import forked, sampling
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

ENDS = {"normal": 0, "exit": 0, "exception": 1}
FAILED = 120
"""The status of a program that has ended well, and could not write all that was to be written."""


def _job(how: str, world_size: int, place: str, *, spoil: bool = False) -> dict[str, Any]:
    name = f"{how}-dp{world_size}-{place}{'-fails' if spoil else ''}"
    return {"id": name, "how": how, "world_size": world_size, "stage": 2, "spoil": spoil, "place": place}


JOBS = [_job("normal", 2, "disk"), _job("exit", 1, "disk"), _job("exception", 2, "disk"), _job("normal", 2, "bucket")]
FAILING = [_job("normal", 1, "disk", spoil=True), _job("exception", 2, "disk", spoil=True)]
if sampling.thorough():
    JOBS = [*(_job(how, n, "disk") for how in ENDS for n in (1, 2)), *(_job(how, 2, "bucket") for how in ENDS)]
    JOBS.append(_job("normal", 1, "bucket"))
    FAILING.append(_job("exit", 2, "disk", spoil=True))


@pytest.fixture(scope="module")
def bucket(s3_server: tuple[str, Any]) -> Iterator[server.Bucket]:
    with pytest.MonkeyPatch.context() as patch:
        endpoint, client = s3_server
        for name, value in (server.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            patch.setenv(name, value)
        own = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
        client.create_bucket(Bucket=own.name)
        yield own


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory, bucket: server.Bucket) -> Path:
    directory = tmp_path_factory.mktemp("ending")
    jobs = [*JOBS, *FAILING]
    for job in jobs:
        job["root"] = bucket.url(job["id"]) if job["place"] == "bucket" else str(directory / job["id"] / "root")
    forked.start("tests.deepspeed.ending", jobs, directory)
    return directory


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_save_outlasts_the_script(job: dict[str, Any], done: Path) -> None:
    told = "".join((done / job["id"] / f"stderr-{rank}").read_text() for rank in range(job["world_size"]))
    statuses = (done / job["id"] / "statuses").read_text().split()
    assert statuses == [str(ENDS[job["how"]])] * job["world_size"], told
    (entry,) = ckpttool.ls(job["root"]).entries
    assert entry.whole, told
    assert entry.latest
    assert ckpttool.inspect(job["root"]).client_state["step"] == 1
    assert not ckpttool.verify(job["root"], deep=True).findings


@pytest.mark.parametrize("job", FAILING, ids=lambda job: job["id"])
def test_a_save_that_fails_then_shows_in_the_exit_status(job: dict[str, Any], done: Path) -> None:
    statuses = (done / job["id"] / "statuses").read_text().split()
    assert statuses == [str(FAILED)] * job["world_size"]
    for rank in range(job["world_size"]):
        told = (done / job["id"] / f"stderr-{rank}").read_text()
        assert "global_step1 was not saved: " in told
        assert "does not exist" in told
        assert "Exception ignored" not in told
        assert "schedule new futures" not in told
