"""Ranks of real DeepSpeed on the CPU, forked from one process that has imported it once."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

P = ParamSpec("P")
T = TypeVar("T")

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",  # DeepSpeed orders groups of experts by a set of names, as do the fixtures
    "TORCHDYNAMO_DISABLE": "1",  # compiling Muon takes minutes
    "MKL_CBWR": "COMPATIBLE",  # otherwise a tensor's address changes the last bits of a loss on AMD's processors
}
"""What torch and DeepSpeed read when they are imported."""
SECONDS = 600
"""How long one thing may take before it counts as stuck, on a machine with much else to do."""


def call(function: Callable[..., Any], *arguments: Any, imports: Sequence[str] = ()) -> Any:
    """Call a function of a module in a process of its own that has imported DeepSpeed; return what it returns.

    Arguments and result are pickled. The process has this one's environment.

    Args:
        function: The function.
        arguments: Its arguments.
        imports: Modules that the process has imported too; once for all calls of tests of this process.
    """
    path = [str(HERE.parent), str(HERE.parent / "fixtures"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        compiled = directory / "compiled"
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "TORCH_EXTENSIONS_DIR": str(compiled),
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        }
        (directory / "call").write_bytes(pickle.dumps((_name(function), arguments)))
        status = _fork_server(environment["PYTHONPATH"]).run(directory, environment, imports)
        printed, logged = ((directory / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        assert status == 0, f"status {status}: {printed[-3000:]}\n{logged[-6000:]}"
        # It takes minutes, and for ever where another process was killed while it compiled the same.
        assert not compiled.exists(), f"DeepSpeed has compiled {os.listdir(compiled)}"
        return pickle.loads((directory / "result").read_bytes())


def on_ranks(world_size: int) -> Callable[[Callable[P, T]], Callable[P, list[T]]]:
    """Let a function of a module run on so many forked ranks of a gloo group; a call returns the result of each."""

    def decorate(function: Callable[P, T]) -> Callable[P, list[T]]:
        @functools.wraps(function)
        def run(*arguments: P.args, **options: P.kwargs) -> list[T]:
            results = call(_results_of, world_size, _name(function), arguments, options)
            return [pickle.loads(result) for result in results]

        return run

    return decorate


def each_on_ranks(
    function: Callable[..., Any], jobs: Iterable[dict[str, Any]], *arguments: Any, imports: Sequence[str] = ()
) -> dict[Any, list[Any]]:
    """Call a function of a module with each job, on as many ranks as it asks for; return the result of each rank by id.

    Args:
        function: Takes a job and the further arguments.
        jobs: Each has an ``id`` and a ``world_size``. Those of one world size share their processes, unless they have
            another value of ``apart``; those of a later ``turn`` begin after all of the others.
        arguments: Further arguments of the function.
        imports: As of ``call``.
    """
    found: dict[Any, list[Any]] = {}
    for results in call(_results_of_groups, _name(function), list(jobs), arguments, imports=imports):
        for result in results:
            for key, value in pickle.loads(result).items():
                found.setdefault(key, []).append(value)
    return found


class _ForkServer:
    """A process that has imported DeepSpeed, and forks one for each call."""

    def __init__(self, path: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            stderr=subprocess.DEVNULL, text=True, cwd=HERE.parent,
        )  # fmt: skip
        atexit.register(self._end)

    def run(self, directory: Path, environment: dict[str, str], imports: Sequence[str]) -> int:
        """Do the call of a directory to its end, where modules are imported; its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(directory), environment, [*imports]]) + "\n")
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


# ------------------------------------------------------------------------------------------------- in the processes


def answer(directory: Path) -> None:
    """Do the call of a directory, as the process that was forked for it."""
    process = os.getpid()
    name, arguments = pickle.loads((directory / "call").read_bytes())
    result = _find(name)(*arguments)
    if os.getpid() == process:  # not one that the function has forked, and that ends as any script does
        (directory / "result").write_bytes(pickle.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # Python's own end takes a third of a second of CPU


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _find(name: tuple[str, str]) -> Callable[..., Any]:
    module, qualified = name
    found: Callable[..., Any] = inspect.unwrap(getattr(importlib.import_module(module), qualified))
    return found


def _results_of_groups(
    name: tuple[str, str], jobs: list[dict[str, Any]], arguments: tuple[Any, ...]
) -> list[list[bytes]]:
    def process(job: dict[str, Any]) -> tuple[int, int, str]:
        return job.get("turn", 0), job["world_size"], job.get("apart", "")

    return [
        _results_of(key[1], _name(_each), (name, list(group), arguments), {})
        for key, group in itertools.groupby(sorted(jobs, key=process), process)
    ]


def _each(name: tuple[str, str], jobs: list[dict[str, Any]], arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """Do jobs one after another, as one of the ranks that do."""
    import torch

    function, found = _find(name), {}
    for job in jobs:
        end_if_stuck()
        found[job["id"]] = function(job, *arguments)
        torch.distributed.barrier()
    return found


def _results_of(
    world_size: int, name: tuple[str, str], arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[bytes]:
    """Call a function on so many ranks; the pickled result of each."""
    function = _find(name)
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, str(rank)) for rank in range(world_size)]

        def rank() -> None:
            from recipes import common

            common.start()
            result = pickle.dumps(function(*arguments, **options))
            files[int(os.environ["RANK"])].write_bytes(result)
            common.leave()

        run_ranks(world_size, rank)
        return [file.read_bytes() for file in files]


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


def free_port() -> int:
    """A port that is free now, for the first rank, which listens on it seconds later.

    The kernel gives ports from 32,768 on to new connections of any process, and Ray gives 10,002 to 19,999 to its
    workers: the port is between these ranges.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def fork_all(world_size: int, body: Callable[[], None]) -> list[int]:
    """Begin something on so many ranks; their process ids."""
    port = free_port()
    gc.freeze()  # what was imported: engines at stage 3 call gc.collect
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
