from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError, StorageError
from ckpttool.saving.coordination import RankError
from tests.faults.disks import Machine
from tests.saving import crew

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.saving.coordination import Ranks


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], crew.Crew]:
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    return lambda size: crew.Crew(size, Machine(), clock)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_receive_the_decision_of_the_first(make: Callable[[int], crew.Crew], size: int) -> None:
    def work(ranks: Ranks) -> list[Any]:
        first = ranks.exchange("save", lambda: {"mine": ranks.rank}, lambda said: {"all": said})
        second = ranks.exchange("save", lambda: ranks.rank * 10, sum)
        ranks.finish()
        return [first, second]

    outcomes = make(size).do(work)
    expected = [{"all": [{"mine": r} for r in range(size)]}, sum(10 * r for r in range(size))]
    assert [o.result for o in outcomes] == [expected] * size


def test_late_ranks_are_named(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank not in {1, 3}:
            ranks.exchange("root/step1", lambda: 0, lambda said: said)

    outcomes = make(4).do(work)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RankError)
        hint = "call this on every rank; see the log of rank 1, or raise timeout="
        assert str(outcomes[rank].error) == f"root/step1: ranks 1, 3 were not heard of in time; {hint}"


def test_first_rank_that_is_late_is_named(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank:
            ranks.exchange("root/step1", lambda: 0, lambda said: said)

    outcomes = make(3).do(work)
    assert outcomes[0].succeeded
    for rank in (1, 2):
        assert str(outcomes[rank].error).startswith("root/step1: rank 0 was not heard of for 25 s")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (StorageError("file", "no space left", "free some"), StorageError),
        (LayoutError("file", "is odd", "choose one with tag", ("tag",)), LayoutError),
        (RankError("file", "rank 1: failed", "nothing"), RankError),
        (ZeroDivisionError("nothing by 0"), RankError),
    ],
)
def test_an_error_of_the_decision_is_raised_on_all_ranks(
    make: Callable[[int], crew.Crew], raised: Exception, kind: type[CkptError]
) -> None:
    def decide(said: list[Any]) -> None:
        raise raised

    outcomes = make(3).do(lambda ranks: ranks.exchange("what", lambda: 0, decide))
    assert {type(o.error) for o in outcomes} == {kind}
    assert len({str(o.error) for o in outcomes}) == 1
    if isinstance(raised, CkptError):
        assert {o.error.args for o in outcomes if o.error is not None} == {raised.args}
    else:
        assert "rank 0 failed with ZeroDivisionError: nothing by 0" in str(outcomes[2].error)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "raised",
    [
        PlanError("root/step1", "lacks c of the model", "pass strict=False, and they keep its values", ("strict",)),
        ArgumentError("check", "is 'all', not read, full or off", "choose read, full or off", ("check",)),
        ZeroDivisionError("nothing by 0"),
        KeyboardInterrupt(),
    ],
)
@pytest.mark.parametrize("how", ["exchange", "together", "begin"])
def test_an_error_of_one_rank_is_raised_on_all_ranks_with_its_options(
    make: Callable[[int], crew.Crew], raised: BaseException, size: int, how: str
) -> None:
    failing = size - 1

    def own(ranks: Ranks) -> int:
        if ranks.rank == failing:
            raise raised
        return ranks.rank

    def work(ranks: Ranks) -> Any:
        if how == "exchange":
            return ranks.exchange("root/step1", lambda: own(ranks), len)
        if how == "together":
            return ranks.together("root/step1", lambda: own(ranks))
        return ranks.begin("root/step1", {"a": 1}, lambda: own(ranks), lambda _: 1)

    *others, failed = (o.error for o in make(size).do(work))
    if size == 1 or isinstance(raised, KeyboardInterrupt):
        assert failed is raised
    else:
        others.append(failed)
        assert failed is not None
        assert failed.__cause__ is raised
    told = f"rank {failing}: {type(raised).__name__}: {raised}"
    expected: CkptError = RankError("root/step1", told, "see its log")
    if isinstance(raised, CkptError):
        expected = type(raised)(raised.path, f"rank {failing}: {raised.problem}", raised.hint, raised.options)
    assert {type(error) for error in others} <= {type(expected)}
    assert {error.args for error in others if error is not None} <= {expected.args}
    assert len(others) == (0 if size == 1 else 2 + (failed in others))


