"""Let ranks agree: each sends a message, rank 0 decides, and all ranks receive the decision."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpttool.errors import CkptError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LOG = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
SHORTEST_PAUSE = 0.001
"""Minimum seconds between two queries of the store."""
LONGEST_PAUSE = 0.25
PAUSE_GROWTH = 1.15
"""A pause is a seventh of the time waited so far."""
"""Maximum seconds between two queries of the store; many ranks query one server."""
DECISION_SECONDS = 20.0
"""Seconds that rank 0 may take to decide after the last message, or after the timeout."""
ACKNOWLEDGE_SECONDS = 10.0
"""Seconds that rank 0 waits until all ranks have the last decision: its process may run the store."""


class RankError(CkptError):
    """A rank failed, or sent no message in time; raised on every rank."""


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that ``Ranks`` uses."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""

    def delete_key(self, key: str) -> bool:
        """Delete a value."""


class Ranks:
    """The ranks of a run.

    Uses no process group of the train loop, so that a background thread can agree while the loop trains, and so that
    errors can name a missing rank.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        store: A store that all ranks reach.
        name: Prefix of the keys; the same on all ranks, and unique.
    """

    def __init__(self, rank: int, size: int, store: Store, name: str) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._round = 0
        self._old_keys: list[str] = []

    def agree(
        self,
        what: str,
        message: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout: float,
        last: bool = False,
        call: Any = None,
    ) -> Any:
        """Send a message to rank 0, and return its decision on the messages of all ranks.

        A call that not all ranks make times out on those that do. A rank that did not make it skips it in its next
        call, unless that has the same ``what`` and ``call``: then this rank was only late, and gets the same error.

        Args:
            what: Name of the task, for error messages.
            message: Message of this rank: JSON data.
            decide: Called on rank 0 with the messages of all ranks; returns JSON data. An error of ``decide`` is raised
                on every rank.
            timeout: Seconds to wait for the other ranks.
            last: Whether to wait until all ranks have the decision.
            call: JSON data that differs between two calls with the same ``what``, such as the step.

        Raises:
            RankError: A rank sent no message in time.
            CkptError: The error of ``decide``.
        """
        own = json.loads(json.dumps([what, call]))
        end = time.monotonic() + timeout
        while True:
            self._round += 1
            key = f"{self._name}/{self._round}"
            decision = self._decision(key, what, own, message, decide, end, timeout)
            timed_out = decision.get("timed_out")
            concerned = timed_out is None or timed_out == own
            self._acknowledge(key, what, wait=last and concerned, keep=timed_out is not None)
            if concerned:
                break
            LOG.warning("rank %d left out a call: %s", self.rank, error_from_data(decision["error"]))
        if "error" in decision:
            raise error_from_data(decision["error"])
        return decision["value"]

    def _decision(
        self,
        key: str,
        what: str,
        own: Any,
        message: Any,
        decide: Callable[[list[Any]], Any],
        end: float,
        timeout: float,
    ) -> dict[str, Any]:
        """Send the message of this rank, and return the decision; ``timed_out`` in it is a call that timed out."""
        decided = f"{key}/decision"
        if self.rank == 0 or not self._check([decided], what):
            self._put(f"{key}/{self.rank}", message, what)
            self._call(what, self._store.add, f"{key}/count", 1)
        if self.rank == 0:
            self._put(decided, self._decide(key, what, own, decide, end), what)
        elif not self._wait(lambda: self._check([decided], what), end + DECISION_SECONDS):
            self._put(f"{key}/given_up", own, what)
            raise RankError(what, f"rank 0 was not heard of for {timeout + DECISION_SECONDS:,.0f} s", _log_hint(0))
        decision: dict[str, Any] = json.loads(self._call(what, self._store.get, decided))
        return decision

    def _decide(self, key: str, what: str, own: Any, decide: Callable[[list[Any]], Any], end: float) -> dict[str, Any]:
        given_up = [f"{key}/given_up"]
        self._wait(lambda: self._message_count(key, what) >= self.size or self._check(given_up, what), end)
        if self._check(given_up, what):  # this rank did not make a call, or was late
            call = json.loads(self._call(what, self._store.get, given_up[0]))
            return {"error": error_to_data(late_error(call[0], [0])), "timed_out": call}
        if self._message_count(key, what) < self.size:
            late = [r for r in range(self.size) if not self._check([f"{key}/{r}"], what)]
            return {"error": error_to_data(late_error(what, late)), "timed_out": own}
        messages = [json.loads(self._call(what, self._store.get, f"{key}/{r}")) for r in range(self.size)]
        if len({frozenset(m) if isinstance(m, dict) else None for m in messages}) > 1:
            hint = "make the same calls on every rank, in one order"
            return {"error": error_to_data(RankError(what, "ranks are in different calls", hint))}
        try:
            return {"value": decide(messages)}
        except CkptError as error:
            return {"error": error_to_data(error)}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"error": error_to_data(RankError(what, f"rank 0 failed with {text}", "see its log"))}

    def _acknowledge(self, key: str, what: str, *, wait: bool, keep: bool) -> None:
        """Count the ranks that have the decision; rank 0 deletes the keys of the previous round.

        With ``keep`` the decision is not deleted: ranks that did not make the call read it in their next one, however
        late.
        """
        acknowledged = f"{key}/acknowledged"
        self._call(what, self._store.add, acknowledged, 1)
        if self.rank:
            return
        if wait:
            self._wait(
                lambda: self._call(what, self._store.add, acknowledged, 0) >= self.size,
                time.monotonic() + ACKNOWLEDGE_SECONDS,
            )
        for old in self._old_keys:
            self._call(what, self._store.delete_key, old)
        names = [*map(str, range(self.size)), "count", "acknowledged", *(("given_up",) if keep else ("decision",))]
        self._old_keys = [f"{key}/{name}" for name in names]

    def _message_count(self, key: str, what: str) -> int:
        return int(self._call(what, self._store.add, f"{key}/count", 0))

    def _put(self, key: str, value: Any, what: str) -> None:
        self._call(what, self._store.set, key, json.dumps(value))

    def _check(self, keys: list[str], what: str) -> bool:
        return bool(self._call(what, self._store.check, keys))

    @staticmethod
    def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # base class of torch's DistNetworkError and DistStoreError
            problem = "the store of the ranks cannot be reached"
            raise RankError(what, problem, "the process that holds it may have ended: see the log of rank 0") from error

    @staticmethod
    def _wait(condition: Callable[[], bool], end: float) -> bool:
        pause = SHORTEST_PAUSE
        while not condition():
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, LONGEST_PAUSE)
        return True


class Alone(Ranks):
    """A run with only one rank."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def agree(
        self,
        what: str,
        message: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout: float,
        last: bool = False,
        call: Any = None,
    ) -> Any:
        """Return the decision on the only message."""
        return decide([message])


