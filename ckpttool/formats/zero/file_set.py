"""The files of one checkpoint, opened and held against each other.

What they hold is for ``stage0``, ``stage12`` and ``stage3``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.checksums import crc32
from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.torch_zip import bytes_with_crc
from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import ChecksumError, CkptError, LayoutError
from ckpttool.formats.fields import Fields, describe, enum_value
from ckpttool.formats.zero.identity import copied, renamed
from ckpttool.formats.zero.names import ZeroName, parse_name
from ckpttool.model import CheckpointFile, ScalarState
from ckpttool.ranges import ByteRange, ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckpttool.checksums import Record
    from ckpttool.containers.unpickler import Unpickled
    from ckpttool.formats.locate import Location
    from ckpttool.storage import RangeReader, Storage

Report = Callable[[CkptError], None]
"""What to do with a finding: raise it at once, or collect it and read on as far as that makes sense."""

MAX_RANKS = 1 << 20
"""No run has more."""
READ_AHEAD = 32
"""Files whose structure is read at once, where reading is distant."""
END_BYTES = 1 << 16
"""Bytes at either end of a file that are read at once, where reading is distant."""
LARGE_MODEL_BYTES, MODEL_END_BYTES = 1 << 26, 1 << 19
"""Files of a model's states from this size on have a record for each of some thousands of parameters."""
MAX_NAMED = 20
"""Missing files that are named one by one."""
RESTORE = "restore it from a copy, or choose another tag"
SWAPPED = "offloaded_tensors"
"""Directory of what was offloaded to NVMe when it was saved."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """One file, read."""

    index: int
    """Index into the checkpoint's files."""
    torch: TorchFile
    """Its structure."""
    fields: Fields
    """Its top-level mapping."""
    numbers: dict[tuple[str, int], ScalarState]
    """Values of the tensors of an optimizer's states that hold one number, by (storage key, element)."""

    @property
    def path(self) -> str:
        """What error messages call it."""
        return self.torch.path

    def scalar(self, value: object) -> ScalarState | None:
        """A number of this file, saved as a Python number or as a 0-dim tensor; None if it is neither."""
        if isinstance(value, bool | int | float):
            return ScalarState(value, None)
        if isinstance(value, TensorRef) and value.shape == ():
            return self.numbers.get((value.storage.key, value.offset))
        return None

    def single(self, value: object) -> ScalarState | None:
        """A number of this file, saved as a tensor of shape (1,)."""
        if not isinstance(value, TensorRef) or value.shape != (1,):
            return None
        number = self.numbers.get((value.storage.key, value.offset))
        return None if number is None else replace(number, shape=(1,))


@dataclass(frozen=True, slots=True, eq=False)
class SwappedFile:
    """Raw elements of one tensor, copied from an NVMe swap folder."""

    index: int
    """Index into the checkpoint's files."""
    path: str
    """What error messages call it."""
    nbytes: int
    """Its size; may be rounded up."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFile:
    """One expert of one MoE layer."""

    layer: int
    """Number of the MoE layer; 0 in the releases that did not write it."""
    expert: int
    """Number of the expert among all of the layer."""
    file: RankFile
    """Its weights."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerFile:
    """One layer of a pipeline."""

    layer: int
    """Number of the layer in the whole pipeline."""
    tensor_rank: int
    """Tensor-parallel rank."""
    file: RankFile
    """Its state dict."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroFiles:
    """The files of one model-parallel rank (of the whole model, where there is but one)."""

    location: Location
    """Where they are."""
    stage: int
    """0, 1, 2 or 3."""
    model_rank: int
    """Pipeline stage times tensor-parallel ranks plus tensor-parallel rank."""
    model: list[RankFile]
    """Model states: one file at stages 0 to 2, one for each rank at stage 3."""
    optimizer: list[RankFile]
    """Optimizer states, one file for each rank; none at stage 0."""
    experts: tuple[ExpertFile, ...] = ()
    """Experts' weights, which MoE keeps apart from the others."""
    expert_optimizer: tuple[RankFile, ...] = ()
    """At stage 0 with MoE: the whole optimizer of each expert-parallel rank."""
    swapped: tuple[dict[str, SwappedFile], ...] = ()
    """What was offloaded to NVMe: for each rank, file by name."""
    recorded: tuple[tuple[str, ...], ...] = ()
    """At stage 0 the parameters of each group in the optimizer's order, if the manifest has them."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks over which the optimizer is partitioned."""
        return len(self.optimizer)

    def states(self, rank: int) -> Fields:
        """The ``optimizer_state_dict`` of a rank's optimizer file."""
        return self.optimizer[rank].fields.child("optimizer_state_dict")


