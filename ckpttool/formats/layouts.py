"""Describe a path, for every command: the kind of the directory, its tags and ``latest``; the layouts of runs.

Source: DeepSpeed 0.19, runtime/engine.py (``load_checkpoint``: ``latest`` alone names the tag) and
utils/zero_to_fp32.py; transformers 5.23, trainer_utils.py (``get_last_checkpoint``); verl 0.9,
utils/checkpoint/checkpoint_manager.py (``find_latest_ckpt_path``); torchtitan 0.3, components/checkpoint.py;
accelerate 1.15, accelerator.py (``save_state``: ``pytorch_model``, ``pytorch_model_1``, ... and one ``latest``).
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.scan import (
    MAX_PARTS,
    OF_RAY,
    OWN_OF_RAY,
    has_files_of_tag,
    last_number,
    named_tag,
    natural_order,
    pattern_of,
    scan,
    step_of_folder,
    trainer_folders,
)
from ckpttool.formats.zero.files import is_of_tag
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, is_link, parent, whole_path

if TYPE_CHECKING:
    from ckpttool.formats.scan import Found
    from ckpttool.storage import Entry, Storage

MAX_TAG = 1024
"""Most characters of a tag: S3 has no longer names; a longer text is not a valid ``latest``."""
FILE, TAG, ROOT, ENGINES, RUN, MARKED, OTHER = "file", "tag", "root", "engines", "run", "marked", "other"
"""Values of ``Place.kind``."""
DCP, DCP_PAIR = ".metadata", "pytorch_model_fsdp_0/"
"""Marker of torch.distributed.checkpoint, and of Accelerate's two of them."""
MARKERS = (DCP, DCP_PAIR)
"""Markers of the formats whose checkpoints have no tags; a directory's ends with a slash."""
_PART = re.compile(
    r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|__\d+_\d+\.distcp|\.metadata|latest(_universal)?|ckpttool\.json"
)
"""Names of files that are a part of a checkpoint or its root, beside DeepSpeed's: of verl, DCP and ckpttool."""
WEIGHTS = re.compile(r".*\.safetensors|(pytorch_model|adapter_model)[^/]*\.bin|consolidated[^/]*\.pth")
"""Names of files of weights."""
_STEP = re.compile(r"(global_step|checkpoint|epoch|step|iter)[-_=]?\d+(\.ckpt)?|.*-step=\d+\.ckpt")
"""Names that frameworks give to the directory of a step."""
_MODEL_OF_SAVE = re.compile(r"pytorch_model(_\d+)?")
"""Names of the tags that Accelerate gives to the models of one save."""
_INSIDE_TAG = frozenset({"zero", "offloaded_tensors", "tmp"})
"""Directories that DeepSpeed and its converter create in the directory of a tag."""


class RunLayout(NamedTuple):
    """How a framework arranges the checkpoints of a run: directories by step."""

    pattern: str
    """Regular expression of their names."""
    complete: str
    """Regular expression of a name inside by which one is complete."""
    pointer: str = ""
    """File of the run with the number of the newest, which ``prefix`` precedes in its name."""
    prefix: str = ""
    """Start of the names."""
    models: tuple[str, ...] = ()
    """Directories of the models inside."""


_OF_FSDP = r"\.metadata|model\.safetensors\.index\.json|pytorch_model_fsdp_0|pytorch_model_fsdp_0_rank\d+\.bin"
VERL = RunLayout(
    r"global_step_\d+", _OF_FSDP, "latest_checkpointed_iteration.txt", "global_step_", models=("actor", "critic")
)
"""Runs of verl, which writes the file that names the newest step after all others."""
RUNS = (RunLayout(r"checkpoint-\d+", _OF_FSDP), RunLayout(r"step-\d+", _OF_FSDP), VERL)
"""Runs of the Trainer with FSDP, of torchtitan and of verl, whose checkpoints are not DeepSpeed's."""


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
        """The last component of the path, also of "."."""
        return posixpath.basename(whole_path(self.path))

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
        if self.pointer is not None and self.has_tag(self.pointer.tag):
            return ROOT
        if self.marker:
            return MARKED
        if self.rank_files:
            return TAG
        if self.pointer is not None:
            return ROOT
        if self.tags:
            return ENGINES if any(entry.name == MANIFEST for entry in self.entries) else ROOT
        return RUN if self.steps else OTHER

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
        if self.kind not in {TAG, MARKED} or any(entry.name == MANIFEST for entry in self.entries):
            return []
        if self.pointer is not None and self.pointer.error is None:
            return [self.pointer.tag] if self.pointer.tag != self.name else []
        below = (one for one in self.found if one.tag not in _INSIDE_TAG and not one.hidden and not one.outside)
        return sorted({*(one.tag for one in below if one.is_tag), *self.steps}, key=natural_order)

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

    @cached_property
    def trainers(self) -> list[str]:
        """The checkpoints of a Hugging Face Trainer that have ``latest``, written last; the newest first."""
        folders = trainer_folders(self.found, "-")
        return [one.path for one in folders if Place(self.storage, one.path).has_file(LATEST)]

    @property
    def whole(self) -> str | None:
        """The directory of the checkpoint that a file is a part of; None for other files, such as whole weights."""
        above = parent(self.path)
        if is_of_tag(self.name) or _PART.fullmatch(self.name):
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
    def newest_of_ray(self) -> list[str]:
        """The newest commit in a run directory of Ray Train, and the newest checkpoint saved without ckpttool."""
        own = [one for one in self.found if OWN_OF_RAY.fullmatch(one.tag)]
        numbers = [
            (c.manifest.number, one.tag) for one in own for c in scan(one.storage, one.path, depth=1) if c.manifest
        ]
        names = [
            max(numbers, default=(0, ""))[1],
            max((o.tag for o in self.found if OF_RAY.fullmatch(o.tag)), default=""),
        ]
        return [posixpath.join(self.path, name) for name in names if name]

    @property
    def runs(self) -> list[str]:
        """The directories further below that contain the checkpoints of a run each, such as in Ray's storage path."""
        below = self.below()
        above = [posixpath.dirname(path) for path in below]
        of_run = {up for up, path in zip(above, below, strict=True) if is_of_trainer(posixpath.basename(path))}
        return sorted((of_run | {up for up in above if above.count(up) > 1}) - {self.path}, key=natural_order)

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


def is_part(name: str) -> bool:
    """Return whether a file is a part of a checkpoint of ranks, by its name: not weights, and not ``latest``."""
    return is_of_tag(name) or (_PART.fullmatch(name) is not None and name not in {LATEST, LATEST_UNIVERSAL})


def is_below_step(path: str) -> bool:
    """Return whether a relative path leads through a directory with a name of a step."""
    return any(_STEP.fullmatch(part) for part in path.split("/"))


def layout_of(name: str) -> RunLayout | None:
    """Return the layout of the run that has a step of this name; None for other names."""
    return next((layout for layout in RUNS if re.fullmatch(layout.pattern, name)), None)


def is_of_trainer(name: str) -> bool:
    """Return whether frameworks, or ckpttool under Ray, choose such names for the directory above a tag."""
    of_ray = OWN_OF_RAY.fullmatch(name) or OF_RAY.fullmatch(name)
    return of_ray is not None or step_of_folder(name) is not None or name.endswith(".ckpt")


def is_name(tag: str) -> bool:
    """Return whether a tag is a path inside its root. DeepSpeed accepts any text, such as "epoch1/step5"."""
    return len(tag) <= MAX_TAG and tag.isprintable() and not any(part in {"", ".", ".."} for part in tag.split("/"))
