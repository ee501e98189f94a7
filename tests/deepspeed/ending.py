"""Scripts that save in the background, and end while they do: each of their ranks is an interpreter that really ends.

Each rank is forked from a process that has imported DeepSpeed, and ends as any script does: at the end of its main
module, by ``sys.exit``, or by an exception.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests import forked

SECONDS = 1.0
"""How long a save takes at least: the script has ended long before."""


def main(directory: Path) -> None:
    """Run the scripts, one after the other."""
    import deepspeed  # noqa: F401  once, for all that are forked

    for job in forked.jobs_in(directory):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(job["world_size"]):
            sys.stdout.flush()
            sys.stderr.flush()
            child = os.fork()
            if not child:
                _script(job, directory / job["id"], rank, port)
                return  # to the end of the module, and of the interpreter
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
    import torch
    from recipes import common

    import ckpttool
    from tests.deepspeed.saving import build

    common.start(seed=4321)
    parallel = build({**job, "dtype": "fp32", "model": "plain"})
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
    from ckpttool.saving import files
    from ckpttool.storage import open_storage

    write = files.write_files

    def later(*given: Any) -> Any:
        time.sleep(SECONDS)
        if spoil:
            shutil.rmtree(root, ignore_errors=True)
        return write(*given)

    files.write_files = later  # type: ignore[assignment]
    return open_storage(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
