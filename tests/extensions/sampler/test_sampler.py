"""``ResumableSampler`` reads each sample once, whatever the numbers of ranks of a run and of those that resume it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpttool.data import ResumableLoader, ResumableSampler, batches_to_skip
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.extensions.sampler.api import TAILS
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


RANKS = (1, 2, 3, 4)
PAIRS = list(itertools.product(RANKS, RANKS))


def _sampler(length: int, rank: int, ranks: int, **options: Any) -> ResumableSampler:
    return ResumableSampler(length, **{"batch_size": 2, "seed": 5, "rank": rank, "world_size": ranks, **options})


def _samplers(length: int, ranks: int, **options: Any) -> list[ResumableSampler]:
    return [_sampler(length, rank, ranks, **options) for rank in range(ranks)]


def _run(samplers: Sequence[ResumableSampler], steps: int | None = None) -> list[list[list[int]]]:
    """Take steps to the end of the epoch, at most so many; for each step the batch of each rank."""
    taken: list[list[list[int]]] = []
    iterators = [iter(sampler) for sampler in samplers]
    expected = len(samplers[0])
    assert {len(sampler) for sampler in samplers} == {expected}
    while steps is None or len(taken) < steps:
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            assert batches == [None] * len(samplers), "a rank has fewer batches than another"
            assert len(taken) == expected
            break
        taken.append([batch for batch in batches if batch is not None])
        for sampler in samplers:
            sampler.advance()
    assert len({str(sampler.state_dict()) for sampler in samplers}) == 1
    return taken


def _resumed(state: dict[str, Any], length: int, ranks: int, **options: Any) -> list[ResumableSampler]:
    samplers = _samplers(length, ranks, **options)
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


def _flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


@pytest.mark.parametrize(("saving", "resuming"), PAIRS)
def test_each_sample_is_read_exactly_once(saving: int, resuming: int) -> None:
    """Every length, batch size and position; in one epoch unless fewer samples than ranks are left at the resume."""
    carried = 0
    for length, (before, after) in itertools.product(range(4, 18), [(1, 1), (1, 3), (2, 2), (3, 2), (4, 1)]):
        stops = len(_sampler(length, 0, saving, batch_size=before))
        for stop in range(stops + 1):
            first = _samplers(length, saving, batch_size=before)
            taken = _run(first, stop)
            state = first[0].state_dict()
            second = _resumed(state, length, resuming, batch_size=after)
            seen = _flat(taken)
            if stop == stops:
                assert (state["epoch"], state["position"], state["carried"]) == (1, 0, 0)
                assert Counter(seen) == Counter(range(length))
            else:
                left = length - len(seen)
                if left >= resuming:
                    seen += _flat(_run(second))
                    assert Counter(seen) == Counter(range(length))
                else:  # no rank may go without a batch
                    assert second[0].epoch == 1
                    following = _flat(_run(second))
                    assert Counter(seen + following[:left]) == Counter(range(length))
                    assert Counter(following[left:]) == Counter(range(length))
                    carried += 1
            assert second[0].epoch == 1 + (stop < stops and left < resuming)
            assert second[0].state_dict()["carried"] == 0
    assert (carried > 0) == (resuming > saving)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tail", TAILS)
def test_sizes_of_batches(ranks: int, tail: str) -> None:
    for length, batch_size in itertools.product(range(8, 40), (1, 2, 3)):
        if tail == "drop" and length < ranks * batch_size:
            continue
        samplers = _samplers(length, ranks, batch_size=batch_size, tail=tail)
        steps = _run(samplers)
        for step in steps:
            sizes = [len(batch) for batch in step]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            last = step is steps[-1]
            assert max(sizes) <= batch_size + (tail == "spread" and batch_size == 1 and last)
        counted = Counter(_flat(steps))
        rest = samplers[0].state_dict()["carried"]
        assert set(counted) <= set(range(length))
        if tail == "spread":
            assert counted == Counter(range(length))
        if tail == "carry":
            assert rest < ranks
            assert counted.total() == length - rest
            assert max(counted.values()) == 1
        if tail == "drop":
            assert counted.total() == length - length % (ranks * batch_size)
            assert max(counted.values()) == 1
        if tail == "pad":
            assert counted.total() == -(-length // ranks) * ranks
            assert set(counted) == set(range(length))


@pytest.mark.parametrize(("saving", "resuming"), PAIRS)
def test_dropped_and_repeated_samples_at_a_resume(saving: int, resuming: int) -> None:
    whole = 12
    for length, stop in itertools.product(range(24, 49), range(3)):
        for tail in ("drop", "pad"):
            options = {"tail": tail, "batch_size": whole // saving}
            first = _samplers(length, saving, **options)
            order = _flat(_run(_samplers(length, 1, tail=tail, batch_size=whole)))
            seen = _flat(_run(first, stop))
            second = {"tail": tail, "batch_size": 1, "accumulation": whole // resuming}
            if first[0].epoch:
                continue
            seen += _flat(_run(_resumed(first[0].state_dict(), length, resuming, **second)))
            if tail == "drop":
                assert sorted(seen) == sorted(order)
                assert len(seen) == length // whole * whole
            else:
                assert set(seen) == set(range(length))
                assert len(seen) - length < resuming


@pytest.mark.parametrize("tail", ["spread", "carry"])
def test_several_resumes_in_one_epoch(tail: str) -> None:
    chance = random.Random(3)  # noqa: S311
    for _ in range(150):
        length = chance.randrange(4, 60)
        state: dict[str, Any] | None = None
        order: list[int] = []
        for _ in range(chance.randrange(2, 7)):
            ranks, batch_size = chance.choice(RANKS), chance.choice([1, 2, 3])
            options = {"tail": tail, "batch_size": batch_size}
            samplers = _samplers(length, ranks, **options)
            if state is not None:
                samplers = _resumed(state, length, ranks, **options)
            order += _flat(_run(samplers, chance.randrange(12)))
            state = samplers[0].state_dict()
        epochs = _by_epoch(order, length)
        for seen in epochs:
            assert max(Counter(seen).values()) == 1
        for seen in epochs[:-1]:
            assert Counter(seen) == Counter(range(length))


def _by_epoch(order: list[int], length: int) -> list[list[int]]:
    """The stream in parts of the length of an epoch: with nothing dropped or repeated, each part is an epoch."""
    return [order[start : start + length] for start in range(0, len(order), length)]


@pytest.mark.parametrize("ranks", RANKS)
def test_global_batches_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    """At an equal global batch, each step of the optimizer takes the same samples; so does what "drop" leaves out."""
    length, whole = 103, 12
    options = {"tail": "drop", "seed": 8}
    alone = _flat(_run(_samplers(length, 1, batch_size=whole, **options)))
    micro = whole // ranks // (2 if ranks != 4 else 1)
    accumulation = whole // ranks // micro
    steps = _run(_samplers(length, ranks, batch_size=micro, accumulation=accumulation, **options))
    for number in range(length // whole):
        own = _flat(steps[number * accumulation : (number + 1) * accumulation])
        assert sorted(own) == sorted(alone[number * whole : (number + 1) * whole])
    assert sorted(_flat(steps)) == sorted(alone)


def test_the_order_is_fixed() -> None:
    """A release that changed it would read samples twice after a resume."""
    assert _flat(_run(_samplers(12, 1, seed=0))) == ORDER
    second = _samplers(12, 1, seed=0)
    _run(second)
    assert _flat(_run(second)) != ORDER
    assert _flat(_run(_samplers(12, 3, seed=0))) == ORDER
    assert _flat(_run(_samplers(12, 2, shuffle=False))) == list(range(12))


ORDER = [4, 5, 1, 8, 0, 6, 10, 11, 7, 9, 2, 3]


def test_pending_micro_batches_are_read_again() -> None:
    samplers = _samplers(40, 2, accumulation=3)
    _run(samplers, 4)
    state = samplers[0].state_dict()
    assert (samplers[0].position, state["position"]) == (16, 12)
    again = _resumed(state, 40, 2, accumulation=3)
    assert _flat(_run(again, 1)) == _flat([_run(_samplers(40, 2), 4)[3]])


def test_errors() -> None:
    wrong: list[dict[str, Any]] = [
        {"batch_size": 0},
        {"tail": "wrap"},
        {"rank": 2},
        {"length": 1},
        {"length": 7, "tail": "drop", "accumulation": 2},
    ]
    for options in wrong:
        with refused(ArgumentError):
            _sampler(**{"length": 9, "ranks": 2, "rank": 0, **options})
    state = _sampler(9, 0, 1).state_dict()
    for changed in ({"length": 10}, {"seed": 6}, {"shuffle": False}, {"sampler_format": 2}):
        with refused(ArgumentError):
            _sampler(9, 0, 1).load_state_dict({**state, **changed})
    with refused(ArgumentError):
        _sampler(9, 0, 1).load_state_dict({})


def test_set_epoch() -> None:
    (sampler,) = _samplers(9, 1)
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.position == 2
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.position) == (3, 0)


def samplers(length: int, ranks: int) -> list[ResumableSampler]:
    return [ResumableSampler(length, batch_size=2, seed=5, rank=rank, world_size=ranks) for rank in range(ranks)]


def _torch_loader(**options: Any) -> Callable[..., Any]:
    return lambda data, sampler: DataLoader(data, batch_sampler=sampler, **options)


def _stateful_loader(**options: Any) -> Callable[..., Any]:
    return lambda data, sampler: StatefulDataLoader(data, batch_sampler=sampler, **options)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [_torch_loader, _stateful_loader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_the_loop_took(make: Callable[..., Any], workers: int) -> None:
    length, taken = 23, 3
    data = list(range(100, 100 + length))
    options = {"num_workers": workers, **({"prefetch_factor": 4} if workers else {})}
    made = make(**options)
    loaders = [ResumableLoader(made(data, sampler)) for sampler in samplers(length, 2)]
    before = torch.get_rng_state()
    seen = [int(n) for loader in loaders for batch in itertools.islice(loader, taken) for n in batch]
    assert torch.equal(torch.get_rng_state(), before)
    state = loaders[0].state_dict()
    assert state == loaders[1].state_dict()
    assert state["position"] == taken * 2 * 2
    resumed = [ResumableLoader(made(data, sampler)) for sampler in samplers(length, 3)]
    counts = []
    for loader in resumed:
        loader.load_state_dict(state)
        counts.append(len(loader))
        batches = list(loader)
        assert len(batches) == counts[-1]
        seen += [int(n) for batch in batches for n in batch]
        assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
    assert len(set(counts)) == 1
    assert Counter(seen) == Counter(data)
    assert len(list(resumed[0])) == len(samplers(length, 3)[0])  # the next epoch is whole


def test_a_loader_with_another_sampler() -> None:
    with refused(ArgumentError):
        ResumableLoader(DataLoader([1, 2, 3]))


def _accelerate_batches(length: int, batch_size: int, ranks: int, skipped: int) -> list[list[list[int]]]:
    """The batches of each rank by Accelerate's own samplers, as ``prepare`` and ``skip_first_batches`` combine them."""
    found = []
    for rank in range(ranks):
        torch.manual_seed(0)
        order = SeedableRandomSampler(range(length), data_seed=11)
        whole = torch.utils.data.BatchSampler(order, batch_size, drop_last=False)
        own = BatchSamplerShard(whole, ranks, rank, even_batches=True)
        found.append(list(SkipBatchSampler(own, skip_batches=skipped)))
    return found


