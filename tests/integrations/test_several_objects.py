"""Several models, optimizers and schedulers by name, and other objects with a state, are one save of a torch run."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpttool
from tests.forked import each_on_ranks
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STEPS = 4
SAVED = [
    {"id": "alone", "world_size": 1, "sharded": False},
    {"id": "fsdp", "world_size": 2, "sharded": True},
    {"id": "ddp", "world_size": 2, "sharded": False},
]
RESUMED = [
    {
        "id": f"{saved}-on-{ranks}-{'fsdp' if sharded else 'ddp'}",
        "saved": saved,
        "world_size": ranks,
        "sharded": sharded,
    }
    for saved, ranks, sharded in (
        ("alone", 1, False),
        ("alone", 2, True),
        ("fsdp", 2, True),
        ("fsdp", 3, True),
        ("fsdp", 1, False),
        ("ddp", 2, False),
        ("ddp", 3, True),
    )
]


class Loader:
    """A reader of data, at another place on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at, self.order = rank, 0, torch.arange(4)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class Average:
    """A moving average of the weights of a model, the same on all ranks."""

    def __init__(self, value: float) -> None:
        self.values = {"scale": torch.full((3,), value)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Run:
    """Two models that train together, in half precision."""

    def __init__(self, job: dict[str, Any], seed: int) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        self.rank = dist.get_rank()
        models = {"made": nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 6)), "judge": nn.Sequential(nn.Linear(6, 1))}
        for model in models.values() if job["sharded"] else ():
            fully_shard(model)
        together = not job["sharded"] and dist.get_world_size() > 1
        self.models = {k: nn.parallel.DistributedDataParallel(m) if together else m for k, m in models.items()}
        self.optimizers: dict[str, Any] = {
            "made": torch.optim.AdamW(models["made"].parameters(), lr=0.01),
            "judge": torch.optim.SGD(models["judge"].parameters(), lr=0.1, momentum=0.9),
        }
        self.schedulers: dict[str, Any] = {
            "made": torch.optim.lr_scheduler.StepLR(self.optimizers["made"], 2),
            "judge": torch.optim.lr_scheduler.StepLR(self.optimizers["judge"], 3),
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=3)
        self.loader, self.average = Loader(self.rank), Average(float(seed))

    @property
    def arguments(self) -> dict[str, Any]:
        extra = {"scaler": self.scaler, "loader": self.loader, "average": self.average}
        return {"optimizer": self.optimizers, "scheduler": self.schedulers, "extra": extra}

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            given = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            loss = self.models["judge"](self.models["made"](given)).square().mean()
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers.values():
                self.scaler.step(optimizer)
                optimizer.zero_grad()
            self.scaler.update()
            for scheduler in self.schedulers.values():
                scheduler.step()
            self.loader.at += 10 + self.rank
            self.average.values["scale"] = self.average.values["scale"] + 1
            losses.append(loss.item())
        return losses

    def told(self) -> dict[str, Any]:
        return {
            "scaler": self.scaler.state_dict(),
            "loader": self.loader.at,
            "average": self.average.values["scale"].tolist(),
            "rates": [one.get_last_lr() for one in self.schedulers.values()],
        }


