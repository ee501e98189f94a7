"""The files of one ZeRO checkpoint, opened and held against each other.

What they hold is for ``zero12`` and ``zero3``.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats.fields import Fields, describe, enum_value
from ckpttool.formats.zero_names import ZeroName, parse_name
from ckpttool.model import CheckpointFile, ScalarState

if TYPE_CHECKING:
    from ckpttool.containers.unpickler import Unpickled
    from ckpttool.formats.locate import Location
    from ckpttool.storage import LocalStorage, RangeReader

Report = Callable[[CkptError], None]
"""What to do with a finding: raise it at once, or collect it and read on as far as that makes sense."""

MAX_RANKS = 1 << 20
"""No run has more."""
SUPPORTED = "this version reads data-parallel ZeRO 1, 2 and 3"
MAX_NAMED = 20
"""Missing files that are named one by one."""
RESTORE = "restore it from a copy, or choose another tag"


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
    """Values of the 0-dim tensors of an optimizer file, by (storage key, element)."""

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


@dataclass(frozen=True, slots=True, eq=False)
class ZeroFiles:
    """The files of a checkpoint, by rank."""

    location: Location
    """Where they are."""
    stage: int
    """1, 2 or 3."""
    model: list[RankFile]
    """Model states: one file at stages 1 and 2, one for each rank at stage 3."""
    optimizer: list[RankFile]
    """Optimizer states, one file for each rank."""
    files: tuple[CheckpointFile, ...]
    """All of them."""
    notes: tuple[LayoutError, ...]
    """What was noticed that does not keep the checkpoint from being read."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.optimizer)

    def states(self, rank: int) -> Fields:
        """The ``optimizer_state_dict`` of a rank's optimizer file."""
        return self.optimizer[rank].fields.child("optimizer_state_dict")


def raise_at_once(error: CkptError) -> None:
    """The report of those who want a sound checkpoint or none."""
    raise error


def read_zero_files(storage: LocalStorage, location: Location, report: Report) -> ZeroFiles:
    """Open every file of a checkpoint, and make sure that they are all there and belong together.

    Raises:
        CkptError: What is wrong, unless ``report`` collects it and reading can go on.
    """
    entries = storage.list(location.directory)
    named = [p for e in entries if not e.is_dir and (p := parse_name(e.name))]
    if any(e.is_dir and e.name == "zero" for e in entries):
        raise LayoutError(location.directory, "is a universal checkpoint, which is not supported yet", SUPPORTED)
    _refuse_unsupported(location, named)
    opener = _Opener(storage, location, report)
    by_rank = {p.data_rank or 0: p for p in named if p.kind == "optimizer"}
    prefix = _single_prefix(location, [p for p in named if p.kind == "optimizer"])
    first = next((file for rank in sorted(by_rank) if (file := opener.open(by_rank[rank]))), None)
    if first is None:
        raise opener.errors[0]
    ranks, stage = _partition_count(first), _stage(first)
    what = f"ZeRO-{stage} over {ranks} ranks"
    opener.missing(
        [f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks) if r not in by_rank],
        f"{what}, found {', '.join(map(str, sorted(by_rank)))}",
    )
    optimizer: dict[int, RankFile] = {}
    for rank in sorted(r for r in by_rank if r < ranks):
        file = opener.open(by_rank[rank])
        if file is not None:
            optimizer[rank] = file
            if (count := _partition_count(file)) != ranks:
                opener.report(_two_world_sizes(file, count, ranks, first))
            elif (other := _stage(file)) != stage:
                opener.report(_two_saves(file, f"is of ZeRO-{other}", f"of ZeRO-{stage}", first))
    model: list[RankFile] = []
    models = {p.name: p for p in named if p.kind == "model"}
    opener.missing([name for name in _model_names(stage, ranks) if name not in models], what)
    for name in _model_names(stage, ranks):
        if name in models and (file := opener.open(models[name])):
            model.append(file)
            size = file.fields.optional("dp_world_size", int)
            if size is not None and size != ranks:
                opener.report(_two_world_sizes(file, size, ranks, first))
    if opener.errors:
        raise opener.errors[0]
    wanted = {by_rank[r].name for r in range(ranks)} | set(_model_names(stage, ranks))
    notes = tuple(_stale(location, p, what) for p in named if p.name not in wanted)
    # Files that are not read are not part of the checkpoint.
    kept = [optimizer[r] for r in range(ranks)] + model
    files = [opener.files[f.index] for f in kept]
    kept = [RankFile(i, f.torch, f.fields, f.numbers) for i, f in enumerate(kept)]
    return ZeroFiles(location, stage, kept[ranks:], kept[:ranks], tuple(files), notes)


