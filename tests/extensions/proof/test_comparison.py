"""Faults drawn by seeds, in every layout of ranks: each is named with its tensor and rank, and nothing else is."""

from __future__ import annotations

import argparse
import datetime
import decimal
import math
import pathlib
import random
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckpttool.extensions.proof.comparison import Comparison, Reason, Scope, compare  # noqa: E402
from ckpttool.extensions.proof.live_state import LiveState, values_of  # noqa: E402
from ckpttool.extensions.proof.rank_digest import OF_OTHER_FORM, RankDigest, merge  # noqa: E402
from ckpttool.extensions.proof.state_digest import StateDigest  # noqa: E402
from ckpttool.formats import open_checkpoint  # noqa: E402  after the check for torch
from ckpttool.integrations.torch.digest import tensor_text  # noqa: E402
from ckpttool.integrations.torch.live import Piece  # noqa: E402
from ckpttool.model.items import canonical  # noqa: E402
from tests import sampling  # noqa: E402
from tests.truth import source  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.model import Checkpoint

ROOT = pathlib.Path(__file__).parents[3]
SHAPES = {"a.weight": (6, 4), "a.bias": (6,), "b.weight": (6, 4), "b.bias": (6,), "scale": (1,)}
STATES = ("weights", "exp_avg", "exp_avg_sq")
VALUES: list[tuple[Any, Any]] = [
    (argparse.Namespace(x=1), argparse.Namespace(x=2)),
    (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
    (decimal.Decimal("1.1"), decimal.Decimal("1.2")),
    (pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath("a/c")),
    (1j, -1j),
    (torch.float32, torch.float16),
    (np.dtype("f4"), np.dtype("f8")),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]), np.array([(1, 3.0)], dtype=[("x", "i4"), ("y", "f8")])),
    (np.array([1, 2], dtype=">i4"), np.array([1, 3], dtype=">i4")),
    (np.array([1, 2], dtype=np.longdouble), np.array([1, 3], dtype=np.longdouble)),
    (np.array([1], dtype="i4"), np.array([1], dtype="i8")),
    (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
    (torch.ones(2, 2), torch.ones(4)),
    (0.0, -0.0),
    (3, 4),
    (True, 1),
    ("x", b"x"),
    ({1: "a", "1": "b"}, {1: "a", "1": "c"}),
    ([1, {"k": (2, None)}], [1, {"k": (2, 0)}]),
    ({"x"}, {"y"}),
    (math.nan, 0.0),
    (10**30, 10**30 + 1),
]
"""Two values of every type that a restore returns."""


@dataclass
class Rank:
    """A rank whose state can be changed."""

    pieces: dict[tuple[str, str], Any]
    """By state and parameter: the tensor, the whole shape and the place."""
    steps: dict[str, float]
    groups: list[dict[str, Any]]
    group_of: dict[str, int]
    values: dict[str, Any]
    buffer: Any
    partitioned: bool
    types: dict[str, str] = field(default_factory=dict)
    """Types of steps that are not F32."""

    def digest(self) -> RankDigest:
        """Digest it, as if it was sent by another process."""
        pieces = [Piece(key, name, t, shape, starts) for (key, name), (t, shape, starts) in self.pieces.items()]
        buffers = [Piece("weights", "mean", self.buffer, (3,), 0, is_buffer=True)] if self.buffer is not None else []
        state = LiveState(
            pieces=[*pieces, *buffers],
            numbers={"step": self.steps},
            types={"step": {name: self.types.get(name, "F32") for name in self.steps}},
            groups=[{k: canonical(v, tensor_text) for k, v in one.items()} for one in self.groups],
            group_of=self.group_of,
            values={"scheduler.last_epoch": "3", **values_of("client_state", self.values)},
            trains=True,
            partitioned=self.partitioned,
        )
        return RankDigest.of_ranks([state.digest().to_json()])[0]


