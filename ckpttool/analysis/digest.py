"""``digest``: a hash of names, shapes and values, independent of stage, world size and format."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.errors import LayoutError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.model.selection import WEIGHTS, Content, contents
from ckpttool.plan.builder import source_files
from ckpttool.plan.casts import cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint, State
    from ckpttool.units import Advance


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of a checkpoint, as "sha256:" and 64 hexadecimal digits.

    Values narrower than fp32 are widened first, which is exact: weights of equal value (except zeros of different sign)
    have one digest, whatever their dtype.
    """

    weights: str
    """Digest of all parameters and buffers, with their names and shapes."""
    optimizer: str | None
    """Digest of all optimizer states, with their names and shapes; None if there are none."""


def digest(checkpoint: Checkpoint, *, jobs: int | None, advance: Advance) -> Digest:
    """Digest the weights and the optimizer's states.

    Args:
        checkpoint: The checkpoint.
        jobs: Threads; None for one for each core, up to four.
        advance: Called with the number of bytes read since the last call.

    Raises:
        StorageError: Reading failed, or a file changed meanwhile.
    """
    held = contents(checkpoint)
    weights = [c for c in held if c.key == WEIGHTS]
    optimizer = [c for c in held if c.key != WEIGHTS]
    return Digest(
        digest_of(checkpoint, weights, jobs=jobs, advance=advance),
        digest_of(checkpoint, optimizer, jobs=jobs, advance=advance) if optimizer else None,
    )


def digest_of(
    checkpoint: Checkpoint,
    tensors: Sequence[Content],
    *,
    jobs: int | None,
    dtypes: Mapping[str, str] | None = None,
    advance: Advance = lambda _: None,
) -> str:
    """Return the digest of some tensors.

    Args:
        checkpoint: The checkpoint.
        tensors: The tensors, in any order.
        jobs: Threads.
        dtypes: Dtypes to cast tensors to first, by name, to compute the digest of an output in those dtypes.
        advance: Called with the number of bytes read since the last call.
    """
    files = source_files(checkpoint)
    with Sources(files, checks_for(files, checkpoint, "read")) as sources:
        tasks = (partial(_one, sources, c, (dtypes or {}).get(c.name), advance) for c in tensors)
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(remote=sources.remote))) as results:
            parts = sorted(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()


def _one(sources: Sources, content: Content, dtype: str | None, advance: Advance) -> bytes:
    """Return the digest of one tensor: of its role, name, kind and shape, then its values in C order."""
    state = content.state
    written = dtype or state.dtype
    kind = "F32" if written in {"F32", "F16", "BF16"} else written
    head = "\0".join([content.key, content.name, kind, ",".join(map(str, state.shape)), ""])
    sha = hashlib.sha256(head.encode("utf-8", "surrogatepass"))
    for _, values in StateReader(sources).chunks(state):
        advance(values.nbytes)
        if state.dtype != written:
            values = cast(values, written)
        if kind != written:
            values = cast(values, kind)
        sha.update(np.ascontiguousarray(values).view(np.uint8).data)
    return sha.digest()


HINT = "a disk or memory may be failing: try again, and report it if it happens again"


def same_digest(source: Checkpoint, written: Checkpoint, directory: str, jobs: int | None) -> str:
    """Check that source and output have the same digest; returns the digest of the weights.

    Raises:
        LayoutError: They differ.
    """
    expected, found = (digest(c, jobs=jobs, advance=lambda _: None) for c in (source, written))
    if expected != found:
        problem = f"has the digests {found.weights} and {found.optimizer} of weights and optimizer, but the source has "
        raise LayoutError(directory, f"{problem}{expected.weights} and {expected.optimizer}", HINT)
    return found.weights


def same_weights(
    checkpoint: Checkpoint, selected: Mapping[str, tuple[State, str]], written: Checkpoint, jobs: int | None
) -> str:
    """Check that selected weights and output have the same digest; returns it.

    Args:
        checkpoint: The source.
        selected: The state of each tensor of the source, and the type that was written, by name.
        written: The output.
        jobs: Threads.

    Raises:
        LayoutError: They differ.
    """
    contents_of_source = [Content(name, WEIGHTS, state) for name, (state, _) in selected.items()]
    dtypes = {name: dtype for name, (_, dtype) in selected.items()}
    expected = digest_of(checkpoint, contents_of_source, dtypes=dtypes, jobs=jobs)
    found = digest_of(written, contents(written), jobs=jobs)
    if expected != found:
        raise LayoutError(written.location, f"has the digest {found}, but the source has {expected}", HINT)
    return expected
