"""Run ``examples/ray_frameworks.py`` twice for each framework; a worker of the first is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ckpttool.storage import MANIFEST

PRINTED = "printed"
"""File beside the checkpoints of a run, for what its workers print."""
WHOLE = ("latest", MANIFEST)
"""Last file of a checkpoint: of DeepSpeed, or of a torch run."""
STEPS = 8
"""Steps of the first run; the second goes on for as many."""


def _train(config: dict[str, Any]) -> None:
    """Train on a worker; the first time, its second worker is killed after the first commit."""
    import ray.train
    import ray_frameworks

    context = ray.train.get_context()
    framework = context.get_experiment_name()
    run = Path(context.get_storage().experiment_fs_path)
    if context.get_world_rank() == 1 and not (run / "killed").exists():
        threading.Thread(target=_kill_after_a_commit, args=[run], daemon=True).start()
    if framework == "lightning":
        _let_lightning_run_on_cpu()
    with (run / PRINTED).open("a") as printed, contextlib.redirect_stdout(printed):
        ray_frameworks.FRAMEWORKS[framework](config)


def _let_lightning_run_on_cpu() -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from ray.train.lightning import RayDeepSpeedStrategy
    from recipes import lightning

    lightning.run_on_cpu()
    strategy: Any = RayDeepSpeedStrategy
    strategy.root_device = DeepSpeedStrategy.root_device  # Ray's has no index on a CPU, which DeepSpeed needs


def _kill_after_a_commit(run: Path) -> None:
    while not any(list(run.glob(f"*/{name}")) for name in WHOLE):
        time.sleep(0.002)
    (run / "killed").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, frameworks: list[str]) -> None:
    """Run the example for each framework: on two workers, and then on three at another ZeRO stage."""
    import ray_frameworks

    for framework in frameworks:
        common = [framework, "--storage", directory]
        ray_frameworks.main([*common, "--steps", str(STEPS), "--max-failures", "2"], _train)
        ray_frameworks.main([*common, "--steps", str(2 * STEPS), "--workers", "3", "--stage", "3"], _train)
