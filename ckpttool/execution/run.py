"""Choose the executor of a plan: local files, streaming or distributed tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.execution import local, streaming
from ckpttool.execution.output.directory import DirectoryOutput

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckpttool.execution.distributed import Workers
    from ckpttool.execution.output.base import Output
    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import CopyPlan
    from ckpttool.units import Advance, Progress


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a plan."""

    jobs: int | None
    """Threads, of each worker if there are workers; None for the executor's default."""
    memory: int
    """Bytes of parts in flight."""
    progress: Progress | None = None
    """Called with (bytes done, bytes in all)."""
    checks: ReadChecks | None = None
    """Compares the bytes read with recorded checksums; None to copy without."""
    workers: AbstractContextManager[Workers] | None = None
    """Worker processes; None to run in this process."""


def run(
    plan: CopyPlan, output: Output, *, jobs: int | None, memory: int, advance: Advance,
    checks: ReadChecks | None = None, workers: Workers | None = None,
) -> int:  # fmt: skip
    """Write every file of a plan.

    Args:
        plan: The plan.
        output: The output.
        jobs: Threads, of each worker if there are workers; None for the executor's default.
        memory: Bytes of parts in flight; copies between local files ignore it.
        advance: Called with the number of bytes written since the last call.
        checks: Compares the bytes read with recorded checksums; None to copy without.
        workers: Worker processes; None to run in this process.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        ChecksumError: A source does not match its recorded checksum.
        LayoutError: A consistency check of the plan failed.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    if workers is not None:
        from ckpttool.execution import distributed

        return distributed.run(plan, output, workers, jobs=jobs, memory=memory, advance=advance, checks=checks)
    if _is_local(plan, output):
        assert isinstance(output, DirectoryOutput)  # noqa: S101  (``_is_local`` checks it)
        return local.run(plan, output.directory, jobs=jobs, advance=advance, journal=output.journal, checks=checks)
    return streaming.run(plan, output, jobs=jobs, memory=memory, advance=advance, checks=checks)


def nbytes_read(plan: CopyPlan, *, to_disk: bool, workers: object) -> int:
    """Return the number of source bytes that ``run`` reads.

    Args:
        plan: The plan.
        to_disk: Whether the output is on local disk.
        workers: As for ``run``.
    """
    shares_reads = to_disk and workers is None and not _reads_remote(plan)
    return local.nbytes_read(plan) if shares_reads else plan.nbytes_read


def _is_local(plan: CopyPlan, output: Output) -> bool:
    return isinstance(output, DirectoryOutput) and not _reads_remote(plan)


def _reads_remote(plan: CopyPlan) -> bool:
    return any(file.storage.remote for file in plan.sources)
