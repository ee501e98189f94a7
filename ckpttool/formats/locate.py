"""Find the directory of a tag from the path of a source."""

from __future__ import annotations

import contextlib
import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.commit import is_commit
from ckpttool.errors import LayoutError, StorageError
from ckpttool.formats.fields import WHOLE
from ckpttool.formats.layouts import ENGINES, FILE, ROOT, TRAINER, Place, is_name, trainer_folders
from ckpttool.formats.location import Location
from ckpttool.formats.scan import has_files_of_tag, natural_order
from ckpttool.messages import brief, similar
from ckpttool.storage import MANIFEST, MARK, parent, whole_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.storage import Entry, Storage


MAX_RUNS = 20
"""Most checkpoints that an error names."""
_SCHEMES = frozenset({"s3", "gs", "az", "abfs", "http", "https"})
"""Schemes of URLs that are often written with one slash."""


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
    Foreign(
        "shards of a distributed checkpoint without .metadata",
        r"__\d+_\d+\.distcp",
        hint="torch writes that file last: the save was interrupted; use another checkpoint",
    ),
)
"""Layouts of other frameworks, by names that only they use.

Source: verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py; Accelerate 1.15, utils/fsdp_utils.py; torchtitan 0.3,
components/checkpoint.py; Megatron-LM, training/checkpointing.py (``get_checkpoint_name``); torch_checkpointing 0.1.1,
``CheckpointManager.save``."""


class NoCheckpointError(LayoutError):
    """A directory contains no DeepSpeed checkpoint; it may have another format."""

    directories: Sequence[str] = ()
    """Directories further below that contain checkpoints."""


class SeveralModelsError(LayoutError):
    """A directory contains the checkpoints of several models of one run."""

    directories: Sequence[str] = ()
    """The directory of each."""


def locate(here: Place, tag: str | None) -> Location:
    """Find the directory of a tag.

    Args:
        here: A checkpoint root with ``latest`` (such as a Hugging Face Trainer's ``checkpoint-N``), or the directory
            of a tag.
        tag: The tag; None for the newest.

    Raises:
        LayoutError: The directory contains no checkpoint or several, or ``latest`` names a missing one.
        StorageError: The storage cannot be read.
    """
    storage, src = here.storage, here.path
    if not storage.exists(src):
        raise StorageError(src, "does not exist", f"{_similar_path(here)}check the path")
    if here.kind == FILE:
        refuse_part(here)
        raise StorageError(src, "is not a directory", "pass a checkpoint root or a tag's directory")
    if here.rank_files and here.kind != ROOT and (tag in {None, here.name} or not here.has_tag(tag or "")):
        return _tag_itself(here, tag)
    if tag is None and here.kind == ENGINES:
        raise _several(src, [posixpath.join(src, name) for name in here.tags])
    if tag is None and here.pointer is None and not here.has_tags_of_root:
        return _of_trainer(here)
    if tag is None:
        refuse_several(here)
    tag = _tag_in(here) if tag is None else tag
    if not here.has_tag(tag):
        raise LayoutError(src, f"holds no checkpoint of tag {brief(tag, 200)}", *_choose(here, tag))
    directory = posixpath.join(src, tag)
    if storage.exists(posixpath.join(directory, MANIFEST)) and not has_files_of_tag(storage.listing(directory)):
        return locate(Place(storage, directory), None)  # raises: it contains several engines
    return Location(src, directory, tag, strays=tuple(here.strays))


def refuse_part(here: Place) -> None:
    """Refuse a file that is a part of a checkpoint.

    Raises:
        StorageError: It is one; names the directory to pass.
    """
    if here.whole is not None:
        raise StorageError(here.path, "is one file of a checkpoint, not a checkpoint", f"pass {here.whole}")


def _tag_itself(here: Place, tag: str | None) -> Location:
    """Return the directory of a tag.

    Raises:
        LayoutError: Another tag is wanted, or the directory may be opened as another checkpoint, too.
    """
    above = parent(whole_path(here.path))
    if tag is not None and tag != here.name:
        raise LayoutError(here.path, f"is the directory of tag {here.name}, not of {brief(tag, 200)}", f"pass {above}")
    refuse_rivals(here)
    return Location(above, here.path, here.name)


