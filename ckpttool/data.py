"""Resume within a data set, on any number of ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool.integrations.torch.sampler import ResumableSampler

if TYPE_CHECKING:
    from ckpttool.integrations.torch.data_positions import CurriculumPosition, batches_to_skip
    from ckpttool.integrations.torch.resumable_loader import ResumableLoader

__all__ = ["CurriculumPosition", "ResumableLoader", "ResumableSampler", "batches_to_skip"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "resumable_loader" if name == "ResumableLoader" else "data_positions"
    return getattr(importlib.import_module(f"ckpttool.integrations.torch.{module}"), name)
