"""Calls that need torch, where it is not installed: ``make quick`` runs them so."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.arguments import check_installed
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = source("zero2-dp2-bf16")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
@pytest.mark.parametrize(
    "call",
    [
        ckpttool.rng_state,
        lambda: ckpttool.load(None, NAME),
        lambda: ckpttool.extract(NAME, "up.weight", framework="torch"),
        lambda: ckpttool.load_state_dict(NAME)["up.weight"],
        lambda: ckpttool.CheckpointManager("root").restore(None),
    ],
    ids=["rng_state", "load", "extract", "load_state_dict", "CheckpointManager"],
)
def test_the_error_names_the_extra(call: Callable[[], Any]) -> None:
    with pytest.raises(ModuleNotFoundError, match=r" needs torch: pip install 'ckpttool\[torch\]'$"):
        call()


def test_a_package_that_is_installed_is_enough() -> None:
    check_installed("the call", "numpy")
    with pytest.raises(ModuleNotFoundError) as caught:
        check_installed("the call", "no_such_package")
    assert str(caught.value) == "the call needs no_such_package: pip install 'ckpttool[no_such_package]'"
    assert caught.value.name == "no_such_package"
