"""An engine gets the states of its own parameters by name, or stays unchanged, for any groups and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpttool import CheckpointManager, CkptError, verify
from ckpttool.formats import open_checkpoint
from tests import sampling
from tests.deepspeed.engines import build, differing, held, step
from tests.forked import each_on_ranks
from tests.truth import source

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed


STEPS = 2


def _job(
    groups: tuple[str, str], optimizers: tuple[str, str] = ("adamw", "adamw"), stages: tuple[int, int] = (0, 0),
    dtype: str = "fp32", *, plain: bool = False,
) -> dict[str, Any]:  # fmt: skip
    words = [*groups, *optimizers, *map(str, stages), dtype, *(["plain"] * plain)]
    return {
        "id": "-".join(words).replace(" ", "_"), "groups": groups, "optimizers": optimizers, "stage": stages[0],
        "to": stages[1], "world_size": 1, "dtype": dtype, "plain": plain,
    }  # fmt: skip


KINDS = [("adamw", "fp32"), ("adamw", "bf16"), ("fused", "bf16")]
"""Optimizer and type, of which each has another wrapper without ZeRO."""
ORDERS = [
    ("two", "two"), ("two", "swapped"), ("two", "reversed"), ("layers", "layers"), ("layers", "layers swapped"),
    ("one", "layers"),
]  # fmt: skip
"""What was saved, and engines with the same learning rate for each parameter."""
BY_NAME = [_job(order, (name, name), dtype=dtype) for name, dtype in KINDS for order in ORDERS]
BY_NAME += [_job(("two", "two"), (n, n), dtype=d, plain=True) for n, d in KINDS]
BY_NAME += [
    _job((saved, "reversed"), (n, n), dtype=d, plain=True) for n, d in KINDS[1:] for saved in ("two", "reversed")
]
BY_NAME.append(_job(("layers", "layers"), dtype="bf16", plain=True))
CUT = [_job(("two", "cut"), (name, name), dtype=dtype) for name, dtype in KINDS]
FROZEN = [_job(("frozen a", "frozen b"), (name, name), dtype=dtype) for name, dtype in KINDS]
UNTOLD = [
    _job(("frozen a", "frozen b"), dtype="bf16", plain=True),
    *(_job(("layers", "layers swapped"), (n, n), dtype=d, plain=True) for n, d in KINDS),
]
BY_POSITION = [
    _job(groups, plain=True)
    for groups in (("layers", "layers"), ("reversed", "reversed"), ("frozen a", "frozen b"), ("two", "reversed"))
]
"""Saved by DeepSpeed alone, without names and master weights, and several orders fit."""
STAGES = [(0, 0), (1, 1), (1, 2), (2, 2), (3, 3), (0, 2)]
CLASSES = [
    ("adamw", "momentum"), ("momentum", "adamw"), ("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "amsgrad"),
    ("amsgrad", "adamw"), ("rmsprop", "adamw"), ("adamw", "nadam"), ("nadam", "adamw"),
]  # fmt: skip
OTHERS = [_job(("one", "one"), pair, stages, "bf16") for stages in STAGES for pair in CLASSES]
OTHERS += [_job(("two", "two"), pair) for pair in CLASSES]
SAME = [
    _job(("one", "one"), (n, n), stages, "bf16") for stages in STAGES for n in ("momentum", "sgd", "amsgrad", "nadam")
]
SKIPPED = [
    _job(("two", "two"), stages=stages, dtype="fp16")
    for stages in ((0, 0), (1, 1), (2, 2), (3, 3), (2, 3), (3, 1), (2, 0), (3, 0))
]
"""The loss scale is so high that every step is skipped."""
TWO_GROUPS = [
    _job((groups, groups), (name, "adamw"), (0, stage), dtype)
    for stage in (1, 2, 3) for name, dtype in KINDS for groups in ("two", "layers")
]  # fmt: skip
TWO_GROUPS += [
    _job(("reversed", "reversed"), (name, "adamw"), (0, stage), dtype, plain=True)
    for stage in (1, 2, 3) for name, dtype in KINDS
]  # fmt: skip
WITHOUT = [
    _job((groups, "two"), (name, name), (stage, 0), dtype)
    for stage in (1, 2, 3) for name, dtype in KINDS for groups in ("two", "reversed", "swapped")
]  # fmt: skip
WITHOUT += [
    _job(("one", "one"), (n, n), (2, 0), d) for n in ("momentum", "sgd", "amsgrad", "nadam") for d in ("fp32", "bf16")
]
WITHOUT_FROZEN = [_job(("frozen a", "frozen b"), (n, n), (2, 0), d) for n, d in KINDS]
OTHERS = sampling.some(OTHERS, 20)  # each pair of classes twice at least, and of stages three times
BY_NAME, SAME, TWO_GROUPS, WITHOUT = map(sampling.pairs, (BY_NAME, SAME, TWO_GROUPS, WITHOUT))
JOBS = [*BY_NAME, *CUT, *FROZEN, *UNTOLD, *BY_POSITION, *OTHERS, *SAME, *SKIPPED, *TWO_GROUPS, *WITHOUT]
JOBS += WITHOUT_FROZEN


def _restore(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save one engine, restore into another; what was said, and what differs."""
    root = directory / job["id"]
    first = build(job["stage"], job["dtype"], job["groups"][0], job["optimizers"][0])
    step(first, STEPS)
    saved, scale = held(first), getattr(first.optimizer, "loss_scale", None)
    if job["plain"]:
        first.save_checkpoint(str(root))
    else:
        CheckpointManager(root).save(first)
    told: dict[str, Any] = {"verify": [f"{f.path}: {f.problem}" for f in verify(root, deep=True).findings]}
    step(first, STEPS)
    went_on = held(first)
    first.destroy()
    second = build(job["to"], job["dtype"], job["groups"][1], job["optimizers"][1], seed=7)
    manager = CheckpointManager(root)
    before = held(second)
    told |= {
        "preview": _told(lambda: manager.restore(second, dry_run=True)),
        "restore": _told(lambda: manager.restore(second)),
    }
    now = held(second)
    told["untouched"] = differing(before, now) == [] and second.global_steps == 0
    told["differing"] = differing(saved, now)
    told["loss scales"] = [scale, getattr(second.optimizer, "loss_scale", None)]
    told["notes"] = list(manager.restored.notes) if manager.restored else []
    told["step"] = _told(lambda: step(second, STEPS))
    told["differing later"] = differing(went_on, held(second), tolerance=1e-4)
    second.destroy()
    return told


