"""List the checkpoints under a root, and check which are complete."""

from __future__ import annotations

import contextlib
import posixpath
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.arguments import checked_path
from ckpttool.catalog.listing import NOT_FOLLOWED, OWN_ROOT, SKIPPED, UNREADABLE, Catalog, CatalogEntry
from ckpttool.catalog.restore_order import Saved, last_after, may_follow, newest_first
from ckpttool.catalog.snapshot import listed_by_ray
from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import REPLACED, commit_directory, read_manifest, size_problems
from ckpttool.commit.marks import below, find_pin, is_alive, state_of
from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.containers import safetensors
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError, ContainerError, LayoutError, LinkError, StorageError, TruncatedError
from ckpttool.formats import Opening, open_checkpoint, open_every, source_storage
from ckpttool.formats.dcp import METADATA, SHARD
from ckpttool.formats.layouts import (
    ACCELERATE,
    BESIDE_TAG,
    MAX_TAG,
    TRAINER,
    WEIGHTS,
    Place,
    is_named,
    is_of_trainer,
    step_in,
)
from ckpttool.formats.locate import NoCheckpointError, SeveralModelsError, refuse_part, refuse_unfinished
from ckpttool.formats.scan import Found, commits, has_files_of_tag, natural_order, pattern_of, scan
from ckpttool.formats.series import has_optimizer, series, series_of
from ckpttool.formats.unfinished import unfinished_below
from ckpttool.formats.universal import FOLDER as UNIVERSAL_STATES
from ckpttool.messages import brief, name_some
from ckpttool.storage import (
    BESIDE,
    HALF_REMOVED,
    MARK,
    is_gone,
    is_half_removed,
    is_unread,
    local_path,
    parent,
    read_json,
    walk,
    whole_path,
    without_credentials,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.commit.manifest import Manifest
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Entry, Storage


MAX_NUMBERS = 10_000
"""Maximum numbers of a client state in an entry."""
MAX_VISITED = 10 * MAX_NUMBERS
"""Maximum values of a client state to visit."""
MAX_NAME = 1000
"""Maximum characters of a number's dotted key; numbers with longer keys are omitted."""
UNCOMMITTED, INCOMPLETE, BESIDE_WEIGHTS = "uncommitted", "incomplete", "incomplete, beside weights"
"""Values of ``CatalogEntry.torn``."""
_NEEDED = re.compile(r"trainer_state\.json|scheduler\.(pt|bin)|pytorch_model(_#)?/mp_rank_#_model_states\.pt")
"""Names, with "#" for numbers, of files without which the Trainer or Accelerate does not resume."""
TRAINER_STATE = "trainer_state.json"
"""File of the Hugging Face Trainer in each of its checkpoints."""
MAX_TRAINER_STATE = 1 << 28
"""Most bytes of such a file; one with a million logged steps is smaller."""


class _Listed(NamedTuple):
    """An entry, and values that depend on the other entries of the root."""

    entry: CatalogEntry
    saved: Saved
    """The facts that decide its place in the order."""
    best: tuple[str, ...] = ()
    """Paths that its trainer's state names as the best checkpoint."""
    problem: str = ""
    """Why the trainer's state cannot be read."""


def catalog(root: str, *, opening: Opening = Opening()) -> Catalog:
    """List the checkpoints in a directory.

    Args:
        root: A checkpoint root, a trainer's output folder with ``checkpoint-N``, or the directory of a tag.
        opening: How to open its storage.

    Raises:
        ArgumentError: The path is empty.
        StorageError: The directory cannot be read.
        LayoutError: The directory contains no checkpoint, or another process writes it.
    """
    checked_path("root", root)
    storage = source_storage([root], opening)
    root = whole_path(without_credentials(local_path(root)).rstrip("/") or root)
    if not storage.is_dir(root):
        refuse_part(Place(storage, root))
        problem = "is not a directory" if storage.exists(root) else "does not exist"
        raise StorageError(root, problem, "pass a directory that holds checkpoints")
    refuse_unfinished(storage, root)
    storage.list_tree(root)
    here = Place(storage, root)
    beside = here.strays or (here.rank_files if here.rivals and (here.pointer is None or here.tags) else [])
    if here.rank_files and not beside:
        root, directories = parent(root), [Found(storage, parent(root), posixpath.basename(root))]
    else:
        directories = here.found
    names = [one.tag for one in directories]
    root_itself = here if root == here.path else Place(storage, root)
    named, problems = _named(root_itself, None if len(names) == 1 else names)
    if beside:
        problems.append(f"{name_some(beside)} in the root itself: of no checkpoint that is listed here")
    try:
        reported = listed_by_ray(storage, root)
    except CkptError as error:
        reported = frozenset()
        problems.append(f"{posixpath.basename(error.path)} {error.problem}")
    tasks = (partial(_present_entry, one, one.tag in named, one.tag in reported, opening) for one in directories)
    jobs = default_jobs(remote=True) if storage.remote else 1
    with contextlib.closing(in_threads(tasks, jobs)) as results:
        entries = list(results)
    found = [one for one in entries if one is not None]
    if not found:
        runs = ", ".join(here.runs or here.below())
        hint = f"pass a run below it: {runs}" if runs else "pass the directory that holds their directories"
        raise LayoutError(root, "holds no checkpoints", hint)
    unlisted = [one for one, entry in zip(directories, entries, strict=True) if entry is None and not one.outside]
    below = (inner for one in unlisted for inner in Place(storage, one.path).below())
    above = {posixpath.relpath(posixpath.dirname(inner), root) for inner in below}
    left = tuple(sorted(above - {one.entry.name for one in found}, key=natural_order))
    found = [_of_save(one) if one.entry.name in root_itself.of_one_save else one for one in found]
    found = _without_conversions(_cut_off(found))
    ranked = _with_best(storage, root, _ranked(_by_names(found)), problems)
    return Catalog(root, tuple(sorted(ranked, key=lambda entry: entry.order)), tuple(problems), left)


def _without_conversions(found: Sequence[_Listed]) -> list[_Listed]:
    """Do not count a distributed checkpoint that may be a conversion: one beside other saves, or without a number."""
    own = [one.entry for one in found if one.entry.of_run]
    of_others = any(entry.stage is not None or entry.committed for entry in own)

    def is_unsure(entry: CatalogEntry) -> bool:
        alone = entry.stage is None and not entry.committed
        return entry.of_run and alone and (of_others or pattern_of(entry.name) == entry.name)

    return [one._replace(entry=replace(one.entry, of_run=False)) if is_unsure(one.entry) else one for one in found]


def _cut_off(found: Sequence[_Listed]) -> list[_Listed]:
    """Call a folder of a trainer cut off if it lacks a file that its framework needs, and an older one has.

    A killed save leaves such a folder: Accelerate saves one model after the other, then the states beside them, and the
    Trainer its own state last.
    """
    ordered = sorted(found, key=lambda one: one.entry.order)
    result = []
    needed: dict[str, str] = {}
    for one in ordered:
        entry = one.entry
        of_trainer = entry.whole and entry.stage is not None and is_named(entry.name, TRAINER, ACCELERATE)
        own = {sort for sort in entry.sorts if of_trainer and _NEEDED.fullmatch(sort)}
        if of_trainer and (gone := sorted(needed.keys() - own)):
            problem = f"lacks {gone[0]}, which {needed[gone[0]]} has: it may be cut off"
            result.append(one._replace(entry=replace(entry, whole=False, problem=problem)))
            continue
        needed |= dict.fromkeys(own, entry.name)
        result.append(one)
    return result


def _of_save(model: _Listed) -> _Listed:
    """Return the entry of one of several models of a save: no other replaces it."""
    return model._replace(entry=replace(model.entry, series=model.entry.name))


def committed(storage: Storage, root: str, found: Iterable[Found]) -> list[CatalogEntry]:
    """Describe the commits of a root by their manifests, older ones first.

    Does not open their files: a checkpoint is not whole if a file has another size than in the manifest. Only without
    digests, the newest of each pattern of names is opened, if there are several.

    Args:
        storage: Storage of the root.
        root: The directory.
        found: Its scan.

    Raises:
        CkptError: The directory cannot be read.
    """
    named = posixpath.normpath(Place(storage, root).newest)
    listed = []
    for one in commits(found):
        try:
            state = state_of(storage, one.path)
            manifest = read_manifest(storage, one.path)
        except CkptError:
            continue  # without metrics it has no rank: the rules neither count nor remove it
        if not _is_named_as(manifest, one.path):
            continue  # a user has copied or renamed it
        problems = size_problems(storage, one.path, manifest)
        listed.append(
            _Listed(
                CatalogEntry(
                    name=one.tag,
                    path=one.path,
                    format="thin" if manifest.thin else "dcp" if manifest.stage is None else "zero",
                    stage=None if manifest.thin else manifest.stage,
                    world_size=manifest.world_size,
                    step=manifest.step,
                    nbytes=manifest.nbytes,
                    modified=manifest.created,
                    whole=not problems,
                    problem=str(problems[0]) if problems else None,
                    latest=one.tag == named,
                    link=one.link,
                    metrics=manifest.metrics,
                    saved=manifest.created,
                    thin=manifest.thin or None,
                    pin=find_pin(storage, one.path),
                    state=state,
                    series=series_of(manifest),
                    committed=True,
                    of_run=not manifest.thin,
                ),
                Saved.of(one.tag, manifest.step, manifest, marked=one.marked),
            )
        )
    series_told = _by_names(_with_series(storage, listed))
    return sorted((one.entry for one in _ranked(series_told)), key=lambda entry: entry.order)


def _is_named_as(manifest: Manifest, path: str) -> bool:
    return f"/{path.rstrip('/').removesuffix(REPLACED)}".endswith(f"/{manifest.tag}")


def _by_names(found: Sequence[_Listed]) -> list[_Listed]:
    """Tell series apart by the patterns of names that have checkpoints of one step: models may have equal parameters.

    ``G_step3`` and ``D_step3`` may be a generator and a discriminator. Names without a number belong to any series, and
    so do those that frameworks choose: Ray's run has two kinds.
    """
    patterns: dict[tuple[str, int], set[str]] = {}
    for one in (listed.entry for listed in found):
        named = pattern_of(one.name) != one.name and not is_of_trainer(one.name)
        if one.whole and one.of_run and one.step is not None and named:
            patterns.setdefault((one.series, one.step), set()).add(pattern_of(one.name))
    apart = {(model, pattern) for (model, _), own in patterns.items() if len(own) > 1 for pattern in own}

    def apart_by_name(entry: CatalogEntry) -> CatalogEntry:
        pattern = pattern_of(entry.name)
        return replace(entry, series=f"{entry.series} {pattern}") if (entry.series, pattern) in apart else entry

    return [one._replace(entry=apart_by_name(one.entry)) for one in found]


def _with_series(storage: Storage, found: Sequence[_Listed]) -> list[_Listed]:
    """Tell the models of commits apart whose manifests have no digests: by the newest of each pattern of names."""
    unknown = [one for one in found if not one.entry.series and one.entry.whole]
    newest = {pattern_of(one.saved.name): one for one in sorted(unknown, key=lambda one: one.saved.number)}
    models: dict[str, str] = {}
    for pattern, one in newest.items() if len(newest) > 1 else ():
        try:
            models[pattern] = ", ".join(map(series, open_every(storage, one.entry.path)))
        except CkptError:
            models[pattern] = pattern
    own = {one.saved.name: one.entry.series or models.get(pattern_of(one.saved.name), "") for one in found}
    return [one._replace(entry=replace(one.entry, series=own[one.saved.name])) for one in found]


def _ranked(found: Sequence[_Listed]) -> list[_Listed]:
    """Return the entries with their ranks; the entries of each model are in its own order.

    What ``latest`` names shows which checkpoints of its own model were abandoned, and nothing about another model.
    """
    every = sorted(found, key=lambda one: one.entry.order, reverse=True)
    ordered = [one for one in every if not one.entry.is_skipped]
    saved = [one.saved for one in ordered]
    named = next((one.entry.name for one in ordered if one.entry.latest and one.entry.format != "universal"), "")
    names = [one.name for one in newest_first(saved, last_after(saved, named))]
    names += [one.entry.name for one in every if one.entry.is_skipped]
    ranks = {name: rank for rank, name in enumerate(reversed(names), 1)}
    model_of = {one.saved.name: one.entry.series for one in ordered}
    models = {*model_of.values()} - {""}
    groups = [(saved, named)]
    if len(models) > 1:
        groups = []
        for model in sorted(models):
            own = [one for one in saved if model_of[one.name] in {model, ""}]
            of_model = named if model_of.get(named) == model else ""
            names = [one.name for one in newest_first(own, last_after(own, of_model)) if model_of[one.name] == model]
            ranks |= dict(zip(names, sorted((ranks[name] for name in names), reverse=True), strict=True))
            groups.append(([one for one in own if model_of[one.name] == model], of_model))
    whole = {one.entry.name for one in ordered if one.entry.whole and one.entry.of_run}
    mixed = {one.entry.name for one in ordered if one.entry.mixed}
    resumes: dict[str, str] = {}
    for own, of_model in groups:
        last = max((one.name for one in own if one.name in whole), key=lambda name: ranks[name], default="")
        first = next((one.name for one in newest_first(own, of_model) if one.name in whole), "")
        after = may_follow([one for one in own if one.name in whole or one.name == of_model], of_model)
        found_here = {first: "a restore takes it", after: "the last commit, which may be newer than latest"}
        if last in mixed:
            sound = max((one.name for one in own if one.name in whole - mixed), key=lambda n: ranks[n], default="")
            found_here[sound] = f"{last} may be of two saves"
        resumes |= {name: why for name, why in found_here.items() if name in whole - {last}}
    return [
        one._replace(entry=replace(one.entry, rank=ranks[one.entry.name], resumes=resumes.get(one.entry.name, "")))
        for one in every
    ]


def _with_best(storage: Storage, root: str, found: Sequence[_Listed], problems: list[str]) -> list[CatalogEntry]:
    """Mark the checkpoints that the trainer's state names as the best: in the newest checkpoints, and in the root."""
    newest: dict[str, int] = {}  # of each model: another one, and a save of no trainer, have no trainer's state
    for one in (listed.entry for listed in found if listed.entry.whole):
        newest[one.series] = max(newest.get(one.series, 0), one.rank)
    recent = [one for one in found if one.entry.rank >= newest.get(one.entry.series, 0)]
    problems += [one.problem for one in recent if one.problem and one.entry.whole]
    paths = [path for one in recent for path in one.best]
    try:
        if storage.exists(posixpath.join(root, TRAINER_STATE)):
            paths += _best_in(storage, posixpath.join(root, TRAINER_STATE))
    except CkptError as error:
        problems.append(f"{TRAINER_STATE} {error.problem}")
    names = {posixpath.basename(path.rstrip("/")) for path in paths}
    # In a directory of Ray Train checkpoints have other names than the trainer gave them.
    steps = {step_in(name, TRAINER) for name in names - {one.entry.name for one in found}} - {None}
    return [replace(one.entry, best=one.entry.name in names or one.entry.step in steps) for one in found]


def _best_in(storage: Storage, path: str) -> list[str]:
    """Return the path of the best checkpoint in a file ``trainer_state.json``; none without one.

    Raises:
        CkptError: The file cannot be read.
    """
    hint = "restore it from a copy, or remove it"
    best = read_json(storage, path, "the state of a trainer", hint, MAX_TRAINER_STATE).get("best_model_checkpoint")
    return [best] if isinstance(best, str) else []


def _best_of_lightning(state: Mapping[Any, Any]) -> list[str]:
    """Return the paths of the best checkpoints in the states of Lightning's callbacks."""
    callbacks = state.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    paths = [one.get("best_model_path") for one in states if isinstance(one, dict)]
    return [path for path in paths if isinstance(path, str) and path]


def _named(root: Place, names: Sequence[str] | None) -> tuple[set[str], list[str]]:
    """Return the directories that the ``latest`` files of a root name, and the problems of those files."""
    found: set[str] = set()
    problems: list[str] = []
    for pointer in filter(None, (root.latest, root.latest_universal, root.step_pointer)):
        latest, tag = posixpath.basename(pointer.path), pointer.tag
        if pointer.error is not None:
            problems.append(f"{latest} cannot be read: {pointer.error.problem}")
            continue
        if len(tag) > MAX_TAG:
            problems.append(f"{latest} has {len(tag):,} characters, too many for the name of a checkpoint")
            continue
        parts = posixpath.normpath(tag).split("/")
        if not tag or parts[0] in {"", ".", ".."} or not root.storage.is_dir(posixpath.join(root.path, *parts)):
            problems.append(f"{latest} names {brief(tag, 200)}, which does not exist" if tag else f"{latest} is empty")
        elif names is None or parts[0] in names:
            found.add(parts[0])
    return found, problems


def _present_entry(found: Found, latest: bool, reported: bool, opening: Opening) -> _Listed | None:
    """Return the entry of a directory; None if it is not a checkpoint or has been removed meanwhile."""
    try:
        return _read_entry(found, latest, reported, opening)
    except CkptError as error:  # of the storage, or of a manifest that several engines share
        found.storage.refresh([])
        if not found.storage.is_dir(found.path):
            return None
        return _unread(found, _first([error], found.path), latest=latest, reported=reported)


def _read_entry(found: Found, latest: bool, reported: bool, opening: Opening) -> _Listed | None:
    storage, name, path = found.storage, found.tag, found.path
    state = "" if found.outside else state_of(storage, path)
    link = found.link
    if link is not None and found.outside:
        problem = f"is a link that {NOT_FOLLOWED}"
        return _unread(found, problem, link=link, latest=latest, reported=reported)
    errors = _moved(found)
    checkpoint: Checkpoint | None = None
    if is_half_removed(storage, path):
        errors.append(LayoutError(path, HALF_REMOVED, ""))
    else:
        holds_one = reported or is_of_trainer(name) or _has_shards_alone(storage, path)
        try:
            checkpoint = _first_model(path, opening, errors)
        except NoCheckpointError as error:
            shards = _has_shards_alone(storage, path)
            unfinished = holds_one and (shards or unfinished_below(storage, path))
            if not reported and not is_commit(storage, path) and not unfinished:
                return None
            errors.append(error)
        except CkptError as error:
            if not holds_one and not is_commit(storage, path) and error.path in Place(storage, path).below():
                return None  # a root further below, whose checkpoints nothing chooses among
            if error not in errors:  # the raised error may be among the reported ones
                errors.append(error)
        own = holds_one or is_commit(storage, path)
        if checkpoint is not None and not own and checkpoint.root in Place(storage, path).below():
            return None  # its checkpoints belong to another root
        if (checkpoint is None or checkpoint.root == path) and not is_commit(storage, path):
            errors += _own_root(storage, path, holds_one=holds_one)
    if is_named(name, TRAINER, ACCELERATE):
        errors += _cut_beside_tag(storage, path)
    metrics = _numbers(checkpoint.client_state) if checkpoint else {}
    torn, being_saved = _torn(storage, path, errors)
    lost = found.damaged
    directory = commit_directory(storage, checkpoint.location)[0] if checkpoint else path
    manifest: Manifest | None = None
    if is_commit(storage, directory):
        try:
            manifest = read_manifest(storage, directory)
            missing = size_problems(storage, directory, manifest)
            errors += missing
            lost |= bool(missing) and _lost(storage, directory, manifest)
            metrics |= manifest.metrics
        except CkptError as error:
            errors.append(error)
    torn = _incomplete(storage, path) if lost else torn
    nbytes, modified, sorts = _files(storage, path)
    one = CatalogEntry(
        name=name,
        path=path,
        format=checkpoint.format if checkpoint else None,
        stage=checkpoint.stage if checkpoint else None,
        world_size=checkpoint.topology.world_size if checkpoint else None,
        step=_step_of(checkpoint, manifest),
        nbytes=0 if link else nbytes,
        modified=modified,
        whole=checkpoint is not None and not errors,
        problem=_first(errors, path) if errors else None,
        latest=latest,
        link=link,
        metrics=metrics,
        reported=reported,
        saved=modified if manifest is None else manifest.created,
        thin=None if manifest is None else manifest.thin or None,
        pin=find_pin(storage, path),
        torn=torn,
        being_saved=being_saved,
        mixed=checkpoint is not None and any("two saves are mixed" in str(note) for note in checkpoint.notes),
        state=state,
        series=""
        if checkpoint is None
        else series(checkpoint) + ("" if checkpoint.location == path else " in a folder"),
        sorts=sorts,
        committed=manifest is not None,
        of_run=checkpoint is not None and _is_of_run(checkpoint, manifest),
    )
    marked = storage.exists(posixpath.join(directory, MARK))
    saved = Saved.of(name, one.order[0], manifest, marked=marked, written=modified or 0.0)
    best, problem = _best_of_lightning(checkpoint.client_state) if checkpoint else [], ""
    for above, _ in below(storage, path, TRAINER_STATE):
        try:
            best += _best_in(storage, posixpath.join(above, TRAINER_STATE))
        except CkptError as error:
            problem = f"{name}/{TRAINER_STATE} {error.problem}"
    return _Listed(one, saved, tuple(best), problem)


def _is_of_run(checkpoint: Checkpoint, manifest: Manifest | None) -> bool:
    """Return whether a run has saved a checkpoint and can go on from it."""
    if checkpoint.stage is not None:
        return True
    saved = checkpoint.format in {"dcp", "safetensors"} and manifest is not None
    return saved or (checkpoint.format == "dcp" and has_optimizer(checkpoint) and checkpoint.step is not None)


def _has_shards_alone(storage: Storage, path: str) -> bool:
    """Return whether a directory has shards of a distributed checkpoint without its metadata: torch writes it last."""
    names = {entry.name for entry in storage.listing(path) if not entry.is_dir}
    return METADATA not in names and any(name.endswith(SHARD) for name in names)


def _cut_beside_tag(storage: Storage, path: str) -> list[CkptError]:
    """Return errors for files in the folder of a trainer that are cut off: weights, scheduler and random states."""
    errors: list[CkptError] = []
    for entry in storage.listing(path):
        is_weights = entry.name.endswith(".safetensors")
        if entry.is_dir or not (is_weights or BESIDE_TAG.fullmatch(entry.name)):
            continue
        try:
            with storage.open(posixpath.join(path, entry.name), ahead=True) as reader:
                safetensors.parse(reader) if is_weights else read_torch_file(reader)
        except TruncatedError as error:
            errors.append(error)
        except ContainerError:
            continue  # of another form, which its framework may read
    return errors


def _moved(found: Found) -> list[CkptError]:
    """Return an error for a checkpoint that a restore has skipped, and a save has marked or moved."""
    if found.damage is None:
        return []
    return [LayoutError(found.path, f"{SKIPPED}{found.damage}", "")]


def _files(storage: Storage, path: str) -> tuple[int, float | None, frozenset[str]]:
    """Return the bytes of all files below a directory, the time of the newest, and ``CatalogEntry.sorts``."""
    files: list[tuple[str, Entry]] = []
    with contextlib.suppress(StorageError):
        files.extend(walk(storage, path))
    times = [entry.modified for _, entry in files if entry.modified is not None]
    sorts = frozenset(pattern_of(name) for name, _ in files) - BESIDE
    return sum(entry.nbytes for _, entry in files), max(times, default=None), sorts


def _step_of(checkpoint: Checkpoint | None, manifest: Manifest | None) -> int | None:
    """Return the step of a checkpoint; of several engines, the step of the one that the save names first."""
    if manifest is not None and manifest.engines:
        return manifest.step
    return checkpoint.step if checkpoint else None


def _first_model(path: str, opening: Opening, errors: list[CkptError]) -> Checkpoint:
    """Open the checkpoint in a directory; of several models, all, and return the first.

    Raises:
        CkptError: One cannot be read.
    """
    try:
        return open_checkpoint(path, opening=opening, report=errors.append)
    except (NoCheckpointError, SeveralModelsError) as error:
        if not error.directories:
            raise
        first, *_ = [open_checkpoint(one, opening=opening, report=errors.append) for one in error.directories]
        return first


def _torn(storage: Storage, path: str, errors: Sequence[CkptError]) -> tuple[str | None, bool]:
    """Return ``CatalogEntry.torn`` and ``being_saved`` of a directory whose reading raised some errors."""
    if not errors or is_half_removed(storage, path):
        return None, False
    if unfinished := unfinished_below(storage, path):
        beside = path not in unfinished and _holds_weights(storage, path)  # a trainer wrote them before its tag
        alive = any(is_alive(read_mark(storage, directory)) for directory in unfinished)
        return BESIDE_WEIGHTS if beside else UNCOMMITTED, alive
    if storage.is_dir(posixpath.join(path, UNIVERSAL_STATES)):
        return None, False  # a universal checkpoint: a conversion writes it, not a save
    readable = all(isinstance(error, LayoutError | ContainerError) for error in errors)
    lost = readable and (_has_shards_alone(storage, path) or any(_proves_loss(storage, error) for error in errors))
    return _incomplete(storage, path) if lost else None, False


def _incomplete(storage: Storage, path: str) -> str:
    """Return ``CatalogEntry.torn`` of a directory that lacks files."""
    return BESIDE_WEIGHTS if _holds_weights(storage, path) else INCOMPLETE


def _holds_weights(storage: Storage, path: str) -> bool:
    """Return whether files of weights are in a directory or below it, as PEFT writes named adapters."""
    return any(WEIGHTS.fullmatch(posixpath.basename(name)) for name, _ in walk(storage, path))


def _lost(storage: Storage, directory: str, manifest: Manifest) -> bool:
    """Return whether a file of a manifest is missing or cut off; a longer one was changed after the save."""
    sizes = {name: entry.nbytes for name, entry in walk(storage, directory)}
    return any(sizes.get(name, -1) < file.nbytes for name, file in manifest.files.items())


def _proves_loss(storage: Storage, error: CkptError) -> bool:
    """Return whether an error is about a file that is missing or cut off.

    A damaged file does not count: killed saves do not leave any, and much of it may still be read.
    """
    return isinstance(error, TruncatedError) or is_gone(storage, error)


def _unread(found: Found, problem: str, *, link: str | None = None, latest: bool, reported: bool) -> _Listed:
    """Return the entry of a link that leaves the root, or of a directory that cannot be read."""
    entry = CatalogEntry(
        name=found.tag,
        path=found.path,
        format=None,
        stage=None,
        world_size=None,
        step=None,
        nbytes=0,
        modified=None,
        whole=False,
        problem=problem,
        latest=latest,
        link=link,
        metrics={},
        reported=reported,
    )
    return _Listed(entry, Saved(found.tag, -1))


def _own_root(storage: Storage, path: str, *, holds_one: bool) -> list[CkptError]:
    """Return an error for a directory that contains checkpoints but is not one; trainers' directories are accepted."""
    entries = storage.listing(path)
    if has_files_of_tag(entries):
        return []
    tags = [one for one in scan(storage, path, depth=1) if one.is_tag and not one.damaged]
    trainers = holds_one or any(e.name == TRAINER_STATE for e in entries)
    if not tags or (trainers and len(tags) in {1, len(Place(storage, path).of_one_save)}):
        return []
    what = "a checkpoint" if len(tags) == 1 else f"{len(tags)} checkpoints"
    return [LayoutError(path, f"{OWN_ROOT}, with {what}", "")]


def _first(errors: list[CkptError], path: str) -> str:
    """Format the first error relative to the checkpoint's path, with the number of further errors."""
    own = next((e for e in errors if e.problem.startswith(OWN_ROOT)), None)
    if own is not None:
        return "; ".join([own.problem, *(error.problem for error in errors if error is not own)][:2])
    link = next((e for e in errors if isinstance(e, LinkError)), None)
    if link is not None:
        return f"{link.path.removeprefix(path).lstrip('/')}: is reached through a link that {NOT_FOLLOWED}"
    unread = next(filter(is_unread, errors), None)
    first = unread or errors[0]
    inside = "" if first.path == path else first.path.removeprefix(f"{path}/")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{UNREADABLE if unread else ''}{inside}{': ' if inside else ''}{first.problem}{more}"


def _numbers(state: Mapping[Any, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    visited = 0

    def visit(prefix: str, value: object, depth: int) -> None:
        nonlocal visited
        visited += 1  # a dict may refer to the same dict hundreds of times, and so on in every level
        if visited > MAX_VISITED or len(found) >= MAX_NUMBERS or depth > 8 or len(prefix) > MAX_NAME:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                if visited > MAX_VISITED:
                    return
                if isinstance(key, str | int):
                    visit(f"{prefix}.{key}" if prefix else str(key), inner, depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # Python's integers may exceed the largest float
                found[prefix] = float(value)

    visit("", dict(state), 0)
    return found
