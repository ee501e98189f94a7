"""Results of all runs of Ray Train; they share one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests import forked
from tests.under_ray import driver
from tests.under_ray.driver import END

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Trained:
    """A directory that holds the facts of all runs."""

    directory: Path

    def of(self, *names: str) -> Path:
        """The directory, if these runs have ended as they should."""
        for name in names:
            failed, done = self.directory / f"{name}.failed", self.directory / f"{name}.printed"
            assert not failed.exists(), failed.read_text()
            assert done.exists(), f"{name} was not run"
        return self.directory

    def printed(self, name: str) -> list[str]:
        """Output of each command of an example."""
        return (self.of(name) / f"{name}.printed").read_text().split(END)[:-1]


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The runs that the modules of the chosen tests name as ``RAY_RUNS``."""
    directory = tmp_path_factory.mktemp("trained")
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    jobs = [
        {"name": name, "run": run, "arguments": arguments}
        for module in modules
        for name, (run, *arguments) in getattr(module, "RAY_RUNS", {}).items()
    ]
    forked.call(driver.run, jobs, directory)
    return Trained(directory)