@pytest.mark.parametrize(("saving", "resuming"), PAIRS)
def test_accelerate_skips_what_was_read(saving: int, resuming: int) -> None:
    length, batch_size = 48, 2
    whole = _accelerate_batches(length, batch_size, saving, 0)
    refused = 0
    for stop in range(len(whole[0]) + 1):
        seen = [index for batches in whole for batch in batches[:stop] for index in batch]
        samples = stop * saving * batch_size
        assert len(seen) == samples
        if samples % (resuming * batch_size):
            with pytest.raises(
                PlanError, match=f"{samples} samples: are not a whole number of batches of 2 on {resuming}"
            ):
                batches_to_skip(samples, world_size=resuming, batch_size=batch_size)
            refused += 1
            continue
        skipped = batches_to_skip(samples, world_size=resuming, batch_size=batch_size)
        rest = _accelerate_batches(length, batch_size, resuming, skipped)
        seen += [index for batches in rest for batch in batches for index in batch]
        assert Counter(seen) == Counter(range(length))
    assert (refused == 0) == (saving % resuming == 0)


def test_a_batch_size_that_fits_is_named() -> None:
    with refused(PlanError):
        batches_to_skip(12, world_size=3, batch_size=3)
    with refused(PlanError):
        batches_to_skip(7, world_size=3, batch_size=3)
