"""Safetensors in which each rank has saved its blocks, as ``torch.distributed.checkpoint`` writes them -> Checkpoint.

No file contains the shape of a whole tensor or the number of ranks: a set without its last file is a smaller model.

Source: torch 2.13, distributed/checkpoint/hf_storage.py (``HuggingFaceStorageWriter``) and _hf_utils.py.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers import safetensors
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import MAX_DIMENSIONS, RESTORE
from ckpttool.formats.strided import boxes_of, merge_slices
from ckpttool.formats.tensors import states_in
from ckpttool.formats.weights import SHARDING, checkpoint_of_weights
from ckpttool.messages import brief
from ckpttool.model import CheckpointFile, State, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView, Mapping, Sequence

    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

NAME = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
"""The name of a file: the first number is the rank, from 1 on."""


class _Block(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    state: State


def read_shards(storage: Storage, location: Location, _report: Report) -> Checkpoint | None:
    """Read the layout of the files of all ranks, without tensor bytes.

    Returns:
        The layout; None if the directory has no such files.

    Raises:
        CkptError: A file is damaged, or the blocks of a tensor leave a gap or overlap.
    """
    if not storage.is_dir(location.directory):
        return None
    names = sorted(entry.name for entry in storage.listing(location.directory) if NAME.fullmatch(entry.name))
    if not names:
        return None
    files: list[CheckpointFile] = []
    blocks: dict[str, list[_Block]] = {}
    for name in names:
        path = posixpath.join(location.directory, name)
        with storage.open(path, ahead=True) as reader:
            entries, metadata = safetensors.parse(reader)
            offsets = _offsets(path, metadata, entries.keys())
            for tensor, state in states_in(entries, len(files)).items():
                blocks.setdefault(tensor, []).append(_Block(offsets[tensor], state))
            rank = int(NAME.fullmatch(name)[1]) - 1  # type: ignore[index]
            file = CheckpointFile(name, reader.nbytes, "weights", rank, reader.version, container="safetensors")
            files.append(file)
    states = {name: _merge(location.directory, name, parts) for name, parts in blocks.items()}
    found = checkpoint_of_weights(storage, location, "safetensors", tuple(files), states, {})
    ranks = {file.rank for file in files}
    proven = _ranks(blocks.values()) == {len(ranks)} and ranks == set(range(len(ranks)))
    topology = Topology(data_parallel=max(rank for rank in ranks if rank is not None) + 1)
    return replace(found, topology=topology, unproven="" if proven else UNPROVEN)


UNPROVEN = "the files of each rank do not record how many ranks there were: the last ones may be missing"
"""Why such files may be a part of a model."""


def _offsets(path: str, metadata: Mapping[str, str], names: KeysView[str]) -> dict[str, tuple[int, ...]]:
    try:
        entries = json.loads(metadata[SHARDING])
        found = {str(name): tuple(entry["saved_offsets"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(path, f"has damaged metadata {SHARDING}", RESTORE) from error
    sound = all(isinstance(n, int) and n >= 0 for offsets in found.values() for n in offsets)
    if not sound or found.keys() != names:
        raise LayoutError(path, f"has metadata {SHARDING} of other tensors than its own", RESTORE)
    return found


def _merge(directory: str, name: str, parts: Sequence[_Block]) -> State:
    """Return the whole tensor of the blocks of all files.

    Raises:
        LayoutError: The blocks leave a gap or overlap.
    """
    dimensions = {len(part.state.shape) for part in parts if part.state.numel} or {len(parts[0].state.shape)}
    path = posixpath.join(directory, brief(name, 200))
    known = [part for part in parts if len(part.offsets) == len(part.state.shape)]
    if len(dimensions) > 1 or len(known) < len(parts) or max(dimensions) > MAX_DIMENSIONS:
        raise LayoutError(path, "has blocks of different numbers of dimensions", RESTORE)
    blocks = [part for part in parts if part.state.numel]
    if len({part.state.dtype for part in parts}) > 1 or len({part.offsets for part in blocks}) < len(blocks):
        raise LayoutError(path, "is stored in blocks that overlap or differ in dtype: two saves are mixed", RESTORE)
    ends = [[o + n for o, n in zip(p.offsets, p.state.shape, strict=True)] for p in parts]
    shape = tuple(map(max, zip(*ends, strict=True))) if ends[0] else ()
    if sum(part.state.numel for part in blocks) != math.prod(shape):
        raise LayoutError(
            path, "is not filled by the blocks in the files: a file is missing, or two saves are mixed", RESTORE
        )
    pieces = [(part.state, boxes_of(part.offsets, part.state.shape, shape)) for part in blocks]
    return merge_slices(pieces, shape, parts[0].state.dtype)


def _ranks(tensors: Iterable[Sequence[_Block]]) -> set[int]:
    """Return the numbers of ranks that the blocks allow: those for which torch.chunk makes just these blocks.

    Only a tensor whose last block is shorter than the others says something.
    """
    possible: set[int] | None = None
    for parts in tensors:
        cut = {d for part in parts for d, offset in enumerate(part.offsets) if offset and part.state.numel}
        if len(cut) != 1:
            continue
        (dim,) = cut
        sizes = [part.state.shape[dim] for part in sorted(parts, key=lambda part: part.offsets) if part.state.numel]
        if sizes[-1] == sizes[0]:
            continue
        total, largest = sum(sizes), sizes[0]
        fits = {ranks for ranks in range(len(sizes), total + 1) if math.ceil(total / ranks) == largest}
        possible = fits if possible is None else possible & fits
    return possible or set()
