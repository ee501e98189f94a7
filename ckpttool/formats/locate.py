"""Find the directory of a tag from the path of a source."""

from __future__ import annotations

import contextlib
import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.commit import is_commit
from ckpttool.errors import LayoutError, StorageError
from ckpttool.formats.fields import WHOLE
from ckpttool.formats.scan import (
    MAX_PARTS,
    OF_RAY,
    OWN_OF_RAY,
    has_files_of_tag,
    named_tag,
    natural_order,
    scan,
    trainer_folders,
)
from ckpttool.formats.zero.files import parse_name
from ckpttool.messages import brief
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, MARK, is_url, parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.formats.scan import Found
    from ckpttool.storage import Entry, Storage

MAX_TAG = 1024
"""Most characters of a tag: S3 has no longer names; a longer text is not a valid ``latest``."""
MAX_RUNS = 20
"""Most checkpoints that an error names."""


class Foreign(NamedTuple):
    """The layout of another framework, which is not read as a whole."""

    what: str
    """Description for errors."""
    name: str
    """Regular expression of the name of a file; with a final slash, of a directory."""
    inside: bool = False
    """Whether to pass that file or directory: the newest, if there are several."""
    hint: str = WHOLE
    """What to do instead, otherwise."""


FOREIGN = (
    Foreign("the optimizer's files of verl without its model", r"optim_world_size_\d+_rank_\d+\.pt"),
    Foreign("a run of verl", r"global_step_\d+/", inside=True),
    Foreign("a step of verl", r"(actor|critic)/", inside=True),
    Foreign(
        "flat parameters of FSDP1, as Accelerate saves them for each rank",
        r"pytorch_model_fsdp(_\d+)?_rank_?\d+\.bin",
        hint="load it in the run, and save it with the state_dict_type SHARDED_STATE_DICT, or under FSDP2",
    ),
    Foreign("the weights of FSDP, as Accelerate saves them", r"pytorch_model_fsdp(_\d+)?\.bin", inside=True),
    Foreign("a checkpoint of FSDP, as Accelerate saves it", r"pytorch_model_fsdp(_\d+)?/", inside=True),
    Foreign("a run of torchtitan", r"step-\d+/", inside=True),
    Foreign("the files of single ranks of Megatron", r"mp_rank_\d{2}(_\d{3})*/|model_optim_rng\.pt"),
    Foreign("a run of Megatron", r"iter_\d{7}/", inside=True),
    Foreign(
        "a checkpoint of Orbax",
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+/",
        hint="restore it with orbax-checkpoint, and save the weights as safetensors",
    ),
    Foreign("files of torch_checkpointing without DTensors", r"(model|optimizer|train)_\d+\.pt"),
)
"""Layouts of other frameworks, by names that only they use.

Source: verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py; Accelerate 1.15, utils/fsdp_utils.py; torchtitan 0.3,
components/checkpoint.py; Megatron-LM, training/checkpointing.py (``get_checkpoint_name``); torch_checkpointing 0.1.1,
``CheckpointManager.save``."""


OF_STEP = r"(?:global_step_|step-|checkpoint-)\d+"
"""Directories of the steps of a run: of verl, torchtitan, and the Trainer."""
VERL_STEP = "global_step_"
"""Begin of the name of a step of verl."""
VERL_LATEST = "latest_checkpointed_iteration.txt"
"""File of verl with the number of the newest step, written after all of its files."""
OF_VERL = ("actor", "critic")
"""Directories of the models in a step of verl."""
OF_FSDP = r"\.metadata|model\.safetensors\.index\.json|pytorch_model_fsdp_0|pytorch_model_fsdp_0_rank\d+\.bin"
"""Names by which a step of torchtitan or of the Trainer is complete; torchtitan skips others, too."""


class NoCheckpointError(LayoutError):
    """A directory contains no DeepSpeed checkpoint; it may have another format."""

    directories: Sequence[str] = ()
    """Directories further below that contain checkpoints."""


