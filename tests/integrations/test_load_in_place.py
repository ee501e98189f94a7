"""Loads into torch runs with ``staged=False``: equal to staged ones, refused before the data, or half loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.integrations.torch import load
from tests import sampling
from tests.damage import flip
from tests.forked import each_on_ranks
from tests.integrations.test_load import MESHES, _held, _wrapped
from tests.peak import memory_above
from tests.truth import source

pytestmark = pytest.mark.deepspeed

HALF_LOADED = "; the run is half loaded: restore another checkpoint, or start again"
IMPORTS = ["torch.distributed.fsdp"]


def _run(mesh: str, seed: int, steps: int = 0) -> tuple[Any, Any, Any]:
    """Return the model of DeepSpeed's fixtures under a kind of parallelism, the module inside, and its optimizer."""
    from recipes import plain

    torch.manual_seed(seed)
    model, inner = _wrapped(plain.build_model(), mesh)
    optimizer = torch.optim.AdamW(plain.param_groups(inner))
    for _ in range(steps):
        _step(model, optimizer)
    return model, inner, optimizer


def _step(model: Any, optimizer: Any) -> float:
    tokens = torch.arange(12).reshape(2, 6)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        key
        for key in {**one, **other}
        if key not in one or key not in other or not torch.equal(*map(torch.as_tensor, (one[key], other[key])))
    ]


# ------------------------------------------------------------------------------------------------------ equal states


def _staged_and_in_place(job: dict[str, Any]) -> dict[str, Any]:
    runs = [_run(job["mesh"], seed, steps) for seed, steps in enumerate((0, 0, 1))]
    found = []
    for staged, (model, inner, optimizer) in zip((True, False, False), runs, strict=True):
        states = {key: value.data_ptr() for key, value in _local_states(optimizer).items()}
        ckpttool.load(model, source(job["source"]), optimizer=optimizer, staged=staged, prove=True)
        same = all(_local_states(optimizer)[key].data_ptr() == at for key, at in states.items())
        found.append((_held(inner, optimizer), [_step(model, optimizer) for _ in range(2)], same))
    (held, losses, _), *others = found
    return {
        "differing": [key for own, _, _ in others for key in _differing(held, own)],
        "losses": [losses, *(own for _, own, _ in others)],
        "in place": [same for _, _, same in others],
    }


def _local_states(optimizer: Any) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (number, key): value.to_local() if hasattr(value, "placements") else value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }


def test_a_run_holds_and_computes_what_it_does_after_a_staged_load() -> None:
    jobs = [
        {"id": f"{name}-{mesh}-{ranks}", "source": name, "mesh": mesh, "world_size": ranks}
        for number, (mesh, ranks) in enumerate(MESHES)
        for other, name in enumerate(("zero2-dp2-bf16", "zero3-dp2-fp32"))
        if sampling.thorough() or (number + other) % 2 == 0
    ]
    for name, ranks in each_on_ranks(_staged_and_in_place, jobs, imports=IMPORTS).items():
        for told in ranks:
            assert told["differing"] == [], name
            assert told["losses"][1:] == [told["losses"][0]] * 2, name
            assert told["in place"] == [True, True], name


def test_parameters_of_any_layout_and_type_are_filled(tmp_path: Path) -> None:
    def run(seed: int, dtype: torch.dtype) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900), nn.Linear(900, 700)).to(dtype)
        net[0].weight.data = net[0].weight.data.t().contiguous().t()
        net.register_buffer("every_other", torch.randn(20)[::2])
        net.register_buffer("empty", torch.zeros(0, 3))
        net.register_buffer("flag", torch.tensor(bool(seed)))
        return net, torch.optim.SGD(net.parameters(), momentum=0.9)

    for saved_type, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        saved, staged, own = (run(seed, kind) for seed, kind in enumerate((saved_type, dtype, dtype)))
        saved[0](torch.randn(8, 700, dtype=saved_type)).sum().backward()
        saved[1].step()
        root = tmp_path / str(dtype)
        ckpttool.CheckpointManager(root).save(saved[0], optimizer=saved[1], step=1)
        version = own[0][0].weight._version
        for (net, optimizer), how in ((staged, True), (own, False)):
            ckpttool.load(net, root, optimizer=optimizer, staged=how, memory="1MB")
        assert _differing(_held(*staged), _held(*own)) == []
        assert own[0][0].weight._version > version  # autograd refuses a graph of the values before


