"""Weights-only files (safetensors, or state dicts of ``torch.save``) with Hugging Face's names -> Checkpoint.

Source: transformers 5, modeling_utils.py (``from_pretrained``: names of files and indices).
"""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers import safetensors
from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.values import Opaque, TensorRef, walk
from ckpttool.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import WHOLE
from ckpttool.formats.location import Location
from ckpttool.formats.optimizer_states import METADATA, SAVE, find_optimizer, with_optimizer
from ckpttool.formats.tensors import states_in, whole_tensor
from ckpttool.messages import brief, name_some
from ckpttool.model import (
    MODULE,
    UNKNOWN_GROUP,
    Buffer,
    Checkpoint,
    CheckpointFile,
    Parameter,
    State,
    Topology,
)
from ckpttool.storage import parent, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.checksums import Record
    from ckpttool.formats.fields import Report
    from ckpttool.storage import Storage

RESTORE = "restore it from a copy"
FLAT = re.compile(r"_?flat_param(_\d+)?")
"""The name of a flat parameter.

Source: torch 2.13, distributed/fsdp/_flat_param.py (``FLAT_PARAM``)."""
SHARDING = "DCP_SHARDING_INFO"
"""The metadata of torch's safetensors that contains the offsets of each tensor of the file in the whole tensor.

Source: torch 2.13, distributed/checkpoint/_hf_utils.py."""
SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""The name that torch gives to the file of one rank."""


@dataclass(frozen=True, slots=True)
class WeightsKind:
    """One kind of weights-only file."""

    format: str
    """Name of the format."""
    stems: tuple[str, ...]
    """Prefixes of the file names, in the order of preference; "" matches any name."""
    suffixes: tuple[str, ...]
    """Suffixes of the file names."""


KINDS = (
    WeightsKind("safetensors", ("model", "adapter_model", "diffusion_pytorch_model", ""), (".safetensors",)),
    WeightsKind("torch", ("pytorch_model", "adapter_model"), (".bin",)),
)

OPTIMIZER = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
"""Names of the files in which Accelerate and the Trainer save the states of an optimizer by ``torch.save``.

