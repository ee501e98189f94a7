"""The digests that saves of torch runs record."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.extensions.proof import torch_state
from ckpttool.extensions.proof.live_state import SavedDigests, digest_of
from ckpttool.integrations.live.choice import run_of
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.live.request import FrameworkFiles, Save
from ckpttool.integrations.live.run import Kept
from ckpttool.integrations.torch import chunks
from ckpttool.integrations.torch.live_run import torch_run
from tests.forked import each_on_ranks
from tests.integrations.test_save import Small, _built, _train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def test_a_save_in_the_background_digests_the_values_of_the_call(tmp_path: Path) -> None:
    net = Small()
    save = Save()
    run = torch_run(net, False, None, LoadOptions(optimizer=False))
    found = chunks.described(run, save, 0, str(tmp_path), Kept(None, in_background=False))
    state = torch_state.state_of(run, found.pieces, {})
    before = [digest_of(piece) for piece in state.pieces]
    first = state.pieces[0]
    digests = SavedDigests(state, {0: dataclasses.replace(first, tensor=first.tensor.clone())}, {}, waits=False)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 9.0)
    rows = digests.compute().rows.tolist()
    assert [high << 64 | low for _, _, low, high, _ in rows] == before


def test_weights_that_a_cast_rounds_are_compared_after_it(tmp_path: Path) -> None:
    net = Small()
    ckpttool.CheckpointManager(tmp_path).save(net, optimizer=False, step=1)
    net.bfloat16()
    proof = ckpttool.prove(net, tmp_path, weights_only=True)
    assert any("weights that the cast to a narrower type rounds" in note for note in proof.unproven)
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] += 1
    with pytest.raises(ckpttool.ProofError, match="other values than were saved"):
        ckpttool.prove(net, tmp_path, weights_only=True)


def test_several_threads_digest_the_same() -> None:
    before, rows = torch.get_num_threads(), []
    state = torch_state.live_state(torch_run(Small(), False, None, LoadOptions(optimizer=False)))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows.append(state.digest().rows.tolist())
    finally:
        torch.set_num_threads(before)
    assert rows[0] == rows[1]
    assert any(any(row) for row in rows[0])


@pytest.mark.parametrize("in_background", [False, True])
def test_digests_are_taken_at_the_call_of_a_background_save(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def noted(*given: Any, waits: bool) -> Any:
        made.append(not waits)
        return SavedDigests(*given, waits=waits)

    monkeypatch.setattr(torch_state, "SavedDigests", noted)
    with ckpttool.CheckpointManager(tmp_path, async_save=in_background) as manager:
        manager.save(Small(), optimizer=False, step=1)
    assert made == [in_background]


def _with_other_replicas(job: dict[str, Any], directory: Path) -> tuple[str, list[str]]:
    """Save a run whose ranks differ in a weight and its moment; return its name and the warnings of this rank."""
    import torch.distributed as dist

    warnings: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    run = _built(job, 1)
    model, inner, optimizer, _ = run
    _train(run, range(2))
    named = {name: one for name, one in inner.named_parameters() if one in optimizer.state}
    name = [name for name, one in named.items() if one.numel() > 8][job["number"]]
    if dist.get_rank() == job["odd"]:
        with torch.no_grad():
            named[name].view(-1)[3] += 1
            optimizer.state[named[name]]["exp_avg"].view(-1)[5] += 1
    logging.getLogger("ckpttool").addHandler(handler := Kept())
    manager: Any = ckpttool.CheckpointManager(str(directory / job["id"]), async_save=job["background"])
    if job["files"]:  # as under the Trainer
        written = FrameworkFiles(("model.safetensors", "optimizer.pt"))
        manager.save_into(manager.root, run_of(model, optimizer, None, 2), Save(written=written), manager._saved)
    else:
        manager.save(model, optimizer=optimizer, step=2)
    with torch.no_grad():
        for parameter in named.values():  # the run goes on, and each rank has other values than at the save
            parameter += 1 + dist.get_rank() if job["background"] else 0
    manager.wait()
    logging.getLogger("ckpttool").removeHandler(handler)
    return name, warnings


def test_replicas_that_differ_at_a_save_are_named_and_what_is_written_is_digested(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {
            "id": f"{ranks}-{background}-{odd}-{n}-{files}", "mesh": mesh, "world_size": ranks,
            "background": background, "odd": odd, "number": n, "files": files,
        }
        for mesh, ranks, odd in (("ddp", 2, 1), ("ddp", 2, 0), ("ddp", 3, 1), ("ddp", 3, 2))
        for background in (False, True)
        for n, files in ((0, False), (-1, False), (-1, True))
    ]  # fmt: skip
    found = each_on_ranks(_with_other_replicas, jobs, tmp_path)
    for job in jobs:
        name, warned = found[job["id"]][0]
        told = [one for one in warned if "inconsistent" in one]
        for key in ("weights", "exp_avg"):
            assert any(f"{key} of {name} differs between ranks" in one for one in told), (job, warned)
        assert all(str(job["odd"]) in one.partition("between ranks")[2] for one in told), (job, told)
        assert not any("inconsistent" in one for _, own in found[job["id"]][1:] for one in own)
        directory = tmp_path / job["id"] / "step-2"
        recorded = (ckpttool.inspect(directory).digests or {})["tensors"]
        for key, own in ckpttool.digest(directory).tensors.items():
            assert {name: str(one) for name, one in own.items()} == recorded[key], (job, key)
