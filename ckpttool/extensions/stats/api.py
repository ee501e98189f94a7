"""The function ``ckpttool.stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.errors import PlanError
from ckpttool.extensions.stats.statistics import Statistics, statistics
from ckpttool.formats import Opening
from ckpttool.model.selection import NO_SUCH_NAME, WEIGHTS, contents, matcher
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats import Source
    from ckpttool.units import Progress


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
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        optimizer: Also the optimizer's states.
        magnitudes: Also count the values by power of two (``TensorStats.magnitudes``), which takes as long as the rest.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

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
