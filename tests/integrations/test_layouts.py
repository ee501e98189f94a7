"""A save of a torch run has the layout that a framework loads: read by its own functions, and by ckpttool elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.storage import MANIFEST
from ckpttool.targets.dcp import LAYOUTS
from tests import sampling
from tests.forked import each_on_ranks
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

RUNS: list[dict[str, Any]] = [
    {"id": "fsdp-2", "mesh": "fsdp", "world_size": 2, "dtype": "float32", "parameters": "decay"},
    {"id": "hsdp-4", "mesh": "hsdp", "world_size": 4, "dtype": "bfloat16"},
    {"id": "tp-4", "mesh": "tp", "world_size": 4, "dtype": "float32"},
]
OTHERS: list[dict[str, Any]] = [
    {"id": "fsdp-3", "mesh": "fsdp", "world_size": 3, "dtype": "float32", "from": "fsdp-2", "parameters": "decay"},
    {"id": "fsdp-2-of-4", "mesh": "fsdp", "world_size": 2, "dtype": "bfloat16", "from": "hsdp-4"},
    {"id": "fsdp-2-of-tp", "mesh": "fsdp", "world_size": 2, "dtype": "float32", "from": "tp-4"},
]
LAYOUTS_OF: dict[str, list[str]] = {
    run["id"]: [*LAYOUTS] if run is RUNS[0] else ["nested", *sampling.some([*LAYOUTS][1:], 3, key=run["mesh"])]
    for run in RUNS
}
"""Of the first run all, of others ``nested``, to compare with, and three more."""
IMPORTS = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "accelerate", "lightning.fabric.strategies"]


def _load_app(net: Any, optimizer: Any, path: str) -> None:
    """Load as Ray's FSDP2 template and torch's tutorial do, with the epoch of the client state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(net, optimizer)
    state = {"app": {"model": weights, "optim": states, "epoch": 0}}
    dcp.load(state, checkpoint_id=path)
    assert state["app"]["epoch"] == 7
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)


def _save_and_load(job: dict[str, Any], directory: Path) -> list[str]:
    """Save a run in every layout, and load each by the functions of its framework into a new run on the same mesh."""
    from tests.formats import fsdp_runs

    net, optimizer, scheduler = fsdp_runs.start(job)
    for step in range(fsdp_runs.STEPS):
        fsdp_runs.advance(net, optimizer, step)
        scheduler.step()
    truth = fsdp_runs.live(net, optimizer)
    for number, layout in enumerate(job["layouts"]):
        root = directory / job["id"] / layout
        manager = ckpttool.CheckpointManager(root, layout=layout, async_save=number % 2 == 1)
        manager.save(net, optimizer=optimizer, scheduler=scheduler, step=3, client_state={"epoch": 7, "of": {"a": 1}})
        manager.wait()
    fsdp_runs.advance(net, optimizer, 9)
    stepped = fsdp_runs.live(net, optimizer)
    equal = []
    for layout in job["layouts"]:
        other, own, _ = fsdp_runs.start({**job, "seed": 1})
        load = _load_app if layout == "app" else fsdp_runs.LOADERS[layout]
        load(other, own, str(directory / job["id"] / layout / "step-3"))
        loaded = fsdp_runs.live(other, own)
        assert loaded.keys() == truth.keys(), (layout, loaded.keys() ^ truth.keys())
        assert all(torch.equal(loaded[key], value) for key, value in truth.items()), layout
        fsdp_runs.advance(other, own, 9)
        found = fsdp_runs.live(other, own)
        assert all(torch.equal(found[key], value) for key, value in stepped.items()), layout
        equal.append(layout)
    return equal


