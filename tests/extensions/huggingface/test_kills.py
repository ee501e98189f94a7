"""Runs that are killed at random moments, all ranks at once, lose nothing but time."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.extensions.huggingface import trainer_runs
from tests.frameworks.kills import KilledRuns

pytestmark = [pytest.mark.deepspeed, pytest.mark.thorough]


class TestKills(KilledRuns):
    module = trainer_runs
    options: ClassVar = {
        "save_steps": 1,
        "learning_rate": 0.002,
        "arguments": {"save_total_limit": 3},
        "callback": {"auto_resume": True, "async_save": True},
    }
