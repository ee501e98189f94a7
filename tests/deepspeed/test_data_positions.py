"""A run resumed on other ranks reads the rest of the data in the same steps, and is told of another global batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import forked
from tests.deepspeed.data_positions import GLOBAL, SAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

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


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("positions")
    forked.start("tests.deepspeed.data_positions", _jobs(directory), directory)
    return directory


def _facts(done: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted((done / name).glob("facts-*.pt"))]


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
def test_the_rest_of_the_epoch_is_read_once_and_the_steps_are_the_same(saved: int, ranks: int, done: Path) -> None:
    before, first = _read(_facts(done, f"dp{saved}"))
    resumed = _facts(done, f"dp{saved}-to-dp{ranks}")
    after, second = _read(resumed)
    whole, losses = _read(_facts(done, f"whole-dp{saved}"))
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


def test_another_global_batch_is_told(done: Path) -> None:
    facts = _facts(done, "told")
    text = (
        "the global batch is 18 samples, but was 12 in the saved run; for an equal one set train_batch_size 12, "
        "train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 1 (ckpttool.resume_config does)"
    )
    for rank, one in enumerate(facts):
        assert not any("global batch" in note for kind in one["equal"].values() for note in kind)
        assert text in one["larger"]["notes"]
        assert text in one["larger"]["preview"]
        assert [line for line in one["larger"]["warnings"] if line.endswith(text)] == one["larger"]["warnings"]
        assert len(one["larger"]["warnings"]) == (rank == 0)


@pytest.mark.parametrize(("saved", "accumulation", "ranks", "other"), CURRICULA)
def test_curriculum_learning_goes_on(saved: int, accumulation: int, ranks: int, other: int, done: Path) -> None:
    name = f"curriculum-{saved}-{accumulation}"
    gone_on, resumed = _facts(done, name), _facts(done, f"{name}-resumed")
    assert (len(gone_on), len(resumed)) == (saved, ranks)

    def steps(facts: list[dict[str, Any]], count: int) -> list[list[int]]:
        parts = [
            [index for one in facts for batch in one["after"][n * count : (n + 1) * count] for index in batch]
            for n in range(4)
        ]
        return [sorted(part) for part in parts]

    assert steps(resumed, other) == steps(gone_on, accumulation)
    assert {one["consumed"] for one in [*gone_on, *resumed]} == {7 * GLOBAL}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("prefetched", "workers of the loader have prefetched samples"), ("between", "micro batches were read since")],
)
def test_an_inexact_position_is_refused(name: str, reason: str, done: Path) -> None:
    (facts,) = _facts(done, f"{name}-resumed")
    assert "is not exact" in facts["error"]
    assert reason in facts["error"]
