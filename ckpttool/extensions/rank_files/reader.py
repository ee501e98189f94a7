"""The files of single ranks that FSDP2, HSDP and tensor parallelism leave behind, with DTensors in them -> Checkpoint.

Source: verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py; Accelerate 1.15, utils/fsdp_utils.py
(``save_fsdp_model``, ``save_fsdp_optimizer``); torch_checkpointing 0.1.1, ``CheckpointManager.save``.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.unpickler import unpickle
from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import itemsize, numpy_dtype, parse_number
from ckpttool.errors import LayoutError
from ckpttool.formats.dtensor import DTensor, Mesh, dtensor_of, shape_of_dtensor
from ckpttool.formats.fields import RESTORE, WHOLE, fingerprint
from ckpttool.formats.state_dict import STEP, StateDict, recorded_step
from ckpttool.formats.strided import boxes_of, merge_slices
from ckpttool.formats.tensors import whole_tensor
from ckpttool.model import CheckpointFile, Replica, ScalarState, State, Topology, tensor_number
from ckpttool.model.names import ORDER
from ckpttool.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Reader, Storage

MAX_INTEGERS = 1 << 24
"""Largest mesh, in ranks."""


class RankFileNames(NamedTuple):
    """The names of the files of one framework; the last group of a pattern is the rank."""

    model: str
    optimizer: str
    run: str = ""
    """Scheduler and random states."""
    has_size: bool = False
    """Whether the first group is the number of ranks."""


LAYOUTS = (
    RankFileNames(
        r"model_world_size_(\d+)_rank_(\d+)\.pt",
        r"optim_world_size_(\d+)_rank_(\d+)\.pt",
        r"extra_state_world_size_(\d+)_rank_(\d+)\.pt",
        has_size=True,
    ),
    RankFileNames(r"pytorch_model_fsdp_0_rank(\d+)\.bin", r"optimizer_0_rank(\d+)\.bin"),
    RankFileNames(r"model_(\d+)\.pt", r"optimizer_(\d+)\.pt"),
)


class _RankFile(NamedTuple):
    """An open file of one rank."""

    number: int
    """Its index into the checkpoint's files."""
    torch: TorchFile
    reader: Reader

    def integers(self, ref: TensorRef) -> list[int]:
        """Return the elements of a tensor of integers, in C order, with any strides."""
        import numpy as np

        if ref.dtype not in {"I32", "I64"} or ref.numel > MAX_INTEGERS:
            raise LayoutError(self.torch.path, "has a mesh that is not an array of ranks", RESTORE)
        where = self.torch.storages[ref.storage.key]
        width = itemsize(ref.dtype)
        start = where.start + ref.offset * width
        data = np.frombuffer(self.reader.read(start, where.start + ref.span * width), dtype=numpy_dtype(ref.dtype))
        place = np.zeros(1, dtype=np.int64)
        for size, stride in zip(ref.shape, ref.stride, strict=True):
            place = (place[:, None] + np.arange(size) * stride).reshape(-1)
        return [int(value) for value in data[place]]

    def scalar(self, ref: TensorRef) -> ScalarState:
        """Return the value of a tensor of one element."""
        where = self.torch.locate(ref)
        return ScalarState(parse_number(self.reader.read(where.start, where.end), ref.dtype), ref.dtype, ref.shape)


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a directory."""

    layout: RankFileNames
    model: dict[int, str]
    """Names by rank."""
    optimizer: dict[int, str]
    run: dict[int, str]
    size: int | None
    """Ranks by the names of the files; None if these do not contain it."""


def read_rank_files(storage: Storage, location: Location, _report: Report) -> Checkpoint | None:
    """Read the layout of the files of all ranks, without tensor bytes.

    Returns:
        The layout; None if the directory has no such files.

    Raises:
        CkptError: A file is missing or damaged, the files do not belong together, or they have an unsupported form.
    """
    directory = location.directory
    if not storage.is_dir(directory):
        return None
    found = _find(storage, directory)
    if found is None:
        return None
    with contextlib.ExitStack() as stack:
        reading = _Reading(storage, directory, stack, location.order)
        model = {rank: reading.open(name, "model", rank) for rank, name in sorted(found.model.items())}
        tensors = reading.tensors(model)
        meshes = reading.meshes
        ranks = found.size or max(len(mesh.ranks) for mesh in meshes)
        _check_ranks(directory, found.model, ranks)
        _check_ranks(directory, found.optimizer or found.model, ranks)
        result = StateDict(aliases=_ties(tensors), buffers=frozenset(n for n, t in tensors.items() if _is_plain(t)))
        for name, parts in tensors.items():
            if name not in (result.aliases or {}):
                result.weights[name] = reading.merge(name, parts)
        optimizer = {rank: reading.open(name, "optimizer", rank) for rank, name in sorted(found.optimizer.items())}
        if optimizer:
            reading.add_optimizer(result, optimizer, tensors)
            trained = {name for group in result.groups.values() for name in group.get("params", ())}
            result.unsharded = (result.buffers or frozenset()) & trained  # 0-dim, or ignored_params of fully_shard
            result.buffers = (result.buffers or frozenset()) - trained
        run = {rank: reading.open(name, "run state", rank) for rank, name in sorted(found.run.items())}
        largest = max(meshes, key=lambda mesh: len(mesh.ranks))
        tensor_parallel = math.prod(
            n for n, of in zip(largest.shape, largest.of.names or [""] * 9, strict=False) if of == "tp"
        )
        result.step = recorded_step(storage, directory)
        result.scheduler = _scheduler(run)
        result.left_out = reading.left_out
        result.mesh = largest.of
        result.replicas = tuple(reading.replicas)
        result.remarks = (
            "the files do not identify their save: a model file of another step with the same shapes is not noticed",
            *reading.remarks,
        )
        topology = Topology(data_parallel=ranks // tensor_parallel, tensor_parallel=tensor_parallel)
        first = posixpath.join(directory, next(iter(found.model.values())))
        return result.to_checkpoint(storage, location, "rank files", first, topology, tuple(reading.files))


def _find(storage: Storage, directory: str) -> _Found | None:
    names = [entry.name for entry in storage.listing(directory) if not entry.is_dir]
    for layout in LAYOUTS:
        of_kind = {
            kind: {name: match for name in names if (match := re.fullmatch(pattern, name))}
            for kind, pattern in (("model", layout.model), ("optimizer", layout.optimizer), ("run", layout.run))
        }
        if not of_kind["model"]:
            continue
        size = None
        if layout.has_size:
            size = _size(storage, directory, {int(m[1]) for m in of_kind["model"].values()}, names)
            of_kind = {k: {n: m for n, m in found.items() if int(m[1]) == size} for k, found in of_kind.items()}
        elif "metadata.pkl" in names:
            size = _recorded_size(storage, posixpath.join(directory, "metadata.pkl"))
        by_rank = {kind: {int(m[m.re.groups]): name for name, m in found.items()} for kind, found in of_kind.items()}
        if layout.has_size or _has_dtensors(storage, directory, min(of_kind["model"])):
            return _Found(layout, by_rank["model"], by_rank["optimizer"], by_rank["run"], size)
    return None


def _has_dtensors(storage: Storage, directory: str, name: str) -> bool:
    """Return whether a file contains DTensors: other programs give its name to whole files, too."""
    path = posixpath.join(directory, name)
    with storage.open(path, ahead=True) as reader:
        root = read_torch_file(reader).root
        return isinstance(root, dict) and any(shape_of_dtensor(value) is not None for value in root.values())


def _size(storage: Storage, directory: str, sizes: set[int], names: Sequence[str]) -> int:
    """Return the number of ranks of a verl checkpoint; files of an earlier save on other ranks do not count."""
    path = posixpath.join(directory, "fsdp_config.json")
    if "fsdp_config.json" in names:
        recorded = read_json(storage, path, "the configuration of a save of verl", RESTORE).get("world_size")
        if recorded not in sizes:
            raise LayoutError(
                path, f"names {recorded} ranks, but the directory has no files of {recorded} ranks", RESTORE
            )
        return int(recorded)
    if len(sizes) > 1:
        problem = f"has files of {' and '.join(map(str, sorted(sizes)))} ranks, and no fsdp_config.json"
        raise LayoutError(directory, problem, "move the files of the other save away")
    return next(iter(sizes))


def _recorded_size(storage: Storage, path: str) -> int:
    with storage.open(path) as reader:
        root = unpickle(reader.read(0, reader.nbytes), path=path).value
    size = root.get("world_size") if isinstance(root, dict) else None
    if not isinstance(size, int):
        raise LayoutError(path, "names no number of ranks", RESTORE)
    return size


def _check_ranks(directory: str, names: Mapping[int, str], ranks: int) -> None:
    """Check that there is a file of each rank, and no other."""
    for rank in range(ranks):
        if rank not in names:
            other = next(iter(names.values()))
            last = re.findall(r"\d+", other)[-1]
            head, _, tail = other.rpartition(last)
            raise LayoutError(
                posixpath.join(directory, f"{head}{rank}{tail}"), "is missing, others have theirs", RESTORE
            )
    if len(names) > ranks:
        problem = f"is of rank {max(names)}, but the mesh in the files has {ranks} ranks"
        raise LayoutError(
            posixpath.join(directory, names[max(names)]), problem, "move the files of the other save away"
        )


class _Part(NamedTuple):
    """One tensor in the file of one rank."""

    file: _RankFile
    value: DTensor | TensorRef


def _is_plain(parts: Sequence[_Part]) -> bool:
    return isinstance(parts[0].value, TensorRef)


def _ties(tensors: Mapping[str, Sequence[_Part]]) -> dict[str, str]:
    """Map further names of the same storage to the first name."""
    first: dict[tuple[object, ...], str] = {}
    result = {}
    for name, parts in tensors.items():
        local = [p.value if isinstance(p.value, TensorRef) else p.value.local for p in parts]
        if not any(ref.numel for ref in local):
            continue
        key = tuple((ref.storage.key, ref.offset, ref.shape) if ref.numel else None for ref in local)
        owner = first.setdefault((_is_plain(parts), *key), name)
        if owner != name:
            result[name] = owner
    return result


class _Reading:
    """Opens the files of a checkpoint, and merges the parts of their tensors."""

    def __init__(self, storage: Storage, directory: str, stack: contextlib.ExitStack, order: Sequence[str]) -> None:
        self._order = order
        self._storage = storage
        self._directory = directory
        self._stack = stack
        self.files: list[CheckpointFile] = []
        self.meshes: set[Mesh] = set()
        """All meshes, as seen by the first rank of each."""
        self.replicas: list[Replica] = []
        self.remarks: list[str] = []
        self.left_out = ""
        self._tables: dict[int, tuple[TensorRef, list[int]]] = {}
        """Elements of meshes that were read, by identity."""

    def open(self, name: str, kind: str, rank: int) -> _RankFile:
        """Open a file and read its pickle."""
        reader = self._stack.enter_context(self._storage.open(posixpath.join(self._directory, name), ahead=True))
        torch = read_torch_file(reader)
        file = CheckpointFile(name, reader.nbytes, kind, rank, reader.version, records=torch.records)
        self.files.append(file)
        return _RankFile(len(self.files) - 1, torch, reader)

    def tensors(self, files: Mapping[int, _RankFile]) -> dict[str, list[_Part]]:
        """Return the parts of each tensor of the model, in the order of the ranks.

        Raises:
            LayoutError: A file contains other tensors than the first file, or tensors of another rank.
        """
        result: dict[str, list[_Part]] = {}
        for rank, file in files.items():
            root = file.torch.root
            values = {n: v for n, v in root.items() if isinstance(n, str)} if isinstance(root, dict) else {}
            parts = {n: self.part(file, rank, n, value) for n, value in values.items()}
            own = {n: part for n, part in parts.items() if part is not None}
            if not any(isinstance(part.value, DTensor) for part in own.values()):
                raise LayoutError(file.torch.path, "holds no DTensors: it is not the part of one rank of FSDP2", WHOLE)
            if result and list(own) != list(result):
                odd = next(iter({*own} ^ {*result}), "the same names in another order")
                problem = f"differs from the file of the first rank in its tensors: {odd}"
                raise LayoutError(file.torch.path, problem, RESTORE)
            for name, part in own.items():
                result.setdefault(name, []).append(part)
        return result

    def part(self, file: _RankFile, rank: int, name: str, value: object) -> _Part | None:
        """Return a value as part of a tensor; None if it is not a tensor.

        Raises:
            LayoutError: It is the part of another rank, or not a block of its tensor.
        """
        if isinstance(value, TensorRef):
            return _Part(file, value)
        found = dtensor_of(file.torch.path, name, value, partial(self._integers, file))
        if found is None:
            return None
        if found.mesh.rank != rank:
            problem = f"holds the part of rank {found.mesh.rank}: it was renamed, copied or swapped"
            raise LayoutError(file.torch.path, problem, RESTORE)
        if not any(mesh[:2] == found.mesh[:2] for mesh in self.meshes):
            self.meshes.add(found.mesh)
        block = found.block()
        if block is None or block[1] != found.local.shape:
            expected = "one block" if block is None else f"the shape {list(block[1])}"
            problem = f"holds {list(found.local.shape)} of {name}, not {expected} of {list(found.shape)}"
            raise LayoutError(file.torch.path, problem, "save it with another layout: torch wrote it wrong")
        return _Part(file, found)

    def _integers(self, file: _RankFile, ref: TensorRef) -> list[int]:
        """Return the elements of a mesh, which all tensors of a file share."""
        kept = self._tables.get(id(ref))
        if kept is None or kept[0] is not ref:
            kept = self._tables[id(ref)] = ref, file.integers(ref)
        return kept[1]

    def merge(self, name: str, parts: Sequence[_Part]) -> State:
        """Return the whole tensor.

        Raises:
            LayoutError: The parts do not belong to one tensor, or do not fill it.
        """
        first = parts[0]
        if isinstance(first.value, TensorRef):
            if any(not isinstance(p.value, TensorRef) or p.value.shape != first.value.shape for p in parts):
                raise LayoutError(first.file.torch.path, f"holds {name} in another shape than other ranks", RESTORE)
            state, *copies = (
                whole_tensor(p.file.torch, p.file.number, p.value) for p in parts if isinstance(p.value, TensorRef)
            )
            self.replicas += [Replica(name, state, copy) for copy in copies]
            return state
        blocks: dict[object, State] = {}
        pieces = []
        shape, dtype = first.value.shape, first.value.local.dtype
        for part in parts:
            value = part.value
            if not isinstance(value, DTensor) or (value.shape, value.local.dtype) != (shape, dtype):
                raise LayoutError(part.file.torch.path, f"holds {name} in another shape than other ranks", RESTORE)
            block = value.block()
            if block is None or not value.local.numel:
                continue
            state = whole_tensor(part.file.torch, part.file.number, value.local)
            if block in blocks:
                self.replicas.append(Replica(name, blocks[block], state))
            else:
                blocks[block] = state
                pieces.append((state, boxes_of(*block, shape)))
        if sum(state.numel for state in blocks.values()) != math.prod(shape):
            problem = f"holds {name} of {list(shape)}, which the parts of all ranks do not fill"
            raise LayoutError(first.file.torch.path, problem, RESTORE)
        return merge_slices(pieces, shape, dtype)

    def add_optimizer(
        self, result: StateDict, files: Mapping[int, _RankFile], tensors: Mapping[str, Sequence[_Part]]
    ) -> None:
        """Add the optimizer's states and groups.

        Raises:
            LayoutError: The files of the ranks do not belong together.
        """
        states: dict[str, dict[str, list[_Part]]] = {}
        groups: list[dict[str, Any]] | None = None
        for rank, file in files.items():
            state, own = _optimizer_of(file)
            names = self._names(state, own, tensors)
            if names is None:
                self.left_out = (
                    f"{posixpath.basename(file.torch.path)} numbers the optimizer's parameters, and their shapes fit "
                    "the model's parameters in several ways, or in none"
                )
                self.remarks.append(f"the optimizer's states are left out: {self.left_out}")
                return
            listed = [
                {
                    key: [names[p] for p in value if p in names] if key == "params" else self._option(file, value)
                    for key, value in group.items()
                }
                for group in own
            ]
            if groups is not None and fingerprint(listed) != fingerprint(groups):
                raise LayoutError(file.torch.path, "has other parameter groups than the first rank", RESTORE)
            groups = listed
            for key, values in state.items():
                for kind, value in values.items() if isinstance(values, dict) else ():
                    part = self.part(file, rank, f"{kind} of {names[key]}", value)
                    if part is not None:
                        states.setdefault(names[key], {}).setdefault(str(kind), []).append(part)
        for name, kinds in states.items():
            for kind, parts in kinds.items():
                if len(parts) != len(files):
                    raise LayoutError(parts[0].file.torch.path, f"holds {kind} of {name}, other ranks do not", RESTORE)
                self._add_state(result, name, kind, parts)
        result.groups = {str(number): group for number, group in enumerate(groups or [])}

    def _add_state(self, result: StateDict, name: str, kind: str, parts: Sequence[_Part]) -> None:
        values = [p.value for p in parts]
        if isinstance(values[0], TensorRef) and values[0].numel == 1:
            numbers = [p.file.scalar(p.value) for p in parts if isinstance(p.value, TensorRef)]
            if any(number != numbers[0] for number in numbers) or len(numbers) < len(parts):
                odd = next((p for p, n in zip(parts, numbers, strict=False) if n != numbers[0]), parts[-1])
                problem = f"holds another {kind} of {name} than the first rank: two saves are mixed"
                raise LayoutError(odd.file.torch.path, problem, RESTORE)
            result.numbers.setdefault(name, {})[kind] = numbers[0]
            if kind == STEP:
                return
        result.states.setdefault(name, {})[kind] = self.merge(f"{kind} of {name}", parts)

    def assume_order(self, wanted: Sequence[tuple[int, ...] | None]) -> None:
        """Remark that parameters of equal shapes are taken in the order of the model."""
        known = [shape for shape in wanted if shape is not None]
        if len({*known}) < len(known) and ORDER not in self.remarks:
            self.remarks.append(ORDER)

    def _option(self, file: _RankFile, value: object) -> Any:
        return tensor_number(file.scalar(value)) if isinstance(value, TensorRef) and value.numel == 1 else value

    def _names(
        self, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Sequence[_Part]]
    ) -> dict[Any, str] | None:
        """Return the name of each parameter of the optimizer by its key there; None if the file does not say.

        ``torch.optim.Optimizer.state_dict`` numbers the parameters in the order of the groups.
        """
        keys = [key for group in groups for key in group.get("params", ())]
        if all(isinstance(key, str) for key in keys):
            return {key: key for key in keys} if {*keys} <= {*tensors} else None
        named = [name for group in groups for name in group.get("param_names", ())]
        if len(named) == len(keys):
            return dict(zip(keys, named, strict=True)) if {*named} <= {*tensors} else None
        ties = _ties(tensors)
        wanted = [_moment_shape(state.get(key)) for key in keys]
        if len(self._order) == len(keys) and {*self._order} <= {*tensors}:
            shapes = [tensors[name][0].value.shape for name in self._order]
            if all(want in {None, shape} for want, shape in zip(wanted, shapes, strict=True)):
                return dict(zip(keys, self._order, strict=True))
        self.assume_order(wanted)
        sharded = [n for n, parts in tensors.items() if n not in ties and not _is_plain(parts)]
        for candidates in (sharded, [n for n in tensors if n not in ties]):
            shapes = [tensors[n][0].value.shape for n in candidates]
            if len(groups) == 1:
                chosen = _only_assignment(wanted, shapes)
            else:
                chosen = _assignment_by_shape(wanted, shapes, [len(group["params"]) for group in groups])
            if chosen is not None:
                return {key: candidates[i] for key, i in zip(keys, chosen, strict=True) if i is not None}
        return None


def _moment_shape(states: object) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its optimizer states; None without any."""
    found = [value for key, value in states.items() if key != STEP] if isinstance(states, dict) else []
    shapes = [value.shape if isinstance(value, TensorRef) else shape_of_dtensor(value) for value in found]
    return max((shape for shape in shapes if shape is not None), key=len, default=None)


