"""A wrong argument of a train loop gives one clear error; accepted client state comes back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

REFUSED = {
    "module": "names that DeepSpeed uses in the same file: module",
    "counters": "names that DeepSpeed uses in the same file: dp_world_size, global_steps",
    "quantized": "could not be read again: pickle refused",
    "nested": "could not be read again: its pickle nests containers more than 200 deep",
    "huge number": "could not be read again: pickle refused",
    "list": "client_state: is a list, not a mapping",
    "names": "client_state: has the name 3, which is not text",
    "metrics none": "metrics: are not a mapping of names to numbers",
    "metrics huge": "metrics: are not a mapping of names to numbers",
    "long tag": "ArgumentError: tag: cannot be 'xxxx",
    "tag of a script": "ArgumentError: tag: cannot be 'zero_to_fp32.py'",
    "root is a file, save": "is not a directory",
    "root is a file, restore": "is a file; pass a directory",
    "source": "ArgumentError: src: is a NoneType",
    "weights": "ArgumentError: src: is a NoneType",
    "into a dict": "cannot be loaded into a dict; pass a torch.nn.Module",
    "keep last": "ArgumentError: keep_last: is 1.5, not a whole number of at least 1",
    "signal": "ArgumentError: signals: has SIGKILL, which no program can handle",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("inputs")
    forked.start("tests.deepspeed.inputs", [], directory)
    found: dict[str, Any] = json.loads((directory / "told.json").read_text())
    return found


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, told: dict[str, Any]) -> None:
    assert REFUSED[what] in told[what]
    assert "\n" not in told[what]


def test_the_predecessor_is_still_there(told: dict[str, Any]) -> None:
    assert told["restored"] == {"good": 1}
    assert told["steps"] == 1


def test_accepted_client_state_comes_back(told: dict[str, Any]) -> None:
    assert told["accepted"]


def test_client_state_of_deepspeed_may_have_any_keys(told: dict[str, Any]) -> None:
    assert told["keys"] == ["nan", "2", "'two'"]


def test_a_signal_can_be_forgotten(told: dict[str, Any]) -> None:
    assert told["preempted"] == [True, True, False]


def test_signal_handlers_are_restored(told: dict[str, Any]) -> None:
    assert told["handlers"] == {"within": True, "behind": True, "noted": True, "failed": True}


def test_accumulated_gradients_are_noted(told: dict[str, Any]) -> None:
    assert told["pending"] == ["micro batches were accumulated since the last step: the load drops their gradients"]
