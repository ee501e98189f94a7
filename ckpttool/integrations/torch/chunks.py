"""The state of a torch run as a distributed checkpoint: each rank writes a share of the parts that several have.

Of a run whose framework has two files of the whole state, such as the Trainer under DDP, the first rank writes those.

Each rank sends the places of its parts. Rank 0 checks that the parts fill each tensor, and returns the ranks that have
equal places; those ranks divide the parts by size, all by the same rule. No tensor is gathered.

Source: torch 2.13, distributed/checkpoint/state_dict.py (``get_model_state_dict``, ``get_optimizer_state_dict``: names
and nesting) and filesystem.py (``FileSystemWriter``: names of the files).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import logging
import math
import posixpath
import zlib
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ckpttool.containers import safetensors, torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import walk
from ckpttool.dtypes import itemsize
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.chunk_index import CHUNK_INDEX, StoredChunk, StoredEntry, chunk_index
from ckpttool.formats.dcp import METADATA
from ckpttool.formats.state_dict import is_reduced
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.integrations.live.files import CapturedFiles, hint_of, unpicklable
from ckpttool.integrations.live.rank_states import rank_state_file
from ckpttool.integrations.live.run import Captured
from ckpttool.integrations.torch.digest import tensor_text
from ckpttool.integrations.torch.live import is_number, pieces_of, type_name, wrapped_class
from ckpttool.integrations.torch.optimizers import Forms
from ckpttool.integrations.torch.pickling import StorageBytes, describe
from ckpttool.messages import brief
from ckpttool.model import Topology
from ckpttool.model.items import NOT_COMPARED, WEIGHTS, canonical
from ckpttool.saving.coordination import RankError, attempt
from ckpttool.saving.files import ArchiveFile, Archives, HostPayload, PlainFile
from ckpttool.targets.dcp import LAYOUTS, client_state_of, metadata
from ckpttool.targets.torch import storage_ref, view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.formats.chunk_index import Path
    from ckpttool.integrations.live.host_memory import HostMemory
    from ckpttool.integrations.live.request import FrameworkFiles, Save
    from ckpttool.integrations.live.run import Kept, Ready, Repeated
    from ckpttool.integrations.torch.live import Piece
    from ckpttool.integrations.torch.live_run import LiveRun
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import OutgoingFile, Payload
    from ckpttool.targets.dcp import DcpLayout

LOG = logging.getLogger(__name__)
SAVE_OTHERWISE = "save it with torch, or pass optimizer=False to save the weights alone"
VERSION = 1
"""Version of the content of RUN_STATE."""
SCHEDULER_OF_ACCELERATE = "scheduler.bin"
"""Source: accelerate 1.15, utils/constants.py (``SCHEDULER_NAME``) and checkpointing.py."""


class Entry(NamedTuple):
    """A tensor of the run; this rank may have a part of it."""

    directory: str
    """Directory of its distributed checkpoint, relative to the directory of the save."""
    path: Path
    """Keys of its entry in the state dict."""
    dtype: str
    """safetensors' spelling."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Any
    """The part, on any device; it may be empty."""
    starts: tuple[int, ...]
    """Index of its first element in each dimension."""
    piece: int | None
    """Index of the part in ``Described.pieces``; None for a number."""
    one_writer: bool
    """True for a buffer or a number: ranks may have different values, and the lowest rank writes its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return int(self.tensor.numel()) * itemsize(self.dtype)


def check_saved(run: LiveRun, written: FrameworkFiles) -> None:
    """Check that a checkpoint can hold the state of a run.

    Raises:
        ArgumentError: It has a state that would be lost, or is of one rank alone.
    """
    for name, tensor in run.named.parameters.items():
        if written.names is not None and tensor.requires_grad and name not in written.names:
            raise ArgumentError(name, "is trained, but the framework does not save it", "freeze it, or use DeepSpeed")
        if written.files is not None and hasattr(tensor, "placements"):
            problem = "is spread over the ranks, but the framework saves whole tensors"
            raise ArgumentError(name, problem, "use FSDP2 with sharded state dicts, or DeepSpeed")
    if written.files is not None and len(run.optimizers) != 1:
        problem = f"are {len(run.optimizers)}, but the states of one alone are saved with a model"
        raise ArgumentError("optimizers", problem, "prepare one model and one optimizer")
    if run.named.others:
        problem = "is in the state dict of the model, but is neither a parameter nor a buffer"
        raise ArgumentError(run.named.others[0], problem, "remove the hook, or the extra state, that adds it")
    names = run.named.names
    for number, (owner, group) in enumerate(run.groups):
        run.trained(group)  # raises for parameters that the model lacks
        forms = Forms(owner, group, SAVE_OTHERWISE)
        for option, value in group.items():
            _check_option(option, value, number)
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            states = owner.state.get(parameter, {})
            for key, value in states.items():
                _check_state(key, value, name, parameter, whole=written.files is not None)
            if any(_is_unlike(value, parameter) for value in states.values()):
                _check_shapes(forms, parameter, name)


def _is_unlike(value: Any, parameter: Any) -> bool:
    """Return whether a state is a tensor of another shape than the parameter's, and not one number."""
    is_tensor = isinstance(value, torch.Tensor) and (value.numel() != 1 or value.dim() > 1)
    return is_tensor and value.shape != parameter.shape


