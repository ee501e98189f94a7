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
"""Release that the files name where the source names none."""


def _one_group(checkpoint: Checkpoint) -> tuple[ParamGroup, ...]:
    """One group of all parameters, for weights-only sources."""
    names = tuple(p.name for p in checkpoint.parameters)
    weights_alone = all(p.group == UNKNOWN_GROUP and set(p.states) <= {MODULE} for p in checkpoint.parameters)
    if checkpoint.native or not weights_alone or not names:
        return ()
    return (ParamGroup(names, {}, {}),)


class TargetGroups:
    """The parameter groups of a native checkpoint, and the part of each rank.

    Args:
        checkpoint: The source.
        shape: Ranks and stage of the target.
        fresh: Parameters that the source lacks in part or wholly: their missing states stay zero.

    Raises:
        PlanError: The source lacks what a ZeRO checkpoint needs.
    """

    def __init__(self, checkpoint: Checkpoint, shape: Shape, fresh: frozenset[str] = frozenset()) -> None:
        self.checkpoint = checkpoint
        self.shape = shape
        self.fresh = fresh
        self.parameters = {p.name: p for p in checkpoint.parameters}
        self.source_groups = checkpoint.groups or _one_group(checkpoint)
        """The parameter groups; of weights alone, one of all."""
        self.names = [self._names(group) for group in self.source_groups]
        """Names of every group, in the whole model."""
        self.keys = [self._keys(names) for names in self.names]
        """Names of the optimizer's states of every group."""
        self._check()
        self.experts = TargetExperts(checkpoint, shape.ranks, shape.expert_parallel)
        self.shares = [self.experts.shares(g, n) for g, n in zip(self.source_groups, self.names, strict=True)]
        """Ranks that share every group: all ranks, except for experts."""
        self.groups = [self._order(shares[0]) for shares in self.shares]
        """Names of every group in the order of the target's flat buffers, as a rank knows them."""
        sizes = [
            {name: shares[0].parameters[name].numel for name in names}
            for shares, names in zip(self.shares, self.groups, strict=True)
        ]
        counts = [len(shares[0].ranks) for shares in self.shares]
        pairs = list(zip(sizes, counts, strict=True))
        self.flat = [FlatGroup(group_sizes, count, shape.alignment) for group_sizes, count in pairs]
        """The flat buffer of every group, at stages 1 and 2."""
        self.subs = [list(sub_groups(group_sizes, count, shape.sub_group_size)) for group_sizes, count in pairs]
        """The sub-groups of every group, at stage 3."""

    def _check(self) -> None:
        c = self.checkpoint
        if not any(self.names):
            hint = "convert a checkpoint that was saved with its optimizer"
            raise PlanError(c.location, "does not say what the optimizer trains", hint)
        if c.nonpartitionable:
            problem = f"holds states that cannot be re-partitioned: {', '.join(c.nonpartitionable[:5])}"
            raise PlanError(c.location, problem, "resume on the same number of ranks, or consolidate the weights")
        if self.shape.stage == 3:
            self._check_stage3()

    def _check_stage3(self) -> None:
        c = self.checkpoint
        others = [p.name for p in c.parameters if p.frozen] if not c.tells_buffers else []
        if others:
            problem = f"does not say whether {others[0]} is a frozen parameter or a buffer, which stage 3 keeps apart"
            hint = "choose stage 1 or 2, or convert the checkpoint that it was made from"
            raise PlanError(c.location, problem, hint, ("stage",))
        if any(NATIVE.fullmatch(p.name) for p in c.parameters):
            problem = "trains DeepSpeed's own mixture of experts, which has no stage 3"
            raise PlanError(c.location, problem, "choose stage 1 or 2", ("stage",))
        int8 = [p.name for p in c.parameters if p.frozen and p.numel and p.module_state.dtype == "I8"]
        if int8:
            problem = (
                f"has frozen parameter {int8[0]} in int8, which at stage 3 cannot be told from one that ZeRO++ "
                "quantised without saving its scale"
            )
            raise PlanError(c.location, problem, "choose stage 1 or 2", ("stage",))
        empty = [n for names in self.names for n in names if self.parameters[n].numel == 0]
        if empty:
            raise PlanError(c.location, f"trains {empty[0]}, which has no elements", "stage 3 cannot hold it")

    def _names(self, group: ParamGroup) -> list[str]:
        return [n for n in group.parameters if self.parameters[n].numel or self.shape.stage == 3]

    def _order(self, share: Share) -> list[str]:
        """The parameters of a group in the order of the target's flat buffer."""
        names = list(share.parameters)
        return round_robin(names, len(share.ranks)) if self.shape.round_robin and self.shape.stage < 3 else names

    def place(self, group: int, rank: int) -> tuple[Share, int]:
        """The share of a group that a rank has a part of, and the number of that part."""
        share = next(s for s in self.shares[group] if rank in s.ranks)
        return share, share.ranks.index(rank)

    def _keys(self, names: Sequence[str]) -> list[str]:
        names = [n for n in names if n not in self.fresh]
        states = [set(self.parameters[n].optimizer_states) for n in names]
        for name, keys in zip(names, states, strict=True):
            without_master = self.checkpoint.groups and MASTER not in self.parameters[name].states
            if keys != states[0] or without_master:
                state = sorted(keys ^ states[0])[0] if keys != states[0] else "master"
                problem = f"has {state} of {name} or of {names[0]}, but not of both, though they are in one group"
                raise PlanError(self.checkpoint.location, problem, "convert a checkpoint saved with its optimizer")
        return [k for k in self.parameters[names[0]].states if k in states[0]] if names else []

    def dtype(self, names: Sequence[str], key: str) -> str:
        """Type of a state of a group's parameters.

        Raises:
            PlanError: The parameters have it in different types.
        """
        if key == MASTER and not self.checkpoint.groups:
            return "F32"
        dtypes = {self.parameters[n].states[key].dtype for n in names if key in self.parameters[n].states}
        if len(dtypes) > 1 and key == MASTER and not self.fresh.isdisjoint(names):
            return "F32"  # weights of which there is a 16-bit copy alone
        if len(dtypes) > 1:
            raise PlanError(
                self.checkpoint.location,
                f"has {key} in {sorted(dtypes)} in one group",
                "convert a checkpoint saved with one type",
            )
        return dtypes.pop() if dtypes else "F32"

    @property
    def release(self) -> str:
        """Version of DeepSpeed that the files name."""
        return self.checkpoint.deepspeed_version or RELEASE

    def config(self) -> dict[str, Any]:
        """The source's configuration, with the target's partitioning."""
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
        """The fragments in each rank's partition of every group, at stages 1 and 2."""
        return [g.fragments() for g in self.flat]

    def state(self, name: str, key: str) -> State:
        """A state of a parameter; for weights-only sources, the weights in the place of the master.

        Stage 3 keeps no module copies: if they are newer than the masters, they are written as masters.
        """
        parameter = self.parameters[name]
        if key == MASTER and self.checkpoint.has_newer_copies and self.shape.stage == 3:
            return self.checkpoint.weights(parameter)
        return parameter.states.get(key) or parameter.module_state
