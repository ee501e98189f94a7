"""Examples after Ray's own pages, run as they are; what they restore and save is noted, and a worker dies in a save.

``examples/ray_bert.py`` and ``ray_zero.py`` save with ckpttool; those with names that end in "documented", as Ray's
pages do.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.under_ray import loops

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
TURNS = (("documented", 2), ("ours", 3), ("ours", 1), ("documented", 1), ("ours", 2))
"""How a script saves, and on how many workers, one run after the other in one directory."""
SAVES = 2
"""Epochs of each run."""


def run(watch: dict[str, Any], arguments: list[str]) -> None:
    """Run an example as a command, with watched workers."""
    import ray
    import ray.train.torch

    trainer = ray.train.torch.TorchTrainer
    name = f"ray_{watch['script']}.py" if watch["way"] == "ours" else f"ray_{watch['script']}_documented.py"
    sys.argv[:] = [name, *arguments]
    ray.train.torch.TorchTrainer = lambda loop, **options: trainer(partial(watched, watch, loop), **options)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        ray.train.torch.TorchTrainer = trainer
        ray.shutdown()


def watched(watch: dict[str, Any], loop: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> None:
    """Run the loop of an example, on a worker."""
    import ray.train.collective
    from deepspeed import DeepSpeedEngine

    from ckpttool.integrations.ray_train import RayTrainCheckpoints

    rank = ray.train.get_context().get_world_rank()
    attempt = len(list(Path(watch["facts"]).glob(f"{watch['name']} *.json")))
    ray.train.collective.barrier()
    found: dict[str, Any] = {**watch, "restored": None, "state": None, "saved": [], "died": False}

    def keep() -> None:
        if rank == 0:
            loops.note(watch["facts"], f"{watch['name']} {attempt}.json", found)

    number = int(watch["way"] == "ours")
    """Which argument of the methods below is the engine."""

    def after_load(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def noted(*arguments: Any, **options: Any) -> Any:
            state = load(*arguments, **options)
            found["state"] = state[1] if isinstance(state, tuple) else state
            found["restored"] = None if state is None else loops.digest_of(arguments[number], odd=False)
            keep()
            return state

        return noted

    def before_save(save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def noted(*arguments: Any, **options: Any) -> Any:
            found["saved"].append(loops.digest_of(arguments[number], odd=False))
            if watch["dies"] and not attempt and len(found["saved"]) == SAVES:
                found["died"] = True
                _will_die(watch["way"], rank)
            keep()
            ray.train.collective.barrier()  # noted before anyone dies
            return save(*arguments, **options)

        return noted

    keep()
    owner: Any = RayTrainCheckpoints if watch["way"] == "ours" else DeepSpeedEngine
    load, save = ("restore", "report") if watch["way"] == "ours" else ("load_checkpoint", "save_checkpoint")
    setattr(owner, load, after_load(getattr(owner, load)))
    setattr(owner, save, before_save(getattr(owner, save)))
    loop(config)


def _will_die(way: str, rank: int) -> None:
    """Let a worker be killed in the next save: in the documented way the last one, when the others upload."""
    import ray.train
    from ray.train.v2._internal.execution import storage

    if way == "ours":
        if rank == loops.VICTIM[loops.BETWEEN_FILES]:
            loops.will_die(loops.BETWEEN_FILES)
    elif rank == ray.train.get_context().get_world_size() - 1:
        storage._pyarrow_fs_copy_files = lambda *_, **__: loops.die()
