"""The Hugging Face Trainer, Accelerate and Lightning in workers of Ray Train: ``examples/ray_frameworks.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from tests import sampling
from tests.under_ray.driver import ENVIRONMENT
from tests.under_ray.frameworks import STEPS

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]
ROOT = Path(__file__).resolve().parent.parent.parent

FRAMEWORKS = sampling.some(["trainer", "accelerate", "lightning"], 1)


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory) -> tuple[Path, str]:
    """Storage of the runs, and what they printed."""
    directory = tmp_path_factory.mktemp("frameworks")
    path = [str(ROOT), str(ROOT / "fixtures"), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, **ENVIRONMENT, "RAY_ADDRESS": "local", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path), "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.under_ray.frameworks", str(directory), *FRAMEWORKS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=directory)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return directory, ended.stdout + ended.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_goes_on_after_a_killed_worker_and_on_more_workers(done: tuple[Path, str], framework: str) -> None:
    directory, printed = done
    assert (directory / framework / "killed").exists()
    trained = re.findall(r"trained from step (\d+) on (\d) workers", printed)
    assert len(trained) == 2 * len(FRAMEWORKS)
    (first, workers), (second, more) = trained[2 * FRAMEWORKS.index(framework) :][:2]
    assert int(first) > 0, "after the kill"
    assert (workers, second, more) == ("2", str(STEPS), "3")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ray_knows_the_commits_and_keeps_as_many_as_it_was_told(done: tuple[Path, str], framework: str) -> None:
    directory, printed = done
    told = re.findall(r"newest: (\S+); kept: (.*)", printed)[2 * FRAMEWORKS.index(framework) + 1]
    newest, kept = told[0], told[1].split(", ")
    assert newest in kept
    assert len(kept) == 2
    whole = {path.parent.name for path in (directory / framework).glob("*/latest")}
    assert whole == set(kept)
    for name in kept:
        assert not ckpttool.verify(directory / framework / name, deep=True).findings
    assert ckpttool.inspect(directory / framework / newest).step == 2 * STEPS
    assert ckpttool.inspect(directory / framework / newest).topology.world_size == 3
