"""The parameter groups of a native checkpoint: their order, their types and the ranks that share them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.formats.zero.round_robin import round_robin
from ckpttool.model import MASTER, MODULE, UNKNOWN_GROUP, ParamGroup
from ckpttool.targets.zero.experts import TargetExperts
from ckpttool.targets.zero.layout import FlatGroup, sub_groups
from ckpttool.targets.zero.shape import SUB_GROUP_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint, State
    from ckpttool.targets.zero.experts import Share
    from ckpttool.targets.zero.layout import Fragment
    from ckpttool.targets.zero.shape import Shape

RELEASE = "0.19.8"
"""Version of DeepSpeed in the files if the source has none."""

_OF_THIN = "consolidate it to safetensors and convert that, or load its weights into an engine with weights_only=True"


def _one_group(checkpoint: Checkpoint) -> tuple[ParamGroup, ...]:
    """Return one group of all parameters for a weights-only source; else nothing."""
    names = tuple(p.name for p in checkpoint.parameters)
    weights_alone = all(p.group == UNKNOWN_GROUP and set(p.states) <= {MODULE} for p in checkpoint.parameters)
    if checkpoint.native or not weights_alone or not names:
        return ()
    return (ParamGroup(names, {}, {}),)


class TargetGroups:
    """The parameter groups of a native checkpoint, partitioned over the ranks of the target.

    Args:
        checkpoint: The source.
        shape: Ranks and stage of the target.
        fresh: Parameters whose states the source lacks in part or wholly; the missing states stay zero.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, shape: Shape, fresh: frozenset[str] = frozenset()) -> None:
        self.checkpoint = checkpoint
        self.shape = shape
        self.fresh = fresh
        self.parameters = {p.name: p for p in checkpoint.parameters}
        self.source_groups = checkpoint.groups or _one_group(checkpoint)
        """The parameter groups of the source; one group of all parameters for a weights-only source."""
        self.names = [self._names(group) for group in self.source_groups]
        """For each group: names of its parameters in the whole model."""
        self.keys = [self._keys(names) for names in self.names]
        """For each group: names of the optimizer's states."""
        self._check()
        self.experts = TargetExperts(checkpoint, shape.ranks, shape.expert_parallel)
        self.shares = [self.experts.shares(g, n) for g, n in zip(self.source_groups, self.names, strict=True)]
        """For each group: the sets of ranks that partition it; one set of all ranks, except for experts."""
        self.groups = [self._order(shares[0]) for shares in self.shares]
        """For each group: local names of its parameters, in the order of the target's flat buffer."""
        sizes = [
            {name: shares[0].parameters[name].numel for name in names}
            for shares, names in zip(self.shares, self.groups, strict=True)
        ]
        counts = [len(shares[0].ranks) for shares in self.shares]
        pairs = list(zip(sizes, counts, strict=True))
        self.flat = [FlatGroup(group_sizes, count, shape.alignment) for group_sizes, count in pairs]
        """For each group: its flat buffer, at stages 1 and 2."""
        self.subs = [list(sub_groups(group_sizes, count, shape.sub_group_size)) for group_sizes, count in pairs]
        """For each group: its sub-groups, at stage 3."""

    def _check(self) -> None:
        checkpoint = self.checkpoint
        if not any(self.names):
            if checkpoint.thin:
                raise PlanError(checkpoint.location, "is thin: it does not record the trained parameters", _OF_THIN)
            hint = "convert a checkpoint that was saved with its optimizer"
            raise PlanError(checkpoint.location, "does not record the trained parameters", hint)
        if checkpoint.nonpartitionable:
            problem = f"holds states that cannot be re-partitioned: {', '.join(checkpoint.nonpartitionable[:5])}"
            raise PlanError(
                checkpoint.location, problem, "resume on the same number of ranks, or consolidate the weights"
            )
        if self.shape.stage == 3:
            self._check_stage3()

    def _check_stage3(self) -> None:
        checkpoint = self.checkpoint
        unclear = [p.name for p in checkpoint.parameters if p.frozen] if not checkpoint.tells_buffers else []
        if unclear:
            problem = f"does not say whether {unclear[0]} is a frozen parameter or a buffer: stage 3 distinguishes them"
            hint = "name the buffers with buffers, choose stage 1 or 2, or convert the checkpoint that it was made from"
            raise PlanError(checkpoint.location, problem, hint, ("buffers", "stage"))
        if any(NATIVE.fullmatch(p.name) for p in checkpoint.parameters):
            problem = "trains DeepSpeed's own mixture of experts, which has no stage 3"
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))
        int8 = [p.name for p in checkpoint.parameters if p.frozen and p.numel and p.module_state.dtype == "I8"]
        if int8:
            problem = (
                f"has frozen parameter {int8[0]} in int8: at stage 3 it looks like a parameter that ZeRO++ quantised "
                "without saving its scale"
            )
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))
        without_elements = [n for names in self.names for n in names if self.parameters[n].numel == 0]
        if without_elements:
            problem = f"trains {without_elements[0]}, which has no elements: stage 3 cannot hold it"
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))

    def _names(self, group: ParamGroup) -> list[str]:
        return [n for n in group.parameters if self.parameters[n].numel or self.shape.stage == 3]

    def _order(self, share: Share) -> list[str]:
        """Return the local names of a group in the order of the target's flat buffer."""
        names = list(share.parameters)
        return round_robin(names, len(share.ranks)) if self.shape.round_robin and self.shape.stage < 3 else names

    def place(self, group: int, rank: int) -> tuple[Share, int]:
        """Return the share of a group that contains a rank, and the index of the rank in it."""
        share = next(s for s in self.shares[group] if rank in s.ranks)
        return share, share.ranks.index(rank)

    def _keys(self, names: Sequence[str]) -> list[str]:
        names = [n for n in names if n not in self.fresh]
        states = [set(self.parameters[n].optimizer_states) for n in names]
        for name, keys in zip(names, states, strict=True):
            without_master = self.checkpoint.groups and MASTER not in self.parameters[name].states
            if keys != states[0] or without_master:
                state = sorted(keys ^ states[0])[0] if keys != states[0] else "master"
                problem = f"has {state} of only one of {name} and {names[0]}, which are in one group"
                raise PlanError(self.checkpoint.location, problem, "convert a checkpoint saved with its optimizer")
        return [k for k in self.parameters[names[0]].states if k in states[0]] if names else []

    def dtype(self, names: Sequence[str], key: str) -> str:
        """Return the dtype of one state of a group's parameters.

        Raises:
            PlanError: The parameters have different dtypes.
        """
        if key == MASTER and not self.checkpoint.groups:
            return "F32"
        dtypes = {self.parameters[n].states[key].dtype for n in names if key in self.parameters[n].states}
        if len(dtypes) > 1 and key == MASTER and not self.fresh.isdisjoint(names):
            return "F32"  # some weights have only a 16-bit copy
        if len(dtypes) > 1:
            raise PlanError(
                self.checkpoint.location,
                f"has {key} of several dtypes in one group: {', '.join(sorted(dtypes))}",
                "convert a checkpoint saved with one dtype",
            )
        return dtypes.pop() if dtypes else "F32"

    @property
    def release(self) -> str:
        """Version of DeepSpeed in the files."""
        return self.checkpoint.deepspeed_version or RELEASE

    def config(self) -> dict[str, Any]:
        """Return the source's configuration with the target's partitioning."""
        config = dict(self.checkpoint.ds_config)
        zero = config.get("zero_optimization")
        zero = {**zero} if isinstance(zero, dict) else {}
        zero["stage"] = self.shape.stage
        if self.shape.stage < 3 and (self.shape.round_robin or "round_robin_gradients" in zero):
            zero["round_robin_gradients"] = self.shape.round_robin
        if self.shape.stage == 3 and self.shape.sub_group_size != SUB_GROUP_SIZE:
            zero["sub_group_size"] = self.shape.sub_group_size
        config["zero_optimization"] = zero
        return config

    @functools.cached_property
    def fragments(self) -> list[list[list[Fragment]]]:
        """For each group and rank: the fragments in the rank's partition, at stages 1 and 2."""
        return [g.fragments() for g in self.flat]

    def state(self, name: str, key: str) -> State:
        """Return a state of a parameter; for weights-only sources, the weights serve as fp32 master weights.

        Stage 3 has no module copies: copies newer than the master weights are written in their place.
        """
        parameter = self.parameters[name]
        if key == MASTER and self.checkpoint.has_newer_copies and self.shape.stage == 3:
            return self.checkpoint.weights(parameter)
        return parameter.states.get(key) or parameter.module_state
