"""Order the checkpoints of a root for a restore, the best candidate first; the error if none can be restored."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.commit import is_commit
from ckpttool.commit.manifest import Saved, commits, is_thin, newest_first, read_manifest
from ckpttool.errors import CkptError, LayoutError, LinkError, StorageError
from ckpttool.formats.locate import LATEST, named_tag, natural_order
from ckpttool.formats.zero.files import is_of_tag
from ckpttool.storage import MARK
from ckpttool.storage.confined import leads_out
from ckpttool.storage.error_texts import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.commit.manifest import Manifest
    from ckpttool.storage import Entry, Storage

ATTEMPTS = 10
"""Maximum number of attempts to list checkpoints while another process replaces or removes them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory that may be a checkpoint."""

    tag: str
    """Directory relative to the root."""
    path: str
    """Path or URL of the directory."""
    committed: bool
    """Whether it has a manifest."""


def candidates(storage: Storage, root: str) -> list[Candidate]:
    """Return the checkpoints from which a run can resume, best first.

    The order is that of ``newest_first``. Unfinished saves, and links not followed by the storage, are omitted.

    Raises:
        StorageError: The root cannot be read.
        LinkError: ``latest`` is or names a link that the storage does not follow.
    """
    missing: StorageError | None = None
    for _ in range(ATTEMPTS):
        before = _entries(storage, root)
        try:
            missing, found = None, _candidates(storage, root)
        except StorageError as error:
            if error.problem != MISSING:
                raise
            missing, found = error, []
        if found:
            return found
        # A checkpoint that a save or a prune renames or removes meanwhile is not seen: a run would begin anew.
        storage.refresh([])
        if missing is None and _entries(storage, root) == before:
            return []
    if missing is not None:
        raise missing
    return []


def _entries(storage: Storage, root: str) -> list[Entry]:
    return storage.listing(root) if storage.is_dir(root) else []


def _candidates(storage: Storage, root: str) -> list[Candidate]:
    entries = _entries(storage, root)
    found: dict[str, Candidate] = {}
    saved: list[Saved] = []
    named = _named(storage, root) if any(e.name == LATEST and not e.is_dir for e in entries) else ""
    names = [e.name for e in entries if e.is_dir and not e.name.startswith(".")]
    names += [c.removeprefix(f"{root}/") for c in commits(storage, root) if posixpath.dirname(c) != root.rstrip("/")]
    if "/" in named and named not in names and storage.is_dir(posixpath.join(root, named)):
        names.append(named)
    outside = [name for name in names if leads_out(storage, posixpath.join(root, name))]
    if named in outside:
        storage.listing(posixpath.join(root, named))  # raises the LinkError
    for name in sorted(names, key=natural_order, reverse=True):
        path = posixpath.join(root, name)
        if name in outside:
            continue
        committed, inside = is_commit(storage, path), storage.listing(path)
        is_marked = _is_marked(inside)
        if not committed and (is_marked or not any(is_of_tag(e.name) for e in inside if not e.is_dir)):
            continue
        manifest = _manifest(storage, path) if committed else None
        found[name] = Candidate(name, path, committed)
        step = step_of(storage, path, name)
        saved.append(Saved(name, step) if manifest is None else Saved.of(name, manifest, marked=is_marked))
    return [found[name] for name in newest_first(saved, named)]


def whole_first(storage: Storage, found: Sequence[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    """Put thin checkpoints behind all others: a run cannot go on from one, only take its weights."""
    return sorted(found, key=lambda one: one[2] and is_thin(storage, one[1]))


def contradiction(storage: Storage, root: str, found: Sequence[Candidate]) -> str:
    """Describe a contradiction between ``latest`` and the steps of the candidates; "" without one."""
    if not found:
        return ""
    steps = {c.tag: step_of(storage, c.path, c.tag) for c in found}
    first, named = found[0].tag, _named(storage, root) if storage.exists(posixpath.join(root, LATEST)) else ""
    if named != first:
        # Without a valid latest the candidate of the last step is first.
        return f"latest names {named}, but {first} was committed after it" if named in steps else ""
    best = max(steps, key=lambda tag: steps[tag])
    if steps[best] > steps[first]:
        return f"latest names {first} of step {steps[first]}, but {best} has step {steps[best]}"
    return ""


def _manifest(storage: Storage, path: str) -> Manifest | None:
    try:
        return read_manifest(storage, path)
    except CkptError:
        return None


def _named(storage: Storage, root: str) -> str:
    path = posixpath.join(root, LATEST)
    try:
        return named_tag(storage.read_text(path))
    except LinkError:
        raise
    except CkptError:
        return ""  # an unreadable latest counts as missing


def _is_marked(inside: list[Entry]) -> bool:
    return any(e.name == MARK for e in inside)


def step_of(storage: Storage, path: str, name: str) -> int:
    """Return the step from the manifest, or else the last number in the name; -1 without a number."""
    try:
        return read_manifest(storage, path).step
    except CkptError:
        numbers = [int(value) for kind, value in natural_order(name) if kind == 0]
        return numbers[-1] if numbers else -1


def none_restored(root: str, count: int, newest: CkptError, *, thin: bool) -> LayoutError:
    """Return the error of a restore that went through all checkpoints.

    Args:
        root: The root.
        count: Number of checkpoints there.
        newest: Why the newest cannot be restored.
        thin: Whether any of them is thin.
    """
    held = f"{count} checkpoints" if count > 1 else "a checkpoint"
    problem = f"holds {held}, and none can be restored; of the newest: {newest.problem}"
    weights = "load the weights of a thin one with ckpttool.load(engine, src, weights_only=True), " if thin else ""
    return LayoutError(root, problem, f"restore one from a copy, {weights}or choose another root to begin anew")
