"""Runs a plan between storages that are read by requests or written in parts.

Each window of a file is one task: what it needs is asked for at once, put together in memory and written. Memory is the
windows in flight, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.concurrency import MemoryBudget, default_jobs, in_threads
from ckpttool.execution.assemble import Windows
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.sources import Sources
from ckpttool.plan import ranges_read
from ckpttool.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.execution.output.base import Output, Target
    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import ConsistencyChecks, CopyPlan
    from ckpttool.units import Advance

MEMORY = 256 << 20
"""Bytes that windows in flight take together, unless another number is asked for."""


def memory_bytes(memory: int | str | None) -> int:
    """What may be in flight: bytes, a text like "256MB", or None for MEMORY.

    Raises:
        ValueError: It is no size.
    """
    return MEMORY if memory is None else parse_size(str(memory))


def run(
    plan: CopyPlan,
    output: Output,
    *,
    jobs: int | None,
    memory: int,
    advance: Advance,
    checks: ReadChecks | None = None,
) -> int:
    """Write every file of a plan.

    Args:
        plan: What to write.
        output: Where to.
        jobs: Threads; None for REMOTE_JOBS.
        memory: Bytes that windows in flight may take together; one is always allowed.
        advance: Told of bytes written.
        checks: Compares what is read with recorded checksums; None to copy without.

    Returns:
        Finite elements that became infinite in a narrower type.

    Raises:
        ChecksumError: What was read is not what was saved; what was written is of no use.
        LayoutError: A comparison of the plan does not hold; what was written until then is of no use.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources, checks) as sources:
        budget = MemoryBudget(memory)
        tasks = _tasks(plan, sources, output, budget, advance, checks)
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(remote=True))) as results:
            overflowed = sum(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return overflowed


def _tasks(
    plan: CopyPlan, sources: Sources, output: Output, budget: MemoryBudget, advance: Advance, checks: ReadChecks | None
) -> Iterator[Callable[[], int]]:
    if plan.consistency is not None:
        # The first, but not waited for: it is many small requests, whose round trips need not add to the time.
        yield partial(_prove, plan.consistency, sources)
    for file in plan.files:
        if output.has(file):
            advance(file.nbytes)
            if checks is not None:
                checks.require_all(ranges_read(plan, file))
            continue
        target, windows = output.begin(file), Windows(plan, file, sources)
        yield partial(_open, target)
        skipped = False
        for start in range(0, max(file.nbytes, 1), target.part_bytes):
            end = min(start + target.part_bytes, file.nbytes)
            if target.has(start, end - start):
                advance(end - start)
                skipped = True
            else:
                # Taken here, in order: a target that is written in order waits for its earlier windows, and they must
                # not wait for memory that the later ones have.
                taken = budget.take(windows.cost(end - start))
                yield partial(_one, windows, target, start, end, partial(budget.give_back, taken), advance)
        if skipped and checks is not None:
            checks.require_all(ranges_read(plan, file))


def _prove(proofs: ConsistencyChecks, sources: Sources) -> int:
    for problem in failed_proofs(proofs, advance=lambda _: None, sources=sources):
        raise problem
    return 0


def _open(target: Target) -> int:
    target.open()
    return 0


def _one(
    windows: Windows, target: Target, start: int, end: int, give_back: Callable[[], None], advance: Advance
) -> int:
    try:
        data, overflowed = windows.assemble(start, end)
        target.write(start, data)
    except BaseException as error:
        target.fail(error)
        raise
    finally:
        give_back()
    advance(end - start)
    return overflowed