@dataclass(frozen=True, slots=True, eq=False)
class AllFiles:
    """The files of a whole checkpoint."""

    slices: tuple[ZeroFiles, ...]
    """One for each model-parallel rank."""
    layers: tuple[LayerFile, ...]
    """The layers of a pipeline."""
    files: tuple[CheckpointFile, ...]
    """All of them."""
    notes: tuple[LayoutError, ...]
    """What was noticed that does not keep the checkpoint from being read."""
    renamed: tuple[str, ...] = ()
    """Files whose names are trusted, though they say that they were saved under others."""


def raise_at_once(error: CkptError) -> None:
    """The report of those who want a sound checkpoint or none."""
    raise error


def read_zero_files(storage: Storage, location: Location, report: Report) -> AllFiles:
    """Open every file of a checkpoint, and make sure that they are all there and belong together.

    Raises:
        CkptError: What is wrong, unless ``report`` collects it and reading can go on.
    """
    opener = Opener(storage, location, report)
    by_rank: dict[int, list[ZeroName]] = {}
    for name in opener.names:
        if name.kind != "layer":
            by_rank.setdefault(name.model_rank, []).append(name)
    if not by_rank:
        raise LayoutError(location.directory, "holds layers of a pipeline, but no model states", RESTORE)
    slices = [_read_slice(opener, rank, by_rank[rank]) for rank in sorted(by_rank)]
    first = slices[0]
    check_model_ranks(opener, slices)
    layers = [
        LayerFile(name.layer, name.model_rank, file)
        for name in sorted((n for n in opener.names if n.kind == "layer"), key=lambda n: (n.layer, n.model_rank))
        if (file := opener.open(name))
    ]
    if opener.errors:
        raise opener.errors[0]
    wanted = {posixpath.basename(f.path) for s in slices for f in _files_of(s)}
    wanted |= {posixpath.basename(layer.file.path) for layer in layers}
    what = f"ZeRO-{first.stage} over {first.ranks} ranks" if first.stage else "of stage 0"
    notes = tuple(_stale(opener.path(n.name), what) for n in opener.names if n.name not in wanted)
    return _renumbered(opener, slices, layers, notes)


def _renumbered(
    opener: Opener, slices: Sequence[ZeroFiles], layers: Sequence[LayerFile], notes: tuple[LayoutError, ...]
) -> AllFiles:
    """Number the files that are part of the checkpoint; those opened in vain are not."""
    files: list[CheckpointFile] = []

    def kept(file: RankFile) -> RankFile:
        files.append(opener.files[file.index])
        return RankFile(len(files) - 1, file.torch, file.fields, file.numbers)

    def kept_swapped(file: SwappedFile) -> SwappedFile:
        files.append(opener.files[file.index])
        return SwappedFile(len(files) - 1, file.path, file.nbytes)

    numbered = tuple(
        replace(
            s,
            optimizer=[kept(f) for f in s.optimizer],
            model=[kept(f) for f in s.model],
            experts=tuple(ExpertFile(e.layer, e.expert, kept(e.file)) for e in s.experts),
            expert_optimizer=tuple(kept(f) for f in s.expert_optimizer),
            swapped=tuple({name: kept_swapped(f) for name, f in rank.items()} for rank in s.swapped),
        )
        for s in slices
    )
    in_layers = tuple(LayerFile(layer.layer, layer.tensor_rank, kept(layer.file)) for layer in layers)
    if len(slices) == 1:
        files = [replace(f, model_rank=None) for f in files]
    return AllFiles(numbered, in_layers, tuple(files), notes, tuple(opener.renamed))


