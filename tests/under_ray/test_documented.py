"""Runs of Ray Train that were saved the documented way: two engines in a folder of each, and what nothing reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool

if TYPE_CHECKING:
    from tests.under_ray.conftest import Trained

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]

RAY_RUNS: dict[str, tuple[Any, ...]] = {"several": ("several",)}
"""Runs on one cluster: see ``driver``."""


def _facts(done: Path, part: str) -> Any:
    return json.loads((done / f"several {part}.json").read_text())


def test_several_engines_resume_by_name_on_any_number_of_workers(trained: Trained) -> None:
    done = trained.of("several")
    documented, first, again = (_facts(done, part) for part in ("documented", "resumed", "resumed again"))
    assert documented["saved"][0] != documented["saved"][1]
    assert (first["restored"], again["restored"]) == (documented["saved"], first["saved"])
    assert (first["state"], again["state"]) == ({"of": "policy"}, {"of": "both"})
    for found in (first, again):
        assert "contains the checkpoints of several engines: critic, policy; pass the engines by name" in found["alone"]
        assert "is another than the engine that this worker has saved or restored before" in found["second alone"]
        assert "engine: is of class torch.Linear, not a DeepSpeed engine" in found["module"]
    assert again["newest"] == again["state"]
    assert "the-last: is saved already" in again["repeated"]
    told = json.loads((done / "resumed again.json").read_text())
    assert Path(told["newest"]).name == "the-last"
    assert told["best"][-1][1]["validated"] is True
    entries = ckpttool.ls(done / "several").entries
    assert [(e.whole, e.reported) for e in entries] == [(True, True)] * 3
    for name in ("policy", "critic"):
        assert not ckpttool.verify(next(Path(entries[-1].path).glob(f"*/{name}")), deep=True).findings


def test_a_checkpoint_of_ray_that_cannot_be_read_is_an_error(trained: Trained) -> None:
    told = _facts(trained.of("several"), "resumed plain")["error"]
    assert "is the checkpoint that Ray resumes from, and contains none that ckpttool reads" in told
