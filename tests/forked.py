"""Ranks of real DeepSpeed on the CPU, forked from one process that has imported it once."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # compiling Muon takes minutes
    "MKL_CBWR": "COMPATIBLE",  # otherwise a tensor's address changes the last bits of a loss on AMD's processors
}
"""What torch and DeepSpeed read when they are imported."""
SECONDS = 600
"""How long one thing may take before it counts as stuck, on a machine with much else to do."""


def start(module: str, jobs: Sequence[dict[str, Any]], directory: Path) -> str:
    """Run a module on the jobs, in a process of its own that has imported DeepSpeed; what it printed.

    The module is given the directory, where it finds the jobs in ``jobs.json``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "jobs.json").write_text(json.dumps(list(jobs)))
    path = [str(HERE.parent), str(HERE.parent / "fixtures"), *filter(None, [os.environ.get("PYTHONPATH")])]
    compiled = directory / "compiled"
    env = {
        **os.environ,
        **ENVIRONMENT,
        "TORCH_EXTENSIONS_DIR": str(compiled),
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    }
    stdout, stderr = directory / "stdout", directory / "stderr"
    job = {"module": module, "argument": str(directory), "environment": env}
    status = _fork_server(env["PYTHONPATH"]).run({**job, "stdout": str(stdout), "stderr": str(stderr)})
    printed = stdout.read_text(errors="replace") if stdout.exists() else ""
    assert status == 0, f"status {status}: {printed[-3000:]}\n{stderr.read_text(errors='replace')[-6000:]}"
    # It takes minutes, and for ever where another process was killed while it compiled the same.
    assert not compiled.exists(), f"DeepSpeed has compiled {os.listdir(compiled)}"
    return printed


class _ForkServer:
    """A process that has imported DeepSpeed, and forks one for each job."""

    def __init__(self, path: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            stderr=subprocess.DEVNULL, text=True, cwd=HERE.parent,
        )  # fmt: skip
        atexit.register(self._end)

    def run(self, job: dict[str, Any]) -> int:
        """Run a job to its end; its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the others has ended"
        return int(answer)

    def _end(self) -> None:
        self._process.communicate()


@functools.cache
def _fork_server(path: str) -> _ForkServer:
    """One for all tests of this process."""
    return _ForkServer(path)


def jobs_in(directory: Path) -> list[dict[str, Any]]:
    """What is to be done."""
    found: list[dict[str, Any]] = json.loads((directory / "jobs.json").read_text())
    return found


def run_ranks(world_size: int, body: Callable[[], None]) -> None:
    """Do something on so many ranks, which end with it."""
    wait_for(fork_all(world_size, body))


def statuses_of(world_size: int, body: Callable[[], None]) -> list[int]:
    """Do something on so many ranks, some of which may be killed; how each ended, a signal as a negative number."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in fork_all(world_size, body)]


def kill_ranks(world_size: int, body: Callable[[], None], is_time: Callable[[], bool]) -> list[int]:
    """Do something on so many ranks, and kill all that run when it is time; how each ended, as ``statuses_of``."""
    running, ended = fork_all(world_size, body), {}
    order, killed = list(running), False
    while running:
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                running.remove(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
        if not killed and is_time():
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.002)
    return [ended[pid] for pid in order]


def fork_all(world_size: int, body: Callable[[], None]) -> list[int]:
    """Begin something on so many ranks; their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_fork(body, rank, world_size, port) for rank in range(world_size)]


def _fork(body: Callable[[], None], rank: int, world_size: int, port: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        end_if_stuck()
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(ranks: list[int]) -> None:
    """Wait until all have ended well; one that did not takes the others along, who would wait for it forever."""
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
            if ended and status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"the rank of process {pid} ended with status {status}")
        time.sleep(0.02)


def end_if_stuck(seconds: float = SECONDS) -> None:
    """From now on, tell where this rank hangs and end it: none outlives the test, whatever becomes of its parent."""
    faulthandler.dump_traceback_later(seconds, exit=True)
