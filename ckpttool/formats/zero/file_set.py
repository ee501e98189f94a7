"""Open all files of a checkpoint, and compare them with each other.

``stage0``, ``stage12`` and ``stage3`` interpret their content.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.zero.checks import (
    check_model_ranks,
    configured_stage,
    model_names,
    partition_count,
    shards_within,
    single_prefix,
    stage_of,
    stale_file,
    two_saves,
    two_world_sizes,
)
from ckpttool.formats.zero.identity import copied
from ckpttool.formats.zero.opener import MAX_NAMED, Opener
from ckpttool.formats.zero.rank_files import AllFiles, ExpertFile, LayerFile, RankFile, SwappedFile, ZeroFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.formats.locate import Location
    from ckpttool.formats.reports import Report
    from ckpttool.formats.zero.names import ZeroName
    from ckpttool.model import CheckpointFile
    from ckpttool.storage import Storage


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