def agree_to_begin(
    ranks: Ranks,
    what: str,
    arguments: Mapping[str, Any],
    check: Callable[[], None],
    *,
    timeout: float,
    decide: Callable[[], Any] | None = None,
    hints: Mapping[str, str] | None = None,
) -> Any:
    """Check that all ranks are ready and have the same arguments, before any of them waits in a collective.

    Args:
        ranks: The ranks.
        what: Name of the task, for error messages.
        arguments: JSON data that must be the same on all ranks.
        check: Raises an error on a rank that is not ready.
        timeout: Seconds that a rank may lag.
        decide: Called on rank 0 if all ranks are ready; returns JSON data for all ranks.
        hints: By argument, the hint of the error if it differs.

    Raises:
        RankError: Another rank is late, is not ready or has other arguments.
        Exception: The error of ``check`` on this rank.
    """
    own: Exception | None = None
    try:
        check()
    except Exception as error:  # raised below, after the other ranks have the message
        own = error
    message = {"arguments": dict(arguments), "error": None if own is None else _in_words(own)}

    def decide_to_begin(messages: list[Any]) -> Any:
        for rank, other in enumerate(messages):
            if other["error"]:
                raise RankError(what, f"rank {rank}: {other['error']}", "nothing was changed")
        first = messages[0]["arguments"]
        for rank, other in enumerate(messages):
            for name, value in other["arguments"].items():
                if value != first[name]:
                    problem = f"rank 0 has {name} {brief(first[name], 200)}, rank {rank} has {brief(value, 200)}"
                    raise RankError(what, problem, (hints or {}).get(name, "give all ranks the same"))
        return None if decide is None else decide()

    try:
        return ranks.agree(what, message, decide_to_begin, timeout=timeout, call=message["arguments"])
    except CkptError:
        if own is not None:
            raise own from None
        raise


def exchange(ranks: Ranks, what: str, own: Callable[[], T], decide: Callable[[list[T]], R], *, timeout: float) -> R:
    """Return the decision of rank 0 on a value of each rank; an error of any rank is raised on all.

    Args:
        ranks: The ranks.
        what: Name of the task, for error messages.
        own: Returns the value of this rank: JSON data.
        decide: Called on rank 0 with the values of all ranks; returns JSON data.
        timeout: Seconds that a rank may lag.

    Raises:
        CkptError: The error of ``own`` on the first rank that failed, with its number, or of ``decide``.
        RankError: A rank sent no value in time.
    """
    message: dict[str, Any] = {"value": None, "error": None}
    try:
        message["value"] = own()
    except CkptError as error:
        message["error"] = error_to_data(error)
    except Exception as error:
        LOG.warning("%s: this rank failed", what, exc_info=error)
        message["error"] = error_to_data(RankError(what, f"{type(error).__name__}: {error}", "see its log"))

    def decided(messages: list[Any]) -> R:
        for rank, other in enumerate(messages):
            if other["error"] is not None:
                failed = error_from_data(other["error"])
                raise type(failed)(failed.path, f"rank {rank}: {failed.problem}", failed.hint, failed.options)
        return decide([other["value"] for other in messages])

    found: R = ranks.agree(what, message, decided, timeout=timeout)
    return found


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"


def late_error(what: str, late: list[int]) -> RankError:
    """Return the error for ranks that sent no message in time."""
    names = ", ".join(map(str, late[:20])) + (" ..." if len(late) > 20 else "")
    noun = f"rank {names} was" if len(late) == 1 else f"ranks {names} were"
    return RankError(what, f"{noun} not heard of in time", _log_hint(late[0]))


def _log_hint(rank: int) -> str:
    return f"call this on every rank; see the log of rank {rank}, or raise timeout="


def error_to_data(error: CkptError) -> list[Any]:
    """Convert an error to JSON data for a message between ranks: the name of its class, and its four arguments."""
    return [type(error).__name__, error.path, error.problem, error.hint, list(error.options)]


def error_from_data(data: Sequence[Any]) -> CkptError:
    """Convert JSON data of ``error_to_data`` back to the error; a ``RankError`` if its class is unknown here."""
    kind, path, problem, hint, options = data
    return _error_classes(CkptError).get(kind, RankError)(path, problem, hint, tuple(options))


def _error_classes(base: type[CkptError]) -> dict[str, type[CkptError]]:
    """Return an error class and its subclasses, by name."""
    classes = {base.__name__: base}
    for subclass in base.__subclasses__():
        classes |= _error_classes(subclass)
    return classes
