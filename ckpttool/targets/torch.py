"""Plan files that ``torch.load`` reads: of plain data and ranges of states, and of whole weights.

``weights_only=True`` and ``mmap=True`` work.
"""

from __future__ import annotations

import copy
import math
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import Opaque, OrderedDict, StorageRef, TensorRef, walk
from ckpttool.dtypes import DTYPES, itemsize
from ckpttool.errors import PlanError
from ckpttool.formats.universal import STEP
from ckpttool.model import TensorFloat, TensorInteger
from ckpttool.plan import CopyPlan, TargetFile, merge_literals
from ckpttool.plan.builder import CopyBuilder, Placement
from ckpttool.targets.weights import Weight, WeightSelection, index_file, shard_names, split_into_shards

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckpttool.model import Checkpoint, ScalarState, State
    from ckpttool.plan import ConsistencyChecks


def holds_tensors(value: object) -> bool:
    """Whether a value contains tensors."""
    return any(isinstance(v, TensorRef) for v in walk(value))


def lacks_tensors(checkpoint: Checkpoint, value: object) -> bool:
    """Whether a value contains tensors whose bytes the reader has not located."""
    return any(isinstance(v, TensorRef) and v.storage.key not in checkpoint.embedded for v in walk(value))


def copy_embedded(file: TorchFileBuilder, checkpoint: Checkpoint, value: Any) -> Any:
    """Copy the storages of the tensors inside a value into a new file.

    Args:
        file: The new file.
        checkpoint: The source.
        value: Plain data.

    Returns:
        The same data, its tensors views of the new storages.

    Raises:
        PlanError: The reader has not located the bytes of a tensor.
    """
    storages: dict[str, Any] = {}

    def copied(item: Any) -> Any:
        if isinstance(item, TensorRef):
            ref = item.storage
            if ref.key not in storages:
                where = checkpoint.embedded.get(ref.key)
                if where is None:
                    raise PlanError(
                        checkpoint.location,
                        "holds a tensor in its client state or scheduler whose bytes were not found",
                        "",
                    )
                storages[ref.key] = file.storage(ref.dtype, ref.numel, [Placement(where, ref.dtype, 0)])
            return TensorRef(
                storages[ref.key], item.dtype, item.offset, item.shape, item.stride, item.requires_grad, item.parameter
            )
        if isinstance(item, OrderedDict):
            return OrderedDict((k, copied(v)) for k, v in item.items())
        if isinstance(item, dict):
            return {k: copied(v) for k, v in item.items()}
        if type(item) in {list, tuple}:
            return type(item)(copied(v) for v in item)
        if isinstance(item, Opaque) and item.how != "global":
            made = copy.copy(item)
            made.args, made.state = tuple(copied(a) for a in item.args), copied(item.state)
            made.items = [(k, copied(v)) for k, v in item.items]
            made.appended = [copied(v) for v in item.appended]
            return made
        return item

    return copied(value)


def without_tensors(value: Any, within: frozenset[int] = frozenset(), keep: Collection[str] = ()) -> Any:
    """Remove tensors from a value: a new file cannot refer to storages in files of the source.

    Args:
        value: Plain data.
        within: Identities of the containers around the value.
        keep: Keys of storages whose tensors are kept.
    """
    if not any(isinstance(v, TensorRef) and v.storage.key not in keep for v in walk(value)):
        return value

    def stays(item: object) -> bool:
        return not (isinstance(item, TensorRef) and item.storage.key not in keep) and id(item) not in within

    within |= {id(value)}
    if isinstance(value, dict):
        return {k: without_tensors(v, within, keep) for k, v in value.items() if stays(v)}
    if isinstance(value, list | tuple):
        kept = [without_tensors(v, within, keep) for v in value if stays(v)]
        return kept if isinstance(value, list) else tuple(kept)
    return None  # an object that is incomplete without its tensors


