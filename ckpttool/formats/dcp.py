"""A checkpoint of ``torch.distributed.checkpoint`` -> Checkpoint.

Source: torch 2.13, distributed/checkpoint/metadata.py, filesystem.py (``FileSystemWriter``) and default_planner.py
(``planner_data`` of flattened state dicts).
"""

from __future__ import annotations

import itertools
import math
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.budget import CHUNKS, take
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import BY_TORCH_NAME, DTYPES, itemsize, numpy_dtype
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats.fields import MAX_DIMENSIONS, Fields, fingerprint, shape_of
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.strided import Box, put_together
from ckpttool.formats.torch_tensors import whole_tensor
from ckpttool.messages import brief
from ckpttool.model import (
    MASTER,
    MODULE,
    UNKNOWN_GROUP,
    Buffer,
    Checkpoint,
    CheckpointFile,
    Parameter,
    ParamGroup,
    ScalarState,
    State,
    Topology,
    tensor_number,
)
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.checksums import Record
    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.locate import Location
    from ckpttool.storage import Reader, Storage

METADATA = ".metadata"
"""The file that describes all others."""
MAX_METADATA_BYTES = 1 << 28
"""A larger one is refused."""
MAX_OBJECT_BYTES = 1 << 16
"""Objects beside the tensors that are larger are not looked into."""
MAX_NAMES_BYTES = 1 << 26
"""The same for the names of a parameter group."""
STEP = "step"
"""The optimizer's state that is a number."""
HEAD_BYTES, TAIL_BYTES = 1 << 11, 1 << 12
"""Of a piece, what its pickle and its directory take."""
CONTAINERS = frozenset({"app", "model", "module", "state_dict"})
"""Keys that hold a module's state dict, and are no part of its names."""


class _Window:
    """A part of a file that is itself a file."""

    def __init__(self, reader: Reader, start: int, nbytes: int) -> None:
        self.path = reader.path
        self.nbytes = nbytes
        self.version = reader.version
        self.distant = reader.distant
        self._reader = reader
        self._start = start

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the part."""
        return self._reader.read(self._start + start, self._start + end)

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range."""
        return self._reader.read_many([ByteRange(self._start + r.start, self._start + r.end) for r in ranges])

    def close(self) -> None:
        """Nothing: the file is its owner's."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a chunk of a tensor, or an object, lies."""

    file: str
    start: int
    nbytes: int


