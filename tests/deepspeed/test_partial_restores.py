"""A restore of a part of the state: what ``engine.load_checkpoint`` restores with the same request, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import CheckpointManager
from tests import sampling
from tests.deepspeed import engines
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

NO_OPTIMIZER, NO_SCHEDULER = {"load_optimizer_states": False}, {"load_lr_scheduler_states": False}
PARTS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "no optimizer": ({"optimizer": False}, NO_OPTIMIZER),
    "no scheduler": ({"scheduler": False}, NO_SCHEDULER),
    "neither": ({"optimizer": False, "scheduler": False}, NO_OPTIMIZER | NO_SCHEDULER),
    "weights": ({"weights_only": True}, {"load_module_only": True}),
}
"""Options of ``ckpttool.load`` and of ``engine.load_checkpoint``."""
JOBS: list[dict[str, Any]] = sampling.pairs(
    {"id": f"zero{stage}-{dtype}-{ranks}", "stage": stage, "dtype": dtype, "world_size": ranks}
    for stage in (0, 1, 2, 3)
    for dtype, ranks in (("fp32", 2), ("bf16", 2), ("bf16", 1))
)


def _engine(job: dict[str, Any], seed: int) -> Any:
    import torch

    engine = engines.build(job["stage"], job["dtype"], "two", "adamw", seed=seed)
    inner = engine.optimizer.optimizer if job["stage"] or job["dtype"] != "fp32" else engine.optimizer
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    return engine


def _run(engine: Any) -> dict[str, Any]:
    """Counters and scheduler."""
    counters = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    return counters | {"scheduler": engine.lr_scheduler.state_dict()["last_epoch"]}


def _of(found: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key.partition("/")[0] in kinds}


def _restores_what_is_left(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Restore weights where only the file of the model is left: what was refused, and what differs."""
    import torch

    root = directory / f"left-{job['id']}"
    saved = _engine(job, 0)
    engines.step(saved, 2)
    saved.save_checkpoint(str(root), "step2")
    torch.distributed.barrier()
    if saved.global_rank == 0:
        for file in (root / "step2").glob("*optim_states.pt"):
            file.unlink()
    torch.distributed.barrier()
    mine, manager = _engine(job, 7), CheckpointManager(root)
    told: dict[str, Any] = {"refused": engines.refusal(lambda: manager.restore(mine))}
    manager.restore(mine, weights_only=True)
    told["differing"] = engines.differing(_of(engines.held(mine), "module"), _of(engines.held(saved), "module"))
    return told


def _restores(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Of each part: what differs from DeepSpeed's own restore, and from the engine before."""
    root = directory / job["id"]
    saved = _engine(job, 0)
    engines.step(saved, 3)
    saved.skipped_steps = 2
    state = {"epoch": 7, "names": ["a"]}
    manager = CheckpointManager(root)
    manager.save(saved, client_state=state)
    weights = _of(engines.held(saved), "module")
    engines.step(saved, 1)
    manager.save(saved, client_state=state, save_latest=False)
    told: dict[str, Any] = {"latest": (root / "latest").read_text(), "parts": {}}
    for part, (ours, theirs) in PARTS.items():
        mine, peer = _engine(job, 7), _engine(job, 7)
        for engine in (mine, peer):
            engines.step(engine, 1)
        before, run = engines.held(mine), _run(mine)
        report = ckpttool.load(mine, root, **ours)
        peer.load_checkpoint(str(root), **theirs)
        after, expected = engines.held(mine), engines.held(peer)
        moments = ("exp_avg", "exp_avg_sq", "step")
        told["parts"][part] = {
            "run": _run(mine) == _run(peer),
            "unchanged run": _run(mine) == run,
            "weights": engines.differing(_of(after, "module"), weights),
            "masters": engines.differing(_of(after, "fp32"), _of(expected, "fp32")),
            "moments": engines.differing(_of(after, *moments), _of(expected, *moments)),
            "touched": engines.differing(_of(before, *moments), _of(after, *moments)) != [],
            "rate": [value for key, value in after.items() if key.startswith("lr/")],
            "client_state": dict(report.client_state) == state,
            "report": (report.optimizer, report.scheduler, report.weights_only),
        }
        mine.destroy()
        peer.destroy()
    saved.destroy()
    return told


@pytest.fixture(scope="module")
def restored(tmp_path_factory: TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return each_on_ranks(_restores, JOBS, tmp_path_factory.mktemp("parts"))


def test_weights_are_restored_where_only_the_file_of_the_model_is_left(tmp_path: Path) -> None:
    jobs = [job for job in JOBS if job["stage"] in {1, 2} and job["world_size"] == 2]
    for ranks in each_on_ranks(_restores_what_is_left, jobs, tmp_path).values():
        for told in ranks:
            assert "holds no ZeRO optimizer files" in told["refused"]
            assert told["differing"] == []


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("job", [job["id"] for job in JOBS])
def test_a_part_is_restored_as_deepspeed_does(job: str, part: str, restored: dict[str, list[dict[str, Any]]]) -> None:
    optimizer, scheduler = (PARTS[part][0].get(name, part != "weights") for name in ("optimizer", "scheduler"))
    for rank in restored[job]:
        found = rank["parts"][part]
        assert found["run"]
        assert found["unchanged run"] == (part == "weights")
        assert found["weights"] == []
        if optimizer or ("fp32" in job and part != "weights"):
            # Without the states DeepSpeed makes masters of the 16-bit weights, and at stage 3 it leaves the weights.
            assert found["masters"] == []
        assert found["moments"] == []
        assert found["touched"] == optimizer
        assert found["client_state"]
        assert found["report"] == (optimizer, scheduler, part == "weights")
        if part == "no optimizer":
            assert sorted(set(found["rate"])) == pytest.approx([0.003 * 0.125, 0.01 * 0.125])


@pytest.mark.parametrize("job", [job["id"] for job in JOBS])
def test_latest_stays_if_a_save_leaves_it(job: str, restored: dict[str, list[dict[str, Any]]]) -> None:
    assert {rank["latest"] for rank in restored[job]} == {"global_step3"}