def _places(layout: str, rank: int, name: str) -> Iterator[tuple[tuple[slice, ...] | slice, Any]]:
    """Yield the index and the place of the elements of a parameter that a rank has."""
    shape = SHAPES[name]
    if layout == "replicated" or (layout == "columns" and len(shape) < 2):
        yield tuple(slice(0, n) for n in shape), (0,) * len(shape)
    elif layout == "columns":
        yield (slice(0, 6), slice(rank, rank + 1)), (0, rank)
    elif layout in {"rows", "hybrid"}:
        count, part = {"rows": (4, rank), "hybrid": (2, rank % 2)}[layout]
        size = -(-shape[0] // count)
        first, last = min(part * size, shape[0]), min((part + 1) * size, shape[0])
        yield (slice(first, last), *(slice(0, n) for n in shape[1:])), (first, *(0 for _ in shape[1:]))
    else:  # flat partitions of a group
        names = [n for n in SHAPES if n.endswith("bias") == name.endswith("bias")]
        sizes = [math.prod(SHAPES[n]) for n in names]
        size, begin = -(-sum(sizes) // 4), sum(sizes[: names.index(name)])
        first = max(0, rank * size - begin)
        last = min(math.prod(shape), (rank + 1) * size - begin)
        if first < last:
            yield slice(first, last), first


LAYOUTS = ("replicated", "rows", "hybrid", "columns", "flat")


def _ranks(layout: str, seed: int, values: Mapping[str, Any]) -> list[Rank]:
    """Return four ranks; the values of tensors are numbers of bf16 other than 0."""
    random_numbers = np.random.default_rng(seed)
    whole = {
        (key, name): torch.tensor(random_numbers.integers(1, 100, SHAPES[name]), dtype=torch.float32)
        for key in STATES
        for name in SHAPES
    }
    ranks = []
    for rank in range(4):
        pieces = {}
        for (key, name), tensor in whole.items():
            for index, starts in _places(layout, rank, name):
                own = (tensor.reshape(-1) if isinstance(index, slice) else tensor)[index].clone()
                pieces[key, name] = own, SHAPES[name], starts
        there = {name for _, name in pieces} if layout == "flat" else {*SHAPES}
        steps = {name: 3.0 + 2 * name.startswith("b") * (layout != "flat") for name in SHAPES if name in there}
        groups = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.95)}]
        group_of = {name: int(name.endswith("bias")) for name in SHAPES}
        ranks.append(Rank(pieces, steps, groups, group_of, dict(values), torch.arange(3.0), layout == "flat"))
    return ranks


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    found = open_checkpoint(source("zero1-dp1-bf16"))
    return replace(found, digests={}, aliases={}, nonpartitionable=(), left_out="")


def _compared(saved: list[Rank], live: list[Rank], checkpoint: Checkpoint) -> Comparison:
    recorded = StateDigest.from_json(merge([rank.digest() for rank in saved]).state.to_json())
    return compare(recorded, [rank.digest() for rank in live], checkpoint, Scope())


