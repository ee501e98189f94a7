"""Describe a path, for every command: the kind of the directory, its tags and ``latest``; the layouts of runs.

Source: DeepSpeed 0.19, runtime/engine.py (``load_checkpoint``: ``latest`` alone names the tag) and
utils/zero_to_fp32.py; transformers 5.23, trainer_utils.py (``get_last_checkpoint``); verl 0.9,
utils/checkpoint/checkpoint_manager.py (``find_latest_ckpt_path``); torchtitan 0.3, components/checkpoint.py;
accelerate 1.15, accelerator.py (``save_state``: ``pytorch_model``, ``pytorch_model_1``, ... and one ``latest``).
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import CkptError, LinkError, StorageError
from ckpttool.formats.scan import (
    MAX_PARTS,
    Found,
    has_files_of_tag,
    last_number,
    named_tag,
    natural_order,
    pattern_of,
    scan,
)
from ckpttool.formats.table import formats_with_tags
from ckpttool.formats.zero.files import RUN_STATE, is_of_tag
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, is_link, parent, whole_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.storage import Entry, Storage

MAX_TAG = 1024
"""Most characters of a tag: S3 has no longer names; a longer text is not a valid ``latest``."""
FILE, TAG, ROOT, ENGINES, RUN, MARKED, OTHER = "file", "tag", "root", "engines", "run", "marked", "other"
"""Values of ``Place.kind``."""
MARKERS = tuple(known.marker for known in formats_with_tags(tagged=False) if known.marker)
"""Markers of the formats whose checkpoints have no tags; a directory's ends with a slash."""
_PART = re.compile(
    r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|__\d+_\d+\.distcp|\.metadata|latest(_universal)?|ckpttool\.json"
)
"""Names of files that are a part of a checkpoint or its root, beside DeepSpeed's: of verl, DCP and ckpttool."""
BESIDE_TAG = re.compile(r"(rng_state(_\d+)?|random_states_\d+|scheduler|optimizer(_\d+)?)\.(pth|pkl|pt|bin)")
"""Names of files that the Trainer and Accelerate save beside a checkpoint, which are not weights."""
WEIGHTS = re.compile(r".*\.safetensors|(pytorch_model|adapter_model)[^/]*\.bin|consolidated[^/]*\.pth")
"""Names of files of weights."""
_STEP = re.compile(r"(global_step|checkpoint|epoch|step|iter)[-_=]?\d+(\.ckpt)?|.*-step=\d+\.ckpt")
"""Names that frameworks give to the directory of a step."""
_MODEL_OF_SAVE = re.compile(r"pytorch_model(_\d+)?")
"""Names of the tags that Accelerate gives to the models of one save."""
_STAGED = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")
"""Names of staging directories."""
_INSIDE_TAG = frozenset({"zero", "offloaded_tensors", "tmp"})
"""Directories that DeepSpeed and its converter create in the directory of a tag."""


class RunLayout(NamedTuple):
    """How a framework arranges the checkpoints of a run: directories, most by step."""

    pattern: str
    """Regular expression of their names; a first group is the step."""
    complete: str = ""
    """Regular expression of a name inside by which one without tags is complete; "" if all have tags."""
    pointer: str = ""
    """File of the run with the number of the newest, which ``prefix`` precedes in its name."""
    prefix: str = ""
    """Start of the names."""
    models: tuple[str, ...] = ()
    """Directories of the models inside."""
    own_names: bool = True
    """Whether such a name is always of a directory above a tag, never of a tag."""


