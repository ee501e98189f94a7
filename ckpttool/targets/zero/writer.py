"""Checkpoint -> plan of the files that DeepSpeed's plain ``load_checkpoint`` reads on so many ranks.

Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_checkpoint``, ``_save_zero_checkpoint``, ``load_checkpoint``),
runtime/zero/stage_1_and_2.py (``state_dict``, ``_rigid_load_state_dict``) and runtime/zero/stage3.py
(``_rigid_state_dict``, ``_rigid_load_state_dict``).
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.containers.values import Opaque, OrderedDict, Size, TensorRef, TorchDType, walk
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.errors import PlanError
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.formats.zero.round_robin import round_robin
from ckpttool.model import AHEAD, MASTER, MODULE, UNKNOWN_GROUP, ParamGroup
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder, Piece
from ckpttool.plan.copy_checks import sample_proofs
from ckpttool.targets.torch_file import TorchFileBuilder, plain_file, view
from ckpttool.targets.zero.experts import Experts, Held, Share
from ckpttool.targets.zero.layout import FlatGroup, Fragment, piece, sub_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.model import Checkpoint, Parameter, ScalarState, State
    from ckpttool.plan import TargetFile

LATEST = "latest"
MAX_RANKS = 1 << 20
"""No run has more."""
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default."""
RELEASE = "0.19.8"
"""What files say they were written by where the source does not say it."""
LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
MUON = "momentum_buffer"
"""Of which, at stages 1 and 2, every rank holds the whole of each matrix that its partition touches."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What to write."""

    ranks: int
    """Data-parallel ranks."""
    stage: int
    """1, 2 or 3."""
    sub_group_size: int
    """Elements of each rank at which a flat buffer of stage 3 is closed."""
    round_robin: bool
    """Whether the target run has ``round_robin_gradients``."""
    dtype: str
    """What the target run computes in, safetensors' spelling."""
    expert_parallel: int | None = None
    """Ranks that experts are spread over; None for as many as they were."""
    alignment: int = 1
    """Elements that the place of every parameter in a flat buffer of stages 1 and 2 is a multiple of."""


def plan_zero(checkpoint: Checkpoint, shape: Shape, *, tag: str) -> CopyPlan:
    """Plan a native checkpoint: every rank's files under ``tag``, and ``latest``.

    Args:
        checkpoint: Any source that holds an optimizer's parameter groups.
        shape: Ranks and stage.
        tag: Name of the checkpoint.

    Raises:
        PlanError: The source lacks what a ZeRO checkpoint needs.
    """
    _check_hyperparameters(checkpoint)
    writer = _Writer(checkpoint, shape, tag)
    files = [*writer.optimizer_files(), *writer.model_files(), plain_file(LATEST, tag.encode())]
    return CopyPlan(writer.copies.sources, writer.copies.casts, tuple(files), sample_proofs(checkpoint))


def _check_hyperparameters(checkpoint: Checkpoint) -> None:
    """DeepSpeed's load replaces the run's parameter groups by those of the file, whatever these lack.

    Source: torch 2.13, optim/optimizer.py (``load_state_dict``).
    """
    for number, group in enumerate(checkpoint.groups):
        if group.parameters and not group.hyperparameters:
            problem = (
                f"holds no hyper-parameters (lr, betas, ...) of group {number}, as is the way of elastic_checkpoint: "
                "a run that loads the result could not take a step"
            )
            hint = "resume with ckpttool.load(engine, ...), or convert --to universal: both keep the run's own"
            raise PlanError(checkpoint.location, problem, hint)
        lost = [key for key, v in group.hyperparameters.items() if any(isinstance(x, TensorRef) for x in walk(v))]
        if lost:
            problem = f"holds hyper-parameter {lost[0]} of group {number} as a tensor of several numbers"
            raise PlanError(checkpoint.location, problem, "resume on the same number of ranks")


