"""Mixtures of experts, written for other ranks, stages and expert-parallel sizes, load into real engines and train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import PlanError
from tests.deepspeed.engines import refusal
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.forked import each_on_ranks
from tests.truth import source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

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
    loads: bool = False
    """Whether ``ckpttool.load`` loads it, without a conversion."""

    @property
    def id(self) -> str:
        way = "load" if self.loads else "to"
        return f"{self.source}-{way}-zero{self.stage}-dp{self.world_size}-ep{self.experts}"

    @property
    def sizes(self) -> list[int]:
        """Ranks that each group of experts is spread over: those of one size are one group."""
        return [self.experts, 1] if self.model == "moe-pyramid" else [self.experts]


CASES = [
    Case("moe-zero2-dp2-bf16", "moe", 1, 4, experts=2),
    Case("moe-zero2-dp4-ep2-bf16", "moe-residual", 2, 4, experts=4),
    Case("moe-zero2-dp4-ep2-bf16", "moe-residual", 1, 2),
    Case("moe-zero1-dp2-ep2-bf16", "moe", 2, 4, round_robin=True),
    Case("moe-zero2-dp2-ep2-bf16-pyramid", "moe-pyramid", 1, 4),
    Case("moe-zero2-dp2-ep2-bf16-pyramid", "moe-pyramid", 2, 2, loads=True),
    Case("moe-zero2-dp2-ep2-bf16-pyramid", "moe-pyramid", 1, 4, loads=True),
    Case("moe-zero2-dp2-ep2-bf16-pyramid", "moe-pyramid", 2, 2, experts=1, loads=True),
    Case("moe-zero2-dp2-ep2-bf16-cpu-offload", "moe", 1, 4, loads=True),
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
        if not case.loads:
            ckpttool.convert(
                source(case.source), directory / case.id, to="zero", world_size=case.world_size, stage=case.stage,
                round_robin=case.round_robin, expert_parallel=None if len(case.sizes) > 1 else case.experts, prove=True,
            )  # fmt: skip
        spread = {"model": case.model, "experts": case.experts, "dtype": truth(case.source).facts["dtype"]}
        options = {"round_robin_gradients": True} if case.round_robin else {}
        root = source(case.source) if case.loads else str(directory / case.id)
        resume: dict[str, Any] | None = {} if case.loads else None
        loads.append(Load(case.id, root, case.stage, case.world_size, zero_options=options, resume=resume, **spread))
    return load_all(loads)


REFUSED = [case for case in CASES if case.model == "moe-pyramid" and case.experts != 2]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_layers_over_other_ranks_are_refused(case: Case, loaded: dict[str, Loaded]) -> None:
    assert "differs from the model in the trained parameters of experts" in loaded[case.id].error


def test_several_sizes_cannot_become_one(tmp_path: Path) -> None:
    with refused(PlanError):
        ckpttool.convert(source("moe-zero2-dp2-ep2-bf16-pyramid"), tmp_path, to="zero", world_size=4, expert_parallel=2)


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED], ids=lambda case: case.id)
def test_a_live_engine_holds_what_the_source_engine_held(case: Case, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[case.id], truth(case.source)
    assert engine.error == ""
    assert engine.facts["step"] == ""
    assert engine.tensors.keys() == expected.tensors.keys()
    assert [k for k, t in expected.tensors.items() if not torch.equal(engine.tensors[k], t)] == []
    assert engine.facts["global_steps"] == expected.facts["global_steps"]
    assert engine.facts["scalars"] == expected.scalars
    for group, kept in zip(engine.facts["groups"], expected.facts["groups"], strict=True):
        names = [f"ep_size_{size}" for size in case.sizes] if group.get("moe") else [kept["name"]]
        assert group["name"] in names
        same = kept.keys() & group.keys() - {"name"}
        assert {k: group[k] for k in same} == {k: kept[k] for k in same}
        assert group["betas"] == list(kept["betas"])


def _in_another_order(job: dict[str, Any]) -> dict[str, str]:
    """Save with groups of experts that some ranks have in another order; restore with all in another order."""
    import deepspeed
    from recipes import common, moe

    def build(reverses: bool) -> Any:
        model = moe.build_model(2, residual=True, second=(2, 1))
        groups = moe.split_groups(model)
        plain, experts = ([g for g in groups if bool(g.get("moe")) == of_experts] for of_experts in (False, True))
        optimizer = torch.optim.AdamW([*plain, *(experts[::-1] if reverses else experts)])
        case = common.Case("order", 2, 2, common.no_training, config={"scheduler": None})
        return deepspeed.initialize(model=model, optimizer=optimizer, config=common.ds_config(case))[0]

    manager = ckpttool.CheckpointManager(job["root"])
    told = {"save": refusal(lambda: manager.save(build(reverses=torch.distributed.get_rank() == 1)))}
    manager.save(build(reverses=False))
    return {**told, "load": refusal(lambda: ckpttool.load(build(reverses=True), job["root"]))}


def test_groups_in_another_order_are_told(tmp_path: Path) -> None:
    """DeepSpeed orders them by a set of names, so that each process may have another order."""
    found = each_on_ranks(_in_another_order, [{"id": "order", "world_size": 2, "root": str(tmp_path / "root")}])
    for told in found["order"]:
        assert "its groups of experts have another order than on other ranks: set PYTHONHASHSEED" in told["save"]
        assert "has groups of experts ep_size_" in told["load"]
        assert told["load"].endswith("set PYTHONHASHSEED as in the saved run")
