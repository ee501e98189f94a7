"""Collectives through host memory for tensors of a device, played by a set of tensors."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from tests import forked


def main(directory: Path) -> None:
    """Compare collectives that go by way of the host with gloo's own."""
    forked.run_ranks(2, lambda: _rank(directory))


def _rank(directory: Path) -> None:
    import torch
    import torch.distributed as dist
    from recipes import through_host

    dist.init_process_group("gloo")
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
    (directory / f"done-{rank}").touch()
    dist.barrier()


def _refusing(function: Any, is_on_device: Any, tensors: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            assert not any(is_on_device(tensor) for tensor in tensors(value)), function
        return function(*args, **kwargs)

    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]))
