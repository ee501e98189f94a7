"""Proofs of torch models against files of their own frameworks: FSDP2, HSDP, tensor parallelism, DDP and plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool
from tests import sampling
from tests.forked import each_on_ranks
from tests.wording import refused

lr = pytest.importorskip("torch.optim.lr_scheduler")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SAVED = ("verl", "accelerate", "trainer/checkpoint-3", "titan", "shards", "items")
"""The layouts that ``fsdp_runs.train`` saves."""
JOBS: list[dict[str, Any]] = [
    {"id": f"{mesh}-{ranks}-{dtype}", "mesh": mesh, "world_size": ranks, "dtype": dtype}
    for mesh, ranks in (("fsdp", 1), ("fsdp", 3), ("hsdp", 4), ("tp", 4), ("3d", 4))
    for dtype in ("float32", "bfloat16")
    if sampling.thorough() or (dtype == "float32") == (mesh in {"fsdp", "tp"})
]
JOBS += [
    {"id": "ignored", "mesh": "fsdp", "world_size": 2, "dtype": "float32", "ignored": True},
    {"id": "decay", "mesh": "fsdp", "world_size": 2, "dtype": "float32", "parameters": "decay"},
]
FROM = "fsdp-3-float32"
"""A run that others resume."""
for _number, _job in enumerate(JOBS):
    _job["layouts"] = SAVED if sampling.thorough() or _job["id"] == FROM else SAVED[_number % 2 :: 2]


def _prove(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train, save in every layout, and prove the live run against each; then after one more step."""
    from tests.formats import fsdp_runs

    net, optimizer, scheduler = fsdp_runs.trained(job, directory)
    own = ckpttool.live_digest(net, optimizer)
    assert str(own).splitlines()[-1].startswith(f"{own.count} tensors, ")
    assert all(str(one).split()[-1] in str(own) for of_state in own.tensors.values() for one in of_state.values())
    found: dict[str, Any] = {"digests": [str(one) for key in sorted(own.tensors) for one in own.tensors[key].values()]}
    for name in job["layouts"]:
        with_states = None if name == "shards" else optimizer
        found[name] = str(ckpttool.prove(net, directory / job["id"] / name, optimizer=with_states, scheduler=scheduler))
    fsdp_runs.advance(net, optimizer, 9)
    with pytest.raises(ckpttool.ProofError) as caught:
        ckpttool.prove(net, directory / job["id"] / "verl", optimizer=optimizer)
    found["later"] = list(caught.value.mismatches)
    return found


def _resume(job: dict[str, Any], directory: Path) -> str:
    """Load a run of other ranks by torch's own functions, and prove it."""
    from tests.formats import fsdp_runs

    net, optimizer, _ = fsdp_runs.start({**job, "seed": 4})
    path = directory / FROM / "titan" / "step-3"
    fsdp_runs.LOADERS["torchtitan"](net, optimizer, str(path))
    return str(ckpttool.prove(net, path, optimizer=optimizer))


