"""Start a worker with torchrun on several ranks of real DeepSpeed on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_worker(worker: str, ranks: int, jobs: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Give jobs to a worker and return its answers."""
    asked, answered = directory / f"{worker}-{ranks}.jobs.json", directory / f"{worker}-{ranks}.answers.json"
    asked.write_text(json.dumps(jobs))
    script = str(Path(__file__).with_name(f"{worker}.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, str(asked), str(answered)], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    answers: list[dict[str, Any]] = json.loads(answered.read_text())
    return answers
