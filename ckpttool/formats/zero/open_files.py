"""Open all files of a DeepSpeed checkpoint, and check that they belong to one save.

Files are opened several at once on remote storage. The number of ranks, the ZeRO stage, and the recorded names, slices
and checksums of files are compared with their file names and each other.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checksums import crc32
from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.torch_zip import bytes_with_crc
from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import DTYPES, SHORT_NAMES, parse_number
from ckpttool.errors import ChecksumError, CkptError, LayoutError
from ckpttool.formats.fields import OWN_WEIGHTS, RESTORE, Fields, describe, enum_value
from ckpttool.formats.zero.files import (
    MAX_RANKS,
    AllFiles,
    ExpertFile,
    LayerFile,
    RankFile,
    SwappedFile,
    ZeroFiles,
    ZeroName,
    parse_name,
)
from ckpttool.messages import brief
from ckpttool.model import CheckpointFile, ScalarState
from ckpttool.ranges import ByteRange, ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckpttool.checksums import Record
    from ckpttool.containers.unpickler import Unpickled
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.formats.zero.partitions import BufferSlice
    from ckpttool.storage import RangeReader, Storage


def check_model_ranks(opener: Opener, slices: Sequence[ZeroFiles]) -> None:
    """Report tensor- and pipeline-parallel ranks that are missing or belong to another run."""
    first = slices[0]
    if not first.model:
        return
    size = first.model[0].fields.optional("mp_world_size", int) or len(slices)
    present = {s.model_rank for s in slices}
    if not 0 < size <= MAX_RANKS:
        raise first.model[0].fields.error("mp_world_size", "is not a number of ranks")
    stem = posixpath.basename(first.model[0].path)
    first_name = f"mp_rank_{first.model_rank:02d}"
    missing = [stem.replace(first_name, f"mp_rank_{r:02d}") for r in range(size) if r not in present]
    opener.missing(missing, f"the model is spread over {size} model-parallel ranks")
    for s in slices[1:]:
        if s.model and (s.stage, s.ranks) != (first.stage, first.ranks):
            ours, theirs = (f"is of ZeRO-{x.stage} over {x.ranks} ranks" for x in (s, first))
            opener.report(two_saves(s.model[0], ours, theirs, first.model[0]))
        if s.model_rank >= size and s.model:
            problem = f"is of {s.model_rank + 1} model-parallel ranks or more"
            opener.report(two_saves(s.model[0], problem, f"is of {size}", first.model[0]))


def single_prefix(location: Location, optimizer: list[ZeroName]) -> str:
    """Return the prefix of all optimizer files. It depends on the engine's dtype: two prefixes mean two saves.

    Raises:
        LayoutError: The files have different prefixes.
    """
    by_prefix = {p.prefix: p.name for p in optimizer}
    if len(by_prefix) > 1:
        names = " and ".join(sorted(by_prefix.values()))
        raise LayoutError(location.directory, f"mixes files of two saves: {names}", "remove the files of one of them")
    return next(iter(by_prefix))


def partition_counts(file: RankFile) -> list[int]:
    """Return the number of ranks over which each group was partitioned; one number if it is equal for all groups.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (an int) and stage_1_and_2.py (a list, one for each group).
    """
    states = file.fields.child("optimizer_state_dict")
    value = states.get("partition_count", object)
    values = value if isinstance(value, list) else [value]
    counts = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_RANKS]
    if not counts or len(counts) < len(values):
        raise states.error("partition_count", "is not a number of ranks")
    return counts


def partition_count(file: RankFile) -> int:
    """Return the number of data-parallel ranks: the largest count, because experts may be partitioned over fewer."""
    return max(partition_counts(file))


def stage_of(file: RankFile) -> int:
    """Return the ZeRO stage, from the keys of the optimizer's state dict.

    Raises:
        LayoutError: The file was not written by a supported stage.
    """
    states = file.fields.child("optimizer_state_dict")
    if "fp32_flat_groups" in states:
        return 3
    if "single_partition_of_fp32_groups" in states:
        # BF16_Optimizer records no stage; it partitions like stage 1.
        return 2 if enum_value(states.values.get("zero_stage")) == 2 else 1
    if "local_sub_partitions_of_fp32_groups" in states:
        hint = "load and save it once with a later DeepSpeed"
        raise LayoutError(file.path, "has the layout of stage 1 of DeepSpeed up to 0.5.8, which is not supported", hint)
    raise LayoutError(file.path, "holds no ZeRO partitions", "is it an optimizer file of DeepSpeed?")


def configured_stage(model: Sequence[RankFile], stage: int) -> int:
    """Return stage 1 or 2 from the configuration: both have one class, and some releases record 2 for both."""
    config = model[0].fields.optional("ds_config", dict) if model else None
    zero = (config or {}).get("zero_optimization")
    configured = zero.get("stage") if isinstance(zero, dict) else None
    return configured if stage in {1, 2} and configured in {1, 2} else stage


def model_names(stage: int, ranks: int, model_rank: int) -> list[str]:
    """Return the names of the model-states files of one model-parallel rank."""
    if stage == 3:
        return [f"zero_pp_rank_{r}_mp_rank_{model_rank:02d}_model_states.pt" for r in range(ranks)]
    return [f"mp_rank_{model_rank:02d}_model_states.pt"]


def shards_within(file: RankFile, ranks: int, size: int) -> bool:
    """Return whether MiCS was on: the model is partitioned over some of the ranks, and the other ranks store replicas.

    Source: DeepSpeed 0.9 to 0.19.7, runtime/zero/mics.py (``mics_shard_size``).
    """
    config = file.fields.optional("ds_config", dict) or {}
    zero = config.get("zero_optimization")
    return size % ranks == 0 and isinstance(zero, dict) and zero.get("mics_shard_size") == ranks


def two_world_sizes(file: RankFile, theirs: int, ranks: int, first: RankFile) -> LayoutError:
    """Return the finding that two files record different numbers of ranks."""
    return two_saves(file, f"was saved by {theirs} ranks", f"by {ranks}", first)


def two_saves(file: RankFile, ours: str, theirs: str, first: RankFile) -> LayoutError:
    """Return the finding that a file contradicts the first file of the checkpoint."""
    name = posixpath.basename(first.path)
    return LayoutError(file.path, f"{ours}, but {name} {theirs}: two saves are mixed", RESTORE)


def stale_file(path: str, what: str) -> LayoutError:
    """Return the finding that a file is not part of the checkpoint."""
    return LayoutError(
        path, f"is left over from another save (this checkpoint is {what}) and was not read", "remove it"
    )


VERSION, CONFIG = "ds_version", "ds_config"
CONFIGURED = (("zero_optimization", "stage"), ("bf16", "enabled"), ("fp16", "enabled"), ("train_batch_size",))
"""Parts of the configuration that are equal on all ranks; others (the path of an NVMe drive) may differ."""
UNNAMED = "archive"
"""torch's name for an archive written to a buffer."""
SAMPLE_BYTES = 1 << 12
"""Bytes of a tensor to read, to find out whether all its values are equal."""
HINT = "restore the files from a copy; after a deliberate rename, set trust_names=True"
OPTIONS = ("trust_names",)


