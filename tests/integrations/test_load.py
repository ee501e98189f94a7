"""A checkpoint of any format is loaded into a live torch run of any kind, on any number of ranks."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckpttool
from tests import sampling
from tests.damage import flip
from tests.forked import each_on_ranks
from tests.formats import fsdp_runs
from tests.truth import source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

# --------------------------------------------------------------------------------------------------- from DeepSpeed

ZERO = (
    "zero0-dp2-bf16-unfused", "zero0-dp2-fp32", "zero1-dp2-fp16", "zero2-dp2-bf16", "zero2-dp2-bf16-round-robin",
    "zero2-dp3-bf16", "zero3-dp4-bf16", "zero3-dp2-fp32", "zero3-dp2-bf16-sub-groups", "zero3-dp2-bf16-nvme",
    "universal-zero2-dp2-bf16", "zero2-dp2-bf16-cpu-adam-offload", "ds0.9.5-zero3-dp2-fp16",
)  # fmt: skip
MESHES = (("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("2d", 4))
FROM_ZERO: list[dict[str, Any]] = sampling.some(
    [
        {"id": f"{name}-on-{mesh}-{ranks}", "source": name, "mesh": mesh, "world_size": ranks}
        for name in ZERO
        for mesh, ranks in MESHES
    ],
    14,  # each source, and each mesh twice
)


def _wrapped(model: Any, mesh: str) -> tuple[Any, Any]:
    """Return the model of DeepSpeed's fixtures under a kind of parallelism, and the module inside."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = dist.get_world_size()
    if mesh == "plain":
        return model, model
    if mesh == "ddp":
        return nn.parallel.DistributedDataParallel(model), model
    if mesh == "fsdp":
        own = init_device_mesh("cpu", (ranks,))
    elif mesh == "hsdp":
        own = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        rows, columns = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, whole["tp"], {"down": rows, "frozen_proj": columns})
        own = whole["dp"]
    for module in (model.up, model):  # a scalar cannot be sharded
        fully_shard(module, mesh=own, ignored_params={model.scale} if module is model else set())
    return model, model


