"""Loads into engines with ``staged=False``: equal to staged ones, refused before the data, or half loaded."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from tests import sampling
from tests.damage import flip
from tests.deepspeed import engines
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.forked import each_on_ranks
from tests.peak import memory_above
from tests.truth import source, truth

pytestmark = pytest.mark.deepspeed

PLAIN = "zero2-dp2-bf16"
ENGINES: dict[str, dict[str, Any]] = {
    "same ranks, stage 1": {"source": "zero1-dp2-bf16", "stage": 1, "ranks": 2},
    "same ranks, stage 2": {"source": PLAIN, "stage": 2, "ranks": 2},
    "same ranks, stage 3": {"source": "zero3-dp2-fp32", "stage": 3, "ranks": 2},
    "an engine without states": {"source": "zero1-dp2-bf16", "stage": 1, "ranks": 2, "steps": 0},
    "an engine without states, stage 3": {"source": PLAIN, "stage": 3, "ranks": 2, "steps": 0},
    "2 to 1 ranks": {"source": "zero1-dp2-bf16", "stage": 2, "ranks": 1},
    "2 to 1 ranks, stage 3": {"source": "zero3-dp2-fp32", "stage": 3, "ranks": 1},
    "4 to 3 ranks": {"source": "zero2-dp4-bf16", "stage": 2, "ranks": 3},
    "fp16": {"source": "zero1-dp2-fp16", "stage": 1, "ranks": 2},
    "fp32": {"source": "zero2-dp2-fp32", "stage": 2, "ranks": 2},
    "fp32 to stage 3": {"source": "zero2-dp2-fp32", "stage": 3, "ranks": 2},
    "stage 3 to 1": {"source": "zero3-dp4-bf16", "stage": 1, "ranks": 3},
    "sub-groups": {"source": PLAIN, "stage": 3, "ranks": 4, "zero_options": {"sub_group_size": 300}},
    "round robin": {
        "source": "zero2-dp2-bf16-round-robin", "stage": 2, "ranks": 2, "zero_options": {"round_robin_gradients": True},
    },
    "aligned": {
        "source": "zero2-dp2-bf16-aligned", "stage": 2, "ranks": 3, "zero_options": {"parameter_alignment": True},
    },
    "fp32 gradients": {
        "source": "zero1-dp2-bf16-grad-fp32", "stage": 1, "ranks": 2,
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "universal": {"source": "universal-zero2-dp2-bf16", "stage": 2, "ranks": 2},
    "muon": {"source": "zero2-dp3-bf16-muon", "stage": 1, "ranks": 2, "optimizer": "muon"},
    "sgd": {"source": "zero2-dp2-bf16-sgd", "stage": 3, "ranks": 3, "optimizer": "sgd"},
    "weights": {"source": PLAIN, "stage": 2, "ranks": 2, "resume": {"weights_only": True}},
    "weights, stage 3": {"source": PLAIN, "stage": 3, "ranks": 2, "resume": {"weights_only": True}},
    "weights, stage 0": {"source": PLAIN, "stage": 0, "ranks": 2, "resume": {"weights_only": True}},
    "without the optimizer": {"source": PLAIN, "stage": 1, "ranks": 2, "resume": {"optimizer": False}},
}  # fmt: skip
CHOSEN = dict(sampling.some(ENGINES.items(), 14))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"change": "shape"}, "tiny has shape [3], but [4] in the model"),
    "more": ({"change": "more"}, "lacks extra, more of the model"),
    "more-lax": (
        {"change": "more", "resume": {"strict": False}},
        "cannot be read straight into the engine: it keeps its values of extra, which the checkpoint lacks; "
        "leave out staged=False",
    ),
    "optimizer": ({"optimizer": "adagrad", "config": {"scheduler": None}}, "the engine's optimizer keeps sum"),
}
HALF_LOADED = "; the run is half loaded: restore another checkpoint, or start again"


def _load(kind: str, root: str, *, staged: bool, stage: int = 2, ranks: int = 2, **more: Any) -> Load:
    resume = {**more.pop("resume", {}), **({} if staged else {"staged": False})}
    steps = more.pop("steps", 1)
    return Load(f"{kind}-{'staged' if staged else 'in-place'}", root, stage, ranks, resume=resume, steps=steps, **more)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """The state of the live engines after each load."""
    loads = []
    for name, engine in CHOSEN.items():
        found = {**engine, "dtype": truth(engine["source"]).facts["dtype"]}
        root = source(found.pop("source"))
        loads += [_load(name, root, staged=staged, **found) for staged in (True, False)]
    loads += [_load(name, source(PLAIN), staged=False, **engine) for name, (engine, _) in REFUSED.items()]
    loads.append(_load("stage 0", source(PLAIN), staged=False, stage=0))
    run = tmp_path_factory.mktemp("flipped") / "run"
    shutil.copytree(source(PLAIN), run)
    checkpoint = ckpttool.inspect(run)
    moment = next(p for p in checkpoint.parameters if p.name == "up.weight").states["exp_avg"].extents[0]
    flip(Path(checkpoint.path(int(moment["file"]))), int(moment["offset"]) + 3)
    loads.append(_load("flipped", str(run), staged=False))
    loads.append(_load("flipped, stage 3", str(run), staged=False, stage=3))
    loads.append(_load("rank 1 fails", source(PLAIN), staged=False, change="rank 1 fails"))
    return load_all(loads)


@pytest.mark.parametrize("name", CHOSEN)
def test_an_engine_holds_and_computes_what_it_does_after_a_staged_load(name: str, loaded: dict[str, Loaded]) -> None:
    staged, own = loaded[f"{name}-staged"], loaded[f"{name}-in-place"]
    assert (staged.error, own.error) == ("", "")
    assert own.tensors.keys() == staged.tensors.keys()
    assert [key for key, value in staged.tensors.items() if not torch.equal(own.tensors[key], value)] == []
    kept = {"report", "read", "told"}
    assert {k: v for k, v in own.facts.items() if k not in kept} == {
        k: v for k, v in staged.facts.items() if k not in kept
    }
    assert own.facts["report"]["method"] == "planned"
    assert len(own.facts["losses"]) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_leaves_the_engine_unchanged(name: str, loaded: dict[str, Loaded]) -> None:
    engine = loaded[f"{name}-in-place"]
    assert engine.error.startswith("PlanError: ")
    assert REFUSED[name][1] in engine.error
    assert "half loaded" not in engine.error
    assert engine.facts["untouched"]


def test_an_optimizer_without_zero_is_refused(loaded: dict[str, Loaded]) -> None:
    assert "it has an optimizer without ZeRO, whose states DeepSpeed copies; leave out staged=False" in (
        loaded["stage 0-in-place"].error
    )


@pytest.mark.parametrize("name", ["flipped", "flipped, stage 3"])
def test_a_flipped_bit_leaves_the_engine_half_loaded_and_the_error_says_so(
    name: str, loaded: dict[str, Loaded]
) -> None:
    engine = loaded[f"{name}-in-place"]
    assert engine.error.startswith("ChecksumError: ")
    assert "up.weight" in engine.error
    assert engine.error.endswith(HALF_LOADED)
    assert not engine.facts["untouched"]


def test_an_error_before_the_data_leaves_the_engine_unchanged(loaded: dict[str, Loaded]) -> None:
    engine = loaded["rank 1 fails-in-place"]
    assert engine.error.endswith(": rank 1: Input/output error; check the disk")
    assert engine.facts["untouched"]


def _restored(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save twice, damage the newer save, restore in place; then damage both, and restore in place."""
    import torch.distributed as dist

    def engine(seed: int) -> Any:
        made = engines.build(job["stage"], job["dtype"], "two", "adamw", seed)
        engines.step(made, 1)
        return made

    def damage(number: int) -> None:
        dist.barrier()
        if not dist.get_rank():
            checkpoint = ckpttool.inspect(root / f"global_step{number}")
            moment = next(p for p in checkpoint.parameters if p.name == "c.weight").states["exp_avg_sq"].extents[-1]
            flip(Path(checkpoint.path(int(moment["file"]))), int(moment["offset"]))
        dist.barrier()

    root = directory / job["id"]
    saved, staged, own = map(engine, range(3))
    manager = ckpttool.CheckpointManager(root)
    for n in (1, 2):
        manager.save(saved, client_state={"n": n})
        engines.step(saved, 1)
    damage(2)
    expected = manager.restore(staged, tag="global_step1", staged=True)
    found = manager.restore(own, staged=False, prove=True)
    held = [engines.held(one) for one in (staged, own)]
    for one in (staged, own):
        engines.step(one, 2)
    later = [engines.held(one) for one in (staged, own)]
    damage(1)
    error = engines.told(lambda: manager.restore(own, staged=False))
    return {
        "client": [expected, found],
        "held": held,
        "next": later,
        "restored": manager.restored_path,
        "error": error,
    }


