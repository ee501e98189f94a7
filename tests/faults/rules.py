"""Choose calls to fail: system calls of a disk (``disks``) and requests to an S3 server (``s3_proxy``).

A ``Rule`` names the calls and the fault, counts the calls that match, and records what it did. The places differ only
in the faults that they know.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SECONDS_TO_SETTLE = 10.0
"""Most seconds that ``Rule.fired`` waits for running calls."""


class Call(Protocol):
    """One call of the code under test."""

    @property
    def operation(self) -> str:
        """Name of the operation: ``pwrite``, ``get_object``, ..."""

    @property
    def target(self) -> str:
        """What it acts on: a path, or path and query of a URL, encoded."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for repeats of one call."""


# ------------------------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Nothing:
    """Change nothing: the rule only records the calls."""


@dataclass(frozen=True)
class Before:
    """Call a function before the call is made; it may change files or objects, or raise an error."""

    call: Callable[[Any], object]


@dataclass(frozen=True)
class Kill:
    """End the rank as SIGKILL does.

    Args:
        where: "before" the call, "amid" (half of the bytes are written), or "after" it.
        everyone: Whether all ranks die, instead of only this one.
    """

    where: str
    everyone: bool = False


@dataclass(frozen=True)
class Fail:
    """Fail with an OSError.

    Args:
        code: Name of the errno: "EIO", "ENOSPC", ...
    """

    code: str


@dataclass(frozen=True)
class Short:
    """Write half of the bytes, and say so."""


def interrupt(_: object) -> None:
    """Interrupt the code under test as Ctrl-C does; for ``Before``."""
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------------- rules


@dataclass
class Rule:
    """A fault and the calls to apply it to.

    Args:
        action: The fault.
        operation: Name of the operation, or several names; None for all.
        match: Regular expression to search in the decoded target.
        when: Further condition on the call.
        nth: The first matching call to act on, from 1.
        times: Number of calls to act on from there; None for all.
        each: Whether to count separately for each identity: with ``nth=1`` and ``times=1``, every call fails once and
            then works.
    """

    action: Any
    operation: str | Collection[str] | None = None
    match: str = ""
    when: Callable[[Any], bool] | None = None
    nth: int = 1
    times: int | None = 1
    each: bool = False
    busy: int = 0
    """Number of running calls that the rule acts on."""
    done: int = 0
    """Number of completed actions; see ``fired``."""
    matched: list[str] = field(default_factory=list)
    """Operations of all matching calls, in order."""
    _seen: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def fired(self) -> int:
        """Number of completed actions; a match alone does not count.

        A client may see the fault of a server before the server counts it; therefore this waits for running calls.
        """
        end = time.monotonic() + SECONDS_TO_SETTLE
        while self.busy and time.monotonic() < end:
            time.sleep(0.005)
        return self.done

    def due(self, call: Call) -> bool:
        """Count a call; return whether to act on it."""
        names = (self.operation,) if isinstance(self.operation, str) else self.operation
        if names is not None and call.operation not in names:
            return False
        if self.match and not re.search(self.match, unquote(call.target)):
            return False
        if self.when is not None and not self.when(call):
            return False
        self.matched.append(call.operation)
        what = call.identity if self.each else ()
        self._seen[what] = seen = self._seen.get(what, 0) + 1
        return seen >= self.nth and (self.times is None or seen < self.nth + self.times)
