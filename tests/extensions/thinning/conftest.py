"""Fixtures of the tests of old checkpoints."""

from __future__ import annotations

from tests.catalog.conftest import bucket as bucket
from tests.catalog.conftest import rewound as rewound
from tests.catalog.conftest import small_parts as small_parts
