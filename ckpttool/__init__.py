"""See, check and convert DeepSpeed ZeRO checkpoints, without torch and without running what is in them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool._version import __version__

if TYPE_CHECKING:
    from ckpttool.analysis.diff import DiffReport
    from ckpttool.analysis.digest import Digest
    from ckpttool.analysis.stats import TensorStats
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.api.consolidate import CopyReport, consolidate
    from ckpttool.api.convert import ConvertReport, convert
    from ckpttool.api.cp import TransferReport, cp
    from ckpttool.api.extract import ExtractReport, extract, extract_to_file
    from ckpttool.api.reading import diff, digest, inspect, stats, verify
    from ckpttool.api.roots import ls, prune
    from ckpttool.catalog.entries import Catalog, CatalogEntry
    from ckpttool.catalog.retention import Decision
    from ckpttool.errors import CkptError, ContainerError, LayoutError, PlanError, StorageError
    from ckpttool.integrations.deepspeed.load import load, preview
    from ckpttool.integrations.deepspeed.manager import CheckpointManager, SaveReport
    from ckpttool.integrations.deepspeed.report import LoadReport
    from ckpttool.integrations.torch.state_dict import LazyStateDict, load_state_dict
    from ckpttool.model import Checkpoint

# Attached when first asked for, so that `import ckpttool` costs next to nothing.
_HOMES = {
    "CopyReport": "api.consolidate", "consolidate": "api.consolidate",
    "ConvertReport": "api.convert", "convert": "api.convert",
    "TransferReport": "api.cp", "cp": "api.cp",
    "ExtractReport": "api.extract", "extract": "api.extract", "extract_to_file": "api.extract",
    "diff": "api.reading", "digest": "api.reading", "inspect": "api.reading", "stats": "api.reading",
    "verify": "api.reading",
    "ls": "api.roots", "prune": "api.roots",
    "Catalog": "catalog.entries", "CatalogEntry": "catalog.entries",
    "CheckpointManager": "integrations.deepspeed.manager", "SaveReport": "integrations.deepspeed.manager",
    "Decision": "catalog.retention",
    "DiffReport": "analysis.diff",
    "Digest": "analysis.digest",
    "CkptError": "errors", "ContainerError": "errors", "LayoutError": "errors", "PlanError": "errors",
    "StorageError": "errors",
    "load": "integrations.deepspeed.load", "preview": "integrations.deepspeed.load",
    "LoadReport": "integrations.deepspeed.report",
    "LazyStateDict": "integrations.torch.state_dict", "load_state_dict": "integrations.torch.state_dict",
    "Checkpoint": "model",
    "TensorStats": "analysis.stats",
    "VerifyReport": "analysis.verify",
}  # fmt: skip

__all__ = [
    "Catalog", "CatalogEntry", "Checkpoint", "CheckpointManager", "CkptError", "ContainerError", "ConvertReport",
    "CopyReport", "Decision", "DiffReport", "Digest", "ExtractReport", "LayoutError", "LazyStateDict", "LoadReport",
    "PlanError", "SaveReport", "StorageError", "TensorStats", "TransferReport", "VerifyReport", "__version__",
    "consolidate", "convert", "cp", "diff", "digest", "extract", "extract_to_file", "inspect", "load",
    "load_state_dict", "ls", "preview", "prune", "stats", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
