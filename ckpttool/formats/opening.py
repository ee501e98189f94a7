"""Open a checkpoint: from a path to the format that recognizes it, and to its layout."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import budget
from ckpttool.arguments import checked_path
from ckpttool.checksums import chunk_records
from ckpttool.commit import has_manifest, is_commit, split_directory
from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError, StorageError
from ckpttool.formats.fields import raise_at_once
from ckpttool.formats.layouts import FILE, MARKED, OTHER, ROOT, RUN, TAG, TRAINER, Place, is_of_trainer, trainer_folders
from ckpttool.formats.locate import (
    NoCheckpointError,
    SeveralModelsError,
    inner_directory,
    locate,
    refuse_part,
    refuse_rivals,
    refuse_unfinished,
)
from ckpttool.formats.location import Location
from ckpttool.formats.scan import natural_order
from ckpttool.formats.series import cut_off, has_optimizer, other_models
from ckpttool.formats.sidecars import with_rank_states
from ckpttool.formats.stand_ins import Explainer
from ckpttool.formats.table import FORMATS, formats_with_tags
from ckpttool.messages import name_some
from ckpttool.other_packages import call, formats
from ckpttool.storage import (
    WAIT,
    Opening,
    connect,
    is_half_removed,
    is_url,
    local_path,
    open_storage,
    parent,
    scheme_of,
    without_credentials,
    without_secrets,
)
from ckpttool.storage.confined import local_storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.commit.checksummed import ChecksummedStorage
    from ckpttool.formats.fields import Report
    from ckpttool.model import Checkpoint
    from ckpttool.registry import Format
    from ckpttool.storage import Storage


Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A checkpoint: one directory (or file of weights), or several directories with the files of some ranks each."""


def source_paths(src: Source) -> list[str]:
    """Return the directories of a source.

    Raises:
        ArgumentError: The source is empty, or not a path.
    """
    if isinstance(src, str | os.PathLike):
        return [checked_path("src", src)]
    try:
        paths = [os.fspath(path) for path in src]
    except TypeError:
        problem = f"is a {type(src).__name__}, not a path or URL or a sequence of them"
        raise ArgumentError("src", problem, "pass the directory of a checkpoint") from None
    if not paths:
        raise ArgumentError("src", "is empty", "pass the directory of a checkpoint")
    return paths


def source_storage(paths: Sequence[str], opening: Opening) -> Storage:
    """Open the storage of a source; the first directory determines it.

    Args:
        paths: The directories.
        opening: How to open it.

    Raises:
        StorageError: The scheme is unknown, or its package is not installed.
    """
    if is_url(paths[0]):
        return open_storage(paths[0], opening.storage_options)
    return local_storage([local_path(path) for path in paths if not is_url(path)], follow_links=opening.follow_links)


def open_checkpoint(
    src: Source,
    *,
    tag: str | None = None,
    opening: Opening = Opening(),
    report: Report = raise_at_once,
    unfinished: bool = False,
    storage: Storage | None = None,
    trust_names: bool = False,
    module_only: bool = False,
) -> Checkpoint:
    """Read the layout of a checkpoint of any format.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a directory of safetensors or DCP; or several
            directories, each with the files of some ranks.
        tag: Tag to open in a root; default: the one that ``latest`` names.
        opening: How to open its storage.
        report: Receives findings after which reading can continue; the default raises the first.
        unfinished: Also read checkpoints with ckpttool's in-progress marker.
        storage: Its storage; default: opened by the path.
        trust_names: Accept files whose recorded name differs from their name.
        module_only: Accept a checkpoint of stage 1 or 2 with the file of the model alone.

    Raises:
        CkptError: The checkpoint is missing or damaged.
    """
    paths = source_paths(src)
    storage = storage or source_storage(paths, opening)
    if any(scheme_of(path) != scheme_of(paths[0]) for path in paths):
        problem = f"is not on the same storage as {without_secrets(paths[0])}"
        raise LayoutError(without_secrets(paths[-1]), problem, "pass directories of one storage")
    places = [without_credentials(local_path(path)) for path in paths]
    with budget.opening():
        explainer = Explainer(storage, report, partial(_whole_beside, storage, places[0], tag))
        try:
            checkpoint = _open(places, storage, tag, explainer, Accepted(unfinished, trust_names, module_only))
        except CkptError as error:
            if (better := explainer.explain(error)) is error:
                raise
            raise better from error
    # One listing detects files that changed meanwhile; local files are checked when they are read.
    if storage.remote and not (storage.reads_versions and all(file.version for file in checkpoint.files)):
        files = [checkpoint.path(i) for i in range(len(checkpoint.files))]
        storage.refresh(files)
        for path, file in zip(files, checkpoint.files, strict=True):
            if storage.open(path).version != file.version:
                raise StorageError(path, "changed while it was being read", WAIT)
    return checkpoint


