"""A live DeepSpeed engine: its state to files, and files to its state."""

from __future__ import annotations