def _save(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    run = Run(job, 3)
    run.train(range(STEPS))
    with ckpttool.CheckpointManager(directory / job["id"], async_save=job["id"] == "ddp") as manager:
        manager.save(run.models, step=STEPS, **run.arguments)
        told = run.told()
        return {**told, "losses": run.train(range(STEPS, STEPS + 3))}


def _resume(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    run = Run(job, 6)
    run.train(range(50, 51))
    manager = ckpttool.CheckpointManager(directory / job["saved"])
    manager.restore(run.models, prove=True, **run.arguments)
    report, told = manager.restored, run.told()
    assert report is not None
    proof = str(ckpttool.prove(run.models, directory / job["saved"], **run.arguments)) if job["again"] else ""
    told |= {"extra": report.extra, "notes": report.notes, "proofs": [str(report.proof), proof]}
    return {**told, "losses": run.train(range(STEPS, STEPS + 3))}


def test_all_of_them_go_on(tmp_path: Path) -> None:
    saved = each_on_ranks(_save, SAVED, tmp_path, imports=["torch.distributed.fsdp"])
    jobs: list[dict[str, Any]] = [
        {**job, "again": len(saved[str(job["saved"])]) == job["world_size"]} for job in RESUMED
    ]
    found = each_on_ranks(_resume, jobs, tmp_path, imports=["torch.distributed.fsdp"])
    for job in jobs:
        truth = saved[job["saved"]]
        for rank, told in enumerate(found[job["id"]]):
            assert told["losses"] == pytest.approx(truth[0]["losses"], rel=1e-5), job["id"]
            assert [told[key] for key in ("scaler", "average", "rates")] == [
                truth[0][key] for key in ("scaler", "average", "rates")
            ], job["id"]
            of_ranks = len(truth) > 1 and not job["again"]
            assert told["loader"] == (10 + rank if of_ranks else truth[rank if len(truth) > 1 else 0]["loader"])
            noted = "loader keeps its state: each rank saved its own, and other ranks load now"
            assert (noted in told["notes"]) == of_ranks
            assert set(told["extra"]) == {"scaler", "average"} | (set() if of_ranks else {"loader"})
            assert told["proofs"][0].startswith("proven: ")
            assert ("not compared: extra" in told["proofs"][0]) == of_ranks
            if job["again"]:
                assert told["losses"] == truth[0]["losses"], job["id"]
                assert told["proofs"][1].startswith("proven: ")
                assert "extra" in told["proofs"][1]
    checkpoint = ckpttool.inspect(tmp_path / "fsdp")
    assert {name.partition(".")[0] for name in (p.name for p in checkpoint.parameters)} == {"made", "judge"}
    assert sorted(checkpoint.data_states) == ["average", "loader", "scaler"]
    assert ckpttool.verify(tmp_path / "fsdp", deep=True).sound


def test_a_changed_state_of_one_rank_is_not_proven(tmp_path: Path) -> None:
    found = each_on_ranks(_changed, [{"id": "changed", "world_size": 2, "sharded": True}], tmp_path)["changed"]
    assert "extra.loader.at of rank 1 is 45" in found[0]
    assert found[0] == found[1]


def _changed(job: dict[str, Any], directory: Path) -> str:
    run = Run(job, 3)
    run.train(range(STEPS))
    ckpttool.CheckpointManager(directory).save(run.models, step=STEPS, **run.arguments)
    run.loader.at += run.rank
    with pytest.raises(ckpttool.ProofError) as caught:
        ckpttool.prove(run.models, directory, **run.arguments)
    return str(caught.value)


class Kept:
    """An object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _values(first: bool) -> dict[str, Any]:
    return {
        "queue": deque([1, 2], maxlen=3 if first else 2),
        "order": {"a": 1, "b": 2} if first else {"b": 2, "a": 1},
        "factory": defaultdict(int if first else list, {"a": 1}),
        "number": 1 if first else 1.0,
        "tuple": (1, 2) if first else [1, 2],
        "array": np.arange(3, dtype="<i4" if first else ">i4"),
    }


def _odd(job: dict[str, Any], directory: Path) -> list[str]:
    """Save states that differ between ranks in the class or the options of a container alone; return the wrong ones."""
    import torch.distributed as dist

    first = dist.get_rank() == 0
    net, optimizer = _net()
    own = _values(first)
    extra = {name: Kept({"value": value}) for name, value in own.items()}
    extra |= {"same": Kept(None), "list": Kept([1, 2])}
    ckpttool.CheckpointManager(directory).save(net, optimizer=optimizer, step=1, extra=extra)
    loaded = {name: Kept(None) for name in extra}
    ckpttool.load(net, directory, optimizer=optimizer, extra=loaded)
    wrong = [name for name, value in own.items() if repr(loaded[name].state["value"]) != repr(value)]
    return wrong + [name for name in ("same", "list") if loaded[name].state != extra[name].state]


def test_states_that_differ_in_a_class_alone_stay_with_their_rank(tmp_path: Path) -> None:
    assert each_on_ranks(_odd, [{"id": 0, "world_size": 2}], tmp_path)[0] == [[], []]


def test_the_object_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    net, optimizer = _net()
    with refused(ckpttool.CkptError):
        extra = {"good": Kept({"a": 1}), "bad": Kept({"f": lambda: None})}
        ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, step=1, extra=extra)


def _net(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 3)
    return net, torch.optim.AdamW(net.parameters())


def _from_fp16(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    from recipes import plain

    model = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(model))
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    report = ckpttool.load(model, source("zero2-dp2-fp16"), optimizer=optimizer, extra={"scaler": scaler})
    again = ckpttool.load(model, source("zero2-dp2-fp16"), optimizer=optimizer)
    return {"scaler": scaler.state_dict(), "report": report.extra, "notes": report.notes, "without": again.notes}


def test_the_loss_scale_of_deepspeed_becomes_that_of_torch(tmp_path: Path) -> None:
    (found,) = each_on_ranks(_from_fp16, [{"id": "fp16", "world_size": 1}], tmp_path)["fp16"]
    saved = ckpttool.inspect(source("zero2-dp2-fp16")).loss_scaler.state
    assert found["scaler"]["scale"] == saved["cur_scale"] != 65536.0
    assert found["scaler"]["_growth_tracker"] == (saved["cur_iter"] - saved["last_overflow_iter"] - 1) % 7
    assert "scaler has the loss scale of DeepSpeed, and its own settings" in found["notes"]
    assert found["report"] == ("scaler",)
    assert any(note.startswith("the loss scale is not restored") for note in found["without"])


def test_one_of_two_schedulers_that_keeps_its_state_is_left_out_of_the_proof(tmp_path: Path) -> None:
    nets = {"a": _net()[0], "b": _net()[0]}
    own = {name: torch.optim.SGD(net.parameters(), lr=0.5) for name, net in nets.items()}
    steps = {name: torch.optim.lr_scheduler.StepLR(one, 2) for name, one in own.items()}
    ckpttool.CheckpointManager(tmp_path).save(nets, optimizer=own, scheduler=steps, step=1)
    other = {**steps, "b": torch.optim.lr_scheduler.CosineAnnealingLR(own["b"], 9)}
    report = ckpttool.load(nets, tmp_path, optimizer=own, scheduler=other, prove=True)
    assert any(note.startswith("the scheduler b keeps its state") for note in report.notes)
    assert "not compared: scheduler" in str(report.proof)


class Broken(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no")


def test_what_cannot_be_loaded_leaves_the_run_unchanged(tmp_path: Path) -> None:
    net, optimizer = _net()
    manager = ckpttool.CheckpointManager(tmp_path)
    manager.save(net, optimizer=optimizer, step=1, extra={"average": Average(2.0)})
    other, own = _net(1)
    before = other.weight.clone()
    with refused(ckpttool.CkptError):
        ckpttool.load(other, tmp_path, optimizer=own, extra={"average": Broken(1.0)})
    assert torch.equal(other.weight, before)
    report = ckpttool.load(other, tmp_path, optimizer=own, extra={"mean": Average(1.0)})
    assert [note for note in report.notes if "mean" in note or "average" in note] == [
        "mean keeps its state: the checkpoint has none",
        "not restored: average; pass extra=... with the objects by these names",
    ]
    report = ckpttool.load(other, tmp_path, weights_only=True, extra={"average": Broken(1.0)})
    assert report.extra == ()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    net, optimizer = _net()
    other, own = _net()
    manager: Any = ckpttool.CheckpointManager(tmp_path)
    for models, more in (
        (net, {"extra": [1]}),
        (net, {"extra": {"a": 1}}),
        (net, {"optimizer": {"a": optimizer}}),
        ({"a": net, "b": 1}, {"optimizer": {"a": optimizer}}),
        ({"a.b": net}, {"optimizer": {"a.b": optimizer}}),
        ({"keys": net}, {"optimizer": {"keys": optimizer}}),
        ({"a": net, "b": other}, {"optimizer": {"a": optimizer, "c": own}}),
        (net, {"scheduler": [1]}),
    ):
        with refused(ckpttool.CkptError):
            manager.save(models, **{"optimizer": optimizer, "step": 1, **more})
    assert not [*tmp_path.iterdir()]
