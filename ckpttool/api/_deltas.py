"""What ``delta`` and ``apply`` share: open deltas, and check what they begin and end at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.execution.patch_blocks import patch_of
from ckpttool.execution.sources import Sources
from ckpttool.model.derived.delta import TypedState, apply_deltas
from ckpttool.model.selection import WEIGHTS, Content
from ckpttool.plan.copy_checks import source_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.api.options import Options
    from ckpttool.model import Checkpoint, State
    from ckpttool.model.derived.delta import Delta, Result
    from ckpttool.model.formulas import Patch
    from ckpttool.units import Meter


def after(meter: Meter, options: Options) -> Options:
    """Return options whose progress goes on behind the bytes of an earlier phase."""
    progress, before = options.progress, meter.total
    if progress is None:
        return options
    return replace(options, progress=lambda done, total: progress(before + done, before + total))


def open_result(base: Checkpoint, states: Mapping[str, State], deltas: Sequence[Delta]) -> Result:
    """Read the indices of deltas, and return the result of applying them.

    Args:
        base: The first checkpoint.
        states: Its weights and buffers, by name.
        deltas: The deltas, in order.

    Raises:
        LayoutError: A delta is damaged, or does not begin at the checkpoint before it.
        StorageError: A delta cannot be read.
    """
    # Memory for blocks of a tensor is only spent if one of its size is there.
    limit = max((s.numel for held in (states, *(d.dense for d in deltas)) for s in held.values()), default=0)
    return apply_deltas(base, states, deltas, [_patches(delta, limit) for delta in deltas])


def _patches(delta: Delta, limit: int) -> dict[str, Patch]:
    with Sources(source_files(delta.checkpoint)) as sources:
        numels = {n: t.numel for n, t in delta.header.tensors.items() if n in delta.sparse}
        for name, numel in numels.items():
            if numel > limit:
                problem = f"changes {name} of {numel:,} elements, more than any tensor before it has"
                raise LayoutError(delta.path, problem, "apply the delta to the checkpoint that it was made from")
        found = {n: patch_of(sources, delta.path, n, pair, numels[n]) for n, pair in delta.sparse.items()}
        sources.check_unchanged()
    return found


def digest_of_typed(checkpoint: Checkpoint, tensors: Mapping[str, TypedState], jobs: int | None) -> str:
    """Return the digest of tensors in the types of a delta.

    Raises:
        CkptError: A file cannot be read, or does not match its checksums.
    """
    from ckpttool.analysis.digest import digest_of

    contents = [Content(n, WEIGHTS, t.state) for n, t in tensors.items()]
    return digest_of(checkpoint, contents, jobs=jobs, dtypes={n: t.dtype for n, t in tensors.items()})


def check_digest(result: Result, delta: Delta, jobs: int | None) -> str | None:
    """Compare the digest of a result with the one that the last delta recorded; return it, or None without one.

    Raises:
        LayoutError: They differ.
    """
    expected = delta.header.ends.digest
    if expected is None:
        return None
    tensors = {n: TypedState(step.state, step.start.dtype) for n, step in result.steps.items()}
    found = digest_of_typed(result.checkpoint, tensors, jobs)
    if found != expected:
        problem = f"leads to weights with the digest {found}, but records {expected}"
        raise LayoutError(delta.path, problem, "make the delta again, or copy it again")
    return found
