"""Weights beside an optimizer that numbers its parameters, as the Trainer and Accelerate save them -> Checkpoint.

Under DDP, and in one process, the first rank writes both files; ``Optimizer.state_dict`` has numbers in the place of
names. A save of ckpttool has recorded the names; for other folders the live optimizer must know their order.

Source: transformers 5.23, trainer.py (``_save_optimizer_and_scheduler``); accelerate 1.15, checkpointing.py
(``save_accelerator_state``); torch 2.13, optim/optimizer.py (``state_dict``).
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import parse_number
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.formats.state_dict import STEP, StateDict, is_reduced, recorded_step
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.weights import OPTIMIZER, find_weights, read_files
from ckpttool.model import MODULE, CheckpointFile, ScalarState, Topology, tensor_number
from ckpttool.model.names import full_names, renames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.formats.state_dict import Kinds
    from ckpttool.model import Checkpoint, State
    from ckpttool.storage import Reader, Storage

OF_RANK = re.compile(r"rng_state_\d+\.pth|random_states_\d+\.pkl")
"""The file that each rank adds to the folder."""
UNTIED = "the files do not identify their save: weights of another step with the same shapes are not noticed"


def read_state_files(
    storage: Storage, location: Location, _report: Report, kinds: Kinds | None = None
) -> Checkpoint | None:
    """Read the layout of the two files, without tensor bytes.

    Args:
        storage: Their storage.
        location: Their directory; ``order`` has the parameters of the optimizer unless ``kinds`` has them.
        kinds: What a save of ckpttool has recorded; None without.

    Returns:
        The layout; None without weights, or if the optimizer numbers other parameters.

    Raises:
        CkptError: A file is missing or damaged.
    """
    beside = [entry.name for entry in storage.listing(location.directory) if not entry.is_dir]
    optimizers = [name for name in beside if OPTIMIZER.fullmatch(name)]
    selection = find_weights(storage, location.directory)
    if selection is None or len(optimizers) != 1:
        return None
    found = read_files(storage, location, *selection, None)
    weights = {p.name: p.states[MODULE] for p in found.parameters} | {b.name: b.state for b in found.buffers}
    order, own = list(location.order), {}
    if kinds is not None:
        order = [name for group in kinds.groups or () for name in group]
        own = {name: live for live, name in kinds.names.items()}
    own = own or full_names(order, weights)
    weights = {own.get(name, name): state for name, state in weights.items()}
    aliases = {own.get(alias, alias): own.get(name, name) for alias, name in found.aliases.items()}
    renamed = renames(order, weights)
    result = StateDict(weights=weights, aliases=aliases, step=recorded_step(storage, location.directory))
    if kinds is not None:
        result.buffers, result.frozen = kinds.buffers, kinds.frozen
    path = posixpath.join(location.directory, optimizers[0])
    with storage.open(path, ahead=True) as reader:
        torch, index = read_torch_file(reader), len(found.files)
        own_order = [renamed.get(name, name) for name in order]
        fits = _add_optimizer(result, torch, reader, storage, index, own_order, location.sizes)
        file = CheckpointFile(optimizers[0], reader.nbytes, "optimizer", None, reader.version, records=torch.records)
    if not fits and kinds is not None:
        raise LayoutError(path, "numbers other parameters than the save has recorded", RESTORE)
    files, ranks = (*found.files, file), sum(bool(OF_RANK.fullmatch(name)) for name in beside)
    made = result.to_checkpoint(storage, location, found.format, path, Topology(data_parallel=max(1, ranks)), files)
    return replace(made, remarks=found.remarks if kinds is not None else (*found.remarks, UNTIED)) if fits else None


def _add_optimizer(
    result: StateDict,
    torch: TorchFile,
    reader: Reader,
    storage: Storage,
    index: int,
    order: Sequence[str],
    sizes: Sequence[int],
) -> bool:
    """Add the states and the groups of the optimizer; return False if it numbers other parameters than ``order``.

    As ``Optimizer.load_state_dict``, it compares the sizes of groups; and of every state the shape.

    Raises:
        LayoutError: The file has no states of an optimizer.
    """
    root: Any = torch.root
    if not isinstance(root, dict) or not isinstance(root.get("state"), dict):
        raise LayoutError(torch.path, "holds no states of an optimizer", RESTORE)
    states, groups = root["state"], [one for one in root.get("param_groups") or () if isinstance(one, dict)]
    keys = [key for group in groups for key in group.get("params", ())]
    if len(keys) != len(order) or not {*order} <= result.weights.keys() or states.keys() - {*keys}:
        return False
    if sizes and [len(group.get("params", ())) for group in groups] != [*sizes]:
        return False
    names = dict(zip(keys, order, strict=True))
    held = [(names[key], str(kind), value) for key, own in states.items() for kind, value in own.items()]
    options = [value for group in groups for value in group.values()]
    numbers = _numbers([*(value for _, _, value in held), *options], torch, reader, storage)
    for name, kind, value in held:
        weight: State = result.weights[name]
        if isinstance(value, bool | int | float):
            result.numbers.setdefault(name, {})[kind] = ScalarState(value, None)
        elif isinstance(value, TensorRef):
            number = numbers.get(id(value))
            if number is None and not (value.shape == weight.shape or is_reduced(value.shape, weight.shape)):
                return False
            if number is not None:
                result.numbers.setdefault(name, {})[kind] = number
            if (number is None or value.shape == weight.shape) and kind != STEP:
                result.states.setdefault(name, {})[kind] = whole_tensor(torch, index, value)
        elif value is not None:
            return False
    for at, group in enumerate(groups):
        known = {key: numbers.get(id(value)) for key, value in group.items()}
        plain = {key: value if (n := known[key]) is None else tensor_number(n) for key, value in group.items()}
        result.groups[str(at)] = {**plain, "params": [names[key] for key in group.get("params", ())]}
    return True


def _numbers(values: Sequence[Any], torch: TorchFile, reader: Reader, storage: Storage) -> Mapping[int, ScalarState]:
    """Return the tensors of one element among some values, by the identity of their reference."""
    refs = [value for value in values if isinstance(value, TensorRef) and value.numel == 1 and len(value.shape) < 2]
    places = [torch.locate(ref) for ref in refs]
    read = storage.read_all([(reader, where.start, where.end) for where in places])
    return {
        id(ref): ScalarState(parse_number(data, ref.dtype), ref.dtype, ref.shape)
        for ref, data in zip(refs, read, strict=True)
    }
