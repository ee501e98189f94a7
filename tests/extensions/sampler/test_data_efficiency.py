"""Curriculum learning's sampler and random layerwise token dropping: their states are restored, on any ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
import ckpttool.data
from ckpttool.formats import open_checkpoint
from tests.deepspeed.engines import differing, logged
from tests.forked import each_on_ranks
from tests.truth import source, truth

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

    from ckpttool.integrations.live.report import LoadReport

pytestmark = pytest.mark.deepspeed

NAME = "zero2-dp2-bf16-data-efficiency"
RESUMED = [(2, 2), (2, 1), (3, 2), (1, 3)]
"""Stage and ranks of the engines that restore."""


def _jobs(directory: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for name, with_all in (("all", True), ("sampler", False)):
        places = {"clusters": str(directory / f"{name}-clusters"), "root": str(directory / name)}
        common = {"drops": with_all, "position": with_all, "resumes": False, **places}
        jobs.append({"id": name, "turn": 0, "world_size": 2, "stage": 2, **common})
        for stage, ranks in RESUMED if with_all else [(2, 2)]:
            job = {"id": f"{name}-{stage}-{ranks}", "turn": 1, "world_size": ranks, "stage": stage, **common}
            jobs.append({**job, "resumes": True, "drops": True})
    return jobs


def _do(job: dict[str, Any]) -> dict[str, Any]:
    """Train and save, or restore; return what the live engine holds, and the samples that it reads next."""
    import numpy as np
    from recipes import common, data_efficiency

    data_efficiency.GLOBAL, data_efficiency.SAMPLES = 12, 400
    case = common.Case(job["id"], job["stage"], job["world_size"], common.no_training)
    config = {**common.ds_config(case), **data_efficiency.efficiency(job["clusters"], drops=job["drops"])}
    engine, loader = data_efficiency.initialize(config)
    sampler = engine.training_dataloader.data_sampler
    position = ckpttool.data.CurriculumPosition(sampler, workers=0) if job["position"] else None
    manager = ckpttool.CheckpointManager(job["root"])
    np.random.seed(1 if job["resumes"] else 77)
    report: LoadReport | None = None
    state: dict[str, Any] = {}
    with logged() as lines:
        if job["resumes"]:
            state = manager.restore(engine, prove=True) or {}
            report = manager.restored
        else:
            data_efficiency.run_steps(engine, iter(loader), 3)
            manager.save(engine, tag="tag", client_state={"position": position.state_dict()} if position else {})
    layers = [type(module).__name__ for module in engine.module.modules()]
    facts = {
        "data": data_efficiency.data_states(engine),
        "lines": lines,
        "method": report.method if report else "",
        "notes": report.notes if report else (),
        "wrapped": layers.count("RandomLayerTokenDrop"),
    }
    if position:
        if job["resumes"]:
            position.load_state_dict(state["position"])
        batches = iter(sampler)
        facts["read"] = [next(batches) for _ in range(4)]
        facts["clusters"] = len(getattr(sampler, "data_clusters", ()))
    if job["drops"]:
        engine.module.up[0] = engine.module.up[0].random_ltd_layer
    facts["tensors"] = {key: tensor.detach().clone() for key, tensor in common.live_tensors(engine).items()}
    engine.destroy()
    return facts


Facts = dict[str, list[dict[str, Any]]]
"""Results of each rank, by job."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: TempPathFactory) -> Facts:
    return each_on_ranks(_do, _jobs(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize(("stage", "ranks"), RESUMED)
def test_a_restored_engine_has_the_saved_states_and_reads_the_same_samples(
    stage: int, ranks: int, facts: Facts
) -> None:
    saved, restored = facts["all"], facts[f"all-{stage}-{ranks}"]
    assert len(restored) == ranks
    for one in restored:
        assert one["method"] == ("native" if (stage, ranks) == (2, 2) else "planned")
        assert one["data"] == saved[0]["data"]
        assert one["data"]["random_ltd"]["current_value"] > 16
        assert one["data"]["data_sampler"]["curriculum_step"] == 3
        assert not differing(one["tensors"], saved[0]["tensors"])
        assert one["wrapped"] == 1
        assert not [note for note in one["notes"] if "sampler" in note or "random" in note]
    assert restored[0]["clusters"] == saved[0]["clusters"]

    def samples(ranks: list[dict[str, Any]]) -> list[list[int]]:
        return [sorted(index for one in ranks for index in one["read"][step]) for step in range(4)]

    assert samples(restored) == samples(saved)


def test_the_save_says_that_the_generator_of_the_sampler_is_not_saved(facts: Facts) -> None:
    told = "lacks the generator that draws the samples"
    assert [sum(told in line for line in one["lines"]) for one in facts["sampler"]] == [1, 0]
    assert not any(told in line for one in facts["all"] for line in one["lines"])


def test_an_engine_that_drops_tokens_restores_a_run_that_did_not(facts: Facts) -> None:
    for one in facts["sampler-2-2"]:
        assert one["data"]["data_sampler"] == facts["sampler"][0]["data"]["data_sampler"]
        assert one["data"]["random_ltd"]["consumed_layer_tokens"] == 0
        assert not differing(one["tensors"], facts["sampler"][0]["tensors"])


def _plain(state: Any) -> Any:
    """The state that DeepSpeed would load, as JSON has it."""
    sampler = dict(state["data_sampler"])
    name, keys, *rest = sampler["np_rng_state"]
    return {**state, "data_sampler": {**sampler, "np_rng_state": [name, keys.tolist(), *rest]}}


@pytest.mark.parametrize("to", ["as it is", "zero", "universal"])
def test_files_hold_the_states_of_the_live_engine(to: Any, tmp_path: Path) -> None:
    root = source(NAME)
    if to != "as it is":
        options: dict[str, Any] = {"world_size": 3, "stage": 3} if to == "zero" else {}
        ckpttool.convert(root, tmp_path / "out", to=to, **options)
        root = str(tmp_path / "out")
    checkpoint = open_checkpoint(root)
    (path, *_) = [checkpoint.path(i) for i, file in enumerate(checkpoint.files) if file.kind == "model"]
    held = torch.load(path, weights_only=False)
    assert _plain({key: held[key] for key in checkpoint.data_states}) == truth(NAME).facts["data_states"]
