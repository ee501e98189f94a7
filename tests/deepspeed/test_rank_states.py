"""Each rank's own state is saved with the checkpoint; a run that resumes with it has the losses of one that goes on."""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckpttool
from tests.deepspeed.engines import logged, refusal
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

WIDTH = 8
TRAINED = 2
"""Steps before the save;"""
FOLLOWING = 3
"""and behind it, of which each loss of each rank is compared."""
TRACKED = "model-parallel-rng"

SAVES: list[dict[str, Any]] = [
    {"id": "zero1-dp1", "stage": 1, "world_size": 1, "background": False},
    {"id": "zero1-dp2", "stage": 1, "world_size": 2, "background": True},
    {"id": "zero2-dp2", "stage": 2, "world_size": 2, "background": False, "checkpointing": True},
    {"id": "zero3-dp2", "stage": 3, "world_size": 2, "background": True},
    {"id": "zero3-dp3", "stage": 3, "world_size": 3, "background": False},
    {"id": "zero0-dp2", "stage": 0, "world_size": 2, "background": False},
]
OTHERS = [("zero1-dp1", 1, 3), ("zero2-dp2", 3, 1), ("zero2-dp2", 2, 3), ("zero3-dp3", 2, 2)]
"""Resumes on other ranks: source, stage, ranks."""
CONVERTED = {"zero": {"to": "zero", "world_size": 3}, "universal": {"to": "universal"}}


def _jobs(directory: Path) -> list[dict[str, Any]]:
    root = str(directory / "{}" / "root")
    jobs: list[dict[str, Any]]
    jobs = [{"do": "save", "turn": 0, "root": root.format(save["id"]), **save} for save in SAVES]
    jobs += [{**job, "do": "resume", "turn": 1, "id": f"{job['id']}-again", "native": job["stage"] > 0} for job in jobs]
    by_id = {job["id"]: job for job in jobs}
    for source, stage, ranks in OTHERS:
        name = f"{source}-to-zero{stage}-dp{ranks}"
        job = {**by_id[source], "do": "resume", "turn": 1, "id": name, "stage": stage, "world_size": ranks}
        jobs.append({**job, "onward": str(directory / name / "onward")})
    back = f"{OTHERS[2][0]}-to-zero2-dp3"
    jobs.append({**by_id["zero2-dp2"], "do": "resume", "turn": 2, "id": "back", "root": f"{directory}/{back}/onward"})
    for name, options in CONVERTED.items():
        out = str(directory / f"converted-{name}")
        given = by_id["zero2-dp2"]
        jobs.append({
            "do": "convert", "turn": 1, "id": f"convert-{name}", "world_size": 1, "source": given["root"], "root": out,
            "options": options,
        })  # fmt: skip
        jobs.append({**given, "do": "resume", "turn": 2, "id": f"from-{name}", "root": out})
    for save in SAVES:
        if save["stage"]:
            given = by_id[save["id"]]
            jobs.append({**given, "do": "script", "turn": 3, "id": f"script-{save['id']}", "world_size": 1})
    jobs.append({**by_id["zero1-dp2"], "do": "refuse", "turn": 1, "id": "refuse", "root": str(directory / "refused")})
    return jobs