def _only_assignment(
    wanted: Sequence[tuple[int, ...] | None], shapes: Sequence[tuple[int, ...]]
) -> list[int | None] | None:
    """Return the only increasing choice of parameters with the wanted shapes.

    Args:
        wanted: Shapes; None for any.
        shapes: Shapes of the parameters.

    Returns:
        None without a choice, or if several differ in a wanted shape; an item is None if they differ there.
    """
    fits = [[want is None or want == shape for shape in shapes] for want in wanted]
    earliest, at = [], 0
    for row in fits:
        at = next((i for i in range(at, len(shapes)) if row[i]), len(shapes)) + 1
        earliest.append(at - 1)
    latest, at = [], len(shapes) - 1
    for row in reversed(fits):
        at = next((i for i in range(at, -1, -1) if row[i]), -1) - 1
        latest.append(at + 1)
    chosen = [a if a == b else None for a, b in zip(earliest, latest[::-1], strict=True)]
    possible = not earliest or earliest[-1] < len(shapes)
    unclear = any(want is not None and i is None for want, i in zip(wanted, chosen, strict=True))
    return chosen if possible and not unclear else None


def _assignment_by_shape(
    wanted: Sequence[tuple[int, ...] | None], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[int | None] | None:
    """Return the parameters of several groups, each in the order of the model, if the shapes decide.

    They do where all parameters of one shape are in one group, as where weight decay is for matrices alone.

    Args:
        wanted: Shapes, of one group after the other; None for any.
        shapes: Shapes of the parameters.
        sizes: Number of parameters of each group.

    Returns:
        None if the shapes do not decide; an item is None where any shape is wanted.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for number, shape in enumerate(shapes):
        places.setdefault(shape, []).append(number)
    chosen: list[int | None] = []
    for size in sizes:
        own = wanted[len(chosen) : len(chosen) + size]
        for shape in {shape for shape in own if shape is not None}:
            if len(places.get(shape, ())) != own.count(shape):
                return None
        follow = {shape: iter(places[shape]) for shape in own if shape is not None}
        numbers = [None if shape is None else next(follow[shape]) for shape in own]
        known = [number for number in numbers if number is not None]
        if known != sorted(known):
            return None
        chosen += numbers
    return chosen


def _optimizer_of(file: _RankFile) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Return the states by parameter, and the groups."""
    root = file.torch.root
    if isinstance(root, dict) and isinstance(root.get("state"), dict) and isinstance(root.get("param_groups"), list):
        groups = [group for group in root["param_groups"] if isinstance(group, dict)]
        return root["state"], groups
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        raise LayoutError(file.torch.path, "holds no states of an optimizer", RESTORE)
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in root.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind in {"state", "param_groups"} and name:
            (states if kind == "state" else options).setdefault(name, {})[last] = value
    by_options: dict[object, dict[str, Any]] = {}
    for name, own in options.items():
        ordered = {key: own[key] for key in sorted(own)}
        by_options.setdefault(tuple(fingerprint(ordered)), {**ordered, "params": []})["params"].append(name)
    return states, list(by_options.values())


def _scheduler(run: Mapping[int, _RankFile]) -> Any:
    """Return the state of the scheduler.

    Raises:
        LayoutError: The files of two ranks differ in it.
    """
    first: Any = None
    for rank, file in run.items():
        root = file.torch.root
        own = root.get("lr_scheduler") if isinstance(root, dict) else None
        if rank == next(iter(run)):
            first = own
        elif fingerprint(own) != fingerprint(first):
            raise LayoutError(
                file.torch.path, "has another scheduler than the first rank: two saves are mixed", RESTORE
            )
    return first
