"""Train loops that save and resume through CheckpointManager, next to DeepSpeed's own saves of the same engines."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

from tests import forked

CLIENT_STATE = {"epoch": 2, "nested": {"seen": [1, 2.5, None]}, "bytes": b"\x00\xff"}
TRAINED = 2
"""Steps before the save;"""
FOLLOWING = 3
"""and behind it, of which the losses are compared."""


def main(directory: Path) -> None:
    """Do all jobs; those of one number of ranks share their processes."""
    import deepspeed  # noqa: F401  once, for all that are forked

    jobs = forked.jobs_in(directory)
    if any(job["model"] == "autoep" for job in jobs):
        from transformers import MixtralForCausalLM  # noqa: F401  the same
    for (_, world_size), group in itertools.groupby(jobs, lambda j: (j["turn"], j["world_size"])):
        own = list(group)
        forked.run_ranks(world_size, lambda own=own: _rank(own, directory))  # type: ignore[misc]


def _rank(jobs: list[dict[str, Any]], directory: Path) -> None:
    import torch
    from recipes import common

    common.start(seed=4321)
    for job in jobs:
        forked.end_if_stuck()
        (directory / job["id"]).mkdir(exist_ok=True)
        torch.manual_seed(4321)
        {"save": _save, "resume": _resume, "life": _life, "persistent": _persistent}[job["do"]](
            job, directory / job["id"]
        )
        torch.distributed.barrier()
    common.leave()


def build(job: dict[str, Any]) -> Any:
    from recipes import common

    from tests.parallel_engines import build as build_parallel

    config = {"scheduler": None, "gradient_clipping": None, **job.get("config", {})}
    case = common.Case(
        job["id"], job["stage"], job["world_size"], common.no_training, job.get("dtype", "bf16"), {}, config
    )
    if job["model"] == "plain":
        return _plain(common.ds_config(case))
    return build_parallel(
        job["model"], common.ds_config(case), tensor=1, stages=job.get("stages", 1), experts=job["experts"]
    )


def _plain(config: dict[str, Any]) -> Any:
    """The odd model, which learns slowly enough for losses to be compared."""
    import deepspeed
    import torch
    from recipes import common, plain

    from tests.parallel_engines import Parallel

    model = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> Any:
        tokens = torch.arange(12).reshape(2, 6)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        return loss

    return Parallel(engine, lambda: common.live_tensors(engine), step)


def _save(job: dict[str, Any], directory: Path) -> None:
    """Train, save by both, train on, and go back."""
    import torch

    from ckpttool import CheckpointManager

    parallel = build(job)
    engine, first = parallel.engine, torch.distributed.get_rank() == 0
    for _ in range(TRAINED):
        parallel.step()
    engine.save_checkpoint(str(directory / "native"), tag="tag", client_state=CLIENT_STATE)
    held = parallel.whole()
    reports: list[Any] = []
    manager = CheckpointManager(job["root"], async_save=job["background"], on_save=reports.append, keep_last=3)
    manager.save(engine, tag="tag", client_state=CLIENT_STATE, metrics={"loss": 0.5})
    losses = [float(parallel.step()) for _ in range(FOLLOWING)]  # while it is being saved, where that is asynchronous
    manager.wait()
    after = None
    if job["goes_back"]:
        assert manager.restore(engine) == CLIENT_STATE
        after = _kept(parallel.whole())
    if first:
        facts = {"losses": losses, "held": _kept(held), "after": after, "report": str(reports[0])}
        torch.save(facts, directory / "facts.pt")
    engine.destroy()


def _resume(job: dict[str, Any], directory: Path) -> None:
    """Build another engine, on other ranks or of another stage, and go on from what was saved."""
    import torch

    from ckpttool import CheckpointManager

    parallel = build(job)
    manager = CheckpointManager(job["root"])
    before = _kept(parallel.whole())
    preview = manager.preview(parallel.engine)
    unchanged = _same(before, _kept(parallel.whole()))
    client_state = manager.restore(parallel.engine)
    held, steps = _kept(parallel.whole()), parallel.engine.global_steps
    losses = [float(parallel.step()) for _ in range(FOLLOWING)]
    if torch.distributed.get_rank() == 0:
        facts = {
            "losses": losses, "held": held, "client_state": client_state, "preview": str(preview),
            "unchanged": unchanged, "report": str(manager.restored), "steps": steps,
        }  # fmt: skip
        torch.save(facts, directory / "facts.pt")
    parallel.engine.destroy()


def _life(job: dict[str, Any], directory: Path) -> None:
    """What a manager does when things go wrong, and at the end of a run."""
    import os
    import signal

    import torch

    from ckpttool import CheckpointManager, CkptError

    rank = torch.distributed.get_rank()
    parallel = build(job)
    engine, root = parallel.engine, directory / "root"
    facts: dict[str, Any] = {}
    reports: list[Any] = []
    manager: Any = CheckpointManager(
        root, async_save=True, keep_last=2, keep_best=("loss", "min", 1), on_save=reports.append,
        signals=[signal.SIGUSR1], timeout=30,
    )  # fmt: skip
    facts["nothing there"] = (manager.preview(engine), manager.restore(engine), manager.preempted())
    for loss in (3.0, 1.0, 2.0, 2.5, 2.2):
        parallel.step()
        manager.save(engine, metrics={"loss": loss})
    manager.wait()
    torch.distributed.barrier()
    facts["kept"] = sorted(p.name for p in root.iterdir() if p.is_dir())
    facts["reports"] = [(r.tag, r.step, r.nbytes > 0, r.seconds >= r.stall_seconds > 0, r.error) for r in reports]

    def told(function: Any) -> str:
        try:
            function()
        except CkptError as error:
            return str(error)
        return ""

    manager.save(engine)  # is there already: heard of at the next call
    facts["again"] = told(lambda: manager.save(engine, tag="other"))
    facts["after an error"] = told(manager.wait)
    manager.save(engine, tag="pickled", client_state={"f": (lambda: 0) if rank == 0 else 0})
    facts["unpicklable"] = told(manager.wait)
    inner = engine.optimizer.optimizer
    inner.param_groups[0]["f"] = lambda: 0
    manager.save(engine, tag="unpicklable group")
    facts["unpicklable group"] = told(manager.wait)
    del inner.param_groups[0]["f"]
    facts["tags"] = told(lambda: manager.save(engine, tag=f"of rank {rank}"))
    facts["no tag"] = told(lambda: manager.restore(engine, tag="nowhere"))
    facts["left"] = sorted(p.name for p in root.iterdir() if p.is_dir())
    blocking: Any = CheckpointManager(directory / "second")
    inner.base = torch.optim.SGD(inner.param_groups[0]["params"], lr=0.1, momentum=0.9)  # as SAM drives another
    inner.base.state[inner.base.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(3)
    heard: list[str] = []
    hearing = logging.Handler()
    hearing.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(hearing)
    facts["blocking"] = blocking.save(engine, tag="a/b").tag
    logging.getLogger("ckpttool").removeHandler(hearing)
    facts["unsaved"] = heard
    del inner.base
    wave = torch.complex(torch.arange(3.0), torch.ones(3))
    views = {"conjugate": wave.conj(), "negated": wave.conj().imag}
    blocking.save(engine, tag="views", client_state=views)
    facts["views"] = _same(views, blocking.restore(engine))
    facts["there"] = told(lambda: blocking.save(engine, tag="a/b"))
    facts["overwritten"] = blocking.save(engine, tag="a/b", client_state={"n": 2}, overwrite=True).error
    facts["read back"] = blocking.restore(engine)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    torch.distributed.barrier()
    facts["preempted"] = manager.preempted()
    manager.save(engine, tag="last", overwrite=True)  # and nobody waits for it
    torch.save(facts, directory / f"facts-{rank}.pt")
    parallel.engine.destroy()
    manager.wait()  # which the interpreter does at its end; these ranks have none


def _persistent(job: dict[str, Any], directory: Path) -> None:
    """What ZeRO-3 keeps gathered between steps, before and after saves."""
    import torch

    from ckpttool import CheckpointManager

    parallel = build(job)
    engine = parallel.engine
    parallel.step()
    persistent = engine.optimizer.persistent_parameters
    gathered: list[int] = []
    gather = persistent[0].all_gather

    def counted(parameters: Any, **options: Any) -> Any:
        gathered.append(len(parameters))
        return gather(parameters, **options)

    persistent[0].all_gather = counted

    def state() -> tuple[list[str], list[Any]]:
        return [p.ds_status.name for p in persistent], [p.data.clone() for p in persistent]

    manager = CheckpointManager(directory / "root")
    facts: dict[str, Any] = {"before": state()}
    manager.save(engine, tag="a")
    facts["after"], facts["gathered"] = state(), list(gathered)
    engine.save_checkpoint(str(directory / "native"), tag="a")
    facts["after DeepSpeed's"] = state()
    for parameter in persistent:
        parameter.partition()
    gathered.clear()
    manager.save(engine, tag="b")
    facts["after all were freed"], facts["gathered then"] = state(), list(gathered)
    facts["list"] = engine.optimizer.persistent_parameters is persistent
    facts["loss"] = float(parallel.step())
    torch.save(facts, directory / f"facts-{torch.distributed.get_rank()}.pt")
    engine.destroy()


def _kept(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