def test_a_restore_takes_an_older_checkpoint_or_says_that_the_engine_is_half_loaded(tmp_path: Path) -> None:
    jobs = [
        {"id": f"zero{stage}-{dtype}", "world_size": 2, "stage": stage, "dtype": dtype}
        for stage, dtype in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
    ]
    for name, ranks in each_on_ranks(_restored, jobs, tmp_path).items():
        for told in ranks:
            assert told["client"] == [{"n": 1}, {"n": 1}]
            assert told["restored"] == str(tmp_path / name / "global_step1")
            for staged, own in (told["held"], told["next"]):
                assert staged.keys() == own.keys()
                assert [
                    k for k, v in staged.items() if not torch.equal(torch.as_tensor(v), torch.as_tensor(own[k]))
                ] == []
            assert told["error"].startswith(
                f"LayoutError: {tmp_path / name}: holds 2 checkpoints, and none can be restored"
            )
            assert told["error"].endswith(HALF_LOADED)


def _peak(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load a state of 100 MB into an engine that has one, and return the bytes of memory above its own."""
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": job["stage"]}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(job["layers"])))
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)
    engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum())
    engine.step()
    root = directory / job["id"]
    engine.save_checkpoint(root)
    ckpttool.load(engine, root, dry_run=True)  # modules and threads of the first load are not memory of the state
    load = partial(ckpttool.load, engine, root)
    needed = {str(staged): memory_above(partial(load, staged=staged)) for staged in (False, True)}
    # DeepSpeed gathers the 16-bit weights of all ranks, in a load as in a step.
    return {**needed, "gather": memory_above(engine.optimizer.update_lp_params) if job["stage"] < 3 else 0}


def test_a_load_in_place_needs_no_second_copy(tmp_path: Path) -> None:
    jobs = [
        {"id": f"zero{stage}-dp{ranks}", "world_size": ranks, "stage": stage, "layers": 8 * ranks}
        for stage, ranks in ((1, 1), (2, 2), (3, 1))
    ]
    for name, ranks in each_on_ranks(_peak, jobs, tmp_path).items():
        for told in ranks:
            assert told["False"] - told["gather"] < 32 << 20, (name, told)
            assert told["True"] > 50 << 20, (name, told)
