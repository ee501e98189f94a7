"""Inspect, verify and convert sharded checkpoints (DeepSpeed ZeRO, FSDP2), without torch or running their code.

The public names are listed in the stub beside this file, for type checkers and for ``__getattr__``. It imports the
module of a name on first use, so that ``import ckpttool`` is fast.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ckpttool._version import __version__ as __version__

_modules: dict[str, str] = {}
"""The module of each public name; filled on first use."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_modules[name]), name)


def __dir__() -> list[str]:
    if not _modules:
        from ckpttool.registry import is_present

        stub = __spec__.loader.get_data(os.path.join(os.path.dirname(__file__), "__init__.pyi")).decode()  # type: ignore[union-attr]
        lines = (line.split() for line in stub.splitlines() if line.startswith("from ") and " as " in line)
        _modules.update({words[3]: words[1] for words in lines if is_present(words[1])})
    return sorted(_modules)
