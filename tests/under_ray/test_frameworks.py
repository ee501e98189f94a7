"""The Hugging Face Trainer, Accelerate and Lightning in workers of Ray Train: ``examples/ray_frameworks.py``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import ckpttool
from tests import sampling
from tests.under_ray.frameworks import PRINTED, STEPS, WHOLE

if TYPE_CHECKING:
    from tests.under_ray.conftest import Trained

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]

FRAMEWORKS = sampling.some(["trainer", "accelerate", "trainer-ddp", "lightning", "lightning-fsdp2"], 2)

OF_TORCH = {"trainer-ddp", "lightning-fsdp2"}
RAY_RUNS = {framework: ("frameworks", [framework]) for framework in FRAMEWORKS}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_goes_on_after_a_killed_worker_and_on_more_workers(trained: Trained, framework: str) -> None:
    run = trained.of(framework) / framework
    assert (run / "killed").exists()
    printed = re.findall(r"trained from step (\d+) on (\d) workers", (run / PRINTED).read_text())
    (first, workers), (second, more) = printed
    assert int(first) > 0, "after the kill"
    assert (workers, second, more) == ("2", str(STEPS), "3")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ray_knows_the_commits_and_keeps_as_many_as_it_was_told(trained: Trained, framework: str) -> None:
    directory = trained.of(framework)
    _, told = re.findall(r"newest: (\S+); kept: (.*)", (directory / f"{framework}.printed").read_text())
    newest, kept = told[0], told[1].split(", ")
    assert newest in kept
    assert len(kept) == 2
    whole = {path.parent.name for path in (directory / framework).glob(f"*/{WHOLE[framework in OF_TORCH]}")}
    assert whole == set(kept)
    for name in kept:
        assert not ckpttool.verify(directory / framework / name, deep=True).findings
    assert ckpttool.inspect(directory / framework / newest).step == 2 * STEPS
    assert ckpttool.inspect(directory / framework / newest).topology.world_size == 3
