"""Checks that the files of a checkpoint belong to one save.

They compare the number of ranks, the ZeRO stage, and the recorded names, slices and checksums of files with their file
names and each other.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import DTYPES, SHORT_NAMES
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, enum_value
from ckpttool.formats.zero.files import MAX_RANKS, parse_name
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.fields import Fields
    from ckpttool.formats.locate import Location
    from ckpttool.formats.zero.file_set import Opener
    from ckpttool.formats.zero.files import RankFile, ZeroFiles, ZeroName
    from ckpttool.formats.zero.partitions import BufferSlice
    from ckpttool.storage import Storage


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
    """Return whether MiCS was on: the model is partitioned over some of the ranks, and the other ranks hold replicas.

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

    Equal checksums alone are no evidence: before the first step two partitions may be equal. If two tensors of a rank
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
    (``_create_param_mapping``): elements of each parameter that lie in the rank's partition.

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
