"""Measure how long the workers of a Ray Train run wait for each checkpoint, against the documented pattern.

    python benchmarks/ray_train.py [--parameters 10] [--workers 2] [--saves 4] [--latency 0.05]

* documented: ``save_checkpoint`` to a temporary directory, barrier, ``ray.train.report(Checkpoint.from_directory)``.
* ours, and ours in the background: ``ckpttool.integrations.ray_train``.

All in runs of the same model at ZeRO stage 3, to local disk and to S3 (moto behind a proxy that waits before each
request). Between two saves the loop sleeps, so that Ray's controller has fetched the previous report, and background
writes end. So the figures show the delay of a train loop that saves rarely. Ours is synced and hashed when it returns,
or when it is committed; the documented one is neither. At the end another number of workers resumes: with the
documented pattern it cannot without a conversion. Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
from measure import DATA as ROOT
from measure import keep

from tests.faults.s3_faults import Latency
from tests.faults.s3_proxy import Proxy
from tests.storage import server

DATA = ROOT / "ray"
ENVIRONMENT = {
    **server.ENVIRONMENT,
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_memory_usage_threshold": "0.98",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
WIDTH = 512
WAYS = {
    "documented": "save_checkpoint, report(from_directory)",
    "ours": "ray_train.report",
    "background": "ray_train.report, in the background",
}
"""Ways to save, and their names in the record."""


def train_func(config: dict[str, Any]) -> None:
    """Save a few times, or resume once; the first worker records how long it waited."""
    import deepspeed
    import ray.train.collective
    import torch

    from ckpttool.integrations.ray_train import RayTrainCheckpoints

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = max(1, config["parameters"] // (WIDTH * WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4)
    )
    checkpoints = RayTrainCheckpoints(blocking=config["way"] != "background")
    stalls, restored = [], 0.0
    if config["way"] == "resume":
        ray.train.collective.barrier()
        began = time.perf_counter()
        if checkpoints.restore(engine, config["from"]) is None:
            raise SystemExit("nothing was restored")
        ray.train.collective.barrier()
        restored = time.perf_counter() - began
    for _ in range(config["saves"]):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        ray.train.collective.barrier()
        began = time.perf_counter()
        if config["way"] == "documented":
            with tempfile.TemporaryDirectory() as directory:
                engine.save_checkpoint(directory)
                ray.train.collective.barrier()
                ray.train.report({"step": 1}, checkpoint=ray.train.Checkpoint.from_directory(directory))
        else:
            checkpoints.report(engine, {"step": 1}, client_state={"step": 1})
        stalls.append(time.perf_counter() - began)
        time.sleep(config["pause"])
    checkpoints.finish()
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(json.dumps({"stalls": stalls, "restored": restored}), encoding="utf-8")


def fit(way: str, workers: int, name: str, config: dict[str, Any], **run: Any) -> tuple[dict[str, Any], Any]:
    """One run; return its recorded figures, and its newest checkpoint."""
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out = DATA / "out.json"
    result = TorchTrainer(
        train_func,
        train_loop_config={**config, "way": way, "out": str(out)},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=name, checkpoint_config=CheckpointConfig(num_to_keep=1), **run),
    ).fit()
    return json.loads(out.read_text(encoding="utf-8")), result.checkpoint


def measure(where: str, options: argparse.Namespace, **run: Any) -> None:
    """The three ways to one storage, and a resume."""
    config = {
        "parameters": int(options.parameters * 10**6),
        "saves": options.saves,
        "pause": options.pause,
        "from": None,
    }
    medians: dict[str, float] = {}
    contestants: dict[str, dict[str, list[float]]] = {}
    newest: Any = None
    for way, title in WAYS.items():
        found, newest = fit(way, options.workers, f"{way}-{os.getpid()}", config, **run)
        counted = found["stalls"][1:]  # the first is slow for all
        medians[way] = statistics.median(counted)
        contestants[title] = {"wall": counted}
        times = ", ".join(f"{s:.2f}" for s in found["stalls"])
        print(f"{where}: {way}: {medians[way]:.2f} s a checkpoint ({times})", flush=True)
    for way in ("ours", "background"):
        print(f"{where}: {way} against documented: {medians['documented'] / medians[way]:.1f}x", flush=True)
    keep(where, WAYS["ours"], contestants)
    more = options.workers + 1
    found, _ = fit("resume", more, f"resume-{os.getpid()}", {**config, "saves": 0, "from": newest}, **run)
    print(f"{where}: {more} workers resume from {options.workers} in {found['restored']:.2f} s", flush=True)


def main() -> None:
    """Start a cluster on this machine, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=10, help="millions")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between two saves")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that S3 takes to answer")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    import ray

    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    measure("local disk", options, storage_path=str(DATA))
    with server.running() as endpoint, Proxy(endpoint) as proxy:
        server.client(endpoint).create_bucket(Bucket="models")
        proxy.add(Latency(options.latency), times=None)
        address = proxy.url.removeprefix("http://")
        measure(
            f"S3, {1000 * options.latency:.0f} ms",
            options,
            storage_path=f"s3://models/runs?scheme=http&endpoint_override={address}",
        )
    ray.shutdown()
    shutil.rmtree(DATA, ignore_errors=True)


if __name__ == "__main__":
    main()
