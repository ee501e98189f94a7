"""Resume on this machine's CPU from fixtures of ``make_gpu.py``, with their recorded jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import forked


def main(directory: Path) -> None:
    """Do all jobs; each rank of each is forked."""
    import deepspeed  # noqa: F401  once, for all that are forked
    from recipes.gpu_ranks import batches_checksum

    batches = {}
    for job in forked.jobs_in(directory):
        Path(job["directory"]).mkdir()
        forked.run_ranks(job["world_size"], lambda job=job: _rank(job))  # type: ignore[misc]
        if "fixture" in job:
            batches[job["fixture"]] = batches_checksum(job["recipe"]["steps"])
    (directory / "batches.json").write_text(json.dumps(batches))


def _rank(job: dict[str, object]) -> None:
    from recipes import gpu_ranks, through_host

    if job.get("through_host"):
        through_host.install(lambda tensor: True, lambda: None)
    gpu_ranks.run(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
