"""Runs of a framework that are killed at random moments, all ranks at once, lose nothing but time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import ckpttool
from tests import forked
from tests.frameworks.runs import noted_losses

if TYPE_CHECKING:
    from types import ModuleType

    from _pytest.tmpdir import TempPathFactory

COUNT = 5
"""Maximum number of kills of a run, which may end before the last of them."""
SEEDS = range(14)
"""Runs of each framework. A run must be short: over 300 steps, sums in the order of other ranks change losses by 1e-3,
in runs that are not killed as well."""
KILLS = {"count": COUNT, "start": 4.0, "seconds": 0.3}


class KilledRuns:
    """Tests of one framework; a subclass has its values."""

    module: ModuleType
    """Its runs: a function ``run``, and the names of the modules that it imports."""
    options: ClassVar[dict[str, Any]]
    """How its jobs save and resume."""
    steps = 6 * COUNT
    """Steps of a run: enough for most of the kills."""
    first = 3
    """Maximum number of steps between two kills: at least one save is committed in them."""

    @pytest.fixture(scope="class", params=SEEDS)
    @classmethod
    def runs(cls, request: pytest.FixtureRequest, tmp_path_factory: TempPathFactory) -> dict[str, Any]:
        """The jobs: two that are killed, and two that are not."""
        seed = request.param
        directory = tmp_path_factory.mktemp("kills")
        same = {"ranks": [2], "seed": 2 * seed + 1, "steps": cls.first, **KILLS}
        other = {"ranks": [2, 3, 1], "seed": 2 * seed + 2, "steps": cls.first, **KILLS}
        jobs: list[dict[str, Any]] = []
        cases: dict[str, dict[str, Any]] = {
            "same": {"stage": 3, "dropout": 0.5, "kills": same}, "whole-same": {"stage": 3, "dropout": 0.5},
            "other": {"stage": 2, "kills": other}, "whole-other": {"stage": 2},
        }  # fmt: skip
        for name, values in cases.items():
            out = directory / name
            paths = {"out": str(out), "output_dir": str(out / "run"), "run": str(out / "run"), "project": str(out)}
            common = {"id": name, "world_size": 2, "steps": cls.steps, "notes": True, **paths}
            jobs.append({**common, **cls.options, **values})
        forked.call(cls.module.run, jobs, imports=cls.module.IMPORTED)
        return {
            job["id"]: {
                **json.loads((Path(job["out"]) / "facts.json").read_text()), "noted": noted_losses(job),
                "out": job["out"], "steps": job["steps"],
            }
            for job in jobs
        }  # fmt: skip

    @pytest.mark.parametrize(("name", "tolerance"), [("same", 0.0), ("other", 1e-3)])
    def test_every_loss_of_a_killed_run_is_that_of_a_run_that_was_not(
        self, runs: dict[str, Any], name: str, tolerance: float
    ) -> None:
        killed, whole = runs[name], runs[f"whole-{name}"]
        assert (killed["error"], whole["error"]) == ("", "")
        assert not any(killed["statuses"])
        assert 1 <= len(killed["killed"]) <= COUNT
        truth = {step: loss for _, step, loss in whole["noted"]}
        assert list(truth) == list(range(1, whole["steps"] + 1))
        steps = [step for _, step, _ in killed["noted"]]
        assert set(steps) == set(truth)
        for ranks, step, loss in killed["noted"]:
            assert loss == pytest.approx(truth[step], rel=tolerance, abs=0), (ranks, step)

    def test_a_killed_run_resumes(self, runs: dict[str, Any]) -> None:
        """One of the two at least: a run may be killed before its first save, each time."""
        first = []
        for name in ("same", "other"):
            steps = [step for _, step, _ in runs[name]["noted"]]
            first += [after for before, after in itertools.pairwise(steps) if after != before + 1]
        assert max(first) > 1

    @pytest.mark.parametrize("name", ["same", "other"])
    def test_the_checkpoints_that_are_left_are_whole(self, runs: dict[str, Any], name: str) -> None:
        found = [path for path in Path(runs[name]["out"]).rglob("latest") if path.is_file()]
        assert found
        for path in found:
            assert not ckpttool.verify(path.parent, deep=True).findings
