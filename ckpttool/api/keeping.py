"""``ls``, ``pin``, ``unpin`` and ``prune``: list the checkpoints of a root, keep some and remove the others."""

from __future__ import annotations

import posixpath
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import checked_path
from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError, PruneError, StorageError
from ckpttool.formats import Opening
from ckpttool.registry import carry_out, with_options
from ckpttool.storage import MANIFEST, THINNING
from ckpttool.storage.base import MISSING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.catalog.actions import Work
    from ckpttool.catalog.listing import Catalog
    from ckpttool.catalog.retention import Decision, Decisions
    from ckpttool.commit.marks import Pin
    from ckpttool.formats import Source
    from ckpttool.storage import Storage, WritableStorage
    from ckpttool.units import Progress


@with_options
def ls(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Catalog:
    """List the checkpoints in a directory, sorted by step, and whether each is whole.

    Raises:
        CkptError: The directory cannot be read, or contains no checkpoint.
    """
    from ckpttool.catalog.entries import catalog

    opening = Opening(storage_options, follow_links)
    return catalog(checked_path("root", root), opening=opening)


@with_options
def pin(
    src: Source,
    *,
    why: str,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Pin a checkpoint: no rule of ``prune``, ``CheckpointManager`` or a trainer's rotation removes or thins it.

    The pin is a small file in its directory. It replaces an earlier pin, and is removed with the directory: a save that
    replaces the checkpoint removes it.

    Args:
        why: The reason, for people.

    Raises:
        CkptError: The checkpoint is missing or damaged, another process removes or thins it, the reason is empty, or
            the pin cannot be written.
    """
    from ckpttool.commit import read_mark
    from ckpttool.commit.marks import Pin, is_alive, write_pin
    from ckpttool.storage import BESIDE, PIN, is_half_removed, walk

    if not why.strip():
        raise ArgumentError("why", "is empty", "say why the checkpoint is to be kept")
    storage, directory = _find(src, tag, Opening(storage_options, follow_links))
    made = Pin(_who(), time.time(), why.strip(), directory)
    write_pin(storage, directory, made)
    storage.refresh([])
    there = storage.is_dir(directory) and any(name not in BESIDE for name, _ in walk(storage, directory))
    if not there or is_half_removed(storage, directory) or is_alive(read_mark(storage, directory, THINNING)):
        if storage.exists(path := posixpath.join(directory, PIN)):
            storage.delete([path])
        problem = "is removed or thinned by another process meanwhile, and is not pinned"
        raise StorageError(directory, problem, "list the checkpoints with ls, and pin one that is there")
    return made


@with_options
def unpin(
    src: Source,
    *,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Remove the pin of a checkpoint; return it.

    Raises:
        PlanError: The checkpoint is not pinned.
        CkptError: The checkpoint is missing, or the pin cannot be removed.
    """
    from ckpttool.commit.marks import find_pin
    from ckpttool.storage import PIN

    storage, directory = _find(src, tag, Opening(storage_options, follow_links))
    found = find_pin(storage, directory)
    if found is None:
        raise PlanError(directory, "is not pinned", "ls shows which checkpoints are")
    storage.delete([posixpath.join(directory, PIN)])
    return found


def _find(src: Source, tag: str | None, opening: Opening) -> tuple[WritableStorage, str]:
    """Return the storage and the directory of a checkpoint; a pinned directory need not be sound."""
    from ckpttool.formats import open_checkpoint, source_paths
    from ckpttool.storage import PIN, local_path, open_storage, without_credentials

    paths = source_paths(src)
    if len(paths) > 1:
        raise ArgumentError("src", "names several directories", "pass one of them")
    storage = open_storage(paths[0], opening.storage_options)
    path = without_credentials(local_path(paths[0])).rstrip("/") or paths[0]
    if tag is None and storage.is_dir(path) and storage.exists(posixpath.join(path, PIN)):
        return storage, path
    return storage, open_checkpoint(paths[0], tag=tag, opening=opening).location


def _who() -> str:
    """Return user and host."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without an entry for the user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


BY_ANOTHER = "thinned by another process"
"""Reason of a checkpoint that another process has thinned since the decision."""


@with_options
def prune(  # noqa: PLR0913  public API
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_for: float | str | None = None,
    torn: bool = False,
    grace: float | str = "1h",
    dry_run: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    **given: Any,
) -> Decisions:
    """Remove the checkpoints of a root that no rule keeps, or thin them: remove only their optimizer states.

    Only whole saves of runs are removed or thinned: of ZeRO, and distributed checkpoints of torch with an optimizer,
    also such as a framework has saved. It always keeps the newest of them, the one that ``latest`` names, those in the
    snapshot of a Ray Train run, and pinned ones. A thin checkpoint replaces a whole one when its weights have been read
    back and have the digest of the source. The next ``prune`` deletes the leftovers of a killed one.

    Args:
        keep_last: Number of newest checkpoints to keep.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            the suffix ":max", the largest.
        keep_for: Keep those younger than this: seconds, or a text like "7d".
        torn: Remove incomplete and uncommitted checkpoints too, unless a save may still write them.
        grace: With ``torn``, the least age of their newest file: seconds, or a text like "1h".
        dry_run: Decide, but change nothing.
        progress: Called with (bytes of thin checkpoints written, bytes in all).

    Returns:
        A decision with its reason for each checkpoint, oldest first.

    Raises:
        ArgumentError: No rule is given, or one is malformed.
        CkptError: The directory cannot be read, or no checkpoint has the number; nothing was changed.
        PruneError: A checkpoint cannot be removed or thinned; the others were. Its ``decisions`` have the results.
    """
    opening = Opening(storage_options, follow_links)
    from ckpttool.api.options import Options
    from ckpttool.catalog.cleanup import finish_killed, remove_left_over_files
    from ckpttool.catalog.entries import catalog
    from ckpttool.catalog.retention import Decisions, Rules, decide
    from ckpttool.storage import open_storage

    (action,) = carry_out("prune", given) or (None,)
    rules = Rules(keep_last, keep_every, keep_best, keep_for, action, torn, grace)
    options = Options(jobs=jobs, memory=memory, progress=progress, opening=opening)
    found = catalog(checked_path("root", root), opening=opening)
    storage = open_storage(checked_path("root", root), storage_options)
    unfinished: dict[str, StorageError] = {}
    if not dry_run:
        unlinked = [e.path for e in found.entries if not e.link]
        removed = remove_left_over_files(storage, found.root, unlinked)
        finished, unfinished = finish_killed(storage, unlinked, grace=rules.grace_seconds)
        if finished or removed:
            found = catalog(checked_path("root", root), opening=opening)
    if found.problems:
        hint = "repair or remove that file first: without it, prune could remove the wrong checkpoint"
        raise LayoutError(found.root, found.problems[0], hint)
    decisions = [_for_nested(storage, decision) for decision in decide(found.entries, rules, root=found.root)]
    works: list[Work] = []
    errors: list[PruneError] = []
    if action is not None:
        given_ = {"jobs": options.jobs, "memory": options.memory_bytes, "grace": rules.grace_seconds}
        decisions, works, errors = _planned(decisions, partial(action.plan, **given_), opening, dry_run=dry_run)
    decisions = _name_whole(storage, found.root, decisions, dry_run=dry_run)
    if dry_run:
        return _unless(errors, Decisions(decisions, dry_run=True))
    for number, decision in enumerate(decisions):
        if decision.keep and decision.entry.thin and (error := unfinished.get(decision.entry.path)) is not None:
            errors.append(_old_files_stay(error))
            decisions[number] = replace(decision, reason=errors[-1].problem)
    return _carry_out(storage, found.root, decisions, works, progress, errors)


def _for_nested(storage: Storage, decision: Decision) -> Decision:
    """Keep a checkpoint that would take others along."""
    from ckpttool.formats.nested import why_kept

    why = None if decision.keep else why_kept(storage, decision.entry.path)
    return decision if why is None else replace(decision, keep=True, freed=0, reason=why)


def _name_whole(storage: WritableStorage, root: str, decisions: Sequence[Decision], *, dry_run: bool) -> list[Decision]:
    """Write the newest whole checkpoint into ``latest`` if that names a torn one to be removed.

    Raises:
        StorageError: The file cannot be written.
    """
    from ckpttool.catalog.retention import NAMED
    from ckpttool.formats.layouts import Place
    from ckpttool.storage import LATEST

    named = next((d for d in decisions if d.entry.latest and not d.keep), None)
    if named is None:
        return [*decisions]
    storage.refresh([])
    whole = [d.entry for d in decisions if d.keep and d.entry.whole and d.entry.of_run]
    models = {entry.series for entry in whole}
    newest = max(whole, key=lambda entry: entry.rank)
    if len(models) > 1 or Place(storage, root).newest != named.entry.name or not Place(storage, newest.path).rank_files:
        return [replace(d, keep=True, freed=0, reason=NAMED) if d is named else d for d in decisions]
    if not dry_run:
        storage.put(posixpath.join(root, LATEST), newest.name.encode())
    told = f"latest then names {newest.name}"
    return [replace(d, reason=f"{d.reason}; {told}") if d is named else d for d in decisions]


def _planned(
    decisions: Sequence[Decision], plan: Callable[[Storage, str], Work], opening: Opening, *, dry_run: bool
) -> tuple[list[Decision], list[Work], list[PruneError]]:
    """Plan the thin checkpoints; return also an error for each that cannot be thinned, and is kept whole."""
    from ckpttool.formats import source_storage

    result, works, errors = [], [], []
    for decision in decisions:
        path = decision.entry.path
        if decision.thin is not None:
            storage = source_storage([path], opening)
            try:
                works.append(work := plan(storage, path))
                if dry_run:
                    work.check_names(storage)
                decision = replace(decision, freed=work.freed)
            except CkptError as error:
                thin, _ = _is_thin(storage, path)
                failed = PruneError(path, f"cannot be thinned: {error.problem}", error.hint, error.options)
                errors += [] if thin else [failed]
                decision = replace(decision, thin=None, reason=BY_ANOTHER if thin else failed.problem)
        result.append(decision)
    return result, works, errors


def _unless(errors: Sequence[PruneError], done: Decisions) -> Decisions:
    """Return the results.

    Raises:
        PruneError: There is an error: the first one, with the results.
    """
    if errors:
        errors[0].decisions = done
        raise errors[0]
    return done


def _is_thin(storage: Storage, path: str) -> tuple[bool, bool]:
    """Return whether a checkpoint was thinned, and whether old files are left that no later run removes."""
    from ckpttool.commit import read_mark
    from ckpttool.commit.manifest import read_manifest
    from ckpttool.commit.marks import below, is_alive

    try:
        thin = any(read_manifest(storage, directory).thin for directory, _ in below(storage, path, MANIFEST))
        marks = [read_mark(storage, directory, THINNING) for directory, _ in below(storage, path, THINNING)]
        return thin, any(is_alive(mark) is False for mark in marks)
    except CkptError:
        return False, False


def _carry_out(
    storage: WritableStorage,
    root: str,
    decisions: Sequence[Decision],
    works: Sequence[Work],
    progress: Progress | None,
    errors: list[PruneError],
) -> Decisions:
    """Remove and thin checkpoints; return the results.

    Raises:
        PruneError: One cannot be removed or thinned; the others were.
    """
    from ckpttool.catalog.retention import Decisions
    from ckpttool.units import Meter

    meter = Meter(sum(work.nbytes for work in works), progress)
    planned = iter(works)
    done = Decisions(decisions)
    work: Callable[[], object]
    first = [n for n, decision in enumerate(decisions) if not decision.keep]  # they free the space that thin files take
    for number in [*first, *(n for n, decision in enumerate(decisions) if decision.thin is not None)]:
        decision = decisions[number]
        if decision.keep:
            work = partial(next(planned).carry_out, storage, meter)
        else:
            work = partial(storage.remove_tree, decision.entry.path, unless_pinned=True)
        done[number], error = _attempt(storage, root, decision, work)
        errors += [] if error is None else [error]
    return _unless(errors, done)


def _attempt(
    storage: WritableStorage, root: str, decision: Decision, work: Callable[[], object]
) -> tuple[Decision, PruneError | None]:
    """Remove or thin one checkpoint; return the result, and the error."""
    from ckpttool.catalog.cleanup import changed_since
    from ckpttool.commit.marks import TakenError
    from ckpttool.storage.base import PinnedError
    from ckpttool.storage.removal import PartlyRemovedError

    path = decision.entry.path
    try:
        # Thinning the checkpoints before it may take hours.
        if (why := changed_since(storage, path, decision.entry.state, root)) is not None:
            return replace(decision, keep=True, thin=None, freed=0, reason=why), None
        work()
    except PinnedError as error:
        return replace(decision, keep=True, thin=None, freed=0, reason=error.problem), None
    except CkptError as error:
        storage.refresh([])
        # A removal that fails halfway has renamed the directory, so that its absence is not sufficient evidence.
        if error.problem == MISSING and not storage.is_dir(path):
            return replace(decision, keep=False, thin=None, freed=0, reason="removed by another process"), None
        committed, leftovers = _is_thin(storage, path)
        if isinstance(error, TakenError) and not committed:
            return replace(decision, thin=None, freed=0, reason=error.problem), None
        if decision.thin is None:
            in_part = isinstance(error, PartlyRemovedError)
            problem = error.problem
            if error.path.startswith(f"{path}/"):
                problem = f"{error.path.removeprefix(f'{path}/')}: {problem}"
            failed = PruneError(
                path,
                f"{'is removed only in part' if in_part else 'cannot be removed'}: {problem}",
                "repair that, then run it again",
            )
            reason = f"only in part: {problem}" if in_part else failed.problem
            return replace(decision, keep=not in_part, freed=0, reason=reason), failed
        if committed and not leftovers:
            return replace(decision, thin=None, freed=0, reason=BY_ANOTHER), None
        if committed:
            failed = _old_files_stay(error)
        else:
            problem = f"cannot be thinned: {error.problem}"
            own = isinstance(error, StorageError)
            hint = error.hint if own else "repair it, or pin it, so that it is kept whole"
            failed = PruneError(error.path, problem, hint, error.options if own else ())
        return replace(decision, keep=True, thin=None, freed=0, reason=failed.problem), failed
    return decision, None


def _old_files_stay(error: CkptError) -> PruneError:
    problem = f"is thin, but not all old files are removed: {error.problem}"
    return PruneError(error.path, problem, "repair that, then run it again")
