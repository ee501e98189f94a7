"""``resume_config`` keeps the global batch on another number of ranks, or names numbers that would."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.model.batch import configured_batch, equal_batch
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_the_global_batch_is_kept_and_the_micro_batch_does_not_grow() -> None:
    for whole, micro, ranks in itertools.product((1, 12, 24, 60), (1, 2, 3, 4, 7), range(1, 9)):
        config = {GLOBAL: whole, MICRO: micro, "bf16": {"enabled": True}}
        if whole % ranks:
            with pytest.raises(ckpttool.CkptError, match=f"which does not divide the global batch of {whole} samples"):
                ckpttool.resume_config(config, world_size=ranks)
            continue
        made = ckpttool.resume_config(config, world_size=ranks)
        assert made[GLOBAL] == whole == made[MICRO] * made[ACCUMULATION] * ranks
        assert made[MICRO] <= micro
        better = [n for n in range(made[MICRO] + 1, micro + 1) if (whole // ranks) % n == 0]
        assert not better
        assert made["bf16"] == config["bf16"]
        assert config == {GLOBAL: whole, MICRO: micro, "bf16": {"enabled": True}}


def test_numbers_that_fit_are_named() -> None:
    for ranks in (5, 30):
        with refused(ckpttool.CkptError):
            ckpttool.resume_config({GLOBAL: 24}, world_size=ranks)


def test_the_checkpoint_decides(tmp_path: Path) -> None:
    src = source("zero2-dp2-bf16")  # micro batch 2 on 2 ranks
    assert ckpttool.resume_config({}, world_size=1, src=src) == {GLOBAL: 4, MICRO: 2, ACCUMULATION: 2}
    assert ckpttool.resume_config({GLOBAL: 100}, world_size=4, src=src)[GLOBAL] == 4
    assert ckpttool.resume_config({}, world_size=3, src=src, train_batch_size=9)[MICRO] == 1
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({GLOBAL: 8, ACCUMULATION: 2, MICRO: "auto"}))
    assert ckpttool.resume_config(path, world_size=2) == {GLOBAL: 8, MICRO: 2, ACCUMULATION: 2}


def test_errors(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ({}, "has no train_batch_size: the global batch of the saved run is unknown"),
        ({GLOBAL: "auto"}, "has no train_batch_size"),
        ({GLOBAL: 8, "elasticity": {"enabled": True}}, "has elasticity enabled"),
        (tmp_path / "nowhere.json", "No such file"),
    ]
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    wrong += [(tmp_path / "broken.json", "is not JSON"), (tmp_path / "list.json", "not an object")]
    for config, words in wrong:
        with pytest.raises(ckpttool.CkptError, match=words):
            ckpttool.resume_config(config, world_size=2)
    with refused(ckpttool.CkptError):
        ckpttool.resume_config({GLOBAL: 8}, world_size=0)


def test_what_a_configuration_determines() -> None:
    """As DeepSpeed completes it."""
    cases: list[tuple[dict[str, Any], int | None, tuple[Any, ...] | None]] = [
        ({GLOBAL: 12}, 3, (12, 4, 1)),
        ({GLOBAL: 12, ACCUMULATION: 2}, 3, (12, 2, 2)),
        ({GLOBAL: 12, MICRO: 2}, 3, (12, 2, 2)),
        ({MICRO: 2}, 3, (6, 2, 1)),
        ({MICRO: 2, ACCUMULATION: 5}, 3, (30, 2, 5)),
        ({MICRO: 2}, None, None),
        ({GLOBAL: 12}, None, (12, None, None)),
        ({ACCUMULATION: 2}, 3, None),
        ({GLOBAL: True, MICRO: 0}, 3, None),
    ]
    for config, ranks, expected in cases:
        found = configured_batch(config, ranks)
        assert (None if found is None else (found.whole, found.micro, found.accumulation)) == expected, config
    assert equal_batch(2, 4, 1) is None
