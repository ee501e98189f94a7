"""How the tests are spread over processes."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

RAY = "tests/under_ray/"
"""Directory of the tests that start Ray clusters."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not followed
    """Sends all tests of a file to one process, so that they share their fixtures; those of Ray to one as well."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return RAY if file.startswith(RAY) else file