LIVE_ORDER = "the optimizer's parameters are numbered, and read in the order of the live optimizer"
"""Remark on a checkpoint that ``in_order`` has read."""


def in_order(checkpoint: Checkpoint, order: Sequence[str], sizes: Sequence[int] = ()) -> Checkpoint:
    """Read files that number the optimizer's parameters again, with the order of the optimizer.

    A checkpoint without ZeRO that does not fit the order is returned as it is if shapes alone name its parameters.

    Args:
        checkpoint: A checkpoint of any format; returned as it is if it needs no order.
        order: Parameters in the order of the optimizer.
        sizes: Number of parameters of each of its groups, if they are known.

    Raises:
        PlanError: The files number other parameters than the optimizer has.
        CkptError: A file cannot be read.
    """
    from ckpttool.formats.state_files import read_state_files
    from ckpttool.formats.weights import UNREAD
    from ckpttool.formats.zero.stage0 import SEVERAL_ORDERS
    from ckpttool.model.names import ORDER

    numbered = next((known for known in FORMATS if known.numbered and checkpoint.format in known.kinds), None)
    whole = any(remark.endswith(UNREAD) for remark in checkpoint.remarks)
    unordered = checkpoint.left_out or {ORDER, SEVERAL_ORDERS} & {*checkpoint.remarks}
    if not (numbered and unordered) and not whole:
        return checkpoint
    where = (checkpoint.root, checkpoint.location, checkpoint.tag)
    location = Location(*where, trust_names=True, order=tuple(order), sizes=tuple(sizes))  # opened before
    again = read_state_files if numbered is None else partial(_read, numbered)
    found = again(connect(checkpoint.storage), location, raise_at_once) or checkpoint
    if checkpoint.stage == 0 and ORDER in found.remarks:
        return checkpoint  # shapes alone name the parameters, in other groups than the optimizer's
    if found.left_out or {ORDER, SEVERAL_ORDERS}.intersection(found.remarks) or (whole and found is checkpoint):
        problem = (
            f"does not fit the optimizer: {found.left_out or 'it numbers other parameters than the optimizer has'}"
        )
        hint = "build model and optimizer as at the save, or pass weights_only=True for the weights alone"
        raise PlanError(checkpoint.location, problem, hint, ("weights_only",))
    agrees = checkpoint.stage == 0 and [name for group in checkpoint.groups for name in group.parameters] == [*order]
    return found if agrees else replace(found, remarks=(*found.remarks, LIVE_ORDER))


def _whole_beside(storage: Storage, path: str, tag: str | None) -> str | None:
    """Return the last of the few newest tags of a root that is whole and was not chosen.

    Returns:
        "" if no such tag is whole, or the caller chose a tag or its directory; None without another tag.
    """
    try:
        here = Place(storage, path.rstrip("/") or path)
        if here.kind == TAG:  # not its ``saved``: they open checkpoints, also this one
            return "" if Place(storage, parent(here.path)).tags != [here.name] else None
        others = [one.tag for one in here.saved if one.tag != (tag or here.newest) and not one.link]
        if not others or (here.pointer is None and len(others) == 1):
            return None
        if tag is not None or here.kind != ROOT:
            return ""
        tags = sorted(others, key=natural_order, reverse=True)
        return next((one for one in tags[:MAX_TRIED] if is_whole(storage, posixpath.join(path, one))), "")
    except CkptError:
        return ""


MAX_TRIED = 4
"""Most tags that are opened to find a whole one for an error message."""


def is_whole(storage: Storage, path: str) -> bool:
    """Return whether a checkpoint can be opened, without reading tensor bytes."""
    try:
        open_every(storage, path)
    except CkptError:
        return False
    return True


