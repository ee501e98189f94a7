"""A run resumed on other ranks reads the rest of the data in the same steps, and is told of another global batch."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
import ckpttool.data
from ckpttool.model.batch import equal_batch
from tests.deepspeed.engines import logged
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

SAMPLES, WIDTH, GLOBAL = 50, 6, 12
CONFIG: dict[str, Any] = {
    "train_batch_size": GLOBAL, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "steps_per_print": 10_000,
}  # fmt: skip

STOP = 2
"""Steps of the optimizer before the save."""
PAIRS = [(1, 3), (2, 3), (2, 4), (3, 2), (4, 1), (2, 2)]
CURRICULA = [(2, 1, 3, 1), (2, 2, 1, 1), (3, 1, 2, 3)]
"""Ranks and accumulation of the run that saves, and of the one that resumes."""


def _jobs(directory: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    common = {"do": "train", "workers": 0, "resumes": False}
    for ranks in (1, 2, 3, 4):
        root = str(directory / f"dp{ranks}" / "root")
        jobs.append({**common, "id": f"dp{ranks}", "turn": 0, "world_size": ranks, "steps": STOP, "root": root})
        whole = {**common, "id": f"whole-dp{ranks}", "turn": 0, "world_size": ranks, "steps": 0}
        whole["root"] = str(directory / "never saved")
        jobs.append(whole)
    for saved, ranks in PAIRS:
        root = str(directory / f"dp{saved}" / "root")
        job = {**common, "id": f"dp{saved}-to-dp{ranks}", "turn": 1, "world_size": ranks, "steps": 0, "root": root}
        jobs.append({**job, "resumes": True, "workers": 2 if (saved, ranks) == (2, 3) else 0})
    configs = {
        "equal": {"train_micro_batch_size_per_gpu": 2},
        "larger": {"train_batch_size": 18, "train_micro_batch_size_per_gpu": 6},
    }
    told = {"do": "differs", "turn": 1, "world_size": 3, "root": str(directory / "dp2" / "root"), "configs": configs}
    jobs.append({**told, "id": "told"})
    for saved, accumulation, ranks, other in CURRICULA:
        name = f"curriculum-{saved}-{accumulation}"
        where = {"clusters": str(directory / name / "clusters"), "root": str(directory / name / "root")}
        job = {"do": "curriculum", "id": name, "turn": 0, "world_size": saved, "accumulation": accumulation, **where}
        jobs.append({**job, "resumes": False})
        job = {**job, "id": f"{name}-resumed", "turn": 1, "world_size": ranks, "accumulation": other}
        jobs.append({**job, "resumes": True})
    for name, options in (("prefetched", {"workers": 2}), ("between", {"extra": 1})):
        where = {"clusters": str(directory / name / "clusters"), "root": str(directory / name / "root")}
        job = {"do": "curriculum", "id": name, "turn": 0, "world_size": 1, "accumulation": 2, **where}
        jobs.append({**job, **options, "resumes": False})
        jobs.append({**job, "id": f"{name}-resumed", "turn": 1, "resumes": True})
    return jobs


def _do(job: dict[str, Any]) -> dict[str, Any]:
    return {"train": _train, "curriculum": _curriculum, "differs": _differs}[job["do"]](job)


def _build(config: dict[str, Any]) -> Any:
    import deepspeed

    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.02), config=config)[0]


def _train(job: dict[str, Any]) -> dict[str, Any]:
    """Train to the end of an epoch, or for some steps of the optimizer; resume if there is a checkpoint."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sizes = equal_batch(GLOBAL, ranks, CONFIG["train_micro_batch_size_per_gpu"])
    assert sizes is not None
    config = {**CONFIG, **sizes.to_config()}
    engine = _build(config)
    numbers = torch.Generator().manual_seed(9)
    data = [(n, torch.randn(WIDTH, generator=numbers)) for n in range(SAMPLES)]
    sampler = ckpttool.data.ResumableSampler(
        data, batch_size=config["train_micro_batch_size_per_gpu"], rank=rank, world_size=ranks, seed=4,
        accumulation=config["gradient_accumulation_steps"],
    )  # fmt: skip
    loader = ckpttool.data.ResumableLoader(
        torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=job["workers"])
    )
    manager = ckpttool.CheckpointManager(job["root"])
    notes: tuple[str, ...] = ()
    if job["resumes"]:
        state = manager.restore(engine)
        assert state is not None
        assert manager.restored is not None
        loader.load_state_dict(state["loader"])
        notes = manager.restored.notes
    first = engine.global_steps
    read: list[tuple[int, list[int], list[float]]] = []
    for numbers_of, x in loader:
        losses = (engine(x) - x.sum(1, keepdim=True)).square().mean(1)
        read.append((engine.global_steps, numbers_of.tolist(), losses.tolist()))
        engine.backward(losses.mean())
        engine.step()
        if job["steps"] and engine.global_steps - first == job["steps"]:
            break
    if not job["resumes"] and job["steps"]:
        manager.save(engine, tag="tag", client_state={"loader": loader.state_dict()})
    engine.destroy()
    return {"read": read, "config": config, "notes": notes}


def _differs(job: dict[str, Any]) -> dict[str, Any]:
    """What a restore says if the global batch differs."""
    facts = {}
    for name, sizes in job["configs"].items():
        engine = _build({**CONFIG, **sizes})
        with logged(logging.WARNING) as lines:
            preview = ckpttool.load(engine, job["root"], dry_run=True)
            assert not lines
            report = ckpttool.load(engine, job["root"])
        facts[name] = {"notes": [*report.notes], "preview": [*preview.notes], "warnings": lines}
        engine.destroy()
    return facts


