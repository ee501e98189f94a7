"""Digests of ranks: sent as JSON, and merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpttool.extensions.proof.rank_digest import BOX, COPY, NO_SUM, RankDigest, WholeTensor, merge
from ckpttool.model.items import Item, TensorDigest

LARGEST = (1 << 64) - 1


def _rank(
    *pieces: tuple[int, int, int], dtype: str = "F32", is_buffer: bool = False, checksum: int = NO_SUM, **given: Any
) -> RankDigest:
    """Return a rank with parts of one tensor of four elements: place, elements and low lane of each."""
    tensors = [WholeTensor("weights", "a", dtype, (4,), is_buffer)] * len(pieces)
    rows = [[place, numel, low, 1, checksum] for place, numel, low in pieces]
    return RankDigest(tensors=tensors, rows=np.array(rows, dtype=np.uint64).reshape(-1, 5), **given)


def test_parts_add_up_and_replicas_count_once() -> None:
    found = merge([_rank((0, 2, LARGEST)), _rank((0, 2, LARGEST)), _rank((2, 2, 3))])
    assert found.mismatches == []
    assert found.state.tensors == {"weights": {"a": TensorDigest("F32", (4,), 2 << 64 | 2)}}, "modulo 2^64 in each lane"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([_rank((0, 4, 1)), _rank((0, 4, 2))], "weights of a differs between ranks 0 and 1, which have the same part"),
        ([_rank((0, 2, 1)), _rank()], "weights of a has parts of 2 elements on all ranks, of 4"),
        ([_rank((0, 2, 1)), _rank((1, 3, 1))], "weights of a has parts of 5 elements on all ranks, of 4"),
        (
            [_rank((0, 4, 1)), _rank((0, 4, 1), dtype="BF16")],
            "weights of a is BF16 [4] on rank 1, but F32 [4] on rank 0",
        ),
        ([_rank((BOX | 5, 2, 1)), _rank((BOX | 7, 1, 1))], "weights of a has parts of 3 elements on all ranks, of 4"),
    ],
)
def test_contradictions_of_ranks_are_named(ranks: list[RankDigest], told: str) -> None:
    (found,) = merge(ranks).mismatches
    assert (str(found), found.of_values) == (told, "which have the same part" in told)


def _with_sum(digest: int, checksum: int) -> RankDigest:
    return _rank((0, 4, digest), checksum=checksum)


def test_a_part_that_another_rank_digests_is_compared_by_its_checksum() -> None:
    found = merge([_with_sum(0, COPY | 7), _with_sum(5, 7), _with_sum(0, COPY | 7), _with_sum(5, NO_SUM)])
    assert found.mismatches == []
    assert found.state.tensors["weights"]["a"].value == 1 << 64 | 5, "the digest is not the first rank's"
    for ranks, told in (
        ([_with_sum(0, COPY | 8), _with_sum(5, 7)], "0 and 1"),
        ([_with_sum(5, 7), _with_sum(0, COPY | 7), _with_sum(0, COPY | 8)], "0 and 2"),
        ([_with_sum(5, 7), _with_sum(6, NO_SUM)], "0 and 1"),
        ([_with_sum(5, 0), _with_sum(0, COPY | NO_SUM - 1)], "0 and 1"),
        ([_with_sum(5, NO_SUM), _with_sum(0, COPY)], "0 and 1"),
    ):
        sent = RankDigest.of_ranks([one.to_json() for one in ranks])
        problem = f"weights of a differs between ranks {told}, which have the same part"
        assert list(map(str, merge(sent).mismatches)) == [problem]


def test_a_buffer_may_differ_between_ranks_and_the_first_counts() -> None:
    found = merge([_rank((0, 4, n), is_buffer=True) for n in (5, 6, 5)])
    assert found.mismatches == []
    assert found.state.tensors["weights"]["a"].value == 1 << 64 | 5
    five, six = (TensorDigest("F32", (4,), 1 << 64 | n) for n in (5, 6))
    item = Item("state", "weights", "a")
    assert found.apart == {item: {five: [0, 2], six: [1]}}
    assert merge([_rank((0, 4, 5), is_buffer=True), _rank()]).apart == {item: {five: [0], None: [1]}}
    assert merge([_rank((0, 4, 5), is_buffer=True)] * 2).apart == {}


def test_numbers_of_ranks_must_agree_unless_they_are_of_partitions() -> None:
    for partitioned in (False, True):
        ranks = [
            _rank((0, 4, 1), numbers={"step": {"a": 3.0}, "d": {"a": n}}, partitioned=partitioned) for n in (1.0, 2.0)
        ]
        found = merge(ranks)
        assert list(map(str, found.contradictions)) == (
            [] if partitioned else ["d of a is 2 on rank 1, but 1 on rank 0"]
        )
        assert [*found.unproven] == (["d"] if partitioned else [])
        assert ("d" in found.state.numbers) != partitioned
        assert found.state.numbers["step"] == {"a": 3.0}


def test_values_of_ranks_must_agree_but_for_the_first_ranks_and_their_own() -> None:
    ranks = [
        _rank((0, 4, 1), values={"scheduler.t": "1", "client_state.x": "2"}, own={"rank_state": "a"}),
        _rank((0, 4, 1), values={"scheduler.t": "1", "client_state.x": "3"}, own={"rank_state": "b"}),
        _rank((0, 4, 1), values={}, own={"rank_state": "c"}),
    ]
    found = merge(ranks)
    assert list(map(str, found.contradictions)) == ["scheduler.t is missing on rank 2, but 1 on ranks 0, 1"]
    assert found.state.differing == frozenset({"client_state.x"})
    assert found.state.values == {
        "scheduler.t": "1", "client_state.x": "2",
        "rank_state of rank 0": "a", "rank_state of rank 1": "b", "rank_state of rank 2": "c",
    }  # fmt: skip


def test_a_rank_is_the_same_after_it_was_sent() -> None:
    rank = _rank(
        (0, 2, LARGEST), (BOX | 9, 2, 5), numbers={"step": {"a": 3.0}}, groups=[{"lr": "0.1"}], group_of={"a": 0},
        values={"global_steps": "3"}, own={"rank_state": "x"}, aliases={"b": "a"}, unproven={"m": "why"},
        partitioned=True, frozen=["c"], ungrouped=["e"], types={"step": {"a": "F32"}}, trains=True, others=["d"],
        pending="gradients",
    )  # fmt: skip
    both = RankDigest.of_ranks([rank.to_json(), rank.to_json()])
    for again in both:
        assert np.array_equal(again.rows, rank.rows)
        fields = [name for name in RankDigest.__dataclass_fields__ if name != "rows"]
        assert {name: getattr(again, name) for name in fields} == {name: getattr(rank, name) for name in fields}
    assert both[0].groups is both[1].groups, "ranks that sent the same text share the objects"


def _with_state(*rows: tuple[str, int, int], low: int = 1) -> RankDigest:
    """Return a rank with parts of two states of one tensor of four elements: state, place and elements of each."""
    tensors = [WholeTensor(key, "a", "F32", (4,)) for key, _, _ in rows]
    table = [[place, numel, low, 1, NO_SUM] for _, place, numel in rows]
    return RankDigest(tensors=tensors, rows=np.array(table, dtype=np.uint64))


def test_each_rank_has_the_same_elements_of_a_weight_and_of_its_states() -> None:
    whole = [_with_state(("weights", at, 2), ("exp_avg", at, 2)) for at in (0, 2)]
    assert merge(whole).mismatches == []
    cut = [_with_state(("weights", 0, 2), ("exp_avg", 0, 1)), _with_state(("weights", 2, 2), ("exp_avg", 1, 3))]
    told = ["exp_avg of a has other elements than the weights on ranks 0, 1"]
    assert list(map(str, merge(cut).mismatches)) == told
    lacking = [_with_state(("weights", 0, 4), ("exp_avg", 0, 4)), _with_state(("weights", 0, 4))]
    assert list(map(str, merge(lacking).mismatches)) == ["exp_avg of a is missing on rank 1"]
    assert merge(lacking, whole=False).mismatches == []


def test_a_weight_that_is_gathered_has_the_values_of_its_partitions() -> None:
    for places in ((0, 4), (0, 2)):
        rank = _with_state(("weights", *places), ("gathered", 0, 4))
        other = [_with_state(("weights", 2, 2), low=5)] if places == (0, 2) else []
        found = [str(one) for one in merge([rank, *other], whole=False).mismatches]
        assert found == (["weights of a is not the same gathered and partitioned"] if other else [])