class SeveralModelsError(LayoutError):
    """A directory contains the checkpoints of several models of one run."""

    directories: Sequence[str] = ()
    """The directory of each."""


class Location(NamedTuple):
    """One checkpoint on a storage."""

    root: str
    """The checkpoint root: the parent directory of the tag."""
    directory: str
    """Directory of the tag."""
    tag: str
    """Name of the tag."""
    others: tuple[str, ...] = ()
    """Directories of the same tag from other nodes, each with the files of some ranks."""
    trust_names: bool = False
    """Whether to accept files whose recorded name differs from their name."""
    order: tuple[str, ...] = ()
    """Parameters in the order of the optimizer, for files that number them; empty if it is unknown."""


def locate(storage: Storage, src: str, tag: str | None) -> Location:
    """Find the directory of a tag.

    ``src`` is a checkpoint root with ``latest`` (such as a Hugging Face Trainer's ``checkpoint-N``), or a tag's
    directory.

    Raises:
        LayoutError: The directory contains no checkpoint or several, or ``latest`` names a missing one.
        StorageError: The storage cannot be read.
    """
    src = src.rstrip("/") or src
    if not storage.exists(src):
        raise StorageError(src, "does not exist", "check the path")
    if not storage.is_dir(src):
        if parse_name(posixpath.basename(src)):
            problem = "is one file of a checkpoint, not a checkpoint"
            raise StorageError(src, problem, f"pass {parent(src)}")
        raise StorageError(src, "is not a directory", "pass a checkpoint root or a tag's directory")
    entries = storage.listing(src)
    if has_files_of_tag(entries):
        # "." has a name and a parent, too.
        whole = posixpath.abspath(src) if not is_url(src) and posixpath.basename(src) in {".", ".."} else src
        root, name = parent(whole), posixpath.basename(whole)
        if tag is not None and tag != name:
            raise LayoutError(src, f"is the directory of tag {name}, not of {tag}", f"pass {root}")
        return Location(root, src, name)
    found = scan(storage, src, depth=1)
    if tag is None and any(e.name == MANIFEST for e in entries) and (engines := _tags(found)):
        raise _several(src, [posixpath.join(src, name) for name in engines])
    if tag is not None:
        if not _is_there(storage, src, tag):
            raise LayoutError(src, f"holds no checkpoint of tag {brief(tag, 200)}", *_choose(_tags(found)))
    elif latest := next((n for n in (LATEST, LATEST_UNIVERSAL) if _is_file(storage, posixpath.join(src, n))), None):
        tag = _read_latest(storage, src, found, latest)
    else:
        tags = _tags(found)
        for directory in _of_trainer(found) if not tags else ():
            with contextlib.suppress(LayoutError):
                return locate(storage, directory, None)
        if not tags:
            below = checkpoints_below(storage, src)
            if not below and (foreign := _foreign(src, entries)):
                raise NoCheckpointError(src, f"contains {foreign[0]}, which ckpttool does not read", foreign[1])
            error = NoCheckpointError(src, "contains no checkpoint", _look_elsewhere(src, found, below))
            error.directories = below
            raise error
        if len(tags) > 1:
            raise LayoutError(src, f"holds {len(tags)} checkpoints and no latest", *_choose(tags))
        tag = tags[0]
    directory = posixpath.join(src, tag)
    if storage.exists(posixpath.join(directory, MANIFEST)) and not has_files_of_tag(storage.listing(directory)):
        return locate(storage, directory, None)  # raises: it contains several engines
    return Location(src, directory, tag)


def holds_checkpoint(storage: Storage, path: str) -> bool:
    """Return whether a directory is the directory of a tag, or a root with ``latest``.

    Raises:
        StorageError: The directory cannot be read.
    """
    entries = storage.listing(path) if storage.is_dir(path) else []
    names = {entry.name for entry in entries if not entry.is_dir}
    return has_files_of_tag(entries) or not names.isdisjoint({LATEST, LATEST_UNIVERSAL, MANIFEST})