def read_dcp(storage: Storage, location: Location) -> Checkpoint:
    """Read the layout of a distributed checkpoint; no tensor bytes.

    Raises:
        CkptError: It is damaged, or of a form that cannot be read.
    """
    path = posixpath.join(location.directory, METADATA)
    with storage.open(path) as reader:
        if reader.nbytes > MAX_METADATA_BYTES:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large to describe a checkpoint", RESTORE)
        try:
            root = unpickle(reader.read(0, reader.nbytes), path=path).value
        except Truncated:
            raise LayoutError(path, "ends too early", RESTORE) from None
        files = [CheckpointFile(METADATA, reader.nbytes, "metadata", None, reader.version, container="dcp")]
    metadata = _fields(path, root)
    pieces = _pieces(path, metadata)
    paths = metadata.values.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    entries = metadata.get("state_dict_metadata", dict)
    opened: dict[str, tuple[int, Reader]] = {}
    if storage.distant:
        _read_ahead(storage, location, pieces.values(), opened, files)
    weights: dict[str, State] = {}
    states: dict[str, dict[str, State]] = {}
    objects: dict[str, Any] = {}
    listed: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, ScalarState]] = {}
    records: dict[int, list[Record]] = {}
    of_each: dict[str, dict[str, Any]] = {}
    beside: dict[str, float | int | bool] = {}
    flattened = False
    try:
        for fqn, entry in entries.items():
            if not isinstance(fqn, str):
                raise metadata.error("state_dict_metadata", f"names a tensor {brief(fqn, 80)}")
            described = _fields(path, entry)
            steps = paths.get(fqn)
            where, flat = _unflattened(tuple(map(str, steps if steps and isinstance(steps, tuple | list) else (fqn,))))
            flattened |= flat
            if "chunks" not in described:
                limit = MAX_NAMES_BYTES if where[-1] == "params" else MAX_OBJECT_BYTES
                value = _object(storage, location, pieces.get((fqn, None)), opened, files, limit)
                if len(where) >= 3 and where[-3] == "param_groups":
                    (of_each if flat else listed).setdefault(where[-2], {})[where[-1]] = value
                else:
                    objects[fqn] = value
                continue
            state = _tensor(storage, location, fqn, described, pieces, opened, files, records)
            if len(where) >= 3 and where[-3] == "state":
                states.setdefault(where[-2], {})[where[-1]] = state
                if state.shape in {(), (1,)} and (number := _number(state, opened)) is not None:
                    numbers.setdefault(where[-2], {})[where[-1]] = number
            elif len(where) >= 3 and where[-3] == "param_groups":
                number = _number(state, opened)
                options = (of_each if flat else listed).setdefault(where[-2], {})
                options[where[-1]] = None if number is None else tensor_number(number)
            else:
                named = list(itertools.dropwhile(CONTAINERS.__contains__, where)) or [fqn]
                weights[".".join(named)] = state
                if not state.shape and len(named) > 1 and (number := _number(state, opened)) is not None:
                    beside[".".join(named)] = number.value
    finally:
        for _, reader in opened.values():
            reader.close()
    if flattened:  # torchtitan: its own counts of steps and tokens lie beside the model
        objects |= beside
        weights = {n: s for n, s in weights.items() if n not in beside}
    aliases = _tied(weights)
    weights = {n: s for n, s in weights.items() if n not in aliases}
    floating = {n: s for n, s in weights.items() if DTYPES[s.dtype].floating}
    if flattened:
        of_each = {aliases.get(name, name): own for name, own in of_each.items()}
        states = {aliases.get(name, name): own for name, own in states.items()}
        listed |= _regrouped(path, of_each, states, weights)
    groups, group_of, odd = _groups(listed, floating, numbers)
    parameters = []
    for name, weight in floating.items():
        # What an optimizer has states of is what it updates.
        group = group_of.get(name)
        kept = {MODULE if group is None else MASTER: weight, **_of_shape(states.get(name, {}), weight.shape)}
        parameters.append(Parameter(name, weight.shape, group if groups else UNKNOWN_GROUP, kept))
    reached = {group.scalars[STEP].value for group in groups if STEP in group.scalars}
    return Checkpoint(
        storage=storage,
        location=location.directory,
        root=location.root,
        tag=location.tag,
        format="dcp",
        masters_alone=bool(groups),
        tells_buffers=False,
        stage=None,
        topology=Topology(data_parallel=max(1, len(files) - 1)),
        dtype=next((s.dtype for s in floating.values()), "F32"),
        deepspeed_version=None,
        step=int(reached.pop()) if len(reached) == 1 else None,
        skipped_steps=0,
        parameters=tuple(parameters),
        buffers=tuple(Buffer(n, s) for n, s in weights.items() if n not in floating),
        aliases=aliases,
        groups=tuple(groups),
        unsliceable=tuple(odd),
        client_state=objects,
        files=tuple(replace(file, records=tuple(records.get(n, ()))) for n, file in enumerate(files)),
    )