def archive_name(file: TorchFile) -> str | None:
    """Return the recorded name of a file, without its suffix; None if not recorded.

    Source: torch 2.13, caffe2/serialize/inline_container.cc (PyTorchStreamWriter): every record's name begins with the
    archive's name, which is the file's name unless it was written to a buffer.
    """
    prefix = file.records[0].name.split("/")[0] if file.records else UNNAMED
    return None if prefix == UNNAMED else prefix


def renamed(name: str, kind: str, file: TorchFile) -> LayoutError | None:
    """Return the error of a file that was saved under another of DeepSpeed's names; else None.

    Args:
        name: The file, relative to the checkpoint.
        kind: Kind of its states, as in ``CheckpointFile``.
        file: Its structure.
    """
    saved_as = archive_name(file)
    if saved_as is None or saved_as == posixpath.basename(name).removesuffix(".pt"):
        return None
    if kind != "state" and parse_name(f"{saved_as}.pt") is None:
        return None  # a temporary name
    problem = f"was saved as {brief(saved_as, 200)}, as its records show: files were renamed or swapped"
    return LayoutError(file.path, problem, HINT, OPTIONS)


def trusted_names(names: Sequence[str]) -> list[str]:
    """Return remarks on files whose names were trusted."""
    if not names:
        return []
    shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return [f"{len(names)} files were saved under other names; their present names were trusted: {shown}"]


def copied(storage: Storage, files: Sequence[RankFile]) -> LayoutError | None:
    """Return the error of an optimizer file that was copied over another rank's; else None.

    Equal checksums are not enough evidence: before the first step two partitions may be equal. If two tensors of a rank
    vary and equal another rank's (such as a master and a moment), one file was copied over the other.
    """
    seen: dict[tuple[tuple[int, int], ...], RankFile] = {}
    for file in files:
        recorded = {r.where: r.crc32 for r in file.torch.records if r.crc_recorded}
        places = [where for where in file.torch.storages.values() if where.nbytes >= 8]
        if len(places) < 2 or any(where not in recorded for where in places):
            continue
        first = seen.setdefault(tuple((where.nbytes, recorded[where]) for where in places), file)
        if first is not file and _varying(storage, file) >= 2:
            problem = f"holds the same values as {posixpath.basename(first.path)}: one was copied over the other"
            return LayoutError(file.path, problem, HINT, OPTIONS)
    return None


