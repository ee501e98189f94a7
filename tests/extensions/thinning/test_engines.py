"""A manager thins old checkpoints during a run; what is left loads into live engines as weights, and only as those."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from tests.deepspeed.engines import build_parallel, refusal
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

JOBS: list[dict[str, Any]] = [
    {
        "id": f"zero{stage}-{thin or 'default'}{'-background' if background else ''}", "stage": stage, "world_size": 2,
        "model": "plain", "experts": 1, "dtype_thin": thin, "background": background,
    }
    for stage, thin, background in ((1, None, False), (2, "fp32", True), (3, None, True), (0, None, False))
]  # fmt: skip


def _train(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train with a manager that thins, and load what is left of its checkpoints."""
    root = directory / job["id"]
    rank = torch.distributed.get_rank()
    torch.manual_seed(5)
    first = build_parallel(job)
    manager = ckpttool.CheckpointManager(
        root, keep_last=1, thin_every=2, thin=job["dtype_thin"], async_save=job["background"]
    )
    facts: dict[str, Any] = {}
    for step in range(1, 5):
        first.step()
        manager.save(first.engine, client_state={"step": step}, metrics={"loss": 1.0 / step})
        if step == 2:
            facts["held"] = first.whole()
    manager.wait()
    torch.distributed.barrier()
    facts["kept"] = sorted(p.name for p in root.iterdir() if p.is_dir())
    facts["entries"] = [(e.name, e.thin, e.step, e.metrics.get("loss")) for e in ckpttool.ls(root).entries]

    torch.manual_seed(6)
    other = build_parallel(job)
    before = other.whole()
    facts["refused"] = refusal(lambda: ckpttool.load(other.engine, root, tag="global_step2"))
    facts["untouched"] = all(torch.equal(before[name], value) for name, value in other.whole().items())
    report = ckpttool.load(other.engine, root, tag="global_step2", weights_only=True)
    facts["loaded"], facts["report"] = other.whole(), str(report)
    # The newest one is damaged: a thin one is no way to go on, and the error says what is wrong with the newest.
    torch.distributed.barrier()
    if rank == 0:
        path = next((root / "global_step4").glob("*model_states.pt"))
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    facts["none whole"] = refusal(lambda: ckpttool.CheckpointManager(root).restore(other.engine))
    thin = root.with_name(f"{root.name}-thin")
    if rank == 0:
        shutil.copytree(root / "global_step2", thin / "global_step2")
    torch.distributed.barrier()
    facts["all thin"] = refusal(lambda: ckpttool.CheckpointManager(thin).restore(other.engine))
    again = ckpttool.CheckpointManager(root)
    facts["weights alone"] = again.restore(other.engine, weights_only=True)
    facts["restored"] = None if again.restored is None else again.restored.tag
    again.save(other.engine, tag="following")
    torch.distributed.barrier()
    facts["provenance"] = json.loads((root / "following" / "ckpttool.json").read_text())["provenance"]
    facts["attempt"] = json.loads((root / "global_step2" / "ckpttool.json").read_text())["attempt"]
    quiet = ckpttool.CheckpointManager(root, provenance=False)
    quiet.save(other.engine, tag="quiet")
    torch.distributed.barrier()
    facts["quiet"] = json.loads((root / "quiet" / "ckpttool.json").read_text())["provenance"]
    return facts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thinning")


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[str, dict[str, Any]]:
    """By job, what its first rank found."""
    return {name: ranks[0] for name, ranks in each_on_ranks(_train, JOBS, directory).items()}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_run_thins_what_is_old(job: dict[str, Any], found: dict[str, Any], directory: Path) -> None:
    facts = found[job["id"]]
    assert facts["kept"] == ["global_step2", "global_step4"]
    dtype = job["dtype_thin"] or "bf16"
    assert facts["entries"] == [("global_step2", dtype, 2, 0.5), ("global_step4", None, 4, 0.25)]
    names = {path.name for path in (directory / job["id"] / "global_step2").iterdir()}
    assert names == {"ckpttool.json", "ckpttool_run_state.pt", "model.safetensors"}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_an_engine_loads_its_weights(job: dict[str, Any], found: dict[str, Any]) -> None:
    facts = found[job["id"]]
    held, loaded = facts["held"], facts["loaded"]
    masters = [name for name in held if name.startswith("fp32/")]
    assert masters
    for name in masters:
        expected = held[name].float()
        expected = expected if job["dtype_thin"] == "fp32" else expected.bfloat16().float()
        assert torch.equal(loaded[name].float(), expected), name
    assert "global_step2" in facts["report"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_load_that_wants_more_says_so_in_one_line(
    job: dict[str, Any], found: dict[str, Any], directory: Path
) -> None:
    facts = found[job["id"]]
    root = directory / job["id"]
    assert facts["refused"] == (
        f"{root}/global_step2: is thin: prune has removed its optimizer states, and kept the weights; "
        "load it with weights_only=True, or choose a whole checkpoint"
    )
    assert facts["untouched"]
    assert facts["none whole"].startswith(f"{root}: holds 2 checkpoints, and none can be restored; of the newest: ")
    assert "is thin" not in facts["none whole"]
    assert facts["all thin"] == (
        f"{root}-thin: holds a checkpoint, and none can be restored; of the newest: is thin: prune has removed its "
        "optimizer states, and kept the weights; restore one from a copy, load the weights of a thin one with "
        "ckpttool.load(engine, src, weights_only=True), or choose another root to start from scratch"
    )
    assert (facts["weights alone"], facts["restored"]) == ({"step": 2}, "global_step2")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_save_records_what_the_run_was_made_of(job: dict[str, Any], found: dict[str, Any], directory: Path) -> None:
    facts = found[job["id"]]
    found = facts["provenance"]
    assert found["restored_from"] == {
        "path": f"{directory / job['id']}/global_step2", "tag": "global_step2", "step": 2, "attempt": facts["attempt"],
    }  # fmt: skip
    assert facts["quiet"] == {}
