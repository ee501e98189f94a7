"""Workers of Ray, forked from one process that has imported what they import.

An interpreter of its own for each worker, and for each actor that Ray Train starts beside them, takes seconds of CPU
for its imports. Raylets start this script in place of Ray's ``setup_worker.py``: it has a worker forked, and lives as
long as that does. It imports nothing that takes long, for it is itself started for each worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "CKPTTOOL_TEST_WORKER_FORKS"
"""Tells the script the number of the process that began it all: its socket has the name of that."""
SOCKET = "\0ckpttool-worker-forks-{}"


@contextlib.contextmanager
def of_this_process() -> Iterator[None]:
    """Fork workers from what this process has imported, for raylets that it or a child of it starts meanwhile."""
    assert "ray" not in sys.modules, "Ray reads its environment when it is imported, and draws names at random"
    os.environ[VARIABLE] = str(os.getpid())
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(SOCKET.format(os.getpid()))
    listening.listen(64)
    forker = os.fork()
    if not forker:
        _end_by(partial(_serve, listening))
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
        begin(self, *arguments, **{**options, "setup_worker_path": __file__})

    RayParams.__init__ = with_this_script


# ------------------------------------------------------------------------------------------------- what raylets start


def _ask(arguments: list[str]) -> None:
    """Have a worker forked, and end with it."""
    asked = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(SOCKET.format(os.environ[VARIABLE]))
        connection.sendall(json.dumps(asked).encode() + b"\n")
        connection.recv(1)


# ------------------------------------------------------------------------------------------------- what forks


def _serve(listening: socket.socket) -> None:
    """Fork a worker for each that connects: a script that ends with its worker, or whose end ends the worker."""
    parent, workers = os.getppid(), dict[socket.socket, int]()
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    while os.getppid() == parent:
        for key, _ in waiting.select(0.1):
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
    from ray._private.utils import update_envs  # not before: Ray reads the environment when it is imported

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
