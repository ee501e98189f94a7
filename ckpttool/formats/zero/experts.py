"""Mixtures of experts in a source: the ranks of each expert, and its name in the whole model.

Source: DeepSpeed 0.19, moe/layer.py, moe/experts.py, utils/groups.py (``_create_expert_and_data_parallel``),
runtime/engine.py (``_save_moe_checkpoint``) and, for AutoEP, module_inject/auto_ep.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.formats.strided import box, merge_slices
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.zero.partitions import Partitions, check_same_group
from ckpttool.model import ParamGroup, State

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from ckpttool.formats.fields import Report
    from ckpttool.formats.zero.files import ZeroFiles

NATIVE = re.compile(r"(?P<layer>.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(?P<expert>\d+)\.(?P<rest>.*)")


class Experts:
    """The experts in the files of one model-parallel rank."""

    def __init__(self, files: ZeroFiles) -> None:
        self._files = files
        self._placement = {
            f"{path}.": placement
            for layer in _autoep_layers(files)
            if isinstance(path := layer.get("expert_key_prefix"), str) and (placement := _placement(layer))
        }
        """Expert numbers of each expert-parallel rank, by the name prefix of an AutoEP layer's experts."""

    def ranks(self, count: int) -> list[list[int]]:
        """List the data-parallel ranks that share each part of the experts, in the order of their partitions.

        Args:
            count: Number of ranks over which a group of experts is partitioned.

        Returns:
            For each expert-parallel rank, ``count`` data-parallel ranks.
        """
        ranks = self._files.ranks
        if ranks % count:
            problem = f"partitions experts over {count} ranks, which does not divide {ranks} ranks"
            raise LayoutError(self._files.optimizer[0].path, problem, RESTORE)
        parallel = ranks // count
        config = self._files.model[0].fields.optional("ds_config", dict) or {}
        if config.get("use_data_before_expert_parallelism"):
            return [list(range(e * count, (e + 1) * count)) for e in range(parallel)]
        return [list(range(e, ranks, parallel)) for e in range(parallel)]

    def joined(self, parts: Sequence[Partitions], what: str, report: Report) -> Partitions:
        """Merge one group of experts from its part on each expert-parallel rank.

        Raises:
            LayoutError: A parameter belongs to no expert.
        """
        check_same_group(self._files.optimizer[0], what, [p.groups[0] for p in parts], report)
        joined: dict[str, Mapping[str, State]] = {}
        stacked: dict[str, list[Mapping[str, State]]] = {}
        for rank, part in enumerate(parts):
            renamed = global_names(part.states, rank)
            for name, states in part.states.items():
                if name in renamed:
                    joined[renamed[name]] = states
                elif self._experts_of(name) is not None:
                    stacked.setdefault(name, []).append(states)
                else:
                    problem = f"partitions {name} over some of the ranks, but {name} belongs to no expert"
                    raise LayoutError(self._files.optimizer[0].path, problem, RESTORE)
        for name, ranks in stacked.items():
            joined[name] = {key: self._stacked(name, [states[key] for states in ranks]) for key in ranks[0]}
        group = parts[0].groups[0]
        return Partitions(
            states=joined,
            groups=(ParamGroup(tuple(joined), group.hyperparameters, group.scalars),),
            nonpartitionable=parts[0].nonpartitionable,
            replicas=tuple(twin for part in parts for twin in part.replicas),
        )

    def modules(self) -> dict[str, State]:
        """Locate the 16-bit copies of all experts, under their names in the whole model."""
        result: dict[str, State] = {}
        stacked: dict[str, dict[int, State]] = {}
        for expert in self._files.experts:
            for name, ref in expert.file.fields.values.items():
                if not isinstance(name, str) or not isinstance(ref, TensorRef):
                    continue
                state = whole_tensor(expert.file.torch, expert.file.file_index, ref)
                stem, _, number = name.rpartition(".")
                if self._experts_of(stem) is not None and number == str(expert.expert):
                    stacked.setdefault(stem, {})[expert.expert] = state
                elif name in result:
                    problem = f"holds {name}, which another expert's file holds too"
                    raise LayoutError(expert.file.path, problem, RESTORE)
                else:
                    result[name] = state
        for stem, experts in stacked.items():
            each = [State((1, *s.shape), s.dtype, s.place) for _, s in sorted(experts.items())]
            shape = (len(each), *each[0].shape[1:])
            placed = [(s, [box(s.shape, shape, 0, source=0, target=i)]) for i, s in enumerate(each)]
            result[stem] = merge_slices(placed, shape)
        return result

    def own(self, name: str) -> bool:
        """Whether a parameter belongs to an expert."""
        return NATIVE.fullmatch(name) is not None or self._experts_of(name) is not None

    def router_aliases(self, module: Iterable[str], trained: Container[str]) -> dict[str, str]:
        """Find the second name of each AutoEP router; the checkpoint does not record that it is tied.

        Source: DeepSpeed 0.19.8, module_inject/auto_ep_layer.py (``AutoEPMoELayer``), which keeps the router under
        its name in the original model too.
        """
        result = {}
        for name in module:
            for prefix in self._placement:
                path = prefix.removesuffix("experts.")
                router = f"{path}router.gate.{name.rpartition('.')[2]}"
                inner = name.removeprefix(path)
                tied = name.startswith(path) and name != router and name not in trained and router in trained
                if tied and re.fullmatch(r"[^.]+\.gate\.(weight|bias)", inner):
                    result[name] = router
        return result

    def _experts_of(self, name: str) -> list[list[int]] | None:
        """Return the expert numbers of each expert-parallel rank, for a parameter that stacks experts."""
        return next((p for prefix, p in self._placement.items() if name.startswith(prefix)), None)

    def _stacked(self, name: str, parts: Sequence[State]) -> State:
        placement = self._experts_of(name) or []
        total = sum(map(len, placement))
        sizes = [p.shape[0] if p.shape else 0 for p in parts]
        if sizes != [len(experts) for experts in placement]:
            problem = f"{name} has {sizes} experts on the ranks, but ds_autoep_layers says {placement}"
            raise LayoutError(self._files.optimizer[0].path, problem, RESTORE)
        shape = (total, *parts[0].shape[1:])
        placed = []
        for state, experts in zip(parts, placement, strict=True):
            boxes = [box(state.shape, shape, 0, source=i, target=expert, count=1) for i, expert in enumerate(experts)]
            placed.append((state, boxes))
        return merge_slices(placed, shape)