def _tag_in(root: Place) -> str:
    """Return the newest tag of a root: the one that ``latest`` names, or else the only one.

    Raises:
        LayoutError: ``latest`` names no tag, or there is none and there are several tags.
    """
    if root.pointer is None:
        if len(root.tags) > 1:
            raise LayoutError(root.path, f"holds {len(root.tags)} checkpoints and no latest", *_choose(root))
        return root.tags[0]
    path, tag, error = root.pointer
    if error is not None:
        raise error
    if not is_name(tag):
        raise LayoutError(path, "does not name a tag", *_choose(root))
    if not root.has_tag(tag):
        raise LayoutError(path, f"names {brief(tag, 200)}, which is not there", *_choose(root))
    return tag


def _of_trainer(here: Place) -> Location:
    """Return the newest checkpoint in the output directory of a Hugging Face Trainer that can be located.

    Raises:
        NoCheckpointError: There is none.
    """
    for directory in here.trainers:
        with contextlib.suppress(LayoutError):
            return locate(Place(here.storage, directory), None)
    below = here.below()
    if not below and (foreign := _foreign(here.path, here.entries)):
        raise NoCheckpointError(here.path, f"contains {foreign[0]}, which ckpttool does not read", foreign[1])
    nested = [one.tag for one in trainer_folders(here.found, TRAINER)][::-1]
    inner = [path[len(here.path) :].lstrip("/") for path in below]
    nested = nested or ([*dict.fromkeys([*inner, *here.of_other_formats])] if here.tags or not inner else inner)
    problem = f"contains {len(nested)} checkpoints and no latest" if len(nested) > 1 else "contains no checkpoint"
    error = NoCheckpointError(here.path, f"{problem} itself" if len(nested) == 1 else problem, _inside(here, nested))
    error.directories = here.engines
    raise error


def refuse_several(here: Place) -> None:
    """Refuse a directory with the models of one save, if ``latest`` names one of them, which is the last.

    Raises:
        SeveralModelsError: There are several.
    """
    if here.of_one_save and (here.pointer is None or here.pointer.tag in here.of_one_save):
        raise _several(here.path, [posixpath.join(here.path, name) for name in here.of_one_save])


def refuse_rivals(here: Place) -> None:
    """Refuse a directory that may be opened as one of several checkpoints, where nothing decides which.

    Raises:
        LayoutError: It has files of ranks, or of another format, beside tags that no ``latest`` chooses among.
    """
    if not here.rivals:
        return
    names = ", ".join(here.rivals[:MAX_RUNS])
    beside = f"holds {brief(here.marker or here.rank_files[0])} of one checkpoint"
    if here.pointer is None:
        newest = posixpath.join(here.path, here.rivals[-1])
        problem = f"{beside} beside the checkpoints {names}, and no latest"
        raise LayoutError(here.path, problem, f"pass {newest}, or move the files in {here.path} to another directory")
    problem = f"{beside}, but {posixpath.basename(here.pointer.path)} names {brief(names, 200)}, which is not there"
    hint = f"restore {brief(names, 200)} from a copy, or remove {here.pointer.path} to read these files"
    raise LayoutError(here.path, problem, hint)


def refuse_unfinished(storage: Storage, directory: str) -> None:
    """Refuse a directory that is being written, or that a killed run left incomplete.

    Raises:
        LayoutError: It has ckpttool's in-progress marker.
    """
    if not storage.exists(posixpath.join(directory, MARK)) or is_commit(storage, directory):
        return
    from ckpttool.formats.unfinished import saved_by_another  # few checkpoints have the marker

    if not saved_by_another(storage, directory):
        problem = "is being written, or was left half-written by a killed run"
        raise LayoutError(directory, problem, "wait for that run, or write it again")


