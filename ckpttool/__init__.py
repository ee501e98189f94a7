"""See, check and convert DeepSpeed ZeRO checkpoints, without torch and without running what is in them."""

from __future__ import annotations

from ckpttool._version import __version__

__all__ = ["__version__"]