def can_resume(storage: Storage, path: str) -> bool:
    """Return whether a checkpoint can be opened and has its optimizer, without reading tensor bytes."""
    try:
        return all(has_optimizer(one) and not one.thin for one in open_every(storage, path))
    except CkptError:
        return False


def open_every(storage: Storage, path: str) -> list[Checkpoint]:
    """Open a complete checkpoint; if several engines were saved together, the checkpoint of each.

    Raises:
        CkptError: As for ``open_whole``.
    """
    return _each(partial(open_whole, storage), path)


def open_unfinished(storage: Storage, path: str) -> list[Checkpoint]:
    """Open the checkpoint of an unfinished save as ``open_every``; checkpoints beside it are not compared.

    Raises:
        CkptError: It is incomplete or damaged.
    """
    return _each(partial(open_checkpoint, storage=storage, unfinished=True, module_only=True), path)


def _each(open_: Callable[[str], Checkpoint], path: str) -> list[Checkpoint]:
    try:
        return [open_(path)]
    except SeveralModelsError as error:
        return [open_(one) for one in error.directories]


def open_whole(storage: Storage, path: str, *, committed: bool = False, module_only: bool = False) -> Checkpoint:
    """Open a complete checkpoint.

    Args:
        storage: Its storage.
        path: The directory of its tag.
        committed: Require a manifest.
        module_only: As for ``open_checkpoint``.

    Raises:
        PlanError: The manifest is missing.
        CkptError: The checkpoint is incomplete or damaged; tensor bytes are not checked.
    """
    if is_half_removed(storage, path):
        raise LayoutError(path, "is being removed", "use another tag")
    if committed and not is_commit(storage, _of_commit(storage, path)):
        problem = "has no manifest: ckpttool did not finish saving it, or the manifest was removed"
        raise PlanError(path, problem, "choose another tag, or restore without require_committed")
    return open_checkpoint(path, storage=storage, module_only=module_only)


OPTIMIZER = "optim_states.pt"
"""End of the names of files of the optimizer."""


class Accepted(NamedTuple):
    """Checkpoints to open that are otherwise refused; the fields are parameters of ``open_checkpoint``."""

    unfinished: bool
    trust_names: bool
    module_only: bool


def _open(paths: Sequence[str], storage: Storage, tag: str | None, report: Report, accepted: Accepted) -> Checkpoint:
    first, *others = paths
    if not accepted.unfinished and storage.exists(first):
        refuse_unfinished(storage, first if storage.is_dir(first) else parent(first))
    here = Place(storage, first.rstrip("/") or first)
    if not others and storage.exists(here.path):
        found = _open_other(here, tag, report, accepted)
        if found is None and tag is None and here.kind in {FILE, RUN, OTHER}:
            found = _read_by_others(here)
        if found is not None:
            return found
    location = locate(here, tag)
    if others:
        directories = [
            locate(Place(storage, other.rstrip("/") or other), location.tag if tag else None).directory
            for other in others
        ]
        for directory in directories:
            if posixpath.basename(directory) != posixpath.basename(location.directory):
                problem = f"has a tag other than {location.directory}"
                raise LayoutError(
                    directory, problem, "pass directories of one checkpoint, or choose with tag", ("tag",)
                )
        location = location._replace(others=tuple(directories))
    location = location._replace(trust_names=accepted.trust_names, module_only=accepted.module_only)
    for directory in {location.root, location.directory} if not accepted.unfinished else ():
        refuse_unfinished(storage, directory)
    checked: ChecksummedStorage | None = None
    try:
        checked = _with_manifest(storage, location.directory, OPTIMIZER if location.module_only else "")
    except CkptError as error:
        report(error)
    checkpoint = _read_tagged(checked or storage, location, report)
    remarks = [*_of_strays(location), *_of_inner_run(here), *_of_other_models(here, tag, checkpoint)]
    checkpoint = replace(checkpoint, remarks=(*remarks, *checkpoint.remarks))
    if checked is not None:
        return _as_saved(checkpoint, checked, report)
    if checkpoint.format == "zero" and not has_optimizer(checkpoint) and not location.module_only:
        finding = cut_off(storage, checkpoint, partial(open_checkpoint, storage=storage))
        if finding is not None:
            report(finding)
    return checkpoint