Source: accelerate 1.15, utils/constants.py (``OPTIMIZER_NAME``); transformers 5.23, trainer.py (``OPTIMIZER_NAME``)."""

UNREAD = "left out: the states of the optimizer, as the Trainer or Accelerate saves them whole"
"""End of a remark on an optimizer that numbers its parameters: ``state_files`` reads it in the order of a live one."""


def find_weights(storage: Storage, src: str) -> tuple[WeightsKind, list[str]] | None:
    """Find the files of weights: the given file, or the files of a directory (those in its index, if any).

    Raises:
        LayoutError: An index is damaged, names a missing file, or is beside one whole file that it does not name.
    """
    if not storage.is_dir(src):
        kind = next((k for k in KINDS if src.endswith((*k.suffixes, ".pt", ".pth")) and _fits(src, k)), None)
        return (kind, [posixpath.basename(src)]) if kind else None
    names = [e.name for e in storage.listing(src) if not e.is_dir]
    for kind in KINDS:
        for stem in kind.stems:
            for suffix in kind.suffixes:
                index = f"{stem}{suffix}.index.json"
                whole = f"{stem}{suffix}"
                if index in names:
                    found = _indexed(storage, posixpath.join(src, index), set(names))
                    if whole in names and whole not in found:
                        problem = f"holds {whole} and {index}, which names other files"
                        hint = f"pass {posixpath.join(src, whole)}, which transformers loads, or remove one of the two"
                        raise LayoutError(src, problem, hint)
                    return kind, found
                if whole in names:
                    return kind, [whole]
                parts = sorted(n for n in names if n.startswith(stem) and n.endswith(suffix))
                if parts and (not stem or all("-of-" in p for p in parts)):
                    _check_parts(src, parts)
                    return kind, parts
    return None


def _fits(src: str, kind: WeightsKind) -> bool:
    return src.endswith(".safetensors") == (kind.format == "safetensors")


def _check_parts(src: str, names: list[str]) -> None:
    """Check that all parts exist: each name contains the number of parts."""
    present = set(names)
    for name in names:
        _refuse_shard(posixpath.join(src, name), {})  # its name contains no number of ranks
        match = re.fullmatch(r"(.*-)(\d{1,6})(-of-)(\d{1,6})(\..*)", name)
        if match is None:
            continue
        start, number, of, count, end = match.groups()
        numbers = (f"{start}{n:0{len(number)}d}{of}{count}{end}" for n in range(1, int(count) + 1))
        if gone := next((n for n in numbers if n not in present), None):
            raise LayoutError(posixpath.join(src, gone), f"is missing ({name} is one of {int(count)} parts)", RESTORE)


def _refuse_shard(path: str, metadata: Mapping[str, str]) -> None:
    """Refuse the file of one rank: its tensors are parts, and no file records the number of ranks.

    The same writer notes offsets in files of whole tensors, too: they are zero there.
    """
    try:
        offsets = [at for entry in json.loads(metadata.get(SHARDING, "{}")).values() for at in entry["saved_offsets"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(path, f"has damaged metadata {SHARDING}", RESTORE) from error
    if SHARD.fullmatch(posixpath.basename(path)) or any(offsets):
        problem = "is the shard of one rank, as torch.distributed.checkpoint writes safetensors, not whole weights"
        raise LayoutError(path, problem, WHOLE)


def _indexed(storage: Storage, path: str, names: set[str]) -> list[str]:
    weight_map = read_json(storage, path, "an index of weights", RESTORE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise LayoutError(path, "is not an index of weights", RESTORE)
    files = sorted({str(name) for name in weight_map.values()})
    if not files:
        raise LayoutError(path, "names no file", RESTORE)
    for name in files:
        if name not in names:
            raise LayoutError(path, f"names {brief(name, 200)}, which is not there", "copy it here too")
    return files


def read_weights(storage: Storage, location: Location, _report: Report) -> Checkpoint | None:
    """Read the layout of one file of weights, or of a directory of them, without tensor bytes.

    Returns:
        The layout; None without weights.

    Raises:
        CkptError: A file is damaged, or two files contain the same tensor.
    """
    selection = find_weights(storage, location.directory)
    if selection is None:
        return None
    is_dir = storage.is_dir(location.directory)
    directory = location.directory if is_dir else parent(location.directory)
    beside = [e.name for e in storage.listing(directory) if not e.is_dir] if is_dir else []
    found = read_files(storage, Location(directory, directory, location.tag), *selection, find_optimizer(beside))
    unread = [name for name in beside if OPTIMIZER.fullmatch(name)]
    return replace(found, remarks=(*found.remarks, f"{name_some(unread)}: {UNREAD}")) if unread else found


def read_safetensors(storage: Storage, location: Location, names: Sequence[str]) -> Checkpoint:
    """Read the layout of some safetensors files in a directory, without tensor bytes.

    Raises:
        CkptError: A file is missing or damaged, or two files contain the same tensor.
    """
    return read_files(storage, location, KINDS[0], names, None)


def read_files(
    storage: Storage, location: Location, kind: WeightsKind, names: Sequence[str], first_part: str | None
) -> Checkpoint:
    """Read weight files, and the optimizer states beside them: ``first_part`` is the name of their first file.

    Raises:
        CkptError: A file is missing or damaged, or two files contain the same tensor.
    """
    files: list[CheckpointFile] = []
    states: dict[str, State] = {}
    owner: dict[str, str] = {}
    aliases: dict[str, str] = {}
    saves: dict[str, str | None] = {}
    remarks: list[str] = []
    for name in names:
        path = posixpath.join(location.directory, name)
        with storage.open(path, ahead=True) as reader:
            index = len(files)
            kind_of_file = "weights" if kind.format == "safetensors" else "model"
            records: Sequence[Record] = ()
            if kind.format == "safetensors":
                entries, metadata = safetensors.parse(reader)
                _refuse_shard(path, metadata)
                file_states = states_in(entries, index)
                if METADATA in metadata:
                    problem = "holds the states of an optimizer, not weights"
                    raise LayoutError(path, problem, "pass the directory with the weights beside it")
                saves[name] = metadata.get(SAVE)
                aliases |= {a: n for a, n in metadata.items() if n in entries and a not in entries}
            else:
                torch = read_torch_file(reader)
                file_states, records = _state_dict(index, torch, aliases), torch.records
                remarks += _left_out(torch)
            file = CheckpointFile(
                name, reader.nbytes, kind_of_file, None, reader.version, container=kind.format, records=records
            )
            files.append(file)
        for tensor, state in file_states.items():
            if tensor in states:
                raise LayoutError(path, f"holds {tensor}, which {owner[tensor]} holds too", RESTORE)
            states[tensor], owner[tensor] = state, name
    _refuse_empty(posixpath.join(location.directory, names[0]), states)
    checkpoint = checkpoint_of_weights(storage, location, kind.format, tuple(files), states, aliases)
    checkpoint = replace(checkpoint, remarks=tuple(remarks))
    if first_part is None or not saves:
        return checkpoint
    return with_optimizer(checkpoint, storage, first_part, saves)


def checkpoint_of_weights(
    storage: Storage,
    location: Location,
    name: str,
    files: tuple[CheckpointFile, ...],
    states: Mapping[str, State],
    aliases: Mapping[str, str],
) -> Checkpoint:
    """Return the layout of a checkpoint that contains only weights.

    Args:
        storage: Its storage.
        location: Its directory.
        name: Name of the format.
        files: Its files.
        states: The tensors by name.
        aliases: Tied names.
    """
    return Checkpoint(
        storage=storage.spec,
        location=location.directory,
        root=location.root,
        tag=location.tag,
        format=name,
        tells_buffers=False,
        stage=None,
        topology=Topology(),
        dtype=_dtype(states),
        deepspeed_version=None,
        step=None,
        skipped_steps=0,
        parameters=tuple(
            Parameter(n, s.shape, UNKNOWN_GROUP, {MODULE: s}) for n, s in states.items() if DTYPES[s.dtype].floating
        ),
        buffers=tuple(Buffer(n, s) for n, s in states.items() if not DTYPES[s.dtype].floating),
        aliases=aliases,
        groups=(),
        files=files,
    )


def _state_dict(index: int, torch: TorchFile, aliases: dict[str, str]) -> dict[str, State]:
    """Read a state dict; tied tensors share one storage."""
    items = _items(torch)
    for name, value in items.items():
        if isinstance(value, Opaque) and value.name.startswith("_rebuild_"):
            kind = class_of(value)
            problem = f"holds {brief(name, 200)} as a {brief(kind)}: the part of one rank, or not a plain tensor"
            raise LayoutError(torch.path, problem, WHOLE)
        if FLAT.fullmatch(str(name).rpartition(".")[2]):
            problem = f"holds the flat parameter {brief(name, 200)} of one rank of FSDP"
            raise LayoutError(torch.path, problem, WHOLE)
    tensors = {str(k): v for k, v in items.items() if isinstance(v, TensorRef)}
    if len(tensors) < sum(isinstance(v, TensorRef) for v in items.values()):
        raise LayoutError(torch.path, "has a name both as a number and as text", "save it with text as names")
    if not tensors:
        raise LayoutError(torch.path, "holds no state dict", "pass a file of weights")
    result: dict[str, State] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, ref in tensors.items():
        first = seen.setdefault((ref.storage.key, ref.offset, ref.dtype, ref.shape, ref.stride), name)
        if first != name and ref.numel:
            aliases[name] = first
        else:
            result[name] = whole_tensor(torch, index, ref)
    return result


def class_of(value: Opaque) -> str:
    """Return the class of an object that is not a plain tensor; if a function rebuilds it, the class that it passes."""
    passed = (part.name for part in value.args if isinstance(part, Opaque) and part.how == "global")
    return next((name for name in passed if not name.startswith("_")), value.name)


def _items(torch: TorchFile) -> dict[Any, Any]:
    """Return the state dict of a file: the file's own, or the only one in it.

    Raises:
        LayoutError: The file contains several.
    """
    root: dict[Any, Any] = torch.root if isinstance(torch.root, dict) else {}
    named = isinstance(root.get("state_dict"), dict)
    inner = ["state_dict"] if named else [key for key, value in root.items() if _is_state_dict(value)]
    if not inner or (not named and any(isinstance(value, TensorRef) for value in root.values())):
        return root
    if len(inner) > 1:
        names = ", ".join(brief(key) for key in inner[:5])
        hint = f"save one of them alone: torch.save(torch.load(FILE)[{brief(inner[0])}], OUT)"
        raise LayoutError(torch.path, f"holds several state dicts: {names}", hint)
    found: dict[Any, Any] = root[inner[0]]
    return found


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(tensor, TensorRef) for tensor in value.values())


def _is_array(value: object) -> bool:
    return isinstance(value, TensorRef) or (isinstance(value, Opaque) and value.name == "_reconstruct")


def _left_out(torch: TorchFile) -> list[str]:
    """Return remarks on the entries that contain tensors or numpy's arrays, and are not the weights."""
    items = _items(torch)
    inside = [
        brief(name)
        for name, value in items.items()
        if not isinstance(value, TensorRef) and any(map(_is_array, walk(value)))
    ]
    beside = (
        [brief(name) for name, value in torch.root.items() if value is not items] if items is not torch.root else []
    )
    remarks = []
    if inside:
        names = ", ".join(inside[:5]) + (" ..." if len(inside) > 5 else "")
        remarks.append(f"{torch.path}: the arrays inside {names} are left out: only whole tensors are weights")
    if beside and "state_dict" not in torch.root:
        remarks.append(f"{torch.path}: only its state dict is read: {', '.join(beside[:5])} beside it is left out")
    return remarks


def _refuse_empty(path: str, states: Mapping[str, State]) -> None:
    """Refuse weights without elements, as an engine at ZeRO stage 3 has them between two steps.

    Source: DeepSpeed 0.19, runtime/zero/partition_parameters.py (``free_param``: an empty tensor of shape (0,)).

    Raises:
        LayoutError: A quarter of the weights or more have no elements.
    """
    empty = [name for name, state in states.items() if state.shape == (0,)]
    if len(empty) * 4 >= len(states) > 0 and empty:
        problem = f"holds {len(empty)} of {len(states)} weights without elements: ZeRO stage 3 had partitioned them"
        hint = "consolidate the checkpoint that engine.save_checkpoint wrote; or save with engine.save_16bit_model"
        raise LayoutError(path, problem, hint)


def _dtype(states: Mapping[str, State]) -> str:
    """Return the dtype of most elements."""
    counts: dict[str, int] = {}
    for state in states.values():
        counts[state.dtype] = counts.get(state.dtype, 0) + state.numel
    return max(counts, key=lambda d: counts[d], default="F32")
