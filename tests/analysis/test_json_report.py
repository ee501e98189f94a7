"""A checkpoint as plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import ckpttool
from ckpttool.analysis.json_report import MAX_VALUES, describe
from tests import damage
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_long_client_state_cuts_nothing_else() -> None:
    checkpoint = ckpttool.inspect(source("zero2-dp2-bf16"))
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    long = {"losses": [0.5] * (2 * MAX_VALUES)}
    told = describe(replace(checkpoint, client_state=long, ds_config=config, scheduler={"last_epoch": 3}))
    assert told["ds_config"] == config
    assert told["scheduler"] == {"last_epoch": 3}
    assert len(told["client_state"]["losses"]) <= MAX_VALUES


def test_keys_that_are_equal_as_text_are_all_shown(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    damage.edit_model(root, lambda file: file.update(ids={1: "a", "1": "b", 2: "c", None: "d", "None": "e"}))
    shown = describe(ckpttool.inspect(root))["client_state"]["ids"]
    assert shown == {"1 (int)": "a", "1": "b", "2": "c", "None (NoneType)": "d", "None": "e"}
