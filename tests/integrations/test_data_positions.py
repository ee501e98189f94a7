"""Adapters restore the positions of other packages' loaders on other ranks, or say why they cannot."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.data import CountedShard, StatefulLoaderPosition, batches_to_skip
from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = (1, 2, 3, 4)


def test_a_batch_size_that_fits_is_named() -> None:
    with pytest.raises(PlanError, match="choose batch size 2, or use ckpttool"):
        batches_to_skip(12, world_size=3, batch_size=3)
    with pytest.raises(PlanError, match="save where the number of samples fits both runs"):
        batches_to_skip(7, world_size=3, batch_size=3)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_goes_on_on_the_same_ranks(caplog: pytest.LogCaptureFixture) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    from torch.utils.data import DistributedSampler

    def made(rank: int, ranks: int) -> tuple[Any, StatefulLoaderPosition]:
        sampler = DistributedSampler(range(20), ranks, rank, seed=3)
        loader = stateful.StatefulDataLoader(list(range(20)), batch_size=2, sampler=sampler)
        return loader, StatefulLoaderPosition(loader, rank=rank, world_size=ranks)

    loader, position = made(1, 2)
    batches = [batch.tolist() for batch in itertools.islice(loader, 2)]
    with caplog.at_level(logging.WARNING):
        state = position.state_dict()
        position.state_dict()
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "the position of a StatefulDataLoader can be restored on 2 ranks only"
    ]
    again, same = made(1, 2)
    same.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    whole, _ = made(1, 2)
    assert batches + rest == [batch.tolist() for batch in whole]
    with pytest.raises(PlanError, match="was saved by rank 1 of 2, and this is rank 1 of 3"):
        made(1, 3)[1].load_state_dict(state)
    with pytest.raises(PlanError, match="was saved by another number of ranks"):
        made(1, 3)[1].load_state_dict(None)


class _Shard:
    """What ``get_dataset_shard`` returns, as far as it is used."""

    def iter_torch_batches(self, *, batch_size: int) -> Iterator[dict[str, list[int]]]:
        """Ten rows."""
        yield from ({"x": list(range(start, min(start + batch_size, 10)))} for start in range(0, 10, batch_size))

    iter_batches = iter_torch_batches


def test_a_shard_of_ray_tells_that_it_cannot_go_on_within_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    shard = CountedShard(_Shard())
    for _ in itertools.islice(shard.iter_torch_batches(batch_size=4), 2):
        pass
    with caplog.at_level(logging.WARNING):
        state = shard.state_dict()
    assert state == {"epoch": 0, "rows": 8}
    assert "Ray Data gives blocks to the worker that asks first" in caplog.text
    resumed = CountedShard(_Shard())
    with pytest.raises(PlanError, match="a position behind 8 rows: cannot be restored"):
        resumed.load_state_dict(state)
    resumed.load_state_dict(state, exact=False)
    assert len(list(resumed.iter_batches(batch_size=3))) == 4
    between = resumed.state_dict()
    assert between == {"epoch": 1, "rows": 0}
    resumed.load_state_dict(between)
    assert resumed.epoch == 1
