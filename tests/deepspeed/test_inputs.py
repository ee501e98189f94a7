"""A wrong argument of a train loop gives one clear error; accepted client state comes back."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import CheckpointManager
from tests.deepspeed.engines import build, step, told
from tests.forked import on_ranks

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


@on_ranks(1)
def _tries(directory: Path) -> dict[str, Any]:
    """What is said to wrong arguments, and what comes of unusual ones."""
    import torch

    engine = build(2, "bf16", "two", "adamw")
    step(engine, 1)
    root = str(directory / "root")
    manager: Any = CheckpointManager(root, keep_last=1)
    manager.save(engine, tag="good", client_state={"good": 1})
    nested: Any = 1
    for _ in range(250):
        nested = [nested]
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    file = directory / "file"
    file.write_text("")
    at_file: Any = CheckpointManager(file)
    save = functools.partial(manager.save, engine, tag="bad")
    make: Any = CheckpointManager
    load: Any = ckpttool.load
    weights: Any = ckpttool.load_state_dict
    asked = {
        "module": lambda: save(client_state={"module": 1}),
        "counters": lambda: save(client_state={"global_steps": 9, "dp_world_size": 3}),
        "quantized": lambda: save(client_state={"q": quantized}),
        "nested": lambda: save(client_state={"n": nested}),
        "huge number": lambda: save(client_state={"n": 1 << 100_000}),
        "list": lambda: save(client_state=[1, 2]),
        "names": lambda: save(client_state={3: 4}),
        "metrics none": lambda: save(metrics={"loss": None}),
        "metrics huge": lambda: save(metrics={"loss": 10**400}),
        "long tag": lambda: manager.save(engine, tag="x" * 300),
        "tag of a script": lambda: manager.save(engine, tag="zero_to_fp32.py"),
        "root is a file, save": lambda: at_file.save(engine),
        "root is a file, restore": lambda: at_file.restore(engine),
        "source": lambda: load(engine, None),
        "weights": lambda: weights(None),
        "into a dict": lambda: weights(root).load_into({}),
        "keep last": lambda: make(root, keep_last=1.5),
        "signal": lambda: make(root, signals=[9]),
    }
    found: dict[str, Any] = {name: told(function) for name, function in asked.items()}
    found["restored"], found["steps"] = manager.restore(engine), engine.global_steps
    state = {"deep": json.loads("[" * 150 + "]" * 150), "number": 1 << 4000, "set": {1, 2}, "type": torch.float16}
    state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}  # as Megatron-DeepSpeed
    manager.save(engine, tag="fine", client_state=state)
    found["accepted"] = manager.restore(engine) == state
    engine.save_checkpoint(str(directory / "plain"), client_state={float("nan"): 1, 2: 3, "two": 4})
    found["keys"] = [repr(key) for key in load(engine, directory / "plain").client_state]
    watching: Any = CheckpointManager(root, signals=[signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    found["preempted"] = [watching.preempted(), watching.preempted(reset=True), watching.preempted()]
    found["handlers"] = _handlers(root)
    engine.destroy()
    engine = build(2, "bf16", "two", "adamw", accumulation=2)
    step(engine, 1)
    manager.restore(engine)
    found["pending"] = [n for n in manager.restored.notes if "accumulated" in n]
    return found


def _handlers(root: str) -> dict[str, bool]:
    """Whether handlers are replaced within a block alone, and not where a manager could not be made."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    own = signal.getsignal(signal.SIGUSR2)
    with CheckpointManager(root, signals=[signal.SIGUSR2]) as manager:
        found = {"within": signal.getsignal(signal.SIGUSR2) != own}
        os.kill(os.getpid(), signal.SIGUSR2)
        found["noted"] = manager.preempted() and seen == [signal.SIGUSR2]
    found["behind"] = signal.getsignal(signal.SIGUSR2) == own
    with contextlib.suppress(ValueError):
        CheckpointManager(root, signals=[signal.SIGUSR2, signal.SIGKILL])
    return found | {"failed": signal.getsignal(signal.SIGUSR2) == own}


@pytest.fixture(scope="module")
def found(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    (one,) = _tries(tmp_path_factory.mktemp("inputs"))
    return one


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, found: dict[str, Any]) -> None:
    assert REFUSED[what] in found[what]
    assert "\n" not in found[what]


def test_the_predecessor_is_still_there(found: dict[str, Any]) -> None:
    assert found["restored"] == {"good": 1}
    assert found["steps"] == 1


def test_accepted_client_state_comes_back(found: dict[str, Any]) -> None:
    assert found["accepted"]


def test_client_state_of_deepspeed_may_have_any_keys(found: dict[str, Any]) -> None:
    assert found["keys"] == ["nan", "2", "'two'"]


def test_a_signal_can_be_forgotten(found: dict[str, Any]) -> None:
    assert found["preempted"] == [True, True, False]


def test_signal_handlers_are_restored(found: dict[str, Any]) -> None:
    assert found["handlers"] == {"within": True, "behind": True, "noted": True, "failed": True}


def test_accumulated_gradients_are_noted(found: dict[str, Any]) -> None:
    assert found["pending"] == ["micro batches were accumulated since the last step: the load drops their gradients"]
