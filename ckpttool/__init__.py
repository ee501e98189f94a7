"""Inspect, verify and convert DeepSpeed ZeRO checkpoints, without torch and without running code from them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool._version import __version__

if TYPE_CHECKING:
    from ckpttool.analysis.diff import DiffReport
    from ckpttool.analysis.digest import Digest
    from ckpttool.analysis.stats import TensorStats
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.api._run import Written, WrittenFile
    from ckpttool.api.average import AverageReport, average
    from ckpttool.api.consolidate import ConsolidateReport, consolidate
    from ckpttool.api.convert import ConvertReport, convert
    from ckpttool.api.cp import CpReport, cp
    from ckpttool.api.keeping import ls, pin, prune, unpin
    from ckpttool.api.reading import ExtractReport, diff, digest, extract, extract_to_file, inspect, stats, verify
    from ckpttool.api.resume_config import resume_config
    from ckpttool.catalog.entries import Catalog, CatalogEntry
    from ckpttool.catalog.retention import Decision
    from ckpttool.commit.marks import Pin
    from ckpttool.errors import CkptError, ContainerError, LayoutError, PlanError, StorageError
    from ckpttool.integrations.deepspeed.load import load, preview
    from ckpttool.integrations.deepspeed.manager import CheckpointManager
    from ckpttool.integrations.deepspeed.report import LoadReport, SaveReport
    from ckpttool.integrations.torch.rng import derive_rng_state, rng_state, set_rng_state
    from ckpttool.integrations.torch.state_dict import LazyStateDict, load_state_dict
    from ckpttool.model import Checkpoint

_MODULES = {
    "analysis.diff": "DiffReport",
    "analysis.digest": "Digest",
    "analysis.stats": "TensorStats",
    "analysis.verify": "VerifyReport",
    "api._run": "Written WrittenFile",
    "api.average": "AverageReport average",
    "api.consolidate": "ConsolidateReport consolidate",
    "api.convert": "ConvertReport convert",
    "api.cp": "CpReport cp",
    "api.keeping": "ls pin prune unpin",
    "api.reading": "ExtractReport diff digest extract extract_to_file inspect stats verify",
    "api.resume_config": "resume_config",
    "catalog.entries": "Catalog CatalogEntry",
    "catalog.retention": "Decision",
    "commit.marks": "Pin",
    "errors": "CkptError ContainerError LayoutError PlanError StorageError",
    "integrations.deepspeed.load": "load preview",
    "integrations.deepspeed.manager": "CheckpointManager",
    "integrations.deepspeed.report": "LoadReport SaveReport",
    "integrations.torch.rng": "derive_rng_state rng_state set_rng_state",
    "integrations.torch.state_dict": "LazyStateDict load_state_dict",
    "model": "Checkpoint",
}
"""Public names by module. ``__getattr__`` imports a module on first use, so that ``import ckpttool`` stays fast.

Type checkers read the imports above and ``__all__``; a test compares all three.
"""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AverageReport",
    "Catalog",
    "CatalogEntry",
    "Checkpoint",
    "CheckpointManager",
    "CkptError",
    "ConsolidateReport",
    "ContainerError",
    "ConvertReport",
    "CpReport",
    "Decision",
    "DiffReport",
    "Digest",
    "ExtractReport",
    "LayoutError",
    "LazyStateDict",
    "LoadReport",
    "Pin",
    "PlanError",
    "SaveReport",
    "StorageError",
    "TensorStats",
    "VerifyReport",
    "Written",
    "WrittenFile",
    "__version__",
    "average",
    "consolidate",
    "convert",
    "cp",
    "derive_rng_state",
    "diff",
    "digest",
    "extract",
    "extract_to_file",
    "inspect",
    "load",
    "load_state_dict",
    "ls",
    "pin",
    "preview",
    "prune",
    "resume_config",
    "rng_state",
    "set_rng_state",
    "stats",
    "unpin",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