def _plain(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train a model plain or under DDP, save it by ``dcp.save``, and prove it, wrapped in several ways."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    model: Any = torch.nn.parallel.DistributedDataParallel(net) if job["ddp"] else net
    optimizer = getattr(torch.optim, job["optimizer"])(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
    path = directory / job["id"]
    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=str(path))
    found = {"same": str(ckpttool.prove(model, path, optimizer=optimizer, scheduler=scheduler))}
    found["compiled"] = str(ckpttool.prove(torch.compile(model), path, optimizer=optimizer))
    found["alone"] = str(ckpttool.prove(model, path))
    if torch.distributed.get_rank() == 1:
        net[0].bias.data[3] += 1e-6
    if job["world_size"] > 1:
        with pytest.raises(ckpttool.ProofError) as caught:
            ckpttool.live_digest(model)
        found["apart"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    directory = tmp_path_factory.mktemp("proof")
    found: dict[str, list[Any]] = each_on_ranks(_prove, JOBS, directory)
    resumed = [{**job, "id": f"resumed-{job['id']}"} for job in JOBS if job["id"].endswith("float32")]
    found |= each_on_ranks(_resume, resumed, directory)
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_run_is_proven_against_the_files_of_frameworks(job: dict[str, Any], proven: dict[str, list[Any]]) -> None:
    ranks, layouts = proven[job["id"]], job["layouts"]
    for one in ranks:
        for layout in layouts:
            assert one[layout].startswith("proven: "), layout
            left_out = "numbers the optimizer's parameters" in one[layout]
            assert ("exp_avg_sq" in one[layout]) == (layout != "shards" and not left_out), layout
        assert one == {**ranks[0], **{layout: one[layout] for layout in layouts}}, "ranks agree"
    for layout in SAVED:
        left_out = proven[FROM][0][layout].partition("; not compared: ")[2]
        ordered = "the order of the optimizer's parameters, which the files number"
        assert left_out == (ordered if layout == "verl" else "scheduler, which the checkpoint does not record")


@pytest.mark.parametrize("name", [job["id"] for job in JOBS])
def test_one_more_step_is_found(name: str, proven: dict[str, list[Any]]) -> None:
    later = proven[name][0]["later"]
    assert any(text.startswith("weights of up.weight has other values") for text in later)
    assert not any("frozen" in text or "positions" in text for text in later), "which did not change"


def test_hsdp_and_fsdp_have_the_digests_of_one_rank_where_they_start(tmp_path: Path) -> None:
    jobs = [
        {"id": f"{mesh}-{ranks}", "mesh": mesh, "world_size": ranks, "dtype": "float32"}
        for mesh, ranks in (("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("tp", 4), ("3d", 4))
    ]
    found = each_on_ranks(_start, jobs, tmp_path)
    assert len({str(one) for ranks in found.values() for one in ranks}) == 1


def _start(job: dict[str, Any], _: Path) -> dict[str, Any]:
    from tests.formats import fsdp_runs

    net, optimizer, _ = fsdp_runs.start(job)
    tensors: dict[str, Any] = ckpttool.live_digest(net, optimizer).to_json()["tensors"]
    return tensors


@pytest.mark.parametrize("name", [job["id"] for job in JOBS if job["id"].endswith("float32")])
def test_a_run_on_other_ranks_is_proven(name: str, proven: dict[str, list[Any]]) -> None:
    assert all("exp_avg_sq" in one and "not compared" not in one for one in proven[f"resumed-{name}"])


def test_plain_models_and_ddp(tmp_path: Path) -> None:
    jobs = [
        {"id": f"{ranks}-{optimizer}", "world_size": ranks, "ddp": ranks > 1, "optimizer": optimizer}
        for ranks in (1, 2)
        for optimizer in ("AdamW", "SGD", "Adagrad", "NAdam", "Adafactor", "RMSprop")
    ]
    for name, ranks in each_on_ranks(_plain, jobs, tmp_path).items():
        for one in ranks:
            for how in ("same", "compiled", "alone"):
                assert one[how].startswith("proven: "), (name, how)
            assert one["alone"].endswith("; not compared: the optimizer's states, because no optimizer was passed")
            if "apart" in one:
                assert "weights of 0.bias differs between ranks 0 and 1" in one["apart"]


class _Trained:
    """A module with a batch norm under two names, and its optimizer and scheduler after one step."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(4)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.Sequential(norm))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.net(torch.randn(5, 4)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, path: Path) -> Path:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self.net, self.optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=str(path), no_dist=True)
        return path


@pytest.fixture
def run() -> _Trained:
    return _Trained()


def _left_out(proof: ckpttool.Proof) -> str:
    return "; ".join(proof.unproven)


def test_one_element_with_a_stride_is_digested(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    net = torch.nn.Module()
    net.one = torch.nn.Parameter(torch.ones(2)[::2])
    assert net.one.stride() == (2,)
    dcp.save({"model": net.state_dict()}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert str(ckpttool.prove(net, tmp_path / "a")).startswith("proven: 1 tensors")


def test_parts_that_one_side_alone_has_are_named(tmp_path: Path, run: _Trained) -> None:
    path = run.save(tmp_path / "a")
    assert _left_out(ckpttool.prove(run.net, path, optimizer=run.optimizer)) == ""
    proof = ckpttool.prove(run.net, path, optimizer=run.optimizer, scheduler=run.scheduler)
    assert _left_out(proof) == "scheduler, which the checkpoint does not record"
    without = "the optimizer's states, because no optimizer was passed"
    assert _left_out(ckpttool.prove(run.net, path)) == without
    assert _left_out(ckpttool.prove(run.net, path, scheduler=run.scheduler)) == f"{without}; {_left_out(proof)}"
    del run.optimizer.param_groups[0]["amsgrad"]
    run.optimizer.param_groups[0]["beta3"] = 0.5
    proof = ckpttool.prove(run.net, path, optimizer=run.optimizer)
    assert proof.unproven == (
        "amsgrad, which the live groups do not have",
        "beta3, which the checkpoint does not record",
    )


def test_lists_of_states_are_named_by_both(tmp_path: Path, run: _Trained, caplog: pytest.LogCaptureFixture) -> None:
    for state in run.optimizer.state.values():
        state |= {"factors": [state["exp_avg"].clone()], "table": np.arange(3), "unused": []}
    path = run.save(tmp_path / "a")
    left_out = _left_out(ckpttool.prove(run.net, path, optimizer=run.optimizer))
    assert "factors: it is a list, not a tensor; table: it is a ndarray, not a tensor" in left_out
    assert "unused" not in left_out
    ckpttool.live_digest(run.net, run.optimizer)
    assert "live_digest left out factors: it is a list, not a tensor" in caplog.text


def test_states_of_a_class_with_inner_tensors_are_named(tmp_path: Path, run: _Trained) -> None:
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    path = run.save(tmp_path / "a")
    for state in run.optimizer.state.values():
        state["exp_avg"] = TwoTensor(state["exp_avg"], state["exp_avg"])
    proof = ckpttool.prove(run.net, path, optimizer=run.optimizer)
    assert "exp_avg_sq" in proof.states
    assert proof.unproven == ("exp_avg: it is a TwoTensor, not a tensor",)
    run.net[0].weight = torch.nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    with refused(ckpttool.ArgumentError):
        ckpttool.prove(run.net, path)


def test_states_in_a_dict_of_their_own_in_a_distributed_checkpoint(tmp_path: Path, run: _Trained) -> None:
    """As bitsandbytes saves the blocks of its 8-bit optimizers."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    first = next(iter(run.optimizer.state.values()))
    for number, state in enumerate(run.optimizer.state.values()):
        state["absmax"] = torch.full((7,), float(number))
    weights, states = get_state_dict(run.net, run.optimizer)
    nested = {
        name: {"nested": {"absmax": state["absmax"]}, **{key: one for key, one in state.items() if key != "absmax"}}
        for name, state in states["state"].items()
    }
    saved = {"model": weights, "optim": {**states, "state": nested}}
    dcp.save(saved, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    proof = ckpttool.prove(run.net, tmp_path / "a", optimizer=run.optimizer)
    assert "absmax" in proof.states
    assert "absmax" not in _left_out(proof)
    first["absmax"][3] = 1
    with pytest.raises(ckpttool.ProofError) as caught:
        ckpttool.prove(run.net, tmp_path / "a", optimizer=run.optimizer)
    assert [text.partition(" has ")[0] for text in caught.value.mismatches] == ["absmax of 0.weight"]


def test_numbered_states_are_left_out(tmp_path: Path, run: _Trained) -> None:
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "a"
    numbered = {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.save(numbered, checkpoint_id=str(path), no_dist=True)
    proof = ckpttool.prove(run.net, path, optimizer=run.optimizer)
    told = ".metadata numbers the optimizer's parameters: save what get_state_dict returns, with names"
    assert (proof.states, proof.unproven) == (("weights",), (f"the optimizer's states: {told}",))
    assert any(told in remark for remark in ckpttool.inspect(path).remarks)


def test_wrong_arguments_get_one_line(tmp_path: Path, run: _Trained) -> None:
    import torch

    path = run.save(tmp_path / "a")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": run.optimizer.state_dict()}, "not an optimizer; pass the object, not its state"),
        ({"scheduler": 3}, "scheduler: is 3, not a scheduler; pass the object, not its state"),
    ]
    for given, told in wrong:
        with pytest.raises(ckpttool.ArgumentError) as caught:
            ckpttool.prove(run.net, path, **given)
        assert told in str(caught.value)
    run.net.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    with refused(ckpttool.ArgumentError):
        ckpttool.live_digest(run.net)
    with refused(ckpttool.CkptError):
        ckpttool.prove(run.net, run.save(tmp_path / "complex"))


def test_a_scheduler_and_tensors_beside_the_model_in_a_distributed_checkpoint(tmp_path: Path, run: _Trained) -> None:
    """The checkpoint of an application, as PyTorch's tutorial saves it, with more objects in it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(run.net, run.optimizer)
    loader = {"position": 3, "generator": torch.get_rng_state()}
    everything = {"app": {"model": weights, "optim": states}, "sched": run.scheduler.state_dict(), "loader": loader}
    dcp.save(everything, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    proof = ckpttool.prove(run.net, tmp_path / "a", optimizer=run.optimizer, scheduler=run.scheduler)
    assert proof.states == ("weights", "exp_avg", "exp_avg_sq", "step", "hyper-parameters", "scheduler")
    assert proof.unproven == (
        "1 tensor saved beside the model, such as loader.generator",
        "the client state, such as loader.position: the save recorded no digests",
    )
    run.scheduler.last_epoch += 1
    with refused(ckpttool.ProofError) as caught:
        ckpttool.prove(run.net, tmp_path / "a", optimizer=run.optimizer, scheduler=run.scheduler)
    assert len(caught.value.mismatches) == 1


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr.StepLR(o, 2),
    "milestones": lambda o: lr.MultiStepLR(o, [1, 5]),
    "cycle": lambda o: lr.OneCycleLR(o, 0.1, 20),
    "lambda": lambda o: lr.LambdaLR(o, _Decay(2)),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, 2)], [1]),
    "chain": lambda o: lr.ChainedScheduler([lr.StepLR(o, 2), lr.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lr.ReduceLROnPlateau(o),
}


class _Decay:
    """A function of the step with a state, which its scheduler saves."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, step: int) -> float:
        return float(self.k**-step)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_of_every_form_in_a_distributed_checkpoint(kind: str, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(*([1.0] if kind == "plateau" else []))
    weights, states = get_state_dict(net, optimizer)
    loader = {"last_epoch": 7, "position": 3}
    everything = {"model": weights, "optim": states, "sched": scheduler.state_dict(), "loader": loader}
    dcp.save(everything, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    proof = ckpttool.prove(net, tmp_path / "a", optimizer=optimizer, scheduler=scheduler)
    assert "scheduler" in proof.states
    assert proof.unproven == ("the client state, such as loader.last_epoch: the save recorded no digests",)
    inner = scheduler._schedulers[0] if hasattr(scheduler, "_schedulers") else scheduler
    inner.last_epoch += 1
    with refused(ckpttool.ProofError):
        ckpttool.prove(net, tmp_path / "a", optimizer=optimizer, scheduler=scheduler)
    other = lr.CyclicLR(torch.optim.SGD(net.parameters(), lr=0.01), 0.01, 0.1)
    proof = ckpttool.prove(net, tmp_path / "a", optimizer=optimizer, scheduler=other)
    assert "the scheduler: no state in the checkpoint has its keys" in proof.unproven


@pytest.mark.parametrize("apart", [False, True], ids=["joint", "apart"])
def test_several_optimizers(apart: bool, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 4))
    matrices, others = ([p for p in net.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.001)]
    net(torch.ones(2, 6)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizers)
    saved = {f"optim{n}": get_optimizer_state_dict(net, one) for n, one in enumerate(optimizers)}
    dcp.save({"model": weights, **(saved if apart else {"optim": states})}, checkpoint_id=str(tmp_path), no_dist=True)
    proof = ckpttool.prove(net, tmp_path, optimizer=optimizers)
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq", "hyper-parameters"} < {*proof.states}
    assert proof.unproven == ()
    optimizers[0].state[net[1].weight]["momentum_buffer"][0, 0] += 1
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ckpttool.ProofError) as caught:
        ckpttool.prove(net, tmp_path, optimizer=optimizers)
    named = [text.partition(" is ")[0].partition(" has ")[0] for text in caught.value.mismatches]
    assert sorted(named) == [
        "lr of the group of 0.bias", "lr of the group of 0.weight", "momentum_buffer of 1.weight",
    ]  # fmt: skip


def _statistics_of_ranks(job: dict[str, Any], directory: Path) -> list[str]:
    """Save a batch norm with other statistics on each rank, and prove it as saved, with a fault, and with another."""
    import torch
    import torch.distributed.checkpoint as dcp

    net, path = torch.nn.BatchNorm1d(3), directory / job["id"]
    rank, last = torch.distributed.get_rank(), job["world_size"] - 1
    net.running_mean.fill_(rank)
    dcp.save({"model": net.state_dict()}, checkpoint_id=str(path))
    told = [str(ckpttool.prove(net, path))]
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=str(path))
    told.append(str(ckpttool.prove(net, path)))
    if rank == 0:
        net.running_mean.add_(10)
    if rank == last:
        net.running_var = None
    told.append(str(ckpttool.prove(net, path)))
    net.running_mean.fill_(20 + rank)
    with pytest.raises(ckpttool.ProofError) as caught:
        ckpttool.prove(net, path)
    return [*told, *caught.value.mismatches]


def test_statistics_that_differ_between_ranks(tmp_path: Path) -> None:
    """``dcp.save`` writes those of any rank; a load gives them to all."""
    jobs = [{"id": str(ranks), "world_size": ranks} for ranks in (2, 3)]
    for ranks in each_on_ranks(_statistics_of_ranks, jobs, tmp_path).values():
        last = len(ranks) - 1
        for saved, loaded, faulty, *mismatches in ranks:
            assert "not compared: running_mean (other values on ranks " in saved
            assert "not compared" not in loaded
            other = f"running_mean (other values on ranks 0); running_var (missing on ranks {last})"
            assert faulty.endswith(f"not compared: {other}")
            assert [text.partition(" has ")[0] for text in mismatches] == ["weights of running_mean"]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"model": "weights", "rng": "tensor"}, "1 tensor saved beside the model, such as rng"),
        ({"model": "weights", "ema": "weights"}, "tensors saved beside the model, such as ema.0.weight"),
        ({"net": "weights"}, "has weights of other names, such as net.0."),
        ({"net": "weights", "ema": "weights"}, "has weights of other names, such as "),
    ],
    ids=["tensor", "ema", "net", "several"],
)
def test_other_state_dicts_are_not_taken_for_the_model(saved: dict[str, str], told: str, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    kinds = {"weights": net.state_dict(), "tensor": torch.get_rng_state()}
    dcp.save({key: kinds[kind] for key, kind in saved.items()}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    if "model" in saved:
        assert told in _left_out(ckpttool.prove(net, tmp_path / "a"))
        del net[1]
        with refused(ckpttool.ProofError):
            ckpttool.prove(net, tmp_path / "a")
    else:
        with pytest.raises(ckpttool.CkptError, match=told):
            ckpttool.prove(net, tmp_path / "a")
