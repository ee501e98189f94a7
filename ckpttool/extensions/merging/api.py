"""``average``: the weighted mean of several checkpoints of one model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._run import Run, Written
from ckpttool.api.options import Options
from ckpttool.arguments import check_choice, check_positive, checked_path, checked_size
from ckpttool.blocks import Shown, Table
from ckpttool.dtypes import TRAINING_DTYPES, short_name
from ckpttool.errors import ArgumentError
from ckpttool.extensions.merging.averaging import DECAYS, decay_weights, moving_average_weights, place_of
from ckpttool.extensions.merging.averaging import average as average_of
from ckpttool.formats import Opening, Source
from ckpttool.formats.sidecars import find_sidecars
from ckpttool.messages import brief
from ckpttool.model.selection import matcher
from ckpttool.plan.builder import sample_checks
from ckpttool.registry import carry_out, with_options
from ckpttool.targets.sidecars import rank_state_sidecars, sidecars_for, with_sidecars
from ckpttool.targets.weights import select_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.api._run import Addition
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.extensions.merging.averaging import Average
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan
    from ckpttool.targets.weights import WeightSelection
    from ckpttool.units import Progress

_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-30, 1e30
_WEIGHABLE = f"from {_LEAST_WEIGHT:g} to {_LARGEST_WEIGHT:g} in magnitude"
_SCALE = "scale the weights: only their ratios matter"


@dataclass(frozen=True, slots=True)
class _Request:
    """The computation and the output of ``average``."""

    to: str
    weights: tuple[float, ...] | None
    ema: float | None
    schedule: str | None
    accumulate: str
    dtype: str | None
    max_shard_size: int | str
    include: Sequence[str]
    exclude: Sequence[str]
    world_size: int | None
    stage: int | None

    def check(self, count: int) -> None:
        """Refuse values that no checkpoints allow.

        Args:
            count: Number of sources.

        Raises:
            ArgumentError: There is one.
        """
        check_choice("to", self.to, ("safetensors", "zero"))
        check_choice("accumulate", self.accumulate, ("fp32", "fp64"))
        if self.dtype is not None:
            check_choice("dtype", self.dtype, tuple(TRAINING_DTYPES))
        checked_size("max_shard_size", self.max_shard_size)
        check_positive("world_size", self.world_size)
        for name in ("world_size", "stage"):
            if self.to != "zero" and getattr(self, name) is not None:
                raise ArgumentError(name, f"is for zero, not for {self.to}", f'leave out {name}, or write to="zero"')
        if self.stage not in {None, 1, 2, 3}:
            raise ArgumentError("stage", f"is {self.stage!r}, not 1, 2 or 3", "choose one of them, or None")
        given = [n for n in ("weights", "ema", "schedule") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ArgumentError(given[1], f"cannot be combined with {given[0]}", "choose one of them", tuple(given))
        if count < 2:
            raise ArgumentError("src", "is a single checkpoint", "name the checkpoints to average")
        if self.schedule is not None:
            check_choice("schedule", self.schedule, tuple(DECAYS))
        if self.ema is not None and not 0 < self.ema < 1:
            raise ArgumentError("ema", f"is {brief(self.ema)}, not between 0 and 1", "choose 0.9, for example")
        if self.weights is not None:
            _check_weights(self.weights, count)

    def weighting(self, count: int) -> tuple[float, ...]:
        """Return the weight of each source."""
        if self.weights is not None:
            return self.weights
        if self.ema is not None:
            return moving_average_weights(self.ema, count)
        return decay_weights(self.schedule or "linear", count)


def _check_weights(weights: Sequence[float], count: int) -> None:
    if len(weights) != count:
        problem = f"has {len(weights)} numbers for {count} checkpoints"
        raise ArgumentError("weights", problem, "give one number for each checkpoint, in their order")
    shown = brief(list(weights))
    for weight in weights:
        if weight and not _can_weigh(weight):
            raise ArgumentError("weights", f"is {shown}, with {weight!r}, which is neither 0 nor {_WEIGHABLE}", _SCALE)
    total = sum(weights)
    if not total:
        problem = f"is {shown}, whose sum is not a number other than 0"
        raise ArgumentError("weights", problem, "the mean is the weighted sum divided by it: choose other weights")
    if not _can_weigh(total):
        raise ArgumentError("weights", f"is {shown}, whose sum {total!r} is not {_WEIGHABLE}", _SCALE)


def _can_weigh(value: float) -> bool:
    """Return whether a weight is far enough from the limits of fp32, so that no product overflows or vanishes."""
    return _LEAST_WEIGHT <= abs(value) <= _LARGEST_WEIGHT


@dataclass(frozen=True, slots=True)
class AveragedSource:
    """One source of an average."""

    location: str
    """Directory of its tag, or its only file."""
    step: int | None
    """Its step; None if not recorded."""
    weight: float
    """Its weight, as a part of 1."""


@dataclass(frozen=True, slots=True)
class AverageReport(Shown):
    """Result of ``average``."""

    written: Written
    """The output."""
    to: str
    """"safetensors" or "zero"."""
    sources: tuple[AveragedSource, ...]
    """The checkpoints, in the order of the sums."""
    optimizer: str | None
    """For "zero", the source of the optimizer, the step and everything else except the weights."""
    tensors: int
    """Parameters and buffers in the output; tied tensors count once."""
    elements: int
    """Elements in them."""
    dtype: str | None
    """Type of the parameters: "fp32", "bf16" or "fp16"; None for "zero", which has the source's."""
    tied: Mapping[str, str]
    """Tied names: alias to the name the tensor is stored under."""
    sidecars: tuple[str, ...]
    """Sidecar files that were copied from the newest source."""
    notes: tuple[str, ...]
    """Remarks on the checkpoints, and the state that the output does not keep."""

    def blocks(self) -> Iterator[Block]:
        """Yield the weight of each source and the written files, or those planned by a dry run."""
        kind = "a ZeRO checkpoint" if self.dtype is None else f"parameters in {self.dtype}"
        contents = (
            f"the mean of {len(self.sources)} checkpoints, {self.tensors} tensors, {self.elements:,} elements, {kind}"
        )
        yield self.written.line(contents)
        rows = [(s.location, "" if s.step is None else f"{s.step:,}", f"{s.weight:.6g}") for s in self.sources]
        yield Table(["source", "step", "weight"], rows, right=["step", "weight"])
        yield from self.written.weights(self.tied, self.notes, self.dtype)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, with facts for the report."""

    plan: CopyPlan
    selection: WeightSelection | None
    """The tensors of safetensors files; None for "zero"."""
    last: str
    """Name of the file that is committed last."""
    companions: tuple[str, ...]
    notes: tuple[str, ...]


@with_options
def average(  # noqa: PLR0913  public API
    src: Sequence[Source],
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "zero"],
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    schedule: Literal["constant", "linear", "cosine", "1-sqrt"] | None = None,
    accumulate: Literal["fp32", "fp64"] = "fp32",
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    world_size: int | None = None,
    stage: int | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    **given: Any,
) -> AverageReport:
    """Write the weighted mean of several checkpoints of one model; the output appears whole or not at all.

    The mean is w[0] * x[0] + w[1] * x[1] + ..., divided by the sum of the weights. Each product, sum and quotient is
    rounded to ``accumulate``, in the order of ``src``, as torch does it. fp32 master weights are averaged, or else the
    weights, and floating-point buffers; other buffers are copied from the newest source.

    Args:
        src: The checkpoints, of any formats, stages and numbers of ranks; each is a path that ``inspect`` takes, or
            several if each contains the files of some ranks.
        out: Directory to write.
        to: "safetensors" for weights as ``consolidate`` writes them; "zero" for a checkpoint that
            ``engine.load_checkpoint`` reads, with the optimizer of the newest source.
        weights: One number for each checkpoint. Default: all equal.
        ema: Decay of an exponential moving average, which begins at the first checkpoint.
        schedule: Decay of the learning rate that the mean replaces: WSM's weights, for checkpoints at equal distances.
            "linear" weighs all equally, "constant" takes only the newest.
        accumulate: Type to compute in.
        tag: Tag of each checkpoint; default: the one that ``latest`` names.
        dtype: Type of the parameters, default "fp32"; for "zero" the type that the run computes in.
        include: Globs: only tensors whose name matches one; for "zero" the others are copied from the newest source.
        exclude: Globs: no tensors whose name matches one.
        world_size: Data-parallel ranks that will load the output; default: the newest source's.
        stage: ZeRO stage, 1, 2 or 3; default: the newest source's.
        prove: Compute the mean again, digest it and the output, and commit only if they are equal.
        overwrite: Allow an ``out`` with files, but without a checkpoint: weights of the same kind in it are replaced,
            other files are kept. A replaced sidecar file that differs from the new one is kept as ``NAME.replaced``.
            Not for "zero".
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        storage_options: Options for the fsspec class of URLs, for all checkpoints and ``out``: keys, an endpoint, ...
            Default: fsspec's own configuration.

    Raises:
        CkptError: A wrong argument, sources that are not sound or do not fit, or ``out`` not writable.
    """
    opening = Opening(storage_options, follow_links)
    options = Options(
        tag=tag,
        jobs=jobs,
        memory=memory,
        progress=progress,
        check=check,
        prove=prove,
        dry_run=dry_run,
        resume=None,
        overwrite=overwrite,
        allow_partial=allow_partial,
        trust_names=trust_names,
        opening=opening,
    )
    numbers = None if weights is None else tuple(map(float, weights))
    request = _Request(
        to,
        numbers,
        ema,
        schedule,
        short_name(accumulate),
        short_name(dtype),
        max_shard_size,
        include,
        exclude,
        world_size,
        stage,
    )
    return _average(src, checked_path("out", out), request, options, carry_out("average", given))


def _average(
    src: Sequence[Source], out: str, request: _Request, options: Options, additions: Sequence[Addition]
) -> AverageReport:
    if isinstance(src, str | os.PathLike):
        raise ArgumentError("src", "is a single checkpoint", "name the checkpoints to average")
    request.check(len(src))
    if request.to == "zero" and options.overwrite:
        raise ArgumentError("overwrite", "is for safetensors, not for zero", "choose another OUT")
    run = Run(out, options, additions)
    sources = run.open(src)
    _check_different(sources)
    weighting = request.weighting(len(sources))
    mean = average_of(
        sources,
        weighting,
        accumulator=TRAINING_DTYPES.get(request.accumulate, "F64"),
        ordered=request.ema is not None or request.schedule is not None,
        keep_types=request.to == "zero",
        matches=matcher(request.include, request.exclude),
    )
    newest = sources[mean.newest]
    made = _plan_zero(mean, newest, request) if request.to == "zero" else _plan_weights(mean, newest, request)
    selected = None if made.selection is None else made.selection.states
    written = run.write(made.plan, mean.checkpoint, last=(made.last,), selected=selected)
    tensors, tied = _contents(mean.checkpoint, made.selection)
    total = sum(weighting)
    return AverageReport(
        written=written,
        to=request.to,
        sources=tuple(AveragedSource(place_of(c), c.step, w / total) for c, w in zip(sources, weighting, strict=True)),
        optimizer=place_of(newest) if request.to == "zero" else None,
        tensors=len(tensors),
        elements=sum(tensors),
        dtype=None if request.to == "zero" else request.dtype or "fp32",
        tied=tied,
        sidecars=made.companions,
        notes=_notes(sources, mean, made),
    )


def _check_different(sources: Sequence[Checkpoint]) -> None:
    """Refuse a checkpoint that is named twice.

    Raises:
        ArgumentError: There is one.
    """
    seen = set()
    for checkpoint in sources:
        place = checkpoint.location if checkpoint.storage.remote else os.path.realpath(checkpoint.location)
        files = tuple(sorted(f.name for f in checkpoint.files))
        if (place, files) in seen:
            raise ArgumentError(
                "src", f"names {place_of(checkpoint)} twice", "name it once, and give it a weight", ("weights",)
            )
        seen.add((place, files))


def _plan_weights(mean: Average, newest: Checkpoint, request: _Request) -> _Planned:
    from ckpttool.targets.weight_files import INDEX, plan_safetensors

    dtype = TRAINING_DTYPES[request.dtype or "fp32"]
    selection = select_weights(
        mean.checkpoint,
        source="masters",
        dtype=dtype,
        include=request.include,
        exclude=request.exclude,
        exclude_frozen=False,
    )
    limit = checked_size("max_shard_size", request.max_shard_size)
    plan = plan_safetensors(
        mean.checkpoint, selection, max_shard_bytes=limit, consistency=sample_checks(mean.checkpoint)
    )
    companions = find_sidecars(newest)
    return _Planned(with_sidecars(plan, companions, dtype), selection, INDEX, tuple(c.name for c in companions), ())


def _plan_zero(mean: Average, newest: Checkpoint, request: _Request) -> _Planned:
    from ckpttool.storage import LATEST
    from ckpttool.targets.zero.layout import shape_for, zero_losses
    from ckpttool.targets.zero.writer import plan_zero

    tag = newest.tag if newest.latest is not None else f"global_step{newest.step or 0}"
    shape = shape_for(
        mean.checkpoint,
        ranks=request.world_size or (newest.topology.data_parallel if newest.native else None),
        stage=request.stage,
        sub_group_size=None,
        round_robin=None,
        dtype=None if request.dtype is None else TRAINING_DTYPES[request.dtype],
    )
    plan = plan_zero(mean.checkpoint, shape, tag=tag)
    companions, left_behind = sidecars_for(newest, shape.ranks)
    companions += rank_state_sidecars(newest, tag)
    notes = (*zero_losses(mean.checkpoint, shape), *left_behind)
    if newest.groups:
        notes = (f"optimizer, step and scheduler are copied from {place_of(newest)}", *notes)
    return _Planned(with_sidecars(plan, companions, None), None, LATEST, tuple(c.name for c in companions), notes)


def _contents(checkpoint: Checkpoint, selection: WeightSelection | None) -> tuple[list[int], Mapping[str, str]]:
    """Return the number of elements of each tensor written, and the tied names."""
    if selection is not None:
        return [w.state.numel for w in selection.weights], dict(selection.aliases)
    numels = [p.numel for p in checkpoint.parameters] + [b.state.numel for b in checkpoint.buffers]
    return numels, dict(checkpoint.aliases)


def _notes(sources: Sequence[Checkpoint], mean: Average, made: _Planned) -> tuple[str, ...]:
    notes = [note for c in sources for note in (*map(str, c.notes), *(f"{place_of(c)}: {r}" for r in c.remarks))]
    if mean.kept:
        names = ", ".join(mean.kept[:3]) + (", ..." if len(mean.kept) > 3 else "")
        notes.append(f"not averaged, copied from {place_of(sources[mean.newest])}: {names} (non-floating type)")
    return (*notes, *made.notes)
