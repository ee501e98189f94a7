"""Compare the checkpoints of a root: the checkpoints of one model are a series, and contain the same sorts of files."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.checksums import crc32
from ckpttool.commit import split_directory
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats.fields import OWN_WEIGHTS, RESTORE
from ckpttool.formats.layouts import ACCELERATE, TRAINER, Place, step_in
from ckpttool.formats.scan import Found, natural_order, scan
from ckpttool.formats.zero.files import parse_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.commit.manifest import Manifest
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

MAX_COMPARED = 4
"""Most checkpoints to open beside one that has no optimizer."""


def series(checkpoint: Checkpoint) -> str:
    """Return a text that differs for another model: of the names and shapes of its parameters and buffers."""
    shapes = {p.name: p.shape for p in checkpoint.parameters} | {b.name: b.state.shape for b in checkpoint.buffers}
    known = sorted((name, shape or (1,)) for name, shape in shapes.items())  # universal checkpoints: no 0-dim tensors
    return f"{crc32(repr(known).encode()):08x}"


def series_of(manifest: Manifest) -> str:
    """Return such a text for a commit, by the digests of its weights; "" without them."""
    tensors = (manifest.digests or {}).get("tensors")
    weights = tensors.get("weights") if isinstance(tensors, dict) else None
    if not isinstance(weights, dict) or not weights:
        return ""
    shapes = sorted((str(name), str(text).split(" ")[1:2]) for name, text in weights.items())
    return f"{crc32(repr(shapes).encode()):08x}"


def other_models(here: Place, checkpoint: Checkpoint, open_: Callable[[str], Checkpoint]) -> list[str]:
    """Return the tags of a root that are checkpoints of other models than the one that ``latest`` names.

    Only few tags are opened: the newest of each other pattern of names.

    Args:
        here: The root.
        checkpoint: The checkpoint that was opened.
        open_: As for ``cut_off``.
    """
    found = []
    for name in here.compared(checkpoint.tag)[:MAX_COMPARED]:
        try:
            if series(open_(posixpath.join(here.path, name))) != series(checkpoint):
                found.append(name)
        except CkptError:
            continue
    return found


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has states of an optimizer, also such that belong to no parameter."""
    return bool(checkpoint.groups or checkpoint.nonpartitionable)


def cut_off(storage: Storage, checkpoint: Checkpoint, open_: Callable[[str], Checkpoint]) -> LayoutError | None:
    """Return an error if another checkpoint of the model has files of the optimizer, and this one has none.

    Those in the same root are asked, and those in the other folders of a trainer.

    DeepSpeed writes those files last, so that a killed save or copy leaves none; releases before 0.6 record nowhere
    that there should be any.

    Args:
        storage: Storage of the checkpoint.
        checkpoint: A checkpoint without optimizer.
        open_: Opens the checkpoint in the directory of a tag.
    """
    try:
        found = scan(storage, checkpoint.root, depth=1)
        above, folder = split_directory(checkpoint.root)
        if step_in(folder, TRAINER, ACCELERATE) is not None:
            found += [one for each in Place(storage, above).folders for one in scan(storage, each.path, depth=1)]
    except CkptError:
        return None  # the tag alone may be readable
    beside = [one for one in found if one.path != checkpoint.location and _has_files(one)]
    for one in sorted(beside, key=lambda one: natural_order(one.path), reverse=True)[:MAX_COMPARED]:
        try:
            same = series(open_(one.path)) == series(checkpoint)
        except CkptError:
            continue
        if same:
            name = one.tag if one.root == checkpoint.root else posixpath.join(posixpath.basename(one.root), one.tag)
            problem = f"has no files of the optimizer, but {name} has: it may be cut off"
            return LayoutError(checkpoint.location, problem, RESTORE + OWN_WEIGHTS, ("weights_from",))
    return None


def _has_files(one: Found) -> bool:
    if one.hidden or one.outside:
        return False
    try:
        names = (parse_name(entry.name) for entry in one.entries if not entry.is_dir)
        return any(name is not None and name.kind.endswith("optimizer") for name in names)
    except CkptError:
        return False