def _break(draw: random.Random, layout: str, live: list[Rank], other: Mapping[str, Any]) -> tuple[set[str], bool]:
    """Make one fault; return the names that may be told, and whether the ranks must be told."""
    alone = draw.random() < 0.7
    rank = draw.randrange(4)
    broken = [live[rank]] if alone else live
    kind = draw.choice(("row", "row", "row", "option", "number", "group", "value", "buffer"))
    if kind == "value":
        name = draw.choice([*other])
        for one in broken:
            one.values[name] = other[name]
        return {f"client_state.{name}"}, alone
    if kind == "buffer":
        for one in broken:
            one.buffer = None if alone and draw.random() < 0.3 else one.buffer + 1
        return {"weights of mean"}, alone
    there = [n for k, n in live[rank].pieces if k == "weights" and live[rank].pieces[k, n][0].numel()]
    if not there:
        return _break(draw, layout, live, other)
    name = draw.choice(there)
    if kind == "option":
        group = draw.randrange(2)
        for one in broken:
            one.groups[group] = {**one.groups[group], "lr": 0.2}
        return {f"lr of the group of {n}" for n in SHAPES if live[0].group_of[n] == group}, alone
    if kind == "group":
        for one in broken:
            one.group_of = {**one.group_of, name: 1 - one.group_of[name]}
        return {f"betas of the group of {name}"}, alone
    if kind == "number":
        holders = [one for one in broken if name in one.steps]
        for one in holders:
            if alone and draw.random() < 0.3:
                del one.steps[name]
            elif draw.random() < 0.3:
                one.types[name] = "BF16"
            else:
                one.steps[name] = draw.choice((0.0, 2.0, math.nan))
        return {f"step of {name}"}, alone and sum(name in one.steps for one in live) > 1
    key, one = draw.choice(STATES), live[rank]
    tensor, shape, starts = one.pieces[key, name]
    replicated = sum((key, name) in r.pieces and r.pieces[key, name][2] == starts for r in live) > 1
    fault = draw.choice(("zero", "absent", "lost", "type", "exchanged", "stale"))
    if fault == "lost" and layout != "flat":  # ranks of flat partitions have other parameters anyway
        one.pieces = {place: held for place, held in one.pieces.items() if place[1] != name}
        one.steps.pop(name)
        one.group_of = {other: group for other, group in one.group_of.items() if other != name}
        options = {f"{option} of the group of {name}" for option in ("lr", "betas")}
        return {f"{k} of {name}" for k in (*STATES, "step")} | options, replicated
    if fault == "absent":
        del one.pieces[key, name]
        return {f"{k} of {name}" for k in STATES} | {f"step of {name}"}, replicated
    twin = {"a.weight": "b.weight", "b.weight": "a.weight", "a.bias": "b.bias", "b.bias": "a.bias"}.get(name, "")
    pair = one.pieces.get((key, twin))
    if fault == "exchanged" and pair is not None and pair[0].shape == tensor.shape and not torch.equal(pair[0], tensor):
        one.pieces[key, name], one.pieces[key, twin] = (pair[0], shape, starts), (tensor, pair[1], pair[2])
        return {f"{key} of {name}", f"{key} of {twin}"}, replicated
    new = {"zero": tensor * 0, "type": tensor.bfloat16()}.get(fault, tensor + 1)
    one.pieces[key, name] = new, shape, starts
    return {f"{key} of {name}"}, replicated


def _drawn(layout: str) -> range:
    return range(400) if sampling.thorough() else range(30)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drawn_fault_is_named_and_nothing_else_is(layout: str, checkpoint: Checkpoint) -> None:
    for seed in _drawn(layout):
        draw = random.Random(f"{layout} {seed}")  # noqa: S311  no secret
        pairs = {str(n): VALUES[n] for n in draw.sample(range(len(VALUES)), 4)}
        values = {name: first for name, (first, _) in pairs.items()}
        saved, live = (_ranks(layout, seed, values) for _ in range(2))
        expected, with_rank = _break(draw, layout, live, {name: second for name, (_, second) in pairs.items()})
        found = _compared(saved, live, checkpoint).mismatches
        assert found, (seed, expected)
        for one in found:
            named = f"{one.key} of {one.name}" if one.name else one.key
            assert named in expected, (seed, str(one), expected)
            assert not with_rank or " rank" in one.problem, (seed, str(one))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unchanged_state_is_proven_in_every_other_layout(layout: str, checkpoint: Checkpoint) -> None:
    values = {str(n): first for n, (first, _) in enumerate(VALUES)}
    for seed, other in enumerate(LAYOUTS * (10 if sampling.thorough() else 1)):
        saved, live = _ranks(layout, seed, values), _ranks(other, seed, values)
        if "flat" in {layout, other}:  # steps of a flat group are the same
            for rank in (*saved, *live):
                rank.steps = dict.fromkeys(rank.steps, 3.0)
        for number, rank in enumerate(live):  # a group has no number, and NaN equals itself
            if number % 2:
                rank.groups.reverse()
                rank.group_of = {name: 1 - group for name, group in rank.group_of.items()}
        found = _compared(saved, live, checkpoint)
        assert (found.mismatches, found.notes) == ([], []), (other, found)


def test_groups_count_by_their_hyper_parameters(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("rows", 1, {}) for _ in range(2))
    for rank in live:  # a group is cut in two
        rank.groups.append(dict(rank.groups[0]))
        rank.group_of = {**rank.group_of, "b.weight": 2}
    assert _compared(saved, live, checkpoint).mismatches == []


