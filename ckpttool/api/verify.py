"""``verify``: every finding about a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_at_least
from ckpttool.formats import Source, source_paths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.commit.signing import Key
    from ckpttool.units import Progress


def verify(
    src: Source,
    *,
    tag: str | None = None,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    key: Key | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check that a checkpoint is whole and sound; lists every finding, raises none.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with the fp32
            master weights.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        key: The checkpoint must have been signed with it; every byte is read. As ``CheckpointManager``'s ``sign_key``.
        storage_options: As for ``inspect``.

    Raises:
        PlanError: The key cannot be read.
    """
    from ckpttool.analysis.verify import verify_checkpoint
    from ckpttool.commit.signing import read_key

    check_at_least("jobs", jobs, 1)
    return verify_checkpoint(
        source_paths(src),
        tag=tag,
        deep=deep,
        jobs=jobs,
        progress=progress,
        options=storage_options,
        trust_names=trust_names,
        key=read_key(key),
    )
