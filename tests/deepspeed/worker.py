"""Loads checkpoints into live engines under torchrun, and says how what they hold differs from the truth.

    torchrun --nproc_per_node=M worker.py JOBS.json ANSWERS.json

A job: {"root", "truth", "stage", "dtype", "zero", "load", "kinds"}: the checkpoint, the fixture whose truth it must
hold, what the engine that loads it is like, how it loads, and what is compared. The answer: {"problems", "losses",
"groups", "client_state", "global_steps", ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures"
sys.path.insert(0, str(FIXTURES))
STEPS = 3


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


def main() -> None:
    """Answer every job."""
    from recipes.common import leave, start

    start()
    import torch

    answers = [load(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()
