"""Thinning in a bucket, which cannot rename: a death before or after any request loses neither checkpoint."""

from __future__ import annotations

import io
import itertools
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.extensions.thinning.replacement import ThinOptions, plan_thinning, recover
from ckpttool.saving.coordination import Alone
from ckpttool.storage import MANIFEST, THINNING, open_storage
from tests import sampling
from tests.catalog.torch_runs import assert_loads, save
from tests.cli.command import ckpttool as command
from tests.faults.disks import Fault, Killed, Machine
from tests.saving import crew
from tests.saving.checkpoints import save_version, version
from tests.saving.test_bucket import Requests
from tests.truth import truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage import server

NAME = "zero2-dp2-bf16-sgd"
OPTIONS = ThinOptions(dtype="bf16", grace=0.0, jobs=1)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _state(bucket: server.Bucket, url: str, kind: str, copy: Path, *, recovered: bool = True) -> str:
    """ "whole" or "thin", by what readers see and byte for byte."""
    found = ckpttool.inspect(url)
    assert ckpttool.verify(url, deep=True).findings == ()
    if kind == "torch":
        copy.mkdir(exist_ok=True)
        for key in bucket.keys("run/step1/"):
            (copy / key.rpartition("/")[2]).write_bytes(bucket.get(key))
        assert_loads(copy, thin=found.thin, recovered=recovered)
        shutil.rmtree(copy)
        return "thin" if found.thin else "whole"
    if not found.thin:
        for name, data in version(0).items():
            assert bucket.get(f"run/step1/{name}") == data
        return "whole"
    got = load(bucket.get("run/step1/model.safetensors"))
    expected = truth(NAME).state_dict(torch.bfloat16)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    return "thin"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero", "torch"])
def test_a_death_at_every_request_loses_nothing(
    kind: str,
    bucket: server.Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    crash_points: Callable[[int], None],
) -> None:
    machine, clock = Machine(), crew.Clock()
    crew.install(clock, monkeypatch)
    url = bucket.url("run/step1")
    if kind == "zero":
        save_version(open_storage(url), bucket.url("run"), Alone(), "step1", 0)
    else:
        save(bucket.url("run"))
    state = partial(_state, bucket, url, kind, tmp_path / "copy")
    before = {key: bucket.get(key) for key in bucket.keys("run/")}
    requests = Requests(machine, 0)

    def work(_: object) -> None:
        storage = requests.storage()
        plan_thinning(storage, url, OPTIONS).carry_out(storage)
        if machine.dead:
            raise Killed

    def attempt(*faults: Fault) -> Any:
        for key in bucket.keys("run/"):
            bucket.boto.delete_object(Bucket=bucket.name, Key=key)
        for key, data in before.items():
            bucket.put(key, data)
        machine.reset(*(fault.rule() for fault in faults))
        (outcome,) = crew.Crew(1, machine, clock).do(work)
        return outcome

    outcome = attempt()
    assert outcome.succeeded, outcome
    assert state() == "thin"
    final = set(bucket.keys("run/step1/"))
    weights = {"model.safetensors"} if kind == "zero" else {".metadata", "ckpttool_thin.metadata", "thin_0.distcp"}
    assert {key.rpartition("/")[2] for key in final} == {MANIFEST, "ckpttool_run_state.pt", *weights}
    names = machine.names[0]
    seen: set[str] = set()
    tried = 0
    every = [(at, how) for at, how in itertools.product(range(len(names)), ("before", "after")) if _changes(names[at])]
    for at, how in sampling.some(every, 3, key="bucket"):
        outcome = attempt(Fault(0, at, how))
        tried += 1
        assert not outcome.succeeded
        try:
            seen.add(found := state(recovered=False))
            storage = open_storage(url)
            recover(storage, url, grace=0)
            assert state() == found
            if found == "whole":
                plan_thinning(storage, url, OPTIONS).carry_out(storage)
            assert state() == "thin"
            assert set(bucket.keys("run/step1/")) == final
            assert bucket.uploads() == []
        except (AssertionError, CkptError) as error:
            raise AssertionError(f"died {how} request {at} ({names[at]}): {error}") from error
    assert seen == {"whole", "thin"}
    crash_points(tried)


def _changes(name: str) -> bool:
    return not name.startswith(("list", "head", "get"))


def test_prune_thins_in_a_bucket(bucket: server.Bucket) -> None:
    root = bucket.url("run")
    for number in (1, 2, 3):
        save_version(open_storage(root), root, Alone(), f"step{number}", 0)
    planned_line = command("prune", root, "--keep-last", 1, "--thin", "bf16", "--dry-run")
    assert planned_line.code == 0, planned_line
    assert "0 of 3 would be removed, 2 would be thinned" in planned_line.stdout
    assert not any(key.endswith("model.safetensors") for key in bucket.keys("run/"))
    done = command("prune", root, "--keep-last", 1, "--thin", "bf16")
    assert (done.code, done.stderr) == (0, "")
    freed = [next(line for line in out.stdout.splitlines() if " freed" in line) for out in (planned_line, done)]
    assert freed[0].rpartition(",")[2] == freed[1].rpartition(",")[2]
    assert [e.thin for e in ckpttool.ls(root).entries] == ["bf16", "bf16", None]
    assert not [key for key in bucket.keys("run/") if key.endswith(THINNING)]
    again = command("prune", root, "--keep-last", 1, "--thin", "bf16")
    assert "thin already" in again.stdout
    assert "0 of 3 removed, 0 B freed" in again.stdout


def test_pins_in_a_bucket(bucket: server.Bucket) -> None:
    root = bucket.url("run")
    for number in (1, 2, 3):
        save_version(open_storage(root), root, Alone(), f"step{number}", 0)
    made = ckpttool.pin(f"{root}/step1", why="the paper's table 2")
    assert ckpttool.ls(root).entries[0].pin == made
    decisions = ckpttool.prune(root, keep_last=1)
    assert [(d.entry.name, d.keep) for d in decisions] == [("step1", True), ("step2", False), ("step3", True)]
    assert "the paper's table 2" in decisions[0].reason
    assert ckpttool.unpin(f"{root}/step1") == made
    assert [e.name for e in ckpttool.ls(root).entries] == ["step1", "step3"]
    assert [d.keep for d in ckpttool.prune(root, keep_last=1)] == [False, True]


def test_the_state_of_the_run_is_what_torch_loads(bucket: server.Bucket) -> None:
    url = bucket.url("run/step1")
    storage = open_storage(url)
    save_version(storage, bucket.url("run"), Alone(), "step1", 0)
    saved = torch.load(io.BytesIO(version(0)["mp_rank_00_model_states.pt"]), weights_only=False)
    plan_thinning(storage, url, OPTIONS).carry_out(storage)
    loaded = torch.load(io.BytesIO(bucket.get("run/step1/ckpttool_run_state.pt")), weights_only=True)
    assert loaded["ds_config"] == saved["ds_config"]
