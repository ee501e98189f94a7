"""Let ranks agree: each sends a message, rank 0 decides, and all ranks receive the decision."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from ckpttool.errors import CkptError
from ckpttool.messages import brief
from ckpttool.saving.pulse import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.saving.pulse import Pulse

LOG = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
TIMEOUT = 1800.0
"""Default of ``timeout``: seconds that a rank may lag."""
SHORTEST_PAUSE = 0.001
"""Minimum seconds between two queries of the store."""
LONGEST_PAUSE = 0.25
"""Maximum seconds between two queries of the store; many ranks query one server."""
PAUSE_GROWTH = 1.15
"""A pause is a seventh of the time waited so far."""
DECISION_SECONDS = 20.0
"""Seconds that rank 0 may take to decide after the last message, or after the timeout."""
ACKNOWLEDGE_SECONDS = 10.0
"""Seconds that rank 0 waits until all ranks have an error or the last decision: its process may run the store."""
LOOK_SECONDS = 1.0
"""Seconds between two looks of a rank that works whether another one has failed."""


class RankError(CkptError):
    """A rank failed, or sent no message in time; raised on every rank."""


class StoppedError(RankError):
    """This rank stopped its work because another one has failed."""


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


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """The value of a function, or its error, which is raised after all ranks have it."""

    value: T | None = None
    error: BaseException | None = None

    def result(self) -> T:
        """Return the value, or raise the error."""
        self.check()
        return cast("T", self.value)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


def attempt(function: Callable[[], T]) -> Attempt[T]:
    """Call a function that may fail on one rank, or be interrupted there."""
    try:
        return Attempt(function())
    except BaseException as error:
        return Attempt(error=error)


class Ranks:
    """The ranks of a run.

    Uses no process group of the train loop, so that a background thread can agree while the loop trains, and so that
    errors can name a missing rank.

    Each method is called on every rank, and returns on all of them or raises the same error on all of them. A call that
    not all ranks make times out on those that do. A rank that did not make it skips it in its next call, unless that
    has the same ``what`` and ``call``: then this rank was only late, and gets the same error.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        store: A store that all ranks reach.
        name: Prefix of the keys; the same on all ranks, and unique.
        timeout: Seconds that a rank may lag.
        pulse: The pulse of this rank; None if ranks have none, and a dead rank is one that lags.
    """

    def __init__(
        self, rank: int, size: int, store: Store, name: str, *, timeout: float = TIMEOUT, pulse: Pulse | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._store = store
        self._name = name
        self._pulse = pulse
        self._number = 0
        self._looked = time.monotonic()
        self._before: tuple[_Round, list[str]] = _Round(store, name, ""), []

    def exchange(
        self,
        what: str,
        own: Callable[[], Any],
        decide: Callable[[list[Any]], R],
        *,
        refuse: Callable[[Mapping[int, CkptError]], CkptError] | None = None,
    ) -> R:
        """Return the decision of rank 0 on a value of each rank. Call ``finish`` after the last one of a task.

        Args:
            what: Name of the task, for error messages.
            own: Returns the value of this rank: JSON data.
            decide: Called on rank 0 with the values of all ranks, if none failed; returns JSON data.
            refuse: Called on rank 0 with the errors of the ranks that failed, after all ranks have sent their value or
                error; returns the error to raise. Default: the first one, with its rank.

        Raises:
            CkptError: ``own`` failed on a rank, or ``decide`` on rank 0.
            RankError: A rank sent no value in time.
        """
        return self._agree(what, attempt(own), decide, refuse=refuse)

    def together(self, what: str, own: Callable[[], T], asked: Mapping[str, Any] | None = None) -> T:
        """Return the value of a function on this rank, if all ranks have the same arguments and it fails on none.

        Arguments and errors are as for ``begin``.
        """
        value, _ = self.begin(what, asked or {}, own, lambda _: None)
        return value

    def begin(
        self,
        what: str,
        asked: Mapping[str, Any],
        own: Callable[[], T],
        decide: Callable[[T], R],
        *,
        hints: Mapping[str, str] | None = None,
    ) -> tuple[T, R]:
        """Check that all ranks are ready and have the same arguments, before any of them waits in a collective.

        Args:
            what: Name of the task, for error messages.
            asked: JSON data that must be the same on all ranks.
            own: Returns a value of this rank; raises an error on a rank that is not ready.
            decide: Called on rank 0 with its value, if all ranks are ready; returns JSON data.
            hints: By argument, the hint of the error if it differs.

        Returns:
            The value of this rank, and the decision of rank 0.

        Raises:
            CkptError: As for ``exchange``.
            RankError: A rank has other arguments, or sent none in time.
        """
        ready = attempt(own)

        def decide_if_same(messages: list[Any]) -> R:
            check_same(what, messages, hints or {})
            return decide(ready.result())

        told = Attempt(dict(asked), ready.error)
        decided = self._agree(what, told, decide_if_same, call=dict(asked), kind=sorted(asked))
        return ready.result(), decided

    def on_first(self, what: str, decide: Callable[[], R], *, call: Any = None) -> R:
        """Call a function on rank 0; return its JSON result, or raise its error, on all ranks.

        Rank 0 waits until the others have the result: its process may end then, and may run their store.

        Args:
            what: Name of the task, for error messages.
            decide: The function.
            call: JSON data that differs between two calls with the same ``what``, such as the step.

        Raises:
            CkptError: The error of ``decide``.
            RankError: A rank made no call in time.
        """
        decided = self._agree(what, Attempt(None), lambda _: decide(), call=call, kind="on_first")
        self.finish()
        return decided

    def finish(self) -> None:
        """Wait on rank 0 until the others have its last decision: its process may end then, and may run their store."""
        last, _ = self._before
        if self.rank == 0:
            _wait(lambda: last.count(ACKNOWLEDGED) >= last.count(SENT), time.monotonic() + ACKNOWLEDGE_SECONDS)

    def check_others(self) -> None:
        """Check that no other rank has failed before the next call; call it often in long work before one.

        Raises:
            StoppedError: One has failed, or the next call has already ended without this rank.
        """
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        coming = _Round(self._store, f"{self._name}/{self._number + 1}", "this rank")
        if coming.has(FAILED) or coming.has(DECISION):
            raise StoppedError(coming.what, "stopped, because another rank has failed", "see the error of that rank")

    def _agree(
        self,
        what: str,
        own: Attempt[Any],
        decide: Callable[[list[Any]], R],
        *,
        refuse: Callable[[Mapping[int, CkptError]], CkptError] | None = None,
        call: Any = None,
        kind: Any = None,
    ) -> R:
        """Send a value or an error to rank 0, and return its decision on the values of all ranks.

        ``kind`` is JSON data that is the same on ranks that make the same call.
        """
        failed = None if own.error is None else _as_ckpt_error(what, own.error)
        if failed is not own.error:
            LOG.warning("%s: this rank failed", what, exc_info=own.error)
        message = {"kind": kind, "value": own.value, "error": None if failed is None else error_to_data(failed)}

        def decide_if_none_failed(messages: list[Any]) -> R:
            if any(other["kind"] != kind for other in messages):
                raise RankError(what, "ranks are in different calls", "make the same calls on every rank, in one order")
            failures = {rank: error_from_data(m["error"]) for rank, m in enumerate(messages) if m["error"] is not None}
            failures = {rank: e for rank, e in failures.items() if not isinstance(e, StoppedError)} or failures
            if failures:
                raise _first_of(failures, self.size) if refuse is None else refuse(failures)
            return decide([other["value"] for other in messages])

        try:
            return cast("R", self._decided(what, message, decide_if_none_failed, call))
        except CkptError as error:
            if own.error is not None and not isinstance(own.error, Exception):
                raise own.error from None  # an interrupt
            raise error from own.error

    def _decided(self, what: str, message: Any, decide: Callable[[list[Any]], Any], call: Any) -> Any:
        """Send a message to rank 0, and return its decision, or raise its error.

        Rank 0 waits until the others have an error, as its process may end with it.
        """
        own = json.loads(json.dumps([what, call]))
        end = time.monotonic() + self.timeout
        while True:
            self._number += 1
            now = _Round(self._store, f"{self._name}/{self._number}", what)
            decision = self._decision(now, own, message, decide, end)
            timed_out = decision.get("timed_out")
            concerned = timed_out is None or timed_out == own
            now.add(ACKNOWLEDGED)
            if self.rank == 0:
                self._tidy(now, wait=concerned and "error" in decision, keep=timed_out is not None)
            if concerned:
                break
            LOG.warning("rank %d left out a call: %s", self.rank, error_from_data(decision["error"]))
        if "error" in decision:
            raise error_from_data(decision["error"])
        return decision["value"]

    def _decision(
        self, now: _Round, own: Any, message: Any, decide: Callable[[list[Any]], Any], end: float
    ) -> dict[str, Any]:
        """Send the message of this rank, and return the decision; ``timed_out`` in it is a call that timed out."""
        if self.rank == 0 or not now.has(DECISION):
            now.put(str(self.rank), message)
            if message["error"] is not None:
                now.put(FAILED, self.rank)
            now.add(SENT)
        if self.rank == 0:
            decision = self._decide(now, own, decide, end)
            now.put(DECISION, decision)
            return decision
        watch = Watch(self._pulse, lambda: [0])
        _wait(lambda: now.has(DECISION) or bool(watch.lost()), end + DECISION_SECONDS)
        if not now.has(DECISION):
            now.put(GIVEN_UP, own)
            if watch.lost():
                raise _lost_error(now.what, watch)
            seconds = self.timeout + DECISION_SECONDS
            raise RankError(now.what, f"rank 0 was not heard of for {seconds:,.0f} s", _log_hint(0))
        found: dict[str, Any] = now.get(DECISION)
        return found

    def _decide(self, now: _Round, own: Any, decide: Callable[[list[Any]], Any], end: float) -> dict[str, Any]:
        """Wait for all messages, and decide, on rank 0."""

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if not now.has(str(rank))]

        watch = Watch(self._pulse, missing)
        _wait(lambda: now.count(SENT) >= self.size or now.has(GIVEN_UP) or bool(watch.lost()), end)
        if now.has(GIVEN_UP):  # this rank did not make a call, or was late
            call = now.get(GIVEN_UP)
            return {"error": error_to_data(late_error(call[0], [0])), "timed_out": call}
        late = missing() if now.count(SENT) < self.size else []
        if late:  # a rank counts its message after it has put it
            error = _lost_error(now.what, watch) if watch.lost() else late_error(now.what, late)
            return {"error": error_to_data(error), "timed_out": own}
        messages = [now.get(str(rank)) for rank in range(self.size)]
        try:
            return {"value": decide(messages)}
        except CkptError as error:
            return {"error": error_to_data(error)}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"error": error_to_data(RankError(now.what, f"rank 0 failed with {text}", "see its log"))}

    def _tidy(self, now: _Round, *, wait: bool, keep: bool) -> None:
        """Delete the keys of the round before, on rank 0.

        Args:
            now: The round.
            wait: Whether to wait until the ranks that sent a message have its decision.
            keep: Whether to keep its decision: ranks that did not make the call read it in their next one.
        """
        before, names = self._before
        self._before = now, [*map(str, range(self.size)), SENT, FAILED, ACKNOWLEDGED, GIVEN_UP if keep else DECISION]
        if wait:
            self.finish()
        for name in names:
            before.delete(name)


SENT, FAILED, DECISION, ACKNOWLEDGED, GIVEN_UP = "count", "failed", "decision", "acknowledged", "given_up"


class _Round:
    """The values of one exchange in the store, as JSON data, in this order.

    * ``RANK``: the message of that rank; ``SENT`` counts them. ``FAILED``: the last rank whose message is an error.
    * ``GIVEN_UP``: the call of a rank that rank 0 has kept waiting too long. Rank 0 decides when all have sent their
      message, when a rank has given up, or after the timeout; the last two are the error of a late call.
    * ``DECISION``: a value or an error for all ranks; with ``timed_out``, the call that was late.
    * ``ACKNOWLEDGED``: the number of ranks that have read the decision. In the next round rank 0 deletes the others; it
      keeps the decision of a late call.

    Args:
        store: The store.
        prefix: Prefix of the keys.
        what: Name of the task, for errors.
    """

    def __init__(self, store: Store, prefix: str, what: str) -> None:
        self._store = store
        self._prefix = prefix
        self.what = what

    def put(self, name: str, value: Any) -> None:
        self._call(self._store.set, self._key(name), json.dumps(value))

    def get(self, name: str) -> Any:
        return json.loads(self._call(self._store.get, self._key(name)))

    def has(self, name: str) -> bool:
        return bool(self._call(self._store.check, [self._key(name)]))

    def add(self, name: str) -> None:
        self._call(self._store.add, self._key(name), 1)

    def count(self, name: str) -> int:
        return int(self._call(self._store.add, self._key(name), 0))

    def delete(self, name: str) -> None:
        self._call(self._store.delete_key, self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # base class of torch's DistNetworkError and DistStoreError
            problem = "the store of the ranks cannot be reached"
            hint = "the process that holds it may have ended: see the log of rank 0"
            raise RankError(self.what, problem, hint) from error


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

    def check_others(self) -> None:
        """Return at once."""

    def finish(self) -> None:
        """Return at once."""

    def _agree(
        self,
        what: str,
        own: Attempt[Any],
        decide: Callable[[list[Any]], R],
        *,
        refuse: Callable[[Mapping[int, CkptError]], CkptError] | None = None,
        call: Any = None,
        kind: Any = None,
    ) -> R:
        """Return the decision on the only value."""
        if isinstance(own.error, Exception) and refuse is not None:
            raise refuse({0: _as_ckpt_error(what, own.error)}) from own.error
        return decide([own.result()])


def check_same(what: str, arguments: Sequence[Mapping[str, Any]], hints: Mapping[str, str]) -> None:
    """Compare the arguments of all ranks with the arguments of the first.

    Raises:
        RankError: A rank has another argument.
    """
    first = arguments[0]
    for rank, other in enumerate(arguments):
        for name, value in other.items():
            if value != first[name]:
                problem = f"rank 0 has {name} {brief(first[name], 200)}, rank {rank} has {brief(value, 200)}"
                raise RankError(what, problem, hints.get(name, "give all ranks the same"))


def _first_of(failures: Mapping[int, CkptError], size: int) -> CkptError:
    """Return the error of the first rank that failed, with its number, unless all ranks have the same error."""
    rank, failed = next(iter(failures.items()))
    if len(failures) == size and len({error.args for error in failures.values()}) == 1:
        return failed
    return type(failed)(failed.path, f"rank {rank}: {failed.problem}", failed.hint, failed.options)


def _as_ckpt_error(what: str, error: BaseException) -> CkptError:
    return error if isinstance(error, CkptError) else RankError(what, f"{type(error).__name__}: {error}", "see its log")


def late_error(what: str, late: list[int]) -> RankError:
    """Return the error for ranks that sent no message in time."""
    verb = "was" if len(late) == 1 else "were"
    return RankError(what, f"{_names(late)} {verb} not heard of in time", _log_hint(late[0]))


def _lost_error(what: str, watch: Watch) -> RankError:
    """Return the error for ranks whose pulse has ended."""
    lost = watch.lost()
    problem = f"{_names(lost)} gave no sign of life for {watch.seconds:,.0f} s"
    return RankError(what, problem, f"its process has ended or is stopped: see the log of rank {lost[0]}")


def _names(ranks: list[int]) -> str:
    """Return numbers of ranks, with their noun."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:20]))}{' ...' * (len(ranks) > 20)}"


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
