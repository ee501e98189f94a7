"""See, check and convert DeepSpeed ZeRO checkpoints, without torch and without running what is in them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool._version import __version__

if TYPE_CHECKING:
    from ckpttool.api import CopyReport, consolidate, inspect, verify
    from ckpttool.errors import CkptError, ContainerError, LayoutError, PlanError, StorageError
    from ckpttool.model import Checkpoint
    from ckpttool.verification import VerifyReport

# Attached when first asked for, so that `import ckpttool` costs next to nothing.
_HOMES = {
    "CopyReport": "api", "consolidate": "api", "inspect": "api", "verify": "api",
    "CkptError": "errors", "ContainerError": "errors", "LayoutError": "errors", "PlanError": "errors",
    "StorageError": "errors", "Checkpoint": "model", "VerifyReport": "verification",
}  # fmt: skip

__all__ = [
    "Checkpoint", "CkptError", "ContainerError", "CopyReport", "LayoutError", "PlanError", "StorageError",
    "VerifyReport", "__version__", "consolidate", "inspect", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