def plan_rank(
    checkpoint: Checkpoint, shape: Shape, rank: int, *, tag: str, fresh: frozenset[str] = frozenset()
) -> CopyPlan:
    """Plan what one rank alone needs of a native checkpoint: its partition, and the structure of its model states.

    What all ranks hold alike is left out: weights that follow from the masters, buffers and, below stage 3, frozen
    parameters.

    Args:
        checkpoint: As for ``plan_zero``.
        shape: Ranks and stage.
        rank: The data-parallel rank.
        tag: Name of the checkpoint.
        fresh: Parameters that the checkpoint lacks in part or wholly: what it lacks of them stays zero.

    Returns:
        A plan of two files: optimizer states, model states.

    Raises:
        PlanError: The source lacks what a ZeRO checkpoint needs.
    """
    writer = _Writer(checkpoint, shape, tag, fresh)
    files = (writer.optimizer_file(rank), writer.model_file(rank, shared=False))
    return CopyPlan(writer.copies.sources, writer.copies.casts, files)


def held_by(checkpoint: Checkpoint, shape: Shape, rank: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The parameters of every group as one rank of the target knows them, in the optimizer's order, and their shapes.

    Raises:
        PlanError: The source lacks what a ZeRO checkpoint needs.
    """
    writer = _Writer(checkpoint, shape, "")
    return [
        [(own, held.shape) for own, held in writer.place(g, rank)[0].held.items()] for g in range(len(writer.groups))
    ]


def shape_for(
    checkpoint: Checkpoint,
    *,
    ranks: int | None,
    stage: int | None,
    sub_group_size: int | None,
    round_robin: bool | None,
    dtype: str | None,
    expert_parallel: int | None = None,
) -> Shape:
    """Fill in what was not asked for from the source's configuration.

    Raises:
        PlanError: The number of ranks is missing, or the source has no stage of its own.
        ValueError: A number is out of range.
    """
    if ranks is None:
        raise PlanError(checkpoint.location, "cannot be re-partitioned over an unknown number of ranks", "--world-size")
    config = checkpoint.ds_config.get("zero_optimization")
    config = config if isinstance(config, dict) else {}
    if stage is None:
        stage = checkpoint.stage or config.get("stage") or None
    if stage is None:
        raise PlanError(checkpoint.location, "is of no ZeRO stage", "choose one with --stage")
    if not 1 <= ranks <= 1 << 20 or stage not in {1, 2, 3} or not (sub_group_size or 1) > 0:
        raise ValueError(f"cannot write stage {stage} for {ranks} ranks")
    size = config.get("sub_group_size", SUB_GROUP_SIZE) if sub_group_size is None else sub_group_size
    size = int(size) if isinstance(size, int | float) and size >= 1 else SUB_GROUP_SIZE  # "auto" for Hugging Face
    if round_robin is None:
        round_robin = bool(config.get("round_robin_gradients"))
    if checkpoint.masters_alone and dtype is None:
        problem = "holds masters, and does not say what the run computes in"
        raise PlanError(checkpoint.location, problem, "choose --dtype bf16, fp16 or fp32")
    if dtype is not None and dtype != checkpoint.dtype and checkpoint.groups and not checkpoint.masters_alone:
        problem = f"was trained in {checkpoint.dtype}, and its 16-bit copies and loss scale follow that"
        raise PlanError(checkpoint.location, problem, "leave out --dtype; it is for weights alone")
    if expert_parallel is not None and not 1 <= expert_parallel <= ranks:
        raise ValueError(f"cannot spread experts over {expert_parallel} of {ranks} ranks")
    return Shape(ranks, stage, size, round_robin, dtype or checkpoint.dtype, expert_parallel)


def zero_losses(checkpoint: Checkpoint, shape: Shape) -> list[str]:
    """What cannot be as it was on another number of ranks."""
    losses = []
    if checkpoint.topology.tensor_parallel * checkpoint.topology.pipeline_parallel > 1:
        losses.append("written without tensor and pipeline parallelism: the run that loads it must have neither")
    padded = [f"{p.name} has {p.shape[0]}" for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded and not sliced_by_autotp(checkpoint):
        losses.append(f"the vocabulary is written without padding: {', '.join(padded)} rows, and the model must too")
    layers = Experts(checkpoint, shape.ranks, shape.expert_parallel).layers
    if layers:
        spread = " and ".join(map(str, sorted({layer.parallel for layer in layers})))
        losses.append(f"experts are for an expert-parallel size of {spread}: the run that loads it must have that")
    if checkpoint.ahead and shape.stage == 3:
        losses.append(f"{AHEAD}: stage 3 keeps no copies, and masters are made of them")
    elif checkpoint.ahead:
        losses.append(f"{AHEAD}: the run that loads it must use ZenFlow too, or its first step takes that back")
    if checkpoint.masters_alone:
        losses.append(
            "there was no scheduler, loss scale or client state to carry over: load it with "
            "load_lr_scheduler_states=False if the run has a scheduler"
        )
    if not checkpoint.groups:
        losses.append(
            "written from weights alone: load it with load_module_only=True at stages 1 and 2, and with "
            "load_optimizer_states=False and load_lr_scheduler_states=False at stage 3; DeepSpeed makes the masters of "
            "what it computes with"
        )
    return losses


def sliced_by_autotp(checkpoint: Checkpoint) -> bool:
    """Whether DeepSpeed itself cut the layers, which pads no vocabulary."""
    config = checkpoint.ds_config.get("tensor_parallel")
    return isinstance(config, dict) and bool(config.get("autotp_size"))


def _one_group(checkpoint: Checkpoint) -> tuple[ParamGroup, ...]:
    """One group of all parameters, for weights of which nothing says how they are to be trained."""
    names = tuple(p.name for p in checkpoint.parameters)
    weights_alone = all(p.group == UNKNOWN_GROUP and set(p.states) <= {MODULE} for p in checkpoint.parameters)
    if checkpoint.native or not weights_alone or not names:
        return ()
    return (ParamGroup(names, {}, {}),)


class _Writer:
    def __init__(self, checkpoint: Checkpoint, shape: Shape, tag: str, fresh: frozenset[str] = frozenset()) -> None:
        self.checkpoint = checkpoint
        self.shape = shape
        self.tag = tag
        self.fresh = fresh
        self.copies = CopyBuilder(checkpoint)
        self.parameters = {p.name: p for p in checkpoint.parameters}
        self.source_groups = checkpoint.groups or _one_group(checkpoint)
        """The parameter groups; of weights alone, one of all."""
        self.names = [self._names(group) for group in self.source_groups]
        """Names of every group, in the whole model."""
        self.keys = [self._keys(names) for names in self.names]
        """Names of the optimizer's states of every group."""
        self._check()
        self.experts = Experts(checkpoint, shape.ranks, shape.expert_parallel)
        self.shares = [self.experts.shares(g, n) for g, n in zip(self.source_groups, self.names, strict=True)]
        """Who holds what of every group: all ranks the same, but for experts."""
        self.groups = [self._order(shares[0]) for shares in self.shares]
        """Names of every group in the order of the target's flat buffers, as a rank knows them."""
        sizes = [
            {n: shares[0].held[n].numel for n in own} for shares, own in zip(self.shares, self.groups, strict=True)
        ]
        counts = [len(shares[0].ranks) for shares in self.shares]
        self.flat = [FlatGroup(own, count, shape.alignment) for own, count in zip(sizes, counts, strict=True)]
        self.subs = [
            list(sub_groups(own, count, shape.sub_group_size)) for own, count in zip(sizes, counts, strict=True)
        ]

    # --------------------------------------------------------------------------------------------- what is written

    def _check(self) -> None:
        c = self.checkpoint
        if not any(self.names):
            hint = "convert a checkpoint that was saved with its optimizer"
            raise PlanError(c.location, "does not say what the optimizer trains", hint)
        if c.unsliceable:
            problem = f"holds states that cannot be re-partitioned: {', '.join(c.unsliceable[:5])}"
            raise PlanError(c.location, problem, "resume on the same number of ranks, or consolidate the weights")
        others = [p.name for p in c.parameters if p.frozen] if not c.tells_buffers else []
        if self.shape.stage == 3 and others:
            problem = f"does not say whether {others[0]} is a frozen parameter or a buffer, which stage 3 keeps apart"
            hint = "choose --stage 1 or 2, or convert the checkpoint that it was made from"
            raise PlanError(c.location, problem, hint)
        if self.shape.stage == 3:
            if any(NATIVE.fullmatch(p.name) for p in c.parameters):
                problem = "trains DeepSpeed's own mixture of experts, which has no stage 3"
                raise PlanError(c.location, problem, "choose --stage 1 or 2")
            int8 = [p.name for p in c.parameters if p.frozen and p.numel and _value(p).dtype == "I8"]
            if int8:
                problem = (
                    f"has frozen parameter {int8[0]} in int8, which at stage 3 cannot be told from one that ZeRO++ "
                    "quantised without saving its scale"
                )
                raise PlanError(c.location, problem, "choose --stage 1 or 2")
            empty = [n for names in self.names for n in names if self.parameters[n].numel == 0]
            if empty:
                raise PlanError(c.location, f"trains {empty[0]}, which has no elements", "stage 3 cannot hold it")

    def _names(self, group: ParamGroup) -> list[str]:
        return [n for n in group.parameters if self.parameters[n].numel or self.shape.stage == 3]

    def _order(self, share: Share) -> list[str]:
        """The parameters of a group in the order of the target's flat buffer."""
        names = list(share.held)
        return round_robin(names, len(share.ranks)) if self.shape.round_robin and self.shape.stage < 3 else names

    def place(self, group: int, rank: int) -> tuple[Share, int]:
        """What a rank has a part of, and the number of its part."""
        share = next(s for s in self.shares[group] if rank in s.ranks)
        return share, share.ranks.index(rank)

    def _keys(self, names: Sequence[str]) -> list[str]:
        names = [n for n in names if n not in self.fresh]
        held = [set(self.parameters[n].states) - {MASTER, MODULE} for n in names]
        for name, keys in zip(names, held, strict=True):
            without_master = self.checkpoint.groups and MASTER not in self.parameters[name].states
            if keys != held[0] or without_master:
                odd = sorted(keys ^ held[0])[0] if keys != held[0] else "master"
                problem = f"has {odd} of {name} or of {names[0]}, but not of both, though they are in one group"
                raise PlanError(self.checkpoint.location, problem, "convert a checkpoint saved with its optimizer")
        return [k for k in self.parameters[names[0]].states if k in held[0]] if names else []

    def _dtype(self, names: Sequence[str], key: str) -> str:
        if key == MASTER and not self.checkpoint.groups:
            return "F32"
        dtypes = {self.parameters[n].states[key].dtype for n in names if key in self.parameters[n].states}
        if len(dtypes) > 1 and key == MASTER and not self.fresh.isdisjoint(names):
            return "F32"  # weights of which there is a 16-bit copy alone
        if len(dtypes) > 1:
            raise PlanError(self.checkpoint.location, f"has {key} in {sorted(dtypes)} in one group", "")
        return dtypes.pop() if dtypes else "F32"

    def _name(self, kind: str, rank: int) -> str:
        prefix = "bf16_" if self.shape.dtype == "BF16" and kind == "optim" else ""
        if kind == "model" and self.shape.stage < 3:
            return f"{self.tag}/mp_rank_00_model_states.pt"
        return f"{self.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"

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

    # -------------------------------------------------------------------------------------------- optimizer files

    def optimizer_files(self) -> list[TargetFile]:
        """One for each rank."""
        return [self.optimizer_file(rank) for rank in range(self.shape.ranks)]

    def optimizer_file(self, rank: int) -> TargetFile:
        """A rank's partitions of everything that the optimizer keeps."""
        file = TorchFileBuilder(self._name("optim", rank), self.copies)
        places = [self.place(g, rank) for g in range(len(self.groups))]
        if self.shape.stage == 3:
            held = [[s.held(part) for s in subs] for subs, (_, part) in zip(self.subs, places, strict=True)]
            states = self._stage3(file, rank, places, held)
        else:
            states = self._stage12(file, places, [f[part] for f, (_, part) in zip(self.fragments, places, strict=True)])
        root = {"optimizer_state_dict": states, "ds_config": self.config(), "ds_version": self.release}
        return file.build(root)

    @functools.cached_property
    def fragments(self) -> list[list[list[Fragment]]]:
        """At stages 1 and 2, what each rank's partition of every group holds."""
        return [g.fragments() for g in self.flat]

    def _stage12(
        self, file: TorchFileBuilder, places: Sequence[tuple[Share, int]], fragments: Sequence[Sequence[Fragment]]
    ) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        groups = []
        masters = []
        mappings = []
        for g, (group, flat) in enumerate(zip(self.source_groups, self.flat, strict=True)):
            names, (share, part) = self.names[g], places[g]
            own: dict[str, Any] = {k: _scalar(file, s) for k, s in group.scalars.items()}
            for key in self.keys[g]:
                if group.hyperparameters.get("use_muon") and key == MUON:
                    own[key] = self._whole(file, key, fragments[g], share)
                else:
                    own[key] = self._flat(file, key, self._dtype(names, key), fragments[g], flat.partition, share)
            if own:
                state[g] = own
            groups.append({**file.hyperparameters(self.experts.named(group)), "params": [g]})
            lean = flat.partition - flat.padding(part)
            masters.append(self._flat(file, MASTER, self._dtype(names, MASTER), fragments[g], lean, share))
            mappings.append(OrderedDict((f.name, _address(f)) for f in fragments[g]))
        return {
            "loss_scaler": self.loss_scaler(),
            "dynamic_loss_scale": self.dynamic,
            "overflow": False,
            "clip_grad": self.checkpoint.ds_config.get("gradient_clipping", 0.0),
            "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": self.shape.stage,
            "group_paddings": [flat.padding(part) for flat, (_, part) in zip(self.flat, places, strict=True)],
            "partition_count": [flat.ranks for flat in self.flat],
            "ds_version": self.release,
            "param_slice_mappings": mappings,
            **self._aligned(),
        }

    def _aligned(self) -> dict[str, Any]:
        """What says how parameters were aligned; where it is left out, DeepSpeed takes them for not aligned."""
        return {"param_alignment_paddings": [f.paddings() for f in self.flat]} if self.shape.alignment > 1 else {}

    def _stage3(
        self,
        file: TorchFileBuilder,
        rank: int,
        places: Sequence[tuple[Share, int]],
        fragments: Sequence[Sequence[Sequence[Fragment]]],
    ) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        groups = []
        masters: list[TensorRef] = []
        shared: list[dict[str, Any]] = []
        for g, group in enumerate(self.source_groups):
            names, (share, _) = self.names[g], places[g]
            numbers = []
            for sub, own_fragments in zip(self.subs[g], fragments[g], strict=True):
                number = len(masters)
                numbers.append(number)
                own: dict[str, Any] = {k: _scalar(file, s) for k, s in group.scalars.items()}
                for key in self.keys[g]:
                    own[key] = self._flat(file, key, self._dtype(names, key), own_fragments, sub.partition, share)
                if own:
                    state[number] = own
                dtype = self._dtype(names, MASTER)
                masters.append(self._flat(file, MASTER, dtype, own_fragments, sub.partition, share))
                shared.append(self.experts.partition_group(group, share, rank, number))
            groups.append({**file.hyperparameters(self.experts.named(group)), "params": numbers})
        return {
            "zero_stage": 3,
            "loss_scaler": self.loss_scaler(),
            "dynamic_loss_scale": self.dynamic,
            "overflow": False,
            "partition_count": self.shape.ranks,
            **({"ds_zero_partition_groups": shared} if self.experts.layers else {}),
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": masters,
        }

    def _flat(
        self,
        file: TorchFileBuilder,
        key: str,
        dtype: str,
        fragments: Sequence[Fragment],
        numel: int,
        share: Share,
    ) -> TensorRef:
        """One rank's partition of a flat buffer; padding is zeros."""
        width = itemsize(dtype)
        pieces = []
        for f in fragments:
            held = share.held[f.name]
            if held.name in self.fresh and key not in self.parameters[held.name].states:
                continue
            pieces.append(Piece(self._state(held.name, key), dtype, f.position * width, held.first + f.first, f.numel))
        return view(file.storage(dtype, numel, pieces), dtype, 0, (numel,))

    def _state(self, name: str, key: str) -> State:
        """A state of a parameter; of weights alone, the weights for the master.

        Stage 3 keeps no copies of its own: where they are newer than the masters, these are made of them.
        """
        parameter = self.parameters[name]
        if key == MASTER and self.checkpoint.ahead and self.shape.stage == 3:
            return self.checkpoint.weights(parameter)
        return parameter.states.get(key) or parameter.states[MODULE]

    def _whole(self, file: TorchFileBuilder, key: str, fragments: Sequence[Fragment], share: Share) -> TensorRef:
        """Every parameter that a partition touches, whole."""
        touched = [share.held[f.name] for f in fragments]
        dtype = self._dtype([held.name for held in touched], key)
        pieces, numel = [], 0
        for held in touched:
            state = self.parameters[held.name].states.get(key)
            if state is not None:
                pieces.append(Piece(state, dtype, numel * itemsize(dtype), held.first, held.numel))
            numel += held.numel
        return view(file.storage(dtype, numel, pieces), dtype, 0, (numel,))

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic."""
        state = getattr(self.loss_scaler(), "state", None)
        return bool(state.get("dynamic")) if isinstance(state, dict) else False

    def loss_scaler(self) -> Opaque:
        """DeepSpeed's object: the source's, or one that says the same."""
        source = self.checkpoint.loss_scaler
        if isinstance(source, Opaque):
            return source
        kept = source if isinstance(source, dict) else {}
        if not kept.get("dynamic_loss_scale", self.shape.dtype == "F16"):
            return _object(LOSS_SCALERS, "LossScaler", {"cur_scale": kept.get("cur_scale", 1.0), "dynamic": False})
        # Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py (``CreateLossScaler``) and runtime/config.py (defaults).
        return _object(
            LOSS_SCALERS,
            "DynamicLossScaler",
            {
                "cur_scale": kept.get("cur_scale", 2**16),
                "cur_iter": kept.get("cur_iter", 0),
                "last_overflow_iter": kept.get("last_overflow_iter", -1),
                "scale_factor": kept.get("scale_factor", 2.0),
                "scale_window": kept.get("scale_window", 1000),
                "min_scale": 1,
                "delayed_shift": 2,
                "cur_hysteresis": 2,
                "consecutive_hysteresis": False,
                "raise_error_at_min_scale": True,
                "dynamic": True,
                "dtype": TorchDType("float16"),
            },
        )

    # ------------------------------------------------------------------------------------------------ model files

    def model_files(self) -> list[TargetFile]:
        """One, or at stage 3 one for each rank; below stage 3 one for each expert too."""
        files = [self.model_file(rank) for rank in range(self.shape.ranks if self.shape.stage == 3 else 1)]
        return files if self.shape.stage == 3 else [*files, *self._expert_files()]

    def _expert_files(self) -> Iterator[TargetFile]:
        experts = [(layer.number, expert) for layer in self.experts.layers for expert in range(layer.experts)]
        files = {
            (layer, expert): TorchFileBuilder(
                f"{self.tag}/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt", self.copies
            )
            for layer, expert in experts
        }
        modules: dict[tuple[int, int], OrderedDict] = {key: OrderedDict() for key in files}
        tensors = [(p.name, self.checkpoint.weights(p), self.shape.dtype) for p in self.checkpoint.parameters]
        tensors += [(b.name, b.state, b.state.dtype) for b in self.checkpoint.buffers]
        for name, state, dtype in tensors:
            for layer, expert, held in self.experts.parts(name, state.shape):
                file = files[layer, expert]
                storage = file.storage(dtype, held.numel, [Piece(state, dtype, 0, held.first, held.numel)])
                modules[layer, expert][held.name] = view(storage, dtype, 0, held.shape)
        for key, file in files.items():
            yield file.build(modules[key])

    def model_file(self, rank: int, *, shared: bool = True) -> TargetFile:
        """The model states of a rank; ``shared`` for those that all ranks hold alike too."""
        c = self.checkpoint
        file = TorchFileBuilder(self._name("model", rank), self.copies)
        frozen = [p for p in c.parameters if p.frozen]
        module = self._shared(file) if shared else OrderedDict()
        # Of weights alone nobody knows which will be frozen: the engine must find all in the module.
        # Where none is kept (exclude_frozen_parameters) it must not be looked for either.
        listed = self.shape.stage >= (2 if shared else 3) and bool(c.groups) and bool(frozen)
        step = {"skipped_steps": c.skipped_steps, "global_steps": c.step or 0}
        if c.samples is not None:  # left out, DeepSpeed computes it
            step["global_samples"] = c.samples
        client = carried(file, c, c.client_state)
        root = {
            "module": module,
            "buffer_names": [b.name for b in c.buffers],
            "optimizer": None,
            "param_shapes": [OrderedDict((n, Size(held[n].shape)) for n in names) for names, held in self._buffers()],
            "frozen_param_shapes": OrderedDict((p.name, Size(p.shape)) for p in frozen) if listed else None,
            "shared_params": dict(c.aliases) if rank == 0 else {},
            "frozen_param_fragments": self._frozen(file, frozen, module, rank) if listed else None,
            "lr_scheduler": carried(file, c, c.scheduler),
            "data_sampler": None,
            "random_ltd": None,
            **step,
            "dp_world_size": self.shape.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self.config(),
            "ds_version": self.release,
            **self.experts.metadata(rank, self.shape.stage),
            **client,
        }
        return file.build(root)

    def _shared(self, file: TorchFileBuilder) -> OrderedDict:
        """The module's state dict, tied names and buffers included."""
        module = self._placeholders(file) if self.shape.stage == 3 else self._module(file)
        for buffer in self.checkpoint.buffers:
            if not self.experts.owns(buffer.name):
                module[buffer.name] = file.whole(buffer.state)
        for alias, name in self.checkpoint.aliases.items():
            if name in module:
                module[alias] = module[name]
        return module

    def _buffers(self) -> list[tuple[list[str], Mapping[str, Held]]]:
        """Names in every flat buffer, and what they stand for."""
        if self.shape.stage == 3:
            return [
                (list(sub.sizes), shares[0].held)
                for subs, shares in zip(self.subs, self.shares, strict=True)
                for sub in subs
            ]
        return [(names, shares[0].held) for names, shares in zip(self.groups, self.shares, strict=True)]

    def _module(self, file: TorchFileBuilder) -> OrderedDict:
        """Whole weights: those of a group are views of one flat storage, as DeepSpeed has them."""
        dtype = self.shape.dtype
        views: dict[str, TensorRef] = {}
        # Of weights alone nothing tells which are buffers: all keep their type, and loading casts the others.
        for names, flat in zip(self.groups, self.flat, strict=True) if self.checkpoint.groups else ():
            if any(name not in self.parameters or self.experts.owns(name) for name in names):
                continue  # experts have files of their own
            offsets = flat.offsets()
            width = itemsize(dtype)
            pieces = [Piece(self.checkpoint.weights(self.parameters[n]), dtype, offsets[n] * width) for n in names]
            storage = file.storage(dtype, flat.partition * flat.ranks, pieces)
            views |= {n: view(storage, dtype, offsets[n], self.parameters[n].shape) for n in names}
        module = OrderedDict()
        for p in self.checkpoint.parameters:
            if not self.experts.owns(p.name):
                module[p.name] = views[p.name] if p.name in views else file.whole(_value(p))
        return module

    def _placeholders(self, file: TorchFileBuilder) -> OrderedDict:
        module = OrderedDict()
        for p in self.checkpoint.parameters:
            if self.experts.owns(p.name):
                continue
            dtype = self.shape.dtype if not p.frozen else _value(p).dtype
            module[p.name] = view(file.storage(dtype, 0, []), dtype, 0, (0,))
        return module

    def _frozen(
        self, file: TorchFileBuilder, frozen: Sequence[Parameter], module: Mapping[str, TensorRef], rank: int
    ) -> OrderedDict:
        """Frozen weights: at stage 3 a rank's piece of each, padded; at stage 2 what the module has."""
        result = OrderedDict()
        for p in frozen:
            if self.shape.stage < 3:
                result[p.name] = module[p.name]
                continue
            state, size = _value(p), piece(p.numel, self.shape.ranks)
            first = min(p.numel, rank * size)
            held = [Piece(state, state.dtype, 0, first, min(size, p.numel - first))]
            result[p.name] = view(file.storage(state.dtype, size, held), state.dtype, 0, (size,))
        return result


def _value(parameter: Parameter) -> State:
    return parameter.states.get(MODULE) or parameter.states[MASTER]


def _scalar(file: TorchFileBuilder, scalar: ScalarState) -> object:
    if scalar.dtype is None:
        return scalar.value
    return file.scalar(np.array(scalar.value).astype(numpy_dtype(scalar.dtype)).tobytes(), scalar.dtype, scalar.shape)


def _address(fragment: Fragment) -> Opaque:
    state = {"numel": fragment.numel, "start": fragment.position}
    return _object("deepspeed.utils.tensor_fragment", "fragment_address", state)


def _object(module: str, name: str, state: dict[str, Any]) -> Opaque:
    """An object of a class that is not imported, as ``pickle`` would have it."""
    made = Opaque(module, name, "new")
    made.stated, made.state = True, state
    return made


def carried(file: TorchFileBuilder, checkpoint: Checkpoint, value: Any) -> Any:
    """The same plain data, with the tensors in it copied into a new file.

    Raises:
        PlanError: It holds a tensor whose bytes cannot be found.
    """
    storages: dict[str, Any] = {}

    def copied(item: Any) -> Any:
        if isinstance(item, TensorRef):
            ref = item.storage
            if ref.key not in storages:
                where = checkpoint.carried.get(ref.key)
                if where is None:
                    raise PlanError(checkpoint.location, "carries a tensor that cannot be found", "")
                storages[ref.key] = file.storage(ref.dtype, ref.numel, [Piece(where, ref.dtype, 0)])
            return TensorRef(
                storages[ref.key], item.dtype, item.offset, item.shape, item.stride, item.requires_grad, item.parameter
            )
        if isinstance(item, OrderedDict):
            return OrderedDict((k, copied(v)) for k, v in item.items())
        if isinstance(item, dict):
            return {k: copied(v) for k, v in item.items()}
        if type(item) in {list, tuple}:
            return type(item)(copied(v) for v in item)
        if isinstance(item, Opaque) and item.how != "global":
            made = copy.copy(item)
            made.args, made.state = tuple(copied(a) for a in item.args), copied(item.state)
            made.items = [(k, copied(v)) for k, v in item.items]
            made.appended = [copied(v) for v in item.appended]
            return made
        return item

    return copied(value)
