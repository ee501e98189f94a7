"""Thin checkpoints -> Checkpoint: the weights of a save, from which ``prune --thin`` removed the optimizer states.

The manifest says that a checkpoint is thin and lists its files: weights as safetensors, sidecar files, and RUN_STATE
with the other content of DeepSpeed's model-states files. Other files of the directory belong to a removal that was
killed, and are ignored.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.commit import has_manifest
from ckpttool.commit.manifest import read_manifest
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import TensorRef, walk
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import Fields
from ckpttool.formats.weights import read_safetensors
from ckpttool.formats.zero.files import RUN_STATE, parse_name
from ckpttool.model import MODULE, UNKNOWN_GROUP, Buffer, Checkpoint, CheckpointFile, Parameter, State, Topology
from ckpttool.model.places import Contiguous
from ckpttool.storage import LATEST

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.storage import Storage

SUFFIX = ".safetensors"
"""Suffix of the files with weights."""


def read_thin(storage: Storage, location: Location, _report: Report) -> Checkpoint | None:
    """Read the layout of a thin checkpoint, without tensor bytes.

    Returns:
        The layout; None if the manifest does not say that the checkpoint is thin.

    Raises:
        CkptError: The checkpoint is damaged.
    """
    directory = location.directory
    if not has_manifest(storage, directory):
        if any(parse_name(entry.name) for entry in storage.listing(directory)):
            return None
        problem = "was thinned by ckpttool, but has no manifest"
        raise LayoutError(directory, problem, f"restore ckpttool.json from a copy, or pass one file *{SUFFIX} of it")
    manifest = read_manifest(storage, directory)
    if not manifest.thin:
        return None
    names = [name for name in manifest.files if name.endswith(SUFFIX)]
    if not names or RUN_STATE not in manifest.files:
        raise LayoutError(directory, "is thin, but its manifest lists no weights", "restore it from a copy")
    weights = read_safetensors(storage, location, sorted(names))
    torch, file = read_state(storage, directory, RUN_STATE)
    fields = Fields(posixpath.join(directory, RUN_STATE), "", torch.root)
    return replace(
        with_kinds(weights, names_in(fields, "buffers"), frozenset(names_in(fields, "frozen"))),
        format="thin",
        thin=True,
        latest=LATEST,
        root=location.root,
        tells_buffers=True,
        topology=_topology(fields.child("ranks")),
        step=fields.optional("global_steps", int),
        samples=fields.count("global_samples"),
        skipped_steps=fields.optional("skipped_steps", int) or 0,
        deepspeed_version=fields.optional("ds_version", str),
        client_state=fields.get("client_state", dict),
        ds_config=fields.get("ds_config", dict),
        scheduler=torch.root.get("lr_scheduler"),
        embedded=embedded_in(torch, len(weights.files)),
        files=(*weights.files, file),
    )


def with_kinds(weights: Checkpoint, buffers: Collection[str], frozen: Collection[str]) -> Checkpoint:
    """Distinguish buffers, frozen and trained parameters, because files with weights alone do not record them."""
    states = {p.name: p.states[MODULE] for p in weights.parameters} | {b.name: b.state for b in weights.buffers}
    buffers = dict.fromkeys(buffers)
    return replace(
        weights,
        parameters=tuple(
            Parameter(name, state.shape, None if name in frozen else UNKNOWN_GROUP, {MODULE: state})
            for name, state in states.items()
            if name not in buffers
        ),
        buffers=tuple(Buffer(name, states[name]) for name in buffers if name in states),
    )


def names_in(fields: Fields, key: str) -> list[str]:
    """Return the names in a list of a run's state."""
    return [name for name in fields.get(key, list) if isinstance(name, str)]


def _topology(ranks: Fields) -> Topology:
    degrees: dict[str, Any] = {name: ranks.get(name, int) for name in Topology.__slots__}
    if any(count < 1 for count in degrees.values()):
        raise ranks.error("data_parallel", "is not a number of ranks")
    return Topology(**degrees)


def read_state(storage: Storage, directory: str, name: str) -> tuple[TorchFile, CheckpointFile]:
    """Read a file of ``torch.save`` with the state of a run, without tensor bytes.

    Raises:
        CkptError: It is damaged, or not a dict.
    """
    path = posixpath.join(directory, name)
    with storage.open(path, ahead=True) as reader:
        torch = read_torch_file(reader)
        file = CheckpointFile(name, reader.nbytes, "model", None, reader.version, records=torch.records)
    if not isinstance(torch.root, dict):
        raise LayoutError(path, "is not the state of a run", "restore it from a copy")
    return torch, file


def embedded_in(torch: TorchFile, index: int) -> dict[str, State]:
    """Locate the storages of the tensors in the client state and the scheduler."""
    found: dict[str, State] = {}
    for item in walk([torch.root]):
        if isinstance(item, TensorRef):
            ref = item.storage
            place = Contiguous(ref.numel, index, torch.storages[ref.key].start)
            found[ref.key] = State((ref.numel,), ref.dtype, place)
    return found
