"""Checks that the files of a checkpoint belong to one save: number of ranks, ZeRO stage, names."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import enum_value
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.zero.rank_files import MAX_RANKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.formats.locate import Location
    from ckpttool.formats.zero.names import ZeroName
    from ckpttool.formats.zero.opener import Opener
    from ckpttool.formats.zero.rank_files import RankFile, ZeroFiles


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
