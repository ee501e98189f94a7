"""Lightning with ``CkptModelParallelStrategy``: FSDP2 and tensor parallelism, resumed here and by Lightning alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.formats.chunk_index import CHUNK_INDEX
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.storage import MANIFEST
from tests import sampling
from tests.extensions.lightning import lightning_runs
from tests.extensions.lightning.lightning_runs import ROWS, SAVED, STEPS, WIDTH
from tests.frameworks.jobs import Jobs
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
SHARDED, BOTH = [2, 1], [2, 2]
"""Meshes: ranks that share the data, ranks that share each layer."""
KILLS = sampling.some([2, 4, 6], 1, key="kills of Lightning")
"""Writes of the first rank in the second save before which it is killed, all but once with the other rank."""
SAME = {"again": "dropout", "by-lightning": "plain", "several-again": "several", "several-by-lightning": "several",
        "both-by-lightning": "both", "both-again": "both"}  # fmt: skip
"""Resumes on the ranks and the mesh that saved, and the runs that did not stop."""
OTHERS = {"on-3": "plain", "on-1": "both", "on-4": "plain", "several-on-3": "several", "from-lightning": "theirs",
          "from-engine": "engine", "converted": "engine", "into-engine": "plain"}  # fmt: skip
"""Resumes elsewhere, and the runs that did not stop."""


def _at(facts: dict[str, Any], step: int) -> Path:
    """Return the checkpoint of a batch; Lightning counts the steps of all optimizers."""
    several = facts["out"].name == "several"
    path: Path = facts["out"] / "run" / f"step={2 * step if several else step}.ckpt"
    return path


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server of S3 with a bucket."""
    with server.running() as running:
        server.client(running).create_bucket(Bucket="runs")
        yield running


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory, endpoint: str) -> dict[str, Any]:
    """The facts of all runs, by name."""
    bucket = {"run": "s3://runs/lightning", "environment": {**server.ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}}
    directory = tmp_path_factory.mktemp("lightning-fsdp2")
    jobs = Jobs(lightning_runs, directory, lambda out: {"run": str(out / "run"), "saves": {}})

    def add(name: str, mesh: list[int], **values: Any) -> None:
        jobs.add(name, 0, mesh[0] * mesh[1], mesh=mesh, **values)

    add("dropout", SHARDED, dropout=0.5, saves={"async_save": True})
    add("plain", SHARDED)
    add("long", SHARDED, steps=12)
    add("several", SHARDED, several=True)
    add("both", BOTH)
    add("theirs", SHARDED, saves=None)
    add("one", SHARDED, keep=1, saves={"async_save": True})
    add("bucket", SHARDED, keep=1, saves={"async_save": True}, **bucket)
    add("weights", SHARDED, weights_only=True)
    add("changed", SHARDED, changes=True, fails=True)
    jobs.add("engine", 2, 2)
    for number in KILLS:
        kill = {"number": number, "everyone": number != 4, "rank": 0, "step": STEPS}
        add(f"killed{number}", SHARDED, kill=kill, fails=True, saves={"save_timeout": 5.0})
    found = jobs.run()
    saved = {name: str(_at(facts, SAVED)) for name, facts in found.items()}
    add("again", SHARDED, dropout=0.5, load=saved["dropout"])
    add("by-lightning", SHARDED, load=saved["plain"], saves=None)
    add("several-again", SHARDED, several=True, load=saved["several"])
    add("several-by-lightning", SHARDED, several=True, load=saved["several"], saves=None)
    add("several-on-3", [3, 1], several=True, load=saved["several"])
    add("both-again", BOTH, load=saved["both"])
    add("both-by-lightning", BOTH, load=saved["both"], saves=None)
    add("on-3", [3, 1], load=saved["plain"])
    add("on-1", [1, 1], load=saved["both"])
    add("on-4", BOTH, load=saved["plain"])
    add("from-lightning", [3, 1], load=saved["theirs"])
    add("from-engine", SHARDED, load=saved["engine"])
    ckpttool.convert(saved["engine"], directory / "converted.ckpt", to="dcp", layout="lightning")
    add("converted", SHARDED, load=str(directory / "converted.ckpt"), saves=None)
    jobs.add("into-engine", 3, 3, load=saved["plain"])
    add("from-bucket", [3, 1], steps=12, load="newest", **bucket)
    add("tested", [3, 1], load=saved["weights"], test=True)
    add("without-states", SHARDED, load=saved["weights"], fails=True)
    (directory / "full.ckpt").write_bytes(b"")
    add("full", SHARDED, load=str(directory / "full.ckpt"), fails=True)
    torn = directory / "torn.ckpt"
    shutil.copytree(saved["theirs"], torn)
    (torn / "meta.pt").unlink()
    add("torn", SHARDED, load=str(torn), fails=True)
    ckpttool.CheckpointManager(directory / "foreign").save(torch.nn.Linear(2, 2), optimizer=False, step=1)
    add("foreign", SHARDED, load=str(directory / "foreign" / "step-1"), fails=True)
    for number in KILLS:
        shutil.copytree(directory / f"killed{number}", directory / f"revived{number}")
        add(f"revived{number}", SHARDED, steps=12, load="newest")
    return found | jobs.run()


