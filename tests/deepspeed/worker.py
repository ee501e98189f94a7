"""Load checkpoints into live engines, and list the differences between their states and the truth.

A job: {"root", "truth", "ranks", "stage", "dtype", "zero", "load", "kinds"}: the checkpoint, the fixture whose truth it
must hold, the engine that loads it, the arguments of the load, and the states to compare. The answer: {"problems",
"losses", "groups", "client_state", "global_steps", ...}.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests import forked

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures"
STEPS = 3


def answers_of(jobs: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Give jobs to live engines and return their answers."""
    forked.start("tests.deepspeed.worker", jobs, directory)
    return [json.loads((directory / f"answer-{number}.json").read_text()) for number in range(len(jobs))]


# ------------------------------------------------------------------------------------------------- in the processes


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load one checkpoint, hold it against the truth and train on."""
    import deepspeed
    import torch
    from recipes.common import Case, ds_config, hyper_parameters, live_groups, live_scalars, live_tensors, no_training
    from recipes.plain import build_model, param_groups
    from safetensors.torch import load_file

    torch.manual_seed(777)  # other weights than those of the checkpoint
    case = Case("", job["stage"], torch.distributed.get_world_size(), no_training, job["dtype"], job.get("zero", {}))
    model = build_model()
    if job.get("without_scalar"):
        model.scale = torch.nn.Parameter(torch.tensor([1.25]))  # stage 3 cannot gather a 0-dim parameter
    groups = param_groups(model)
    for group in groups:
        group["lr"], group["weight_decay"] = 0.5, 0.5  # and other hyper-parameters
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.5), eps=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(case))
    path, client_state = engine.load_checkpoint(job["root"], **job.get("load", {}))
    assert path is not None
    held = live_tensors(engine)
    truth = load_file(str(FIXTURES / "truth" / f"{job['truth']}.safetensors"))
    kinds = set(job.get("kinds", [])) or {key.partition("/")[0] for key in truth}
    problems = [f"missing {key}" for key in truth if key not in held and key.partition("/")[0] in kinds]
    for key, tensor in held.items():
        if key.partition("/")[0] in kinds and not torch.equal(tensor.cpu(), truth[key].view(tensor.shape)):
            problems.append(f"{key} differs")
    answer = {
        "problems": problems,
        "groups": [
            {"params": names, **hyper_parameters(group)}
            for names, group in zip(live_groups(engine), engine.optimizer.param_groups, strict=True)
        ],
        "scalars": live_scalars(engine),
        "client_state": {k: client_state.get(k) for k in ("epoch", "note", "losses", "nested")},
        "global_steps": engine.global_steps,
        "scale": getattr(engine.optimizer, "cur_scale", None),
        "scheduler": engine.lr_scheduler.state_dict(),
        "losses": [],
    }
    # The same tokens on every rank: their mean gradient does not depend on how many there are.
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(0, 61, (2, 6), generator=generator)
        logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        answer["losses"].append(loss.item())
    return answer


def main(directory: Path) -> None:
    """Answer every job, those of one number of ranks together."""
    jobs = forked.jobs_in(directory)
    for ranks in sorted({job["ranks"] for job in jobs}):
        numbers = [n for n, job in enumerate(jobs) if job["ranks"] == ranks]
        forked.run_ranks(ranks, partial(_rank, {n: jobs[n] for n in numbers}, directory))


def _rank(jobs: dict[int, dict[str, Any]], directory: Path) -> None:
    import torch
    from recipes.common import leave, start

    start()
    for number, job in jobs.items():
        answer = load(job)
        if torch.distributed.get_rank() == 0:
            (directory / f"answer-{number}.json").write_text(json.dumps(answer))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