def _varying(storage: Storage, file: RankFile) -> int:
    """Return the number of tensors with several different values, by the first bytes of each."""
    count = 0
    refs = {v.storage.key: v for v in walk(file.torch.root) if isinstance(v, TensorRef) and v.shape and v.numel > 1}
    with storage.open(file.path) as reader:
        for key, ref in refs.items():
            where, width = file.torch.storages[key], max(1, file.torch.storages[key].nbytes // ref.storage.numel)
            data = reader.read(where.start, min(where.end, where.start + SAMPLE_BYTES))
            count += any(data[n : n + width] != data[:width] for n in range(width, len(data) - width + 1, width))
    return count


def copied_states(storage: Storage, files: Sequence[tuple[str, str, RankFile]]) -> LayoutError | None:
    """Return the error of a parameter's moment that was copied over another parameter's; else None.

    Masters may be equal before the first step, and if layers are copies of each other; moments are not.

    Args:
        storage: Storage of the files.
        files: (parameter, state, file) of a universal checkpoint, masters left out.
    """
    seen: dict[tuple[object, ...], tuple[str, RankFile]] = {}
    for name, state, file in files:
        recorded = {r.where: r.crc32 for r in file.torch.records if r.crc_recorded}
        places = [where for where in file.torch.storages.values() if where.nbytes >= 8]
        if not places or any(where not in recorded for where in places):
            continue
        key = (state, *((where.nbytes, recorded[where]) for where in places))
        other, first = seen.setdefault(key, (name, file))
        if first is not file and _varying(storage, file):
            problem = f"holds the same values as {state} of {other}: one was copied over the other"
            return LayoutError(file.path, problem, "restore it from a copy, or convert the source again")
    return None


def check_listed(file: RankFile, module: Mapping[str, TensorRef], names: Iterable[str]) -> None:
    """Compare the optimizer's parameters with a module if the file has no list of shapes.

    Raises:
        LayoutError: The module lacks one of them.
    """
    unknown = next((name for name in names if module and name not in module), None)
    if unknown is not None:
        problem = f"lists no param_shapes, and its module lacks {brief(unknown, 200)}, which the optimizer has"
        raise LayoutError(file.path, f"{problem}: two saves are mixed", "restore it from a copy")


class Fact(NamedTuple):
    """A value that is equal in all files of one save."""

    name: str
    """Name, for errors."""
    files: Sequence[RankFile]
    """The files."""
    values: Sequence[object]
    """The value in each of them."""


def agreed_facts(slices: Sequence[ZeroFiles]) -> Iterator[Fact]:
    """Yield the values that are equal in all files of one save, for every rank.

    Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``, ``_save_zero_checkpoint``).
    """
    model = [file for files in slices for file in files.model]
    optimizer = [file for files in slices for file in files.optimizer]
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size"):
        yield Fact(key, model, [f.fields.values.get(key) for f in model])
    scheduled = [f for f in model if isinstance(f.fields.values.get("lr_scheduler"), dict)]
    for key in ("last_epoch", "last_batch_iteration"):  # of torch, and of DeepSpeed
        yield Fact(f"{key} of lr_scheduler", scheduled, [f.fields.values["lr_scheduler"].get(key) for f in scheduled])
    every = [f for f in (*model, *optimizer) if VERSION in f.fields]
    yield Fact(VERSION, every, [f.fields.values.get(VERSION) for f in every])
    configured = [f for f in (*model, *optimizer) if isinstance(f.fields.values.get(CONFIG), dict)]
    for path in CONFIGURED:
        yield Fact(f"{' > '.join(path)} in {CONFIG}", configured, [_configured(f, path) for f in configured])
    for files in slices:
        spread = files.expert_optimizer
        forms = [sorted(map(str, f.fields.optional("optimizer", dict) or {})) for f in spread]
        yield Fact("form of the optimizer", spread, forms)
        if (error := mixed_types([e.file for e in files.experts])) is not None:
            raise error
        for layer in dict.fromkeys(e.layer for e in files.experts):
            own = [e.file for e in files.experts if e.layer == layer]
            yield Fact(f"shapes of the experts of layer {layer}", own, [_shapes(f) for f in own])


def _shapes(file: RankFile) -> list[tuple[int, ...]]:
    return sorted(v.shape for v in walk(file.torch.root) if isinstance(v, TensorRef))


def _configured(file: RankFile, path: Sequence[str]) -> object:
    value: object = file.fields.values.get(CONFIG)
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def mixed_types(files: Sequence[RankFile]) -> LayoutError | None:
    """Return the error of layers or experts whose matrices have no common floating dtype; else None.

    Vectors do not count: buffers keep their own dtype.
    """
    tensors = [(f, [v for v in walk(f.torch.root) if isinstance(v, TensorRef) and len(v.shape) > 1]) for f in files]
    dtypes_of = [(file, {v.dtype for v in refs if DTYPES[v.dtype].floating}) for file, refs in tensors]
    dtypes_of = [(file, types) for file, types in dtypes_of if types]
    for file, types in dtypes_of[1:]:
        if not types & dtypes_of[0][1]:
            ours, theirs = ("/".join(sorted(SHORT_NAMES.get(t, t) for t in s)) for s in (types, dtypes_of[0][1]))
            problem = f"holds {ours}, but {posixpath.basename(dtypes_of[0][0].path)} {theirs}: two saves are mixed"
            return LayoutError(file.path, problem, "restore it from a copy, or choose another tag")
    return None


def check_recorded_slices(
    states: Sequence[Fields], group: int, fragments: Mapping[str, BufferSlice], *, trust_names: bool
) -> None:
    """Compare the recorded slices of each rank with the slices that its position gives it.

    Source: DeepSpeed 0.7 to 0.19.8, runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py
    (``_create_param_mapping``): elements of each parameter in the rank's partition.

    Args:
        states: ``optimizer_state_dict`` of each rank.
        group: The parameter group.
        fragments: The place of each parameter in the flat buffer.
        trust_names: Skip the comparison.

    Raises:
        LayoutError: A rank's file has the slices of another rank.
    """
    if trust_names:
        return
    for rank, fields in enumerate(states):
        groups = fields.values.get("param_slice_mappings")
        mapping = groups[group] if isinstance(groups, list) and group < len(groups) else None
        if not isinstance(mapping, dict) or not mapping:
            continue
        recorded = {name: _numel(fragment) for name, fragment in mapping.items()}
        expected = {name: fragments[name].numel_on(rank) if name in fragments else 0 for name in recorded}
        wrong = next((n for n, numel in recorded.items() if numel is not None and expected[n] != numel), None)
        if wrong is not None:
            problem = (
                f"recorded {recorded[wrong]:,} elements of {brief(wrong, 200)} for its rank, but rank {rank} holds "
                f"{expected[wrong]:,}: files were renamed or swapped"
            )
            raise LayoutError(fields.path, problem, HINT, OPTIONS)


def _numel(fragment: object) -> int | None:
    state = getattr(fragment, "state", None)
    numel = state.get("numel") if isinstance(state, dict) else None
    return numel if isinstance(numel, int) else None


READ_AHEAD = 32
"""Number of files whose structure is read at once from remote storage."""
END_BYTES = 1 << 16
"""Bytes at either end of a file to read at once from remote storage."""
LARGE_MODEL_BYTES, MODEL_END_BYTES = 1 << 26, 1 << 19
"""Size from which a file of model states has a record for each of thousands of parameters, and its bytes to read."""
MAX_EXPERTS = 1 << 16
"""Largest number of experts in a layer."""
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
            if begun is None or (numbers and not with_numbers):  # at stage 0 model files contain numbers too
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
        records: Sequence[Record] | None,
    ) -> None:
        """Assign an index to a file; ``records`` are the records of its archive, None for raw elements."""
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
    experts = _experts(opener, named, model[0] if model and stage < 3 else None)  # at stage 3 ranks have them
    swapped = tuple(opener.swapped(r) for r in range(ranks)) if stage == 3 else ()
    return ZeroFiles(opener.location, stage, model_rank, model, optimizer, experts, swapped=swapped)