def _curriculum(job: dict[str, Any]) -> dict[str, Any]:
    """Read with DeepSpeed's own sampler, save, and read on; or resume."""
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metric = {
        "clustering_type": "single_cluster", "difficulty_type": "value", "min_difficulty": 1, "max_difficulty": 10,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": job["clusters"], "curriculum_metrics": {"length": metric}}
    efficiency = {"seed": 5, "data_sampling": {"num_epochs": 2, "num_workers": 0, "curriculum_learning": learning}}
    micro = GLOBAL // ranks // job["accumulation"]
    sampler = DeepSpeedDataSampler(
        efficiency, 200, micro, rank, ranks, torch.distributed.group.WORLD, job["accumulation"], rank
    )
    position = ckpttool.data.CurriculumPosition(sampler, workers=job.get("workers", 0))
    engine = _build({**CONFIG, "train_micro_batch_size_per_gpu": 1, "train_batch_size": ranks})
    manager = ckpttool.CheckpointManager(job["root"])
    facts: dict[str, Any] = {"before": [], "after": []}
    if job["resumes"]:
        state = manager.restore(engine)
        assert state is not None
        try:
            position.load_state_dict(state["position"])
        except ckpttool.CkptError as error:
            return {"error": str(error)}
        batches = iter(sampler)
    else:
        batches = iter(sampler)
        facts["before"] = [next(batches) for _ in range(3 * job["accumulation"] + job.get("extra", 0))]
        manager.save(engine, tag="tag", client_state={"position": position.state_dict()})
    facts["after"] = [next(batches) for _ in range(4 * job["accumulation"])]
    facts["consumed"] = position.state_dict()["consumed_samples"]
    engine.destroy()
    return facts


Facts = dict[str, list[dict[str, Any]]]
"""Results of each rank, by job."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: TempPathFactory) -> Facts:
    return each_on_ranks(_do, _jobs(tmp_path_factory.mktemp("positions")))


def _read(facts: list[dict[str, Any]]) -> tuple[list[int], dict[int, list[float]]]:
    """The samples that all ranks have read, and the losses of each step of the optimizer."""
    samples: list[int] = []
    losses: dict[int, list[float]] = defaultdict(list)
    assert len({len(one["read"]) for one in facts}) == 1
    for one in facts:
        for step, numbers, own in one["read"]:
            samples += numbers
            losses[step] += own
    return samples, losses


@pytest.mark.parametrize(("saved", "ranks"), PAIRS)
def test_the_rest_of_the_epoch_is_read_once_and_the_steps_are_the_same(saved: int, ranks: int, facts: Facts) -> None:
    before, first = _read(facts[f"dp{saved}"])
    resumed = facts[f"dp{saved}-to-dp{ranks}"]
    after, second = _read(resumed)
    whole, losses = _read(facts[f"whole-dp{saved}"])
    assert Counter(before + after) == Counter(whole) == Counter(range(SAMPLES))
    assert len(before) == STOP * GLOBAL
    assert all(one["config"]["train_batch_size"] == GLOBAL for one in resumed)
    assert not any("global batch" in note for one in resumed for note in one["notes"])
    full = SAMPLES // GLOBAL - 1  # the last one may give samples to the step behind it
    gone_on = [sorted(losses[step]) for step in sorted(losses)][:full]
    stopped = [sorted(values) for steps in (first, second) for _, values in sorted(steps.items())][:full]
    assert [len(values) for values in stopped] == [GLOBAL] * full
    for a, b in zip(stopped, gone_on, strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_another_global_batch_is_told(facts: Facts) -> None:
    text = (
        "the global batch is 18 samples, but was 12 in the saved run; for an equal one set train_batch_size 12, "
        "train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 1"
    )
    for rank, one in enumerate(facts["told"]):
        assert not any("global batch" in note for kind in one["equal"].values() for note in kind)
        assert text in one["larger"]["notes"]
        assert text in one["larger"]["preview"]
        assert [line for line in one["larger"]["warnings"] if line.endswith(text)] == one["larger"]["warnings"]
        assert len(one["larger"]["warnings"]) == (rank == 0)


@pytest.mark.parametrize(("saved", "accumulation", "ranks", "other"), CURRICULA)
def test_curriculum_learning_goes_on(saved: int, accumulation: int, ranks: int, other: int, facts: Facts) -> None:
    name = f"curriculum-{saved}-{accumulation}"
    gone_on, resumed = facts[name], facts[f"{name}-resumed"]
    assert (len(gone_on), len(resumed)) == (saved, ranks)

    def steps(ranks: list[dict[str, Any]], count: int) -> list[list[int]]:
        parts = [
            [index for one in ranks for batch in one["after"][n * count : (n + 1) * count] for index in batch]
            for n in range(4)
        ]
        return [sorted(part) for part in parts]

    assert steps(resumed, other) == steps(gone_on, accumulation)
    assert {one["consumed"] for one in [*gone_on, *resumed]} == {7 * GLOBAL}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("prefetched", "workers of the loader have prefetched samples"), ("between", "micro batches were read since")],
)
def test_an_inexact_position_is_refused(name: str, reason: str, facts: Facts) -> None:
    (one,) = facts[f"{name}-resumed"]
    assert "is not exact" in one["error"]
    assert reason in one["error"]
