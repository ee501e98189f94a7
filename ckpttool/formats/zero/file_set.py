"""Open all files of a checkpoint, several at once on remote storage, and compare them with each other.

``stage0``, ``stage12`` and ``stage3`` interpret their content.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checksums import crc32
from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.torch_zip import bytes_with_crc
from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import parse_number
from ckpttool.errors import ChecksumError, CkptError, LayoutError
from ckpttool.formats.fields import RESTORE, Fields, describe
from ckpttool.formats.zero.files import (
    AllFiles,
    ExpertFile,
    LayerFile,
    RankFile,
    SwappedFile,
    ZeroFiles,
    ZeroName,
    parse_name,
)
from ckpttool.formats.zero.identity import (
    check_model_ranks,
    configured_stage,
    copied,
    model_names,
    partition_count,
    renamed,
    shards_within,
    single_prefix,
    stage_of,
    stale_file,
    two_saves,
    two_world_sizes,
)
from ckpttool.model import CheckpointFile, ScalarState
from ckpttool.ranges import ByteRange, ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckpttool.checksums import Record
    from ckpttool.containers.unpickler import Unpickled
    from ckpttool.formats.fields import Report
    from ckpttool.formats.locate import Location
    from ckpttool.storage import RangeReader, Storage


READ_AHEAD = 32
"""Number of files whose structure is read at once from remote storage."""
END_BYTES = 1 << 16
"""Bytes at either end of a file to read at once from remote storage."""
LARGE_MODEL_BYTES, MODEL_END_BYTES = 1 << 26, 1 << 19
"""Size from which a file of model states has a record for each of thousands of parameters, and its bytes to read."""
MAX_NAMED = 20
"""Maximum number of missing files named one by one."""
SWAPPED = "offloaded_tensors"
"""Directory of the tensors that the run had offloaded to NVMe."""

_Loaded = tuple[TorchFile, str, dict[tuple[str, int], ScalarState]]
"""A file's structure, its version, and its tensors of one element."""


