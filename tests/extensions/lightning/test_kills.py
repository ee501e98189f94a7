"""Runs that are killed at random moments, all ranks at once, lose nothing but time."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.extensions.lightning import lightning_runs
from tests.frameworks.kills import COUNT, KilledRuns

pytestmark = [pytest.mark.deepspeed, pytest.mark.thorough]


class TestKills(KilledRuns):
    module = lightning_runs
    options: ClassVar = {
        "load": "newest",
        "keep": 3,
        "saves": {"async_save": True},
    }
    steps = 32 * COUNT
    # Lightning saves at the end of an epoch of 4 steps; the save of the second one waits until the first is committed.
    first = 3 * 4 + 2
