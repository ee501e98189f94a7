"""A checkpoint as plain values."""

from __future__ import annotations

from dataclasses import replace

import ckpttool
from ckpttool.analysis.description import MAX_VALUES, describe
from tests.truth import source


def test_a_long_client_state_cuts_nothing_else() -> None:
    checkpoint = ckpttool.inspect(source("zero2-dp2-bf16"))
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    long = {"losses": [0.5] * (2 * MAX_VALUES)}
    told = describe(replace(checkpoint, client_state=long, ds_config=config, scheduler={"last_epoch": 3}))
    assert told["ds_config"] == config
    assert told["scheduler"] == {"last_epoch": 3}
    assert len(told["client_state"]["losses"]) <= MAX_VALUES
