"""Runs that are killed at random moments, all ranks at once, lose nothing but time."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.extensions.accelerate import accelerate_runs
from tests.frameworks.kills import KilledRuns

pytestmark = [pytest.mark.deepspeed, pytest.mark.thorough]


class TestKills(KilledRuns):
    module = accelerate_runs
    options: ClassVar = {
        "automatic": True,
        "auto": True,
        "every": 1,
        "prepare": {"async_save": True},
    }
