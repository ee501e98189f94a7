"""What Accelerate skips after a resume on other ranks is what the ranks before have read."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

from ckpttool.data import batches_to_skip
from ckpttool.errors import PlanError

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
