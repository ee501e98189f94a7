"""Proofs need torch: the error says so where it is not installed, as under ``make quick``."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
@pytest.mark.parametrize(
    "call",
    [lambda: ckpttool.prove(None, source("zero2-dp2-bf16")), lambda: ckpttool.live_digest(None)],
    ids=["prove", "live_digest"],
)
def test_the_error_names_the_extra(call: Callable[[], Any]) -> None:
    with pytest.raises(ModuleNotFoundError, match=r" needs torch: pip install 'ckpttool\[torch\]'$"):
        call()
