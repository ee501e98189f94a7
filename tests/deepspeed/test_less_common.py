"""Less common models and runs, converted or resumed: real engines get the saved state, and continue training."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import ckpttool
from tests import sampling
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.truth import source, truth

pytestmark = pytest.mark.deepspeed


@dataclass(frozen=True)
class Case:
    source: str
    """The bundled checkpoint."""
    model: str
    """See ``parallel_engines``."""
    stage: int
    world_size: int
    how: str = "zero"
    """"zero" or "universal": convert, and let DeepSpeed load; "load": ``ckpttool.load`` from the source; "alone": let
    DeepSpeed load the source, with nothing of ours."""

    @property
    def id(self) -> str:
        return f"{self.source}-{self.how}{self.stage}-dp{self.world_size}"


_CASES = [
    Case("zero3-dp2-bf16-nvme", "plain", 3, 2, "load"),
    Case("zero1-dp2-bf16-repeated", "repeated", 3, 1),
    Case("zero2-dp2-bf16-repeated", "repeated", 1, 2, "load"),
    Case("zero3-dp2-bf16-repeated", "repeated", 2, 1),
    Case("zero3-dp2-bf16-repeated", "repeated", 3, 2, "load"),
    Case("zero3-dp2-bf16-repeated", "repeated", 3, 1, "load"),
    Case("zero3-dp2-bf16-repeated", "repeated", 3, 2, "universal"),
    Case("universal-zero3-dp2-bf16-repeated", "repeated", 3, 2),
    *(Case("zero2-dp2-bf16-elastic", "plain", stage, 2, how) for stage in (2, 3) for how in ("load", "universal")),
    Case("zero2-dp2-bf16-ulysses", "ulysses", 3, 4),
    Case("zero2-dp2-bf16-ulysses", "ulysses", 2, 2, "load"),
    Case("zero3-dp4-bf16-ulysses", "ulysses", 2, 2),
    Case("zero3-dp4-bf16-ulysses", "ulysses", 3, 4, "load"),
    Case("zero3-dp4-bf16-ulysses", "ulysses", 3, 2, "load"),
    Case("zero2-dp2-bf16-zenflow", "zenflow", 2, 2, "alone"),
    Case("zero2-dp2-bf16-zenflow", "zenflow", 2, 2),
    Case("zero2-dp2-bf16-zenflow", "zenflow", 1, 1),
    Case("zero2-dp2-bf16-zenflow", "zenflow", 3, 2),
    Case("zero2-dp2-bf16-zenflow", "zenflow", 2, 1, "load"),
    *(Case("zero2-dp2-bf16-zenflow", "zenflow", stage, 2, how) for stage in (2, 3) for how in ("load", "universal")),
]
CASES = [_CASES[0], *sampling.some(_CASES[1:], 9)]


KEPT = {(2, "alone", 2), (2, "zero", 2), (1, "zero", 1), (2, "load", 2)}
"""Where ZenFlow's masters stay older than the weights: in native files, and where these are loaded as they are."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """What live engines held."""
    directory = tmp_path_factory.mktemp("less-common")
    found: dict[str, Loaded] = {}
    # DeepSpeed remembers the model-parallel unit of the first engine: each model gets processes of its own.
    for model in sorted({case.model for case in CASES}):
        loads = []
        for case in (c for c in CASES if c.model == model):
            root = source(case.source) if case.how in {"load", "alone"} else str(directory / case.id)
            if case.how == "zero":
                ckpttool.convert(
                    source(case.source), root, to="zero", world_size=case.world_size, stage=case.stage, prove=True
                )
            elif case.how == "universal":
                ckpttool.convert(source(case.source), root, to="universal", prove=True)
            loads.append(
                Load(
                    case.id, root, case.stage, case.world_size, model=model, universal=case.how == "universal",
                    resume={} if case.how == "load" else None,
                )
            )  # fmt: skip
        found |= load_all(loads)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_live_engine_holds_what_the_source_engine_held(case: Case, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[case.id], truth(case.source)
    tensors = dict(expected.tensors)
    if case.model == "zenflow" and (case.stage, case.how, case.world_size) not in KEPT:
        # Where the module's copies cannot be newer than the masters, these are made of them.
        names = [key.removeprefix("fp32/") for key in tensors if key.startswith("fp32/")]
        tensors |= {f"fp32/{name}": tensors[f"module/{name}"].float() for name in names}
    assert engine.error == ""
    assert engine.facts["step"] == ""
    assert engine.tensors.keys() == tensors.keys()
    # DeepSpeed's own load of a universal checkpoint leaves buffers and frozen parameters as they are.
    left = {f"module/{name}" for name in expected.facts["frozen"]} if case.how == "universal" else set()
    kept = [k for k in tensors if k not in left and not (case.how == "universal" and k.startswith("buffer/"))]
    assert [k for k in kept if not torch.equal(engine.tensors[k], tensors[k])] == []
    assert engine.facts["global_steps"] == expected.facts["global_steps"]
    assert engine.facts["scalars"] == expected.scalars
    for group, held in zip(engine.facts["groups"], expected.facts["groups"], strict=True):
        same = held.keys() & group.keys()
        # At stage 3 it gives all groups the hyper-parameters of the first; elastic checkpoints have none.
        if not expected.elastic and (case.how != "universal" or case.stage < 3):
            assert {k: group[k] for k in same} == {k: held[k] for k in same}
