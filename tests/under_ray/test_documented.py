"""Runs of Ray Train that were saved the documented way: two engines in a folder of each, and what nothing reads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import sampling
from tests.under_ray import driver

if TYPE_CHECKING:
    from tests.under_ray.conftest import Trained

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]

TURNS = driver.TURNS if sampling.thorough() else driver.TURNS[:2]
SCRIPTS = ("page", "template") if sampling.thorough() else ("template",)
RAY_RUNS: dict[str, tuple[Any, ...]] = {
    "several": ("several", sampling.thorough()), **{script: ("pages", script, len(TURNS)) for script in SCRIPTS},
}  # fmt: skip
"""Runs on one cluster: see ``driver``."""


def _facts(done: Path, part: str) -> Any:
    return json.loads((done / f"several {part}.json").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_way_continues_the_other_on_any_number_of_workers(script: str, trained: Trained) -> None:
    done = trained.of(script)
    facts = [json.loads((done / f"{script} {turn}.json").read_text()) for turn in range(len(TURNS))]
    for before, after in itertools.pairwise(facts):
        assert after["restored"] == before["saved"]
    for (way, _), (saved, _), fact in zip(TURNS[1:], TURNS, facts[1:], strict=False):
        assert fact["state"] == (None if way == "documented" else {"epoch": 2} if saved == "ours" else {})
    entries = ckpttool.ls(done / script).entries
    assert len(entries) == 2 * len(TURNS)
    assert all(entry.whole for entry in entries)
    newest = Path(json.loads((done / f"{script}.json").read_text())["newest"]).name
    assert max(entries, key=lambda entry: entry.rank).name == newest
    for entry in entries:
        report = ckpttool.verify(entry.path, deep=True)
        assert not report.findings
        assert any("the engine counted none" in note for note in report.notes) == (script == "page")


def test_several_engines_resume_by_name_on_any_number_of_workers(trained: Trained) -> None:
    done = trained.of("several")
    documented, first, again = (_facts(done, part) for part in ("documented", "resumed", "resumed again"))
    assert documented["saved"][0] != documented["saved"][1]
    assert (first["restored"], again["restored"]) == (documented["saved"], first["saved"])
    assert (first["state"], again["state"]) == ({"of": "policy"}, {"of": "both"})
    for found in (first, again):
        assert "contains the checkpoints of several engines: critic, policy; pass the engines by name" in found["alone"]
        assert "is another than the engine that this run has saved or restored before" in found["second alone"]
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


@pytest.mark.thorough
def test_a_checkpoint_of_ray_that_cannot_be_read_is_an_error(trained: Trained) -> None:
    told = _facts(trained.of("several"), "resumed plain")["error"]
    assert "is the checkpoint that Ray resumes from, and contains none that ckpttool reads" in told
