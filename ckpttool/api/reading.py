"""Commands that only read: they look into checkpoints, check and compare them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError
from ckpttool.formats import Source, open_checkpoint, source_paths
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.analysis.diff import DiffReport
    from ckpttool.analysis.digest import Digest
    from ckpttool.analysis.stats import TensorStats
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.commit.signing import Key
    from ckpttool.model import Checkpoint
    from ckpttool.units import Progress


def inspect(
    src: Source,
    *,
    tag: str | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and nothing in it is run.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each holds the files of some ranks (node-local storage).
        tag: Which checkpoint of a root; default: the one that ``latest`` names.
        trust_names: Let a file's name count where the file itself says that it was saved under another one: after a
            deliberate rename. Default: such files are refused.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: There is no sound checkpoint; says which file, what is wrong and what to do.
    """
    return open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)


def digest(
    src: Source,
    *,
    tag: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Digest:
    """Digest the values of a checkpoint; how they are sharded and stored makes no difference.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Let a file's name count where the file itself says that it was saved under another one: after a
            deliberate rename. Default: such files are refused.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool.analysis import digest as digests
    from ckpttool.model.selection import contents

    checkpoint = open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)
    meter = Meter(sum(c.state.nbytes for c in contents(checkpoint)), progress)
    return digests.digest(checkpoint, jobs=jobs, advance=meter)


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
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with their masters.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Let a file's name count where the file itself says that it was saved under another one: after a
            deliberate rename. Default: such files are refused.
        key: The checkpoint must have been signed with it; every byte is read. As ``CheckpointManager``'s ``sign_key``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        PlanError: The key cannot be read.
    """
    from ckpttool.analysis.verify import verify_checkpoint
    from ckpttool.commit.signing import read_key

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


def diff(
    a: Source,
    b: Source,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and topologies: names, shapes, weights and optimizer states.

    Both are read once, in small pieces. Weights are the fp32 masters where there are any. Element x of ``a`` equals
    element y of ``b`` if ``|x - y| <= atol + rtol * |y|``, or if both are NaN.

    Args:
        a: As for ``inspect``.
        b: As for ``inspect``.
        tag_a: Which checkpoint of a.
        tag_b: Which checkpoint of b.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Let a file's name count where the file itself says that it was saved under another one: after a
            deliberate rename. Default: such files are refused.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: One of them is not sound, or cannot be read.
    """
    from ckpttool.analysis.diff import compare
    from ckpttool.model.selection import contents, matcher

    first, second = (
        open_checkpoint(a, tag=tag_a, options=storage_options, trust_names=trust_names),
        open_checkpoint(b, tag=tag_b, options=storage_options, trust_names=trust_names),
    )
    meter = Meter(sum(c.state.nbytes for c in [*contents(first), *contents(second)]), progress)
    matches = matcher(include, exclude)
    if not any(matches(c.name) for c in [*contents(first), *contents(second)]):
        raise PlanError(first.location, "holds no tensor of that name", "check --include and --exclude")
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise ValueError(f"rtol is {rtol} and atol {atol}, but they must be finite and not negative")
    return compare(first, second, rtol=rtol, atol=atol, include=include, exclude=exclude, jobs=jobs, advance=meter)


def stats(
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
    """Extremes, mean, norm and counts of NaN, infinity and zero of every tensor, read in small pieces.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        optimizer: Also the optimizer's states.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Let a file's name count where the file itself says that it was saved under another one: after a
            deliberate rename. Default: such files are refused.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool.analysis.stats import statistics
    from ckpttool.model.selection import WEIGHTS, contents, matcher

    checkpoint = open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)
    matches = matcher(include, exclude)
    held = [c for c in contents(checkpoint) if matches(c.name) and (optimizer or c.key == WEIGHTS)]
    if not held:
        raise PlanError(checkpoint.location, "holds no tensor of that name", "check --include and --exclude")
    meter = Meter(sum(c.state.nbytes for c in held), progress)
    return list(statistics(checkpoint, held, jobs=jobs, advance=meter))
