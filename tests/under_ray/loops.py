"""Train functions of Ray Train workers for the tests, and the facts that they record."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

BEFORE_FILES, BETWEEN_FILES, BEFORE_MANIFEST, AFTER_MANIFEST, BEFORE_REPORT, AFTER_REPORT = DEATHS = (
    "before the first file",
    "between two files",
    "before the manifest",
    "between the manifest and latest",
    "before ray.train.report",
    "right after ray.train.report",
)
COMMITTED = {AFTER_MANIFEST, BEFORE_REPORT, AFTER_REPORT}
"""Whoever dies there leaves a commit."""
OTHER_METRICS = {"best": True, "phase": "warm-up", "missing": None, "history": [1, 2.5]}
"""Metrics that are not numbers."""
VICTIM = {BEFORE_FILES: 1, BETWEEN_FILES: 0, BEFORE_MANIFEST: 0, AFTER_MANIFEST: 0, BEFORE_REPORT: 1, AFTER_REPORT: 1}


def engine_of(stage: int) -> tuple[Any, Callable[[], float]]:
    """The odd model under DeepSpeed, and a step of its training."""
    import deepspeed
    import torch
    from recipes import common, plain

    common.start(seed=4321)
    case = common.Case("ray", stage, torch.distributed.get_world_size(), lambda _: None)
    model = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=common.ds_config(case))

    def step() -> float:
        tokens = torch.arange(12).reshape(2, 6)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return engine, step


def digest_of(engine: Any, *, odd: bool = True) -> str:
    """A digest of masters, optimizer states and buffers, whole, whatever ranks and stage; on every rank."""
    import torch
    from recipes import common

    digest = hashlib.sha256()
    tensors = common.live_tensors(engine)
    names = [name for name in sorted(tensors) if name.startswith(("fp32/", "exp_avg/", "exp_avg_sq/", "buffer/"))]
    kinds = {name.partition("/")[0] for name in names}
    assert not odd or kinds == {"fp32", "buffer", *({"exp_avg", "exp_avg_sq"} if engine.global_steps else ())}
    for name in names:
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def note(directory: str, name: str, facts: Any) -> None:
    """Write facts down as a whole."""
    path = Path(directory) / name
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").rename(path)


def read(directory: str, name: str) -> Any:
    """What was noted; None if nothing was."""
    path = Path(directory) / name
    return json.loads(path.read_text()) if path.exists() else None


def die() -> NoReturn:
    """As a machine that goes away does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def will_die(where: str) -> None:
    """Let this worker be killed at one point of its next save or report."""
    import ray.train.collective

    from ckpttool.saving import files
    from ckpttool.storage import MANIFEST, LocalStorage

    write, write_file, put, report = files.write_files, files._write_file, LocalStorage.put_new, ray.train.report
    written: list[str] = []

    def dying_write(*arguments: Any) -> Any:
        return die() if where == BEFORE_FILES else write(*arguments)

    def dying_write_file(*arguments: Any) -> Any:
        if where == BETWEEN_FILES and written:
            die()
        written.append(str(arguments[-2]))
        return write_file(*arguments)

    def dying_put(self: Any, path: str, *data: Any, **options: Any) -> bool:
        if where == BEFORE_MANIFEST and path.endswith(MANIFEST):
            die()
        done = put(self, path, *data, **options)
        if where == AFTER_MANIFEST and path.endswith(MANIFEST):
            die()
        return done

    def dying_report(*arguments: Any, **options: Any) -> None:
        if where == BEFORE_REPORT:
            die()
        report(*arguments, **options)
        if where == AFTER_REPORT:
            die()

    files.write_files, files._write_file = dying_write, dying_write_file  # type: ignore[assignment]
    LocalStorage.put_new = dying_put  # type: ignore[method-assign]
    ray.train.report = dying_report


# ------------------------------------------------------------------------------------------------- train functions


