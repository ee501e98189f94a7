"""``digest``: one number for all values, independent of their sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.analysis.digest import Digest
    from ckpttool.formats import Source
    from ckpttool.units import Progress


def digest(
    src: Source,
    *,
    tag: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Digest:
    """Digest the values of a checkpoint; sharding and file format make no difference.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool.analysis import digest as digests
    from ckpttool.model.selection import contents

    options = Options(tag=tag, jobs=jobs, progress=progress, trust_names=trust_names, storage_options=storage_options)
    checkpoint = options.open(src)
    meter = Meter(sum(c.state.nbytes for c in contents(checkpoint)), options.progress)
    return digests.digest(checkpoint, jobs=options.jobs, advance=meter)