def _read_stage0(opener: Opener, model_rank: int, named: Sequence[ZeroName]) -> ZeroFiles:
    """Read the files of stage 0: one file contains model and optimizer, except for the experts of a mixture.

    Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``, ``_save_moe_checkpoint``).
    """
    name = f"mp_rank_{model_rank:02d}_model_states.pt"
    models = {p.name: p for p in named if p.kind == "model"}
    if name not in models:
        if not models:
            raise LayoutError(opener.location.directory, "holds no model states", RESTORE)
        path = posixpath.join(opener.location.directory, "*_optim_states.pt")
        raise LayoutError(path, "is missing, and the model states of ZeRO-3 hold no trained weights", RESTORE)
    file = opener.open(models[name], numbers=True)
    if file is None:
        raise opener.errors[0]
    of_others = [n for n in opener.names if n.kind == "optimizer"]
    alone = _needs_no_optimizer(opener.names)
    if file.fields.values.get("param_shapes") is not None and not (alone and opener.location.module_only):
        # Stages 1 and 2 list their parameters here, and keep the optimizer in separate files.
        own = f"mp_rank_{model_rank:02d}"
        opener.missing(
            sorted({n.name.replace(f"mp_rank_{n.model_rank:02d}", own) for n in of_others}),
            "other model-parallel ranks have theirs",
        )
        if opener.errors:
            raise opener.errors[0]
        problem = "holds no ZeRO optimizer files"
        hint = "they hold the fp32 master weights: restore them from a copy, or choose another tag"
        if alone:
            hint += OWN_WEIGHTS
        raise LayoutError(opener.location.directory, problem, hint, ("weights_from",) if alone else ())
    optimizers = sorted((p for p in named if p.kind == "expert optimizer"), key=lambda p: p.expert)
    gone = sorted(set(range(max((p.expert for p in optimizers), default=-1) + 1)) - {p.expert for p in optimizers})
    stem = f"expp_rank_{{}}_mp_rank_{model_rank:02d}_optim_states.pt"
    opener.missing([stem.format(e) for e in gone[: MAX_NAMED + 1]], "an expert-parallel rank")
    opened = tuple(f for p in optimizers if (f := opener.open(p, numbers=True)))
    if not opened and not opener.location.module_only and (why := _says_more_files(file)):
        problem = f"holds no files of the optimizer, but {name} {why}"
        raise LayoutError(opener.location.directory, problem, RESTORE + OWN_WEIGHTS, ("weights_from",))
    return ZeroFiles(opener.location, 0, model_rank, [file], [], _experts(opener, named, file), opened)


