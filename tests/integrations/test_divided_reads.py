"""Ranks that need the same bytes from a bucket read each of them once, and give them to one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError
from tests.faults.s3_proxy import Proxy
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.storage.server import Bucket

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def _run(seed: int, mesh: str) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(1500, 1200), torch.nn.BatchNorm1d(1200), torch.nn.Linear(1200, 50))
    if mesh == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(4)
    model(torch.randn(8, 1500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _job(job: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = _run(job["seed"], job["mesh"])
    manager = ckpttool.CheckpointManager(job["root"], storage_options={"endpoint_url": job["url"]})
    told: dict[str, Any] = {"before": str(ckpttool.live_digest(model, optimizer).to_json())}
    if job["saves"]:
        manager.save(model, optimizer=optimizer, step=1)
    else:
        try:
            told["state"] = manager.restore(model, optimizer=optimizer, prove=True, staged=job["staged"])
            told["read"] = 0 if manager.restored is None else manager.restored.nbytes_read
        except CkptError as error:
            told["error"] = str(error)
    return told | {"digest": str(ckpttool.live_digest(model, optimizer).to_json())}


@pytest.fixture
def proxy(s3: Bucket) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as running:
        yield running


def _each(s3: Bucket, proxy: Proxy, **job: Any) -> list[dict[str, Any]]:
    whole = {"id": 0, "root": s3.url("run"), "url": proxy.url, "seed": 1, "saves": False, "mesh": "ddp"}
    (told,) = each_on_ranks(_job, [{**whole, "staged": True, **job}], imports=["torch.distributed.fsdp"]).values()
    return [*told]


def _sent(proxy: Proxy) -> int:
    return sum(nbytes for key, nbytes in proxy.bytes_by_key().items() if key.endswith(".distcp"))


def test_each_byte_is_read_once_by_ranks_of_one_model(s3: Bucket, proxy: Proxy) -> None:
    saved = _each(s3, proxy, world_size=2, saves=True)
    stored = sum(nbytes for key, nbytes in s3.sizes("run/").items() if key.endswith(".distcp"))
    for ranks, mesh in ((3, "ddp"), (1, "ddp"), (2, "fsdp")):  # those of FSDP2 read the borders of their rows twice
        proxy.clear()
        told = _each(s3, proxy, world_size=ranks, seed=2, mesh=mesh)
        assert [one["digest"] for one in told] == [saved[0]["digest"]] * ranks
        assert _sent(proxy) <= (1.2 if mesh == "fsdp" else 1.05) * stored, (ranks, mesh)
        assert 0.9 * stored < sum(one["read"] for one in told) <= 1.05 * stored
    proxy.clear()
    told = _each(s3, proxy, world_size=2, seed=2, staged=False)  # each rank reads all, straight into its run
    assert [one["digest"] for one in told] == [saved[0]["digest"]] * 2
    assert 1.9 * stored < _sent(proxy) <= 2.1 * stored


def test_a_byte_that_one_rank_reads_wrong_fails_on_all(s3: Bucket, proxy: Proxy) -> None:
    _each(s3, proxy, world_size=2, saves=True)
    name = max(s3.sizes("run/step-1/"), key=s3.sizes("run/step-1/").__getitem__)
    data = bytearray(s3.get(name))
    data[len(data) // 2] ^= 4
    s3.put(name, bytes(data))
    told = _each(s3, proxy, world_size=3, seed=2)
    assert len({one["error"] for one in told}) == 1
    assert all(one["digest"] == one["before"] for one in told), "the run is unchanged"
    told = _each(s3, proxy, world_size=2, seed=2, staged=False)
    assert len({one["error"] for one in told}) == 1
    assert told[0]["error"].endswith("the run is half loaded: restore another checkpoint, or start again")