def test_an_error_of_all_ranks_names_no_rank(make: Callable[[int], crew.Crew]) -> None:
    def own() -> None:
        raise ArgumentError("tag", "is empty", "choose another")

    outcomes = make(3).do(lambda ranks: ranks.together("root", own))
    assert {str(o.error) for o in outcomes} == {"tag: is empty; choose another"}


def test_the_first_rank_words_what_failed_on_several(make: Callable[[int], crew.Crew]) -> None:
    def own(ranks: Ranks) -> None:
        if ranks.rank:
            raise StorageError("file", f"is full on {ranks.rank}", "free some")

    def refuse(failures: Any) -> CkptError:
        return PlanError("root", f"failed on {[*failures]}: {failures[2].problem}", "nothing was saved")

    def work(ranks: Ranks) -> Any:
        return ranks.exchange("root", lambda: own(ranks), len, refuse=refuse)

    expected = PlanError("root", "failed on [1, 2]: is full on 2", "nothing was saved")
    assert {(type(o.error), str(o.error)) for o in make(3).do(work)} == {(PlanError, str(expected))}


def test_each_rank_gets_its_own_value_and_the_decision_of_the_first(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> Any:
        own = object()  # no data for a message
        value, decision = ranks.begin("root", {"a": 1}, lambda: (own, ranks.rank), lambda first: first[1] + 7)
        return value[0] is own, value[1], decision, ranks.together("root", lambda: own) is own

    assert [o.result for o in make(3).do(work)] == [(True, rank, 7, True) for rank in range(3)]


def test_arguments_that_differ_are_named(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.begin("root", {"tag": f"t{ranks.rank // 2}"}, lambda: None, lambda _: 1, hints={"tag": "choose"})

    assert {str(o.error) for o in make(3).do(work)} == {"root: rank 0 has tag 't0', rank 2 has 't1'; choose"}


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_is_called_on_the_first_rank_alone(make: Callable[[int], crew.Crew], size: int) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.on_first("root", lambda: [ranks.rank, "found"])

    assert [o.result for o in make(size).do(work)] == [[0, "found"]] * size


@pytest.mark.parametrize("how", ["on_first", "finish"])
def test_the_first_rank_waits_until_the_others_have_its_decision(how: str, make: Callable[[int], crew.Crew]) -> None:
    """Its process may end then, and hold the store of the ranks."""
    team = make(3)
    left: list[int] = []

    def work(ranks: Ranks) -> Any:
        if how == "on_first":
            found = ranks.on_first("root", lambda: 7)
        else:
            found = ranks.exchange("root", lambda: 0, lambda _: 7)
            ranks.finish()
        if ranks.rank == 0:
            left.append(int(team.store.values["crew/1/acknowledged"]))
        return found

    assert [o.result for o in team.do(work)] == [7] * 3
    assert left == [3]


def test_ranks_go_on_after_a_failure(make: Callable[[int], crew.Crew]) -> None:
    team = make(3)

    def decide(said: list[Any]) -> None:
        raise StorageError("file", "no space left", "free some")

    assert not any(o.succeeded for o in team.do(lambda ranks: ranks.exchange("what", lambda: 0, decide)))
    assert [o.result for o in team.do(lambda ranks: ranks.exchange("what", lambda: 1, sum))] == [3] * 3


@pytest.mark.parametrize("other", ["begin", "on_first", "exchange"])
def test_ranks_in_different_calls_are_refused_on_all_ranks(make: Callable[[int], crew.Crew], other: str) -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            return ranks.begin("what", {"save": 1}, lambda: 1, lambda _: 1)
        if other == "begin":
            return ranks.together("what", lambda: 1, {"load": 1})
        return ranks.on_first("what", lambda: 1) if other == "on_first" else ranks.exchange("what", lambda: 1, len)

    assert {str(o.error) for o in make(3).do(work)} == {
        "what: ranks are in different calls; make the same calls on every rank, in one order"
    }


def test_values_of_ranks_may_have_other_names(make: Callable[[int], crew.Crew]) -> None:
    outcomes = make(3).do(lambda ranks: ranks.exchange("what", lambda: {str(ranks.rank): 1}, lambda said: said))
    assert [o.result for o in outcomes] == [[{"0": 1}, {"1": 1}, {"2": 1}]] * 3


def test_ranks_go_on_after_one_was_late(make: Callable[[int], crew.Crew]) -> None:
    team = make(3)

    def late(ranks: Ranks) -> None:
        if ranks.rank != 2:
            ranks.exchange("what", lambda: 0, sum)

    assert [o.succeeded for o in team.do(late)] == [False, False, True]

    def after_all(ranks: Ranks) -> Any:
        if ranks.rank == 2:  # it comes to what the others have given up
            with pytest.raises(RankError, match="rank 2 was not heard of in time"):
                ranks.exchange("what", lambda: 0, sum)
        return ranks.exchange("what", lambda: 1, sum)

    assert [o.result for o in team.do(after_all)] == [3] * 3


@pytest.mark.parametrize("absent", [(1,), (0,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_not_all_ranks_made_fails_alone(
    make: Callable[[int], crew.Crew], caplog: pytest.LogCaptureFixture, absent: tuple[int, ...], times: int
) -> None:
    team = make(3)

    def save(ranks: Ranks, step: int) -> Any:
        return ranks.begin("root", {"step": step}, lambda: step, lambda own: own + 1)

    for step in range(times):
        outcomes = team.do(lambda ranks, step=step: None if ranks.rank in absent else save(ranks, step))  # type: ignore[misc]
        assert [rank for rank, o in enumerate(outcomes) if o.succeeded] == list(absent)
    for step in range(times, times + 3):
        began = team.clock.monotonic()
        outcomes = team.do(lambda ranks, step=step: save(ranks, step))  # type: ignore[misc]
        assert [o.result for o in outcomes] == [(step, step + 1)] * 3
        assert team.clock.monotonic() - began < 1
    for rank in absent:
        assert caplog.text.count(f"rank {rank} left out a call: root: ") == times
    assert caplog.text.count("left out") == len(absent) * times


def test_the_store_does_not_grow(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> None:
        ranks.exchange("what", lambda: "x" * 100, len)
        ranks.finish()

    team = make(3)
    sizes = []
    for _ in range(6):
        assert all(o.succeeded for o in team.do(work))
        sizes.append(len(team.store.values))
    assert sizes[2:] == [sizes[1]] * 4


def test_store_that_fails_is_no_bug(make: Callable[[int], crew.Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    team = make(2)

    def broken(key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(team.store, "set", broken)
    for outcome in team.do(lambda ranks: ranks.exchange("root/step1", lambda: 0, sum)):
        assert isinstance(outcome.error, RankError)
        assert "the store of the ranks cannot be reached" in str(outcome.error)


def test_messages_are_plain_data(make: Callable[[int], crew.Crew]) -> None:
    team = make(2)
    team.do(lambda ranks: ranks.exchange("what", lambda: {"a": [1, None, "text"]}, lambda said: said[0]))
    assert json.loads(team.store.values["crew/1/decision"]) == {"value": {"a": [1, None, "text"]}}


def test_a_message_that_is_not_counted_yet_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    ranks = crew.Crew(2, Machine(), clock)
    add = ranks.store.add

    def slow(key: str, amount: int) -> int:
        if key.endswith("count") and amount and threading.current_thread() is not threading.main_thread():
            clock.sleep(2 * crew.TIMEOUT)
        return add(key, amount)

    monkeypatch.setattr(ranks.store, "add", slow)
    outcomes = ranks.do(lambda own: own.exchange("save", lambda: own.rank, sum))
    assert [outcome.result for outcome in outcomes] == [1, 1]
