"""A live torch run of any kind is saved by a manager: torch reads it, and a run on any other mesh goes on with it."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import ArgumentError, LayoutError, PlanError
from ckpttool.formats import dcp
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.live.request import Save
from ckpttool.integrations.live.run import Kept, Repeated
from ckpttool.integrations.torch import chunks
from ckpttool.integrations.torch.live_run import torch_run
from ckpttool.saving.files import ArchiveFile, Archives, HostPayload
from ckpttool.targets.dcp import LAYOUTS
from tests import sampling
from tests.cli import command
from tests.forked import each_on_ranks
from tests.formats.test_chunk_index import layout
from tests.integrations.test_load import MESHES, _held, _wrapped
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

IMPORTS = ["torch.distributed.checkpoint", "torch.distributed.fsdp"]
RUNS: list[dict[str, Any]] = [
    {"id": f"{mesh}-{ranks}", "mesh": mesh, "world_size": ranks, "save": True} for mesh, ranks in (*MESHES, ("ddp", 3))
]
RESUMED: list[dict[str, Any]] = sampling.some(
    [
        {"id": f"{one['id']}-on-{mesh}-{ranks}", "saved": one["id"], "mesh": mesh, "world_size": ranks, "save": False}
        for one in RUNS
        for mesh, ranks in MESHES
        if (one["mesh"], one["world_size"]) != (mesh, ranks)
    ],
    6,
)


def _built(job: dict[str, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a new run: the model as it is called, the model inside, its optimizer and its scheduler."""
    from recipes import plain

    torch.manual_seed(seed)
    model, inner = _wrapped(plain.build_model(), job["mesh"])
    optimizer = torch.optim.AdamW(plain.param_groups(inner), lr=torch.tensor(0.01) if job["mesh"] == "plain" else 0.01)
    return model, inner, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _train(run: tuple[Any, Any, Any, Any], steps: range) -> list[float]:
    """Train on the same tokens on all ranks, so that no parameter needs a reduction."""
    model, _, optimizer, scheduler = run
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 61, (2, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _options(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: float(group[key]) for key in ("lr", "weight_decay", "initial_lr")} for group in optimizer.param_groups
    ]


def _of_torch(job: dict[str, Any], path: str) -> dict[str, Any]:
    """Load a save with torch's own functions into a new run on the same mesh; return its state and its next losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    run = _built(job, 8)
    _, inner, optimizer, scheduler = run
    state = {"model": get_model_state_dict(inner), "optim": get_optimizer_state_dict(inner, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(inner, state["model"])
    set_optimizer_state_dict(inner, optimizer, state["optim"])
    scheduler.last_epoch = 3
    return {"held": _held(inner, optimizer), "losses": _train(run, range(3, 6))}


def _saves(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save a run twice, the second time in the background while it trains; load the first with torch."""
    import torch.distributed as dist

    root = str(directory / job["id"])
    run = _built(job, 1)
    model, inner, optimizer, scheduler = run
    _train(run, range(3))
    own = {"optimizer": optimizer, "scheduler": scheduler}
    manager: Any = ckpttool.CheckpointManager(root)
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {"epoch": 3, "seen": torch.arange(4)}
    report = manager.save(model, step=3, client_state=state, rank_state={"rank": rank}, metrics={"loss": 0.5}, **own)
    told = {"held": _held(inner, optimizer), "options": _options(optimizer), "scheduler": scheduler.state_dict()}
    told |= {"nbytes": report.nbytes, "losses": _train(run, range(3, 6)), "tag": report.tag}
    later = ckpttool.CheckpointManager(root, async_save=True)
    before = _held(inner, optimizer)
    later.save(model, step=6, save_latest=False, **own)
    _train(run, range(6, 8))
    later.wait()
    return {**told, "later": before, "by torch": _of_torch(job, f"{root}/step-3")}


