"""Proofs of live runs in which one rank, or one parameter, is not like the others."""

from __future__ import annotations

import io
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests.forked import each_on_ranks

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def _told(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except ckpttool.ProofError as error:
        return "ProofError: " + "; ".join(error.mismatches)
    except ckpttool.CkptError as error:
        return f"{type(error).__name__}: {error}"


def _engine(net: Any, optimizer: Any, stage: int, **config: Any) -> Any:
    import deepspeed

    options = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **config}
    zero = {"zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=net, optimizer=optimizer, config={**options, **zero})[0]


def _sharded(net: Any, *sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("rep", "fsdp")[-len(sizes) :]))
    return net


def _save(net: Any, optimizer: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=str(path))


def _faults_of_one_rank(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Prove a run, and then with faults of one rank: states, groups, a scheduler that fails."""
    rank, path = torch.distributed.get_rank(), directory / job["id"]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    if job["id"].startswith("fsdp"):
        _sharded(net, job["world_size"])
    elif job["id"].startswith("hsdp"):
        _sharded(net, 2, 2)
    groups = [{"params": [p], "weight_decay": 0.1 * n} for n, p in enumerate(net.parameters())]
    optimizer, model = torch.optim.AdamW(groups), net
    if job["id"].startswith("zero"):
        model = _engine(net, optimizer, 0)
        model.backward(model(torch.ones(2, 8)).sum())
        model.step()
        ckpttool.CheckpointManager(path).save(model)
        own = {}
        optimizer = getattr(model.optimizer, "optimizer", model.optimizer)
    else:
        model = torch.nn.parallel.DistributedDataParallel(net) if job["id"].startswith("ddp") else net
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        _save(net, optimizer, path)
        own = {"optimizer": optimizer}
    found = {"same": _told(lambda: ckpttool.prove(model, path, **own))}
    odd, held = rank == job["odd"], optimizer.param_groups
    first = held[0]["params"][0]
    for name in ("exp_avg_sq", "step", "all"):
        kept = dict(optimizer.state[first])
        if odd:
            _ = optimizer.state[first].clear() if name == "all" else optimizer.state[first].pop(name)
        found[name] = _told(lambda: ckpttool.prove(model, path, **own))
        optimizer.state[first].update(kept)

    def exchange() -> None:
        held[0]["params"], held[1]["params"] = held[1]["params"], held[0]["params"]

    if not job["id"].startswith("zero"):
        if odd:
            exchange()
        found["exchanged"] = _told(lambda: ckpttool.prove(model, path, **own))
        if odd:
            exchange()
        _ = held.reverse() if odd else None
        found["reversed"] = _told(lambda: ckpttool.prove(model, path, **own))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if odd:
            scheduler.state_dict = lambda: [][1]
        found["failing"] = _told(lambda: ckpttool.prove(model, path, scheduler=scheduler, **own))
    return found


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs: list[dict[str, Any]] = [
        {"id": f"{kind}-{odd}", "world_size": ranks, "odd": odd}
        for kind, ranks in (("ddp", 3), ("fsdp", 3), ("hsdp", 4), ("zero", 2))
        for odd in (0, 1)
    ]
    return each_on_ranks(_faults_of_one_rank, jobs, tmp_path_factory.mktemp("ranks"))


def test_a_fault_of_one_rank_is_named_on_every_rank(of_one_rank: dict[str, list[Any]]) -> None:
    for name, ranks in of_one_rank.items():
        on = f"on rank {name[-1]}"
        for told in ranks:
            faults = [{key: text for key, text in one.items() if text[:6] != "proven"} for one in (told, ranks[0])]
            assert faults[0] == faults[1]
            assert told["same"].startswith("proven: "), name
            assert "not compared" not in told["same"], name
            assert told["exp_avg_sq"] == f"ProofError: exp_avg_sq of 0.weight is missing {on}", name
            assert f"exp_avg of 0.weight is missing {on}" in told["all"], name
            assert f"step of 0.weight is missing {on}, but was saved as 1" in told["step"], name


def test_groups_count_by_parameter_on_every_rank(of_one_rank: dict[str, list[Any]]) -> None:
    for name, ranks in of_one_rank.items():
        if not name.startswith("zero"):
            told, on = ranks[0], f"on rank {name[-1]}"
            assert f"weight_decay of the group of 0.weight is 0.1 {on}, but was saved as 0" in told["exchanged"], name
            assert told["reversed"].startswith("proven: "), (name, told["reversed"])
            assert f"rank {name[-1]}: IndexError: " in told["failing"], (name, told["failing"])


def _frozen_and_moved(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Prove runs whose parameters joined the optimizer, have another type, or pending gradients."""
    import torch.distributed.checkpoint as dcp

    path = directory / job["id"]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[1].parameters())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = {}
    _save(net, optimizer, path)
    found["gradients"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    optimizer.zero_grad()
    found["same"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    for dtype in (torch.bfloat16, torch.float32):
        for own in optimizer.state.values():
            own["step"] = own["step"].to(dtype)
        found[f"step {dtype}"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    net[1].weight.requires_grad_(False)
    found["frozen"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    net[1].weight.requires_grad_(True)
    net[0].requires_grad_(True)
    found["no group"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 1.0})
    found["thawed"] = _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))
    half = torch.nn.Linear(4, 4).bfloat16()
    state = torch.optim.SGD(half.parameters(), momentum=0.9)
    half(torch.ones(2, 4).bfloat16()).sum().backward()
    state.step()
    state.zero_grad()
    dcp.save({"model": half.state_dict()}, checkpoint_id=str(path / "weights"))
    _save(half, state, path / "half")
    half.float()
    for own in state.state.values():
        own["momentum_buffer"] = own["momentum_buffer"].float()
    found["widened"] = _told(lambda: ckpttool.prove(half, path / "half", optimizer=state))
    found["weights"] = _told(lambda: ckpttool.prove(half, path / "weights"))
    return found


def test_parameters_that_joined_the_optimizer_or_have_another_type_are_named(tmp_path: Path) -> None:
    told = each_on_ranks(_frozen_and_moved, [{"id": "a", "world_size": 1}], tmp_path)["a"][0]
    assert told["same"].startswith("proven: ")
    assert "not compared" not in told["same"]
    assert told["gradients"].endswith("the gradients of 2 parameters, to which the next backward pass adds")
    assert told["step torch.bfloat16"].startswith("ProofError: step of 1.weight is BF16, but was saved as F32")
    assert told["step torch.float32"].partition("; ")[0] == told["same"].partition("; ")[0]
    assert told["frozen"].endswith("whether 1 parameters that are frozen now were trained at the save")
    none = "2 parameters that need a gradient and are in no group of the optimizer, such as 0.bias"
    assert told["no group"].endswith(none)
    assert told["thawed"].startswith("ProofError: weights of 0.weight is trained now, and was not trained at the save")
    assert (
        "weights of weight has another type than was saved, with equal values: it is F32, and was BF16"
        in (told["widened"])
    )
    assert "momentum_buffer of bias has another type than was saved" in told["widened"]
    assert told["weights"].endswith("the types of 2 tensors with equal values, such as weight (BF16, now F32)")


class _Tied(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not followed
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))

    def untie(self) -> None:
        self.last.weight = torch.nn.Parameter(self.first.weight.detach().clone())


