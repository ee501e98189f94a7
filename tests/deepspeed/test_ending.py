"""A background save is committed after its script has ended; a failure sets the exit status."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.saving import files
from ckpttool.storage import open_storage
from tests import forked, sampling
from tests.deepspeed.engines import build_parallel

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

    from tests.storage import server

pytestmark = pytest.mark.deepspeed

ENDS = {"normal": 0, "exit": 0, "exception": 1}
SECONDS = 1.0
"""How long a save takes at least: the script has ended long before."""
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


def _run(jobs: list[dict[str, Any]], directory: Path) -> None:
    """Run scripts one after the other; each of their ranks is an interpreter that really ends.

    It ends as that of any script does: at the end of its main module, by ``sys.exit``, or by an exception.
    """
    for job in jobs:
        port = forked.free_port()
        children = []
        for rank in range(job["world_size"]):
            sys.stdout.flush()
            sys.stderr.flush()
            child = os.fork()
            if not child:
                _script(job, directory / job["id"], rank, port)
                return  # to the end of the interpreter
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (directory / job["id"] / "statuses").write_text(" ".join(map(str, statuses)))


def _script(job: dict[str, Any], directory: Path, rank: int, port: int) -> None:
    directory.mkdir(exist_ok=True)
    errors = os.open(directory / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"]),
        "LOCAL_SIZE": str(job["world_size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    forked.end_if_stuck(120)
    signal.alarm(150)
    from recipes import common

    common.start(seed=4321)
    parallel = build_parallel({**job, "dtype": "fp32", "model": "plain"})
    parallel.step()
    manager: Any = ckpttool.CheckpointManager(
        job["root"], async_save=True, timeout=30, storage=_slow(job["root"], spoil=job["spoil"])
    )
    manager.save(parallel.engine, client_state={"step": 1})
    torch.distributed.barrier()  # an exception ends the other ranks' collectives, not what they save
    if job["how"] == "exit":
        sys.exit(0)
    if job["how"] == "exception":
        raise ArithmeticError("the loop failed")


def _slow(root: str, *, spoil: bool) -> Any:
    """Where a manager saves, which takes its time; and loses the directory meanwhile, if it is to fail."""
    write = files.write_files

    def later(*given: Any) -> Any:
        time.sleep(SECONDS)
        if spoil:
            shutil.rmtree(root, ignore_errors=True)
        return write(*given)

    files.write_files = later  # type: ignore[assignment]
    return open_storage(root)


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory, bucket: server.Bucket) -> Path:
    directory = tmp_path_factory.mktemp("ending")
    jobs = [*JOBS, *FAILING]
    for job in jobs:
        job["root"] = bucket.url(job["id"]) if job["place"] == "bucket" else str(directory / job["id"] / "root")
    forked.call(_run, jobs, directory)
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
