"""``ResumableLoader`` counts the batches that the train loop took, whatever workers have prefetched."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpttool.data import ResumableLoader, ResumableSampler
from ckpttool.errors import ArgumentError

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