def _files_of(files: ZeroFiles) -> list[RankFile]:
    return [*files.optimizer, *files.model, *(e.file for e in files.experts), *files.expert_optimizer]


# ------------------------------------------------------------------------------------------- one model-parallel rank


def _read_slice(opener: Opener, model_rank: int, named: Sequence[ZeroName]) -> ZeroFiles:
    if not any(n.kind == "optimizer" for n in named):
        return _read_stage0(opener, model_rank, named)
    by_rank = {p.data_rank or 0: p for p in named if p.kind == "optimizer"}
    prefix = _single_prefix(opener.location, [p for p in named if p.kind == "optimizer"])
    first = next((file for rank in sorted(by_rank) if (file := opener.open(by_rank[rank]))), None)
    if first is None:
        raise opener.errors[0]
    ranks, stage = _partition_count(first), _stage(first)
    what = f"ZeRO-{stage} over {ranks} ranks"
    opener.missing(
        [
            f"{prefix}zero_pp_rank_{r}_mp_rank_{model_rank:02d}_optim_states.pt"
            for r in range(ranks)
            if r not in by_rank
        ],
        f"{what}, found only rank {', '.join(map(str, sorted(by_rank)))}",
    )
    optimizer: list[RankFile] = []
    for rank in sorted(r for r in by_rank if r < ranks):
        file = opener.open(by_rank[rank])
        if file is not None:
            optimizer.append(file)
            if (count := _partition_count(file)) != ranks:
                opener.report(_two_world_sizes(file, count, ranks, first))
            elif (other := _stage(file)) != stage:
                opener.report(_two_saves(file, f"is of ZeRO-{other}", f"of ZeRO-{stage}", first))
    model: list[RankFile] = []
    models = {p.name: p for p in named if p.kind == "model"}
    opener.missing([name for name in model_names(stage, ranks, model_rank) if name not in models], what)
    for name in model_names(stage, ranks, model_rank):
        if name in models and (file := opener.open(models[name])):
            model.append(file)
            size = file.fields.optional("dp_world_size", int)
            if size is not None and size != ranks and not _shards_within(file, ranks, size):
                opener.report(_two_world_sizes(file, size, ranks, first))
    if not opener.errors and not opener.location.trust_names and (error := copied(opener.storage, optimizer)):
        opener.report(error)
    stage = _configured_stage(model, stage)
    experts = _experts(opener, named)
    swapped = tuple(opener.swapped(r) for r in range(ranks)) if stage == 3 else ()
    return ZeroFiles(opener.location, stage, model_rank, model, optimizer, experts, swapped=swapped)


def _read_stage0(opener: Opener, model_rank: int, named: Sequence[ZeroName]) -> ZeroFiles:
    """Without ZeRO one file holds model and optimizer, but for the experts of a mixture.

    Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``, ``_save_moe_checkpoint``).
    """
    name = f"mp_rank_{model_rank:02d}_model_states.pt"
    models = {p.name: p for p in named if p.kind == "model"}
    if name not in models:
        problem = "holds no ZeRO optimizer files" if models else "holds no model states"
        raise LayoutError(opener.location.directory, problem, RESTORE)
    file = opener.open(models[name], numbers=True)
    if file is None:
        raise opener.errors[0]
    if file.fields.values.get("param_shapes") is not None:
        # Stages 1 and 2 list their parameters here, and keep the optimizer in files of its own.
        of_others = [n for n in opener.names if n.kind == "optimizer"]
        own = f"mp_rank_{model_rank:02d}"
        opener.missing(
            sorted({n.name.replace(f"mp_rank_{n.model_rank:02d}", own) for n in of_others}),
            "other model-parallel ranks have theirs",
        )
        if opener.errors:
            raise opener.errors[0]
        problem = "holds no ZeRO optimizer files"
        hint = "the masters are in them: restore them from a copy, or choose another tag"
        raise LayoutError(opener.location.directory, problem, hint)
    optimizers = sorted((p for p in named if p.kind == "expert optimizer"), key=lambda p: p.expert)
    gone = sorted(set(range(max((p.expert for p in optimizers), default=-1) + 1)) - {p.expert for p in optimizers})
    stem = f"expp_rank_{{}}_mp_rank_{model_rank:02d}_optim_states.pt"
    opener.missing([stem.format(e) for e in gone[: MAX_NAMED + 1]], "an expert-parallel rank")
    opened = tuple(f for p in optimizers if (f := opener.open(p, numbers=True)))
    return ZeroFiles(opener.location, 0, model_rank, [file], [], _experts(opener, named), opened)


