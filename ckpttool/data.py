"""Public names of what resumes within a data set, on any number of ranks; ``integrations.torch`` has the code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool.integrations.torch.sampler import ResumableSampler

if TYPE_CHECKING:
    from ckpttool.integrations.torch.data_positions import CurriculumPosition, ResumableLoader, batches_to_skip

__all__ = ["CurriculumPosition", "ResumableLoader", "ResumableSampler", "batches_to_skip"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ckpttool.integrations.torch.data_positions"), name)
