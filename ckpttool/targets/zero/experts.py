"""Experts of a target: the ranks that hold each, and their own files.

Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_moe_checkpoint``, ``load_moe_state_dict``), utils/groups.py
(``_create_expert_and_data_parallel``), checkpoint/autoep_zero3_metadata.py and, for stage 3, runtime/zero/stage3.py
(``_zero3_partition_group_metadata``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError
from ckpttool.formats.zero.experts import NATIVE, local_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpttool.model import Checkpoint, ParamGroup

_GROUP = re.compile(r"ep_size_(\d+)")
_STACKED = re.compile(r"(?P<prefix>(?P<module>.*)\.experts)\.w[123]")
"""AutoEP's experts: one tensor for all of a layer."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """The part of a parameter that a rank holds before partitioning."""

    name: str
    """The parameter in the whole model."""
    first: int
    """First element."""
    shape: tuple[int, ...]
    """Shape of the part."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The ranks that partition a group among themselves, and their parameters of it."""

    ranks: Sequence[int]
    """In the order of their partitions."""
    parameters: Mapping[str, LocalParameter]
    """Parameters by the names on these ranks, in the optimizer's order."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of experts."""

    number: int
    """Number of the layer in the names of its files."""
    module: str
    """The module; "" if it is DeepSpeed's own, whose experts are modules by themselves."""
    prefix: str
    """Prefix of the names of its experts."""
    experts: int
    """TargetExperts of all ranks."""
    parallel: int
    """Number of ranks that the experts are spread over."""


