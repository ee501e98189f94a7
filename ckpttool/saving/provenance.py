"""Find out what a run is made of, for the manifests of its saves: the revision of its code, and its command line."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from ckpttool.commit.provenance import COMMAND, DIRTY, MAX_ARGUMENTS, REVISION
from ckpttool.messages import HIDDEN, hide_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GIT_SECONDS = 20.0
"""Most seconds that git may run; it reads every tracked file's state, on a slow network file system too."""
WAIT_SECONDS = 2.0
"""Most seconds that a save waits for git. A save that does not get an answer records none; the next one does."""
MAX_CHARACTERS = 4096
"""Most characters of one argument that are kept."""
SECRETS = frozenset({
    "token", "password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey", "auth", "pat",
})  # fmt: skip
"""Words of option names whose values are masked."""
KEYS = frozenset({"api", "access", "secret", "private", "account", "auth", "signing", "encryption"})
"""Words before "key" in such names."""
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|ASIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
"""Secrets that are known by their form: of Hugging Face, OpenAI, GitHub, GitLab, AWS and Slack, and JSON web tokens."""


class GitState:
    """The commit that the code of this process is checked out at, asked of git once, in a thread."""

    def __init__(self, directory: str) -> None:
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, args=(directory,), name="ckpttool-git", daemon=True)
        self._thread.start()

    def fields(self, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """Return REVISION and DIRTY; nothing without a repository, without git, or without an answer in time."""
        self._thread.join(timeout)
        return {} if self._thread.is_alive() else dict(self._found)

    def _ask(self, directory: str) -> None:
        # One process for both; without the optional lock it does not disturb other uses of the repository.
        command = ["git", "-C", directory, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            done = subprocess.run(  # noqa: S603  a fixed command
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS, check=True, env=environment
            )
        except (OSError, subprocess.SubprocessError, ValueError):
            return
        self._found = _parsed(done.stdout.decode("utf-8", "replace"))


def _parsed(status: str) -> dict[str, Any]:
    """Parse what ``git status --porcelain=v2 --branch`` prints; the source is git's documentation of that format."""
    lines = status.splitlines()
    found = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", status, re.MULTILINE)
    if found is None:
        return {}
    return {REVISION: found[1], DIRTY: any(not line.startswith("#") for line in lines)}


@functools.cache
def git_state() -> GitState:
    """Return the state of the repository of the running script; the first call starts git, and does not wait."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return GitState(os.path.dirname(os.path.abspath(script)) if script else os.getcwd())


def begin() -> None:
    """Start git on the first rank, so that no save has to wait for it."""
    if os.environ.get("RANK", "0") == "0":
        git_state()


def run_provenance(arguments: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Return the fields of this process: REVISION, DIRTY and COMMAND. Never fails.

    Args:
        arguments: The command line; None for that of this process.
    """
    return {**git_state().fields(), COMMAND: masked(sys.orig_argv if arguments is None else arguments)}


def masked(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of options like ``--token``, and without secrets of a known form."""
    result: list[str] = []
    hides_next = False
    for argument in arguments[:MAX_ARGUMENTS]:
        if hides_next and not argument.startswith("-"):
            result.append(HIDDEN)
            hides_next = False
            continue
        name, equals, _ = argument.partition("=")
        is_secret = _names_secret(name)
        hides_next = is_secret and not equals and argument.startswith("-")
        shown = f"{name}={HIDDEN}" if is_secret and equals else argument
        result.append(_TOKENS.sub(HIDDEN, hide_secrets(shown))[:MAX_CHARACTERS])
    return result


def _names_secret(name: str) -> bool:
    """Return whether an option or a key of a configuration ("--api-key", "wandb.apiKey") names a secret."""
    if any(character.isspace() or character in "/:" for character in name):
        return False
    split = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    words = [word for word in re.split(r"[-_.]+", split) if word]
    if not SECRETS.isdisjoint(words):
        return True
    return any(before in KEYS and word == "key" for before, word in itertools.pairwise(words))
