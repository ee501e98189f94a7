"""Carry out ``prune``: remove the checkpoints of a root that no rule keeps, or act on them, each for itself."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalog.cleanup import changed_since, finish_killed, remove_left_over_files
from ckpttool.catalog.entries import catalog
from ckpttool.catalog.retention import NAMED, Decisions, decide
from ckpttool.commit import read_mark
from ckpttool.commit.manifest import read_manifest
from ckpttool.commit.marks import TakenError, below, is_alive
from ckpttool.errors import CkptError, LayoutError, PruneError, StorageError
from ckpttool.formats import source_storage
from ckpttool.formats.layouts import Place
from ckpttool.formats.nested import why_kept
from ckpttool.storage import LATEST, MANIFEST, THINNING, open_storage
from ckpttool.storage.base import MISSING, PinnedError
from ckpttool.storage.removal import PartlyRemovedError
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.catalog.actions import Work
    from ckpttool.catalog.retention import Decision, Rules
    from ckpttool.formats import Opening
    from ckpttool.storage import Storage, WritableStorage
    from ckpttool.units import Progress

BY_ANOTHER = "thinned by another process"
"""Reason of a checkpoint that another process has thinned since the decision."""


def prune_root(
    root: str,
    rules: Rules,
    opening: Opening,
    *,
    dry_run: bool,
    jobs: int | None,
    memory: int,
    progress: Progress | None,
) -> Decisions:
    """Decide about the checkpoints of a root, and carry the decisions out.

    Args:
        root: The root.
        rules: The retention rules, and the action on checkpoints that no rule keeps.
        opening: How storages are opened.
        dry_run: Decide, but change nothing.
        jobs: Threads of the action; None for the default of the storage.
        memory: Bytes of its parts in flight.
        progress: Called with (bytes that the action has written, bytes in all).

    Raises:
        CkptError: The directory cannot be read, or no checkpoint has the number of a rule; nothing was changed.
        PruneError: A checkpoint cannot be removed or thinned; the others were.
    """
    found = catalog(root, opening=opening)
    storage = open_storage(root, opening.storage_options)
    unfinished: dict[str, StorageError] = {}
    if not dry_run:
        unlinked = [e.path for e in found.entries if not e.link]
        removed = remove_left_over_files(storage, found.root, unlinked)
        finished, unfinished = finish_killed(storage, unlinked, grace=rules.grace_seconds)
        if finished or removed:
            found = catalog(root, opening=opening)
    if found.problems:
        hint = "repair or remove that file first: without it, prune could remove the wrong checkpoint"
        raise LayoutError(found.root, found.problems[0], hint)
    decisions = [_for_nested(storage, decision) for decision in decide(found.entries, rules, root=found.root)]
    works: list[Work] = []
    errors: list[PruneError] = []
    if rules.action is not None:
        plan = partial(rules.action.plan, jobs=jobs, memory=memory, grace=rules.grace_seconds)
        decisions, works, errors = _planned(decisions, plan, opening, dry_run=dry_run)
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
    why = None if decision.keep else why_kept(storage, decision.entry.path)
    return decision if why is None else replace(decision, keep=True, freed=0, reason=why)


def _name_whole(storage: WritableStorage, root: str, decisions: Sequence[Decision], *, dry_run: bool) -> list[Decision]:
    """Write the newest whole checkpoint into ``latest`` if that names a torn one to be removed.

    Raises:
        StorageError: The file cannot be written.
    """
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