def _check_shapes(forms: Forms, parameter: Any, name: str) -> None:
    """Check that a restore knows the shapes of the states of a parameter.

    Raises:
        ArgumentError: One depends on more than the parameter's sizes, or the parameter is spread over the ranks.
    """
    if hasattr(parameter, "placements"):
        problem = f"has a state of {brief(name, 200)} in another shape than the parameter, which is spread over ranks"
        raise ArgumentError("optimizer", problem, SAVE_OTHERWISE)
    forms.of(parameter)


def _check_option(option: str, value: Any, number: int) -> None:
    """Check that an option of a group is read again: plain data, with tensors of one number."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    held = [one for one in inner if isinstance(one, torch.Tensor)] if option != "params" else []
    if (isinstance(value, Mapping) and held) or any(one.dim() for one in held):
        problem = f"has the option {option} of group {number} with a tensor that is not one number"
        raise ArgumentError("optimizer", problem, "save it in client_state, and leave it out of the groups")


def _check_state(key: str, value: Any, name: str, parameter: Any, *, whole: bool) -> None:
    """Check that a state can be saved; one in the file of a framework, which has numbers for names, also restored."""
    if is_number(key, value, parameter) or value is None:
        return
    what = f"has {key} of {brief(name, 200)}"
    if not isinstance(value, torch.Tensor) or wrapped_class(value):
        kind = wrapped_class(value) or type(value).__name__
        raise ArgumentError("optimizer", f"{what} as a {kind}, not as a tensor", SAVE_OTHERWISE)
    if hasattr(parameter, "placements") and not hasattr(value, "placements"):
        problem = f"{what} as a tensor of this rank alone, beside a parameter that is spread over the ranks"
        raise ArgumentError("optimizer", problem, SAVE_OTHERWISE)
    if whole and not (value.shape == parameter.shape or is_reduced(value.shape, parameter.shape)):
        problem = f"{what} in another shape than the parameter, which no resume restores"
        raise ArgumentError("optimizer", problem, "choose another optimizer, or let the framework save alone")


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """The state of this rank, before the ranks have shared the parts that several have."""

    pieces: Sequence[Piece]
    """Its parts of all tensors."""
    entries: Sequence[Entry]
    index: DcpIndex
    extra: Mapping[str, Any]
    """The states of other objects by name."""

    def parts(self, repeated: Repeated) -> dict[str, Any]:
        """Return the parts of the tensors that this rank has, and the states of other objects as text."""
        return {**repeated.message(self.index.parts()), "extra": {n: _exact(own) for n, own in self.extra.items()}}

    def share(self, parts: Sequence[dict[str, Any]], repeated: Repeated) -> dict[str, Any]:
        """Return on rank 0 the decision of ``DcpIndex.share``, and the objects whose state differs between ranks.

        Raises:
            RankError: As for ``DcpIndex.share``.
        """
        texts = {name: {own["extra"][name] for own in parts} for name in self.extra}
        own = [name for name, found in texts.items() if len(found) > 1 or min(found).startswith(NOT_COMPARED)]
        told = [{key: text for key, text in one.items() if key != "extra"} for one in parts]
        return self.index.share(repeated.texts(told)) | {"of_ranks": own}


@dataclass(frozen=True, slots=True, eq=False)
class CapturedChunks:
    """The captured state of a torch run on this rank."""

    live: LiveRun
    described: Described
    shared: Mapping[str, Any]
    """The decision of ``DcpIndex.share``."""
    payloads: Mapping[int, Payload]
    """The bytes of the parts that this rank writes into a distributed checkpoint, by index of the entry."""
    memory: HostMemory | None
    """Copies of all tensors that this rank writes; None if they are written directly."""


def _frozen(run: LiveRun) -> list[str]:
    """Return the names of the parameters that need no gradient."""
    return [name for name, parameter in run.named.parameters.items() if not parameter.requires_grad]


def described(run: LiveRun, save: Save, rank: int, directory: str, kept: Kept) -> Described:
    """Describe the state of this rank.

    Args:
        run: The run.
        save: The arguments of the save.
        rank: This rank.
        directory: Directory of the checkpoint, for errors.
        kept: Objects of earlier saves.

    Raises:
        ArgumentError: A tensor has a form that cannot be saved.
    """
    extra = {name: _plain_state(name, one) for name, one in run.extra.items()}
    found = pieces_of(run.named, run.optimizers)
    left_out = {*_frozen(run)} if save.exclude_frozen else set()
    if save.written.names is not None:
        left_out |= {piece.name for piece in found} - save.written.names.keys()
    pieces = [piece for piece in found if piece.name not in left_out]
    names = LAYOUTS[kept.layout]
    tensors = [*_tensors(run, pieces, names, save.written), *_numbers(run, names)]
    entries = sorted(tensors, key=lambda entry: [*map(str, entry.path)])
    return Described(pieces, entries, DcpIndex(entries, rank, directory, names, kept.places), extra)


def _exact(state: Any) -> str:
    """Return a state as a hash, which also differs by the classes, the order and the options of containers."""
    try:
        return hashlib.sha256("".join(_exact_parts(state)).encode("utf-8", "surrogatepass")).hexdigest()
    except (RecursionError, _NotComparedError):
        return NOT_COMPARED


class _NotComparedError(Exception):
    """A value has no text."""


def _exact_parts(value: Any) -> Iterator[str]:
    options = [getattr(value, name, None) for name in ("maxlen", "default_factory")]
    yield f"<{type(value).__module__}.{type(value).__qualname__} {getattr(value, 'dtype', '')!s} {options}>"
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _exact_parts(key)
            yield from _exact_parts(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _exact_parts(item)
    else:
        text = canonical(value, tensor_text)
        if text.startswith(NOT_COMPARED):
            raise _NotComparedError
        yield text
    yield "</>"


def _plain_state(name: str, owner: Any) -> Any:
    """Return the state of an object, whose tensors must be of this rank alone.

    Raises:
        ArgumentError: One is a part of a tensor that is spread over the ranks.
    """
    state = owner.state_dict()
    tensors = [one for one in walk([state]) if isinstance(one, torch.Tensor)]
    if any(hasattr(one, "placements") or wrapped_class(one) for one in tensors):
        problem = f"has a tensor in {brief(name)} that is spread over the ranks, or has its values in other tensors"
        raise ArgumentError("extra", problem, "pass the model that it belongs to by name, beside the other models")
    return state


def capture_chunks(run: LiveRun, ready: Ready, save: Save, ranks: Ranks, kept: Kept, directory: str) -> Captured:
    """Capture the files that this rank writes; call it on every rank.

    Args:
        run: The run.
        ready: The save.
        save: Its arguments.
        ranks: The ranks of the run.
        kept: Objects of earlier saves.
        directory: Directory of the checkpoint, for errors.

    Raises:
        RankError: The ranks have other tensors, or their parts do not fill one.
    """
    made = attempt(partial(described, run, save, ranks.rank, directory, kept))
    shared = ranks.exchange(
        directory,
        lambda: made.result().parts(kept.repeated),
        lambda parts: made.result().share(parts, kept.repeated),
    )
    kept.repeated.agree()
    found = made.result()
    of_rank = {name: found.extra[name] for name in shared["of_ranks"]}
    of_all = {name: state for name, state in found.extra.items() if name not in of_rank}
    files = CapturedFiles()
    on_device = any(entry.tensor.device.type != "cpu" for entry in found.entries)
    memory = kept.host_memory("", on_device=on_device)
    whole = save.written.files
    mine = _own_share(found.entries, shared, ranks.rank) if whole is None else []
    payloads: Mapping[int, Payload] = {}
    try:
        contents = dict(ready.own_files)
        if of_rank:
            contents |= rank_state_file(Topology(data_parallel=ranks.size), ranks, save.rank_state, of_rank)
        if ranks.rank == 0 and kept.layout == "accelerate" and [*run.schedulers] == [""]:
            contents[SCHEDULER_OF_ACCELERATE] = run.schedulers[""].state_dict()
        if ranks.rank == 0 and LAYOUTS[kept.layout].state:
            contents[LAYOUTS[kept.layout].state] = dict(save.client_state)
        if ranks.rank == 0:
            own_state = _run_state(run, found.pieces, save, ready.request.step, ranks.size)
            contents[RUN_STATE] = own_state | {"extra": of_all, "extra_of_ranks": [*of_rank]}
        if memory is not None:
            memory.begin()
        storages = {str(n): bytes_of(found.entries[n].tensor) for n in mine}
        held: Mapping[str, Payload] = storages if memory is None else memory.hold(storages)
        payloads = {n: held[str(n)] for n in mine}
        names = LAYOUTS[kept.layout]
        objects = {} if ranks.rank else dict(_objects(run, save, names))
        written = []
        for inner in dict.fromkeys(names.directories) if whole is None else ():
            own = [n for n in mine if found.entries[n].directory == inner]
            archives = [
                ArchiveFile("archive", _structure(entry.dtype, tuple(entry.tensor.shape)), {"0": payloads[n]})
                for n in own
                for entry in [found.entries[n]]
            ]
            beside = objects if inner == names.directories[1] else {}
            archives += [ArchiveFile("archive", one.structure, one.storages) for one in map(describe, beside.values())]
            file = Archives(posixpath.join(inner, _file_name(ranks.rank)), archives)
            files.files += [file] if archives else []
            written.append((own, [*beside], file))
        found.index.note(written, run.named.aliases)
        if whole is not None and ranks.rank == 0:
            files.files.append(_weights_file(whole[0], run, found.pieces, save.written, memory))
            contents[whole[1]] = run.optimizers[0].state_dict()
        for name, content in contents.items():
            if name not in save.files:
                _add(files, name, content, memory)
        files.files += [PlainFile(name, HostPayload(content)) for name, content in save.files.items()]
        if memory is not None:
            memory.settle()
    except Exception as error:  # not raised here: the other ranks would wait for this one
        LOG.exception("the state of this rank could not be captured")
        problem = f"could not be captured: {type(error).__name__}: {error}"
        files.failed = PlanError(directory, problem, "see the log of that rank")
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # the device itself may have failed
                memory.settle()
    state = CapturedChunks(run, found, shared, payloads, memory)
    return Captured(files, {"": state}, found.index if whole is None else None)


def _weights_file(
    name: str, run: LiveRun, pieces: Sequence[Piece], written: FrameworkFiles, memory: HostMemory | None
) -> PlainFile:
    """Return the safetensors file of the weights, with the names and the metadata that frameworks give it.

    Source: safetensors 0.8, torch.py (``save_model``: tied names in the metadata); transformers 5.23,
    modeling_utils.py (``save_pretrained``: "format").
    """
    names = written.names or {}
    weights = {names.get(one.name, one.name): one for one in pieces if one.key == WEIGHTS}
    ties = {names.get(a, a): names.get(n, n) for a, n in run.named.aliases.items() if names.get(n, n) in weights}
    tensors = [safetensors.Tensor(own, one.dtype, one.shape) for own, one in weights.items()]
    header, begin = safetensors.build(tensors, {"format": "pt", **ties})
    storages = {own: bytes_of(weights[own].tensor) for own in sorted(begin, key=lambda own: begin[own])}
    payloads: Mapping[str, Payload] = storages if memory is None else memory.hold(storages)
    return PlainFile(name, HostPayload(header), *payloads.values())


def bytes_of(tensor: Any) -> StorageBytes:
    """Return the bytes of a tensor; of a lazy view, or of one whose elements are not in C order, of a copy."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    start = own.storage_offset() * own.element_size()
    return StorageBytes(own.untyped_storage(), start, start + own.numel() * own.element_size())


