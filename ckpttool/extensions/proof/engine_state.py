"""The live state of a DeepSpeed engine on this rank, as parts of whole tensors, without gathering any.

A save digests the same parts from the bytes that it writes, which are a copy of the state if it runs in the background.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``update_lp_params``), runtime/bf16_optimizer.py,
runtime/zero/stage3.py (``set_grad_positions``) and runtime/fp16/fused_optimizer.py.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpttool.errors import PlanError
from ckpttool.extensions.proof.live_state import (
    LiveState,
    SavedDigests,
    number_of,
    options_of,
    scheduler_values,
    type_of,
)
from ckpttool.extensions.proof.rank_digest import MOMENTUM, OF_OTHER_FORM
from ckpttool.extensions.proof.state_digest import GATHERED, MICRO_BATCHES, SCALE, SCALER
from ckpttool.integrations.deepspeed.engine import (
    OFFLOAD,
    has_optimizer,
    inspect_engine,
    micro_batches,
    shape_of,
    whole_layers,
)
from ckpttool.integrations.torch.digest import tensor_text
from ckpttool.integrations.torch.live import Piece, wrapped_class
from ckpttool.model import MODULE
from ckpttool.model.items import NOT_COMPARED, STEP, WEIGHTS, canonical
from ckpttool.model.names import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.deepspeed.prepared import Prepared
    from ckpttool.integrations.deepspeed.run import CapturedEngine
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.saving.files import Payload

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of an engine that a load restores."""


