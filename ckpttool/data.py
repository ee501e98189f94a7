"""Public names of ``ckpttool.extensions.sampler.api``: resume within a data set, on any number of ranks."""

from ckpttool.extensions.sampler.api import CurriculumPosition, ResumableLoader, ResumableSampler, batches_to_skip

__all__ = ["CurriculumPosition", "ResumableLoader", "ResumableSampler", "batches_to_skip"]