# ------------------------------------------------------------------------------------------------------------ errors


def _damage(directory: Path) -> None:
    """Change a byte of a moment."""
    checkpoint = ckpttool.inspect(directory)
    moment = next(p for p in checkpoint.parameters if p.name.endswith("up.weight")).states["exp_avg_sq"].extents[-1]
    flip(Path(checkpoint.path(int(moment["file"]))), int(moment["offset"]))


def _restored(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save twice, damage the newer save, restore in place; then damage both, and restore in place."""
    import torch.distributed as dist

    def damage(number: int) -> None:
        dist.barrier()
        if not dist.get_rank():
            _damage(root / f"step-{number}")
        dist.barrier()

    def told(function: Any) -> str:
        try:
            function()
        except ckpttool.CkptError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    root = directory / job["id"]
    (saved, _, adam), staged, own = (_run(job["mesh"], seed, steps=1) for seed in range(3))
    manager = ckpttool.CheckpointManager(root)
    for n in (1, 2):
        manager.save(saved, optimizer=adam, step=n, client_state={"n": n}, rank_state=dist.get_rank())
        _step(saved, adam)
    damage(2)
    client = [manager.restore(staged[0], optimizer=staged[2], tag="step-1")]
    client.append(manager.restore(own[0], optimizer=own[2], staged=False, prove=True))
    assert manager.restored is not None
    found = {
        "client": client,
        "restored": manager.restored_path,
        "rank": manager.restored.rank_state == dist.get_rank(),
        "differing": _differing(_held(*staged[1:]), _held(*own[1:])),
        "losses": [[_step(model, optimizer) for _ in range(2)] for model, _, optimizer in (staged, own)],
    }
    before = _held(*own[1:])
    other = torch.optim.SGD(own[1].parameters(), momentum=0.9)
    found["misfit"] = told(lambda: manager.restore(own[0], optimizer=other, staged=False))
    found["changed"] = _differing(before, _held(*own[1:]))
    found["one"] = told(lambda: ckpttool.load(own[0], root / "step-2", optimizer=own[2], staged=False))
    damage(1)
    found["none"] = told(lambda: manager.restore(own[0], optimizer=own[2], staged=False))
    return found


def test_a_restore_takes_an_older_checkpoint_or_says_that_the_run_is_half_loaded(tmp_path: Path) -> None:
    jobs = [{"id": f"{mesh}-{ranks}", "mesh": mesh, "world_size": ranks} for mesh, ranks in MESHES if ranks < 3]
    for name, ranks in each_on_ranks(_restored, jobs, tmp_path, imports=IMPORTS).items():
        root = tmp_path / name
        for told in ranks:
            assert told["client"] == [{"n": 1}, {"n": 1}]
            assert told["restored"] == str(root / "step-1")
            assert told["rank"]
            assert told["differing"] == []
            assert told["losses"][0] == told["losses"][1]
            assert told["misfit"].startswith("PlanError: ")
            assert "but the run's SGD keeps momentum_buffer; build the optimizer of the saved run" in told["misfit"]
            assert told["changed"] == []
            assert told["one"].startswith(f"ChecksumError: {root}/step-2/")
            assert told["one"].endswith(HALF_LOADED)
            assert told["none"].startswith(f"LayoutError: {root}: holds 2 checkpoints, and none can be restored")
            assert told["none"].endswith(HALF_LOADED)


class _Net(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 5)


def _saved(root: Path, widths: tuple[int, int], extra: bool = False) -> tuple[Any, Any]:
    """Save two runs in one root, damage the newer one, and return another run like that one."""
    for number, width in enumerate(widths):
        net = _Net(width)
        if extra and number:
            net.more = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.Adam(net.parameters())
        (net.up(torch.ones(1, width)).sum() + sum(p.sum() for p in net.parameters())).backward()
        optimizer.step()
        ckpttool.CheckpointManager(root).save(net, optimizer=optimizer, step=number)
    _damage(root / "step-1")
    net = _Net(widths[1])
    if extra:
        net.more = nn.Parameter(torch.zeros(4))
    return net, torch.optim.Adam(net.parameters())


def test_an_older_checkpoint_that_does_not_fit_leaves_the_run_half_loaded(tmp_path: Path) -> None:
    net, optimizer = _saved(tmp_path, (3, 4))
    with pytest.raises(ckpttool.PlanError, match=r"up.weight has shape .*") as caught:
        ckpttool.CheckpointManager(tmp_path).restore(net, optimizer=optimizer, staged=False)
    assert str(caught.value).endswith(HALF_LOADED)


def test_an_older_checkpoint_that_lacks_a_parameter_does_not_keep_half_loaded_values(tmp_path: Path) -> None:
    """Staged, ``strict=False`` keeps the run's values; but half loaded it has others."""
    net, optimizer = _saved(tmp_path, (4, 4), extra=True)
    manager = ckpttool.CheckpointManager(tmp_path)
    manager.restore(net, optimizer=optimizer, strict=False)
    assert not net.more.any()
    with pytest.raises(ckpttool.PlanError, match="lacks more of the model") as caught:
        manager.restore(net, optimizer=optimizer, strict=False, staged=False)
    assert str(caught.value).endswith(HALF_LOADED)


def test_an_object_that_does_not_take_its_state_leaves_the_run_half_loaded(tmp_path: Path) -> None:
    class Extra:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("not now")

    net = _Net(3)
    optimizer = torch.optim.SGD(net.parameters())
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, extra={"mine": Extra()}, step=1)
    for staged in (True, False):
        with pytest.raises(ckpttool.PlanError, match="has a state of mine that cannot be loaded") as caught:
            ckpttool.load(net, tmp_path, optimizer=optimizer, extra={"mine": Extra()}, staged=staged)
        assert str(caught.value).endswith(HALF_LOADED) is not staged


