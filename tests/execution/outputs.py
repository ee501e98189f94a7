"""Runs of plans into directories."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpttool.execution.output import DirectoryOutput
from ckpttool.execution.run import Work, run
from ckpttool.storage.safe_files import Directory

if TYPE_CHECKING:
    from ckpttool.execution.checks import ReadChecks
    from ckpttool.execution.copy import Sizes
    from ckpttool.plan import CopyPlan
    from ckpttool.storage.journal import Journal
    from ckpttool.units import Advance


def run_into(
    plan: CopyPlan,
    directory: Directory | str,
    *,
    jobs: int | None = 1,
    advance: Advance = lambda _: None,
    journal: Journal | None = None,
    checks: ReadChecks | None = None,
    sizes: Sizes | None = None,
    file_system: str | None = None,
) -> int:
    """Write the files of a plan into an existing directory; return the number of elements cast to infinity."""
    opened = Directory.open(directory) if isinstance(directory, str) else contextlib.nullcontext(directory)
    with opened as into, DirectoryOutput(into, journal, file_system=file_system) as output:
        return run(Work(plan, output, advance, checks), jobs=jobs, sizes=sizes)
