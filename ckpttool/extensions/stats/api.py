"""The function ``ckpttool.stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.errors import PlanError
from ckpttool.extensions.stats.statistics import Statistics, statistics
from ckpttool.formats import Opening
from ckpttool.model.selection import NO_SUCH_NAME, WEIGHTS, contents, matcher
from ckpttool.registry import with_options
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats import Source
    from ckpttool.units import Progress


@with_options
def stats(  # noqa: PLR0913  public API
    src: Source,
    *,
    tag: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = False,
    magnitudes: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Statistics:
    """Compute extremes, mean, norm and counts of NaN, infinity and zero of every tensor, reading small parts.

    Args:
        optimizer: Also the optimizer's states.
        magnitudes: Also count the values by power of two (``TensorStats.magnitudes``), which takes as long as the rest.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    opening = Opening(storage_options, follow_links)
    options = Options(tag=tag, jobs=jobs, progress=progress, trust_names=trust_names, opening=opening)
    checkpoint = options.open(src)
    matches = matcher(include, exclude)
    held = [c for c in contents(checkpoint) if matches(c.name) and (optimizer or c.key == WEIGHTS)]
    if not held:
        raise PlanError(checkpoint.location, *NO_SUCH_NAME)
    meter = Meter(sum(c.state.nbytes for c in held), options.progress)
    return Statistics(statistics(checkpoint, held, magnitudes=magnitudes, jobs=options.jobs, advance=meter))
