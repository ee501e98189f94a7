from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError, StorageError
from ckpttool.integrations.torch.collectives import agree_on_all_ranks
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
        first = ranks.agree("save", {"mine": ranks.rank}, lambda said: {"all": said}, timeout=5)
        return [first, ranks.agree("save", ranks.rank * 10, sum, timeout=5, last=True)]

    outcomes = make(size).do(work)
    expected = [{"all": [{"mine": r} for r in range(size)]}, sum(10 * r for r in range(size))]
    assert [o.result for o in outcomes] == [expected] * size


def test_late_ranks_are_named(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank not in {1, 3}:
            ranks.agree("root/step1", 0, lambda said: said, timeout=5)

    outcomes = make(4).do(work)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RankError)
        hint = "call this on every rank; see the log of rank 1, or raise timeout="
        assert str(outcomes[rank].error) == f"root/step1: ranks 1, 3 were not heard of in time; {hint}"


def test_first_rank_that_is_late_is_named(make: Callable[[int], crew.Crew]) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank:
            ranks.agree("root/step1", 0, lambda said: said, timeout=5)

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

    outcomes = make(3).do(lambda ranks: ranks.agree("what", 0, decide, timeout=5))
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
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_ranks_with_its_options(
    make: Callable[[int], crew.Crew], raised: Exception, size: int
) -> None:
    failing = size - 1
    outcomes = make(size).do(
        lambda ranks: agree_on_all_ranks(ranks, "root/step1", raised if ranks.rank == failing else None, timeout=5)
    )
    where = f"rank {failing}: " if size > 1 else ""
    if isinstance(raised, CkptError):
        expected = type(raised)(raised.path, where + raised.problem, raised.hint, raised.options)
    else:
        problem = f"{where}ZeroDivisionError: nothing by 0"
        expected = LayoutError("loading", problem, "see the output of that rank")
    assert {type(o.error) for o in outcomes} == {type(expected)}
    assert {o.error.args for o in outcomes if o.error is not None} == {expected.args}


def test_ranks_go_on_after_a_failure(make: Callable[[int], crew.Crew]) -> None:
    team = make(3)

    def decide(said: list[Any]) -> None:
        raise StorageError("file", "no space left", "free some")

    assert not any(o.succeeded for o in team.do(lambda ranks: ranks.agree("what", 0, decide, timeout=5)))
    assert [o.result for o in team.do(lambda ranks: ranks.agree("what", 1, sum, timeout=5))] == [3] * 3


def test_ranks_in_different_calls_are_refused_on_all_ranks(make: Callable[[int], crew.Crew]) -> None:
    outcomes = make(3).do(lambda ranks: ranks.agree("what", {"save": 1} if ranks.rank else {"load": 1}, len, timeout=5))
    assert {str(o.error) for o in outcomes} == {
        "what: ranks are in different calls; make the same calls on every rank, in one order"
    }


def test_ranks_go_on_after_one_was_late(make: Callable[[int], crew.Crew]) -> None:
    team = make(3)

    def late(ranks: Ranks) -> None:
        if ranks.rank != 2:
            ranks.agree("what", 0, sum, timeout=5)

    assert [o.succeeded for o in team.do(late)] == [False, False, True]

    def after_all(ranks: Ranks) -> Any:
        if ranks.rank == 2:  # it comes to what the others have given up
            with pytest.raises(RankError, match="rank 2 was not heard of in time"):
                ranks.agree("what", 0, sum, timeout=5)
        return ranks.agree("what", 1, sum, timeout=5)

    assert [o.result for o in team.do(after_all)] == [3] * 3


@pytest.mark.parametrize("absent", [(1,), (0,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_not_all_ranks_made_fails_alone(
    make: Callable[[int], crew.Crew], caplog: pytest.LogCaptureFixture, absent: tuple[int, ...], times: int
) -> None:
    team = make(3)

    def save(ranks: Ranks, step: int) -> Any:
        return ranks.agree("root", step, sum, timeout=5, last=True, call=step)

    for step in range(times):
        outcomes = team.do(lambda ranks, step=step: None if ranks.rank in absent else save(ranks, step))  # type: ignore[misc]
        assert [rank for rank, o in enumerate(outcomes) if o.succeeded] == list(absent)
    for step in range(times, times + 3):
        began = team.clock.monotonic()
        outcomes = team.do(lambda ranks, step=step: save(ranks, step))  # type: ignore[misc]
        assert [o.result for o in outcomes] == [3 * step] * 3
        assert team.clock.monotonic() - began < 1
    for rank in absent:
        assert caplog.text.count(f"rank {rank} left out a call: root: ") == times
    assert caplog.text.count("left out") == len(absent) * times


def test_the_store_does_not_grow(make: Callable[[int], crew.Crew]) -> None:
    team = make(3)
    sizes = []
    for _ in range(6):
        assert all(
            o.succeeded for o in team.do(lambda ranks: ranks.agree("what", "x" * 100, len, timeout=5, last=True))
        )
        sizes.append(len(team.store.values))
    assert sizes[2:] == [sizes[1]] * 4


def test_store_that_fails_is_no_bug(make: Callable[[int], crew.Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    team = make(2)

    def broken(key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(team.store, "set", broken)
    for outcome in team.do(lambda ranks: ranks.agree("root/step1", 0, sum, timeout=5)):
        assert isinstance(outcome.error, RankError)
        assert "the store of the ranks cannot be reached" in str(outcome.error)


def test_messages_are_plain_data(make: Callable[[int], crew.Crew]) -> None:
    team = make(2)
    team.do(lambda ranks: ranks.agree("what", {"a": [1, None, "text"]}, lambda said: said[0], timeout=5))
    assert json.loads(team.store.values["crew/1/decision"]) == {"value": {"a": [1, None, "text"]}}
