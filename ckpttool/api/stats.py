"""``stats``: extremes, mean and norm of every tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.errors import PlanError
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.analysis.stats import TensorStats
    from ckpttool.formats import Source
    from ckpttool.units import Progress


def stats(  # noqa: PLR0913  public API
    src: Source,
    *,
    tag: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[TensorStats]:
    """Compute extremes, mean, norm and counts of NaN, infinity and zero of every tensor, reading small parts.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        optimizer: Also the optimizer's states.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool.analysis.stats import statistics
    from ckpttool.model.selection import NO_SUCH_NAME, WEIGHTS, contents, matcher

    options = Options(tag=tag, jobs=jobs, progress=progress, trust_names=trust_names, storage_options=storage_options)
    checkpoint = options.open(src)
    matches = matcher(include, exclude)
    held = [c for c in contents(checkpoint) if matches(c.name) and (optimizer or c.key == WEIGHTS)]
    if not held:
        raise PlanError(checkpoint.location, *NO_SUCH_NAME)
    meter = Meter(sum(c.state.nbytes for c in held), options.progress)
    return list(statistics(checkpoint, held, jobs=options.jobs, advance=meter))