def _experts(opener: Opener, named: Sequence[ZeroName]) -> tuple[ExpertFile, ...]:
    names = sorted((p for p in named if p.kind == "expert"), key=lambda p: (p.layer, p.expert))
    numbers: dict[int, list[int]] = {}
    for name in names:
        numbers.setdefault(name.layer, []).append(name.expert)
    for layer, experts in numbers.items():
        # The highest number that is there tells at least how many there must be.
        gone = sorted(set(range(max(len(e) for e in numbers.values()))) - set(experts))
        stem = names[0].name.replace(f"layer_{names[0].layer}_", f"layer_{layer}_")
        opener.missing([stem.replace(f"expert_{names[0].expert}_", f"expert_{e}_") for e in gone], "an expert")
    return tuple(ExpertFile(n.layer, n.expert, file) for n in names if (file := opener.open(n)))


def check_model_ranks(opener: Opener, slices: Sequence[ZeroFiles]) -> None:
    """Every tensor- and pipeline-parallel rank must be there, and of the same save."""
    first = slices[0]
    if not first.model:
        return
    size = first.model[0].fields.optional("mp_world_size", int) or len(slices)
    present = {s.model_rank for s in slices}
    if not 0 < size <= MAX_RANKS:
        raise first.model[0].fields.error("mp_world_size", "is not a number of ranks")
    stem = posixpath.basename(first.model[0].path)
    own = f"mp_rank_{first.model_rank:02d}"
    gone = [stem.replace(own, f"mp_rank_{r:02d}") for r in range(size) if r not in present]
    opener.missing(gone, f"the model is spread over {size} model-parallel ranks")
    for s in slices[1:]:
        if s.model and (s.stage, s.ranks) != (first.stage, first.ranks):
            ours, theirs = (f"is of ZeRO-{x.stage} over {x.ranks} ranks" for x in (s, first))
            opener.report(_two_saves(s.model[0], ours, theirs, first.model[0]))
        if s.model_rank >= size and s.model:
            problem = f"is of {s.model_rank + 1} model-parallel ranks or more"
            opener.report(_two_saves(s.model[0], problem, f"is of {size}", first.model[0]))


_Loaded = tuple[TorchFile, str, dict[tuple[str, int], ScalarState]]
"""A file's structure, its version, and its 0-dim tensors."""