class TorchFileBuilder:
    """Plans one file: its storages in the order of the calls, then the structure that refers to them.

    Args:
        name: The file, relative to the output directory.
        copies: Collects the plan's copies.
    """

    def __init__(self, name: str, copies: CopyBuilder) -> None:
        self.name = name
        self._copies = copies
        self._storages: dict[str, tuple[StorageRef, list[Placement]]] = {}
        self._values: dict[str, bytes] = {}

    def whole(self, state: State, dtype: str | None = None) -> TensorRef:
        """Add a tensor with a storage of its own, cast to ``dtype`` if given."""
        dtype = dtype or state.dtype
        storage = self.storage(dtype, state.numel, [Placement(state, dtype, 0)])
        return view(storage, dtype, 0, state.shape)

    def storage(self, dtype: str, numel: int, pieces: Iterable[Placement]) -> StorageRef:
        """Add a storage made of ``pieces``, whose target offsets count from its start; gaps are zero."""
        ref = storage_ref(str(len(self._storages)), dtype, numel)
        self._storages[ref.key] = ref, list(pieces)
        return ref

    def constant(self, data: bytes, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        """Add a tensor of the elements in ``data``, little-endian and in C order."""
        storage = self.storage(dtype, math.prod(shape), [])
        self._values[storage.key] = data
        return view(storage, dtype, 0, shape)

    def number(self, value: float | int | bool, dtype: str, shape: tuple[int, ...] = ()) -> TensorRef:
        """Add a tensor of one number, 0-dim unless ``shape`` is (1,)."""
        import numpy as np

        from ckpttool.dtypes import numpy_dtype

        return self.constant(np.array(value).astype(numpy_dtype(dtype)).tobytes(), dtype, shape)

    def scalar(self, scalar: ScalarState) -> TensorRef | float | int | bool:
        """Return a scalar in its saved form: a tensor, as in torch's optimizers, or a plain number."""
        return scalar.value if scalar.dtype is None else self.number(scalar.value, scalar.dtype, scalar.shape)

    def hyperparameters(self, value: Any) -> Any:
        """Return hyperparameters in their saved form: TensorFloat and TensorInteger become 0-dim tensors."""
        if isinstance(value, TensorFloat | TensorInteger):
            return self.number(value, value.dtype)
        if type(value) is dict:
            return {key: self.hyperparameters(v) for key, v in value.items()}
        if type(value) in {list, tuple} and any(
            isinstance(v, TensorFloat | TensorInteger | list | tuple) for v in value
        ):
            return type(value)(self.hyperparameters(v) for v in value)
        return value  # the same object, so that pickle writes it once for all groups

    def build(self, root: Any) -> TargetFile:
        """Return the file with the content ``root``: plain data, Opaque objects, and tensors of this builder."""
        sizes = {key: ref.nbytes for key, (ref, _) in self._storages.items()}
        prefix = posixpath.splitext(posixpath.basename(self.name))[0]
        built = torch_zip.build(pickle(root, path=self.name), sizes, prefix=prefix, path=self.name)
        placed = []
        zeros = []
        literals = list(built.literals)
        for key, (ref, pieces) in self._storages.items():
            start = built.payloads[key].start
            if key in self._values:
                literals.append((start, self._values[key]))
                continue
            filled = 0
            for piece in sorted(pieces, key=lambda p: p.target):
                if piece.target > filled:
                    zeros.append((start + filled, piece.target - filled))
                numel = piece.state.numel - piece.first if piece.numel is None else piece.numel
                filled = piece.target + numel * itemsize(piece.dtype)
                placed.append(Placement(piece.state, piece.dtype, start + piece.target, piece.first, numel))
            if filled < ref.nbytes:
                zeros.append((start + filled, ref.nbytes - filled))
        copies, gathers = self._copies.copies(placed)
        return TargetFile(self.name, built.nbytes, merge_literals(literals), copies, gathers, tuple(zeros))


def as_in_torch(key: str, number: ScalarState) -> ScalarState:
    """Return a number of a parameter as optimizers of torch have it: a step in a tensor, any other as it was saved.

    DeepSpeed's Adam counts steps in a Python number. Other Python numbers have no tensor: fp32 would round them.
    """
    return replace(number, dtype="F32") if key == STEP and number.dtype is None else number


def group_options(checkpoint: Checkpoint, number: int) -> dict[str, Any]:
    """Return the hyper-parameters of a group by the keys of torch's optimizers, without tensors.

    DeepSpeed's Adam lacks some keys of torch's AdamW; without them ``dcp.load`` reports missing keys.
    """
    options = without_tensors(dict(checkpoint.groups[number].hyperparameters))
    known = {key for p in checkpoint.parameters if p.group == number for key in p.states}
    is_adam = known >= {"exp_avg", "exp_avg_sq"} and "betas" in options and "momentum_decay" not in options  # NAdam
    return {**_ADAMW, **options} if is_adam else options


_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def storage_ref(key: str, dtype: str, numel: int) -> StorageRef:
    """Return the reference to a storage of some elements."""
    typed = DTYPES[dtype].storage
    count = numel if typed else numel * itemsize(dtype)
    return StorageRef(key, typed or "UntypedStorage", dtype if typed else "U8", "cpu", count)


def view(storage: StorageRef, dtype: str, offset: int, shape: tuple[int, ...]) -> TensorRef:
    """Return a contiguous view of a storage that begins at element ``offset``."""
    strides = tuple(math.prod(n or 1 for n in shape[d + 1 :]) for d in range(len(shape)))
    return TensorRef(storage, dtype, offset, shape, strides)


def plain_file(name: str, data: bytes) -> TargetFile:
    """Return a small file of literal bytes."""
    import numpy as np

    from ckpttool.plan import COPY

    return TargetFile(name, len(data), ((0, data),) if data else (), np.zeros(0, dtype=COPY))


def opaque_object(module: str, name: str, state: dict[str, Any]) -> Opaque:
    """Return a pickled object of a class that is not imported, with a state for ``__setstate__``."""
    made = Opaque(module, name, "new")
    made.stated, made.state = True, state
    return made


INDEX = "pytorch_model.bin.index.json"
"""Name of the index over several files."""


def plan_torch(
    checkpoint: Checkpoint, selection: WeightSelection, *, max_shard_bytes: int, consistency: ConsistencyChecks | None
) -> CopyPlan:
    """Plan ``pytorch_model.bin``, or shards and ``pytorch_model.bin.index.json``.

    Each file is a state dict. Tied names share one storage, as ``torch.save`` writes them.
    """
    builder = CopyBuilder(checkpoint)
    shards = split_into_shards(selection.weights, max_shard_bytes)
    names = shard_names("pytorch_model", "bin", len(shards))
    files = [_file(builder, name, shard, selection) for name, shard in zip(names, shards, strict=True)]
    if len(files) > 1:
        files.append(index_file(INDEX, names, shards, selection, aliases=True))
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


def _file(builder: CopyBuilder, name: str, shard: Sequence[Weight], selection: WeightSelection) -> TargetFile:
    file = TorchFileBuilder(name, builder)
    root: OrderedDict = OrderedDict()
    for weight in shard:
        root[weight.name] = file.whole(weight.state, weight.dtype)
    for alias, stored in selection.aliases.items():
        if stored in root:
            root[alias] = root[stored]
    return file.build(root)