_OF_FSDP = r"\.metadata|model\.safetensors\.index\.json|pytorch_model_fsdp_0|pytorch_model_fsdp_0_rank\d+\.bin"
TRAINER = RunLayout(r"checkpoint-(\d+)", rf"{_OF_FSDP}|ckpttool\.json", prefix="checkpoint-")
"""Runs of the Trainer. Source: transformers 5.23, trainer_utils.py (``PREFIX_CHECKPOINT_DIR``)."""
ACCELERATE = RunLayout(r"checkpoint_(\d+)", prefix="checkpoint_")
"""Projects of Accelerate. Source: accelerate 1.15, accelerator.py (``save_state``)."""
RAY = RunLayout(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")
"""Checkpoints that Ray Train names."""
OWN_OF_RAY = RunLayout(r"ckpttool_(\d+)(_\d{6,})?_[0-9a-f]+", prefix="ckpttool_")
"""Saves of ckpttool in a run directory of Ray Train."""
VERL = RunLayout(
    r"global_step_(\d+)", _OF_FSDP, "latest_checkpointed_iteration.txt", "global_step_", ("actor", "critic"), False
)
"""Runs of verl, which writes the file that names the newest step after all others."""
RUNS = (
    TRAINER,
    ACCELERATE,
    RAY,
    OWN_OF_RAY,
    RunLayout(r".*\.ckpt"),  # Lightning
    RunLayout(r"step-(\d+)", _OF_FSDP, own_names=False),  # torchtitan
    VERL,
)
METRICS_OF_RAY = "ray_metrics.json"
"""File beside a commit with the metrics of its report; the manifest has only numbers."""


class Pointer(NamedTuple):
    """A file of a root that names the newest checkpoint."""

    path: str
    """Path of the file."""
    tag: str
    """The name in it; "" if it is empty or cannot be read."""
    error: CkptError | None = None
    """Why it cannot be read."""


@dataclass(frozen=True)
class Place:
    """A path, with its content. Its properties are read on demand.

    Every property may raise a StorageError if a directory cannot be read.
    """

    storage: Storage
    """Its storage."""
    path: str
    """Path or URL."""

    @cached_property
    def entries(self) -> list[Entry]:
        """The entries of the directory; empty for a file."""
        return self.storage.listing(self.path) if self.storage.is_dir(self.path) else []

    @cached_property
    def name(self) -> str:
        """The last component of the path, also of "."; of a directory that is being written the later one."""
        name = posixpath.basename(whole_path(self.path))
        staged = _STAGED.fullmatch(name)
        return name if staged is None else staged[1]

    @cached_property
    def rank_files(self) -> list[str]:
        """The names of the files of ranks in the directory itself."""
        return [entry.name for entry in self.entries if not entry.is_dir and is_of_tag(entry.name)]

    @property
    def pointer(self) -> Pointer | None:
        """The file ``latest``, or else ``latest_universal``; None without one."""
        return self.latest or self.latest_universal

    @cached_property
    def latest(self) -> Pointer | None:
        """The file ``latest``; None without one."""
        return self._pointer(LATEST)

    @cached_property
    def latest_universal(self) -> Pointer | None:
        """The file ``latest_universal``; None without one."""
        return self._pointer(LATEST_UNIVERSAL)

    @property
    def newest(self) -> str:
        """The tag that ``latest`` names, or else ``latest_universal``; "" if it cannot be read.

        Raises:
            LinkError: The file is a link that the storage does not follow.
        """
        if self.pointer is None:
            return ""
        if isinstance(self.pointer.error, LinkError):
            raise self.pointer.error
        return self.pointer.tag

    def _pointer(self, name: str) -> Pointer | None:
        path = posixpath.join(self.path, name)
        if not any(one.name == name and not one.is_dir for one in self.entries) and not is_link(self.storage, path):
            return None
        try:
            return Pointer(path, named_tag(self.storage, self.path, name))
        except CkptError as error:
            return Pointer(path, "", error)

    @cached_property
    def marker(self) -> str:
        """The marker of a format without tags; "" without one."""
        names = {f"{entry.name}/" if entry.is_dir else entry.name for entry in self.entries}
        return next((marker for marker in MARKERS if marker in names), "")

    @cached_property
    def kind(self) -> str:
        """The kind of the path.

        "file"; "tag": the directory of a tag; "engines": the tag of several engines; "root": it contains tags;
        "marked": a checkpoint of a format without tags, by its marker; "run": it contains the checkpoints of a
        framework; "other": weights, another framework's checkpoint, or none. ``latest`` with an existing tag decides
        over files beside it.
        """
        if not self.storage.is_dir(self.path):
            return FILE
        if self.pointer is not None and self.has_tag(self.pointer.tag) and not self._is_step:
            return ROOT
        if self.marker and RUN_STATE not in self.rank_files:
            return MARKED
        if self.rank_files:
            return TAG
        if self.pointer is not None:
            return ROOT
        if self.has_tags_of_root:
            return ENGINES if any(entry.name == MANIFEST for entry in self.entries) else ROOT
        return RUN if self.steps else OTHER

    @cached_property
    def has_tags_of_root(self) -> bool:
        """Whether it is the root of tags: a file ``latest`` in it would name one of them.

        It is not if all tags are folders of the Trainer, or thin checkpoints beside others without tags, as torch saves
        them.
        """
        tags = [one for one in self.found if one.is_tag]
        if not tags or all(is_named(one.tag, TRAINER) for one in tags):
            return False
        others = (one for one in self.found if not one.is_tag and not one.hidden and not one.outside)
        return not all(one.thin for one in tags) or not any(Place(self.storage, one.path).marker for one in others)

    @cached_property
    def _is_step(self) -> bool:
        """Whether the directory is a tag, although ``latest`` in it names a tag below: another run was saved there.

        It has files of ranks. Its manifest has its name, or it has a name that trainers choose for tags, in a root with
        ``latest``. A manifest of another name was copied.
        """
        return bool(self.rank_files) and ((self._has_name_of_step and self._is_in_root) or self._is_commit)

    @property
    def _has_name_of_step(self) -> bool:
        return _STEP.fullmatch(self.name) is not None and not is_of_trainer(self.name)

    @property
    def _is_in_root(self) -> bool:
        """Whether the directory above has a file ``latest``."""
        try:
            return Place(self.storage, parent(self.path)).pointer is not None
        except StorageError:
            return False

    @cached_property
    def _is_commit(self) -> bool:
        """Whether the directory is a commit under the name in its manifest."""
        manifest = Found(self.storage, *posixpath.split(whole_path(self.path))).manifest
        return manifest is not None and posixpath.basename(manifest.tag) == self.name

    @cached_property
    def strays(self) -> list[str]:
        """Files of ranks and markers of formats that belong to no tag, because ``latest`` names one."""
        beside = [*self.rank_files, *([self.marker] if self.marker else [])]
        return beside if self.kind == ROOT else []

    @cached_property
    def rivals(self) -> list[str]:
        """The names of other checkpoints that the directory may be opened as, if ``latest`` does not choose.

        Files of ranks, or the marker of a format, beside a ``latest`` that names a missing tag, or beside tags without
        a ``latest``.
        """
        if self.kind not in {TAG, MARKED}:
            return []
        if self.pointer is not None and self.pointer.error is None:
            names = {self.pointer.tag} - {self.name}
        else:
            below = (one for one in self.found if one.tag not in _INSIDE_TAG and not one.hidden and not one.outside)
            names = {*(one.tag for one in below if one.is_tag), *self.steps}
        certain = self.rank_files and self._has_name_of_step
        return [] if not names or certain or self._is_commit else sorted(names, key=natural_order)

    @cached_property
    def found(self) -> list[Found]:
        """The directories in this one."""
        return scan(self.storage, self.path, depth=1)

    @cached_property
    def tags(self) -> list[str]:
        """The directories that are tags. It lists each directory."""
        return sorted((one.tag for one in self.found if one.is_tag), key=natural_order)

    @cached_property
    def of_one_save(self) -> list[str]:
        """The tags that are the models of one save, which belong together; empty unless there are several."""
        names = [entry.name for entry in self.entries if entry.is_dir and _MODEL_OF_SAVE.fullmatch(entry.name)]
        found = [name for name in names if self.has_tag(name)] if len(names) > 1 else []
        return sorted(found, key=natural_order) if len(found) > 1 else []

    def compared(self, tag: str) -> list[str]:
        """The tags that may be of another model than a tag, by their names, the newest of each pattern.

        Tags of another pattern (``disc_step2`` beside ``gen_step2``), and those that end with the same number.
        """
        newest: dict[object, str] = {}
        for name in sorted((one.name for one in self.entries if one.is_dir), key=natural_order):
            if (pattern := pattern_of(name)) != pattern_of(tag):
                newest[pattern] = name
            elif name != tag and last_number(name) == last_number(tag):
                newest[name] = name
        return [name for name in newest.values() if not name.startswith(".") and self.has_tag(name)]

    def has_tag(self, tag: str) -> bool:
        """Return whether there is a tag, or a directory that may not be listed: reading it raises the error."""
        directory = posixpath.join(self.path, tag)
        try:
            inside = self.storage.listing(directory) if is_name(tag) and self.storage.is_dir(directory) else []
            return has_files_of_tag(inside) or any(entry.name == MANIFEST for entry in inside)
        except StorageError:
            return True

    @property
    def saved(self) -> list[Found]:
        """The directories from which a run may resume: commits, and the directories of tags.

        A directory below others is one only if it is a commit, or if ``latest`` names it. Hidden ones, unfinished saves
        and links that the storage does not follow are left out.

        Raises:
            LinkError: ``latest`` is or names a link that the storage does not follow.
        """
        named = self.newest
        below = {one.tag: one for one in scan(self.storage, self.path) if not one.hidden}
        found = {tag: one for tag, one in below.items() if "/" not in tag or one.committed}
        if "/" in named and is_name(named) and self.storage.is_dir(posixpath.join(self.path, named)):
            found.setdefault(named, Found(self.storage, self.path, named))
        if named in found and found[named].outside:
            self.storage.listing(found[named].path)  # raises the LinkError
        kept = (one for one in found.values() if not one.outside)
        return [one for one in kept if not one.damaged and (one.committed or (not one.marked and one.is_tag))]

    @property
    def folders(self) -> list[Found]:
        """The directories with names of the Trainer or of Accelerate, the last step first."""
        return trainer_folders(self.found)

    @cached_property
    def trainers(self) -> list[str]:
        """The checkpoints of a Hugging Face Trainer that have ``latest`` or a manifest, written last; newest first.

        Thin ones are none: the Trainer alone may have saved newer ones, without either file.
        """
        folders = [one for one in trainer_folders(self.found, TRAINER) if not one.thin]
        places = (Place(self.storage, one.path) for one in folders)
        return [here.path for here in places if here.has_file(LATEST) or here.has_file(MANIFEST)]

    @property
    def whole(self) -> str | None:
        """The directory of the checkpoint that a file is a part of; None for other files, such as whole weights."""
        above = parent(self.path)
        if is_of_tag(self.name) or _PART.fullmatch(self.name) or BESIDE_TAG.fullmatch(self.name):
            return above
        tag, inside, _ = above.rpartition("/zero")  # the states of a universal checkpoint
        return tag if inside and Place(self.storage, tag).rank_files else None

    @cached_property
    def steps(self) -> list[str]:
        """The names of the directories of a run of ``RUNS``, the oldest first."""
        names = [entry.name for entry in self.entries if entry.is_dir and layout_of(entry.name) is not None]
        return sorted(names, key=natural_order)

    @cached_property
    def step_pointer(self) -> Pointer | None:
        """The file of the run that names its newest step; None without one."""
        for layout in {layout_of(name): None for name in self.steps}:
            if layout is not None and layout.pointer and self.has_file(layout.pointer):
                path = posixpath.join(self.path, layout.pointer)
                return Pointer(path, layout.prefix + self.storage.read_text(path).strip())
        return None

    @property
    def is_complete_step(self) -> bool:
        """Whether a step of a run contains a file that is written last."""
        layout = layout_of(self.name)
        return layout is not None and any(re.fullmatch(layout.complete, entry.name) for entry in self.entries)

    @property
    def models(self) -> list[str]:
        """The directories of the models in a step of a run of verl."""
        known = {name for layout in RUNS for name in layout.models}
        return sorted(posixpath.join(self.path, one.name) for one in self.entries if one.is_dir and one.name in known)

    @property
    def reported(self) -> list[Found]:
        """The directories in a run directory of Ray Train that ``ray_train.report`` has made.

        Their names are ckpttool's own, or the metrics of the report are stored beside the commit.
        """
        shown = (one for one in self.found if not one.hidden)
        return [
            one
            for one in shown
            if is_named(one.tag, OWN_OF_RAY) or self.storage.exists(posixpath.join(one.path, METRICS_OF_RAY))
        ]

    @cached_property
    def of_ray(self) -> list[list[str]]:
        """The checkpoints in a run directory of Ray Train, newest first: ckpttool's, and those saved without ckpttool.

        Neither list is empty. The two have no common order.
        """
        own = [(_number_of_ray(one), one.tag) for one in self.found if is_named(one.tag, OWN_OF_RAY)]
        others = [one.tag for one in self.found if is_named(one.tag, RAY)]
        lists = [tag for _, tag in sorted(own, reverse=True)], sorted(others, reverse=True)
        return [[posixpath.join(self.path, tag) for tag in tags] for tags in lists if tags]

    @property
    def runs(self) -> list[str]:
        """The directories further below that contain the checkpoints of a run each, such as in Ray's storage path."""
        above: list[str] = []
        of_run: set[str] = set()
        for path in self.below():
            parts = path[len(self.path) :].strip("/").split("/")
            step = next((n for n, part in enumerate(parts) if is_of_trainer(part)), len(parts) - 1)
            above.append(path.removesuffix("/" + "/".join(parts[step:])))
            of_run |= {above[-1]} if is_of_trainer(parts[step]) else set()
        return sorted((of_run | {up for up in above if above.count(up) > 1}) - {self.path}, key=natural_order)

    @property
    def engines(self) -> list[str]:
        """The directories below that may be of the engines of one save, in one directory; not checkpoints of a run."""
        below = self.below()
        one_above = len({posixpath.dirname(path) for path in below}) == 1
        return below if one_above and not any(is_of_trainer(posixpath.basename(path)) for path in below) else []

    @property
    def of_other_formats(self) -> list[str]:
        """The names of the directories in it that have the marker of a format without tags, or files of weights."""
        names = []
        for one in self.found:
            with contextlib.suppress(StorageError):  # it may not be listed
                inner = Place(self.storage, one.path)
                weights = any(WEIGHTS.fullmatch(entry.name) for entry in inner.entries)
                names += [one.tag] if not one.hidden and (inner.marker or weights) else []
        return sorted(names, key=natural_order)

    @property
    def holds_checkpoint(self) -> bool:
        """Whether it is the directory of a tag or a commit, or a root with ``latest``."""
        return bool(self.rank_files) or any(self.has_file(name) for name in (LATEST, LATEST_UNIVERSAL, MANIFEST))

    def has_file(self, name: str) -> bool:
        """Return whether the directory contains a file of that name."""
        path = posixpath.join(self.path, name)
        return self.storage.exists(path) and not self.storage.is_dir(path)

    def below(self, depth: int = MAX_PARTS) -> list[str]:
        """Return the directories below that contain DeepSpeed checkpoints; not those further below them.

        Scripts of Ray's pages save into a subdirectory of a checkpoint of Ray, with a name of their own; Ray's
        callbacks for the Trainer and Lightning, into "checkpoint" and "checkpoint.ckpt".

        Args:
            depth: Number of levels below the path.
        """
        found = []
        for one in self.found:
            if one.hidden or one.outside:
                continue
            inner = Place(self.storage, one.path)
            if inner.has_file(LATEST) or inner.has_file(LATEST_UNIVERSAL) or one.is_tag or inner.tags:
                found.append(one.path)
            elif depth > 1:
                found += inner.below(depth - 1)
        return sorted(found, key=natural_order)


def is_named(name: str, *layouts: RunLayout) -> bool:
    """Return whether a directory has a name of one of some layouts."""
    return any(re.fullmatch(layout.pattern, name) for layout in layouts)


def named_alike(name: str, other: str) -> bool:
    """Return whether the names of two directories have the same text before the first number."""
    return re.split(r"\d", name, maxsplit=1)[0] == re.split(r"\d", other, maxsplit=1)[0]


def is_part(name: str) -> bool:
    """Return whether a file is a part of a checkpoint of ranks, by its name: not weights, and not ``latest``."""
    return is_of_tag(name) or (_PART.fullmatch(name) is not None and name not in {LATEST, LATEST_UNIVERSAL})


def is_below_step(path: str) -> bool:
    """Return whether a relative path leads through a directory with a name of a step."""
    return any(_STEP.fullmatch(part) for part in path.split("/"))


def layout_of(name: str) -> RunLayout | None:
    """Return the layout of checkpoints without tags that has directories of this name; None for other names."""
    return next((layout for layout in RUNS if layout.complete and is_named(name, layout)), None)


def is_of_trainer(name: str) -> bool:
    """Return whether frameworks, or ckpttool under Ray, choose such names for the directory above a tag."""
    return is_named(name, *(layout for layout in RUNS if layout.own_names))


def step_in(name: str, *layouts: RunLayout) -> int | None:
    """Return the step in the name of a directory of some layouts; None for other names."""
    found = (re.fullmatch(layout.pattern, name) for layout in layouts)
    return next((int(match[1]) for match in found if match is not None), None)


def trainer_folders(found: Iterable[Found], *layouts: RunLayout) -> list[Found]:
    """Return the directories with a trainer's names of checkpoints, the last step first.

    Args:
        found: A scan of one level.
        layouts: Their layouts; default: of the Trainer and of Accelerate.
    """
    steps = [
        (step, one) for one in found if (step := step_in(one.tag, *(layouts or (TRAINER, ACCELERATE)))) is not None
    ]
    return [one for _, one in sorted(steps, key=lambda pair: (pair[0], pair[1].tag), reverse=True)]


def _number_of_ray(one: Found) -> int:
    """Return the number of a commit in a run of Ray Train, by its manifest or else by its name; 0 if it is unknown."""
    numbers = [found.manifest.number for found in scan(one.storage, one.path, depth=1) if found.manifest]
    named = re.fullmatch(OWN_OF_RAY.pattern, one.tag)
    return max(numbers, default=int(((named and named[2]) or "_0")[1:]))


def is_name(tag: str) -> bool:
    """Return whether a tag is a path inside its root. DeepSpeed accepts any text, such as "epoch1/step5"."""
    return len(tag) <= MAX_TAG and tag.isprintable() and not any(part in {"", ".", ".."} for part in tag.split("/"))