def global_names(names: Iterable[str], expert_rank: int) -> dict[str, str]:
    """Map the names that an expert-parallel rank uses for its experts to names in the whole model.

    Each rank numbers its experts from 0; in the whole model, the experts of rank e follow the experts of rank e - 1.

    Args:
        names: All names of the rank; names of other parameters are left out.
        expert_rank: Number of the rank.
    """
    matches = {name: match for name in names if (match := NATIVE.fullmatch(name))}
    count: dict[str, int] = {}
    for match in matches.values():
        count[match["layer"]] = max(count.get(match["layer"], 0), int(match["expert"]) + 1)
    return {
        name: f"{m['layer']}{int(m['expert']) + expert_rank * count[m['layer']]}.{m['rest']}"
        for name, m in matches.items()
    }


def with_experts(names: Sequence[str], experts: Iterable[str]) -> list[str]:
    """Insert the names of experts after the last name of their layer."""
    last: dict[str, int] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        for n in range(1, len(parts)):
            last[".".join(parts[:n])] = i
    behind: dict[int, list[str]] = {}
    for name in dict.fromkeys(experts):
        parts = name.split(".")
        nearest = (last.get(".".join(parts[:n])) for n in range(len(parts) - 1, 0, -1))
        behind.setdefault(next((i for i in nearest if i is not None), len(names) - 1), []).append(name)
    result = list(behind.get(-1, []))
    for i, name in enumerate(names):
        result += [name, *behind.get(i, [])]
    return result


def _autoep_layers(files: ZeroFiles) -> list[Mapping[str, Any]]:
    fields = files.model[0].fields
    layers = fields.values.get("ds_autoep_layers") or fields.values.get("autoep_layers") or []
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def _placement(layer: Mapping[str, Any]) -> list[list[int]]:
    """Return the expert numbers of each expert-parallel rank."""
    placement = layer.get("expert_placement")
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if isinstance(ranks, list) and all(isinstance(r, dict) and isinstance(r.get("experts"), list) for r in ranks):
        experts = [r["experts"] for r in ranks]
        numbers = [n for own in experts for n in own]
        fits = all(type(n) is int and 0 <= n < len(numbers) for n in numbers)
        return experts if fits else []
    size, local = layer.get("ep_size"), layer.get("num_local_experts")
    if isinstance(size, int) and isinstance(local, int) and 0 < size * local <= 1 << 20:
        return [list(range(e * local, (e + 1) * local)) for e in range(size)]
    return []


def local_names(names: Iterable[str], expert_rank: int, parallel: int) -> dict[str, str]:
    """Map the names that an expert-parallel rank uses to the names of its experts in the whole model.

    Args:
        names: All experts' parameters, under their names in the whole model.
        expert_rank: The rank.
        parallel: Number of expert-parallel ranks.
    """
    matches = {name: match for name in names if (match := NATIVE.fullmatch(name))}
    count: dict[str, int] = {}
    for match in matches.values():
        count[match["layer"]] = max(count.get(match["layer"], 0), int(match["expert"]) + 1)
    result = {}
    for name, m in matches.items():
        local = count[m["layer"]] // parallel
        rank, number = divmod(int(m["expert"]), max(local, 1))
        if rank == expert_rank:
            result[f"{m['layer']}{number}.{m['rest']}"] = name
    return result
