"""Positions in the data: batches that the train loop took are counted, and a resumed run reads the others."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpttool.data import ResumableLoader, ResumableSampler, batches_to_skip
from ckpttool.errors import ArgumentError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable


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
    with pytest.raises(ArgumentError, match="batch sampler of BatchSampler, not of ResumableSampler"):
        ResumableLoader(DataLoader([1, 2, 3]))


RANKS = (1, 2, 3, 4)


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


@pytest.mark.parametrize(("saving", "resuming"), list(itertools.product(RANKS, RANKS)))
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
                PlanError, match=f"{samples} samples: are no whole number of batches of 2 on {resuming}"
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
    with pytest.raises(PlanError, match="choose batch size 2, or use ckpttool"):
        batches_to_skip(12, world_size=3, batch_size=3)
    with pytest.raises(PlanError, match="save where the number of samples fits both runs"):
        batches_to_skip(7, world_size=3, batch_size=3)