def _resumes(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Restore a save into a run on another mesh, which has trained on its own."""
    run = _built(job, 5)
    model, inner, optimizer, scheduler = run
    _train(run, range(20, 21))
    manager: Any = ckpttool.CheckpointManager(str(directory / job["saved"]))
    state = manager.restore(model, optimizer=optimizer, scheduler=scheduler, prove=True)
    told = {"held": _held(inner, optimizer), "options": _options(optimizer), "scheduler": scheduler.state_dict()}
    found = manager.restored
    told |= {"state": state, "proof": str(found.proof), "ranks": [one["rank"] for one in found.rank_states]}
    return {**told, "losses": _train(run, range(3, 6))}


def _check_same(held: dict[str, Any], truth: dict[str, Any], what: object) -> None:
    assert held.keys() == truth.keys(), what
    for key, value in truth.items():
        assert torch.equal(torch.as_tensor(held[key]), torch.as_tensor(value)), (what, key)


def _do(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    return _saves(job, directory) if job["save"] else _resumes(job, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def saved(directory: Path) -> dict[str, list[dict[str, Any]]]:
    return each_on_ranks(_do, RUNS, directory, imports=IMPORTS)


def test_torch_and_runs_on_other_meshes_go_on_with_a_save(
    directory: Path, saved: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in RUNS:
        for told in saved[job["id"]]:
            _check_same(told["by torch"]["held"], told["held"], (job["id"], "by torch"))
            assert told["by torch"]["losses"] == told["losses"], job["id"]
            assert told["tag"] == "step-3"
        root = directory / job["id"]
        for tag in ("step-3", "step-6"):
            report = ckpttool.verify(root / tag, deep=True)
            assert report.sound, (job["id"], tag, str(report))
        recorded = (ckpttool.inspect(root / "step-6").digests or {})["tensors"]["weights"]
        assert {name: str(one) for name, one in ckpttool.digest(root / "step-6").tensors["weights"].items()} == recorded
        if job["mesh"] == "ddp":
            sizes = [told["nbytes"] for told in saved[job["id"]]]
            assert max(sizes) < 0.8 * sum(sizes), (job["id"], sizes)
        checkpoint = ckpttool.inspect(root)
        assert (checkpoint.step, checkpoint.client_state["epoch"], checkpoint.metrics) == (3, 3, {"loss": 0.5})
        assert {one.name for one in checkpoint.buffers} == {"positions", "seen", "mask"}
        assert {one.name for one in checkpoint.parameters if one.frozen} == {"frozen_proj.weight", "frozen_proj.bias"}
        weights = ckpttool.load_state_dict(root / "step-6")
        for key, value in saved[job["id"]][0]["later"].items():
            if key.startswith("fp32/") and key != "fp32/scratch":
                assert torch.equal(torch.as_tensor(weights[key[5:]]), value), (job["id"], key)
    by_index = {job["id"]: layout(directory / job["id"] / "step-6") for job in RUNS}
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "read_chunk_index", lambda *_: None)
        assert by_index == {job["id"]: layout(directory / job["id"] / "step-6") for job in RUNS}
    found = each_on_ranks(_do, RESUMED, directory, imports=IMPORTS)
    for job in RESUMED:
        truth = saved[job["saved"]]
        for told in found[job["id"]]:
            _check_same(told["held"], truth[0]["held"], job["id"])
            assert told["options"] == truth[0]["options"]
            for key in ("last_epoch", "_step_count", "base_lrs"):
                assert (
                    [*map(float, told["scheduler"][key])] == [*map(float, truth[0]["scheduler"][key])]
                    if (key == "base_lrs")
                    else told["scheduler"][key] == truth[0]["scheduler"][key]
                )
            assert told["state"]["epoch"] == 3
            assert torch.equal(told["state"]["seen"], torch.arange(4))
            assert told["ranks"] == [*range(len(truth))]
            assert told["proof"].startswith("proven: "), told["proof"]
            assert told["losses"] == pytest.approx(truth[0]["losses"], rel=1e-5)


def test_an_engine_goes_on_with_a_save_of_torch(directory: Path, saved: dict[str, list[dict[str, Any]]]) -> None:
    job = {"id": "engine", "world_size": 2, "saved": RUNS[2]["id"]}
    for told in each_on_ranks(_into_engine, [job], directory)["engine"]:
        for key, value in saved[RUNS[2]["id"]][0]["held"].items():
            if key.startswith(("fp32/", "exp_avg/")) and key in told["held"]:
                assert torch.equal(told["held"][key], torch.as_tensor(value)), key
        assert told["proof"].startswith("proven: ")


def _into_engine(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    from deepspeed import initialize
    from recipes import plain

    from tests.deepspeed.engines import held

    torch.manual_seed(4)
    model = plain.build_model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine = initialize(model=model, optimizer=torch.optim.AdamW(plain.param_groups(model)), config=config)[0]
    report = ckpttool.load(engine, directory / job["saved"], prove=True)
    return {"held": held(engine), "proof": str(report.proof)}


# ------------------------------------------------------------------------------------------------------- refusals


def _refusals(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Save a sharded run that another rank has in another form, or whose state would be lost."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def told(model: Any, optimizer: Any, **more: Any) -> str:
        manager = ckpttool.CheckpointManager(directory / job["id"], timeout=20)
        try:
            manager.save(model, optimizer=optimizer, **{"step": 1, **more})
        except ckpttool.CkptError as error:
            return str(error)
        return "saved"

    def trained(model: Any, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
        optimizer = kind(model.parameters(), **options)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    second = dist.get_rank() == 1
    sharded = nn.Linear(4, 6)
    fully_shard(sharded)
    plain = nn.Linear(4, 6)
    found = {"other step": told(plain, trained(plain), step=2 if second else 1)}
    found["other optimizer"] = told(plain, trained(plain, torch.optim.SGD if second else torch.optim.AdamW))
    optimizer = trained(plain)
    if second:
        optimizer.state.pop(plain.bias)
    found["no state on one rank"] = told(plain, optimizer)
    optimizer = trained(sharded)
    optimizer.state[sharded.weight]["scale"] = torch.ones(3)
    found["state of one rank alone"] = told(sharded, optimizer)
    found["stranger"] = told(sharded, torch.optim.SGD(nn.Linear(4, 6).parameters()))
    found["lists"] = told(plain, torch.optim.LBFGS(plain.parameters()))
    found["not text"] = told(plain, False, client_state={1: 2} if second else {})
    found["unpicklable"] = told(plain, False, client_state={"f": lambda: None} if not second else {"f": 1})
    found["weights alone"] = told(plain, False)
    found["again"] = told(plain, False)
    return found


def test_a_save_that_would_lose_state_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (told,) = each_on_ranks(_refusals, [{"id": "refused", "world_size": 2}], tmp_path).values()
    assert told[0] == told[1]
    found = told[0]
    assert "rank 0 has step 1, rank 1 has 2" in found["other step"]
    assert "rank 0 has optimizer ['AdamW'], rank 1 has ['SGD']" in found["other optimizer"]
    assert (
        "rank 1 has another optim.state.bias.exp_avg than rank 0, or only one of them" in found["no state on one rank"]
    )
    assert "has scale of 'weight' as a tensor of this rank alone" in found["state of one rank alone"]
    assert "has 2 parameters that the model lacks" in found["stranger"]
    assert found["lists"].startswith("optimizer: "), found["lists"]
    assert "rank 1: has the name 1, which is not text" in found["not text"]
    assert "rank 0: ckpttool_run_state.pt: cannot be pickled" in found["unpicklable"], found["unpicklable"]
    assert found["weights alone"] == "saved"
    assert "is saved already" in found["again"]
    assert [path.name for path in (tmp_path / "refused").iterdir() if path.is_dir()] == ["step-1"]


class Noted(nn.Linear):  # type: ignore[misc]  # torch is not followed
    """A module with extra state."""

    def get_extra_state(self) -> Any:
        """Return a state that is not a tensor."""
        return {"amax": 3}

    def set_extra_state(self, state: Any) -> None:
        """Do nothing."""


def test_arguments_of_a_save_are_checked(tmp_path: Path) -> None:
    net, manager = nn.Linear(2, 2), ckpttool.CheckpointManager(tmp_path)
    optimizer, other = (torch.optim.SGD(net.parameters()) for _ in range(2))
    for arguments in (
        {},
        {"step": "5"},
        {"step": True},
        {"step": 5},
        {"step": 5, "optimizer": optimizer, "scheduler": "cosine"},
        {"step": 5, "optimizer": optimizer, "metrics": {"loss": "low"}},
        {"step": 5, "optimizer": optimizer, "tag": ".x"},
        {"step": 5, "optimizer": []},
        {"step": 5, "optimizer": [optimizer, optimizer]},
        {"step": 5, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(other, 1)},
    ):
        with refused(ckpttool.ArgumentError):
            manager.save(net, **arguments)
    with refused(ckpttool.ArgumentError):
        manager.save(Noted(2, 2), optimizer=False, step=1)
    assert not [*tmp_path.iterdir()]


def test_the_gradients_of_a_run_are_not_saved_and_the_user_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    manager = ckpttool.CheckpointManager(tmp_path, keep_last=1)
    with caplog.at_level(logging.WARNING, "ckpttool"):
        for step in (1, 2):
            manager.save(net, optimizer=torch.optim.SGD(net.parameters()), step=step)
    assert [one.getMessage()[:39] for one in caplog.records] == ["the gradients that the run has are not "]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-2"]
    assert not ckpttool.prune(tmp_path, keep_last=1)[0].freed


def test_a_restore_takes_the_newest_whole_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    manager = ckpttool.CheckpointManager(tmp_path)
    for step in (1, 2):
        nn.init.constant_(net.weight, float(step))
        manager.save(net, optimizer=optimizer, step=step)
    (tmp_path / "step-2" / ".metadata").unlink()
    assert {one.name: one.condition for one in ckpttool.ls(tmp_path).entries} == {"step-1": "whole", "step-2": "torn"}
    with caplog.at_level(logging.WARNING, "ckpttool"):
        assert manager.restore(net, optimizer=optimizer) == {}
    assert "step-2 cannot be restored" in caplog.text
    assert float(net.weight.detach()[0, 0]) == 1.0
    manager.save(net, optimizer=optimizer, step=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-1", "step-2", "step-2.damaged"]
    with refused(ckpttool.ArgumentError):
        manager.save(nn.Linear(2, 2), optimizer=False, step=3)


# ----------------------------------------------------------------------------------------------------- unusual runs


class Small(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Two layers, a scalar, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
        self.scalar, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        """Return one number for each row."""
        return self.last(self.first(x)) * self.scalar


def _steps(net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        net(torch.full((4, 2), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _same_weights(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _restored(root: Path, net: Any, optimizer: Any, **options: Any) -> Any:
    manager = ckpttool.CheckpointManager(root)
    assert manager.restore(net, optimizer=optimizer, prove=True, **options) is not None
    return manager.restored


LARGE: list[dict[str, Any]] = [
    {"id": f"{mesh}-{ranks}", "mesh": mesh, "world_size": ranks} for mesh, ranks in (("plain", 1), ("fsdp", 3))
]
"""Runs with states of over a mebibyte on each rank."""


def _large(job: dict[str, Any], directory: Path) -> list[tuple[str, Any, Any]]:
    """Save and restore a run with large states; return what differs, and the states that the restore made."""
    from torch.distributed.fsdp import fully_shard

    def built(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1000, 1000), nn.Conv2d(8, 700, 8), nn.Linear(3, 2))
        if job["mesh"] == "fsdp":
            fully_shard(net)
        else:
            net[1].to(memory_format=torch.channels_last)
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = built(1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) * 2
    optimizer.step()
    truth = _held(net, optimizer)
    manager = ckpttool.CheckpointManager(directory / job["id"])
    for step in (1, 2):  # the second one sends its parts as a hash
        manager.save(net, optimizer=optimizer, step=step)
    net, optimizer = built(2)
    _restored(directory / job["id"], net, optimizer)
    held = _held(net, optimizer)
    strides = [
        (own["exp_avg"].stride(), torch.zeros_like(p).stride(), type(own["exp_avg"]) is type(p.detach()))
        for p, own in optimizer.state.items()
    ]
    assert all(stride == own and same for stride, own, same in strides), strides
    apart = {own["exp_avg"].untyped_storage().data_ptr() for own in optimizer.state.values() if job["mesh"] == "plain"}
    assert len(apart) == (len(optimizer.state) if job["mesh"] == "plain" else 0)
    return [(key, value, held[key]) for key, value in truth.items() if not torch.equal(value, held[key])]


def test_large_states_are_read_into_new_tensors(tmp_path: Path) -> None:
    for name, ranks in each_on_ranks(_large, LARGE, tmp_path, imports=["torch.distributed.fsdp"]).items():
        assert ranks == [[]] * len(ranks), name


def test_a_rank_sends_only_what_has_changed_since_its_last_save() -> None:
    first, second = Repeated(), Repeated()
    texts = [{"names": "a" * 1000, "boxes": f"{rank}" * 1000} for rank in range(2)]
    for repeats in range(3):
        messages = [one.message(own) for one, own in zip((first, second), texts, strict=True)]
        assert first.texts(messages) == texts
        assert all(len(json.dumps(one)) < 100 for one in messages) == (repeats > 0)
        first.agree()
        second.agree()
    texts[1]["boxes"] = "2"
    messages = [first.message(texts[0]), second.message(texts[1])]
    assert first.texts(messages) == texts
    assert [*map(len, messages[1].values())] == [17, 1]
    # That exchange failed on the second rank: rank 0 has the new text, and the rank goes back to the old one.
    texts[1]["boxes"] = "1" * 1000
    messages = [first.message(texts[0]), second.message(texts[1])]
    assert messages[1] == texts[1]
    assert first.texts(messages) == texts
    first.agree()
    with refused(PlanError):
        Repeated().texts([first.message(texts[0])] * 2)


def _kept() -> Kept:
    return Kept(scratch_root=None, in_background=False)


def test_a_rank_sends_the_places_in_its_files_as_a_hash_if_they_have_not_changed(tmp_path: Path) -> None:
    kept, other, known = _kept(), _kept(), []
    for repeats in range(4):
        net = nn.Linear(repeats // 2 + 3, 5)
        run = torch_run(net, False, None, LoadOptions(optimizer=False))
        indexes = [
            chunks.described(run, Save(), rank, str(tmp_path), one).index for rank, one in enumerate((kept, other))
        ]
        indexes[0].share([one.parts() for one in indexes])
        for mine, index in enumerate(indexes):
            shape = tuple(index._entries[mine].tensor.shape)
            values = HostPayload(bytes(4 * math.prod(shape)))
            file = Archives(
                f"__{mine}_0.distcp", [ArchiveFile("archive", chunks._structure("F32", shape), {"0": values})]
            )
            index.note([([mine], [], file)], {})
        own = [index.own for index in indexes]
        assert all(one["places"].startswith("=") for one in own) == (repeats % 2 == 1)
        indexes[0].check(own)
        known.append({file.name: b"".join(map(bytes, file.stream())) for file in indexes[0].files()})
        for index in indexes:
            index.agree()
    assert known[0] == known[1]
    assert known[2] == known[3] != known[0]


def test_each_save_of_a_manager_notes_what_rank_0_knows(tmp_path: Path) -> None:
    net = nn.Linear(3, 5)
    manager = ckpttool.CheckpointManager(tmp_path)
    for step in range(2):
        manager.save(net, optimizer=False, step=step)
        for sent in (manager._kept.repeated, manager._kept.places):
            assert sent._agreed == sent._own != {}
    manager.save(net, optimizer=False, step=2, tag="whole")
    assert layout(tmp_path / "whole") == layout(tmp_path / "step-0")


def _with_rng(_: dict[str, Any], directory: Path) -> None:
    net = nn.Linear(2, 2)
    manager: Any = ckpttool.CheckpointManager(directory)
    optimizer = torch.optim.SGD(net.parameters())
    manager.save(net, optimizer=optimizer, step=1, rank_state={"rng": ckpttool.rng_state()})


def test_random_numbers_of_several_ranks_go_on_in_a_process_without_ranks(tmp_path: Path) -> None:
    each_on_ranks(_with_rng, [{"id": "rng", "world_size": 2}], tmp_path)
    net = nn.Linear(2, 2)
    report = ckpttool.load(net, tmp_path, optimizer=torch.optim.SGD(net.parameters()))
    assert report.rng_state() is not None


def test_lazy_views_are_saved_with_their_values(tmp_path: Path) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    net.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
    net.register_buffer("minus", torch._neg_view(torch.ones(3)))
    other.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))
    other.register_buffer("minus", torch.zeros(3))
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=False, step=1)
    _restored(tmp_path, other, False, weights_only=True)
    assert torch.equal(other.turns, net.turns.resolve_conj())
    assert torch.equal(other.minus, -torch.ones(3))


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "NAdam", "ASGD"])
def test_states_of_frozen_and_of_scalar_parameters_are_restored(kind: str, tmp_path: Path) -> None:
    """The states that a parameter had when it was frozen count again when it is trained again."""
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Small()
        runs.append((net, getattr(torch.optim, kind)(net.parameters())))
    _steps(*runs[0], range(2))
    for net, _ in runs:
        net.first.requires_grad_(requires_grad=False)
    ckpttool.CheckpointManager(tmp_path).save(runs[0][0], optimizer=runs[0][1], step=2)
    report = _restored(tmp_path, *runs[1])
    assert "frozen now" not in str(report.proof)
    for net, optimizer in runs:
        net.first.requires_grad_(requires_grad=True)
        _steps(net, optimizer, range(2, 5))
    assert _same_weights(runs[0][0], runs[1][0])


def test_states_of_other_shapes_than_their_parameters_are_kept_or_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def run(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.Conv2d(6, 3, (1, 2)), nn.Linear(1, 5))
        return net, torch.optim.Adafactor(net.parameters(), lr=0.1)

    net, optimizer = run(1)
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    ckpttool.CheckpointManager(tmp_path / "saved").save(net, optimizer=optimizer, step=1)
    report = ckpttool.convert(tmp_path / "saved", tmp_path / "converted", to="dcp", prove=True)
    assert "left out" not in str(report)
    for shown in ((), ("--params",), ("--json",)):
        assert "row_var" in command.ckpttool("inspect", *shown, tmp_path / "saved").stdout, shown
    assert ckpttool.diff(tmp_path / "saved", tmp_path / "converted").equal
    for directory in (tmp_path / "saved" / "step-1", tmp_path / "converted"):
        other, own = run(2)
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        own.step()
        state = {"optim": get_optimizer_state_dict(other, own)}
        torch_dcp.load(state, checkpoint_id=str(directory))
        set_optimizer_state_dict(other, own, state["optim"])
        third, third_own = run(3)
        ckpttool.load(third, directory, optimizer=third_own, prove=directory.parent.name == "saved")
        for saved, *loaded in zip(net.parameters(), other.parameters(), third.parameters(), strict=True):
            for key, value in optimizer.state[saved].items():
                for state_of, parameter in zip((own, third_own), loaded, strict=True):
                    assert torch.equal(value, state_of.state[parameter][key]), (directory, key)
    conversions: tuple[tuple[Any, dict[str, Any]], ...] = (
        ("universal", {}), ("zero", {"world_size": 2, "stage": 2}), ("ranks", {"layout": "verl", "mesh": [2]}),
    )  # fmt: skip
    for to, given in conversions:
        with refused(LayoutError):
            ckpttool.convert(tmp_path / "saved", tmp_path / to, to=to, **given)
        assert not (tmp_path / to).exists()
    with refused(PlanError):
        ckpttool.consolidate(tmp_path / "saved", tmp_path / "weights", to="safetensors", optimizer=True)
    ckpttool.consolidate(tmp_path / "saved", tmp_path / "weights", to="safetensors")
    other, own = run(4)
    own.param_groups[0]["params"][0].grad = torch.ones(6, 4)
    own.step()
    own.state[own.param_groups[0]["params"][0]]["row_var"] += 1
    ckpttool.CheckpointManager(tmp_path / "other").save(other, optimizer=own, step=1)
    assert "row_var" in str(ckpttool.diff(tmp_path / "saved", tmp_path / "other"))


def test_a_state_in_the_file_of_a_framework_has_sizes_of_its_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6))
    fitting: tuple[tuple[int, ...], ...] = ((4, 6), (4, 1), (1, 6), (4,), (6,), (1, 1))
    others: tuple[tuple[int, ...], ...] = ((6, 4), (6, 1), (1, 4), (3,), (4, 6, 1), (24,), (1, 1, 1))
    for shape in fitting:
        chunks._check_state("own", torch.zeros(shape), "w", parameter, whole=True)
    for shape in others:
        with pytest.raises(ArgumentError, match="in another shape than the parameter"):
            chunks._check_state("own", torch.zeros(shape), "w", parameter, whole=True)


def test_options_that_are_tensors_stay_tensors(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Small()
        options = {"betas": (torch.tensor(0.8), torch.tensor(0.99)), "lr": torch.tensor(0.1), "foreach": False}
        runs.append((net, torch.optim.Adam(net.parameters(), **options)))
    _steps(*runs[0], range(2))
    ckpttool.CheckpointManager(tmp_path).save(runs[0][0], optimizer=runs[0][1], step=2)
    _restored(tmp_path, *runs[1])
    assert all(isinstance(beta, torch.Tensor) for beta in runs[1][1].param_groups[0]["betas"])
    for run in runs:
        _steps(*run, range(2, 4))
    assert _same_weights(runs[0][0], runs[1][0])


def test_client_state_of_any_form_is_restored(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    manager, net = ckpttool.CheckpointManager(tmp_path), nn.Linear(2, 2)
    state = {"turn": torch.tensor([1 + 2j]).conj(), "bytes": torch.ones(2).untyped_storage(), "loop": loop}
    manager.save(net, optimizer=False, step=1, client_state=state)
    found = manager.restore(net, weights_only=True)
    assert found is not None
    assert torch.equal(found["turn"], torch.tensor([1 - 2j]))
    assert bytes(found["bytes"]) == bytes(state["bytes"])
    assert found["loop"][1] is found["loop"]


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    runs = [(net, torch.optim.Adam(net.parameters())) for net in (Small(), Small())]
    _steps(*runs[0], range(1))
    ckpttool.CheckpointManager(tmp_path).save(runs[0][0], optimizer=runs[0][1], step=1)
    torch.set_default_device("meta")
    try:
        _restored(tmp_path, *runs[1])
    finally:
        torch.set_default_device("cpu")
    assert _same_weights(runs[0][0], runs[1][0])


@pytest.mark.parametrize("at", [0, 27, 900])
def test_a_damaged_record_of_names_leads_to_the_save_before(at: int, tmp_path: Path) -> None:
    net = Small()
    optimizer = torch.optim.Adam(net.parameters())
    manager = ckpttool.CheckpointManager(tmp_path)
    for step in (1, 2):
        nn.init.constant_(net.unused, float(step))
        manager.save(net, optimizer=optimizer, step=step)
    file = tmp_path / "step-2" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    start = data.rindex(b"PK\x03\x04", 0, data.index(b"first.weight"))
    data[start + at] ^= 1
    file.write_bytes(data)
    assert manager.restore(net, optimizer=optimizer) == {}
    assert float(net.unused.detach()[0]) == 1.0


class Counted(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """An optimizer that counts its steps in a Python number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Take a step with momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("momentum", torch.zeros_like(parameter))
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.data.add_(state["momentum"], alpha=-group["lr"] / state["step"])


def test_steps_that_are_numbers_of_python_are_restored(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Small()
        runs.append((net, Counted(net.parameters())))
    _steps(*runs[0], range(2))
    ckpttool.CheckpointManager(tmp_path).save(runs[0][0], optimizer=runs[0][1], step=2)
    _restored(tmp_path, *runs[1])
    found = runs[1][1].state[runs[1][0].scalar]["step"]
    assert (found, type(found)) == (2, int)
    for run in runs:
        _steps(*run, range(2, 4))
    assert _same_weights(runs[0][0], runs[1][0])


@pytest.mark.parametrize("option", [torch.arange(3), {"a": torch.ones(2)}, [torch.ones(2)], (torch.ones(1), 0.5)])
def test_options_with_tensors_of_many_elements_are_refused(option: Any, tmp_path: Path) -> None:
    net = Small()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.param_groups[0]["extra"] = option
    with refused(ckpttool.ArgumentError):
        ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, step=1)


def test_an_option_of_another_form_changes_nothing(tmp_path: Path) -> None:
    saved, run = ((net, torch.optim.AdamW(net.parameters())) for net in (Small(), Small()))
    for one in (saved, run):
        _steps(*one, range(1))
    saved[1].param_groups[0]["extra"] = None
    ckpttool.CheckpointManager(tmp_path).save(saved[0], optimizer=saved[1], step=1)
    run[1].param_groups[0]["extra"] = torch.tensor(1.0)
    before = [parameter.clone() for parameter in run[0].parameters()]
    with refused(ckpttool.PlanError):
        ckpttool.CheckpointManager(tmp_path).restore(run[0], optimizer=run[1])
    assert all(map(torch.equal, before, run[0].parameters()))


def test_parts_that_do_not_fill_a_tensor_are_refused_before_the_first_byte(tmp_path: Path) -> None:
    found = chunks.described(
        torch_run(Small(), False, None, LoadOptions(optimizer=False)), Save(), 0, str(tmp_path), _kept()
    )
    entry = next(one for one in found.entries if one.path[-1] == "last.weight")
    own = [entry._replace(tensor=entry.tensor[:, :1])]
    half = chunks.DcpIndex(own, 0, str(tmp_path), LAYOUTS["nested"], Repeated())
    with refused(ckpttool.CkptError):
        half.share([half.parts()] * 2)


class Epoch:
    """A class of the user's, which a restore builds only with ``allow``."""

    number = 3


def test_weights_are_restored_beside_objects_of_unknown_classes(tmp_path: Path) -> None:
    net = Small()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.note = Epoch()
    manager = ckpttool.CheckpointManager(tmp_path)
    manager.save(net, optimizer=optimizer, scheduler=scheduler, step=1, client_state={"n": 1})
    with refused(ckpttool.CkptError):
        manager.restore(net, optimizer=optimizer, scheduler=scheduler)
    assert manager.restore(net, optimizer=optimizer, scheduler=False) == {"n": 1}
    assert manager.restore(net, weights_only=True) == {"n": 1}
    manager.save(net, optimizer=optimizer, step=2, client_state={"epoch": Epoch()})
    assert manager.restore(net, weights_only=True) == {}
