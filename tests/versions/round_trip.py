"""A round trip with the interpreter's own torch and DeepSpeed; needs neither pytest nor other tests' helpers.

    PYTHONPATH=. OLD_ENVIRONMENT/bin/python tests/versions/round_trip.py DIRECTORY [STAGES]

For each ZeRO stage (STAGES, such as 12, leaves some out) two ranks train on a CPU and save with ``CheckpointManager``.
One and two fresh ranks restore with ``ckpttool.load``; the checkpoint is converted for one rank, and DeepSpeed itself
loads the result; it is consolidated. Weights and moments must be, bit for bit, what the live engine held.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, WIDTH = 3, 24
STAGES = (1, 2, 3)
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def build(stage: int) -> Any:
    """An engine in bf16 of a small model, which has a bias and a tensor of odd length."""
    import deepspeed
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, 2 * WIDTH + 1)
            self.down = torch.nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

        def forward(self, inputs: Any) -> Any:
            return self.down(self.up(inputs).relu())

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    return engine


def held(engine: Any) -> dict[str, Any]:
    """The master weights and moments of the live engine by "STATE/NAME", by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # a step calls it
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        found[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for state in STATES[1:]:
            found[f"{state}/{name}"] = safe_get_full_optimizer_state(parameter, state).clone()
    return found


def train(stage: int, directory: Path) -> None:
    """Train, and save the checkpoint and the truth."""
    import torch

    import ckpttool

    torch.manual_seed(0)
    engine = build(stage)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        inputs = torch.randn(2, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
        engine.backward((engine(inputs).float() - 1).square().mean())
        engine.step()
    truth = held(engine)
    ckpttool.CheckpointManager(str(directory / "saved")).save(engine, tag="step3", client_state={"step": STEPS})
    if torch.distributed.get_rank() == 0:
        torch.save(truth, directory / "truth.pt")


def resume(stage: int, directory: Path, how: str) -> None:
    """Fresh engines get what was saved: by ``ckpttool.load``, or what was converted by DeepSpeed's own loading."""
    import torch

    import ckpttool

    torch.manual_seed(1)
    engine = build(stage)
    if how == "load":
        report = ckpttool.load(engine, str(directory / "saved"))
        assert report.client_state["step"] == STEPS
    else:
        path, client_state = engine.load_checkpoint(str(directory / "converted"))
        assert path is not None
        assert client_state["step"] == STEPS
    assert engine.global_steps == STEPS
    compare(held(engine), torch.load(directory / "truth.pt"))


def compare(found: dict[str, Any], truth: dict[str, Any]) -> None:
    """Both hold the same bits."""
    import torch

    assert sorted(found) == sorted(truth)
    for key, tensor in truth.items():
        assert torch.equal(found[key].view(torch.int32), tensor.view(torch.int32)), key


def offline(stage: int, directory: Path) -> None:
    """Inspect, verify, consolidate and convert, in a process without ranks."""
    import torch

    import ckpttool

    saved, truth = str(directory / "saved"), torch.load(directory / "truth.pt")
    found = ckpttool.inspect(saved)
    assert found.stage == stage
    assert not ckpttool.verify(saved, deep=True).findings
    ckpttool.consolidate(saved, str(directory / "weights"), to="torch", dtype="fp32")
    weights = torch.load(directory / "weights" / "pytorch_model.bin")
    lazy = ckpttool.load_state_dict(saved, dtype="fp32")
    for given in (weights, {name: lazy[name] for name in lazy}):
        masters = {key: tensor for key, tensor in truth.items() if key.startswith("fp32/")}
        compare({f"fp32/{name}": tensor for name, tensor in given.items()}, masters)
    ckpttool.convert(saved, str(directory / "converted"), to="zero", world_size=1, stage=stage)


def run_ranks(ranks: int, *arguments: object, script: str = __file__) -> None:
    """Run a script on so many ranks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks)}
        env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        processes.append(subprocess.Popen([sys.executable, script, *map(str, arguments)], env=env))
    assert [process.wait(timeout=600) for process in processes] == [0] * ranks


def on_rank(job: str, stage: int, directory: Path) -> None:
    """What one rank does."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo")
    if job == "train":
        train(stage, directory)
    else:
        resume(stage, directory, job)
    torch.distributed.barrier()
    os._exit(0)


def main() -> None:
    """Make the round trip at each stage."""
    if len(sys.argv) == 4:
        on_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    for stage in map(int, sys.argv[2]) if len(sys.argv) > 2 else STAGES:
        directory = Path(sys.argv[1]) / f"stage{stage}"
        directory.mkdir(parents=True)
        run_ranks(2, "train", stage, directory)
        offline(stage, directory)
        for ranks in (1, 2):
            run_ranks(ranks, "load", stage, directory)
        run_ranks(1, "load_checkpoint", stage, directory)
        print(f"stage {stage}: restored on 1 and 2 ranks, converted and consolidated")


if __name__ == "__main__":
    main()