def test_values_of_ranks_that_differed_at_the_save_may_differ(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("replicated", 1, {"x": 1}) for _ in range(2))
    for ranks in (saved, live):
        ranks[2].values["x"], ranks[2].buffer = 5, torch.ones(3)
    found = _compared(saved, live, checkpoint)
    assert found.mismatches == []
    assert found.notes == [
        "mean (other values on ranks 2)",
        "client_state.x of the ranks after the first, which differ from it",
    ]


def test_values_of_ranks_that_differed_at_the_save_and_are_alike_now_are_named(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("replicated", 1, {"x": 1}) for _ in range(2))
    saved[2].values["x"], saved[2].buffer = 5, torch.ones(3)
    found = _compared(saved, live, checkpoint)
    assert found.mismatches == []
    assert found.notes == [
        "client_state.x, mean: ranks had values of their own at the save, and have the first rank's now"
    ]


def test_states_of_zeros_that_were_not_saved_are_named(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("replicated", 1, {}) for _ in range(2))
    for rank in saved:  # as of a parameter that no batch has used
        rank.pieces = {
            place: held for place, held in rank.pieces.items() if place not in {(k, "scale") for k in STATES[1:]}
        }
        del rank.steps["scale"]
    for value, notes in ((0.0, ["3 states of zeros that were not saved, such as exp_avg of scale"]), (1.0, [])):
        for rank in live:
            rank.steps["scale"] = value
            for key in STATES[1:]:
                rank.pieces[key, "scale"] = torch.full((1,), value), (1,), (0,)
        found = _compared(saved, live, checkpoint)
        assert (found.notes, bool(found.mismatches)) == (notes, bool(value))


def test_a_scheduler_that_the_first_rank_alone_lacks_is_named(checkpoint: Checkpoint) -> None:
    saved = _ranks("replicated", 1, {})
    recorded = StateDigest.from_json(merge([rank.digest() for rank in saved]).state.to_json())
    first, *others = [rank.digest() for rank in saved]
    found = compare(recorded, [replace(first, values={}), *others], checkpoint, Scope())
    assert [str(one) for one in found.mismatches] == ["scheduler.last_epoch is missing on rank 0, but was saved as 3"]


def test_settings_of_the_loss_scale_that_the_run_lacks_are_named(checkpoint: Checkpoint) -> None:
    saved = [rank.digest() for rank in _ranks("replicated", 1, {})]
    recorded = merge([replace(one, values={**one.values, "loss_scale.cur_iter": "3"}) for one in saved]).state
    live = [replace(one, values={**one.values, "loss_scale.cur_scale": "8"}) for one in saved]
    found = compare(
        replace(recorded, values={**recorded.values, "loss_scale.cur_scale": "8"}), live, checkpoint, Scope()
    )
    assert found.mismatches == []
    assert found.notes == ["loss_scale.cur_iter, which the live run does not have, or was not passed"]


def test_a_scheduler_of_another_class_is_named(checkpoint: Checkpoint) -> None:
    saved = [rank.digest() for rank in _ranks("replicated", 1, {})]
    recorded = merge([replace(one, values={**one.values, "scheduler.gamma": "1"}) for one in saved]).state
    live = [replace(one, values={**one.values, "scheduler.T_max": "1"}) for one in saved]
    found = compare(recorded, live, checkpoint, Scope())
    assert (found.mismatches, found.notes) == ([], ["the scheduler: another class saved its state"])


def test_a_parameter_that_files_list_and_that_is_frozen_now_is_named(checkpoint: Checkpoint) -> None:
    saved = [rank.digest() for rank in _ranks("replicated", 1, {})]
    of_files = replace(merge(saved).state, frozen=None)
    found = compare(of_files, [replace(one, frozen=["scale"]) for one in saved], checkpoint, Scope())
    told = "whether 1 parameters that are frozen now were trained at the save"
    assert (found.mismatches, found.notes) == ([], [told])


def test_a_state_that_a_rank_has_in_another_form_than_was_saved_is_named(checkpoint: Checkpoint) -> None:
    saved = [rank.digest() for rank in _ranks("flat", 1, {})]
    live = [*saved[:1], replace(saved[1], unproven={"exp_avg": OF_OTHER_FORM}), *saved[2:]]
    found = compare(merge(saved).state, live, checkpoint, Scope())
    told = "exp_avg is not partitioned like the weights on rank 1, and was at the save"
    assert list(map(str, found.mismatches)) == [told]
    assert found.notes == ["exp_avg: it is not partitioned like the weights"]


