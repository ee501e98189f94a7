"""Public names of ``ckpttool.integrations.torch.sampler``: resume within a data set, on any number of ranks."""

from ckpttool.integrations.torch.sampler import CurriculumPosition, ResumableLoader, ResumableSampler, batches_to_skip

__all__ = ["CurriculumPosition", "ResumableLoader", "ResumableSampler", "batches_to_skip"]