def unprovable(live: LiveEngine) -> str:
    """Return why the parts of an engine's state cannot be located in whole tensors; "" if they can."""
    engine = live.engine
    kinds = {cls.__name__ for module in engine.module.modules() for cls in type(module).__mro__}
    reasons = {
        "a pipeline": live.model is None,
        "tensor parallelism": live.topology.tensor_parallel > 1,
        "stacked experts": engine.has_moe_layers and "AutoEPMoELayer" in kinds,
        "ZenFlow, whose module is newer than its masters": bool(getattr(engine, "zenflow", False)),
        "optimizer states on NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "weights on NVMe": any(
            p.ds_tensor.status.name != "AVAILABLE" for p in engine.module.parameters() if hasattr(p, "ds_tensor")
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_provable(live: LiveEngine) -> None:
    """Check that the state of an engine can be digested in place.

    Raises:
        PlanError: It cannot.
    """
    if why := unprovable(live):
        raise PlanError("the engine", f"has {why}: its state cannot be digested in place", "leave out prove")


def live_state(live: LiveEngine) -> LiveState:
    """Return the live state of an engine on this rank.

    Raises:
        PlanError: The engine has a form whose parts cannot be located.
    """
    check_provable(live)
    if live.model is None:
        raise PlanError("the engine", "has no names of parameters", "this is a bug in ckpttool")
    reader = _Reader(live)
    reader.read_weights()
    if has_optimizer(live.optimizer):
        reader.read_optimizer()
    engine = live.engine
    values = {name: canonical(getattr(engine, name)) for name in COUNTERS if hasattr(engine, name)}
    values |= scheduler_values(engine.lr_scheduler)
    # The place in ZeRO; in wrappers without ZeRO; and in older wrappers.
    owners = [getattr(live.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
    owners.append(live.optimizer)
    scaler = next((s for s in owners if getattr(s, "cur_scale", None) is not None), None)
    if live.dtype != "F16" and scaler is not None and scaler.cur_scale != 1:
        values[SCALE] = canonical(scaler.cur_scale, tensor_text)
    elif live.dtype == "F16":
        held = {key: getattr(scaler, key, None) for key in SCALER}
        values |= {f"loss_scale.{key}": canonical(v, tensor_text) for key, v in held.items() if v is not None}
    groups = {reader.name_of(name): number for number, names in enumerate(live.model.groups) for name in names}
    options = [options_of(group) for group in live.hyperparameters]
    count = micro_batches(engine)
    values |= {MICRO_BATCHES: canonical(count)} if count else {}
    aliases = {plain_name(alias): reader.name_of(name) for alias, name in live.model.aliases.items()}
    values |= {} if live.partitions_states else reader.values
    return LiveState(
        pieces=reader.pieces,
        numbers=reader.numbers,
        types=reader.types,
        groups=options,
        group_of=groups,
        values=values,
        own=reader.values if live.partitions_states else {},
        aliases=aliases,
        unproven=reader.unproven,
        partitioned=live.partitions_states,
        frozen=[name for name, p in reader.parameters.items() if not p.requires_grad],
        ungrouped=[name for name, p in reader.parameters.items() if p.requires_grad and name not in groups],
        trains=has_optimizer(live.optimizer),
        pending=f"the gradients of {count} micro batches since the last step" if count else "",
        others=live.model.others,
    )


def saved_digests(captured: CapturedEngine, save: Save, rank_state: Any, rank: int, *, waits: bool) -> SavedDigests:
    """Return the digests that a save records, of the bytes that this rank writes.

    Replicas that another rank writes are left out. Parts that no file contains as they are, are read from the live
    state, but not the module's copies of stage 3 if the train loop continues, which a load makes from the masters.

    Raises:
        PlanError: The engine has a form whose parts cannot be located.
    """
    with whole_layers(captured.live.engine):
        state = live_state(captured.live).with_given(save.client_state, rank_state)
    left_out = {*state.frozen} if save.exclude_frozen else set()
    memory = sorted(captured.memory, key=lambda held: held[0])
    pieces: list[Piece] = []
    held: dict[int, Piece] = {}
    for piece in state.pieces:
        whole = piece.tensor.numel() == math.prod(piece.shape)
        if piece.name in left_out or piece.key == GATHERED or not (piece.tensor.numel() or whole):
            continue
        if (copy := _in_file(piece, memory)) is not None:
            held[len(pieces)] = copy
        elif (whole and rank and not (piece.is_buffer or _EXPERT.fullmatch(piece.name))) or (
            piece.key == MODULE and not waits
        ):
            continue
        pieces.append(piece)
    return SavedDigests(replace(state, pieces=pieces), held, {}, waits=waits)


def _in_file(piece: Piece, memory: Sequence[tuple[int, Payload]]) -> Piece | None:
    """Return a part with its captured bytes; None if they were not captured."""
    tensor = piece.tensor
    index = bisect.bisect_right(memory, tensor.data_ptr(), key=lambda held: held[0]) - 1
    if index < 0 or not tensor.numel() or not tensor.is_contiguous():
        return None
    address, payload = memory[index]
    start, nbytes = tensor.data_ptr() - address, tensor.numel() * tensor.element_size()
    if start + nbytes > payload.nbytes:
        return None
    return replace(piece, tensor=torch.frombuffer(payload.read(start, start + nbytes), dtype=tensor.dtype))


def is_on_accelerator(live: LiveEngine) -> bool:
    """Return whether the state of an engine is on an accelerator, and can be digested in place."""
    return live.engine.device.type != "cpu" and not unprovable(live)


def read_again(live: LiveEngine) -> LiveState:
    """Return the live state of an engine whose hyper-parameters a load has changed."""
    return live_state(inspect_engine(live.engine))


def left_out(live: LiveEngine, prepared: Prepared, report: LoadReport) -> tuple[set[str], set[str]]:
    """Return the kinds of state that a load did not restore, and the states that it rounded."""
    without = {"module"} if live.dtype != prepared.checkpoint.dtype else set()
    without |= set() if report.scheduler else {"scheduler"}
    without |= set() if report.loss_scale else {"loss_scale"}
    return without, set()


class _Reader:
    """Collects the parts of an engine's state."""

    def __init__(self, live: LiveEngine) -> None:
        self.live = live
        self.pieces: list[Piece] = []
        self.numbers: dict[str, dict[str, float]] = {}
        self.types: dict[str, dict[str, str]] = {}
        self.unproven: dict[str, str] = {}
        self.values: dict[str, str] = {}
        """Other states, such as the blocks of an 8-bit optimizer: of this rank, if the states are partitioned."""
        self.parameters = {self.name_of(name): p for name, p in live.parameters().items()}
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._shapes = {name: shape_of(p) for name, p in self.parameters.items()}
        trained = live.model.groups if live.model is not None else ()
        self._trained = {self.name_of(name) for names in trained for name in names}

    def name_of(self, name: str) -> str:
        """Return the name of a parameter in checkpoints, where experts are numbered over all ranks."""
        found = _EXPERT.fullmatch(name)
        if not found:
            return plain_name(name)
        from deepspeed.utils import groups

        layer = self.live.engine.module.get_submodule(found[1].split(".deepspeed_moe.")[0] + ".deepspeed_moe")
        local = len(layer.experts.deepspeed_experts)
        kind = getattr(layer.experts.deepspeed_experts[0], "group_name", None) or self._expert_group(layer)
        rank = groups._get_expert_parallel_rank(kind)
        return f"{found[1]}{rank * local + int(found[2])}{found[3]}"

    def _name(self, parameter: Any) -> str:
        """Return the name of a parameter of the optimizer."""
        if id(parameter) not in self._names:
            problem = (
                f"has an optimizer with a parameter of shape {[*shape_of(parameter)]} that its module does not have"
            )
            hint = "build a new engine: something, such as load_state_dict(assign=True), has replaced the parameter"
            raise PlanError("the engine", problem, hint)
        return self._names[id(parameter)]

    @staticmethod
    def _expert_group(layer: Any) -> str:
        return str(next(p.group_name for p in layer.experts.parameters()))

    def read_weights(self) -> None:
        """Collect the module's weights, and its buffers."""
        masters = self.live.partitions_states or bool(self.live.wrapper and self.live.wrapper != OFFLOAD)
        for name, parameter in self.parameters.items():
            key = MODULE if masters and name in self._trained else WEIGHTS
            if not hasattr(parameter, "ds_tensor"):
                self.pieces.append(Piece(key, name, parameter.data, tuple(parameter.shape), 0))
                continue
            own = parameter.ds_tensor
            rank = dist.get_rank(parameter.ds_process_group)
            self._partition(key, name, own.data.reshape(-1), rank * own.ds_numel)
            if getattr(parameter, "ds_persist", False) and parameter.ds_status.name == "AVAILABLE":
                self.pieces.append(Piece(GATHERED, name, parameter.data, self._shapes[name], 0))
        for name, buffer in self.live.buffers().items():
            self.pieces.append(Piece(WEIGHTS, plain_name(name), buffer.data, tuple(buffer.shape), 0, is_buffer=True))

    def read_optimizer(self) -> None:
        """Collect the master weights, and the states of the optimizer."""
        wrapper, optimizer = self.live.wrapper, self.live.optimizer
        inner = optimizer.optimizer if wrapper else optimizer
        if not wrapper:
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if id(parameter) in self._names:
                    name = self._names[id(parameter)]
                    self._states(inner.state.get(parameter, {}), parameter, [(name, 0, parameter.numel(), 0)], name)
            self._count_by_groups(inner, self._names)
            return
        flats = list(self._flats())
        for flat, parts in flats if self.live.partitions_states else ():
            if flat.dim() != 1:
                problem = f"has a partition of its masters in the shape {[*flat.shape]}, which is not flat"
                raise PlanError("the engine", problem, "build a new engine, and load again")
            states = inner.state.get(flat, {})
            odd = [k for k, value in states.items() if value is not None and not self._fits(k, value, flat, parts)]
            self.unproven |= dict.fromkeys(odd, OF_OTHER_FORM)
        for number, (flat, parts) in enumerate(flats):
            for name, start, numel, first in parts:
                self._partition(WEIGHTS, name, flat.detach().reshape(-1)[start : start + numel], first)
            self._states(inner.state.get(flat, {}), flat, parts, f"partition {number}")
        if not self.live.partitions_states:
            self._count_by_groups(inner, {id(flat): parts[0][0] for flat, parts in flats if len(parts) == 1})

    def _count_by_groups(self, optimizer: Any, names: Mapping[int, str]) -> None:
        """Give each parameter the largest step of a group that has one: FusedAdam counts in the last parameter.

        Args:
            optimizer: The optimizer.
            names: Names of the parameters by the identities of the tensors in its groups.

        Source: DeepSpeed 0.19.8, ops/adam/fused_adam.py and ops/lion/fused_lion.py (``step``).
        """
        steps = self.numbers.get(STEP, {})
        for group in optimizer.param_groups:
            own = [name for p in group["params"] if (name := names.get(id(p))) in steps]
            if STEP in group and own:
                steps.update(dict.fromkeys(own, max(steps[name] for name in own)))

    def _flats(self) -> Iterator[tuple[Any, list[tuple[str, int, int, int]]]]:
        """Yield this rank's masters, each with its parts: name, start and elements in it, first of the parameter."""
        optimizer = self.live.optimizer
        if self.live.wrapper == "DeepSpeedZeroOptimizer_Stage3":
            for flat, group in zip(self.live.masters, optimizer.fp16_groups, strict=True):
                parts, at = [], 0
                for p in group:
                    size = int(p.partition_numel())
                    parts.append((self._name(p), at, size, dist.get_rank(p.ds_process_group) * size))
                    at += size
                yield flat, parts
        elif self.live.partitions_states:
            old = self.live.wrapper == "BF16_Optimizer"
            whole = optimizer.bf16_groups if old else optimizer.round_robin_bit16_groups
            cut = optimizer.bf16_partitioned_groups if old else optimizer.parallel_partitioned_bit16_groups
            groups = optimizer.real_dp_process_group
            padded = getattr(optimizer, "round_robin_bit16_offsets", None) or [()] * len(whole)
            for number, master in enumerate(self.live.masters):
                size = cut[number][0].numel()
                low = dist.get_rank(groups[number]) * size
                yield master, self._overlaps(whole[number], low, size, padded[number])
        elif self.live.wrapper == "FP16_Optimizer":
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                yield flat, self._overlaps(group, 0, flat.numel())
        else:
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for p, master in zip(group, masters, strict=True):
                    yield master, [(self._name(p), 0, p.numel(), 0)]

    def _overlaps(
        self, group: Sequence[Any], low: int, size: int, places: Sequence[int] = ()
    ) -> list[tuple[str, int, int, int]]:
        """Return the parts of a group's parameters in a partition of their flat buffer.

        A partition of padding alone has an empty part of the last parameter, whose states it counts with.
        ``_hp_mapping`` is wrong for round-robin gradients; a parameter may have left the buffer until the next step.
        ``places`` are the indexes of the parameters' first elements, if there is padding between them.
        """
        parts = []
        for p, at in zip(group, places or accumulate((p.numel() for p in group), initial=0), strict=False):
            first, last = max(at, low), min(at + p.numel(), low + size)
            if first < last:
                parts.append((self._name(p), first - low, last - first, first - at))
        return parts or [(self._name(p), 0, 0, 0) for p in group[-1:]]

    def _states(
        self, states: Mapping[str, Any], owner: Any, parts: list[tuple[str, int, int, int]], label: str
    ) -> None:
        """Collect the states of a master, or of a parameter, for each of its parts; other states as values."""
        for key, value in states.items():
            number = number_of(key, value, owner)
            if number is not None:
                self.numbers.setdefault(key, {}).update({name: number for name, *_ in parts})
                if isinstance(value, torch.Tensor):  # a load makes a number of a tensor, and DeepSpeed counts with both
                    self.types.setdefault(key, {}).update({name: type_of(value) for name, *_ in parts})
            elif isinstance(value, torch.Tensor) and wrapped_class(value):
                self.values[f"{key}.{label}"] = f"{NOT_COMPARED}{wrapped_class(value)}"
            elif key not in self.unproven and self._fits(key, value, owner, parts):
                for name, start, numel, first in parts:
                    self._partition(key, name, value.detach().reshape(-1)[start : start + numel], first)
            elif isinstance(value, torch.Tensor) and len(parts) == 1 and not self.live.partitions_states:
                self.pieces.append(Piece(key, parts[0][0], value.detach(), tuple(value.shape), 0))
            elif value is not None:
                self.values[f"{key}.{label}"] = canonical(value, tensor_text)

    @staticmethod
    def _fits(key: str, value: Any, owner: Any, parts: list[tuple[str, int, int, int]]) -> bool:
        """Return whether a state is a number, or has an element for each one of the master or of its parts."""
        if number_of(key, value, owner) is not None:
            return True
        if not isinstance(value, torch.Tensor) or wrapped_class(value):
            return False
        used = max((start + numel for _, start, numel, _ in parts), default=0)
        return value.shape == owner.shape or (key == MOMENTUM and value.numel() in {owner.numel(), used})

    def _partition(self, key: str, name: str, values: Any, first: int) -> None:
        """Add a run of a parameter's elements, without the padding at its end."""
        shape = self._shapes[name]
        count = max(0, min(len(values), math.prod(shape) - first))
        self.pieces.append(Piece(key, name, values[:count], shape, first if count else 0))
