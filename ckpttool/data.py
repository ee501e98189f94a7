"""Read a data set on from any position on any number of ranks, and adapters for the loaders of other packages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool.integrations.torch.sampler import ResumableSampler

if TYPE_CHECKING:
    from ckpttool.integrations.torch.data_positions import (
        CountedShard,
        CurriculumPosition,
        StatefulLoaderPosition,
        batches_to_skip,
    )
    from ckpttool.integrations.torch.resumable_loader import ResumableLoader

__all__ = [
    "CountedShard", "CurriculumPosition", "ResumableLoader", "ResumableSampler", "StatefulLoaderPosition",
    "batches_to_skip",
]  # fmt: skip

_MODULES = {"ResumableLoader": "resumable_loader"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "data_positions")
    return getattr(importlib.import_module(f"ckpttool.integrations.torch.{module}"), name)
