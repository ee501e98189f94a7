"""Distribute experts over the ranks of a target, and name their files.

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

_GROUP_NAME = re.compile(r"ep_size_(\d+)")
_AUTOEP_NAME = re.compile(r"(?P<prefix>(?P<module>.*)\.experts)\.w[123]")
"""Names of AutoEP's experts: one tensor stacks all experts of a layer."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """The part of a parameter that a rank stores before partitioning."""

    name: str
    """Name of the parameter in the whole model."""
    first: int
    """First element of the part, in the flattened parameter."""
    shape: tuple[int, ...]
    """Shape of the part."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The ranks over which one parameter group is partitioned, and its parameters on them."""

    ranks: Sequence[int]
    """Data-parallel ranks, in the order of their partitions."""
    parameters: Mapping[str, LocalParameter]
    """Local parameters by their names on these ranks, in the optimizer's order."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of experts."""

    number: int
    """Number of the layer in the names of its files."""
    module: str
    """Name of the AutoEP module; "" for DeepSpeed's own MoE layer, where each expert is a module."""
    prefix: str
    """Prefix of the names of its experts."""
    experts: int
    """Number of experts on all ranks."""
    parallel: int
    """Expert-parallel size: number of ranks over which the experts are distributed."""


class TargetExperts:
    """The experts of a target.

    Args:
        checkpoint: The source.
        ranks: Data-parallel ranks of the target.
        parallel: Expert-parallel size of the target; None for the source's.
    """

    def __init__(self, checkpoint: Checkpoint, ranks: int, parallel: int | None = None) -> None:
        self._location = checkpoint.location
        self._default_parallel = checkpoint.topology.expert_parallel
        self._parallel = parallel
        self._ranks = ranks
        self._data_first = bool(checkpoint.ds_config.get("use_data_before_expert_parallelism"))
        self._parameters = {p.name: p for p in checkpoint.parameters}
        trained = [n for g in checkpoint.groups if _has_experts(g) for n in g.parameters]
        self._stacked_names = {n for n in trained if _AUTOEP_NAME.fullmatch(n) and self._parameters[n].numel}
        self.layers = self._layers(checkpoint)
        """Layers of experts, in the order of the model."""
        for p in checkpoint.parameters:
            if p.frozen and self.owns(p.name):
                problem = f"freezes expert parameter {p.name}: ZeRO files cannot hold frozen experts"
                raise PlanError(self._location, problem, "consolidate the weights")

    def _layers(self, checkpoint: Checkpoint) -> list[Layer]:
        parallel = {n: self.parallel(g) for g in checkpoint.groups for n in g.parameters}
        layers: dict[str, Layer] = {}
        experts: dict[str, set[int]] = {}
        for p in checkpoint.parameters:
            if p.name in self._stacked_names and (match := _AUTOEP_NAME.fullmatch(p.name)):
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
        """Return the expert-parallel size of a group; 1 for a group without experts."""
        return (self._parallel or self._source_parallel(group)) if _has_experts(group) else 1

    def _source_parallel(self, group: ParamGroup) -> int:
        match = _GROUP_NAME.fullmatch(str(group.hyperparameters.get("name")))
        return max(1, int(match[1])) if match else self._default_parallel

    def hyperparameters_of(self, group: ParamGroup) -> dict[str, Any]:
        """Return the hyper-parameters of a group; DeepSpeed names a group of experts by its expert-parallel size."""
        if not _has_experts(group):
            return dict(group.hyperparameters)
        return {**group.hyperparameters, "name": f"ep_size_{self.parallel(group)}"}

    def owns(self, name: str) -> bool:
        """Return whether a tensor belongs to an expert, or stacks the experts of a layer."""
        return name in self._stacked_names or NATIVE.fullmatch(name) is not None

    def parts(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int, LocalParameter]]:
        """Yield the parts of an expert's tensor: (layer, expert, part); nothing for other tensors."""
        if name in self._stacked_names:
            layer = next(x for x in self.layers if name.startswith(f"{x.prefix}."))
            for expert in range(layer.experts):
                numel = math.prod(shape[1:])
                yield layer.number, expert, LocalParameter(f"{name}.{expert}", expert * numel, shape[1:])
        elif match := NATIVE.fullmatch(name):
            layer = next(x for x in self.layers if x.prefix == match["layer"])
            yield layer.number, int(match["expert"]), LocalParameter(name, 0, shape)

    def shares(self, group: ParamGroup, names: Sequence[str]) -> list[Share]:
        """Return the shares of a group: one for each set of ranks that partitions it.

        Args:
            group: The group.
            names: Its parameters, in the optimizer's order.

        Raises:
            PlanError: The world size is not divisible by the expert-parallel size, or shapes differ between ranks.
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
        """Sort parameters by layer, then by expert, as an optimizer with another expert-parallel size has them.

        Raises:
            PlanError: The source has them in an order other than the model's, so that the target's order is unknown.
        """
        layers = {x.prefix: x.number for x in self.layers}
        rest: dict[str, int] = {}

        def place(name: str) -> tuple[int, int, int]:
            if (match := NATIVE.fullmatch(name)) is None:
                stacked = _AUTOEP_NAME.fullmatch(name)
                return (layers[stacked["prefix"]] if stacked else 0), 0, rest.setdefault(name, len(rest))
            return layers[match["layer"]], int(match["expert"]), rest.setdefault(match["rest"], len(rest))

        ordered = sorted(names, key=place)
        first = {local.name for local in self._local_parameters(names, 0, self._source_parallel(group)).values()}
        if [n for n in ordered if n in first] != [n for n in names if n in first]:
            problem = "trains experts in an order other than the model's"
            raise PlanError(self._location, problem, "keep the expert-parallel size of the source")
        return ordered

    def _part_count(self, names: Iterable[str], parallel: int) -> int:
        return sum(parallel if n in self._stacked_names else 1 for n in names)

    def _local_parameters(self, names: Sequence[str], rank: int, parallel: int) -> dict[str, LocalParameter]:
        """Return the parameters of an expert-parallel rank, by their local names."""
        local_name_of = {whole: local for local, whole in local_names(names, rank, parallel).items()}
        local_parameters = {}
        for name in names:
            p = self._parameters[name]
            if name in self._stacked_names:
                shape = (p.shape[0] // parallel, *p.shape[1:])
                local_parameters[name] = LocalParameter(name, rank * math.prod(shape), shape)
            elif name in local_name_of:
                local_parameters[local_name_of[name]] = LocalParameter(name, 0, p.shape)
        return local_parameters

    def metadata(self, rank: int, stage: int) -> dict[str, Any]:
        """Return the entries about experts in a rank's model states."""
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
        """Return stage 3's record of the ranks that partition a sub-group; it must match the loading engine."""
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
