"""Put the manual pages into the wheel, where ``tests/versions/distributions.py`` has written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface[Any]):
    """Add ``man/*.1``; a wheel that is built without them lacks them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the place of each page in an environment."""
        for page in sorted(Path(self.root, "man").glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"