def test_a_new_tie_is_named(checkpoint: Checkpoint) -> None:
    saved = [rank.digest() for rank in _ranks("replicated", 1, {})]
    recorded = merge(saved).state
    live = [replace(one, aliases={"b.weight": "a.weight"}) for one in saved]
    assert compare(recorded, live, checkpoint, Scope()).notes == ["the tie of b.weight"]


def test_weights_of_some_ranks_are_named(checkpoint: Checkpoint) -> None:
    """As in a pipeline: the first ranks have other weights than the last."""
    saved = _ranks("replicated", 1, {})
    for number, rank in enumerate(saved):
        kept = [name for name in SHAPES if name.startswith("a") == (number < 2)]
        rank.pieces = {place: held for place, held in rank.pieces.items() if place[1] in kept}
        rank.steps = {name: step for name, step in rank.steps.items() if name in kept}
        rank.group_of = {name: group for name, group in rank.group_of.items() if name in kept}
    found = _compared(saved, saved, checkpoint)
    assert found.mismatches == []
    assert found.notes == ["whether more ranks must have 5 weights, such as a.weight"]


def test_what_cannot_be_compared_is_named(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("rows", 1, {"lock": [lambda: 0], "x": 1}) for _ in range(2))
    found = _compared(saved, live, checkpoint)
    assert found.mismatches == []
    assert found.notes == ["client_state.lock: objects whose values cannot be compared"]


def test_a_record_of_an_older_release_raises_no_false_alarm(checkpoint: Checkpoint) -> None:
    """Release 0.1 recorded objects by their class, -0.0 as 0, and no names of what differed between ranks."""
    saved = _ranks("rows", 1, {"when": datetime.date(2026, 1, 1), "zero": -0.0, "x": 1})
    recorded = merge([rank.digest() for rank in saved]).state.to_json()
    del recorded["differing"]
    recorded["values"] |= {"client_state.when": "date", "client_state.zero": "0"}
    digest = StateDigest.from_json(recorded)
    found = compare(digest, [rank.digest() for rank in saved], checkpoint, Scope())
    assert found.mismatches == []
    assert found.notes == [
        "client_state.when, client_state.zero: an older release recorded only the classes of objects"
    ]
    saved[0].values["x"] = 2
    found = compare(digest, [rank.digest() for rank in saved], checkpoint, Scope())
    assert [str(one) for one in found.mismatches] == ["client_state.x is 2, but was saved as 1"]


def test_an_older_release_recorded_the_largest_step_of_a_group(checkpoint: Checkpoint) -> None:
    saved, live = (_ranks("replicated", 1, {}) for _ in range(2))
    for one, other in zip(saved, live, strict=True):
        one.steps["a.weight"], other.steps["a.weight"] = 5.0, 3.0  # the other weight of the group was used 5 times
    recorded = merge([rank.digest() for rank in saved]).state.to_json()
    del recorded["differing"]
    for optimizer, told in (
        ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam()", False),
        ("torch.optim.adam.Adam()", True),
    ):
        older = replace(checkpoint, optimizer=optimizer)
        found = compare(StateDigest.from_json(recorded), [rank.digest() for rank in live], older, Scope())
        assert [str(one) for one in found.mismatches] == ["step of a.weight is 3, but was saved as 5"][:told]
    assert told


def test_the_page_of_the_law_lists_every_reason() -> None:
    """Each reason is a text of the page, or has one: no part may be left out for another reason."""
    page = (
        (ROOT / "ckpttool/extensions/proof/docs/howto/prove.md")
        .read_text()
        .partition("### What may be named as not compared")[2]
    )
    listed = [text for text in re.findall(r"`([^`]+)`", page.partition("`ckpttool.prove` has")[0]) if len(text) > 9]
    other = {Reason.ASKED, Reason.PENDING, Reason.OF_RANKS, Reason.OF_SOME_RANKS}  # without a text of their own
    for reason in {*Reason} - other:
        assert any(text in reason.value for text in listed), reason
