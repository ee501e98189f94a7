"""Runs of FSDP2, HSDP and tensor parallelism on forked ranks, saved in the layouts of frameworks with their truth."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 3


def start(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Build a small model of odd shapes and its optimizer and scheduler, on the mesh and in the type of a job."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = dist.get_world_size()

    class Net(nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, 16)
            self.up, self.down = nn.Linear(16, 34), nn.Linear(34, 16, bias=False)
            self.norm = nn.LayerNorm(16)
            self.tiny = nn.Parameter(torch.ones(1))
            self.frozen = nn.Linear(16, 16)
            self.head = nn.Linear(16, 37, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("positions", torch.arange(16.0))
            self.register_buffer("seen", torch.tensor(3))
            for p in self.frozen.parameters():
                p.requires_grad_(False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens) + self.positions
            x = x + self.down(torch.relu(self.up(x))) * self.tiny
            return self.head(self.norm(x + self.frozen(x)))

    torch.manual_seed(job.get("seed", 0))
    net = Net().to(getattr(torch, job["dtype"]))
    if job["mesh"] == "unnamed":
        mesh = init_device_mesh("cpu", (ranks,))
    elif job["mesh"] == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    elif job["mesh"] == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        if job["mesh"] == "3d":
            whole = init_device_mesh("cpu", (2, ranks // 4, 2), mesh_dim_names=("ddp", "fsdp", "tp"))
            mesh = whole["ddp", "fsdp"]
        else:
            whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
            mesh = whole["dp"]
        parallelize_module(net, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if job.get("by_hand"):  # FSDP2 of torch 2.6 does not train on the CPU; its DTensors are the same
        _shard(net, mesh)
    else:
        whole = {net.norm.bias} if job.get("ignored") else set()
        for module in (net.up, net.down, net):
            fully_shard(module, mesh=mesh, ignored_params=whole)
    optimizer = torch.optim.AdamW(PARAMETERS[job.get("parameters", "all")](net), lr=0.01)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def _shard(net: Any, mesh: Any) -> None:
    """Replace each parameter by a DTensor, and have each gradient drawn at random."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    owners = [
        (module, key) for module in net.modules() for key in module._parameters if module._parameters[key] is not None
    ]
    new: dict[int, Any] = {}
    for module, key in owners:
        old = module._parameters[key]
        part = distribute_tensor(old.data, mesh, placements)
        module._parameters[key] = new.setdefault(id(old), torch.nn.Parameter(part, requires_grad=old.requires_grad))

    def forward(tokens: Any) -> Any:
        for p in _trained(net):
            p.grad = distribute_tensor(torch.randn(p.shape).to(p.dtype), mesh, placements)
        return torch.zeros((), requires_grad=True)

    net.forward = forward


