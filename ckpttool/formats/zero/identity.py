"""Identify files: compare their recorded names, slices and checksums with their file names and each other.

A file that was renamed, swapped with another rank's file or copied over it still has the expected shapes. The name of
its archive, its recorded slices and its checksums identify its rank.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import DTYPES, SHORT_NAMES
from ckpttool.errors import LayoutError
from ckpttool.formats.zero.names import parse_name
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.fields import Fields
    from ckpttool.formats.zero.fragments import BufferSlice
    from ckpttool.formats.zero.rank_files import RankFile, ZeroFiles
    from ckpttool.storage import Storage

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