def _foreign(src: str, entries: list[Entry]) -> tuple[str, str] | None:
    """Return the content of a directory with the layout of another framework, and the next step."""
    names = sorted((f"{e.name}/" if e.is_dir else e.name for e in entries), key=natural_order)
    for layout in FOREIGN:
        found = [name for name in names if re.fullmatch(layout.name, name)]
        if found:
            hint = f"pass {posixpath.join(src, found[-1].rstrip('/'))}" if layout.inside else layout.hint
            return layout.what, hint
    return None


def inner_directory(here: Place, tag: str | None) -> str | None:
    """Return the directory of a checkpoint below the root of a run, or below a directory with one checkpoint.

    Args:
        here: A run of verl, torchtitan, or the Trainer with FSDP; a step of verl; or another directory.
        tag: Name of a step; None for the newest that is complete by its names.

    Raises:
        LayoutError: The run has no such step, or the step has the checkpoints of several models.
    """
    below = here.below() if tag is None else []
    found = here.steps
    without_tags = bool(here.tags) and not here.has_tags_of_root
    if (len(below) > 1 and not without_tags) or (without_tags and not found):
        return None
    choose = f"choose one with tag: {', '.join(found[-MAX_RUNS:])}"
    if tag is not None:
        if found and tag not in found:
            choose = f"{similar(tag, found)}{choose}"
            raise LayoutError(here.path, f"holds no checkpoint of tag {brief(tag, 200)}", choose, ("tag",))
        found = [name for name in found if name == tag]
    elif here.step_pointer is not None:
        path, named, _ = here.step_pointer
        if named not in found:
            raise LayoutError(path, f"names {brief(named, 200)}, which is not there", choose, ("tag",))
        found = [named]
    for name in reversed(found):
        step = Place(here.storage, posixpath.join(here.path, name))
        if step.is_complete_step:
            return step.path
        if step.models:
            return _only_model(step)
    inner = _only_model(here) if tag is None else None
    return below[0] if inner is None and below else inner


def _only_model(step: Place) -> str | None:
    """Return the directory of the model in a step of verl; None without one.

    Raises:
        SeveralModelsError: There are several.
    """
    if len(step.models) > 1:
        raise _several(step.path, step.models)
    return next(iter(step.models), None)


def _several(path: str, directories: Sequence[str]) -> SeveralModelsError:
    names = " and ".join(map(posixpath.basename, directories))
    error = SeveralModelsError(path, f"has the checkpoints of {names}", f"pass one of them: {directories[0]}")
    error.directories = directories
    return error


def _inside(here: Place, nested: Sequence[str]) -> str:
    if here.of_ray:
        newest = [each[0] for each in here.of_ray]
        return f"pass the newest checkpoint of the run: {' or, saved without ckpttool, '.join(newest)}"
    if runs := here.runs:
        return f"pass a run below it: {', '.join(runs[:MAX_RUNS])}"
    if nested:
        return f"pass one of its checkpoints: {', '.join(nested[:MAX_RUNS])}"
    return "pass a checkpoint root (with a file named latest) or a tag's directory"


def _similar_path(missing: Place) -> str:
    """Return the start of a hint at a path that may be meant: beside a missing one, or with the slashes of a URL."""
    scheme, slash, rest = missing.path.partition(":/")
    if slash and scheme in _SCHEMES and not rest.startswith("/"):
        return f"did you mean {scheme}://{rest}? "
    above = Place(missing.storage, parent(missing.path))
    with contextlib.suppress(StorageError):
        return similar(missing.name, [entry.name for entry in above.entries if not entry.name.startswith(".")])
    return ""


def _choose(root: Place, meant: str = "") -> tuple[str, tuple[str, ...]]:
    """Return a hint at the tags of a root, without unfinished saves and directories set aside as damaged."""
    if not root.tags:
        return "the root contains no checkpoint of DeepSpeed or ckpttool", ()
    finished = {one.tag for one in root.found if one.is_tag and not one.marked and not one.damaged}
    tags = [tag for tag in root.tags if tag in finished] or root.tags
    return f"{similar(meant, tags)}choose one with tag: {', '.join(tags)}", ("tag",)
