"""Checkpoints written for another number of ranks, or another stage, load into real engines and train on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from tests import sampling
from tests.forked import each_on_ranks
from tests.truth import HERE, source, truth

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

SOURCES = [
    "zero1-dp2-bf16", "zero2-dp3-bf16", "zero3-dp4-bf16", "zero3-dp2-bf16-sub-groups", "zero1-dp2-fp16",
    "zero2-dp2-fp16", "zero3-dp2-fp16", "zero2-dp2-bf16-round-robin", "zero1-dp2-fp32", "zero2-dp2-fp32",
    "zero3-dp2-fp32", "zero3-dp3-bf16", "zero2-dp2-bf16-aligned", "zero1-dp4-bf16", "zero2-dp1-bf16",
]  # fmt: skip
RANKS = (1, 2, 3, 4)
STEPS = 3


@dataclass(frozen=True)
class Conversion:
    """One source, and what it is converted for."""

    name: str
    ranks: int
    stage: int
    round_robin: bool
    sub_group_size: int | None

    @property
    def job(self) -> dict[str, Any]:
        """What the engine that loads it is like."""
        options: dict[str, Any] = {"round_robin_gradients": True} if self.round_robin else {}
        if self.sub_group_size:
            options["sub_group_size"] = self.sub_group_size
        # The target's own alignment is DeepSpeed's affair: it lays out anew what says nothing of it.
        if "aligned" in self.name and self.stage < 3:
            options["parameter_alignment"] = True
        return {"truth": self.name, "stage": self.stage, "dtype": truth(self.name).facts["dtype"], "zero": options}


def _conversions(ranks: int) -> list[Conversion]:
    """Each source for one or two numbers of ranks, at one stage; with ``--thorough`` every source meets every stage."""
    result = []
    for i, name in enumerate(SOURCES):
        if (i + ranks) % (2 if i % 4 == 1 else 4) and not sampling.thorough():
            continue
        stage = 1 + (i + ranks) % 3
        round_robin = "round-robin" in name and stage < 3
        result.append(Conversion(name, ranks, stage, round_robin, 300 if stage == 3 and i % 2 else None))
    return result


def _answers(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first rank answers to each job."""
    found = each_on_ranks(_answer, [{**job, "id": number} for number, job in enumerate(jobs)])
    return [found[number][0] for number in range(len(jobs))]


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into a live engine, list the differences between its states and the truth, and train on.

    A job: {"id", "root", "truth", "world_size", "stage", "dtype", "zero", "load", "kinds"}: the checkpoint, the fixture
    whose truth it must hold, the engine that loads it, the arguments of the load, and the states to compare.
    """
    import deepspeed
    from recipes.common import Case, ds_config, hyper_parameters, live_groups, live_scalars, live_tensors, no_training
    from recipes.plain import build_model, param_groups

    torch.manual_seed(777)  # other weights than those of the checkpoint
    case = Case("", job["stage"], torch.distributed.get_world_size(), no_training, job["dtype"], job.get("zero", {}))
    model = build_model()
    if job.get("without_scalar"):
        model.scale = torch.nn.Parameter(torch.tensor([1.25]))  # stage 3 cannot gather a 0-dim parameter
    groups = param_groups(model)
    for group in groups:
        group["lr"], group["weight_decay"] = 0.5, 0.5  # and other hyper-parameters
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.5), eps=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(case))
    path, client_state = engine.load_checkpoint(job["root"], **job.get("load", {}))
    assert path is not None
    held = live_tensors(engine)
    expected = load_file(HERE / "truth" / f"{job['truth']}.safetensors")
    kinds = set(job.get("kinds", [])) or {key.partition("/")[0] for key in expected}
    problems = [f"missing {key}" for key in expected if key not in held and key.partition("/")[0] in kinds]
    for key, tensor in held.items():
        if key.partition("/")[0] in kinds and not torch.equal(tensor.cpu(), expected[key].view(tensor.shape)):
            problems.append(f"{key} differs")
    answer = {
        "problems": problems,
        "groups": [
            {"params": names, **hyper_parameters(group)}
            for names, group in zip(live_groups(engine), engine.optimizer.param_groups, strict=True)
        ],
        "scalars": live_scalars(engine),
        "client_state": {k: client_state.get(k) for k in ("epoch", "note", "losses", "nested")},
        "global_steps": engine.global_steps,
        "scale": getattr(engine.optimizer, "cur_scale", None),
        "scheduler": engine.lr_scheduler.state_dict(),
        "losses": [],
    }
    # The same tokens on every rank: their mean gradient does not depend on how many there are.
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(0, 61, (2, 6), generator=generator)
        logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        answer["losses"].append(loss.item())
    return answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Conversion, dict[str, Any]]:
    """What live engines held after loading each conversion."""
    root: Path = tmp_path_factory.mktemp("conversions")
    done: list[Conversion] = []
    jobs: list[dict[str, Any]] = []
    for ranks in RANKS:
        conversions = _conversions(ranks)
        for c in conversions:
            out = root / f"{c.name}-{ranks}-{c.stage}"
            ckpttool.convert(
                source(c.name), out, to="zero", world_size=ranks, stage=c.stage, round_robin=c.round_robin,
                sub_group_size=c.sub_group_size, prove=True,
            )  # fmt: skip
            jobs.append({"root": str(out), "world_size": ranks, **c.job})
        # The source itself, where it was saved by as many ranks: the run that was not interrupted.
        own = [n for n in SOURCES if truth(n).facts["world_size"] == ranks]
        sizes = {"zero3-dp2-bf16-sub-groups": 500}
        originals = [Conversion(n, 0, truth(n).facts["stage"], "round-robin" in n, sizes.get(n)) for n in own]
        jobs += [{"root": source(c.name), "world_size": ranks, **c.job} for c in originals]
        done += [*conversions, *originals]
    return dict(zip(done, _answers(jobs), strict=True))


def _all() -> list[Conversion]:
    return [c for ranks in RANKS for c in _conversions(ranks)]


@pytest.mark.parametrize("conversion", _all(), ids=lambda c: f"{c.name}-to-zero{c.stage}-dp{c.ranks}")
def test_a_live_engine_holds_what_the_source_engine_held(
    conversion: Conversion, answers: dict[Conversion, dict[str, Any]]
) -> None:
    answer, facts = answers[conversion], truth(conversion.name).facts
    assert answer["problems"] == []
    assert answer["global_steps"] == facts["global_steps"]
    assert answer["client_state"] == {
        "epoch": 2, "note": "odd shapes", "losses": [1.5, 1.25], "nested": {"tokens": 36, "seen": (1, 2)},
    }  # fmt: skip
    assert answer["scheduler"] == {"last_batch_iteration": 2}
    for group, scalars, expected in zip(answer["groups"], answer["scalars"], facts["groups"], strict=True):
        assert sorted(group["params"]) == sorted(expected["params"])
        assert {k: group[k] for k in ("lr", "eps", "weight_decay")} == {
            k: expected[k] for k in ("lr", "eps", "weight_decay")
        }
        assert group["betas"] == tuple(expected["betas"])
        assert scalars["step"] == facts["adam_step"]
    assert answer["scale"] == (256 if facts["dtype"] == "fp16" else 1.0)


@pytest.mark.parametrize("conversion", _all(), ids=lambda c: f"{c.name}-to-zero{c.stage}-dp{c.ranks}")
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    conversion: Conversion, answers: dict[Conversion, dict[str, Any]]
) -> None:
    uninterrupted = next(a for c, a in answers.items() if c.name == conversion.name and c.ranks == 0)
    # In 16 bit, other stages add up in another order; fp32 tells that nothing else differs.
    tolerance = 2e-5 if truth(conversion.name).facts["dtype"] == "fp32" else 5e-2
    assert len(answers[conversion]["losses"]) == STEPS
    for ours, theirs in zip(answers[conversion]["losses"], uninterrupted["losses"], strict=True):
        assert math.isclose(ours, theirs, rel_tol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_alone_start_a_run(ranks: int, tmp_path: Path) -> None:
    """What it computes with is what the safetensors file holds, whatever the run's own groups are."""
    name = "zero2-dp2-bf16"
    ckpttool.consolidate(source(name), tmp_path / "weights", to="safetensors")
    tensors = load_file(str(tmp_path / "weights" / "model.safetensors"))
    tied = {"head.weight": "embed.weight", "format": "pt"}
    save_file({**tensors, "scale": tensors["scale"].view(1)}, str(tmp_path / "model.safetensors"), metadata=tied)
    jobs = []
    for stage in (1, 2, 3):
        out = tmp_path / f"zero{stage}"
        weights = tmp_path / "model.safetensors" if stage == 3 else tmp_path / "weights"
        report = ckpttool.convert(weights, out, to="zero", world_size=ranks, stage=stage, dtype="bf16", prove=True)
        assert "load_module_only=True" in " ".join(report.notes)
        at_stage_3 = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
        load = at_stage_3 if stage == 3 else {"load_module_only": True}
        kinds = ["module", "buffer"]  # of which DeepSpeed makes the masters
        jobs.append({"root": str(out), "truth": name, "stage": stage, "dtype": "bf16", "load": load, "kinds": kinds})
        jobs[-1] |= {"without_scalar": stage == 3, "world_size": ranks}
    for answer in _answers(jobs):
        assert answer["problems"] == []


def test_conversions_have_different_names() -> None:
    """What the tests above compare with is not the same for all."""
    conversions = _all()
    number = 3 * len(SOURCES) if sampling.thorough() else len(SOURCES) + len(SOURCES[1::4])
    assert len({(c.name, c.stage) for c in conversions}) == number
    assert {c.stage for c in conversions} == {1, 2, 3}
    assert all(dataclasses.astuple(c) for c in conversions)