class Opener:
    """Opens the files of one checkpoint and collects errors."""

    def __init__(self, storage: Storage, location: Location, report: Report) -> None:
        self.storage = storage
        self.location = location
        self._report = report
        self.files: list[CheckpointFile] = []
        self.errors: list[CkptError] = []
        self.files_by_name: dict[str, RankFile | None] = {}
        """Opened files; None for files that could not be read."""
        self.renamed: list[str] = []
        """Accepted files that were saved under other names (``trust_names``)."""
        self._pickles: dict[bytes, Unpickled] = {}
        self._directory: dict[str, str] = {}
        """Directory of each file."""
        self._swapped: dict[int, dict[str, str]] = {}
        """Folder of each offloaded file."""
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
            # Files in the directories of several nodes (shared model states) must be equal.
            (nbytes, first), *others = sizes[name.name]
            for other, directory in others:
                if other != nbytes:
                    problem = f"is {other:,} bytes long, but the one in {first} {nbytes:,}: two saves are mixed"
                    self.report(LayoutError(posixpath.join(directory, name.name), problem, RESTORE))
        for directory, folders in offloaded:
            self._find_swapped(directory, folders)
        self.prefetch((n.name, n.kind == "optimizer") for n in self.names)

    def prefetch(self, names: Iterable[tuple[str, bool]]) -> None:
        """On remote storage, start to read the structure of many files: (name, whether to read scalars)."""
        if not self.storage.remote:
            return
        from concurrent.futures import ThreadPoolExecutor

        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ckpttool-structure")
        for name, numbers in names:
            self._ahead.setdefault(name, (numbers, self._pool.submit(self._load, self.path(name), numbers)))

    def path(self, name: str) -> str:
        """Return the full path of a file, which may be missing."""
        return posixpath.join(self._directory.get(name, self.location.directory), name)

    def report(self, error: CkptError) -> None:
        """Report an error after which the files cannot be read as one checkpoint."""
        self.errors.append(error)
        try:
            self._report(error)
        except CkptError:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def missing(self, names: list[str], what: str) -> None:
        """Report missing files; the first few by name."""
        for name in names[:MAX_NAMED]:
            path = self.path(name)
            problem = "is not a file" if self.storage.exists(path) else "is missing"
            hint = f"{RESTORE}; if other nodes have it, pass their directories too"
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
            kind: Kind of its states.
            rank: Data-parallel rank that wrote it.
            model_rank: Model-parallel rank that wrote it.
            numbers: Also read tensors of one element.
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
            # The pickle is at one end, the ZIP directory at the other: both are needed.
            reader.read_ahead(ends(reader.nbytes, _end_bytes(path, reader.nbytes)))
            torch = read_torch_file(reader, self._pickles)
            return torch, reader.version, _read_numbers(reader, torch) if numbers else {}

    def _register(
        self,
        name: str,
        nbytes: int,
        kind: str,
        rank: int | None,
        version: str,
        model_rank: int | None,
        records: tuple[Record, ...] | None,
    ) -> None:
        """Assign an index to a file; ``records`` are those of its archive, None for raw elements."""
        directory = self._directory.get(name, self.location.directory)
        elsewhere = None if directory == self.location.directory else directory
        container = "raw" if records is None else "torch"
        file = CheckpointFile(
            name,
            nbytes,
            kind,
            rank,
            version,
            model_rank,
            container=container,
            directory=elsewhere,
            records=records or (),
        )
        self.files.append(file)

    def _folders_of_ranks(self, directory: str) -> dict[int, str]:
        """Return the folder of each rank, by the number in its name."""
        folders = {}
        for entry in self.storage.listing(directory):
            match = re.fullmatch(r"rank(\d+)", entry.name)
            if match and entry.is_dir:
                folders[int(match.group(1))] = posixpath.join(directory, entry.name)
        return folders

    def _find_swapped(self, directory: str, folders: dict[int, str]) -> None:
        """Record the offloaded files of each rank in one directory; a node may number its own ranks from 0.

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
                    raise LayoutError(path, f"belongs to rank {rank}, like the files in {other}", RESTORE)

    def swapped(self, rank: int) -> dict[str, SwappedFile]:
        """Return the offloaded files of a rank, by name."""
        found = {}
        for name, folder in self._swapped.get(rank, {}).items():
            path = posixpath.join(folder, name)
            with self.storage.open(path) as reader:
                relative = posixpath.join(SWAPPED, posixpath.basename(folder), name)
                self._directory[relative] = posixpath.dirname(posixpath.dirname(folder))
                self._register(relative, reader.nbytes, "swapped", rank, reader.version, 0, None)
                found[name] = SwappedFile(len(self.files) - 1, path, reader.nbytes)
        return found


def _end_bytes(path: str, nbytes: int) -> int:
    """Return the number of bytes to read at either end of a file for its structure; nearly always enough."""
    name = parse_name(posixpath.basename(path))
    many = name is not None and name.kind == "model" and nbytes > LARGE_MODEL_BYTES
    return MODEL_END_BYTES if many else END_BYTES


def _read_numbers(reader: RangeReader, torch: TorchFile) -> dict[tuple[str, int], ScalarState]:
    """Read all tensors of one element of a file: a few bytes each, compared with their CRC-32."""
    scalars = [v for v in walk(torch.root) if isinstance(v, TensorRef) and v.shape in {(), (1,)}]
    values: dict[ByteRange, bytes] = {}
    recorded = {r.where: r for r in torch.records if r.crc_recorded}
    if reader.remote:  # the CRC-32 of four bytes determines the bytes
        values = {where: bytes_with_crc(r.crc32) for where, r in recorded.items() if where.nbytes == 4}
    wanted = [where for s in scalars if (where := torch.locate(s)) not in values]
    values |= dict(zip(wanted, reader.read_many(wanted), strict=True))
    for where in wanted:
        if where in recorded and crc32(values[where]) != recorded[where].crc32:
            problem = f"record {recorded[where].name} does not match its checksum"
            raise ChecksumError(reader.path, problem, RESTORE)
    return {
        (s.storage.key, s.offset): ScalarState(parse_number(values[torch.locate(s)], s.dtype), s.dtype) for s in scalars
    }


def read_zero_files(storage: Storage, location: Location, report: Report) -> AllFiles:
    """Open every file of a checkpoint, and check that the files are complete and from one save.

    Raises:
        CkptError: Files are damaged or from two saves, unless ``report`` collects the finding and reading can continue.
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
    notes = tuple(stale_file(opener.path(n.name), what) for n in opener.names if n.name not in wanted)
    return _renumbered(opener, slices, layers, notes)


