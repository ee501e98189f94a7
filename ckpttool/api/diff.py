"""``diff``: names, shapes and values of two checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats import Source, open_checkpoint
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.analysis.diff import DiffReport
    from ckpttool.units import Progress


def diff(  # noqa: PLR0913  public API
    a: Source,
    b: Source,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    all: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and topologies: names, shapes, weights and optimizer states.

    Both are read once, in small parts. Weights are the fp32 master weights where a checkpoint has them. Element x of
    ``a`` equals element y of ``b`` if ``|x - y| <= atol + rtol * |y|``, or if both are NaN.

    Args:
        a: As for ``inspect``.
        b: As for ``inspect``.
        tag_a: Which checkpoint of a.
        tag_b: Which checkpoint of b.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        all: Also compare steps, hyper-parameters (learning rates), the scheduler, the loss scale and client state.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        ArgumentError: A tolerance is negative or not finite.
        CkptError: One of them is not sound, or cannot be read.
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise ArgumentError(name, f"is {tolerance}, not finite and 0 or more", "choose 0 for equality")
    options = Options(jobs=jobs, progress=progress, trust_names=trust_names, storage_options=storage_options)
    return _diff((a, tag_a), (b, tag_b), (rtol, atol), (include, exclude), options, others=all)


def _diff(
    a: tuple[Source, str | None],
    b: tuple[Source, str | None],
    tolerances: tuple[float, float],
    globs: tuple[Sequence[str], Sequence[str]],
    options: Options,
    *,
    others: bool,
) -> DiffReport:
    from ckpttool.analysis.diff import compare
    from ckpttool.model.selection import NO_SUCH_NAME, contents, matcher

    first, second = (
        open_checkpoint(src, tag=tag, options=options.storage_options, trust_names=options.trust_names)
        for src, tag in (a, b)
    )
    held = [*contents(first), *contents(second)]
    matches = matcher(*globs)
    if not any(matches(c.name) for c in held):
        raise PlanError(first.location, *NO_SUCH_NAME)
    (rtol, atol), (include, exclude) = tolerances, globs
    meter = Meter(sum(c.state.nbytes for c in held), options.progress)
    return compare(
        first,
        second,
        rtol=rtol,
        atol=atol,
        include=include,
        exclude=exclude,
        others=others,
        jobs=options.jobs,
        advance=meter,
    )
