"""Runs of Ray Train that were saved the documented way: two engines in a folder of each, and what nothing reads."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import sampling
from tests.under_ray import pages

if TYPE_CHECKING:
    from tests.under_ray.conftest import Trained

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]

RUNS = [
    (script, data, bucket, [*range(len(pages.TURNS))], [0, 1, 3, 4])
    for script, data in (("bert", "loader"), ("bert", "ray"), ("zero", "loader"), ("fsdp2", "loader"))
    for bucket in (False, True)
]
if not sampling.thorough():
    RUNS = [("bert", "loader", True, [0, 1], [1]), ("zero", "loader", False, [2, 3], [2])]
    RUNS += [("fsdp2", "loader", False, [0, 1], [1])]
ON_FSDP2 = [2, 3]
NAMES = [f"{script} {data} {'bucket' if bucket else 'disk'}" for script, data, bucket, *_ in RUNS]
RAY_RUNS: dict[str, tuple[Any, ...]] = {
    "several": ("several", sampling.thorough()), **{n: ("pages", *run) for n, run in zip(NAMES, RUNS, strict=True)},
}  # fmt: skip
"""Runs on one cluster: see ``driver``."""
if sampling.thorough():
    RAY_RUNS["fsdp2"] = ("fsdp2", "zero loader disk/zero", ON_FSDP2)


def _facts(done: Path, part: str) -> Any:
    return json.loads((done / f"several {part}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_each_way_continues_the_other_on_any_number_of_workers(name: str, trained: Trained) -> None:
    """Examples of Ray's pages: "ray_bert.py", "ray_bert_documented.py", "ray_zero.py", "ray_zero_documented.py",
    "ray_fsdp2.py", "ray_fsdp2_documented.py"."""
    done = trained.of(name)
    turns, deaths = dict(zip(NAMES, RUNS, strict=True))[name][3:]
    paths = [sorted(done.glob(f"{name} {turn} *.json")) for turn in turns]
    assert [len(attempts) for attempts in paths] == [1 + (turn in deaths) for turn in turns]
    attempts = [json.loads(path.read_text()) for path in itertools.chain.from_iterable(paths)]
    for before, after in itertools.pairwise(attempts):
        whole = before["saved"][:-1] if before["died"] else before["saved"]
        if after["way"] == "ours" and before["way"] == "ours":
            assert after["restored"] == whole[-1]
            assert after["state"]["epoch"] >= 0
        elif before["died"]:  # Ray may not have heard of the last report
            assert after["restored"] in [before["restored"], *whole]
        else:
            assert after["restored"] == whole[-1]
    entries = json.loads((done / f"{name}.json").read_text())
    torn = sum(attempt["died"] for attempt in attempts)
    whole = [entry for entry in entries if entry["whole"]]
    assert sum(len(attempt["saved"]) for attempt in attempts) - torn == len(whole)
    for entry in whole:
        assert entry["findings"] == []
        assert any("the engine counted none" in note for note in entry["notes"]) == name.startswith("bert")
    cut = [entry["problem"] for entry in entries if not entry["whole"] and not entry["torn"]]
    assert all(re.fullmatch(r"(.*/)?latest: names '\w+', which is not there", problem) for problem in cut), cut


@pytest.mark.thorough
def test_the_template_of_fsdp2_continues_a_converted_run(trained: Trained) -> None:
    """The example of Ray's template for FSDP2, with a given checkpoint."""
    done = trained.of("fsdp2")
    facts = json.loads((done / "fsdp2.json").read_text())
    steps, epoch = ckpttool.inspect(facts["newest"]).step or 0, facts["epoch"]
    found = re.findall(r"epoch (\d+): loss [\d.]+, (.*)", trained.printed("fsdp2")[-1])
    for workers, (number, path) in zip(ON_FSDP2, found, strict=True):
        epoch, steps = epoch + 1, steps + 24 // workers // 2  # lines, of which a batch has two
        checkpoint = ckpttool.inspect(path)
        assert int(number) == epoch
        assert not ckpttool.verify(path, deep=True).findings
        assert {checkpoint.numbers(p)["step"].value for p in checkpoint.parameters} == {steps}


def test_several_engines_resume_by_name_on_any_number_of_workers(trained: Trained) -> None:
    done = trained.of("several")
    documented, first, again = (_facts(done, part) for part in ("documented", "resumed", "resumed again"))
    assert documented["saved"][0] != documented["saved"][1]
    assert (first["restored"], again["restored"]) == (documented["saved"], first["saved"])
    assert (first["state"], again["state"]) == ({"of": "policy"}, {"of": "both"})
    for found in (first, again):
        assert "contains the checkpoints of several engines: critic, policy; pass the engines by name" in found["alone"]
        assert "is another than the engine that this run has saved or restored before" in found["second alone"]
        assert "step: is missing; pass step=..., the steps of the run so far" in found["module"]
        assert found["text"] == "metrics: are 'loss', not a mapping; pass a dict, such as {\"loss\": 0.5}"
    assert again["newest"] == again["state"]
    assert "the-last: is saved already" in again["repeated"]
    told = json.loads((done / "resumed again.json").read_text())
    assert Path(told["newest"]).name == "the-last"
    assert told["best"][-1][1]["validated"] is True
    dying = _facts(done, "dying")
    assert (dying["restored"], dying["state"]) == (first["restored"], first["state"]), "the last one before the death"
    listed = ckpttool.ls(done / "several").entries
    assert [(e.torn, e.reported) for e in listed if not e.whole] == [("uncommitted", False)]
    entries = [e for e in listed if e.whole]
    assert [e.reported for e in entries] == [True] * 3
    for name in ("policy", "critic"):
        assert not ckpttool.verify(next(Path(entries[-1].path).glob(f"*/{name}")), deep=True).findings


@pytest.mark.thorough
def test_a_checkpoint_of_ray_that_cannot_be_read_is_an_error(trained: Trained) -> None:
    told = _facts(trained.of("several"), "resumed plain")["error"]
    assert "is the checkpoint that Ray resumes from, and contains none that ckpttool reads" in told