def _unflattened(where: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Where something lies in the state dict, and whether the optimizer's part of it was flattened into one key.

    torchtitan saves its optimizers so: ``optimizer`` then ``state.NAME.exp_avg`` or ``param_groups.NAME.lr``.

    Source: torch 2.13, distributed/checkpoint/state_dict.py (``_flatten_optim_state_dict``).
    """
    *outer, last = where
    kind, _, rest = last.partition(".")
    name, _, key = rest.rpartition(".")
    if kind in {"state", "param_groups"} and name and outer and outer[-1] not in CONTAINERS:
        return (*outer, kind, name, key), True
    return where, False


def _regrouped(
    path: str,
    of_each: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, State]],
    weights: Mapping[str, State],
) -> dict[str, dict[str, Any]]:
    """Parameter groups from hyper-parameters that are listed for each parameter: those with the same are one.

    Raises:
        LayoutError: There are states of what is no parameter.
    """
    strange = sorted({*of_each, *states} - weights.keys())
    if strange:
        problem = f"holds optimizer states of {brief(strange[0], 200)}, but no such parameter"
        raise LayoutError(path, problem, "its layout is not known: save model and optimizer by the same names")
    groups: dict[object, dict[str, Any]] = {}
    for name in (n for n in weights if n in of_each):
        own = groups.setdefault(tuple(fingerprint(dict(of_each[name]))), {**of_each[name], "params": []})
        own["params"].append(name)
    return {str(number): group for number, group in enumerate(groups.values())}


def _tied(weights: Mapping[str, State]) -> dict[str, str]:
    """Names of the same bytes: each further one to the first. torch writes tied tensors once for each name."""
    first: dict[tuple[object, ...], str] = {}
    owner = {n: first.setdefault((s.shape, s.dtype, s.extents.tobytes()), n) for n, s in weights.items() if s.numel}
    return {name: own for name, own in owner.items() if own != name}


def _groups(
    listed: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, State],
    numbers: Mapping[str, Mapping[str, ScalarState]],
) -> tuple[list[ParamGroup], dict[str, int], list[str]]:
    """The optimizer's parameter groups, the group of each parameter, and numbers that a group has not in common.

    Nothing, unless the groups list their parameters by name, each once.

    Source: torch 2.13, distributed/checkpoint/state_dict.py (``get_optimizer_state_dict``).
    """
    groups: list[ParamGroup] = []
    group_of: dict[str, int] = {}
    odd: dict[str, None] = {}
    for number in sorted(listed, key=lambda n: (len(n), n)):
        options = dict(listed[number])
        names = options.pop("params", None)
        if not isinstance(names, list) or not all(isinstance(n, str) and n in weights for n in names):
            return [], {}, []
        if len({*names, *group_of}) < len(names) + len(group_of):
            return [], {}, []
        scalars: dict[str, ScalarState] = {}
        for name in names:
            group_of[name] = len(groups)
            own = numbers.get(name, {})
            for key in (k for k in own if own[k].shape != weights[name].shape or k == STEP):
                if scalars.setdefault(key, own[key]) != own[key]:
                    odd[f"group {len(groups)}: {key}, which differs among its parameters"] = None
        groups.append(ParamGroup(tuple(names), options, scalars))
    return groups, group_of, list(odd)


def _number(state: State, opened: Mapping[str, tuple[int, Reader]]) -> ScalarState | None:
    """The value of a tensor of one element; None of any other."""
    if state.numel != 1:
        return None
    row = state.extents[0]
    reader = next(reader for index, reader in opened.values() if index == int(row["file"]))
    start = int(row["offset"])
    data = reader.read(start, start + itemsize(state.dtype))
    return ScalarState(np.frombuffer(data, numpy_dtype(state.dtype))[0].item(), state.dtype, state.shape)


def _of_shape(states: Mapping[str, State], shape: tuple[int, ...]) -> dict[str, State]:
    """States with one value for each element; a step has but one."""
    return {key: state for key, state in states.items() if state.shape == shape and key not in {STEP, MODULE, MASTER}}


def _fields(path: str, value: object) -> Fields:
    """The attributes of one of torch's dataclasses."""
    state = (value.state or {}) if isinstance(value, Opaque) else value
    if not isinstance(state, dict):
        raise LayoutError(path, "is no metadata of torch.distributed.checkpoint", RESTORE)
    return Fields(path, "", state)


def _pieces(path: str, metadata: Fields) -> dict[tuple[str, tuple[int, ...] | None], _Piece]:
    """Where each chunk lies, by name and offset in its tensor; objects have no offset."""
    result: dict[tuple[str, tuple[int, ...] | None], _Piece] = {}
    for key, value in metadata.get("storage_data", dict).items():
        index, info = _fields(path, key), _fields(path, value)
        if info.values.get("transform_descriptors"):
            problem = f"{brief(index.values.get('fqn'), 200)} was saved through extensions (compressed, perhaps)"
            raise LayoutError(path, problem, "load and save it once without them")
        offset = index.values.get("offset")
        where = None if offset is None else shape_of(offset)
        file = info.get("relative_path", str)
        start, nbytes = info.get("offset", int), info.get("length", int)
        if "/" in file or "\0" in file or file in {"", ".", ".."} or start < 0 or nbytes < 0:
            raise LayoutError(path, f"places {brief(index.values.get('fqn'), 200)} in {brief(file, 200)}", RESTORE)
        result[index.get("fqn", str), where] = _Piece(file, start, nbytes)
    return result


def _open(
    storage: Storage, location: Location, piece: _Piece, opened: dict[str, tuple[int, Reader]],
    files: list[CheckpointFile],
) -> tuple[int, _Window]:  # fmt: skip
    if piece.file not in opened:
        reader = storage.open(posixpath.join(location.directory, piece.file), ahead=True)
        opened[piece.file] = len(files), reader
        files.append(CheckpointFile(piece.file, reader.nbytes, "shard", None, reader.version, container="dcp"))
    index, reader = opened[piece.file]
    if piece.start + piece.nbytes > reader.nbytes:
        raise LayoutError(reader.path, f"has {reader.nbytes:,} bytes, fewer than {METADATA} says", RESTORE)
    return index, _Window(reader, piece.start, piece.nbytes)


def _read_ahead(
    storage: Storage, location: Location, pieces: Iterable[_Piece], opened: dict[str, tuple[int, Reader]],
    files: list[CheckpointFile],
) -> None:  # fmt: skip
    """Read the two ends of every piece at once: they hold its structure."""
    ends: dict[str, list[ByteRange]] = {}
    for piece in pieces:
        _open(storage, location, piece, opened, files)
        last = piece.start + piece.nbytes
        held = ends.setdefault(piece.file, [])
        held.append(ByteRange(piece.start, min(piece.start + HEAD_BYTES, last)))
        held.append(ByteRange(max(piece.start, last - TAIL_BYTES), last))
    for file, ranges in ends.items():
        opened[file][1].read_ahead(ranges)


def _tensor(
    storage: Storage,
    location: Location,
    fqn: str,
    entry: Fields,
    pieces: Mapping[tuple[str, tuple[int, ...] | None], _Piece],
    opened: dict[str, tuple[int, Reader]],
    files: list[CheckpointFile],
    records: dict[int, list[Record]],
) -> State:
    """A tensor from its chunks: boxes of it, each a ``torch.save`` file within a file."""
    shape = shape_of(entry.get("size", object))
    if shape is None:
        raise entry.error(fqn, "has no shape")
    parts: list[tuple[State, list[Box]]] = []
    seen: set[tuple[int, ...]] = set()
    chunks = entry.get("chunks", list)
    take(CHUNKS, len(chunks), entry.path)
    for value in chunks:
        chunk = _fields(entry.path, value)
        offsets, sizes = shape_of(chunk.get("offsets", object)), shape_of(chunk.get("sizes", object))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape) <= MAX_DIMENSIONS:
            raise entry.error(fqn, "has a chunk that does not fit it")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise entry.error(fqn, f"has a chunk of {sizes} at {offsets}, beyond its shape {shape}")
        if math.prod(sizes) == 0:
            continue
        piece = pieces.get((fqn, offsets))
        if piece is None:
            raise entry.error(fqn, f"has a chunk at {offsets} that is stored nowhere")
        if offsets in seen:
            raise entry.error(fqn, f"has two chunks at {offsets}")
        seen.add(offsets)
        index, window = _open(storage, location, piece, opened, files)
        held = records.setdefault(index, [])
        parts.append((_chunk(index, window, piece, fqn, sizes, held), list(_boxes(offsets, sizes, shape))))
    if not parts:
        properties = entry.values.get("properties")
        known = getattr(properties, "state", None)
        name = getattr(known[0], "name", "float32") if isinstance(known, tuple) and known else "float32"
        return put_together([], shape, BY_TORCH_NAME[name].name if name in BY_TORCH_NAME else "F32")
    if len({state.dtype for state, _ in parts}) > 1:
        raise entry.error(fqn, "has chunks of several types")
    return put_together(parts, shape)


