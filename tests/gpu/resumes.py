"""Resume on this machine's CPU from fixtures of ``make_gpu.py``, with their recorded jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import forked


def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Do all jobs; return the checksum of the batches of each fixture."""
    from recipes.gpu_ranks import batches_checksum

    batches = {}
    for job in jobs:
        Path(job["directory"]).mkdir()
        forked.run_ranks(job["world_size"], lambda job=job: _rank(job))  # type: ignore[misc]
        if "fixture" in job:
            batches[job["fixture"]] = batches_checksum(job["recipe"]["steps"])
    return batches


def _rank(job: dict[str, object]) -> None:
    from recipes import gpu_ranks, through_host

    if job.get("through_host"):
        through_host.install(lambda tensor: True, lambda: None)
    gpu_ranks.run(job)