def _load_elsewhere(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load the saves of every layout on another mesh; return the whole tensors of each, and its proof."""
    from tests.formats import fsdp_runs

    found = {}
    for layout in job["layouts"]:
        net, optimizer, scheduler = fsdp_runs.start({**job, "seed": 2})
        manager = ckpttool.CheckpointManager(directory / job["from"] / layout)
        state = manager.restore(net, optimizer=optimizer, scheduler=scheduler, prove=True)
        report = manager.restored
        assert report is not None
        found[layout] = {
            "live": {key: value.float().numpy().tobytes() for key, value in fsdp_runs.live(net, optimizer).items()},
            "told": (state, scheduler.last_epoch, [group["weight_decay"] for group in optimizer.param_groups]),
            "proof": str(report.proof),
        }
    return found


def test_frameworks_load_their_layout_and_other_meshes_all_of_them(tmp_path: Path) -> None:
    saves = [{**run, "layouts": LAYOUTS_OF[run["id"]]} for run in RUNS]
    for name, told in each_on_ranks(_save_and_load, saves, tmp_path, imports=IMPORTS).items():
        assert told == [LAYOUTS_OF[name]] * len(told)
    loads = [{**other, "layouts": LAYOUTS_OF[other["from"]]} for other in OTHERS]
    for job, told in each_on_ranks(_load_elsewhere, loads, tmp_path, imports=IMPORTS).items():
        for own in told:
            first = own["nested"]
            for layout, one in own.items():
                assert one["live"] == first["live"], (job, layout)
                assert one["told"] == first["told"], (job, layout)
                assert one["told"][:2] == ({"epoch": 7, "of": {"a": 1}}, 3), (job, layout)
                assert one["proof"].startswith("proven: "), (job, layout)
                assert "not compared" not in one["proof"], (job, layout, one["proof"])
    for run in RUNS:
        digests = set()
        for layout in LAYOUTS_OF[run["id"]]:
            root = tmp_path / run["id"] / layout
            assert ckpttool.verify(root, deep=True).sound
            assert [(one.name, one.whole, one.format) for one in ckpttool.ls(root).entries] == [("step-3", True, "dcp")]
            checkpoint = ckpttool.inspect(root)
            sizes = [len(group.parameters) for group in checkpoint.groups]
            assert sizes == ([3, 4] if run.get("parameters") else [7]), layout
            digests.add(str(ckpttool.digest(root)))
        assert len(digests) == 1, run["id"]


def _of_accelerate(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train under Accelerate with FSDP2, save by a manager, and load by Accelerate's own ``load_state``."""
    import os

    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

    def start(seed: int) -> tuple[Any, Any, Any, Any]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which a CPU does not have
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return (accelerator, *accelerator.prepare(net, optimizer, scheduler))

    def train(run: tuple[Any, Any, Any, Any], steps: range) -> list[float]:
        accelerator, net, optimizer, scheduler = run
        losses = []
        for step in steps:
            loss = net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    run = start(1)
    train(run, range(4))
    inner, scheduler = run[2].optimizer, run[3].scheduler
    manager = ckpttool.CheckpointManager(directory / "run", layout="accelerate")
    manager.save(run[1], optimizer=inner, scheduler=scheduler, step=4)
    truth = train(run, range(4, 8)), scheduler.last_epoch
    other = start(2)
    train(other, range(20, 22))
    other[0].load_state(str(directory / "run" / "step-4"))
    return {"truth": truth, "found": (train(other, range(4, 8)), other[3].scheduler.last_epoch)}


def test_accelerates_load_state_goes_on_with_a_save(tmp_path: Path) -> None:
    (told,) = each_on_ranks(_of_accelerate, [{"id": 0, "world_size": 2}], tmp_path, imports=IMPORTS).values()
    for one in told:
        assert one["found"] == one["truth"]


def test_a_save_without_the_names_of_groups_is_read(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}]
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=torch.optim.SGD(groups, lr=0.25), step=1)
    path = tmp_path / "step-1" / RUN_STATE
    state = torch.load(path, weights_only=False)
    torch.save({key: value for key, value in state.items() if key not in {"groups", "extra", "extra_of_ranks"}}, path)
    (tmp_path / "step-1" / MANIFEST).unlink()
    checkpoint = ckpttool.inspect(tmp_path)
    assert [group.hyperparameters["lr"] for group in checkpoint.groups] == [0.25, 0.5]
    assert checkpoint.data_states == {}


def test_groups_of_equal_options_are_not_one_in_a_flat_layout(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD([{"params": net[n].parameters()} for n in (1, 0)], lr=0.25)
    for layout in ("nested", "flat", "torchtitan"):
        ckpttool.CheckpointManager(tmp_path / layout, layout=layout).save(net, optimizer=optimizer, step=1)
        groups = ckpttool.inspect(tmp_path / layout).groups
        assert [list(one.parameters) for one in groups] == [["1.weight", "1.bias"], ["0.weight", "0.bias"]], layout


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with refused(ckpttool.CkptError):
        ckpttool.CheckpointManager(tmp_path, layout="verl")