def _told(function: Any) -> str:
    try:
        function()
    except CkptError as error:
        return str(error)
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """By job, what its rank tells."""
    found = each_on_ranks(_restore, JOBS, tmp_path_factory.mktemp("optimizers"))
    return {name: ranks[0] for name, ranks in found.items()}


def _restored(told: dict[str, Any], job: dict[str, Any]) -> set[str]:
    found = told[job["id"]]
    assert (found["preview"], found["restore"], found["step"]) == ("", "", "")
    return set(found["differing"])


def test_no_save_is_called_damaged(told: dict[str, Any]) -> None:
    assert {name: found["verify"] for name, found in told.items() if found["verify"]} == {}


@pytest.mark.parametrize("job", BY_NAME, ids=lambda job: job["id"])
def test_states_go_to_the_parameters_that_they_are_of(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = _restored(told, job)
    if job["groups"] == ("one", "layers"):
        other = {key for key in other if not key.startswith("lr/")}
    assert other == set()


@pytest.mark.parametrize("job", CUT, ids=lambda job: job["id"])
def test_a_group_of_several_keeps_its_own_hyper_parameters(job: dict[str, Any], told: dict[str, Any]) -> None:
    assert _restored(told, job) == {"lr/c.weight"}


@pytest.mark.parametrize("job", FROZEN, ids=lambda job: job["id"])
def test_formerly_frozen_parameters_start_without_moments(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = _restored(told, job)
    assert {key.rpartition("/")[2].partition(".")[0] for key in other} == {"a", "b"}
    assert not any(key.startswith("module/") for key in other)


@pytest.mark.parametrize("job", [*UNTOLD, *OTHERS], ids=lambda job: job["id"])
def test_a_misfit_is_refused_before_the_engine_changes(job: dict[str, Any], told: dict[str, Any]) -> None:
    found = told[job["id"]]
    assert found["preview"] == found["restore"]
    assert "weights_only=True" in found["restore"]
    assert not found["restore"].startswith("raw")
    assert found["untouched"]
    assert found["step"] == ""


@pytest.mark.parametrize("job", BY_POSITION, ids=lambda job: job["id"])
def test_states_without_names_go_by_position_as_with_deepspeed(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = _restored(told, job)
    assert any("the files do not record which parameter" in note for note in told[job["id"]]["notes"])
    layers = {("frozen a", "frozen b"): {"a", "b"}, ("two", "reversed"): {"a", "c"}}.get(job["groups"], set())
    assert {key.rpartition("/")[2].partition(".")[0] for key in other} == layers


@pytest.mark.parametrize("job", SAME, ids=lambda job: job["id"])
def test_every_class_is_restored_into_its_own(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = _restored(told, job)
    if job["stage"] == job["to"]:
        assert other == set()
    else:
        assert not any(key.startswith(("fp32/", "momentum_buffer/", "max_exp_avg_sq/")) for key in other)


@pytest.mark.parametrize("job", SKIPPED, ids=lambda job: job["id"])
def test_a_run_whose_steps_were_all_skipped_is_restored(job: dict[str, Any], told: dict[str, Any]) -> None:
    assert _restored(told, job) == set()
    saved, restored = told[job["id"]]["loss scales"]
    assert saved == restored <= (2**40 if job["stage"] == 0 else 2**39)


@pytest.mark.parametrize("job", TWO_GROUPS, ids=lambda job: job["id"])
def test_several_groups_without_zero_go_on_with_it(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = _restored(told, job)
    assert not any(key.startswith(("fp32/", "exp_avg/", "exp_avg_sq/", "lr/")) for key in other)


@pytest.mark.parametrize("job", WITHOUT, ids=lambda job: job["id"])
def test_what_zero_saved_goes_on_without_it(job: dict[str, Any], told: dict[str, Any]) -> None:
    numbers = ("step/", "mu_product/")  # which the probe does not find under ZeRO
    assert {key for key in _restored(told, job) if not key.startswith(numbers)} == set()
    assert {key for key in told[job["id"]]["differing later"] if not key.startswith(numbers)} == set()


@pytest.mark.parametrize("job", WITHOUT_FROZEN, ids=lambda job: job["id"])
def test_parameters_that_zero_did_not_train_start_without_moments(job: dict[str, Any], told: dict[str, Any]) -> None:
    other = {key for key in _restored(told, job) if not key.startswith("step/")}
    assert {key.rpartition("/")[2].partition(".")[0] for key in other} == {"a", "b"}
    assert not any(key.startswith("module/") for key in other)


def test_states_of_fewer_dimensions_may_belong_to_another_parameter() -> None:
    """States of one number for each row have the shape of a bias, whichever of the two was trained."""
    from ckpttool.integrations.deepspeed.stage0 import _doubt  # imports torch

    checkpoint = open_checkpoint(source("zero0-dp2-fp32"))
    matrix, bias = (p for p in checkpoint.parameters if p.name.startswith("up."))
    assert _doubt(checkpoint, [[bias.name]], [[matrix.name]]) == "shapes"
    assert _doubt(checkpoint, [[matrix.name]], [[bias.name]]) == ""
    assert _doubt(checkpoint, [[matrix.name, bias.name]], [[bias.name, matrix.name]]) == ""
