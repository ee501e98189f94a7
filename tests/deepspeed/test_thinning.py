"""A manager thins old checkpoints during a run; what is left loads into live engines as weights, and only as those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import forked

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


@pytest.fixture(scope="module")
def done(tmp_path_factory: TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("thinning")
    forked.start("tests.deepspeed.thinning", JOBS, directory)
    return directory


def _facts(done: Path, job: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = torch.load(done / f"{job['id']}.pt", weights_only=False)
    return facts


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_run_thins_what_is_old(job: dict[str, Any], done: Path) -> None:
    facts = _facts(done, job)
    assert facts["kept"] == ["global_step2", "global_step4"]
    dtype = job["dtype_thin"] or "bf16"
    assert facts["entries"] == [("global_step2", dtype, 2, 0.5), ("global_step4", None, 4, 0.25)]
    names = {path.name for path in (done / job["id"] / "global_step2").iterdir()}
    assert names == {"ckpttool.json", "ckpttool_run_state.pt", "model.safetensors"}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_an_engine_loads_its_weights(job: dict[str, Any], done: Path) -> None:
    facts = _facts(done, job)
    held, loaded = facts["held"], facts["loaded"]
    masters = [name for name in held if name.startswith("fp32/")]
    assert masters
    for name in masters:
        expected = held[name].float()
        expected = expected if job["dtype_thin"] == "fp32" else expected.bfloat16().float()
        assert torch.equal(loaded[name].float(), expected), name
    assert "global_step2" in facts["report"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_load_that_wants_more_says_so_in_one_line(job: dict[str, Any], done: Path) -> None:
    facts = _facts(done, job)
    root = done / job["id"]
    assert facts["refused"] == (
        f"{root}/global_step2: rank 0: is thin: prune has removed its optimizer states, and kept the weights; "
        "load it with weights_only=True, or choose a whole checkpoint"
    )
    assert facts["untouched"]
    assert facts["none whole"].startswith(f"{root}: holds 2 checkpoints, and none can be restored; of the newest: ")
    assert "is thin" not in facts["none whole"]
    assert facts["all thin"] == (
        f"{root}-thin: holds a checkpoint, and none can be restored; of the newest: is thin: prune has removed its "
        "optimizer states, and kept the weights; restore one from a copy, load the weights of a thin one with "
        "ckpttool.load(engine, src, weights_only=True), or choose another root to begin anew"
    )
    assert (facts["weights alone"], facts["restored"]) == ({}, "global_step2")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_save_records_what_the_run_was_made_of(job: dict[str, Any], done: Path) -> None:
    facts = _facts(done, job)
    found = facts["provenance"]
    assert found["restored_from"] == {
        "path": f"{done / job['id']}/global_step2", "tag": "global_step2", "step": 2, "attempt": facts["attempt"],
    }  # fmt: skip
    assert facts["quiet"] == {}
