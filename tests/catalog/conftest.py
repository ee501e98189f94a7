"""Fixtures of the tests of old checkpoints: the bucket of the tests of saving."""

from __future__ import annotations

from tests.saving.conftest import bucket as bucket
from tests.saving.conftest import small_parts as small_parts
