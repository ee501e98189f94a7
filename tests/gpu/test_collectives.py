"""Ranks can share a GPU: collectives of its tensors go through host memory."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked
from tests.gpu import resumes

if TYPE_CHECKING:
    from pathlib import Path


@forked.on_ranks(2)
def _compare() -> bool:
    """Compare collectives that go by way of the host, for tensors that a set says are a device's, with gloo's own."""
    import torch
    import torch.distributed as dist
    from recipes import through_host

    c10d = dist.distributed_c10d
    device: set[int] = set()
    waited: list[str] = []
    alive: list[Any] = []

    def is_on_device(tensor: Any) -> bool:
        return isinstance(tensor, through_host._On) or tensor.untyped_storage().data_ptr() in device

    def on_device(tensor: Any) -> Any:
        alive.append(tensor)  # or its address would become that of one on the host
        device.add(tensor.untyped_storage().data_ptr())
        return tensor

    # Gloo itself must never see one.
    for name in through_host.OUTPUTS:
        if hasattr(c10d, name):
            own = _refusing(getattr(c10d, name), is_on_device, through_host._tensors)
            setattr(c10d, name, own)
            setattr(dist, name, own)
    through_host.install(is_on_device, lambda: waited.append("device"))
    rank = dist.get_rank()
    values = torch.arange(4.0) + 10 * rank
    total = torch.arange(4.0) * 2 + 10

    tensor = on_device(values.clone())
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total)
    assert len(waited) == 2
    tensor = on_device(values.clone())
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert torch.equal(tensor, total / 2)
    tensor = on_device(torch.zeros(8))  # what comes in is a part of what goes out, as in DeepSpeed
    tensor[4 * rank : 4 * rank + 4] = values
    dist.all_gather_into_tensor(tensor, tensor[4 * rank : 4 * rank + 4])
    assert torch.equal(tensor, torch.cat([torch.arange(4.0), torch.arange(4.0) + 10]))
    tensor = on_device(torch.cat([values, values]))  # and the other way round
    dist.reduce_scatter_tensor(tensor[4 * rank : 4 * rank + 4], tensor)
    assert torch.equal(tensor[4 * rank : 4 * rank + 4], total)
    assert torch.equal(tensor[4 * (1 - rank) :][:4], values)
    pieces = [on_device(torch.zeros(4)) for _ in range(2)]
    dist.all_gather(pieces, on_device(values.clone()))
    assert torch.equal(torch.stack(pieces), torch.stack([torch.arange(4.0), torch.arange(4.0) + 10]))
    tensor = on_device(values.clone())
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, torch.arange(4.0) + 10)
    tensor = on_device(values.clone())
    dist.reduce(tensor, 0)
    assert rank or torch.equal(tensor, total)
    parameter = torch.nn.Parameter(values.clone())
    on_device(parameter)
    dist.broadcast(parameter, 0)
    assert torch.equal(parameter, torch.arange(4.0))
    with c10d._coalescing_manager(None, "cpu", async_ops=True):
        tensor = on_device(values.clone())
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)  # at once
    tensor = values.clone()  # which lies on the host
    before = len(waited)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total)
    assert len(waited) == before
    return True


def _refusing(function: Any, is_on_device: Any, tensors: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            assert not any(is_on_device(tensor) for tensor in tensors(value)), function
        return function(*args, **kwargs)

    return run


@pytest.mark.slow
def test_collectives_by_way_of_the_host_do_what_gloo_does() -> None:
    assert _compare() == [True, True]


@pytest.mark.deepspeed
def test_deepspeed_trains_by_way_of_the_host_as_it_does_without(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {
            "do": "probe", "device": "cpu", "backend": "gloo", "world_size": 2, "through_host": through,
            "directory": str(tmp_path / str(through)),
        }
        for through in (False, True)
    ]  # fmt: skip
    forked.call(resumes.run, jobs)
    without, through = (json.loads((tmp_path / str(t) / "answer.json").read_text()) for t in (False, True))
    assert len(without["losses"]["stage 3"]) == 2
    assert through == without