def _rest(facts: dict[str, Any]) -> dict[str, float]:
    return {step: loss for step, loss in facts["losses"].items() if int(step) > SAVED}


def test_a_resume_on_the_same_ranks_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any]) -> None:
    for name, whole in SAME.items():
        assert len(runs[name]["losses"]) == STEPS - SAVED
        assert runs[name]["losses"] == _rest(runs[whole]), name
        assert runs[name]["rate"] == runs[whole]["rate"], name
    assert not runs["plain"]["told"]


def test_a_resume_elsewhere_goes_on(runs: dict[str, Any]) -> None:
    for name, whole in OTHERS.items():
        assert list(runs[name]["losses"]) == [*_rest(runs[whole])], name
        assert list(runs[name]["losses"].values()) == pytest.approx([*_rest(runs[whole]).values()], rel=1e-5), name
    assert runs["converted"]["losses"] == runs["from-engine"]["losses"]


def test_a_checkpoint_has_the_files_of_lightning_and_its_names(runs: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = ({p.name for p in _at(runs[name], STEPS).iterdir()} for name in ("plain", "theirs"))
    assert {name for name in ours - theirs if "rank_state" not in name} == {MANIFEST, RUN_STATE, CHUNK_INDEX}
    assert not theirs - ours
    for name in ("plain", "theirs", "both", "several"):
        folder = _at(runs[name], STEPS)
        assert ckpttool.verify(folder, deep=True).sound
        checkpoint = ckpttool.inspect(folder)
        assert (checkpoint.step, checkpoint.client_state["epoch"]) == (STEPS * (2 if name == "several" else 1), 1), name
        assert [len(one.parameters) for one in checkpoint.groups] == ([3, 1] if name == "several" else [4]), name
        ckpttool.consolidate(folder, tmp_path / name, to="safetensors")
        live, found = torch.load(runs[name]["out"] / "live.pt"), ckpttool.load_state_dict(tmp_path / name)
        assert found.keys() == live.keys(), name
        assert all(torch.equal(found[key], value) for key, value in live.items()), name
    listed = ckpttool.ls(runs["plain"]["out"] / "run").entries
    assert [(one.name, one.step, one.whole) for one in listed] == [
        (f"step={step}.ckpt", step, True) for step in (SAVED, STEPS)
    ]
    (_at(runs["plain"], STEPS) / "meta.pt").write_bytes(b"")
    assert not ckpttool.verify(_at(runs["plain"], STEPS)).sound, "the file of Lightning is part of the commit"


def test_a_bucket_keeps_the_newest_checkpoint_which_other_ranks_resume(runs: dict[str, Any]) -> None:
    resumed = runs["from-bucket"]
    assert resumed["from"] == f"s3://runs/lightning/step={STEPS}.ckpt"
    truth = {step: loss for step, loss in runs["long"]["losses"].items() if int(step) > STEPS}
    assert resumed["losses"] == pytest.approx(truth, rel=1e-5)


def test_an_old_checkpoint_is_removed_after_the_new_one_is_committed(runs: dict[str, Any]) -> None:
    (kept,) = (runs["one"]["out"] / "run").iterdir()
    assert kept.name == f"step={STEPS}.ckpt"
    assert not ckpttool.verify(kept, deep=True).findings


@pytest.mark.parametrize("number", KILLS)
def test_a_killed_save_is_passed_over_and_the_run_goes_on(runs: dict[str, Any], number: int) -> None:
    killed, revived = runs[f"killed{number}"], runs[f"revived{number}"]
    assert -9 in killed["statuses"]
    at = SAVED if revived["from"].endswith(f"step={SAVED}.ckpt") else STEPS
    assert revived["losses"] == {step: loss for step, loss in runs["long"]["losses"].items() if int(step) > at}
    skipped = any(f"step={STEPS}.ckpt was not committed" in line for line in revived["told"])
    assert skipped == (at == SAVED)


def test_weights_alone_are_saved_and_tested(runs: dict[str, Any]) -> None:
    folder = _at(runs["weights"], SAVED)
    assert not any(one.optimizer_states for one in ckpttool.inspect(folder).parameters)
    weights = ckpttool.load_state_dict(folder)
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    outputs = inputs
    for layer in (0, 2):
        outputs = outputs @ weights[f"net.{layer}.weight"].T + weights[f"net.{layer}.bias"]
    assert runs["tested"]["tested"] == pytest.approx(float((outputs - inputs.roll(1, 1)).square().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "without-states": "step=4.ckpt",
        "full": "full.ckpt: is a file",
        "torn": "torn.ckpt: holds no whole checkpoint",
        "foreign": "step-1: was not saved by Lightning",
        "changed": "state_dict: has another 'net.0.bias' than the model",
    }.items(),
)
def test_what_cannot_be_saved_or_resumed_is_named(runs: dict[str, Any], name: str, words: str) -> None:
    assert words in runs[name]["error"]
    assert "\n" not in runs[name]["error"]
    assert not [*runs["changed"]["out"].glob("run/*")]