def _renumbered(
    opener: Opener, slices: Sequence[ZeroFiles], layers: Sequence[LayerFile], notes: tuple[LayoutError, ...]
) -> AllFiles:
    """Number the files of the checkpoint, and leave out other opened files."""
    files: list[CheckpointFile] = []

    def kept(file: RankFile) -> RankFile:
        files.append(opener.files[file.file_index])
        return RankFile(len(files) - 1, file.torch, file.fields, file.numbers)

    def kept_swapped(file: SwappedFile) -> SwappedFile:
        files.append(opener.files[file.file_index])
        return SwappedFile(len(files) - 1, file.path, file.nbytes)

    numbered = tuple(
        s._replace(
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
    prefix = single_prefix(opener.location, [p for p in named if p.kind == "optimizer"])
    first = next((file for rank in sorted(by_rank) if (file := opener.open(by_rank[rank]))), None)
    if first is None:
        raise opener.errors[0]
    ranks, stage = partition_count(first), stage_of(first)
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
            if (count := partition_count(file)) != ranks:
                opener.report(two_world_sizes(file, count, ranks, first))
            elif (other := stage_of(file)) != stage:
                opener.report(two_saves(file, f"is of ZeRO-{other}", f"of ZeRO-{stage}", first))
    model: list[RankFile] = []
    models = {p.name: p for p in named if p.kind == "model"}
    opener.missing([name for name in model_names(stage, ranks, model_rank) if name not in models], what)
    for name in model_names(stage, ranks, model_rank):
        if name in models and (file := opener.open(models[name])):
            model.append(file)
            size = file.fields.optional("dp_world_size", int)
            if size is not None and size != ranks and not shards_within(file, ranks, size):
                opener.report(two_world_sizes(file, size, ranks, first))
    if not opener.errors and not opener.location.trust_names and (error := copied(opener.storage, optimizer)):
        opener.report(error)
    stage = configured_stage(model, stage)
    experts = _experts(opener, named)
    swapped = tuple(opener.swapped(r) for r in range(ranks)) if stage == 3 else ()
    return ZeroFiles(opener.location, stage, model_rank, model, optimizer, experts, swapped=swapped)


def _read_stage0(opener: Opener, model_rank: int, named: Sequence[ZeroName]) -> ZeroFiles:
    """Read the files of stage 0: one file holds model and optimizer, except for the experts of a mixture.

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
        # Stages 1 and 2 list their parameters here, and keep the optimizer in separate files.
        of_others = [n for n in opener.names if n.kind == "optimizer"]
        own = f"mp_rank_{model_rank:02d}"
        opener.missing(
            sorted({n.name.replace(f"mp_rank_{n.model_rank:02d}", own) for n in of_others}),
            "other model-parallel ranks have theirs",
        )
        if opener.errors:
            raise opener.errors[0]
        problem = "holds no ZeRO optimizer files"
        hint = "they hold the fp32 master weights: restore them from a copy, or choose another tag"
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
        # The highest number gives a lower bound of the number of experts.
        gone = sorted(set(range(max(len(e) for e in numbers.values()))) - set(experts))
        stem = names[0].name.replace(f"layer_{names[0].layer}_", f"layer_{layer}_")
        opener.missing([stem.replace(f"expert_{names[0].expert}_", f"expert_{e}_") for e in gone], "an expert")
    return tuple(ExpertFile(n.layer, n.expert, file) for n in names if (file := opener.open(n)))
