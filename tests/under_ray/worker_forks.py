"""Workers of Ray, forked from one process that has imported what they import.

An interpreter of its own for each worker, and for each actor that Ray Train starts beside them, takes seconds of CPU
for its imports. Raylets start this script in place of Ray's ``setup_worker.py``: it has a worker forked, and lives as
long as that does. It imports nothing that takes long, for it is itself started for each worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import traceback
import types
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPORTED = (
    "ray._private.arrow_serialization", "ray._private.workers.default_worker", "ray.data._internal.issue_detection",
    "ray.train.collective", "ray.train.torch", "ray.train.v2.api.data_parallel_trainer", "ray.tune",
    "ckpttool.integrations.ray_train",
)  # fmt: skip
"""What workers import: once for all of a job, in the process that forks them."""
VARIABLE = "CKPTTOOL_TEST_WORKER_FORKS"
"""Tells the script the number of the process that began it all: its socket has the name of that."""
SOCKET = "\0ckpttool-worker-forks-{}"


@contextlib.contextmanager
def of_this_process() -> Iterator[None]:
    """Fork workers from what this process has imported, for raylets that it or a child of it starts meanwhile."""
    assert "ray" not in sys.modules, "Ray reads its environment when it is imported, and draws names at random"
    os.environ[VARIABLE] = str(os.getpid())
    listening = _listening(SOCKET.format(os.getpid()))
    forker = os.fork()
    if not forker:
        _end_by(partial(_serve_jobs, listening))
    listening.close()
    try:
        yield
    finally:
        os.kill(forker, signal.SIGTERM)
        os.waitpid(forker, 0)


def use() -> None:
    """Let the raylets that this process starts from now on start this script."""
    from ray._private.parameter import RayParams

    begin = RayParams.__init__

    def with_this_script(self: Any, *arguments: Any, **options: Any) -> None:
        # The monitor of logs reads all of them again and again, to print them where they are asked for.
        unused = {"include_log_monitor": bool(os.environ.get("CKPTTOOL_TEST_LOG")), "no_monitor": True}
        begin(self, *arguments, **{**options, **unused, "setup_worker_path": __file__})

    RayParams.__init__ = with_this_script


# ------------------------------------------------------------------------------------------------- what raylets start


def _ask(arguments: list[str]) -> None:
    """Have a worker forked, and end with it."""
    asked = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    name: str | bytes = SOCKET.format(os.environ[VARIABLE])
    for _ in range(2):  # the first answers with the name of the other, which closes the connection at the end
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            name = connection.recv(100)


# ------------------------------------------------------------------------------------------------- what forks


def _serve_jobs(listening: socket.socket) -> None:
    """Tell each script that connects which process forks the workers of its job."""
    parent, known = os.getppid(), set[str]()
    while os.getppid() == parent:
        if not select.select([listening], [], [], 1.0)[0]:
            continue
        connection, _ = listening.accept()
        with connection, connection.makefile() as lines:
            if not (line := lines.readline()):  # killed before it could ask
                continue
            environment = json.loads(line)["environment"]
            name = f"{SOCKET.format(os.getpid())}-{environment.get('RAY_JOB_ID')}"
            if name not in known:
                known.add(name)
                own = _listening(name)
                if not os.fork():
                    listening.close()
                    connection.close()
                    _end_by(partial(_serve, own, environment))
                own.close()
            connection.sendall(name.encode())


def _listening(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    listening.listen(64)
    return listening


def _serve(listening: socket.socket, environment: dict[str, str]) -> None:
    """Fork a worker of a job for each that connects: a script that ends with it, or whose end ends the worker."""
    os.environ.clear()
    os.environ.update(environment)  # Ray reads the job's number when it is imported
    with _without_draws():
        for name in IMPORTED:
            importlib.import_module(name)
    gc.freeze()
    parent, workers = os.getppid(), dict[socket.socket, int]()
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    while os.getppid() == parent:
        for key, _ in waiting.select(0.1 if workers else 1.0):
            if key.data is not None:
                waiting.unregister(key.fileobj)
                os.kill(workers[key.data], signal.SIGKILL)
                continue
            connection, _ = listening.accept()
            with connection.makefile() as lines:
                line = lines.readline()
            if not line:  # killed before it could ask
                connection.close()
                continue
            asked = json.loads(line)
            pid = os.fork()
            if not pid:
                waiting.close()
                listening.close()
                connection.close()
                _end_by(partial(_become, asked))
            workers[connection] = pid
            waiting.register(connection, selectors.EVENT_READ, connection)
        for connection, pid in list(workers.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del workers[connection]
                with contextlib.suppress(KeyError):
                    waiting.unregister(connection)
                connection.close()


@contextlib.contextmanager
def _without_draws() -> Iterator[None]:
    """Let Ray's modules take random numbers of the system: else all workers would draw the same ones after a fork."""
    import ray.actor as module

    kind = module.ActorClassID
    module.ActorClassID = types.SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    yield
    module.ActorClassID = kind


def _end_by(work: Callable[[], None]) -> NoReturn:
    """Do a thing that ends this forked process."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become(asked: dict[str, Any]) -> None:
    """Do what ``setup_worker.py`` does, and run in this process what that would execute: the script of a worker."""
    os.setsid()  # raylets kill the group of a worker that has ended
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    from ray._private.utils import update_envs

    context, script = "--serialized-runtime-env-context=", []
    for argument in asked["arguments"]:
        if argument.startswith(context):
            update_envs(json.loads(argument.removeprefix(context) or "{}").get("env_vars") or {})
        elif not argument.startswith("--language="):
            script.append(argument)
    sys.argv[:] = script
    sys.path.insert(0, os.path.dirname(script[0]))
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    _ask(sys.argv[1:])
