"""Jobs of one framework that a test module runs, in one process for each turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import forked

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Jobs:
    """The jobs of a test module.

    Args:
        runs: A module with a function ``run`` that runs them, and the names of the modules that it imports.
        directory: Directory of all jobs.
        paths: Returns values of a job for its own directory.
    """

    def __init__(self, runs: ModuleType, directory: Path, paths: Callable[[Path], dict[str, Any]]) -> None:
        self.directory = directory
        self._runs = runs
        self._paths = paths
        self._jobs: list[dict[str, Any]] = []

    def add(self, name: str, stage: int, world_size: int, **values: Any) -> None:
        """Add a job for the next turn; ``fails`` in its values allows it to fail."""
        out = self.directory / name
        self._jobs.append(
            {"id": name, "out": str(out), "stage": stage, "world_size": world_size, **self._paths(out), **values}
        )

    def run(self) -> dict[str, Any]:
        """Run the jobs that were added since the last turn; return the facts of each by name."""
        jobs, self._jobs = self._jobs, []
        forked.call(self._runs.run, jobs, imports=self._runs.IMPORTED)
        found = {}
        for job in jobs:
            facts = json.loads((Path(job["out"]) / "facts.json").read_text())
            assert job.get("fails") or (not facts["error"] and not any(facts["statuses"])), (job["id"], facts)
            found[job["id"]] = {**facts, "out": Path(job["out"])}
        return found