def _chunk(
    index: int, window: _Window, piece: _Piece, fqn: str, sizes: tuple[int, ...], records: list[Record]
) -> State:
    try:
        torch = read_torch_file(window)
    except CkptError as error:
        raise LayoutError(window.path, f"{fqn} at byte {piece.start:,}: {error.problem}", error.hint) from error
    if not isinstance(torch.root, TensorRef) or torch.root.shape != sizes:
        raise LayoutError(window.path, f"holds something else than {fqn} at byte {piece.start:,}", RESTORE)
    state = whole_tensor(torch, index, torch.root)
    rows = state.extents.copy()
    rows["offset"] += piece.start
    records += [
        replace(r, name=f"{fqn}: {r.name}", where=ByteRange(piece.start + r.where.start, piece.start + r.where.end))
        for r in torch.records
    ]
    return State(state.shape, state.dtype, rows)


def _boxes(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Box]:
    """A chunk as runs of the whole tensor: one box where only one dimension is cut, one for each row of others."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    if not shape:
        return [Box(0, 0, 1, 1, 1, 1)]
    numel = sizes[last] * strides[last]
    outer = sizes[:last]
    runs, rows = (outer[-1], outer[:-1]) if outer else (1, ())
    pitch = strides[last - 1] if outer else numel
    result = []
    for i, index in enumerate(itertools.product(*map(range, rows))):
        at = sum(
            (o + k) * s for o, k, s in zip(offsets, (*index, *[0] * (len(shape) - len(index))), strides, strict=True)
        )
        result.append(Box(i * runs * numel, at, runs, numel, numel, pitch))
    return result


def _object(
    storage: Storage, location: Location, piece: _Piece | None, opened: dict[str, tuple[int, Reader]],
    files: list[CheckpointFile], limit: int,
) -> Any:  # fmt: skip
    """What is no tensor; None where it is too large to look into or cannot be read."""
    if piece is None or piece.nbytes > limit:
        return None
    _, window = _open(storage, location, piece, opened, files)
    try:
        torch = read_torch_file(window)
        return _plain(torch.root, torch, window)
    except CkptError:
        return None


def _plain(value: Any, torch: TorchFile, window: _Window) -> Any:
    """An object with numbers in the place of its 0-dim tensors, such as betas that are tensors."""
    if isinstance(value, TensorRef) and value.shape == ():
        where = torch.locate(value)
        data = window.read(where.start, where.end)
        return tensor_number(ScalarState(np.frombuffer(data, numpy_dtype(value.dtype))[0].item(), value.dtype))
    if type(value) is dict:
        return {key: _plain(v, torch, window) for key, v in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_plain(v, torch, window) for v in value)
    return value