def dying(config: dict[str, Any]) -> None:
    """One step and a save, then another during which a worker dies: at another point in every attempt."""
    import ray.train.collective

    from ckpttool.integrations import ray_train

    facts, rank = config["facts"], ray.train.get_context().get_world_rank()
    attempt = len(list(Path(facts).glob("attempt-*.json")))
    ray.train.collective.barrier()
    newest = _newest_commit(config["run"])
    engine, train = engine_of(2)
    known = ray.train.get_checkpoint()
    state = ray_train.restore(engine, prove=True)
    held = digest_of(engine)
    if rank == 0:
        saved = read(facts, f"step-{engine.global_steps}.json")
        found = {
            "state": state, "steps": int(engine.global_steps), "newest": newest, "equal": saved == held,
            "known": known and known.path,
        }  # fmt: skip
        note(facts, f"attempt-{attempt}.json", found)
    for number in range(2):
        loss = train()
        step, held = int(engine.global_steps), digest_of(engine)
        if rank == 0:
            note(facts, f"step-{step}.json", held)
        deaths = config["deaths"]
        if number == 1 and attempt < len(deaths) and rank == VICTIM[deaths[attempt]]:
            will_die(deaths[attempt])
        ray_train.report(engine, {"loss": loss, "of": {"step": step}, **OTHER_METRICS}, client_state={"step": step})


def _newest_commit(run: str) -> int:
    """The step of the newest checkpoint that has a manifest, found without the code under test."""
    manifests = [json.loads(path.read_text()) for path in Path(run).glob("ckpttool_*/*/ckpttool.json")]
    return max((int(m["step"]) for m in manifests), default=0)


def documented(config: dict[str, Any]) -> None:
    """What Ray's documentation shows: a temporary directory of every worker's, and a report of it."""
    import ray.train.collective

    engine, train = engine_of(3)
    for step in (1, 2):
        loss = train()
        held = digest_of(engine)
        with tempfile.TemporaryDirectory() as directory:
            engine.save_checkpoint(directory, client_state={"step": step})
            ray.train.collective.barrier()
            ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(directory))
        if ray.train.get_context().get_world_rank() == 0:
            note(config["facts"], "documented.json", held)


def resuming(config: dict[str, Any]) -> None:
    """Resume from all that can be named, on other workers and at another stage; then save beside the documented."""
    import ray.train.collective

    from ckpttool import CkptError
    from ckpttool.integrations import ray_train
    from ckpttool.integrations.ray_train import RayTrainCheckpoints
    from ckpttool.saving import files

    engine, train = engine_of(1)
    blank = digest_of(engine)
    found: dict[str, Any] = {"blank": blank}
    found["own run"] = ray_train.restore(engine), digest_of(engine)
    for name, source in config["sources"].items():
        train()  # so that each has something to bring back
        found[name] = ray_train.restore(engine, source), digest_of(engine)
    try:
        ray_train.restore(engine, config["missing"])
    except CkptError as error:
        found["missing"] = str(error), digest_of(engine)
    train()
    rank = ray.train.get_context().get_world_rank()
    ray_train.report(engine, {"loss": 0.25}, client_state={"step": 3}, rank_state={"rank": rank})
    found["saved"] = {"step": 3}, digest_of(engine)
    train()
    found["after"] = ray_train.restore(engine), digest_of(engine)
    restored = ray_train.restored()
    assert restored is not None
    assert restored.rank_state == {"rank": rank}
    found["rank states"] = list(restored.rank_states)
    found["unlisted"] = _with_a_failure(0, ray_train, "run_candidates", lambda: ray_train.restore(engine))
    found["unwritten"] = _with_a_failure(2, files, "write_files", lambda: ray_train.report(engine, {"loss": 0.0}))
    train()
    RayTrainCheckpoints(grace=0.0).report(engine, {"loss": 0.125}, client_state={"step": 4})
    if ray.train.get_context().get_world_rank() == 0:
        note(config["facts"], "resumed.json", found)


