"""How the tests are spread over processes."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from ckpttool.registry import EXTENSIONS

TOGETHER = ("tests/under_ray/", *(f"tests/extensions/{row.name}/" for row in EXTENSIONS))
"""Directories of the tests that start Ray clusters, that share a browser, and whose fork server imports a framework."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not followed
    """Sends all tests of a file to one process, to share their fixtures; those of some directories as well."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return next((directory for directory in TOGETHER if file.startswith(directory)), file)