class TargetExperts:
    """The experts of a target.

    Args:
        checkpoint: What is converted.
        ranks: Data-parallel ranks of the target.
        parallel: Number of ranks to spread experts over; None for the source's number.
    """

    def __init__(self, checkpoint: Checkpoint, ranks: int, parallel: int | None = None) -> None:
        self._location = checkpoint.location
        self._default_parallel = checkpoint.topology.expert_parallel
        self._parallel = parallel
        self._ranks = ranks
        self._data_first = bool(checkpoint.ds_config.get("use_data_before_expert_parallelism"))
        self._parameters = {p.name: p for p in checkpoint.parameters}
        trained = [n for g in checkpoint.groups if _has_experts(g) for n in g.parameters]
        self._stacked = {n for n in trained if _STACKED.fullmatch(n) and self._parameters[n].numel}
        self.layers = self._layers(checkpoint)
        """In the order of the model."""
        for p in checkpoint.parameters:
            if p.frozen and self.owns(p.name):
                problem = f"freezes expert parameter {p.name}, which cannot be written for ZeRO"
                raise PlanError(self._location, problem, "consolidate the weights")

    def _layers(self, checkpoint: Checkpoint) -> list[Layer]:
        parallel = {n: self.parallel(g) for g in checkpoint.groups for n in g.parameters}
        layers: dict[str, Layer] = {}
        experts: dict[str, set[int]] = {}
        for p in checkpoint.parameters:
            if p.name in self._stacked and (match := _STACKED.fullmatch(p.name)):
                prefix, module, numbers = match["prefix"], match["module"], {*range(p.shape[0] if p.shape else 1)}
            elif match := NATIVE.fullmatch(p.name):
                prefix, module, numbers = match["layer"], "", {int(match["expert"])}
            else:
                continue
            experts.setdefault(prefix, set()).update(numbers)
            default = self._parallel or self._default_parallel
            layers.setdefault(prefix, Layer(len(layers), module, prefix, 0, parallel.get(p.name, default)))
        result = [Layer(x.number, x.module, x.prefix, len(experts[x.prefix]), x.parallel) for x in layers.values()]
        for layer in result:
            if max(experts[layer.prefix]) >= layer.experts:
                raise PlanError(self._location, f"lacks an expert of {layer.prefix}", "convert a whole checkpoint")
            if layer.experts % layer.parallel:
                problem = f"spreads {layer.experts} experts of {layer.prefix} over {layer.parallel} ranks"
                raise PlanError(self._location, problem, "consolidate the weights")
        return result

    def parallel(self, group: ParamGroup) -> int:
        """Number of ranks to spread a group's experts over; 1 for a group without experts."""
        return (self._parallel or self._source_parallel(group)) if _has_experts(group) else 1

    def _source_parallel(self, group: ParamGroup) -> int:
        match = _GROUP.fullmatch(str(group.hyperparameters.get("name")))
        return max(1, int(match[1])) if match else self._default_parallel

    def hyperparameters_of(self, group: ParamGroup) -> dict[str, Any]:
        """A group's hyper-parameters, with the name that DeepSpeed gives to experts over so many ranks."""
        if not _has_experts(group):
            return dict(group.hyperparameters)
        return {**group.hyperparameters, "name": f"ep_size_{self.parallel(group)}"}

    def owns(self, name: str) -> bool:
        """Whether a tensor belongs to an expert, or stacks the experts of a layer."""
        return name in self._stacked or NATIVE.fullmatch(name) is not None

    def parts(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int, LocalParameter]]:
        """Yield the parts of a tensor in expert files: (layer, expert, part); none if it belongs to no expert."""
        if name in self._stacked:
            layer = next(x for x in self.layers if name.startswith(f"{x.prefix}."))
            for expert in range(layer.experts):
                numel = math.prod(shape[1:])
                yield layer.number, expert, LocalParameter(f"{name}.{expert}", expert * numel, shape[1:])
        elif match := NATIVE.fullmatch(name):
            layer = next(x for x in self.layers if x.prefix == match["layer"])
            yield layer.number, int(match["expert"]), LocalParameter(name, 0, shape)

    def shares(self, group: ParamGroup, names: Sequence[str]) -> list[Share]:
        """List the ranks that share a group, and their parameters of it.

        Args:
            group: The group.
            names: Its parameters, in the optimizer's order.

        Raises:
            PlanError: The number of ranks is not divisible, or the ranks would hold different experts.
        """
        parallel, all_ranks = self.parallel(group), range(self._ranks)
        if not _has_experts(group):
            return [Share(all_ranks, {n: LocalParameter(n, 0, self._parameters[n].shape) for n in names})]
        if self._ranks % parallel:
            problem = (
                f"cannot spread experts: world size {self._ranks} is not divisible by expert-parallel size {parallel}"
            )
            raise PlanError(
                self._location, problem, f"choose a world_size that is a multiple of {parallel}", ("world_size",)
            )
        count = self._ranks // parallel
        if parallel != self._source_parallel(group):
            names = self._sort_by_layer(group, names)
        result = []
        for e in range(parallel):
            ranks = all_ranks[e * count : (e + 1) * count] if self._data_first else all_ranks[e::parallel]
            result.append(Share(ranks, self._local_parameters(names, e, parallel)))
        shapes = [[(local_name, local.shape) for local_name, local in share.parameters.items()] for share in result]
        if any(s != shapes[0] for s in shapes) or sum(map(len, shapes)) != self._part_count(names, parallel):
            raise PlanError(self._location, "has different experts on different ranks", "consolidate the weights")
        return result

    def _sort_by_layer(self, group: ParamGroup, names: Sequence[str]) -> list[str]:
        """Sort parameters by layer, then by expert: the order of an optimizer with other experts on its ranks.

        Raises:
            PlanError: The source does not have them in the order of the model, so the order is unknown.
        """
        layers = {x.prefix: x.number for x in self.layers}
        rest: dict[str, int] = {}

        def place(name: str) -> tuple[int, int, int]:
            if (match := NATIVE.fullmatch(name)) is None:
                stacked = _STACKED.fullmatch(name)
                return (layers[stacked["prefix"]] if stacked else 0), 0, rest.setdefault(name, len(rest))
            return layers[match["layer"]], int(match["expert"]), rest.setdefault(match["rest"], len(rest))

        ordered = sorted(names, key=place)
        first = {local.name for local in self._local_parameters(names, 0, self._source_parallel(group)).values()}
        if [n for n in ordered if n in first] != [n for n in names if n in first]:
            problem = "trains experts in another order than the model has them"
            raise PlanError(self._location, problem, "leave them spread over as many ranks as they were")
        return ordered

    def _part_count(self, names: Iterable[str], parallel: int) -> int:
        return sum(parallel if n in self._stacked else 1 for n in names)

    def _local_parameters(self, names: Sequence[str], rank: int, parallel: int) -> dict[str, LocalParameter]:
        """The parameters of an expert-parallel rank, under its own names."""
        local_name_of = {whole: local for local, whole in local_names(names, rank, parallel).items()}
        local = {}
        for name in names:
            p = self._parameters[name]
            if name in self._stacked:
                shape = (p.shape[0] // parallel, *p.shape[1:])
                local[name] = LocalParameter(name, rank * math.prod(shape), shape)
            elif name in local_name_of:
                local[local_name_of[name]] = LocalParameter(name, 0, p.shape)
        return local

    def metadata(self, rank: int, stage: int) -> dict[str, Any]:
        """The entries on experts in the model states of a rank."""
        if not self.layers:
            return {}
        stacked = [self._layer_metadata(x, rank, stage) for x in self.layers if x.module]
        return {"num_experts": [x.experts for x in self.layers], "ds_autoep_layers": stacked or None}

    def _layer_metadata(self, layer: Layer, rank: int, stage: int) -> dict[str, Any]:
        count, local = self._ranks // layer.parallel, layer.experts // layer.parallel
        ep_rank, data_rank = divmod(rank, count) if self._data_first else divmod(rank, layer.parallel)[::-1]
        placement = [{"rank": e, "experts": list(range(e * local, (e + 1) * local))} for e in range(layer.parallel)]
        return {
            "moe_layer_id": layer.number,
            "module_path": layer.module,
            "num_experts": layer.experts,
            "num_local_experts": local,
            "ep_size": layer.parallel,
            "expert_placement": {
                "version": 1,
                "num_experts": layer.experts,
                "ep_size": layer.parallel,
                "ranks": placement,
            },
            "expert_key_prefix": layer.prefix,
            "checkpoint_format": "zero3_partitioned" if stage == 3 else "per_expert_files",
            "checkpoint_format_version": 1 if stage == 3 else None,
            "ep_group_name": f"ep_size_{layer.parallel}",
            "ep_rank": ep_rank,
            "expert_data_parallel_rank": data_rank,
            "expert_data_parallel_world_size": count,
            "global_expert_start": ep_rank * local,
            "global_expert_end": (ep_rank + 1) * local,
        }

    def partition_group(self, group: ParamGroup, share: Share, rank: int, number: int) -> dict[str, Any]:
        """Stage 3's record of the ranks that share a sub-group; it must match the loading engine."""
        experts = _has_experts(group)
        return {
            "sub_group": number,
            "partition_count": len(share.ranks),
            "partition_rank": share.ranks.index(rank),
            "partition_ranks": list(share.ranks),
            "families": ["autoep_expert" if experts else "replicated"],
            "group_names": [f"ep_size_{self.parallel(group)}" if experts else "replicated"],
        }


def _has_experts(group: ParamGroup) -> bool:
    return bool(group.hyperparameters.get("moe"))
