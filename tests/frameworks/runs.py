"""Run jobs on forked ranks, one after another; what came of each is in ``facts.json`` of its directory.

Jobs of one number of ranks share their processes, but for those that may fail or are killed. A job with ``kills`` is
killed that many times at random moments, and started again on the next number of ranks.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tests import forked

SECONDS = 240
"""How long a rank may run before it counts as stuck."""


Train = Callable[[dict[str, Any], dict[str, Any]], None]
"""Trains on one rank; adds what it finds to the facts."""


def run_jobs(jobs: list[dict[str, Any]], train: Train, forget: Callable[[], None] = lambda: None) -> None:
    """Run jobs.

    Args:
        jobs: The jobs; each has a directory ``out``.
        train: Trains on one rank; adds what it finds to the facts.
        forget: Resets the global state of a framework between two runs of a process.
    """
    # The frameworks ask for versions of packages again and again, and each time the package's metadata is parsed.
    metadata.version = functools.cache(metadata.version)
    metadata.metadata = functools.cache(metadata.metadata)
    for key, group in itertools.groupby(sorted(jobs, key=_process), _process):
        together = list(group)
        for job in together:
            Path(job["out"]).mkdir(parents=True, exist_ok=True)
        killed = [_kill_runs(job, train) if "kills" in job else [] for job in together]
        statuses = forked.statuses_of(key[0], partial(_ranks, together, train, forget))
        for job, of_job in zip(together, killed, strict=True):
            facts = Path(job["out"], "facts.json")
            found = json.loads(facts.read_text()) if facts.exists() else {}
            facts.write_text(json.dumps({**found, "statuses": statuses, "killed": of_job}))


def _process(job: dict[str, Any]) -> tuple[int, str]:
    """Return what jobs of the same processes have in common."""
    alone = job.get("fails") or "kills" in job or "kill" in job
    return job["world_size"], job["id"] if alone else ""


def _ranks(jobs: list[dict[str, Any]], train: Train, forget: Callable[[], None]) -> None:
    """Do jobs one after another."""
    environment = dict(os.environ)
    for number, job in enumerate(jobs):
        if number:
            os.environ.clear()
            os.environ.update(environment)
            forget()
            gc.freeze()  # frameworks call gc.collect
        _rank(job, train)


def _rank(job: dict[str, Any], train: Train) -> None:
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    forked.end_if_stuck(SECONDS)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpttool")
    logger.addHandler(handler)
    facts: dict[str, Any] = {}
    try:
        train(job, facts)
        facts["error"] = ""
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    logger.removeHandler(handler)
    if os.environ["RANK"] == "0":
        facts["told"] = told
        Path(job["out"], "facts.json").write_text(json.dumps(facts))
    if torch.distributed.is_initialized() and not facts["error"]:
        torch.distributed.barrier()


def note_loss(job: dict[str, Any], step: int, loss: float) -> None:
    """Append the loss of a step to the job's log, which kills leave as it is."""
    if os.environ["RANK"] == "0":
        with Path(job["out"], "losses").open("a") as file:
            file.write(f"{os.environ['WORLD_SIZE']} {step} {loss!r}\n")


def noted_losses(job: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Return number of ranks, step and loss of all steps of all starts of a job, in order."""
    lines = [line.split(" ") for line in Path(job["out"], "losses").read_text().splitlines()]
    return [(int(ranks), int(step), float(loss)) for ranks, step, loss in lines]


def _kill_runs(job: dict[str, Any], train: Train) -> list[int]:
    """Start a job and kill all its ranks, as often as it says; return the numbers of ranks that were killed.

    A kill comes a random time after the start, or after the loss of a random step: in a restore, a step, or a save. The
    first one comes after ``steps`` of them, so that there is something to resume from.
    """
    kills = job["kills"]
    chance = random.Random(kills["seed"])  # noqa: S311  no secret
    log, killed = Path(job["out"], "losses"), []
    for number in range(kills["count"]):
        ranks = kills["ranks"][number % len(kills["ranks"])]
        steps = chance.randint(0, kills["steps"]) if number else kills["steps"]
        moment = _Moment(log, steps, chance.uniform(0.0, kills["seconds"] if steps else kills["start"]))
        statuses = forked.kill_ranks(ranks, partial(_rank, {**job, "world_size": ranks}, train), moment.is_now)
        if -9 in statuses:
            killed.append(ranks)
    return killed


class _Moment:
    """A number of seconds after some more steps.

    Args:
        log: The log of losses.
        steps: Steps that it must grow by.
        seconds: Seconds after these.
    """

    def __init__(self, log: Path, steps: int, seconds: float) -> None:
        self._log, self._seconds = log, seconds
        self._lines = self._count() + steps
        self._began: float | None = None

    def _count(self) -> int:
        return self._log.read_bytes().count(b"\n") if self._log.exists() else 0

    def is_now(self) -> bool:
        """Return whether the moment has come."""
        if self._began is None and self._count() >= self._lines:
            self._began = time.monotonic()
        return self._began is not None and time.monotonic() >= self._began + self._seconds