def checkpoints_below(storage: Storage, path: str, depth: int = MAX_PARTS) -> list[str]:
    """Return the directories below a path that contain DeepSpeed checkpoints; not those further below them.

    Scripts of Ray's pages save into a subdirectory of a checkpoint of Ray, with a name of their own; Ray's callbacks
    for the Trainer and Lightning, into "checkpoint" and "checkpoint.ckpt".

    Args:
        storage: The storage.
        path: The directory.
        depth: Number of levels below the path.

    Raises:
        StorageError: A directory cannot be read.
    """
    found = []
    for one in scan(storage, path, depth=1):
        if one.hidden or one.outside:
            continue
        named = any(_is_file(storage, posixpath.join(one.path, name)) for name in (LATEST, LATEST_UNIVERSAL))
        if named or one.is_tag or _tags(scan(storage, one.path, depth=1)):
            found.append(one.path)
        elif depth > 1:
            found += checkpoints_below(storage, one.path, depth - 1)
    return sorted(found, key=natural_order)


def refuse_unfinished(storage: Storage, directory: str) -> None:
    """Refuse a directory that is being written, or that a killed run left incomplete.

    Raises:
        LayoutError: It has ckpttool's in-progress marker.
    """
    if storage.exists(posixpath.join(directory, MARK)) and not is_commit(storage, directory):
        problem = "is being written, or was left half-written by a killed run"
        raise LayoutError(directory, problem, "wait for that run, or write it again")


def _is_file(storage: Storage, path: str) -> bool:
    return storage.exists(path) and not storage.is_dir(path)


def _read_latest(storage: Storage, src: str, found: list[Found], latest: str) -> str:
    path, tag = posixpath.join(src, latest), named_tag(storage, src, latest)
    if not _is_name(tag):
        raise LayoutError(path, "does not name a tag", *_choose(_tags(found)))
    if not _is_there(storage, src, tag):
        raise LayoutError(path, f"names {brief(tag, 200)}, which is not there", *_choose(_tags(found)))
    return tag


def _tags(found: list[Found]) -> list[str]:
    """Return the directories that are tags. Slow for many tags; called only without a tag."""
    return sorted((one.tag for one in found if one.is_tag), key=natural_order)


def _of_trainer(found: list[Found]) -> list[str]:
    """Return the checkpoints of a Hugging Face Trainer that have ``latest``, written last; the newest first."""
    folders = trainer_folders(found, "-")
    return [one.path for one in folders if _is_file(one.storage, posixpath.join(one.path, LATEST))]


def trainer_directories(storage: Storage, src: str) -> list[str]:
    """Return the checkpoints in the output directory of a Hugging Face Trainer, newest first; else none.

    Raises:
        StorageError: The storage cannot be read.
    """
    if not storage.is_dir(src) or any(storage.exists(posixpath.join(src, n)) for n in (LATEST, LATEST_UNIVERSAL)):
        return []
    found = scan(storage, src, depth=1) if not has_files_of_tag(storage.listing(src)) else []
    directories = _of_trainer(found)
    return directories if len(directories) > 1 and not _tags(found) else []


def _foreign(src: str, entries: list[Entry]) -> tuple[str, str] | None:
    """Return the content of a directory with the layout of another framework, and the next step."""
    names = sorted((f"{e.name}/" if e.is_dir else e.name for e in entries), key=natural_order)
    for layout in FOREIGN:
        found = [name for name in names if re.fullmatch(layout.name, name)]
        if found:
            hint = f"pass {posixpath.join(src, found[-1].rstrip('/'))}" if layout.inside else layout.hint
            return layout.what, hint
    return None