def _of_strays(location: Location) -> list[str]:
    """Return a remark on the files beside ``latest`` that belong to no tag."""
    if not location.strays:
        return []
    return [f"{name_some(location.strays)} beside latest in {location.root}: not read, latest names {location.tag}"]


def _of_inner_run(here: Place) -> list[str]:
    """Return a remark on another run in the directory of a tag, which DeepSpeed would load from that path."""
    if here.kind != TAG or here.pointer is None or here.pointer.tag == here.name or not here.has_tag(here.pointer.tag):
        return []
    other = posixpath.join(here.path, here.pointer.tag)
    return [f"{posixpath.basename(here.pointer.path)} in {here.path} names another run's checkpoint, not read: {other}"]


def _of_other_models(here: Place, tag: str | None, checkpoint: Checkpoint) -> list[str]:
    """Return a remark on the checkpoints of other models in the root, if ``latest`` has chosen."""
    if tag is not None or here.kind != ROOT:
        return []
    names = other_models(here, checkpoint, partial(open_checkpoint, storage=here.storage))
    chosen = f"only {checkpoint.tag}, which latest names, is read"
    return [f"{here.path} has checkpoints of other models, too: {name_some(names, 3)}: {chosen}"] if names else []


def _open_other(here: Place, tag: str | None, report: Report, accepted: Accepted) -> Checkpoint | None:
    """Open a file, a checkpoint of a format without tags, or the newest checkpoint in the directory of a run.

    Returns:
        None for the directory or the root of a tag, and where nothing is found.
    """
    if tag is None and here.kind == FILE:
        refuse_part(here)
        return _read_unmarked(here.storage, here.path)
    if tag is None and here.kind == MARKED:
        refuse_rivals(here)
        return _read_marked(here.storage, here.path)
    if here.kind not in {RUN, OTHER}:
        return None
    if tag is None and here.trainers:
        folders = [one.path for one in trainer_folders(here.found, TRAINER)]
        return _newest_whole(here, here.trainers, folders, accepted)
    of_ray = here.of_ray if tag is None else []
    if len(of_ray) == 1 and (newest := _newest_whole(here, of_ray[0], of_ray[0], accepted)) is not None:
        return newest
    found = _read_unmarked(here.storage, here.path) if tag is None else None
    if found is None and (inner := inner_directory(here, tag)) is not None:
        opened = _open([inner], here.storage, None, report, accepted)
        return replace(opened, remarks=(*_passed(here, inner), *opened.remarks)) if tag is None else opened
    if tag is not None and is_of_trainer(tag) and here.storage.is_dir(posixpath.join(here.path, tag)):
        return _open([posixpath.join(here.path, tag)], here.storage, None, report, accepted)
    return found


def _read_by_others(here: Place) -> Checkpoint | None:
    """Read a file or a directory by the formats of other packages; None if no format fits."""
    location = Location(here.path, here.path, here.name)
    fitting = (known for known in formats() if not known.marker or _matches(known, here.storage, here.path))
    return next((found for f in fitting if (found := _read(f, here.storage, location, raise_at_once))), None)


def _passed(here: Place, inner: str) -> list[str]:
    """Return a remark on each step of a run that is later than the opened one, and not complete."""
    if here.step_pointer is not None:
        return []
    step = inner.removeprefix(here.path).strip("/").partition("/")[0]
    later = here.steps[here.steps.index(step) + 1 :] if step in here.steps else []
    return [f"{posixpath.join(here.path, name)}: is not complete; {step} was opened instead" for name in later]


def _newest_whole(
    here: Place, directories: Sequence[str], folders: Sequence[str], accepted: Accepted
) -> Checkpoint | None:
    """Open the newest complete checkpoint in the output directory of a Hugging Face Trainer, or in a run of Ray Train.

    Args:
        here: The directory.
        directories: Its checkpoints, newest first.
        folders: These, and the folders without a checkpoint that ckpttool reads, newest first.
        accepted: Checkpoints to open that are otherwise refused.

    Returns:
        None if there is one alone, or none is complete: opening the newest then reports its defects.
    """
    torn: list[CkptError] = []
    for directory in directories if len(folders) > 1 else ():
        try:
            found = _open([directory], here.storage, None, raise_at_once, accepted)
        except StorageError:
            raise
        except CkptError as error:
            torn.append(error)
            continue
        newer = [path for path in folders[: folders.index(directory)] if path not in directories]
        passed = [f"{e.path}: {e.problem}; the newest complete checkpoint was opened instead" for e in torn]
        passed += [f"{path}: is not a checkpoint of DeepSpeed; {directory} was opened instead" for path in newer]
        return replace(found, remarks=(*passed, *found.remarks))
    return None


