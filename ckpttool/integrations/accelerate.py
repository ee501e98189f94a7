"""Public names of ``ckpttool.extensions.accelerate.api``."""

from ckpttool.extensions.accelerate.api import AcceleratorSaves, prepare

__all__ = ["AcceleratorSaves", "prepare"]
