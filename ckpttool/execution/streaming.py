"""Run a plan through memory, part by part: for remote sources or outputs.

Each part of a file is one task: it requests its source ranges at once, assembles the part in memory and writes it.
Memory is bounded by the parts in flight, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.arguments import checked_size
from ckpttool.concurrency import MemoryBudget, default_jobs, in_threads
from ckpttool.execution.assemble import PartAssembler
from ckpttool.execution.check_copies import failed_checks
from ckpttool.execution.sources import Sources
from ckpttool.plan import ranges_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.execution.output.base import Output
    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import ConsistencyChecks, CopyPlan, TargetFile
    from ckpttool.storage import Writer
    from ckpttool.units import Advance

    Note = Callable[[TargetFile, int, memoryview], None]

MEMORY = 256 << 20
"""Default number of bytes of parts in flight."""


def memory_bytes(memory: int | str | None) -> int:
    """Parse the argument ``memory``: a number of bytes, a text like "256MB", or None for MEMORY.

    Raises:
        ArgumentError: The text is not a size.
    """
    return MEMORY if memory is None else checked_size("memory", memory)


def run(
    plan: CopyPlan,
    output: Output,
    *,
    jobs: int | None,
    memory: int,
    advance: Advance,
    checks: ReadChecks | None = None,
    note: Note | None = None,
) -> int:
    """Write every file of a plan.

    Args:
        plan: The plan.
        output: The output.
        jobs: Threads; None for REMOTE_JOBS.
        memory: Bytes of parts in flight; one part is always allowed.
        advance: Called with the number of bytes written since the last call.
        checks: Compares the bytes read with recorded checksums; None to copy without.
        note: Called with each part that is written: its file, its first byte and its content.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        ChecksumError: A source does not match its recorded checksum; discard the output.
        LayoutError: A consistency check of the plan failed; discard the output.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources, checks) as sources:
        budget = MemoryBudget(memory)
        tasks = _tasks(plan, sources, output, budget, advance, checks, note)
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(remote=True))) as results:
            overflowed = sum(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return overflowed


def _tasks(
    plan: CopyPlan, sources: Sources, output: Output, budget: MemoryBudget, advance: Advance,
    checks: ReadChecks | None, note: Note | None,
) -> Iterator[Callable[[], int]]:  # fmt: skip
    if plan.consistency is not None:
        # First, but in parallel with the copies: the many small requests of the checks cost round trips.
        yield partial(_check_copies, plan.consistency, sources)
    for file in plan.files:
        if output.has(file):
            advance(file.nbytes)
            if checks is not None:
                checks.require_all(ranges_read(plan, file))
            continue
        target, assembler = output.begin(file), PartAssembler(plan, file, sources)
        yield partial(_open, target)
        skipped = False
        for start in range(0, max(file.nbytes, 1), target.part_bytes):
            end = min(start + target.part_bytes, file.nbytes)
            if target.has(start, end - start):
                advance(end - start)
                skipped = True
            else:
                # Acquired here, in order: a target that takes parts in order waits for earlier parts, and these must
                # not wait for memory that later parts hold.
                acquired = budget.acquire(assembler.cost(end - start))
                release = partial(budget.release, acquired)
                noted = None if note is None else partial(note, file, start)
                yield partial(_write_part, assembler, target, start, end, release, advance, noted)
        if skipped and checks is not None:
            checks.require_all(ranges_read(plan, file))


def _check_copies(checks: ConsistencyChecks, sources: Sources) -> int:
    for problem in failed_checks(checks, advance=lambda _: None, sources=sources):
        raise problem
    return 0


def _open(target: Writer) -> int:
    target.open()
    return 0


def _write_part(
    assembler: PartAssembler, target: Writer, start: int, end: int, release: Callable[[], None], advance: Advance,
    noted: Callable[[memoryview], None] | None,
) -> int:  # fmt: skip
    try:
        data, overflowed = assembler.assemble(start, end)
        if noted is not None:
            noted(data)
        target.write(start, data)
    except BaseException as error:
        target.fail(error)
        raise
    finally:
        release()
    advance(end - start)
    return overflowed
