"""The provenance of a save: the git revision of the code, and the checkpoint that the engine was restored from."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ckpttool.commit import DIRTY, RESTORED_FROM, REVISION

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from ckpttool.model import Checkpoint

GIT_SECONDS = 20.0
"""Most seconds that git may run; it reads every tracked file's state, on a slow network file system too."""
WAIT_SECONDS = 2.0
"""Most seconds that a save waits for git. A save that does not get an answer records none; the next one does."""

_restored: MutableMapping[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""By engine: the checkpoint of its last load, of ``ckpttool.load`` or of a manager."""


class GitState:
    """The commit that the code of this process is checked out at, asked of git once, in a thread.

    Args:
        directory: A directory of the code.
        seconds: Most seconds that git may run.
    """

    def __init__(self, directory: str, seconds: float = GIT_SECONDS) -> None:
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, args=(directory, seconds), name="ckpttool-git", daemon=True)
        self._thread.start()

    def fields(self, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """Return REVISION and DIRTY; nothing without a repository, without git, or without an answer in time."""
        self._thread.join(timeout)
        return {} if self._thread.is_alive() else dict(self._found)

    def _ask(self, directory: str, seconds: float) -> None:
        # One process for both; without the optional lock it does not disturb other uses of the repository.
        command = ["git", "-C", directory, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            done = subprocess.run(  # noqa: S603  a fixed command
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True, env=environment
            )
        except (OSError, subprocess.SubprocessError, ValueError):
            return
        # Source: git's documentation of ``status --porcelain=v2 --branch``.
        status = done.stdout.decode("utf-8", "replace")
        if found := re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", status, re.MULTILINE):
            self._found = {REVISION: found[1], DIRTY: any(not line.startswith("#") for line in status.splitlines())}


@functools.cache
def git_state() -> GitState:
    """Return the state of the repository of the running script; the first call starts git, and does not wait.

    A script among installed packages, such as the script of a worker of Ray, is not the user's code: its repository
    would be the one that contains the virtual environment.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = os.path.dirname(os.path.abspath(script)) if script else os.getcwd()
    is_installed = {"site-packages", "dist-packages"} & set(directory.split(os.sep))
    return GitState(os.devnull if is_installed else directory)


def begin() -> None:
    """Start git on the first rank, so that no save has to wait for it."""
    if os.environ.get("RANK", "0") == "0":
        git_state()


def note_restored(engine: Any, checkpoint: Checkpoint) -> None:
    """Remember which checkpoint was loaded into an engine."""
    found = {
        "path": checkpoint.location,
        "tag": checkpoint.tag,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
    }
    with contextlib.suppress(TypeError):  # an engine of another kind, to which nothing can refer weakly
        _restored[engine] = found


def current_provenance(engine: Any) -> Mapping[str, Any]:
    """Return the fields of a manifest's provenance for a save of an engine. Never fails."""
    found: Mapping[str, Any] | None = None
    with contextlib.suppress(TypeError):
        found = _restored.get(engine)
    return {**git_state().fields(), **({} if found is None else {RESTORED_FROM: found})}