def _as_saved(checkpoint: Checkpoint, checked: ChecksummedStorage, report: Report) -> Checkpoint:
    """Add the checksums of the manifest to the files of a checkpoint, and report files that it does not list.

    A file without checksums gets the manifest's; so does an archive whose ZIP directory the manifest does not cover.
    """
    files = []
    for n, file in enumerate(checkpoint.files):
        sums = checked.checksums.get(checkpoint.path(n))
        if sums is None:
            hint = "remove it, or restore the checkpoint from a copy"
            report(LayoutError(checkpoint.path(n), "is not in the manifest: it is not part of this save", hint))
        elif sums.directory is None or not (file.records and all(record.crc_recorded for record in file.records)):
            file = replace(file, records=chunk_records(sums))
        files.append(file)
    manifest = checked.manifest
    return replace(
        checkpoint,
        files=tuple(files),
        batch=manifest.batch,
        attempt=manifest.attempt,
        optimizer=manifest.optimizer,
        metrics=manifest.metrics,
        provenance=manifest.provenance,
        digests=manifest.digests,
    )


def _with_manifest(storage: Storage, directory: str, optional: str = "") -> ChecksummedStorage | None:
    """Return a storage that checks the structure of a checkpoint's files; None if the checkpoint has no manifest."""
    if not has_manifest(storage, directory) and not has_manifest(storage, split_directory(directory)[0]):
        return None
    from ckpttool.commit.checksummed import with_manifest  # most checkpoints have no manifest

    return with_manifest(storage, directory, optional)


def _of_commit(storage: Storage, path: str) -> str:
    """Return the directory of the commit that a checkpoint belongs to."""
    from ckpttool.commit.manifest import commit_directory  # most checkpoints have no manifest

    return commit_directory(storage, path)[0]


def _read_tagged(storage: Storage, location: Location, report: Report) -> Checkpoint:
    candidates = formats_with_tags(tagged=True)
    marked = (f for f in candidates if _matches(f, storage, location.directory))
    unmarked = (f for f in candidates if not f.marker)
    # A marker of a format may precede its commit: such a checkpoint is not read yet.
    found = next((found for f in (*marked, *unmarked) if (found := _read(f, storage, location, report))), None)
    if found is None:
        raise NoCheckpointError(location.directory, "holds no checkpoint of a known format", "check the path")
    return found if found.thin else with_rank_states(found, storage, location)


def _read_marked(storage: Storage, src: str) -> Checkpoint | None:
    """Read a checkpoint without tags from a directory with the marker of a format."""
    location = Location(src, src, posixpath.basename(src))
    for known in formats_with_tags(tagged=False):
        if _matches(known, storage, src):
            checked = _with_manifest(storage, src)
            found = _read(known, checked or storage, location, raise_at_once)
            return found if found is None or checked is None else _as_saved(found, checked, raise_at_once)
    return None


def _read_unmarked(storage: Storage, src: str) -> Checkpoint | None:
    """Read a file, or a directory of files, of a format that has neither tags nor a marker."""
    location = Location(src, src, posixpath.basename(src))
    if storage.is_dir(src) and has_manifest(storage, src):  # a file that identifies the commit may be lost
        _with_manifest(storage, src)
    unmarked = (f for f in formats_with_tags(tagged=False) if not f.marker)
    return next((found for f in unmarked if (found := _read(f, storage, location, raise_at_once))), None)


def _matches(known: Format, storage: Storage, directory: str) -> bool:
    """Return whether a directory has the marker of a format."""
    path = posixpath.join(directory, known.marker.rstrip("/"))
    return bool(known.marker) and (storage.is_dir(path) if known.marker.endswith("/") else storage.exists(path))


def _read(known: Format, storage: Storage, location: Location, report: Report) -> Checkpoint | None:
    """Read the layout of a checkpoint; None if the directory has another format.

    Raises:
        CkptError: The checkpoint is damaged, unless ``report`` collects the finding and reading can continue.
    """
    found: Checkpoint | None = call(known.reader, location.directory, storage, location, report)
    return found
