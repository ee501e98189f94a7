"""DeepSpeed under Ray Train that continues with the remaining workers, and adds workers that join.

    python examples/ray_elastic.py --storage /shared/runs --workers 1 8 --gpu    # on a Ray cluster
    python examples/ray_elastic.py --simulate    # three nodes on this machine: one is lost, comes back, one is drained

In each case the run continues from the newest commit, spread over the present workers. The steps since then are lost,
also when workers join, because Ray then restarts all workers without a warning. Save often enough for that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WIDTH, BATCH = 64, 12


def train_func(config: dict[str, Any]) -> None:
    """Train on as many workers as there are."""
    import deepspeed
    import ray.train
    import torch
    from ray.train.collective import broadcast_from_rank_zero

    from ckpttool.integrations import ray_train

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed()
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    settings = {
        "train_batch_size": BATCH,  # the same on any number of workers that divides it
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )

    state = ray_train.restore(engine)
    step, before = (state["step"], state["moments"]) if state else (0, 0.0)
    if rank == 0:
        tell(config, event="start", workers=workers, step=step, saved=before, moments=moments(engine))
    else:
        moments(engine)
    while not broadcast_from_rank_zero(step >= config["steps"] or Path(config["stop"]).exists()):
        numbers = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, WIDTH, generator=numbers)[rank::workers].to(engine.device)
        loss = (engine(inputs.bfloat16()).float() - 0.5 * inputs.roll(1, dims=1)).square().mean()
        engine.backward(loss)
        engine.step()
        step += 1
        time.sleep(config["pause"])
        leaving = ray_train.preempted()  # on every worker, once a step
        if leaving or step % config["save_every"] == 0:
            state = {"step": step, "moments": moments(engine)}
            ray_train.report(engine, {"loss": float(loss.detach())}, client_state=state)
            if rank == 0:
                tell(config, event="just in time" if leaving else "save", workers=workers, step=step)


def moments(engine: Any) -> float:
    """The sum of all of Adam's second moments, on every worker."""
    import torch

    states = [s["exp_avg_sq"] for s in engine.optimizer.optimizer.state.values() if "exp_avg_sq" in s]
    total = torch.stack([s.double().sum() for s in states] or [torch.zeros((), dtype=torch.float64)]).sum()
    total = total.to(engine.device)
    torch.distributed.all_reduce(total)
    return float(total)


def tell(config: dict[str, Any], **event: Any) -> None:
    """Log events, for ``simulate`` to follow."""
    with open(config["log"], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def fit(config: dict[str, Any], storage: str, workers: tuple[int, int], *, gpu: bool, interval: float) -> Any:
    """Run it on any number of workers between two limits."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker={"GPU": 1} if gpu else {"CPU": 1},
            elastic_resize_monitor_interval_s=interval,
        ),
        run_config=RunConfig(
            name="elastic",
            storage_path=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=3),
            # Not relax_collectives_on_preemption: the shards of the workers that leave would be missing.
            failure_config=FailureConfig(max_failures=5),
        ),
    )
    return trainer.fit()


# ------------------------------------------------------------------------------------------------- simulation

QUICK = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    # Ray may first plan with the node that it has just lost: how long it then waits for it. 60 s by default; on a
    # real cluster it must be longer than a worker takes to start.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_memory_usage_threshold": "0.98",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Settings of a simulated cluster on one machine."""


def simulate(storage: str) -> None:
    """Lose a node, give one back, and drain one."""
    os.environ |= QUICK
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    lost = cluster.add_node(**node)
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    log, stop = Path(storage) / "events.jsonl", Path(storage) / "stop"
    config = {"steps": 10**6, "save_every": 3, "pause": 0.2, "log": str(log), "stop": str(stop)}
    results: list[Any] = []
    began = time.monotonic()
    running = threading.Thread(
        target=lambda: results.append(fit(config, storage, (1, 3), gpu=False, interval=3.0)), daemon=True
    )
    running.start()  # the cluster changes in the main thread, as it must

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    seen: list[dict[str, Any]] = []

    def until(event: str, workers: int) -> dict[str, Any]:
        """Follow the run until the next event."""
        while True:
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
            for line in lines[len(seen) :]:
                found = json.loads(line)
                seen.append(found)
                if found["event"] == "start":
                    say(f"{found['workers']} workers continue from step {found['step']}")
                    check(abs(found["moments"] - found["saved"]) <= 1e-9 * abs(found["saved"]), "moments are restored")
                elif found["event"] == "just in time":
                    say(f"{found['workers']} workers saved step {found['step']} just in time")
                if (found["event"], found["workers"]) == (event, workers):
                    return dict(found)
            if not running.is_alive():
                raise SystemExit(f"the run has ended: {results}")
            time.sleep(0.2)

    def newest() -> int:
        return max(int(e["step"]) for e in seen if e["event"] != "start")

    until("start", 3)
    until("save", 3)
    until("save", 3)
    say("a node is lost")
    cluster.remove_node(lost, allow_graceful=False)
    smaller = until("start", 2)
    check(smaller["step"] >= newest() > 0, "no commit is lost with the node")
    until("save", 2)
    say("a node comes")
    third = cluster.add_node(**node)
    larger = until("start", 3)
    check(larger["step"] >= newest(), "no commit is lost when a node comes")
    until("save", 3)
    say("a node is to be taken away in 20 s")
    leaving = next(n["NodeID"] for n in ray.nodes() if n["NodeID"] == third.node_id)
    drain(cluster.address, leaving, 20)
    saved = until("just in time", 3)
    check(until("start", 2)["step"] >= saved["step"], "they continue from the checkpoint that was saved just in time")
    until("save", 2)
    stop.touch()
    running.join()
    (result,) = results
    say(f"done: {os.path.basename(result.checkpoint.path)}, {len(result.best_checkpoints)} checkpoints kept")
    ray.shutdown()
    cluster.shutdown()


def check(true: bool, what: str) -> None:
    """Exit with an error if a check fails."""
    if not true:
        raise SystemExit(f"not so: {what}")


def drain(address: str, node_id: str, seconds: int) -> None:
    """Announce that a node will be removed, as clouds do for spot instances."""
    command = [
        os.path.join(os.path.dirname(sys.executable), "ray"),
        "drain-node",
        "--address",
        address,
        "--node-id",
        node_id,
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "spot",
        "--deadline-remaining-seconds",
        str(seconds),
    ]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603


def main() -> None:
    """Run on a cluster, or on a simulated one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="directory or URL that all nodes reach")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 3), metavar=("MIN", "MAX"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.simulate:
            simulate(options.storage or scratch)
            return
        config = {
            "steps": options.steps,
            "save_every": 100,
            "pause": 0.0,
            "log": f"{scratch}/events.jsonl",
            "stop": f"{scratch}/stop",
        }
        low, high = options.workers
        print(fit(config, options.storage or scratch, (low, high), gpu=options.gpu, interval=60.0).checkpoint)


if __name__ == "__main__":
    main()