def _ties(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Undo a tie after the save: on one rank, then on all; without ZeRO, and under DDP."""
    rank, path = torch.distributed.get_rank(), directory / job["id"]
    torch.manual_seed(0)
    net = _Tied()
    optimizer = torch.optim.AdamW(net.parameters())
    if job["id"] == "zero":
        model = _engine(net, optimizer, 0)
        model.backward(model(torch.ones(2, 6)).sum())
        model.step()
        ckpttool.CheckpointManager(path).save(model)
        own = {}
    else:
        model = torch.nn.parallel.DistributedDataParallel(net)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        _save(net, optimizer, path)
        own = {"optimizer": optimizer}
    found = {"same": _told(lambda: ckpttool.prove(model, path, **own))}
    if rank:
        net.untie()
    found["one"] = _told(lambda: ckpttool.prove(model, path, **own))
    found["digest"] = _told(lambda: ckpttool.live_digest(model, **own))
    net.untie()
    found["all"] = _told(lambda: ckpttool.prove(model, path, **own))
    return found


def test_a_tie_that_is_undone_is_named(tmp_path: Path) -> None:
    for name, ranks in each_on_ranks(_ties, [{"id": n, "world_size": 2} for n in ("ddp", "zero")], tmp_path).items():
        for told in ranks:
            assert told["same"].startswith("proven: ")
            assert "tie" not in told["same"], name
            own = "weights of last.weight is a parameter of its own on rank 1, and tied on other ranks"
            assert told["one"] == f"ProofError: {own}", name
            assert told["digest"].startswith("ProofError: "), name
            assert told["all"].startswith("proven: "), name
            assert ("the tie of last.weight" in told["all"]) == (name == "zero"), (name, told["all"])
            none = "1 parameters that need a gradient and are in no group of the optimizer, such as last.weight"
            assert none in told["all"], (name, told["all"])


def _buffers(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Save an engine with a buffer, and prove it with the buffer of one rank stale; also the options of one rank."""

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    rank, path = torch.distributed.get_rank(), directory / job["id"]
    torch.manual_seed(0)
    net = Net()
    engine = _engine(net, torch.optim.AdamW(net.parameters()), job["stage"])
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    ckpttool.CheckpointManager(path / "one").save(engine, client_state={"x": rank, "y": 1})
    engine.save_checkpoint(str(path / "plain"))
    found = {"same": _told(lambda: ckpttool.prove(engine, path / "one"))}
    if rank == 1:
        net.seen.add_(1)
    found["stale"] = _told(lambda: ckpttool.prove(engine, path / "one"))
    ckpttool.CheckpointManager(path / "two").save(engine)
    found["differed"] = _told(lambda: ckpttool.prove(engine, path / "two"))
    net.seen.zero_()
    found["unchanged"] = _told(lambda: ckpttool.prove(engine, path / "plain"))
    if rank == 1:
        engine.optimizer.param_groups[0]["weight_decay"] = 0.5
    found["option"] = _told(lambda: ckpttool.prove(engine, path / "plain"))
    return found


def test_buffers_and_options_of_one_rank_under_zero(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [{"id": f"z{stage}", "world_size": 2, "stage": stage} for stage in (0, 2, 3)]
    for name, ranks in each_on_ranks(_buffers, jobs, tmp_path).items():
        for told in ranks:
            assert told["same"].startswith("proven: "), name
            assert "ProofError: weights of seen has other values than were saved on rank 1" in told["stale"], name
            assert "seen (other values on ranks 1)" in told["differed"], name
            assert told["unchanged"].startswith("proven: "), (name, told["unchanged"])
            assert (
                "weight_decay of the group of layer.weight is 0.5 on rank 1, but was saved as 0.01" in (told["option"])
            ), (name, told["option"])


def test_a_save_without_digests_warns(tmp_path: Path) -> None:
    job = {"id": "a", "world_size": 1}
    assert each_on_ranks(_undigested, [job], tmp_path)["a"] == [
        "the save records no digests, so that a restore is proven only by its files: RuntimeError: no"
    ]


def _undigested(job: dict[str, Any], directory: Path) -> str:
    from ckpttool.extensions.proof import engine_state

    net = torch.nn.Linear(4, 4)
    engine = _engine(net, torch.optim.AdamW(net.parameters()), 1)

    def fail(live: Any) -> Any:
        raise RuntimeError("no")

    engine_state.live_state = fail
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setLevel(logging.WARNING)
    logging.getLogger("ckpttool").addHandler(handler)
    ckpttool.CheckpointManager(directory / job["id"]).save(engine)
    (line,) = [line for line in lines.getvalue().splitlines() if "digests" in line]
    return line


class _Tower(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not followed
    """Two layers, of which a batch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 6)

    def forward(self, x: Any, layers: str) -> Any:
        return sum(getattr(self, name)(x).sum() for name in layers)


def _steps(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train layers for other numbers of steps; convert, load and prove the result, also without ZeRO."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def build(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = _sharded(_Tower(), 2)
        return net, torch.optim.AdamW(list(net.named_parameters()), foreach=False)

    path = directory / job["id"]
    net, optimizer = build(0)
    for layers in ("ab", "a", "ab"):
        net(torch.ones(2, 8), layers).backward()
        optimizer.step()
        optimizer.zero_grad()
    _save(net, optimizer, path / "saved")
    found: dict[str, Any] = {"same": _told(lambda: ckpttool.prove(net, path / "saved", optimizer=optimizer))}
    if torch.distributed.get_rank() == 0:
        ckpttool.convert(path / "saved", path / "converted", to="dcp", prove=True)
        found["zero"] = _told(
            lambda: ckpttool.convert(path / "saved", path / "z", to="zero", world_size=2, stage=1, dtype="fp32")
        )
    torch.distributed.barrier()
    other, fresh = build(1)  # made from named_parameters(): torch asks for their names
    weights, states = get_state_dict(other, fresh)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=str(path / "converted"))
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states)
    found["steps"] = {name: float(fresh.state[p]["step"]) for name, p in other.named_parameters()}
    found["loaded"] = _told(lambda: ckpttool.prove(other, path / "converted", optimizer=fresh))
    engine = _engine(plain := _Tower(), torch.optim.AdamW(plain.parameters()), 0)
    for layers in ("ab", "a"):
        engine.backward(engine(torch.ones(2, 8), layers))
        engine.step()
    engine.save_checkpoint(str(path / "plain"))
    found["plain"] = _told(lambda: ckpttool.prove(engine, path / "plain"))
    return found


def test_steps_that_differ_within_a_group_are_kept_and_proven(tmp_path: Path) -> None:
    (told, _) = each_on_ranks(_steps, [{"id": "a", "world_size": 2}], tmp_path)["a"]
    assert told["same"].startswith("proven: ")
    assert told["steps"] == {"a.weight": 3, "a.bias": 3, "b.weight": 2, "b.bias": 2}
    assert told["loaded"].startswith("proven: ")
    assert "step" in told["loaded"].partition("not compared")[0]
    assert "group 0: step, which differs among its parameters" in told["zero"]
    assert told["plain"].startswith("proven: "), told["plain"]


def _frozen_in_a_group(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Save with a frozen parameter in a group, and prove it trained: on all ranks, and on one."""
    rank, path = torch.distributed.get_rank(), directory / job["id"]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net[0].weight.requires_grad_(False)
    engine = _engine(net, torch.optim.AdamW(net.parameters()), 0)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    ckpttool.CheckpointManager(path).save(engine)
    engine.save_checkpoint(str(path / "plain"))
    found = {}
    for name, thawed, frozen in (
        ("same", False, False),
        ("thawed", True, False),
        ("both", True, True),
        ("one", rank == 1, False),
    ):
        net[0].weight.requires_grad_(thawed)
        net[1].weight.requires_grad_(not frozen)
        found[name] = _told(lambda: ckpttool.prove(engine, path))
        found[f"{name} plain"] = _told(lambda: ckpttool.prove(engine, path / "plain"))
    return found


def test_a_parameter_of_a_group_that_is_frozen_or_not(tmp_path: Path) -> None:
    for told in each_on_ranks(_frozen_in_a_group, [{"id": "a", "world_size": 2}], tmp_path)["a"]:
        for name in ("same", "same plain", "thawed plain"):  # files do not say what was frozen
            assert told[name].startswith("proven: "), (name, told)
            assert "not compared" not in told[name], (name, told)
        assert told["thawed"] == "ProofError: weights of 0.weight is trained now, and was frozen at the save"
        assert told["both"] == told["thawed"]
        assert told["both plain"].startswith("proven: ")
        assert told["one"] == "ProofError: weights of 0.weight is trained now on rank 1, and was frozen at the save"
        assert told["one plain"] == "ProofError: weights of 0.weight is frozen now on rank 0, but not on all ranks"


class _Blocks(torch.optim.Optimizer):  # type: ignore[misc, name-defined]  # torch is not followed
    """Keeps states that are not partitioned like the weights: a tensor of blocks, a list and text.

    Its state dict has the blocks in a dict of their own, as that of bitsandbytes does.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "absmax": torch.ones(7), "kept": [1.0, 2], "how": "x"}
                state["exp_avg"].lerp_(p.grad, 0.1)
                p.sub_(state["exp_avg"] * state["absmax"][0], alpha=group["lr"])
                state["absmax"] = state["absmax"] * 0.5

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        plain = {key: dict(state) for key, state in found["state"].items()}
        return {**found, "state": {k: {"nested": {"absmax": s.pop("absmax")}, **s} for k, s in plain.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        plain = {key: dict(state) for key, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": {k: {**s.pop("nested"), **s} for k, s in plain.items()}})


def _blocks(job: dict[str, Any], directory: Path) -> dict[str, str]:
    rank, path = torch.distributed.get_rank(), directory / job["id"]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = _engine(net, _Blocks(net.parameters()), job["stage"])
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    ckpttool.CheckpointManager(path).save(engine)
    found = {"same": _told(lambda: ckpttool.prove(engine, path))}
    found["plain"] = _told(
        lambda: engine.save_checkpoint(str(path / "plain")) and ckpttool.prove(engine, path / "plain")
    )
    other = _engine(
        net := torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)),
        _Blocks(net.parameters()),
        job["stage"],
    )
    other.backward(other(torch.ones(2, 8)).sum())
    other.step()
    restoring = ckpttool.CheckpointManager(path)
    found["restored"] = _told(lambda: restoring.restore(other, prove=True))
    digests = [ckpttool.live_digest(one).to_json() for one in (engine, other)]
    found["equal"] = str(digests[0] == digests[1])
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = next(iter(inner.state.values()))
    changed = {"absmax": state["absmax"] * 2, "kept": [1.0, 3], "how": "y"}
    for key, value in changed.items():
        kept = state[key]
        if rank == 1:
            state[key] = value
        found[key] = _told(lambda: ckpttool.prove(engine, path))
        state[key] = kept
    return found


def test_states_of_another_form_are_compared_on_every_rank(tmp_path: Path) -> None:
    jobs = [{"id": f"z{stage}", "world_size": 2, "stage": stage} for stage in (0, 1, 3)]
    for name, ranks in each_on_ranks(_blocks, jobs, tmp_path).items():
        for told in ranks:
            assert told["same"].startswith("proven: "), told
            assert "not compared" not in told["same"], told
            assert told["plain"].startswith("proven: "), told
            assert "absmax" in told["plain"].partition("not compared")[2], told
            assert (told["restored"], told["equal"]) == ("{}", "True"), told
            for key in ("absmax", "kept", "how"):
                assert told[key].startswith(f"ProofError: {key}"), (name, told[key])
                assert re.search(r"rank 1|ranks 0 and 1", told[key]), (name, told[key])


def _numbered(job: dict[str, Any], directory: Path) -> list[str]:
    """Prove files that number the optimizer's parameters, which are not in the order of the model."""
    torch.manual_seed(0)
    net = _sharded(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), 2)
    parameters = [*net.parameters()][::-1]
    optimizer = torch.optim.AdamW(parameters)
    net(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = directory / job["id"]
    path.mkdir(exist_ok=True)
    name = f"world_size_2_rank_{torch.distributed.get_rank()}.pt"
    torch.save(net.state_dict(), path / f"model_{name}")
    torch.save(optimizer.state_dict(), path / f"optim_{name}")
    torch.save({"lr_scheduler": None}, path / f"extra_state_{name}")
    torch.distributed.barrier()
    told = [_told(lambda: ckpttool.prove(net, path, optimizer=optimizer))]
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if torch.distributed.get_rank() == 1:
        first, second, third, *others = groups[0]  # two biases of one shape
        optimizer.param_groups[0]["params"] = [third, second, first, *others]
    told.append(_told(lambda: ckpttool.prove(net, path, optimizer=optimizer)))
    optimizer.param_groups[0]["params"] = groups[0][1:]
    told.append(_told(lambda: ckpttool.prove(net, path, optimizer=optimizer)))
    optimizer.param_groups[0]["params"] = groups[0]
    one, other = (optimizer.state[parameters[n]] for n in (0, 2))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    return [*told, _told(lambda: ckpttool.prove(net, path, optimizer=optimizer))]


def test_numbered_parameters_are_those_of_the_live_optimizer(tmp_path: Path) -> None:
    for proof, swapped, shorter, error in each_on_ranks(_numbered, [{"id": "a", "world_size": 2}], tmp_path)["a"]:
        assert "weights, exp_avg" in proof.replace("exp_avg_sq, exp_avg", "exp_avg, exp_avg_sq")
        assert proof.endswith("; not compared: the order of the optimizer's parameters, which the files number")
        assert "rank 1 lists others than rank 0, or in another order" in swapped
        assert "does not fit the optimizer: " in shorter
        assert "exp_avg of 1.bias has other values than were saved" in error
        assert "exp_avg of 2.bias has other values than were saved" in error