def test_too_little_memory_leaves_the_run_half_loaded(tmp_path: Path) -> None:
    net = _Net(3)
    optimizer = torch.optim.SGD(net.parameters())
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, step=1)
    with (
        mock.patch.object(load, "fill", side_effect=MemoryError("none left")),
        pytest.raises(ckpttool.CkptError, match="MemoryError: none left") as caught,
    ):
        ckpttool.load(net, tmp_path, optimizer=optimizer, staged=False)
    assert str(caught.value).endswith(HALF_LOADED)


# ------------------------------------------------------------------------------------------------------------ memory


def _peak(job: dict[str, Any], directory: Path) -> dict[str, int]:
    """Load a state of 100 MB for each rank into a run that has one, and return the memory above its own."""
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8 * job["parts"])))
    model = nn.parallel.DistributedDataParallel(net) if job["id"].startswith("ddp") else net
    if job["id"].startswith("fsdp"):
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager = ckpttool.CheckpointManager(directory / job["id"])
    manager.save(model, optimizer=optimizer, step=1)
    manager.restore(model, optimizer=optimizer, dry_run=True)  # loads modules
    restore = partial(manager.restore, model, optimizer=optimizer)
    return {str(staged): memory_above(partial(restore, staged=staged)) for staged in (False, True)}


def test_a_load_in_place_needs_no_second_copy(tmp_path: Path) -> None:
    jobs = [
        {"id": "plain", "world_size": 1, "parts": 1},
        {"id": "ddp", "world_size": 2, "parts": 1},
        {"id": "fsdp", "world_size": 2, "parts": 2},
    ]
    for name, ranks in each_on_ranks(_peak, jobs, tmp_path, imports=IMPORTS).items():
        for told in ranks:
            assert told["False"] < 32 << 20, (name, told)
            assert told["True"] > 50 << 20, (name, told)
