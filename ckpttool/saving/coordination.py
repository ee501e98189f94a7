"""Ranks that agree: each says something, the first decides, all hear the decision."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import CkptError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHORTEST_PAUSE = 0.001
"""Seconds between two looks at the store: at first,"""
LONGEST_PAUSE = 0.25
"""and after a while. Many ranks ask one server."""
GRACE = 20.0
"""Seconds that a decision may take after the last rank was heard, or given up."""
FAREWELL = 10.0
"""Seconds that the first rank waits for the others to hear the last decision: its process may hold the store."""


class RankError(CkptError):
    """A rank failed, or was not heard of in time; raised on every rank."""


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Let everybody get a value."""

    def get(self, key: str) -> bytes:
        """A value that was set."""

    def add(self, key: str, amount: int) -> int:
        """Count; how far it is."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these were set."""

    def delete_key(self, key: str) -> bool:
        """Forget a value."""


class Ranks:
    """The ranks of a run.

    No process group of the train loop's is used, so that a thread in the background may agree while the loop trains,
    and a rank that never comes can be named.

    Args:
        rank: Ours.
        size: How many there are.
        store: Reaches all of them.
        name: The same on all of them, and used by nobody else.
    """

    def __init__(self, rank: int, size: int, store: Store, name: str) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._round = 0
        self._spent: list[str] = []

    def agree(
        self, what: str, said: Any, decide: Callable[[list[Any]], Any], *, timeout: float, last: bool = False
    ) -> Any:
        """Say something, and hear what the first rank makes of what all have said.

        Args:
            what: What is being done, for errors.
            said: Plain data, as JSON has it.
            decide: Called on the first rank with what each has said; returns plain data. What it raises is raised on
                every rank.
            timeout: Seconds to wait for the other ranks.
            last: Wait until all have heard it.

        Raises:
            RankError: A rank was not heard of in time.
            CkptError: What ``decide`` raised.
        """
        self._round += 1
        key = f"{self._name}/{self._round}"
        began = time.monotonic()
        self._put(f"{key}/{self.rank}", said, what)
        self._call(what, self._store.add, f"{key}/count", 1)
        if self.rank == 0:
            decision = self._decide(key, what, decide, began + timeout)
            self._put(f"{key}/decision", decision, what)
        else:
            if not self._wait(lambda: self._check([f"{key}/decision"], what), began + timeout + GRACE):
                raise RankError(what, f"rank 0 was not heard of for {timeout + GRACE:,.0f} s", _look(0))
            decision = json.loads(self._call(what, self._store.get, f"{key}/decision"))
        self._say_goodbye(key, what, wait=last)
        if "error" in decision:
            kind, arguments = decision["error"]
            raise kinds_of_errors().get(kind, RankError)(*arguments)
        return decision["value"]

    def _decide(self, key: str, what: str, decide: Callable[[list[Any]], Any], end: float) -> dict[str, Any]:
        if not self._wait(lambda: self._heard(key, what) >= self.size, end):
            late = [r for r in range(self.size) if not self._check([f"{key}/{r}"], what)]
            return {"error": _as_data(late_error(what, late))}
        said = [json.loads(self._call(what, self._store.get, f"{key}/{r}")) for r in range(self.size)]
        try:
            return {"value": decide(said)}
        except CkptError as error:
            return {"error": _as_data(error)}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"error": _as_data(RankError(what, f"rank 0 failed with {text}", "see its log"))}

    def _say_goodbye(self, key: str, what: str, *, wait: bool) -> None:
        """Count who has heard; the first rank forgets what was said in the rounds before this one."""
        heard = f"{key}/heard"
        self._call(what, self._store.add, heard, 1)
        if self.rank:
            return
        if wait:
            self._wait(lambda: self._call(what, self._store.add, heard, 0) >= self.size, time.monotonic() + FAREWELL)
        for old in self._spent:
            self._call(what, self._store.delete_key, old)
        names = [*map(str, range(self.size)), "count", "decision", "heard"]
        self._spent = [f"{key}/{name}" for name in names]

    def _heard(self, key: str, what: str) -> int:
        return int(self._call(what, self._store.add, f"{key}/count", 0))

    def _put(self, key: str, value: Any, what: str) -> None:
        self._call(what, self._store.set, key, json.dumps(value))

    def _check(self, keys: list[str], what: str) -> bool:
        return bool(self._call(what, self._store.check, keys))

    @staticmethod
    def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are of this kind
            problem = "the store that the ranks meet in cannot be reached"
            raise RankError(what, problem, "the process that holds it may have ended: see the log of rank 0") from error

    @staticmethod
    def _wait(condition: Callable[[], bool], end: float) -> bool:
        pause = SHORTEST_PAUSE
        while not condition():
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return True


class Alone(Ranks):
    """A run of one rank."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def agree(
        self, what: str, said: Any, decide: Callable[[list[Any]], Any], *, timeout: float, last: bool = False
    ) -> Any:
        """Decide on what was said."""
        return decide([said])


def agree_to_begin(
    ranks: Ranks,
    what: str,
    arguments: Mapping[str, Any],
    check: Callable[[], None],
    *,
    timeout: float,
    decide: Callable[[], Any] | None = None,
) -> Any:
    """Make sure that all ranks are here, ready, and ask for the same, before any of them waits in a collective.

    Args:
        ranks: Who takes part.
        what: What is being done, for errors.
        arguments: What must be the same on all ranks; plain data.
        check: Raises on a rank that is not ready.
        timeout: Seconds that a rank may be behind the others.
        decide: Called on the first rank if all are ready; returns plain data, which all get.

    Raises:
        RankError: Another rank is late, is not ready or asks for something else.
        Exception: What ``check`` raised on this rank.
    """
    own: Exception | None = None
    try:
        check()
    except Exception as error:  # raised below, when the others know
        own = error
    said = {"arguments": dict(arguments), "error": None if own is None else _in_words(own)}

    def look(all_said: list[Any]) -> Any:
        for rank, one in enumerate(all_said):
            if one["error"]:
                raise RankError(what, f"rank {rank}: {one['error']}", "nothing was changed")
        first = all_said[0]["arguments"]
        for rank, one in enumerate(all_said):
            for name, value in one["arguments"].items():
                if value != first[name]:
                    problem = f"rank 0 has {name} {brief(first[name], 200)}, rank {rank} has {brief(value, 200)}"
                    raise RankError(what, problem, "give all ranks the same")
        return None if decide is None else decide()

    try:
        return ranks.agree(what, said, look, timeout=timeout)
    except CkptError:
        if own is not None:
            raise own from None
        raise


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"


def late_error(what: str, late: list[int]) -> RankError:
    """Ranks were not heard of in time."""
    names = ", ".join(map(str, late[:20])) + (" ..." if len(late) > 20 else "")
    noun = f"rank {names} was" if len(late) == 1 else f"ranks {names} were"
    return RankError(what, f"{noun} not heard of in time", _look(late[0]))


def _look(rank: int) -> str:
    return f"see the log of rank {rank}, or raise timeout="


def _as_data(error: CkptError) -> list[Any]:
    return [type(error).__name__, [error.path, error.problem, error.hint]]


def kinds_of_errors(base: type[CkptError] = CkptError) -> dict[str, type[CkptError]]:
    """Every class of errors by its name."""
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found |= kinds_of_errors(kind)
    return found