def _with_a_failure(rank: int, where: Any, name: str, call: Callable[[], Any]) -> list[str]:
    """What every worker is told when something fails on one of them alone."""
    import torch

    from ckpttool import CkptError, StorageError

    def failing(*_: Any) -> NoReturn:
        raise StorageError("the storage", "cannot be reached", "injected")

    own, told = getattr(where, name), ""
    if torch.distributed.get_rank() == rank:
        setattr(where, name, failing)
    try:
        call()
    except CkptError as error:
        told = str(error)
    setattr(where, name, own)
    everybody: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, told)
    return everybody


def validate(checkpoint: Any) -> dict[str, Any]:
    """Return metrics of a reported checkpoint, in a task of Ray."""
    import ckpttool

    (entry,) = [e for e in ckpttool.ls(os.path.dirname(checkpoint.path)).entries if e.path == checkpoint.path]
    return {"validated": entry.whole}


def several(config: dict[str, Any]) -> None:
    """Two engines of one architecture; in a folder of each as documented, and resumed by name."""
    import ray.train.collective
    import torch

    from ckpttool import CkptError
    from ckpttool.integrations import ray_train

    made = {"policy": engine_of(2), "critic": engine_of(3)}
    engines = {name: engine for name, (engine, _) in made.items()}
    found: dict[str, Any] = {}

    def refused(engine: Any) -> str:
        try:
            ray_train.restore(engine)
        except CkptError as error:
            return str(error)
        return ""

    with tempfile.TemporaryDirectory() as directory:
        if config["part"] == "plain":
            Path(directory, "model.pt").write_text("weights")
            ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(directory))
        elif config["part"] == "documented":
            for number, (name, (engine, train)) in enumerate(made.items(), 1):
                for _ in range(number):
                    train()
                os.mkdir(os.path.join(directory, name))
                engine.save_checkpoint(os.path.join(directory, name), client_state={"of": name})
            ray.train.collective.barrier()
            ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(directory))
        elif config["part"] == "resumed plain":
            found["error"] = refused(engines["policy"])
        else:
            found["alone"] = refused(engines["policy"])
            found["state"] = ray_train.restore(engines)
            found["second alone"] = refused(engines["critic"])
            found["restored"] = [digest_of(engine) for engine in engines.values()]
            for _, train in made.values():
                train()
            try:
                ray_train.report(torch.nn.Linear(2, 2), {"loss": 0.0})
            except CkptError as error:
                found["module"] = str(error)
            try:
                ray_train.report(engines, "loss")  # type: ignore[arg-type]
            except CkptError as error:
                found["text"] = str(error)
            again = config["part"] == "resumed again"
            _die_once_between_files(config["facts"], found)
            ray_train.report(
                engines, {"loss": 0.5}, client_state={"of": "both"}, validation=again,
                checkpoint_dir_name="the-last" if again else None,
            )  # fmt: skip
            if again:
                try:
                    ray_train.report(engines, {"loss": 0.5}, checkpoint_dir_name="the-last")
                except CkptError as error:
                    found["repeated"] = str(error)
                found["newest"] = ray_train.restore(engines)
    found["saved"] = [digest_of(engine) for engine in engines.values()]
    if ray.train.get_context().get_world_rank() == 0:
        note(config["facts"], f"several {config['part']}.json", found)