class _Opener:
    """Opens the files of one checkpoint and remembers what keeps them from being one."""

    def __init__(self, storage: LocalStorage, location: Location, report: Report) -> None:
        self.storage = storage
        self.location = location
        self._report = report
        self.files: list[CheckpointFile] = []
        self.errors: list[CkptError] = []
        self._opened: dict[str, RankFile | None] = {}
        self._pickles: dict[bytes, Unpickled] = {}

    def report(self, error: CkptError) -> None:
        """Pass on an error after which the files cannot be read as one checkpoint."""
        self.errors.append(error)
        self._report(error)

    def missing(self, names: list[str], what: str) -> None:
        """Report files that should be there; the first few by name."""
        for name in names[:MAX_NAMED]:
            path = posixpath.join(self.location.directory, name)
            problem = "is not a file" if self.storage.exists(path) else "is missing"
            self.report(LayoutError(path, f"{problem} ({what})", RESTORE))
        if len(names) > MAX_NAMED:
            problem = f"lacks {len(names) - MAX_NAMED:,} more files ({what})"
            self.report(LayoutError(self.location.directory, problem, RESTORE))

    def open(self, name: ZeroName) -> RankFile | None:
        """Read the structure of one file, once; None if that failed and the error was collected."""
        if name.name not in self._opened:
            self._opened[name.name] = self._read(name)
        return self._opened[name.name]

    def _read(self, name: ZeroName) -> RankFile | None:
        path = posixpath.join(self.location.directory, name.name)
        try:
            with self.storage.open(path) as reader:
                torch, version = read_torch_file(reader, self._pickles), reader.version
                numbers = _read_numbers(reader, torch) if name.kind == "optimizer" else {}
            if not isinstance(torch.root, dict):
                raise LayoutError(path, f"holds a {describe(torch.root)}, not a dict of states", RESTORE)
        except CkptError as error:
            self.report(error)
            return None
        self.files.append(CheckpointFile(name.name, torch.nbytes, name.kind, name.data_rank, version))
        return RankFile(len(self.files) - 1, torch, Fields(path, "", torch.root), numbers)


def _read_numbers(reader: RangeReader, torch: TorchFile) -> dict[tuple[str, int], ScalarState]:
    """The values of all 0-dim tensors of a file: a few bytes each, read in one go."""
    scalars = [v for v in walk(torch.root) if isinstance(v, TensorRef) and v.shape == ()]
    values = reader.read_many([torch.locate(s) for s in scalars])
    return {
        (s.storage.key, s.offset): ScalarState(np.frombuffer(v, numpy_dtype(s.dtype))[0].item(), s.dtype)
        for s, v in zip(scalars, values, strict=True)
    }


def _refuse_unsupported(location: Location, named: list[ZeroName]) -> None:
    kinds = {p.kind for p in named}
    parallel = [p.name for p in named if p.model_rank > 0]
    if "layer" in kinds:
        raise LayoutError(
            location.directory, "is pipeline-parallel (layer files), which is not supported yet", SUPPORTED
        )
    if kinds & {"expert", "expert optimizer"}:
        raise LayoutError(
            location.directory, "holds expert-parallel (MoE) files, which is not supported yet", SUPPORTED
        )
    if parallel:
        problem = f"is tensor- or pipeline-parallel ({parallel[0]}), which is not supported yet"
        raise LayoutError(location.directory, problem, SUPPORTED)
    if "optimizer" not in kinds:
        problem = "holds no ZeRO optimizer files: it is of stage 0, or was saved without the optimizer"
        raise LayoutError(location.directory, problem, SUPPORTED)


def _single_prefix(location: Location, optimizer: list[ZeroName]) -> str:
    """The prefix that all optimizer files share.

    It follows the engine's dtype, so two prefixes are two saves.
    """
    by_prefix = {p.prefix: p.name for p in optimizer}
    if len(by_prefix) > 1:
        names = " and ".join(sorted(by_prefix.values()))
        raise LayoutError(location.directory, f"mixes files of two saves: {names}", "remove the files of one of them")
    return next(iter(by_prefix))


def _partition_count(file: RankFile) -> int:
    """Over how many ranks the save that wrote this file was partitioned.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (an int) and stage_1_and_2.py (a list, one for each group).
    """
    states = file.fields.child("optimizer_state_dict")
    value = states.get("partition_count", object)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_RANKS for v in values):
        raise states.error("partition_count", "is not a number of ranks")
    counts = set(values)
    if len(counts) > 1:
        raise LayoutError(
            file.path, f"is expert-parallel (groups over {sorted(counts)} ranks), which is not supported yet", ""
        )
    count: int = counts.pop()
    return count


def _stage(file: RankFile) -> int:
    """The ZeRO stage, from which keys are there."""
    states = file.fields.child("optimizer_state_dict")
    if "fp32_flat_groups" in states:
        return 3
    if "single_partition_of_fp32_groups" in states:
        # BF16_Optimizer, which partitions as stage 1 does, records no stage.
        return 2 if enum_value(states.values.get("zero_stage")) == 2 else 1
    if "local_sub_partitions_of_fp32_groups" in states:
        raise LayoutError(file.path, "is of the old stage 1 (DeepSpeed up to 0.5.8), which is not supported", "")
    raise LayoutError(file.path, "holds no ZeRO partitions", "is it an optimizer file of DeepSpeed?")


def _model_names(stage: int, ranks: int) -> list[str]:
    if stage == 3:
        return [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(ranks)]
    return ["mp_rank_00_model_states.pt"]


def _two_world_sizes(file: RankFile, theirs: int, ranks: int, first: RankFile) -> LayoutError:
    return _two_saves(file, f"was saved by {theirs} ranks", f"by {ranks}", first)


def _two_saves(file: RankFile, ours: str, theirs: str, first: RankFile) -> LayoutError:
    name = posixpath.basename(first.path)
    return LayoutError(file.path, f"{ours}, but {name} {theirs}: two saves are mixed", RESTORE)


def _stale(location: Location, name: ZeroName, what: str) -> LayoutError:
    return LayoutError(
        posixpath.join(location.directory, name.name),
        f"is left over from another save (this checkpoint is {what}) and was not read",
        "remove it",
    )