def advance(net: Any, optimizer: Any, step: int) -> None:
    """Take one step of training; every rank has the same data."""
    import torch

    torch.manual_seed(step)
    net(torch.randint(0, 37, (2, 5))).float().pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def live(net: Any, optimizer: Any) -> dict[str, Any]:
    """Return ``model/NAME`` and ``STATE/NAME`` as whole tensors, on every rank.

    The groups of a mesh have names that no file can contain, so that the states take the mesh of their parameter.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    def of(parameter: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        mesh, placements = parameter.device_mesh, parameter.placements
        assert (value.placements, value.device_mesh) == (placements, mesh)
        local = value.to_local()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())

    names = {id(p): name for name, p in net.named_parameters()}
    values = {f"model/{name}": value for name, value in get_model_state_dict(net).items()}
    values |= {
        f"{key}/{names[id(p)]}": of(p, value) for p, own in optimizer.state.items() for key, value in own.items()
    }
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).contiguous().clone() for k, v in values.items()}


def train(job: dict[str, Any], directory: Path) -> None:
    """Train a run as ``trained`` does, and return nothing: what a rank returns is pickled."""
    trained(job, directory)


def trained(job: dict[str, Any], directory: Path) -> tuple[Any, Any, Any]:
    """Train a run, and save it in every layout; return its model, optimizer and scheduler.

    ``truth.safetensors`` has the values of ``live`` after the last step.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, optimizer, scheduler = start(job)
    for step in range(STEPS):
        advance(net, optimizer, step)

    root = directory / job["id"]
    verl, accelerate, checkpointing = (
        root / "verl/global_step_3/actor",
        root / "accelerate/checkpoint-3",
        root / "items",
    )
    for path in (verl, accelerate, checkpointing):
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    model, states = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
    flat = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    torch.save(net.state_dict(), verl / f"model_world_size_{ranks}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), verl / f"optim_world_size_{ranks}_rank_{rank}.pt")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, verl / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    torch.save(model, accelerate / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(states, accelerate / f"optimizer_0_rank{rank}.bin")
    torch.save(model, checkpointing / f"model_{rank}.pt")
    torch.save(states, checkpointing / f"optimizer_{rank}.pt")
    pair = root / "trainer/checkpoint-3"
    dcp.save({"model": model}, checkpoint_id=str(pair / "pytorch_model_fsdp_0"))
    dcp.save({"optimizer": states}, checkpoint_id=str(pair / "optimizer_0"))
    dcp.save({**model, "optimizer": flat}, checkpoint_id=str(root / "titan/step-3"))
    untied = {name: value for name, value in model.items() if name != "head.weight"}  # safetensors refuses ties
    if not job.get("by_hand"):
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(root / "shards"), save_distributed=True))

    truth = live(net, optimizer)
    if rank == 0:
        (verl / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
        (verl / "huggingface").mkdir()
        (verl / "huggingface/config.json").write_text('{"model_type": "odd"}')
        (root / "verl/latest_checkpointed_iteration.txt").write_text("3")
        (pair / "trainer_state.json").write_text('{"global_step": 3}')
        save_file(truth, str(root / "truth.safetensors"))
    return net, optimizer, scheduler


def train_fsdp1(job: dict[str, Any], directory: Path) -> None:
    """Train under FSDP1, and save the weights sharded, with and without a mesh, and flat."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, mesh in (("mesh", init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))), ("none", None)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        net = FullyShardedDataParallel(net, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        (directory / job["id"] / name).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
            path = directory / job["id"] / name
            torch.save(net.state_dict(), path / f"model_world_size_{ranks}_rank_{rank}.pt")
            torch.save(optimizer.state_dict(), path / f"optim_world_size_{ranks}_rank_{rank}.pt")
        with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT):
            whole = {key: value.contiguous() for key, value in net.state_dict().items()}
        if mesh is None:
            (directory / job["id"] / "local").mkdir(exist_ok=True)
            with FullyShardedDataParallel.state_dict_type(net, StateDictType.LOCAL_STATE_DICT):
                torch.save(net.state_dict(), directory / job["id"] / f"local/pytorch_model_fsdp_0_rank{rank}.bin")
        if rank == 0:
            save_file(whole, str(directory / job["id"] / "truth.safetensors"))


def resume(job: dict[str, Any], directory: Path) -> None:
    """Load each checkpoint of ``job["sources"]`` into a new run, by the loader of its layout, and train one step.

    Every one has to give the values of ``truth.safetensors`` and, after the step, the same values as the first.
    """
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    expected = load_file(job["truth"])
    after: dict[str, Any] = {}
    for layout, path in job["sources"]:
        net, optimizer, _ = start({**job, "seed": 1})
        LOADERS[layout](net, optimizer, path)
        loaded = live(net, optimizer)
        assert loaded.keys() == expected.keys(), (layout, loaded.keys() ^ expected.keys())
        for key, value in expected.items():
            assert loaded[key].dtype == value.dtype, (layout, key)
            assert torch.equal(loaded[key], value), (layout, key)
        advance(net, optimizer, STEPS)
        stepped = live(net, optimizer)
        after = after or stepped
        assert any(not torch.equal(stepped[key], loaded[key]) for key in stepped)
        assert all(torch.equal(stepped[key], value) for key, value in after.items()), layout
    if dist.get_rank() == 0:
        (directory / job["id"]).write_text("loaded")


def _load_dcp(net: Any, optimizer: Any, path: str, *, flat: bool = False, titan: bool = False) -> None:
    """Load as a loop of torch's own functions does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, states = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer, options=options)
    dcp.load({**model, "optimizer": states} if titan else {"model": model, "optim": states}, checkpoint_id=path)
    set_model_state_dict(net, model)
    set_optimizer_state_dict(net, optimizer, states, options=options)


def _load_accelerate(net: Any, optimizer: Any, path: str, *, use_dcp: bool = True) -> None:
    """Load by Accelerate's own functions."""
    import os

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    load_fsdp_model(plugin, accelerator, net, path, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, net, path, use_dcp=use_dcp)


def _load_lightning(net: Any, optimizer: Any, path: str) -> None:
    """Load by Lightning's own function, which its ``ModelParallelStrategy`` calls."""
    from pathlib import Path

    from lightning.fabric.strategies.model_parallel import _load_checkpoint

    state = _load_checkpoint(Path(path), {"state_dict": net, "optimizer_0": optimizer})
    assert state["epoch"] == 7


def _load_verl(net: Any, optimizer: Any, path: str) -> None:
    """Load by the calls of verl 0.9, FSDPCheckpointManager.load_checkpoint."""
    import torch
    import torch.distributed as dist

    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    model, states, extra = (
        torch.load(f"{path}/{kind}_{suffix}", weights_only=False) for kind in ("model", "optim", "extra_state")
    )
    net.load_state_dict(model)
    optimizer.load_state_dict(states)
    if extra["lr_scheduler"] is not None:
        torch.optim.lr_scheduler.StepLR(optimizer, 1).load_state_dict(extra["lr_scheduler"])


def _load_ckpttool(net: Any, optimizer: Any, path: str) -> None:
    """Load by ckpttool, directly."""
    import ckpttool

    report = ckpttool.load(net, path, optimizer=optimizer, prove=True)
    assert report.proof is not None
    assert report.groups_kept == ()


LOADERS: dict[str, Callable[[Any, Any, str], None]] = {
    "ckpttool": _load_ckpttool,
    "nested": _load_dcp,
    "flat": functools.partial(_load_dcp, flat=True),
    "torchtitan": functools.partial(_load_dcp, flat=True, titan=True),
    "accelerate": _load_accelerate,
    "lightning": _load_lightning,
    "files of accelerate": functools.partial(_load_accelerate, use_dcp=False),
    "verl": _load_verl,
}


def _decay(net: Any) -> list[Any]:
    """Return two groups: matrices, and all others without decay."""
    own = _trained(net)
    others = [p for p in own if p.ndim < 2]
    return [{"params": [p for p in own if p.ndim > 1]}, {"params": others, "weight_decay": 0.0}]


def _trained(net: Any) -> list[Any]:
    return [p for p in net.parameters() if p.requires_grad]


PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "all": lambda net: net.parameters(),
    "trained": _trained,
    "reversed": lambda net: _trained(net)[::-1],
    "named": lambda net: net.named_parameters(),
    "decay": _decay,
}
"""What the optimizer gets."""
