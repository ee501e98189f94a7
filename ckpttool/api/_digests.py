"""Whether what was written says what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.analysis.digest import digest, digest_of
from ckpttool.errors import LayoutError
from ckpttool.model.selection import WEIGHTS, Content, contents

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.targets.weights import WeightSelection


def are_same(a: Checkpoint, b: Checkpoint, jobs: int | None) -> bool:
    """Whether two checkpoints hold the same values."""
    first, second = (digest(c, jobs=jobs, advance=lambda _: None) for c in (a, b))
    return first == second


def same_digest(source: Checkpoint, written: Checkpoint, directory: str, jobs: int | None) -> str:
    """Make sure that two checkpoints say the same; returns the digest of their weights.

    Raises:
        LayoutError: They do not.
    """
    meant, found = (digest(c, jobs=jobs, advance=lambda _: None) for c in (source, written))
    if meant != found:
        problem = f"what was written says {found.weights}, {found.optimizer}, but what was read {meant.weights}, "
        raise LayoutError(directory, f"{problem}{meant.optimizer}", "try again, and report it if it stays")
    return found.weights


def same_weights(checkpoint: Checkpoint, selection: WeightSelection, written: Checkpoint, jobs: int | None) -> str:
    """Digest what was to be written, and what was written.

    Raises:
        LayoutError: They differ.
    """
    held = [Content(w.name, WEIGHTS, w.state) for w in selection.weights]
    meant = digest_of(checkpoint, held, dtypes={w.name: w.dtype for w in selection.weights}, jobs=jobs)
    found = digest_of(written, contents(written), jobs=jobs)
    if meant != found:
        problem = f"what was written says {found}, but what was read {meant}"
        hint = "a disk or memory may be failing: try again, and report it if it stays"
        raise LayoutError(written.location, problem, hint)
    return meant
