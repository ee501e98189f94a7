"""A delta file -> its description, and the states of its tensors."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckpttool.budget import opening
from ckpttool.containers import safetensors
from ckpttool.errors import LayoutError
from ckpttool.formats import budget_factor, source_paths, source_storage
from ckpttool.formats.delta_header import INDICES, MAKE_AGAIN, VALUES, parse_header
from ckpttool.formats.locate import Location, refuse_unfinished
from ckpttool.formats.safetensors_states import states_in
from ckpttool.formats.weights import checkpoint_of_weights
from ckpttool.model import CheckpointFile
from ckpttool.model.derived.delta import Delta
from ckpttool.storage import local_path, parent, without_credentials

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ckpttool.model import State
    from ckpttool.model.derived.delta import TensorType

FILE = "delta.safetensors"
"""Name of the file in the output directory of ``delta``."""


def open_delta(src: str | os.PathLike[str], options: Mapping[str, Any] | None, *, unfinished: bool = False) -> Delta:
    """Open a delta without reading tensor bytes.

    Args:
        src: The output directory of ``delta``, or the file in it.
        options: Options of the storage's fsspec class.
        unfinished: Also open one that is not committed yet.

    Raises:
        CkptError: There is no such file, or it is damaged.
    """
    paths = source_paths(src)
    storage = source_storage(paths, options)
    place = without_credentials(local_path(paths[0])).rstrip("/")
    path = posixpath.join(place, FILE) if storage.is_dir(place) else place
    if not unfinished:
        refuse_unfinished(storage, parent(path))
    with opening(budget_factor(options)), storage.open(path, ahead=True) as reader:
        entries, metadata = safetensors.parse(reader)
        file = CheckpointFile(
            posixpath.basename(path), reader.nbytes, "weights", None, reader.version, container="safetensors"
        )
        header = parse_header(metadata, path)
    states = states_in(entries, 0)
    directory = parent(path)
    location = Location(directory, directory, posixpath.basename(directory))
    checkpoint = checkpoint_of_weights(storage, location, "delta", (file,), states, {})
    sparse: dict[str, tuple[State, State]] = {}
    dense: dict[str, State] = {}
    for name, kind in header.tensors.items():
        if name in states:
            dense[name] = _checked(path, name, states.pop(name), kind)
        elif name + INDICES in states and name + VALUES in states:
            pair = states.pop(name + INDICES), states.pop(name + VALUES)
            sparse[name] = _checked_pair(path, name, pair, kind)
    if states:
        problem = f"holds {next(iter(states))}, which belongs to no tensor of its description"
        raise LayoutError(path, problem, MAKE_AGAIN)
    return Delta(path, header, checkpoint, sparse, dense)


def _checked(path: str, name: str, state: State, kind: TensorType) -> State:
    if (state.dtype, state.shape) != kind:
        problem = f"holds {name} as {state.dtype} {list(state.shape)}, not {kind.dtype} {list(kind.shape)}"
        raise LayoutError(path, problem, MAKE_AGAIN)
    return state


def _checked_pair(path: str, name: str, pair: tuple[State, State], kind: TensorType) -> tuple[State, State]:
    indices, values = pair
    fits = len(indices.shape) == 1 and indices.shape == values.shape and indices.dtype in {"I32", "I64"}
    if not fits or values.dtype != kind.dtype:
        problem = f"holds indices and values of {name} that do not fit each other or its type"
        raise LayoutError(path, problem, MAKE_AGAIN)
    return pair