class Opener:
    """Opens the files of one checkpoint and remembers what keeps them from being one."""

    def __init__(self, storage: Storage, location: Location, report: Report) -> None:
        self.storage = storage
        self.location = location
        self._report = report
        self.files: list[CheckpointFile] = []
        self.errors: list[CkptError] = []
        self.files_by_name: dict[str, RankFile | None] = {}
        """What was opened; None for what could not be."""
        self.renamed: list[str] = []
        """Files whose names are trusted, though they say that they were saved under others."""
        self._pickles: dict[bytes, Unpickled] = {}
        self._directory: dict[str, str] = {}
        """Where each file lies."""
        self._swapped: dict[int, dict[str, str]] = {}
        """What each rank had offloaded: the folder of each file."""
        self._ahead: dict[str, tuple[bool, Future[_Loaded]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        offloaded: list[tuple[str, dict[int, str]]] = []
        sizes: dict[str, list[tuple[int, str]]] = {}
        for directory in (location.directory, *location.others):
            for entry in storage.listing(directory):
                if entry.is_dir and entry.name == SWAPPED:
                    offloaded.append((directory, self._folders_of_ranks(posixpath.join(directory, SWAPPED))))
                elif not entry.is_dir:
                    sizes.setdefault(entry.name, []).append((entry.nbytes, directory))
                    self._directory.setdefault(entry.name, directory)
        self.names = [parsed for name in self._directory if (parsed := parse_name(name))]
        for name in self.names:
            # What several nodes hold each (shared model states) must be one thing.
            (nbytes, first), *others = sizes[name.name]
            for other, directory in others:
                if other != nbytes:
                    problem = f"is {other:,} bytes long, but the one in {first} {nbytes:,}: two saves are mixed"
                    self.report(LayoutError(posixpath.join(directory, name.name), problem, RESTORE))
        for directory, folders in offloaded:
            self._find_swapped(directory, folders)
        self.ahead((n.name, n.kind == "optimizer") for n in self.names)

    def ahead(self, names: Iterable[tuple[str, bool]]) -> None:
        """Where reading is distant, begin to read the structure of files, many at once: (name, whether numbers too)."""
        if not self.storage.distant:
            return
        from concurrent.futures import ThreadPoolExecutor

        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ckpttool-structure")
        for name, numbers in names:
            self._ahead.setdefault(name, (numbers, self._pool.submit(self._load, self.path(name), numbers)))

    def path(self, name: str) -> str:
        """Full path of a file, also of one that is not there."""
        return posixpath.join(self._directory.get(name, self.location.directory), name)

    def report(self, error: CkptError) -> None:
        """Pass on an error after which the files cannot be read as one checkpoint."""
        self.errors.append(error)
        try:
            self._report(error)
        except CkptError:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def missing(self, names: list[str], what: str) -> None:
        """Report files that should be there; the first few by name."""
        for name in names[:MAX_NAMED]:
            path = self.path(name)
            problem = "is not a file" if self.storage.exists(path) else "is missing"
            hint = f"{RESTORE}; if other nodes hold it, pass their directories too"
            self.report(LayoutError(path, f"{problem} ({what})", hint))
        if len(names) > MAX_NAMED:
            problem = f"lacks {len(names) - MAX_NAMED:,} more files ({what})"
            self.report(LayoutError(self.location.directory, problem, RESTORE))

    def open(self, name: ZeroName, *, numbers: bool = False) -> RankFile | None:
        """Read the structure of one of ``names``; see ``read``."""
        numbers |= name.kind == "optimizer"
        return self.read(name.name, name.kind, name.data_rank, name.model_rank, numbers=numbers)

    def read(
        self, name: str, kind: str, rank: int | None = None, model_rank: int | None = None, *, numbers: bool = False
    ) -> RankFile | None:
        """Read the structure of one file, once; None if that failed and the error was collected.

        Args:
            name: The file, relative to the checkpoint.
            kind: Which states it holds.
            rank: Data-parallel rank that wrote it.
            model_rank: Model-parallel rank that wrote it.
            numbers: Read 0-dim tensors too.
        """
        if name not in self.files_by_name:
            self.files_by_name[name] = self._read(name, kind, rank, model_rank, numbers)
        return self.files_by_name[name]

    def _read(self, name: str, kind: str, rank: int | None, model_rank: int | None, numbers: bool) -> RankFile | None:
        path = self.path(name)
        try:
            with_numbers, begun = self._ahead.pop(name, (False, None))
            if begun is None or (numbers and not with_numbers):  # at stage 0 model files hold numbers too
                torch, version, values = self._load(path, numbers)
            else:
                torch, version, values = begun.result()
            if not isinstance(torch.root, dict) and kind != "state":
                raise LayoutError(path, f"holds a {describe(torch.root)}, not a dict of states", RESTORE)
        except CkptError as error:
            self.report(error)
            return None
        if (misnamed := renamed(name, kind, torch)) is not None:
            if not self.location.trust_names:
                self.report(misnamed)
                return None
            self.renamed.append(name)
        self._register(name, torch.nbytes, kind, rank, version, model_rank, torch.records)
        fields = Fields(path, "", torch.root if isinstance(torch.root, dict) else {})
        return RankFile(len(self.files) - 1, torch, fields, values)

    def _load(self, path: str, numbers: bool) -> _Loaded:
        with self.storage.open(path, ahead=True) as reader:
            # One holds the pickle, the other says where all lies: both are needed.
            reader.read_ahead(ends(reader.nbytes, _end_bytes(path, reader.nbytes)))
            torch = read_torch_file(reader, self._pickles)
            return torch, reader.version, _read_numbers(reader, torch) if numbers else {}

    def _register(
        self, name: str, nbytes: int, kind: str, rank: int | None, version: str, model_rank: int | None,
        records: tuple[Record, ...] = (),
    ) -> None:  # fmt: skip
        directory = self._directory.get(name, self.location.directory)
        elsewhere = None if directory == self.location.directory else directory
        self.files.append(CheckpointFile(name, nbytes, kind, rank, version, model_rank, elsewhere, records))

    def _folders_of_ranks(self, directory: str) -> dict[int, str]:
        """The folder of each rank, by the number in its name."""
        folders = {}
        for entry in self.storage.listing(directory):
            match = re.fullmatch(r"rank(\d+)", entry.name)
            if match and entry.is_dir:
                folders[int(match.group(1))] = posixpath.join(directory, entry.name)
        return folders

    def _find_swapped(self, directory: str, folders: dict[int, str]) -> None:
        """Note the files of each rank in one directory, where a node may have counted its own ranks from 0.

        Source: DeepSpeed 0.19, runtime/engine.py (``save_checkpoint``: ``use_node_local_storage``).
        """
        held = (n.data_rank for n in self.names if n.kind == "optimizer" and self._directory[n.name] == directory)
        own = sorted({rank for rank in held if rank is not None})
        counted = len(self.location.others) > 0 and not set(folders) <= set(own) and len(folders) == len(own)
        for number, rank in zip(sorted(folders), own if counted else sorted(folders), strict=True):
            folder = folders[number]
            for entry in self.storage.listing(folder):
                if not entry.name.endswith(".tensor.swp"):
                    continue
                if (other := self._swapped.setdefault(rank, {}).setdefault(entry.name, folder)) != folder:
                    path = posixpath.join(folder, entry.name)
                    raise LayoutError(path, f"is of rank {rank}, as is what lies in {other}", RESTORE)

    def swapped(self, rank: int) -> dict[str, SwappedFile]:
        """What a rank had offloaded to NVMe, by file name."""
        found = {}
        for name, folder in self._swapped.get(rank, {}).items():
            path = posixpath.join(folder, name)
            with self.storage.open(path) as reader:
                relative = posixpath.join(SWAPPED, posixpath.basename(folder), name)
                self._directory[relative] = posixpath.dirname(posixpath.dirname(folder))
                self._register(relative, reader.nbytes, "swapped", rank, reader.version, 0)
                found[name] = SwappedFile(len(self.files) - 1, path, reader.nbytes)
        return found


def _end_bytes(path: str, nbytes: int) -> int:
    """What is read at either end of a file to know its structure: nearly always enough."""
    name = parse_name(posixpath.basename(path))
    many = name is not None and name.kind == "model" and nbytes > LARGE_MODEL_BYTES
    return MODEL_END_BYTES if many else END_BYTES


def _read_numbers(reader: RangeReader, torch: TorchFile) -> dict[tuple[str, int], ScalarState]:
    """The values of all tensors of a file that hold one number: a few bytes each, compared with their CRC-32."""
    scalars = [v for v in walk(torch.root) if isinstance(v, TensorRef) and v.shape in {(), (1,)}]
    values: dict[ByteRange, bytes] = {}
    recorded = {r.where: r for r in torch.records if r.crc_recorded}
    if reader.distant:  # A checksum of four bytes tells what they are.
        values = {where: bytes_with_crc(r.crc32) for where, r in recorded.items() if where.nbytes == 4}
    wanted = [where for s in scalars if (where := torch.locate(s)) not in values]
    values |= dict(zip(wanted, reader.read_many(wanted), strict=True))
    for where in wanted:
        if where in recorded and crc32(values[where]) != recorded[where].crc32:
            problem = f"record {recorded[where].name} does not match its checksum"
            raise ChecksumError(reader.path, problem, RESTORE)
    return {
        (s.storage.key, s.offset): ScalarState(
            np.frombuffer(values[torch.locate(s)], numpy_dtype(s.dtype))[0].item(), s.dtype
        )
        for s in scalars
    }


# ------------------------------------------------------------------------------------------------- what files say


def _single_prefix(location: Location, optimizer: list[ZeroName]) -> str:
    """The prefix that all optimizer files share.

    It follows the engine's dtype, so two prefixes are two saves.
    """
    by_prefix = {p.prefix: p.name for p in optimizer}
    if len(by_prefix) > 1:
        names = " and ".join(sorted(by_prefix.values()))
        raise LayoutError(location.directory, f"mixes files of two saves: {names}", "remove the files of one of them")
    return next(iter(by_prefix))


def partition_counts(file: RankFile) -> list[int]:
    """Over how many ranks each group of the save that wrote this file was partitioned; one number if all are alike.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (an int) and stage_1_and_2.py (a list, one for each group).
    """
    states = file.fields.child("optimizer_state_dict")
    value = states.get("partition_count", object)
    values = value if isinstance(value, list) else [value]
    counts = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_RANKS]
    if not counts or len(counts) < len(values):
        raise states.error("partition_count", "is not a number of ranks")
    return counts


def _partition_count(file: RankFile) -> int:
    """Data-parallel ranks: experts may be partitioned over fewer."""
    return max(partition_counts(file))


def _stage(file: RankFile) -> int:
    """The ZeRO stage, from which keys are there."""
    states = file.fields.child("optimizer_state_dict")
    if "fp32_flat_groups" in states:
        return 3
    if "single_partition_of_fp32_groups" in states:
        # BF16_Optimizer, which partitions as stage 1 does, records no stage.
        return 2 if enum_value(states.values.get("zero_stage")) == 2 else 1
    if "local_sub_partitions_of_fp32_groups" in states:
        hint = "load and save it once with a later DeepSpeed"
        raise LayoutError(file.path, "is of the old stage 1 (DeepSpeed up to 0.5.8), which is not supported", hint)
    raise LayoutError(file.path, "holds no ZeRO partitions", "is it an optimizer file of DeepSpeed?")


def _configured_stage(model: Sequence[RankFile], stage: int) -> int:
    """1 or 2 by the configuration: where one class serves both, some releases wrote 2 for either."""
    config = model[0].fields.optional("ds_config", dict) if model else None
    zero = (config or {}).get("zero_optimization")
    configured = zero.get("stage") if isinstance(zero, dict) else None
    return configured if stage in {1, 2} and configured in {1, 2} else stage


def model_names(stage: int, ranks: int, model_rank: int) -> list[str]:
    """Files of model states of one model-parallel rank."""
    if stage == 3:
        return [f"zero_pp_rank_{r}_mp_rank_{model_rank:02d}_model_states.pt" for r in range(ranks)]
    return [f"mp_rank_{model_rank:02d}_model_states.pt"]


def _shards_within(file: RankFile, ranks: int, size: int) -> bool:
    """Whether MiCS was on: the model is partitioned over some of the ranks, and the others hold the same again.

    Source: DeepSpeed 0.9 to 0.19.7, runtime/zero/mics.py (``mics_shard_size``).
    """
    config = file.fields.optional("ds_config", dict) or {}
    zero = config.get("zero_optimization")
    return size % ranks == 0 and isinstance(zero, dict) and zero.get("mics_shard_size") == ranks


def _two_world_sizes(file: RankFile, theirs: int, ranks: int, first: RankFile) -> LayoutError:
    return _two_saves(file, f"was saved by {theirs} ranks", f"by {ranks}", first)


def _two_saves(file: RankFile, ours: str, theirs: str, first: RankFile) -> LayoutError:
    name = posixpath.basename(first.path)
    return LayoutError(file.path, f"{ours}, but {name} {theirs}: two saves are mixed", RESTORE)


def _stale(path: str, what: str) -> LayoutError:
    return LayoutError(
        path, f"is left over from another save (this checkpoint is {what}) and was not read", "remove it"
    )
