"""Mixtures of experts, written for other ranks, stages and expert-parallel sizes, load into real engines and train."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import ckpttool
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.truth import source, truth

pytestmark = pytest.mark.deepspeed


@dataclass(frozen=True)
class Case:
    source: str
    """The bundled checkpoint that is converted."""
    model: str
    """See ``parallel_engines``."""
    stage: int
    world_size: int
    experts: int = 2
    """Ranks that the experts are spread over."""
    round_robin: bool = False

    @property
    def id(self) -> str:
        return f"{self.source}-to-zero{self.stage}-dp{self.world_size}-ep{self.experts}"


CASES = [
    Case("moe-zero2-dp2-bf16", "moe", 1, 4, experts=2),
    Case("moe-zero2-dp4-ep2-bf16", "moe-residual", 2, 4, experts=4),
    Case("moe-zero2-dp4-ep2-bf16", "moe-residual", 1, 2),
    Case("moe-zero1-dp2-ep2-bf16", "moe", 2, 4, round_robin=True),
    Case("autoep-zero2-dp2-ep2-bf16", "autoep", 3, 4),
    Case("autoep-zero3-dp4-ep2-bf16", "autoep", 2, 2, experts=1),
    Case("autoep-zero3-dp4-ep2-bf16", "autoep", 3, 2),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """What live engines held after loading each conversion."""
    directory = tmp_path_factory.mktemp("experts")
    loads = []
    for case in CASES:
        ckpttool.convert(
            source(case.source), directory / case.id, to="zero", world_size=case.world_size, stage=case.stage,
            round_robin=case.round_robin, expert_parallel=case.experts, prove=True,
        )  # fmt: skip
        spread = {"model": case.model, "experts": case.experts, "dtype": truth(case.source).facts["dtype"]}
        options = {"round_robin_gradients": True} if case.round_robin else {}
        root = str(directory / case.id)
        loads.append(Load(case.id, root, case.stage, case.world_size, zero_options=options, **spread))
    return load_all(loads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_live_engine_holds_what_the_source_engine_held(case: Case, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[case.id], truth(case.source)
    assert engine.error == ""
    assert engine.facts["step"] == ""
    assert engine.tensors.keys() == expected.tensors.keys()
    assert [k for k, t in expected.tensors.items() if not torch.equal(engine.tensors[k], t)] == []
    assert engine.facts["global_steps"] == expected.facts["global_steps"]
    assert engine.facts["scalars"] == expected.scalars
    for group, kept in zip(engine.facts["groups"], expected.facts["groups"], strict=True):
        assert group["name"] == (f"ep_size_{case.experts}" if group.get("moe") else kept["name"])
        same = kept.keys() & group.keys() - {"name"}
        assert {k: group[k] for k in same} == {k: kept[k] for k in same}
        assert group["betas"] == list(kept["betas"])