def _die_once_between_files(facts: str, found: dict[str, Any]) -> None:
    """Let the first worker be killed in the next save of several engines, the first time."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0 and read(facts, "several dying.json") is None:
        note(facts, "several dying.json", found)
        will_die(BETWEEN_FILES)


def in_background(config: dict[str, Any]) -> None:
    """Saves in the background; at the end one as documented, or one that still runs when the function has returned."""
    import ray.train.collective

    from ckpttool.integrations.ray_train import RayTrainCheckpoints

    engine, train = engine_of(config["stage"])
    with RayTrainCheckpoints(blocking=False) as checkpoints:
        restored = checkpoints.restore(engine, config.get("from"))
        before = digest_of(engine)
        for loss in config["losses"]:
            train()
            held = digest_of(engine)
            checkpoints.report(engine, {"loss": loss}, client_state={"loss": loss})
        train()
        again = checkpoints.restore(engine), digest_of(engine)
    found = {"restored": restored, "before": before, "held": held, "saved": str(checkpoints.last_save), "again": again}
    if ends := config.get("ends"):
        train()
        found["at end"] = digest_of(engine)
    if config.get("documented"):
        with tempfile.TemporaryDirectory() as directory:
            engine.save_checkpoint(directory)
            ray.train.report({"loss": 9.0}, checkpoint=ray.train.Checkpoint.from_directory(directory))
    if ray.train.get_context().get_world_rank() == 0:
        note(config["facts"], f"{config['name']}.json", found)
    if ends:
        _slow_writes(fail=ends == "fails")
        RayTrainCheckpoints(blocking=False, timeout=60).report(engine, {"loss": 0.25}, client_state={"loss": 0.25})


def _slow_writes(*, fail: bool) -> None:
    """Let saves take longer than the train function, and fail if they shall."""
    import time

    from ckpttool import StorageError
    from ckpttool.saving import files

    write = files.write_files

    def slow_write(*given: Any) -> Any:
        time.sleep(1)
        if fail:
            raise StorageError("the storage", "cannot be reached", "injected")
        return write(*given)

    files.write_files = slow_write  # type: ignore[assignment]


def ending(config: dict[str, Any]) -> None:
    """A save in the background that still runs when the train function ends."""
    from ckpttool.integrations.ray_train import RayTrainCheckpoints

    engine, train = engine_of(2)
    _slow_writes(fail=config["how"] == "fails")
    train()
    checkpoints = RayTrainCheckpoints(blocking=False, timeout=60)
    if config["how"] == "exception":
        with checkpoints:
            checkpoints.report(engine, {"loss": 0.5}, client_state={"step": 1})
            raise ArithmeticError("the loop failed")
    checkpoints.report(engine, {"loss": 0.5}, client_state={"step": 1})
    if config["how"] == "unguarded":
        raise ArithmeticError("the loop failed")


def torch_run(config: dict[str, Any]) -> None:
    """Train an FSDP2 run, report each step, and die once after the second."""
    import ray.train
    import torch
    from torch.distributed.fsdp import fully_shard

    from ckpttool import CkptError
    from ckpttool.integrations import ray_train

    torch.manual_seed(ray.train.get_context().get_world_size())
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    own = {"optimizer": optimizer, "scheduler": scheduler}
    state = ray_train.restore(model, **own, prove=True, staged=config["part"] != "first") or {"step": 0}
    restored = ray_train.restored()
    facts: dict[str, Any] = {"began": state["step"], "proof": "" if restored is None else str(restored.proof)}
    facts |= {"lr": optimizer.param_groups[0]["lr"], "last": scheduler.last_epoch}
    first = state["step"]
    for step in range(first + 1, config["steps"] + 1):
        model(torch.full((2, 5), float(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        own = {"optimizer": optimizer, "scheduler": scheduler, "step": step, "client_state": {"step": step}}
        if step == first + 1:
            try:
                ray_train.report(model, {"loss": torch.tensor(1.0)}, **own)
            except CkptError as error:
                facts["tensor"] = str(error)
        ray_train.report(model, {"loss": 1 / step}, **own)
        rank = ray.train.get_context().get_world_rank()
        if rank == 0:
            note(config["facts"], f"torch {config['part']} {first} {step}.json", facts)
        died = Path(config["facts"]) / "torch died"
        if config["part"] == "first" and step == 2 and rank == 1 and not died.exists():
            died.touch()
            die()