def _needs_no_optimizer(names: Sequence[ZeroName]) -> bool:
    """Return whether the weights of the module can be read from a checkpoint that has lost the optimizer's files.

    They can without tensor parallelism: in a pipeline, the layers are whole. How a tensor-parallel rank cuts a
    parameter is recorded in the optimizer's files alone.
    """
    layers = {name.model_rank for name in names if name.kind == "layer"}
    ranks = {name.model_rank for name in names if name.kind != "layer"}
    return (layers == {0} or ranks == {0}) and all(name.kind in {"model", "expert", "layer"} for name in names)


def _says_more_files(model: RankFile) -> str:
    """Return how a model's file shows that the optimizer was saved in separate files; "" if it does not.

    DeepSpeed writes those files last. Releases before 0.6 write no ``param_shapes``.

    Source: DeepSpeed 0.19, runtime/bf16_optimizer.py (``state_dict``) and engine.py (``_save_moe_checkpoint``).
    """
    optimizer, config = (model.fields.values.get(key) for key in ("optimizer", "ds_config"))
    if isinstance(optimizer, dict) and "partition_count" in optimizer:
        return "says that it is partitioned"
    if isinstance(optimizer, dict) and model.fields.values.get("num_experts"):
        return "says that experts have their own"
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return f"was saved at stage {stage}" if optimizer is None and isinstance(stage, int) and stage > 0 else ""


def _experts(opener: Opener, named: Sequence[ZeroName], model: RankFile | None) -> tuple[ExpertFile, ...]:
    """Open the files of experts.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``num_experts``: a list with the number of experts of each layer).
    """
    recorded = None if model is None else model.fields.values.get("num_experts")
    recorded = recorded if isinstance(recorded, list) else []
    names = sorted((p for p in named if p.kind == "expert"), key=lambda p: (p.layer, p.expert))
    numbers: dict[int, list[int]] = {}
    for name in names:
        numbers.setdefault(name.layer, []).append(name.expert)
    if model is not None and not names and any(recorded):
        problem = f"records {recorded} experts in its layers, but no files of experts are beside it"
        raise LayoutError(model.path, problem, RESTORE)
    for layer, experts in numbers.items():
        # Without a record, the largest number of files is a lower bound.
        count = recorded[layer] if layer < len(recorded) else max(len(e) for e in numbers.values())
        gone = sorted(set(range(min(count, MAX_EXPERTS) if isinstance(count, int) else 0)) - set(experts))
        stem = names[0].name.replace(f"layer_{names[0].layer}_", f"layer_{layer}_")
        opener.missing([stem.replace(f"expert_{names[0].expert}_", f"expert_{e}_") for e in gone], "an expert")
    return tuple(ExpertFile(n.layer, n.expert, file) for n in names if (file := opener.open(n)))