def _held(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return all tensors of a run, whole, by "KEY/NAME"."""
    found = {f"fp32/{name}": value for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        found |= {f"{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in whole.items()}


def _from_zero(job: dict[str, Any]) -> dict[str, Any]:
    from recipes import plain

    torch.manual_seed(1)
    model, inner = _wrapped(plain.build_model(), job["mesh"])
    optimizer = torch.optim.AdamW(plain.param_groups(inner))
    report = ckpttool.load(model, source(job["source"]), optimizer=optimizer, prove=True)
    held = _held(inner, optimizer)
    tokens = torch.arange(12).reshape(2, 6)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    options = [{key: group[key] for key in ("lr", "weight_decay", "betas", "eps")} for group in optimizer.param_groups]
    told = {"report": str(report), "step": report.step, "client": report.client_state, "loss": loss.item()}
    return {**told, "held": held, "options": options, "read": report.nbytes_read}


def test_a_group_without_parameters_keeps_nothing_out_of_a_proof(tmp_path: Path) -> None:
    """The Trainer makes a group of biases, also for an adapter that has none."""
    runs = []
    for _ in range(2):
        net = nn.Linear(3, 3, bias=False)
        runs.append((net, torch.optim.AdamW([{"params": [net.weight]}, {"params": [], "weight_decay": 0.0}])))
    (net, optimizer), (other, fresh) = runs
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, step=1)
    report = ckpttool.load(other, tmp_path, optimizer=fresh, prove=True)
    assert report.groups_kept == ()
    assert "hyper-parameters, which were not restored" not in str(report)


def test_a_run_of_torch_goes_on_with_what_deepspeed_saved() -> None:
    found = each_on_ranks(_from_zero, FROM_ZERO, imports=["torch.distributed.fsdp"])
    losses: dict[str, float] = {}
    for job in FROM_ZERO:
        expected, facts = truth(job["source"]), truth(job["source"]).facts
        assert len(found[job["id"]]) == job["world_size"]
        for told in found[job["id"]]:
            held = told["held"]
            for key, tensor in expected.tensors.items():
                kind, _, name = key.partition("/")
                own = f"fp32/{name}" if kind in {"buffer", "module"} else key
                if kind == "module" and f"fp32/{name}" in expected.tensors:
                    continue  # the copy of a master
                if own in held:
                    same = tensor.reshape(held[own].shape).to(held[own].dtype)  # universal files lose a scalar's shape
                    assert torch.equal(held[own], same), (job["id"], own)
            steps = {float(held[f"step/{name}"]) for name in ("up.weight", "scale")}
            counted = facts.get("scalars") or [{"step": facts["adam_step"]}]  # unfused optimizers count one more
            assert steps == {own["step"] for own in counted}, (job["id"], steps)
            assert told["step"] == facts["global_steps"]
            assert told["client"].keys() == ckpttool.inspect(source(job["source"])).client_state.keys()
            assert told["loss"] == pytest.approx(losses.setdefault(job["source"], told["loss"]), rel=1e-5)
            moments = [key for key in held if key.startswith("exp_avg/")]
            assert {key.partition("/")[2] for key in moments} == {
                key.partition("/")[2] for key in expected.tensors if key.startswith("exp_avg/")
            }
            assert f"to torch over {job['world_size']} rank" in told["report"]


def _save_by_manager(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train an engine with a scheduler, and commit it with a state of each rank."""
    import torch.distributed as dist

    from tests.deepspeed.engines import build, held, step

    engine = build(job["stage"], "fp32", "two", "adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 2, gamma=0.5)
    engine.lr_scheduler = scheduler
    step(engine, 3)
    manager = ckpttool.CheckpointManager(str(directory / "run"))
    manager.save(engine, tag="t", client_state={"n": 7}, rank_state={"rng": ckpttool.rng_state(), "r": dist.get_rank()})
    return {"held": held(engine), "scheduler": scheduler.state_dict()}


def _load_commit(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    torch.manual_seed(job["world_size"])
    net = nn.Module()
    net.a, net.b, net.c = (nn.Linear(6, 6) for _ in range(3))
    biases, weights = ([getattr(net, name).get_parameter(kind) for name in "cab"] for kind in ("bias", "weight"))
    optimizer = torch.optim.AdamW([{"params": biases}, {"params": weights}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    net.forward = None
    model = nn.parallel.DistributedDataParallel(net) if job["world_size"] > 1 else net
    report = ckpttool.load(model, directory / "run", optimizer=optimizer, scheduler=scheduler, prove=True)
    held = _held(net, optimizer)
    held |= {
        f"lr/{name}.{kind}": optimizer.param_groups[i]["lr"]
        for i, kind in enumerate(("bias", "weight"))
        for name in "abc"
    }
    rng = report.rng_state()
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    again = ckpttool.load(model, directory / "run", optimizer=optimizer, scheduler=other)
    keeps = "the scheduler keeps its state, and computes the next rate from it:"
    assert f"{keeps} the checkpoint has the scheduler of another class" in again.notes
    assert not again.scheduler
    assert other.last_epoch == 0
    return {
        "held": held, "scheduler": scheduler.state_dict(), "client": report.client_state, "own": report.rank_state,
        "states": len(report.rank_states), "rng": rng is not None, "proof": str(report.proof),
    }  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_a_commit_of_a_manager_is_proven_by_its_digests_with_scheduler_and_rank_states(
    stage: int, tmp_path: Path
) -> None:
    (saved,) = each_on_ranks(_save_by_manager, [{"id": 0, "world_size": 2, "stage": stage}], tmp_path).values()
    found = each_on_ranks(_load_commit, [{"id": ranks, "world_size": ranks} for ranks in (1, 2, 3)], tmp_path)
    rates, last = (saved[0]["scheduler"][key] for key in ("base_lrs", "_last_lr"))
    assert rates[0] != rates[1]
    for ranks, every in found.items():
        for rank, told in enumerate(every):
            for key, value in saved[0]["held"].items():
                if not key.startswith(("module/", "bf16/")):
                    same = torch.as_tensor(told["held"][key]), torch.as_tensor(value)
                    assert torch.equal(*same), (ranks, key)
            assert told["scheduler"] == {**saved[0]["scheduler"], "base_lrs": rates[::-1], "_last_lr": last[::-1]}
            assert told["client"]["n"] == 7
            assert told["states"] == 2
            assert told["rng"]
            assert (told["own"] or {}).get("r") == (rank if ranks == 2 else None)
            assert "equal the state saved at step 3" in told["proof"]


def _one_differs(job: dict[str, Any]) -> list[str]:
    """Load where the second rank has another optimizer, other options, another model, or a file that it cannot read."""
    from unittest import mock

    import torch.distributed as dist
    from recipes import plain

    from ckpttool.integrations.torch import load

    second = dist.get_rank() == 1
    torch.manual_seed(1)
    net = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(net))
    before = _held(net, optimizer)
    other = torch.optim.SGD(plain.param_groups(net), momentum=0.9)
    fails = mock.patch.object(load, "_read", side_effect=MemoryError("none left"))
    told = []
    for what in ("optimizer", "strict", "model", "memory"):
        options = {"optimizer": other if second and what == "optimizer" else optimizer}
        options |= {"strict": not second} if what == "strict" else {}
        model = None if second and what == "model" else net
        with fails if second and what == "memory" else contextlib.nullcontext():
            try:
                ckpttool.load(model, source(job["source"]), timeout=20, **options)
                told.append("loaded")
            except ckpttool.CkptError as error:
                told.append(str(error))
    after = _held(net, optimizer)
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    return [*told, "unchanged" if same else "changed"]


def test_what_differs_on_one_rank_is_refused_on_all() -> None:
    (told,) = each_on_ranks(_one_differs, [{"id": 0, "world_size": 2, "source": "zero2-dp2-bf16"}]).values()
    optimizer, strict, model, memory, after = zip(*told, strict=True)
    assert all("rank 0 has optimizer ['AdamW'], rank 1 has ['SGD']" in text for text in optimizer)
    assert all("rank 0 has strict True, rank 1 has False" in text for text in strict)
    assert all(
        "rank 1: is <torch.optim.adamw.AdamW>, not True or False; an engine has its own" in text for text in model
    )
    assert all("rank 1: MemoryError: none left" in text for text in memory)
    assert after == ("unchanged",) * 2


# -------------------------------------------------------------------------------------------------- from frameworks

SAVED: list[dict[str, Any]] = [
    {"id": "fsdp-3", "mesh": "fsdp", "world_size": 3, "dtype": "float32"},
    {"id": "tp-4", "mesh": "tp", "world_size": 4, "dtype": "bfloat16"},
    {"id": "hsdp-4", "mesh": "hsdp", "world_size": 4, "dtype": "float32", "parameters": "decay"},
]
SOURCES = ("verl/global_step_3/actor", "accelerate/checkpoint-3", "trainer/checkpoint-3", "titan/step-3", "items", "")
"""What a run has saved; and last what is converted, and loaded by torch's own functions: the next step is the same."""
LOADED: list[dict[str, Any]] = [
    {"id": f"{job['id']}-on-{mesh}-{ranks}", "saved": job["id"], "mesh": mesh, "world_size": ranks, "from": SOURCES}
    for job in SAVED
    for mesh, ranks in (("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 4), ("3d", 4))
]
if not sampling.thorough():  # each mesh and each source once, and each run twice
    LOADED = [{**LOADED[7 * n % 18], "from": SOURCES[n : n + 1]} for n in range(6)]


def test_a_run_goes_on_with_what_another_mesh_and_framework_saved(tmp_path: Path) -> None:
    each_on_ranks(fsdp_runs.train, SAVED, tmp_path, imports=["torch.distributed.checkpoint", "torch.distributed.fsdp"])
    saved = {job["id"]: job for job in SAVED}
    jobs = []
    for job in LOADED:
        root = tmp_path / job["saved"]
        run = saved[job["saved"]]
        of_run = {"dtype": run["dtype"], "parameters": run.get("parameters", "all")}
        sources = [("ckpttool", str(root / name)) for name in job["from"] if name]
        if "" in job["from"]:
            ckpttool.convert(root / SOURCES[2], tmp_path / job["id"] / "nested", to="dcp")
            sources.append(("nested", str(tmp_path / job["id"] / "nested")))
        truths = str(root / "truth.safetensors")
        jobs.append({**job, **of_run, "sources": sources, "truth": truths, "id": f"{job['id']}-done"})
    each_on_ranks(fsdp_runs.resume, jobs, tmp_path, imports=["torch.distributed.checkpoint"])
    assert all((tmp_path / job["id"]).read_text() == "loaded" for job in jobs)


# --------------------------------------------------------------------------------------------------------- one rank


class Net(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A small model with a scalar, a tied weight, a frozen layer, buffers, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Any) -> Any:
        """Return logits."""
        x = self.embed(tokens)
        x = x + self.frozen(self.down(torch.relu(self.up(x)))) * self.scale
        return self.head(self.norm(x))


def _adafactor(parameters: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adafactor of transformers": _adafactor,
}


def _run(optimizer: str = "adam", dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    net = Net().to(dtype)
    made = OPTIMIZERS[optimizer](p for p in net.parameters() if p.requires_grad)
    return net, made, torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)


def _train(run: tuple[Any, Any, Any], steps: range) -> list[float]:
    net, optimizer, scheduler = run
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = net(torch.randint(0, 11, (7,))).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def _save(run: tuple[Any, Any, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net, optimizer, _ = run
    states = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.save(states, checkpoint_id=str(path))


def _all_of(run: tuple[Any, Any, Any]) -> dict[str, Any]:
    net, optimizer, _ = run
    found = {name: (t.dtype, t.tolist()) for name, t in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
    return found


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    sampling.some(itertools.product(OPTIMIZERS, [torch.float32, torch.bfloat16]), len(OPTIMIZERS) + 3),
    ids=str,
)
def test_every_optimizer_goes_on_as_if_it_had_not_stopped(optimizer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = _run(optimizer, dtype)
    _train(saved, range(3))
    _save(saved, tmp_path / "saved")
    expected, called = _all_of(saved), []
    further = _train(saved, range(3, 6))
    for how in ("fresh", "with gradients", "used"):
        run = net, own, scheduler = _run(optimizer, dtype, seed=1)
        if how == "with gradients":
            (net.scale * net.unused.sum()).backward()
        if how == "used":
            net.unused.grad = torch.ones_like(net.unused)  # so that it has states, which the checkpoint lacks
            _train(run, range(20, 22))
        own.register_step_pre_hook(lambda *_: called.append(1))
        of_all = register_optimizer_step_pre_hook(lambda *_: called.append(1))
        rate = own.param_groups[0]["lr"]
        report = ckpttool.load(net, tmp_path / "saved", optimizer=own, prove=True)
        of_all.remove()
        assert called == []
        assert _all_of(run) == expected, how
        assert own.param_groups[0]["lr"] is rate or optimizer != "tensor lr"
        assert all(p.grad is None for p in net.parameters())
        assert ("gradients" in " ".join(report.notes)) == (how == "with gradients")
        own._optimizer_step_pre_hooks.clear()
        scheduler.last_epoch = 3  # a checkpoint of torch has no scheduler
        assert _train(run, range(3, 6)) == further, how
        called.clear()


def test_options_are_those_of_the_same_parameters(tmp_path: Path) -> None:
    def groups(net: Any, *, cut: bool) -> list[dict[str, Any]]:
        own = [p for p in net.parameters() if p.requires_grad]
        matrices, others = [p for p in own if p.dim() > 1], [p for p in own if p.dim() < 2]
        return [{"params": others}, {"params": matrices[:1]}, {"params": matrices[1:]}] if cut else [
            {"params": matrices, "lr": 0.5, "weight_decay": 0.25}, {"params": others, "lr": 0.125},
        ]  # fmt: skip

    net, _, _ = _run()
    optimizer = torch.optim.AdamW(groups(net, cut=False), fused=True)
    run = net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100)
    _train(run, range(2))
    _save(run, tmp_path / "saved")
    other, _, _ = _run(seed=1)
    own = torch.optim.AdamW(groups(other, cut=True), foreach=True)
    ckpttool.load(other, tmp_path / "saved", optimizer=own)
    assert [(g["lr"], g["weight_decay"]) for g in own.param_groups] == [(0.125, 0.01), (0.5, 0.25), (0.5, 0.25)]
    assert all(g["foreach"] and not g["fused"] for g in own.param_groups), "how a run computes is its own"


def test_options_that_the_checkpoint_replaces_are_noted(tmp_path: Path) -> None:
    net, _, _ = _run()
    run = net, torch.optim.AdamW(net.parameters(), lr=0.5), None
    _train((*run[:2], torch.optim.lr_scheduler.StepLR(run[1], 100)), range(1))
    _save(run, tmp_path / "saved")
    other, _, _ = _run(seed=1)
    own = torch.optim.Adam(other.parameters(), lr=0.25, betas=(0.8, 0.999))
    changed = "betas (0.9, 0.999) for (0.8, 0.999), decoupled_weight_decay True for False, weight_decay 0.01 for 0"
    report = ckpttool.load(other, tmp_path / "saved", optimizer=own)
    assert f"options of the checkpoint replace the run's: {changed}" in report.notes
    assert own.param_groups[0]["decoupled_weight_decay"]
    again = ckpttool.load(other, tmp_path / "saved", optimizer=own)
    assert not [note for note in again.notes if "options" in note], "rates differ in every resume"


def test_only_weights(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    net, optimizer, _ = _run(seed=1)
    report = ckpttool.load(net, tmp_path / "saved", weights_only=True, prove=True)
    assert all(torch.equal(value, saved[0].state_dict()[name]) for name, value in net.state_dict().items())
    assert not optimizer.state
    assert (report.weights_only, report.optimizer, report.states) == (True, False, ())
    ckpttool.consolidate(tmp_path / "saved", tmp_path / "weights", to="safetensors", dtype="bf16")
    other, _, _ = _run(seed=2, dtype=torch.bfloat16)
    ckpttool.load(other, tmp_path / "weights", weights_only=True)
    for name, value in other.named_parameters():
        assert torch.equal(value, saved[0].get_parameter(name).bfloat16())


def test_a_dry_run_and_a_damaged_file_change_nothing(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    run = net, optimizer, _ = _run(seed=1)
    before = _all_of(run)
    report = ckpttool.load(net, tmp_path / "saved", optimizer=optimizer, dry_run=True)
    assert report.states == ("exp_avg", "exp_avg_sq", "step")
    assert str(report).startswith(f"{tmp_path / 'saved'}: would restore")
    assert _all_of(run) == before
    file = tmp_path / "saved" / "__0_0.distcp"
    flip(file, file.read_bytes().index(saved[0].up.weight.detach().numpy().tobytes()))
    with pytest.raises(ckpttool.CkptError):
        ckpttool.load(net, tmp_path / "saved", optimizer=optimizer)
    assert _all_of(run) == before


def test_types_are_those_of_the_run_and_what_is_rounded_is_named(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    net, optimizer, _ = _run(dtype=torch.bfloat16, seed=1)
    report = ckpttool.load(net, tmp_path / "saved", optimizer=optimizer)
    assert "weights are rounded from F32 to BF16, the type of the run" in report.notes
    assert "exp_avg are rounded from F32 to BF16, the type of the run" in report.notes
    for name, value in net.named_parameters():
        theirs = saved[0].get_parameter(name)
        assert torch.equal(value, theirs.bfloat16())
        for key, own in optimizer.state.get(value, {}).items():
            assert torch.equal(own, saved[1].state[theirs][key].to(own.dtype))


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no optimizer": lambda _: {},
    "its state": lambda run: {"optimizer": run[1].state_dict()},
    "lbfgs": lambda run: {"optimizer": torch.optim.LBFGS(run[0].parameters())},
    "of another model": lambda _: {"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters())},
    "of another class": lambda run: {"optimizer": torch.optim.SGD(run[0].parameters(), momentum=0.9)},
    "without states": lambda run: {"optimizer": torch.optim.SGD(run[0].parameters())},
    "with a state more": lambda run: {"optimizer": torch.optim.AdamW(run[0].parameters(), amsgrad=True)},
    "adafactor": lambda run: {"optimizer": torch.optim.Adafactor(run[0].parameters())},
    "scheduler": lambda run: {"optimizer": run[1], "scheduler": 3},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    run = _run(seed=1)
    before = _all_of(run)
    with refused(ckpttool.CkptError):
        ckpttool.load(run[0], tmp_path / "saved", **WRONG[what](run))
    assert _all_of(run) == before


def test_other_shapes_names_and_meta_are_refused(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(1))
    _save(saved, tmp_path / "saved")
    net, _, _ = _run()
    net.up = nn.Linear(6, 9)
    with refused(ckpttool.PlanError):
        ckpttool.load(net, tmp_path / "saved", weights_only=True)
    net, _, _ = _run()
    net.more = nn.Linear(2, 2)
    with refused(ckpttool.PlanError):
        ckpttool.load(net, tmp_path / "saved", weights_only=True)
    report = ckpttool.load(net, tmp_path / "saved", weights_only=True, strict=False)
    assert report.missing == ("more.weight", "more.bias")
    with torch.device("meta"):
        meta = Net()
    with refused(ckpttool.ArgumentError):
        ckpttool.load(meta, tmp_path / "saved", weights_only=True)


def test_a_wrapped_model_gets_the_values_of_its_bare_names(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    net, optimizer, _ = _run(seed=1)
    ckpttool.load(torch.compile(net, backend="eager"), tmp_path / "saved", optimizer=optimizer, prove=True)
    assert _all_of((net, optimizer, None)) == _all_of(saved)
    _save(
        (nn.ModuleDict({"_orig_mod": saved[0]}), *saved[1:]), tmp_path / "wrapped"
    )  # as the names of a compiled model
    other, own, _ = _run(seed=2)
    ckpttool.load(other, tmp_path / "wrapped", optimizer=own, prove=True)
    assert _all_of((other, own, None)) == _all_of(saved)


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, list[Any]]:
        torch.manual_seed(seed)
        net = Net()
        own = [p for p in net.parameters() if p.requires_grad]
        matrices, others = [p for p in own if p.dim() == 2], [p for p in own if p.dim() != 2]
        return net, [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net, optimizers = made(0)
    for step in range(2):
        torch.manual_seed(step)
        net(torch.randint(0, 11, (7,))).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizers)}
    dcp.save(states, checkpoint_id=str(tmp_path / "saved"))
    other, own = made(1)
    ckpttool.load(other, tmp_path / "saved", optimizer=own, prove=True)
    for before, after in zip(optimizers, own, strict=True):
        assert _all_of((net, before, None)) == _all_of((other, after, None))


# ------------------------------------------------------------------------------------- what an attack has found


def _with(run: tuple[Any, Any, Any], path: Path, **more: Any) -> None:
    """Save a run with further objects."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net, optimizer, _ = run
    states = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.save({**states, **more}, checkpoint_id=str(path))


def _schedulers(optimizer: Any) -> dict[str, Any]:
    from torch.optim import lr_scheduler as of

    return {
        "step": of.StepLR(optimizer, 2, gamma=0.5),
        "lambda": of.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
        "cosine": of.CosineAnnealingLR(optimizer, 10),
        "sequential": of.SequentialLR(
            optimizer, [of.LinearLR(optimizer, 0.1), of.ExponentialLR(optimizer, 0.9)], milestones=[2]
        ),
        "plateau": of.ReduceLROnPlateau(optimizer),
    }


@pytest.mark.parametrize("name", ["step", "lambda", "cosine", "sequential", "plateau"])
def test_a_scheduler_in_a_distributed_checkpoint_goes_on(name: str, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, Any, Any]:
        net, optimizer, _ = _run(seed=seed)
        return net, optimizer, _schedulers(optimizer)[name]

    def rates(scheduler: Any, optimizer: Any) -> list[float]:
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    saved = made(0)
    rates(saved[2], saved[1])
    _with(saved, tmp_path / "saved", state={"lr_scheduler": saved[2].state_dict()}, more={"last_epoch": 9})
    run = made(1)
    report = ckpttool.load(run[0], tmp_path / "saved", optimizer=run[1], scheduler=run[2], prove=True)
    assert report.scheduler
    assert run[2].state_dict() == saved[2].state_dict()
    assert rates(run[2], run[1]) == rates(saved[2], saved[1])


@pytest.mark.parametrize(
    ("theirs", "own"),
    [("step", "lambda"), ("step", "exponential"), ("sequential", "longer"), ("cosine", "step"), ("three", "two")],
)
def test_the_scheduler_of_another_class_keeps_its_state(theirs: str, own: str, tmp_path: Path) -> None:
    from torch.optim import lr_scheduler as of

    from ckpttool.integrations.torch.schedulers import OTHER_CLASS, Unfit, state_for

    net, optimizer, _ = _run()
    longer = [of.ConstantLR(optimizer), of.ConstantLR(optimizer), of.ConstantLR(optimizer)]
    phases = {"max_lr": 0.1, "total_steps": 9}
    others = {
        "three": of.OneCycleLR(optimizer, **phases, three_phase=True), "two": of.OneCycleLR(optimizer, **phases),
        "exponential": of.ExponentialLR(optimizer, 0.9), "longer": of.SequentialLR(optimizer, longer, [1, 2]),
    }  # fmt: skip
    checkpoint = ckpttool.inspect(source("zero2-dp2-bf16"))
    made = {**_schedulers(optimizer), **others}
    state, scheduler = made[theirs].state_dict(), made[own]
    with pytest.raises(Unfit, match=OTHER_CLASS):
        state_for(scheduler, checkpoint, state, [0], 1)
    assert net is not None


def test_a_scheduler_that_fails_leaves_the_run_unchanged(tmp_path: Path) -> None:
    class Fails(torch.optim.lr_scheduler.StepLR):  # type: ignore[misc]  # torch is not followed
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            if state["last_epoch"]:
                raise KeyError("mine")

    saved = _run()
    _train(saved, range(2))
    _with(saved, tmp_path / "saved", lr_scheduler=saved[2].state_dict())
    run = net, optimizer, _ = _run(seed=1)
    scheduler, before = Fails(optimizer, 2, gamma=0.5), _all_of(run)
    state = scheduler.state_dict()
    with refused(ckpttool.CkptError):
        ckpttool.load(net, tmp_path / "saved", optimizer=optimizer, scheduler=scheduler)
    assert _all_of(run) == before
    assert scheduler.state_dict() == state


class Counting(torch.optim.SGD):  # type: ignore[misc]  # torch is not followed
    """Counts its steps in its groups, as FusedAdam does."""

    def step(self, closure: Any = None) -> Any:
        """Step with a rate that falls."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        return super().step(closure)


def test_options_that_the_first_step_adds_are_restored(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        net = Net()
        own = Counting([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return net, own, torch.optim.lr_scheduler.StepLR(own, 100)

    saved = made(0)
    _train(saved, range(3))
    _save(saved, tmp_path / "saved")
    run = made(1)
    ckpttool.load(run[0], tmp_path / "saved", optimizer=run[1], prove=True)
    assert run[1].param_groups[0]["step"] == 3
    assert _train(run, range(3, 6)) == _train(saved, range(3, 6))


def test_a_rate_of_numpy_is_a_number(tmp_path: Path) -> None:
    import numpy as np

    saved = _run()
    _train(saved, range(2))
    saved[1].param_groups[0]["lr"] = np.float64(0.125)
    _save(saved, tmp_path / "saved")
    run = _run(seed=1)
    report = ckpttool.load(run[0], tmp_path / "saved", optimizer=run[1], prove=True)
    assert run[1].param_groups[0]["lr"] == 0.125
    assert isinstance(run[1].param_groups[0]["lr"], float)
    assert "lr" in str(report.proof).partition("not compared")[2]


@pytest.mark.parametrize(("there", "here"), [("fused", "adam"), ("foreach", "fused")])
def test_a_run_that_computes_otherwise_is_proven(there: str, here: str, tmp_path: Path) -> None:
    own = {"fused": "fused", "foreach": "foreach", "adam": "adamw"}
    makers = {**OPTIMIZERS, "adamw": torch.optim.AdamW}
    torch.manual_seed(0)
    net = Net()
    saved = net, makers[own[there]](p for p in net.parameters() if p.requires_grad), None
    saved = (*saved[:2], torch.optim.lr_scheduler.StepLR(saved[1], 9))
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    other = Net()
    optimizer = makers[own[here]](p for p in other.parameters() if p.requires_grad)
    flags = {key: optimizer.param_groups[0][key] for key in ("fused", "foreach")}
    ckpttool.load(other, tmp_path / "saved", optimizer=optimizer, prove=True)
    assert {key: optimizer.param_groups[0][key] for key in flags} == flags


def test_a_run_of_a_narrower_type_is_proven_to_hold_the_rounded_values(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    net, optimizer, _ = _run(dtype=torch.bfloat16, seed=1)
    report = ckpttool.load(net, tmp_path / "saved", optimizer=optimizer, prove=True)
    assert "exp_avg" in str(report.proof).partition("not compared")[2]


class Extra(nn.Linear):  # type: ignore[misc]  # torch is not followed
    """Has extra state."""

    def get_extra_state(self) -> Any:
        """Return it."""
        return {"v": 1}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    saved = _run()
    _train(saved, range(1))
    _save(saved, tmp_path / "saved")
    net, _, _ = _run(seed=1)
    some = [p for p in net.parameters() if p.requires_grad][:2]
    for optimizers in ([], [torch.optim.Adam(some)]):
        with refused(ckpttool.ArgumentError):
            ckpttool.load(net, tmp_path / "saved", optimizer=optimizers)
    net.up = Extra(6, 8)
    with refused(ckpttool.ArgumentError):
        ckpttool.load(net, tmp_path / "saved", weights_only=True)
    ckpttool.load(net, tmp_path / "saved", weights_only=True, strict=False)
    net, _, _ = _run()
    net.norm.running_mean = torch.zeros(1).expand(6)
    with refused(ckpttool.ArgumentError):
        ckpttool.load(net, tmp_path / "saved", weights_only=True)
    with refused(ckpttool.ArgumentError):
        ckpttool.load(nn.LazyLinear(3), tmp_path / "saved", weights_only=True)


def test_moments_of_a_parameter_that_is_frozen_now_are_restored(tmp_path: Path) -> None:
    """It may be trained again; without a group its moments are left out."""
    saved = _run()
    _train(saved, range(2))
    _save(saved, tmp_path / "saved")
    run = net, optimizer, _ = _run(seed=1)
    _train(run, range(9, 11))
    net.up.weight.requires_grad_(requires_grad=False)
    report = ckpttool.load(net, tmp_path / "saved", optimizer=optimizer)
    assert torch.equal(optimizer.state[net.up.weight]["exp_avg"], saved[1].state[saved[0].up.weight]["exp_avg"])
    assert torch.equal(net.up.weight, saved[0].up.weight)
    assert not any(note.startswith("up.weight is frozen in the model") for note in report.notes)
    without = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    report = ckpttool.load(net, tmp_path / "saved", optimizer=without)
    assert any(note.startswith("up.weight is frozen in the model") for note in report.notes)


def _accumulated(job: dict[str, Any]) -> list[list[float]]:
    """Losses after a load into a run of FSDP2 with gradients that it accumulates without a reduction, and without."""
    from recipes import plain

    losses = []
    for accumulates in (True, False):
        torch.manual_seed(1)
        model, inner = _wrapped(plain.build_model(), job["mesh"])
        optimizer = torch.optim.AdamW(plain.param_groups(inner))
        tokens = torch.arange(12).reshape(2, 6)
        if accumulates:
            model.set_requires_gradient_sync(False)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            model.set_requires_gradient_sync(True)
        report = ckpttool.load(model, source("zero2-dp2-bf16"), optimizer=optimizer)
        assert ("the gradients that the run has are dropped" in report.notes) == accumulates
        found = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    return losses


def test_gradients_that_fsdp2_accumulates_are_dropped() -> None:
    (every,) = each_on_ranks(_accumulated, [{"id": 0, "world_size": 2, "mesh": "fsdp"}]).values()
    for accumulated, plain in every:
        assert accumulated == plain


def _two_groups(seed: int, order: tuple[int, int] = (0, 1), **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": list(net[i].parameters()), "lr": (0.1, 0.02)[i]} for i in order]
    groups = [{"params": group["params"]} for group in groups] if "lr" in options else groups
    return net, torch.optim.AdamW(groups, **options)


def _saved_with_two_groups(path: Path, make: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    net, optimizer = _two_groups(0)
    scheduler = make(optimizer)
    for _ in range(3):
        net(torch.ones(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    _with((net, optimizer, None), path, lr_scheduler=scheduler.state_dict())
    return net, optimizer, scheduler


def _by_decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))


def test_rates_of_a_scheduler_follow_their_groups(tmp_path: Path) -> None:
    _, optimizer, scheduler = _saved_with_two_groups(tmp_path / "saved", _by_decay)
    net, own = _two_groups(1, (1, 0))
    after = _by_decay(own)
    ckpttool.load(net, tmp_path / "saved", optimizer=own, scheduler=after, prove=True)
    for one in (optimizer, own):
        one.step()
    scheduler.step()
    after.step()
    assert [group["lr"] for group in own.param_groups] == [group["lr"] for group in optimizer.param_groups][::-1]


def test_a_scheduler_is_restored_without_the_optimizer_but_not_that_of_another(tmp_path: Path) -> None:
    _, _, scheduler = _saved_with_two_groups(tmp_path / "saved", _by_decay)
    net, own = _two_groups(1)
    after = _by_decay(own)
    ckpttool.load(net, tmp_path / "saved", optimizer=False, scheduler=after)
    assert after.state_dict() == scheduler.state_dict()
    _, foreign = _two_groups(2)
    with refused(ckpttool.ArgumentError):
        ckpttool.load(net, tmp_path / "saved", optimizer=own, scheduler=_by_decay(foreign))


def test_groups_that_share_a_rate_get_their_own(tmp_path: Path) -> None:
    _, optimizer, _ = _saved_with_two_groups(tmp_path / "saved", _by_decay)
    net, own = _two_groups(1, lr=torch.tensor(0.5), foreach=False)
    ckpttool.load(net, tmp_path / "saved", optimizer=own, prove=True)
    assert [float(g["lr"]) for g in own.param_groups] == pytest.approx([g["lr"] for g in optimizer.param_groups])


@pytest.mark.parametrize("chained", [False, True])
def test_schedulers_with_items_of_their_own_form_in_a_distributed_checkpoint(chained: bool, tmp_path: Path) -> None:
    from torch.optim import lr_scheduler as of

    def make(optimizer: Any) -> Any:
        steps = of.MultiStepLR(optimizer, [2, 4])
        return of.ChainedScheduler([steps, of.ExponentialLR(optimizer, 0.9)]) if chained else steps

    _, _, scheduler = _saved_with_two_groups(tmp_path / "saved", make)
    net, own = _two_groups(1)
    after = make(own)
    assert ckpttool.load(net, tmp_path / "saved", optimizer=own, scheduler=after).scheduler
    assert after.state_dict() == scheduler.state_dict()
    net, own = _two_groups(1)
    other = of.OneCycleLR(own, 0.1, total_steps=9)
    assert not ckpttool.load(net, tmp_path / "saved", optimizer=own, scheduler=other).scheduler


def _orders(seed: int, name: str, *, back: bool = False) -> tuple[Any, list[Any], Any]:
    """Return a model of two optimizers, each of two groups, and the scheduler of the second."""
    from torch.optim import lr_scheduler as of

    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    made = []
    for first in (0, 2):
        groups = [{"params": list(net[first + i].parameters()), "lr": (0.1, 0.02)[i]} for i in range(2)]
        made.append(torch.optim.AdamW(groups[::-1] if back else groups))
    schedulers = {
        "lambda": lambda o: of.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
        "sequential": lambda o: of.SequentialLR(
            o, [of.ConstantLR(o), of.ExponentialLR(o, 0.5), of.ConstantLR(o)], [1, 4]
        ),
    }
    return net, made, schedulers[name](made[1])


@pytest.mark.parametrize("name", ["lambda", "sequential"])
def test_the_scheduler_of_one_of_two_optimizers_follows_its_groups(name: str, tmp_path: Path) -> None:
    saved = _orders(0, name)
    for _ in range(2):
        saved[0](torch.ones(5, 3)).sum().backward()
        for optimizer in saved[1]:
            optimizer.step()
        saved[2].step()
    _with(saved, tmp_path / "saved", lr_scheduler=saved[2].state_dict())
    run = _orders(1, name, back=True)
    assert ckpttool.load(run[0], tmp_path / "saved", optimizer=run[1], scheduler=run[2]).scheduler
    for one in (saved, run):
        one[1][1].step()
        one[2].step()
    assert [g["lr"] for g in run[1][1].param_groups] == [g["lr"] for g in saved[1][1].param_groups][::-1]


def test_a_scheduler_whose_groups_cannot_be_told_keeps_its_state(tmp_path: Path) -> None:
    from torch.optim import lr_scheduler as of

    class Peaks(of.LambdaLR):  # type: ignore[misc]  # torch is not followed
        def __init__(self, optimizer: Any) -> None:
            self.peaks = [group["lr"] for group in optimizer.param_groups]
            super().__init__(optimizer, lambda _: 1.0)

    def sequential(optimizer: Any, *, count: int) -> Any:
        inner = [of.ExponentialLR(optimizer, 0.9) for _ in range(count)]
        return of.SequentialLR(optimizer, inner, [*range(1, count)])

    for number, (make, other, order) in enumerate((
        (Peaks, Peaks, (1, 0)),
        (lambda o: sequential(o, count=3), lambda o: sequential(o, count=2), (0, 1)),
        (
            lambda o: of.OneCycleLR(o, 0.1, total_steps=9, three_phase=True),
            lambda o: of.OneCycleLR(o, 0.1, total_steps=9), (0, 1),
        ),
    )):  # fmt: skip
        _saved_with_two_groups(path := tmp_path / str(number), make)
        net, own = _two_groups(1, order)
        scheduler = other(own)
        before = scheduler.state_dict()
        report = ckpttool.load(net, path, optimizer=own, scheduler=scheduler)
        assert not report.scheduler, number
        assert any(note.startswith("the scheduler keeps its state") for note in report.notes)
        assert scheduler.state_dict() == before
    net, _ = _two_groups(1)
    merged = torch.optim.AdamW(net.parameters())
    _saved_with_two_groups(tmp_path / "merged", _by_decay)
    report = ckpttool.load(net, tmp_path / "merged", optimizer=merged, scheduler=_by_decay(merged))
    keeps = "the scheduler keeps its state, and computes the next rate from it:"
    assert f"{keeps} its parameter groups are others than the run's" in report.notes


def test_a_type_that_no_value_survives_is_refused(tmp_path: Path) -> None:
    saved = _run()
    _save(saved, tmp_path / "saved")
    net, _, _ = _run()
    net.norm.num_batches_tracked = torch.zeros(())
    with refused(ckpttool.PlanError):
        ckpttool.load(net, tmp_path / "saved", weights_only=True)


def test_the_optimizers_of_deepspeed_take_no_trial_step() -> None:
    from ckpttool.integrations.torch.optimizers import trial

    class Adam(torch.optim.Adam):  # type: ignore[misc]  # torch is not followed
        pass

    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Adam([parameter])
    assert trial(optimizer, optimizer.param_groups[0], [nn.Parameter(torch.zeros(2))]) is not None
    Adam.__module__ = "deepspeed.ops.adam.cpu_adam"  # counts by a number that a copy shares, and frees it
    assert trial(optimizer, optimizer.param_groups[0], [nn.Parameter(torch.zeros(2))]) is None
