"""Damage a checkpoint's folder as a kill, or a disk, does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckpttool.storage import MANIFEST, MARK

if TYPE_CHECKING:
    from pathlib import Path


def flip(folder: Path) -> None:
    """Change one bit of the weights."""
    file = next(folder.rglob("*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def tear(folder: Path) -> None:
    """Make a commit the folder of a killed save."""
    (manifest,) = folder.glob(f"*/{MANIFEST}")
    manifest.unlink()
    (manifest.parent / MARK).write_text(json.dumps({"key": "save 0", "files": []}))
    (folder / "latest").unlink()