@cache
def _structure(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of an archive of one tensor."""
    return pickle(view(storage_ref("0", dtype, math.prod(shape)), dtype, 0, shape), path="archive")


@cache
def _first_byte(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the byte of an archive of one tensor at which the values begin."""
    nbytes = math.prod(shape) * itemsize(dtype)
    return torch_zip.build(_structure(dtype, shape), {"0": nbytes}, prefix="archive", path="").payloads["0"].start


def _add(files: CapturedFiles, name: str, content: Any, memory: HostMemory | None) -> None:
    """Add a file of ``torch.save`` to the files of this rank, or note why it cannot be pickled."""
    try:
        pickled = describe(content)
    except Exception as error:  # not raised here: the other ranks would wait for this one
        problem = f"cannot be pickled: {type(error).__name__}: {error}"
        files.failed = PlanError(name, problem, hint_of(name, unpicklable(content)))
        return
    payloads = pickled.storages if memory is None else memory.hold(pickled.storages)
    files.files.append(ArchiveFile(name, pickled.structure, payloads))


def _run_state(run: LiveRun, pieces: Sequence[Piece], save: Save, step: int, size: int) -> dict[str, Any]:
    """Return the state beside the tensors: client state, scheduler, and the names of buffers and frozen parameters."""
    return {
        "version": VERSION,
        "client_state": dict(save.client_state),
        "lr_scheduler": _states_of(run.schedulers),
        "global_steps": step,
        "world_size": size,
        "buffers": [piece.name for piece in pieces if piece.is_buffer],
        "frozen": _frozen(run),
        "groups": [_listed(run, group) for _, group in run.groups],
        "names": dict(save.written.names or {}),
    }


def _states_of(schedulers: Mapping[str, Any]) -> Any:
    """Return the state of a scheduler; of several, their states by name."""
    states = {name: one.state_dict() for name, one in schedulers.items()}
    return states.get("") if [*states] in ([], [""]) else states


# --------------------------------------------------------------------------------------------------------- entries


def _tensors(run: LiveRun, pieces: Sequence[Piece], names: DcpLayout, written: FrameworkFiles) -> Iterator[Entry]:
    """Yield the weights, the buffers, and the states of the optimizer."""
    of_owner = {name: own for own, name, *_ in _parameters(run, names)}
    of_weights = written.names or {}
    for number, piece in enumerate(pieces):
        is_state = piece.key != WEIGHTS
        own = (*names.model, of_weights.get(piece.name, piece.name))
        path = of_owner[piece.name].of_state(piece.name, piece.key) if is_state else own
        starts = piece.starts if isinstance(piece.starts, tuple) else (0,) * len(piece.shape)
        directory = names.directories[is_state]
        yield Entry(directory, path, piece.dtype, piece.shape, piece.tensor, starts, number, piece.is_buffer)


def _numbers(run: LiveRun, names: DcpLayout) -> Iterator[Entry]:
    """Yield the numbers that are tensors: of parameters, such as a step, and options of groups."""
    found: list[tuple[Path, Any]] = []
    for own, name, owner, parameter in _parameters(run, names):
        for key, value in owner.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and is_number(key, value, parameter):
                found.append((own.of_state(name, key), value))
    for own, number, _, group in _groups(run, names):
        listed = _listed(run, group)
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                found += [(path, value) for path in own.of_option(number, listed, key)]
    for path, value in found:
        whole = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        shape = tuple(map(int, whole.shape))
        starts = (0,) * len(shape)
        yield Entry(names.directories[1], path, type_name(whole.dtype), shape, whole, starts, None, one_writer=True)


def _listed(run: LiveRun, group: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters of a group."""
    names = run.named.names
    return [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]


def _groups(run: LiveRun, names: DcpLayout) -> Iterator[tuple[DcpLayout, int, Any, Mapping[str, Any]]]:
    """Yield the groups: the names of the entries of its optimizer, its number among them, the optimizer, the group."""
    first = 0
    for n, owner in enumerate(run.optimizers):
        for number, group in enumerate(owner.param_groups, 0 if names.numbered else first):
            yield names.of_optimizer(n), number, owner, group
        first += len(owner.param_groups)


def _parameters(run: LiveRun, names: DcpLayout) -> Iterator[tuple[DcpLayout, str, Any, Any]]:
    """Yield the parameters of the optimizers: names of the entries, name, optimizer, and the parameter."""
    known = run.named.names
    for own, _, owner, group in _groups(run, names):
        for parameter in group["params"]:
            if id(parameter) in known:
                yield own, known[id(parameter)], owner, parameter


def _objects(run: LiveRun, save: Save, names: DcpLayout) -> Iterator[tuple[Path, Any]]:
    """Yield the entries that are objects: options and names of the groups, numbers of Python, and client state."""
    for own, name, owner, parameter in _parameters(run, names):
        for key, value in owner.state.get(parameter, {}).items():
            if isinstance(value, bool | int | float):
                yield own.of_state(name, key), value
    for own, number, _, group in _groups(run, names):
        listed = _listed(run, group)
        options = {**group, "params": listed, **({"param_names": listed} if "param_names" in group else {})}
        for key, value in options.items():
            if not isinstance(value, torch.Tensor) and not (names.flat and key == "params"):
                for path in own.of_option(number, listed, key):
                    yield path, copy.deepcopy(value)
    for key, value in client_state_of(save.client_state, names).items():
        yield (*names.client, key), value


# ---------------------------------------------------------------------------------------------------------- shares


def _own_share(entries: Sequence[Entry], shared: Mapping[str, Any], rank: int) -> list[int]:
    """Return the indexes of the entries whose part this rank writes.

    Ranks with the same parts divide them, the largest first, each to the rank that has the fewest bytes so far.

    Args:
        entries: The entries.
        shared: The decision of ``DcpIndex.share``.
        rank: This rank.
    """
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    found = []
    for n in sorted(range(len(entries)), key=lambda n: (-entries[n].nbytes, n)):
        kinds = shared["kinds"][shared["of"][n]]
        if kinds[rank] < 0:
            continue
        members = tuple(other for other, kind in enumerate(kinds) if kind == kinds[rank])
        writer = members[0]
        if not entries[n].one_writer:
            own = loads.setdefault(members, dict.fromkeys(members, 0))
            writer = min(members, key=lambda member: (own[member], member))
            own[writer] += entries[n].nbytes
        if writer == rank:
            found.append(n)
    return sorted(found)


class DcpIndex:
    """The metadata of the checkpoint, which rank 0 writes after all ranks have written their files.

    Args:
        entries: The tensors, in the same order on all ranks.
        rank: This rank.
        directory: Directory of the checkpoint, for errors.
        names: The names of the entries.
        places: Where each rank wrote in the last save.
    """

    def __init__(self, entries: Sequence[Entry], rank: int, directory: str, names: DcpLayout, places: Repeated) -> None:
        self._entries = entries
        self._places = places
        self._names = names
        self._rank = rank
        self._directory = directory
        self._columns = [*accumulate((2 * len(entry.shape) for entry in entries), initial=0)]
        self._boxes: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._objects: Sequence[StoredEntry] = ()
        self._aliases: Mapping[str, str] = {}
        self._metadata: dict[str, bytes] = {}
        """The files that rank 0 writes, by name."""
        self.own: Mapping[str, str] = {}
        """The entries that this rank writes, each with its first byte and its size in the file; or their hash."""

    def parts(self) -> dict[str, str]:
        """Return the parts that this rank has; the names are the same text on all ranks."""
        names = [[list(entry.path), entry.dtype, list(entry.shape)] for entry in self._entries]
        boxes = [value for entry in self._entries for value in (*entry.starts, *entry.tensor.shape)]
        return {"names": _packed(json.dumps(names).encode()), "boxes": _packed(np.array(boxes, np.int64).tobytes())}

    def share(self, parts: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Check on rank 0 that the parts of all ranks fill each tensor; return which ranks have the same parts.

        Returns:
            ``kinds``: lists with a number for each rank, equal for ranks with the same part, -1 for one without
            elements; ``of``: the index of the list of each entry.

        Raises:
            RankError: The ranks have other tensors, or the parts do not fill one exactly once.
        """
        for rank, own in enumerate(parts):
            if own["names"] != parts[0]["names"]:
                raise self._other_tensors(rank, own["names"], parts[0]["names"])
        self._boxes = np.stack([np.frombuffer(_unpacked(own["boxes"]), np.int64) for own in parts])
        known: dict[tuple[int, bytes], tuple[list[int], int]] = {}
        kinds: dict[tuple[int, ...], int] = {}
        of = []
        for n, entry in enumerate(self._entries):
            boxes = np.ascontiguousarray(self._boxes[:, self._columns[n] : self._columns[n + 1]])
            key = len(entry.shape), boxes.tobytes()
            if key not in known:
                known[key] = _kinds(boxes, len(entry.shape))
            own_kinds, numel = known[key]
            if numel != math.prod(entry.shape):
                problem = f"has {numel:,} of the {math.prod(entry.shape):,} elements of {entry.path[-1]} on all ranks"
                raise RankError(self._directory, f"would not be whole: the run {problem}", "pass the whole model")
            of.append(kinds.setdefault(tuple(own_kinds), len(kinds)))
        return {"kinds": [list(one) for one in kinds], "of": of}

    def note(
        self, written: Sequence[tuple[Sequence[int], Sequence[Path], Archives]], aliases: Mapping[str, str]
    ) -> None:
        """Note where this rank writes.

        Args:
            written: For each file: the indexes of its entries, in order; the paths of the objects after them; the file.
            aliases: Further names of tied weights.
        """
        rows: list[tuple[int, int, int]] = []
        stored: list[StoredEntry] = []
        for mine, objects, file in written:
            where = [(start, archive.nbytes) for start, archive in zip(file.starts, file.archives, strict=True)]
            rows += [(n, *place) for n, place in zip(mine, where, strict=False)]
            name = posixpath.basename(file.name)
            stored += [
                StoredEntry(path, None, (), [StoredChunk((), (), name, *place)])
                for path, place in zip(objects, where[len(mine) :], strict=True)
            ]
        self.own = self._places.message({"places": _packed(np.array(rows, np.int64).tobytes())})
        self._objects, self._aliases = stored, aliases

    def agree(self) -> None:
        """Note that rank 0 knows where this rank writes."""
        self._places.agree()

    def check(self, own: Sequence[Mapping[str, str]]) -> None:
        """Make the metadata on rank 0.

        Raises:
            RankError: Two entries have one name, or a part has no writer.
        """
        names = self._names
        stored: dict[str, dict[str, StoredEntry]] = {directory: {} for directory in names.directories}
        places = [one["places"] for one in self._places.texts(own)]
        for entry, found in zip(self._entries, self._chunks(places), strict=True):
            one, beside = StoredEntry(entry.path, entry.dtype, entry.shape, found), stored[entry.directory]
            if found.elements != math.prod(entry.shape) or one.fqn in beside:
                problem = f"would not have one entry of {one.fqn}"
                raise RankError(self._directory, problem, "rename a parameter: two names differ in their dots alone")
            beside[one.fqn] = one
        models = stored[names.directories[0]]
        for alias, name in self._aliases.items():
            first = models.get(".".join((*names.model, name)))
            if first is not None:
                tied = first._replace(path=(*names.model, alias))
                models.setdefault(tied.fqn, tied)
        objects = {names.directories[1]: self._objects}
        for directory, tensors in stored.items():
            entries = [*tensors.values(), *objects.get(directory, ())]
            content = metadata(entries)
            self._metadata[posixpath.join(directory, METADATA)] = content
            self._metadata[posixpath.join(directory, CHUNK_INDEX)] = chunk_index(entries, content)

    def _chunks(self, own: Sequence[str]) -> Iterator[_Chunks]:
        """Yield the chunks of each entry, from the places that all ranks write to."""
        written = [np.frombuffer(_unpacked(text), np.int64).reshape(-1, 3) for text in own]
        ranks = np.repeat(np.arange(len(own)), [len(rows) for rows in written])
        rows = np.concatenate(written)
        order = np.argsort(rows[:, 0], kind="stable")
        ends = np.searchsorted(rows[order, 0], np.arange(len(self._entries)), side="right")
        start = 0
        for n, (entry, end) in enumerate(zip(self._entries, ends.tolist(), strict=True)):
            mine = order[start:end]
            boxes = self._boxes[ranks[mine], self._columns[n] : self._columns[n + 1]]
            yield _Chunks(entry.dtype, np.column_stack([ranks[mine], rows[mine, 1:]]), boxes)
            start = end

    def files(self) -> Sequence[OutgoingFile]:
        """Return the files with the metadata."""
        return [PlainFile(name, HostPayload(content)) for name, content in self._metadata.items()]

    def _other_tensors(self, rank: int, names: str, first: str) -> RankError:
        own, others = ({_fqn(row): row for row in json.loads(_unpacked(text))} for text in (names, first))
        name = next(n for n in {**own, **others} if own.get(n) != others.get(n))
        problem = f"rank {rank} has another {name} than rank 0, or only one of them has it"
        return RankError(self._directory, problem, "build the same model and optimizer on all ranks")


class _Chunks(Collection[StoredChunk]):
    """The chunks of one tensor, made when they are needed: a large run has millions.

    Args:
        dtype: Type of the tensor.
        places: Of each chunk: the rank that writes it, the first byte, and the size of the archive.
        boxes: Of each chunk: the index of its first element in each dimension, then its shape.
    """

    def __init__(self, dtype: str, places: NDArray[np.int64], boxes: NDArray[np.int64]) -> None:
        self._dtype = dtype
        self._dimensions = boxes.shape[1] // 2
        self._places, self._boxes = places, boxes

    @property
    def elements(self) -> int:
        """Elements of all chunks."""
        return int(np.prod(self._boxes[:, self._dimensions :], axis=1).sum())

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, value: object) -> bool:
        return any(value == chunk for chunk in self)

    def __iter__(self) -> Iterator[StoredChunk]:
        for (rank, start, nbytes), box in zip(self._places.tolist(), self._boxes.tolist(), strict=True):
            sizes = tuple(box[self._dimensions :])
            values = _first_byte(self._dtype, sizes)
            yield StoredChunk(tuple(box[: self._dimensions]), sizes, _file_name(rank), start, nbytes, values)


def _kinds(boxes: NDArray[np.int64], dimensions: int) -> tuple[list[int], int]:
    """Return a number for each rank, equal for ranks with equal boxes; and the elements of the different boxes."""
    if not dimensions:
        return [0] * len(boxes), 1
    found, kinds = np.unique(boxes, axis=0, return_inverse=True)
    elements = np.prod(found[:, dimensions:], axis=1)
    total = int(elements.sum())
    kinds = kinds.reshape(-1)
    return np.where((elements[kinds] > 0) | (total == 0), kinds, -1).tolist(), total


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _fqn(row: Sequence[Any]) -> str:
    return ".".join(map(str, row[0]))


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
