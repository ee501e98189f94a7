"""One engine with wrong arguments of a train loop."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests import forked


def main(directory: Path) -> None:
    """Try everything on one rank."""
    import deepspeed  # noqa: F401  before it is forked

    forked.run_ranks(1, lambda: _rank(directory))


def _rank(directory: Path) -> None:
    import torch
    from recipes import common

    import ckpttool
    from ckpttool import CheckpointManager
    from tests.deepspeed.optimizers import build, step

    common.start(seed=1)
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
    told: dict[str, Any] = {name: _told(function) for name, function in asked.items()}
    told["restored"], told["steps"] = manager.restore(engine), engine.global_steps
    state = {"deep": json.loads("[" * 150 + "]" * 150), "number": 1 << 4000, "set": {1, 2}, "type": torch.float16}
    state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}  # as Megatron-DeepSpeed
    manager.save(engine, tag="fine", client_state=state)
    told["accepted"] = manager.restore(engine) == state
    engine.save_checkpoint(str(directory / "plain"), client_state={float("nan"): 1, 2: 3, "two": 4})
    told["keys"] = [repr(key) for key in load(engine, directory / "plain").client_state]
    watching: Any = CheckpointManager(root, signals=[signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    told["preempted"] = [watching.preempted(), watching.preempted(reset=True), watching.preempted()]
    told["handlers"] = _handlers(root)
    engine.destroy()
    engine = build(2, "bf16", "two", "adamw", accumulation=2)
    step(engine, 1)
    manager.restore(engine)
    told["pending"] = [n for n in manager.restored.notes if "accumulated" in n]
    (directory / "told.json").write_text(json.dumps(told))
    common.leave()


def _handlers(root: str) -> dict[str, bool]:
    """Whether handlers are replaced within a block alone, and not where a manager could not be made."""
    import contextlib

    from ckpttool import CheckpointManager

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


def _told(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
