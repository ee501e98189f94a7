"""Comparison of the digests of a source and of the output written from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.analysis.digest import digest, digest_of
from ckpttool.errors import LayoutError
from ckpttool.model.selection import WEIGHTS, Content, contents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Checkpoint, State

HINT = "a disk or memory may be failing: try again, and report it if it stays"


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