def _do(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    do = {"save": _save, "resume": _resume, "convert": _convert, "refuse": _refuse, "script": _script}[job["do"]]
    return do(job, directory)


def _script(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run the script that DeepSpeed leaves beside a checkpoint."""
    root = job["root"]
    with mock.patch.object(sys, "argv", ["zero_to_fp32.py", root, str(directory / job["id"] / "out"), "-t", "tag"]):
        runpy.run_path(f"{root}/zero_to_fp32.py", run_name="__main__")
    return {}


def build(job: dict[str, Any], seed: int) -> Any:
    """A small net with dropout under DeepSpeed; with ``checkpointing``, its middle runs twice, partly tracked."""
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    again = job.get("checkpointing", False)

    class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.drop = torch.nn.Dropout(0.5)

        def block(self, x: Any) -> Any:
            x = self.drop(torch.tanh(self.middle(x)))
            if not again:
                return x
            with tracker.fork(TRACKED):
                return self.drop(x)

        def forward(self, x: Any) -> Any:
            x = self.drop(self.first(x))
            x = checkpointing.checkpoint(self.block, x) if again else self.block(x)
            return self.last(x)

    if again:
        checkpointing.configure(None)
        tracker.add(TRACKED, 1000 + seed + torch.distributed.get_rank())
    torch.manual_seed(seed)
    net = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": job["stage"]}, "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True, **job.get("config", {}),
    }  # fmt: skip
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), config=config)[0]


def seed_all(seed: int) -> None:
    """Seed this rank's generators; each rank's differ."""
    own = 100 * seed + torch.distributed.get_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    random.gauss(0, 1)  # leaves the second number of the pair


def step(engine: Any) -> float:
    """Train on data from all generators; return the loss of this rank."""
    x = torch.rand(2, WIDTH) * random.gauss(1, 0.1) + torch.from_numpy(np.random.rand(2, WIDTH)).float()
    loss = (engine(x) - x.roll(1, 1)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _save(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    facts: dict[str, Any] = {}
    for saves in (False, True):
        engine = build(job, seed=5)
        seed_all(5)
        for _ in range(TRAINED):
            step(engine)
        if saves:
            manager = ckpttool.CheckpointManager(job["root"], async_save=job["background"])
            mine = {"rng": ckpttool.rng_state(), "rank": rank, "position": torch.arange(4) + rank, "seen": [rank]}
            manager.save(engine, tag="tag", client_state={"step": TRAINED}, rank_state=mine)
            mine["position"] += 1000  # after the call: not part of the save
            mine["seen"].append("later")
            mine["rng"]["torch"].zero_()
        facts["losses" if saves else "losses without a save"] = [step(engine) for _ in range(FOLLOWING)]
        if saves:
            manager.wait()
        engine.destroy()
    return facts


def _resume(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    engine = build(job, seed=77)
    seed_all(77)
    before, clipping = ckpttool.rng_state(), getattr(engine.optimizer, "clip_grad", None)
    manager = ckpttool.CheckpointManager(job["root"])
    try:
        state = manager.restore(engine, tag="tag")
    except ckpttool.CkptError as error:
        weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
        return {"error": str(error), "steps": engine.global_steps, "weights": weights}
    restored = manager.restored
    assert restored is not None
    manager.restore(engine, dry_run=True)
    preview = manager.restored
    assert preview is not None
    facts: dict[str, Any] = {
        "client_state": state, "rank_state": restored.rank_state, "rank_states": list(restored.rank_states),
        "report": str(restored), "preview": (preview.rank_state, len(preview.rank_states)), "before": before,
        "clipping": (clipping, getattr(engine.optimizer, "clip_grad", None)),
    }  # fmt: skip
    if restored.rank_states:
        facts["rng"] = restored.rng_state()
        facts["again"] = restored.rng_state()
        facts["shared"] = restored.rng_state(shared=["python"])
        ckpttool.set_rng_state(facts["rng"])
        facts["set"] = ckpttool.rng_state()
    else:
        facts["rng"] = restored.rng_state()
    facts["losses"] = [step(engine) for _ in range(FOLLOWING)]
    if "onward" in job:  # a save of the resumed run, for the next resume
        ckpttool.CheckpointManager(job["onward"]).save(engine, tag="tag", rank_state={"rng": ckpttool.rng_state()})
    manager.restore(engine, tag="tag", weights_only=True)
    restored = manager.restored
    facts["weights only"] = restored is not None and (restored.rank_state, len(restored.rank_states))
    if job.get("native"):  # DeepSpeed itself loads what is there
        facts["native"] = engine.load_checkpoint(job["root"], tag="tag")[1]["step"]
    engine.destroy()
    return facts


def _convert(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    return {"notes": ckpttool.convert(job["source"], job["root"], **job["options"]).notes}


def _refuse(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What saves of rank states that do not fit say on each rank."""
    rank = torch.distributed.get_rank()
    engine = build(job, seed=5)
    manager = ckpttool.CheckpointManager(job["root"], timeout=60)

    def told(**arguments: Any) -> str:
        return refusal(lambda: manager.save(engine, tag="tag", overwrite=True, **arguments))

    facts: dict[str, Any] = {
        "one without": told(rank_state={"a": 1} if rank == 0 else None),
        "unpicklable": told(rank_state={"a": (lambda: 0) if rank == 1 else 0}),
        "left": sorted(p.name for p in Path(job["root"]).glob("*")),
    }
    own = collections.UserDict(a=1) if rank == 1 else {"a": 1}
    with logged() as lines:
        facts["of an unknown class"] = told(rank_state=own)
    facts["warnings"] = [line for line in lines if "restore needs" in line]
    facts["restored"] = refusal(lambda: manager.restore(engine, tag="tag"))
    trusting = ckpttool.CheckpointManager(job["root"], allow=["collections.UserDict"])
    trusting.restore(engine, tag="tag")
    assert trusting.restored is not None
    facts["trusted"] = dict(trusting.restored.rank_state)
    engine.destroy()
    return facts


Facts = dict[str, list[dict[str, Any]]]
"""Results of each rank, by job."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rank-states")


@pytest.fixture(scope="module")
def found(done: Path) -> Facts:
    return each_on_ranks(_do, _jobs(done), done)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return bool(type(a) is type(b) and a == b)


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save["id"])
def test_losses_on_the_same_ranks_are_equal_bit_for_bit(save: dict[str, Any], found: Facts) -> None:
    gone_on, resumed = found[save["id"]], found[f"{save['id']}-again"]
    assert len(gone_on) == len(resumed) == save["world_size"]
    for rank, (a, b) in enumerate(zip(gone_on, resumed, strict=True)):
        assert a["losses without a save"] == a["losses"]  # a save draws no number
        assert b["losses"] == a["losses"]
        assert len(set(a["losses"])) == len(a["losses"])
        state = dict(b["rank_state"])
        assert _same(state.pop("rng"), b["rng"])
        assert _same(b["set"], b["rng"])
        assert _same(state, {"rank": rank, "position": torch.arange(4) + rank, "seen": [rank]})
        assert b["client_state"] == {"step": 2}
        assert ("deepspeed" in b["rng"]) == save.get("checkpointing", False)
        assert b["preview"] == (None, save["world_size"])
        assert b["weights only"] == (None, 0)
        assert "rank state" in b["report"]
    assert len({tuple(a["losses"]) for a in gone_on}) == save["world_size"]  # each rank has its own stream


@pytest.mark.parametrize(("source", "stage", "ranks"), OTHERS)
def test_other_ranks_get_all_states_and_streams_of_their_own(source: str, stage: int, ranks: int, found: Facts) -> None:
    saved = [one["rank_state"] for one in found[f"{source}-again"]]
    facts = found[f"{source}-to-zero{stage}-dp{ranks}"]
    assert len(facts) == ranks
    for one in facts:
        assert one["rank_state"] is None
        assert _same(one["rank_states"], saved)
        assert f"rank states of {len(saved)} ranks" in one["report"]
        assert _same(one["rng"], one["again"])  # the same again
        assert _same(one["set"], one["rng"])
    _check_apart([one["rng"] for one in facts] + [state["rng"] for state in saved])
    shared = [one["shared"] for one in facts]
    assert all(_same(state["python"], shared[0]["python"]) for state in shared)
    _check_apart([{**one, "python": None} for one in shared])


def _check_apart(states: list[dict[str, Any]]) -> None:
    """No two of the states have a generator in common."""
    for a, b in itertools.combinations(states, 2):
        for name in ("python", "numpy", "torch"):
            assert a[name] is None or not _same(a[name], b[name]), name
        assert not a.keys() & b.keys() & {"deepspeed"} or not _same(a["deepspeed"], b["deepspeed"])


def test_streams_stay_apart_over_several_resumes(found: Facts) -> None:
    first = [one["rng"] for one in found["zero2-dp2-again"]]
    second = [one["rng"] for one in found["zero2-dp2-to-zero2-dp3"]]
    third = [one["rng"] for one in found["back"]]
    assert [len(states) for states in (first, second, third)] == [2, 3, 2]
    _check_apart([*first, *second, *third])


@pytest.mark.parametrize("kind", CONVERTED)
def test_a_conversion_keeps_the_states_of_all_ranks(kind: str, done: Path, found: Facts) -> None:
    gone_on, resumed = found["zero2-dp2"], found[f"from-{kind}"]
    assert [one["losses"] for one in resumed] == [one["losses"] for one in gone_on]
    assert [one["rank_state"]["rank"] for one in resumed] == [0, 1]
    report = ckpttool.verify(done / f"converted-{kind}", deep=True)
    assert not report.findings
    (facts,) = found[f"convert-{kind}"]
    assert not any("rank state" in note for note in facts["notes"])


@pytest.mark.parametrize("name", ["zero2-dp2-to-zero2-dp3", "from-zero", "from-universal"])
def test_clipping_stays_on_where_the_configuration_does_not_name_it(name: str, found: Facts) -> None:
    for one in found[name]:
        before, after = one["clipping"]
        assert before == after == 1.0  # DeepSpeed's default


@pytest.mark.parametrize("save", [save for save in SAVES if save["stage"]], ids=lambda save: save["id"])
def test_deepspeed_loads_it(save: dict[str, Any], done: Path, found: Facts) -> None:
    assert [one["native"] for one in found[f"{save['id']}-again"]] == [2] * save["world_size"]
    assert list((done / f"script-{save['id']}" / "out").iterdir())


@pytest.mark.usefixtures("found")
def test_commands_know_the_files(done: Path, tmp_path: Path) -> None:
    root = done / "zero2-dp2" / "root"
    names = [f"ckpttool_rank_state_{rank:05d}.pt" for rank in range(2)]
    assert sorted(path.name for path in (root / "tag").glob("ckpttool_rank_state*")) == names
    manifest = json.loads((root / "tag" / "ckpttool.json").read_text())
    assert set(names) <= set(manifest["files"])
    assert [f.name for f in ckpttool.inspect(root).files if f.kind == "rank state"] == names
    copy = tmp_path / "copy"
    ckpttool.cp(root, copy, prove=True)
    assert [(copy / "tag" / name).read_bytes() for name in names] == [
        (root / "tag" / name).read_bytes() for name in names
    ]
    for where in (root, copy):
        assert not ckpttool.verify(where, deep=True).findings
        (entry,) = ckpttool.ls(where).entries
        assert entry.whole
    report = ckpttool.convert(root, tmp_path / "dcp", to="dcp")
    assert any("rank states of 2 ranks" in note for note in report.notes)
    assert ckpttool.consolidate(root, tmp_path / "weights.safetensors", to="safetensors").written.files
    shutil.copytree(copy / "tag", copy / "older")
    (copy / "older" / "ckpttool.json").unlink()
    ckpttool.prune(copy, keep_last=1)
    assert sorted(p.name for p in copy.iterdir() if p.is_dir()) == ["tag"]


@pytest.mark.usefixtures("found")
def test_damage_is_found(done: Path, tmp_path: Path) -> None:
    source = done / "zero2-dp2" / "root"
    first, second = (f"ckpttool_rank_state_{rank:05d}.pt" for rank in range(2))

    def damaged(change: Any, *, manifest: bool) -> list[str]:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(source, root)
        if not manifest:
            (root / "tag" / "ckpttool.json").unlink()
        change(root / "tag")
        return [f"{f.path}: {f.problem}" for f in ckpttool.verify(root, deep=True).findings]

    def flip(directory: Path) -> None:
        data = bytearray((directory / second).read_bytes())
        data[data.find(bytes(torch.load(directory / second)["state"]["rng"]["torch"][:64].numpy())) + 40] ^= 4
        (directory / second).write_bytes(data)

    def truncate(directory: Path) -> None:
        data = (directory / second).read_bytes()
        (directory / second).write_bytes(data[:-300])

    for manifest in (True, False):
        assert damaged(lambda _: None, manifest=manifest) == []
        for change in (flip, truncate):
            found = damaged(change, manifest=manifest)
            assert found, change
            assert all(second in line for line in found)
        found = damaged(lambda directory: (directory / first).unlink(), manifest=manifest)
        assert any(first in line and "is missing" in line for line in found)


def test_refusals_are_one_error_on_every_rank(found: Facts) -> None:
    facts = found["refuse"]
    assert len(facts) == 2
    for one in facts:
        assert re.search(r"rank 0 has rank_state 'given', rank 1 has 'missing'", one["one without"])
        assert one["one without"].endswith("pass rank_state on every rank, or on none")
        assert re.search(r"rank 1: ckpttool_rank_state_00001.pt: cannot be pickled", one["unpicklable"])
        assert "check the values in rank_state" in one["unpicklable"]
        assert one["left"] == []
        assert one["of an unknown class"] == ""
        assert "UserDict" in one["restored"]
    assert facts[0]["warnings"] == []
    assert len(facts[1]["warnings"]) == 1
    assert [one["trusted"] for one in facts] == [{"a": 1}, {"a": 1}] or facts[1]["trusted"] == {"data": {"a": 1}}


def test_a_checkpoint_without_rank_states() -> None:
    from tests.truth import source

    report = ckpttool.inspect(source("zero2-dp2-bf16"))
    assert not [f for f in report.files if f.kind == "rank state"]