def framework_directory(storage: Storage, src: str, tag: str | None) -> str | None:
    """Return the directory of a checkpoint in the root of a run of verl, torchtitan, or the Trainer with FSDP.

    Args:
        storage: The storage.
        src: The root.
        tag: Name of the directory; None for the newest that is complete by its names.

    Raises:
        LayoutError: The run has no such step, or the step has the checkpoints of several models.
    """
    entries = storage.listing(src) if storage.is_dir(src) else []
    found = sorted((e.name for e in entries if e.is_dir and re.fullmatch(OF_STEP, e.name)), key=natural_order)
    if tag is not None:
        if found and tag not in found:
            hint = f"choose one with tag: {', '.join(found[-MAX_RUNS:])}"
            raise LayoutError(src, f"holds no checkpoint of tag {brief(tag, 200)}", hint, ("tag",))
        found = [name for name in found if name == tag]
    elif any(name.startswith(VERL_STEP) for name in found) and storage.exists(posixpath.join(src, VERL_LATEST)):
        named = VERL_STEP + storage.read_text(posixpath.join(src, VERL_LATEST)).strip()
        if named not in found:
            path = posixpath.join(src, VERL_LATEST)
            hint = f"choose one with tag: {', '.join(found[-MAX_RUNS:])}"
            raise LayoutError(path, f"names {brief(named, 200)}, which is not there", hint, ("tag",))
        found = [named]
    for name in reversed(found):
        path = posixpath.join(src, name)
        inside = storage.listing(path)
        if any(re.fullmatch(OF_FSDP, entry.name) for entry in inside):
            return path
        if directory := _model_of_verl(path, inside):
            return directory
    return _model_of_verl(src, entries) if tag is None else None


def _model_of_verl(step: str, entries: Sequence[Entry]) -> str | None:
    """Return the directory of the model in a step of verl; None without one.

    Raises:
        SeveralModelsError: There are several.
    """
    models = sorted(posixpath.join(step, entry.name) for entry in entries if entry.is_dir and entry.name in OF_VERL)
    if len(models) > 1:
        raise _several(step, models)
    return models[0] if models else None


def _several(path: str, directories: Sequence[str]) -> SeveralModelsError:
    names = " and ".join(map(posixpath.basename, directories))
    error = SeveralModelsError(path, f"has the checkpoints of {names}", f"pass one of them: {directories[0]}")
    error.directories = directories
    return error


def _look_elsewhere(src: str, found: list[Found], below: Sequence[str]) -> str:
    nested = [one.tag for one in trainer_folders(found, "-")][::-1] or [path[len(src) :].lstrip("/") for path in below]
    if newest := _newest_of_ray(src, found):
        return f"pass the newest checkpoint of the run: {' or, saved without ckpttool, '.join(newest)}"
    if nested:
        return f"pass one of its checkpoints: {', '.join(nested[:MAX_RUNS])}"
    return "pass a checkpoint root (with a file named latest) or a tag's directory"


def _newest_of_ray(src: str, found: list[Found]) -> list[str]:
    """Return the newest commit in a run directory of Ray Train, and the newest checkpoint saved without ckpttool."""
    own = [one for one in found if OWN_OF_RAY.fullmatch(one.tag)]
    numbers = [(c.manifest.number, one.tag) for one in own for c in scan(one.storage, one.path, depth=1) if c.manifest]
    names = [max(numbers, default=(0, ""))[1], max((o.tag for o in found if OF_RAY.fullmatch(o.tag)), default="")]
    return [posixpath.join(src, name) for name in names if name]


def _choose(tags: list[str]) -> tuple[str, tuple[str, ...]]:
    if not tags:
        return "the root contains no other checkpoint: restore it from a copy", ()
    return f"choose one with tag: {', '.join(tags)}", ("tag",)


def _is_name(tag: str) -> bool:
    """Return whether a tag is a path inside its root. DeepSpeed accepts any text, such as "epoch1/step5"."""
    return len(tag) <= MAX_TAG and tag.isprintable() and not any(part in {"", ".", ".."} for part in tag.split("/"))


def _is_there(storage: Storage, src: str, tag: str) -> bool:
    """Return whether there is a tag, or a directory that may not be listed: reading it raises the error."""
    directory = posixpath.join(src, tag)
    try:
        entries = storage.listing(directory) if _is_name(tag) and storage.is_dir(directory) else []
        return has_files_of_tag(entries) or any(entry.name == MANIFEST for entry in entries)
    except StorageError:
        return True
