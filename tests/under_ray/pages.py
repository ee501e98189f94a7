"""Examples after Ray's own pages, run as they are; what they restore and save is noted, and a worker dies in a save.

``examples/ray_bert.py``, ``ray_zero.py`` and ``ray_fsdp2.py`` save with ckpttool; those with names that end in
"documented", as Ray's pages do.
"""

from __future__ import annotations

import json
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

    trainer, init = ray.train.torch.TorchTrainer, ray.init
    name = f"ray_{watch['script']}.py" if watch["way"] == "ours" else f"ray_{watch['script']}_documented.py"
    sys.argv[:] = [name, *arguments]
    ray.init = partial(init, ignore_reinit_error=True)
    ray.train.torch.TorchTrainer = lambda loop, **options: trainer(partial(watched, watch, loop), **options)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        ray.train.torch.TorchTrainer, ray.init = trainer, init


def watched(watch: dict[str, Any], loop: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> None:
    """Run the loop of an example, on a worker."""
    import ray.train.collective
    import torch.distributed.checkpoint
    from deepspeed import DeepSpeedEngine

    import ckpttool
    from ckpttool.integrations.ray_train import RayTrainCheckpoints

    rank = ray.train.get_context().get_world_rank()
    attempt = len(list(Path(watch["facts"]).glob(f"{watch['name']} *.json")))
    ray.train.collective.barrier()
    found: dict[str, Any] = {**watch, "restored": None, "state": None, "saved": [], "died": False}

    def keep() -> None:
        if rank == 0:
            loops.note(watch["facts"], f"{watch['name']} {attempt}.json", found)

    def digest(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        if watch["script"] != "fsdp2":
            return loops.digest_of(arguments[watch["way"] == "ours"], odd=False)
        if watch["way"] == "ours":
            return json.dumps(ckpttool.live_digest(arguments[1], options["optimizer"]).to_json())
        state = arguments[0]["app"]
        return json.dumps(ckpttool.live_digest(state.model, state.optimizer).to_json())

    def after_load(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def noted(*arguments: Any, **options: Any) -> Any:
            state = load(*arguments, **options)
            found["state"] = state[1] if isinstance(state, tuple) else state
            nothing = state is None and watch["way"] == "ours"
            found["restored"] = None if nothing else digest(arguments, options)
            keep()
            return state

        return noted

    def before_save(save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def noted(*arguments: Any, **options: Any) -> Any:
            found["saved"].append(digest(arguments, options))
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
    if watch["script"] == "fsdp2" and watch["way"] != "ours":
        owner, load, save = torch.distributed.checkpoint, "load", "save"
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
