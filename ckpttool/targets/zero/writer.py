"""Checkpoint -> plan of the files that DeepSpeed's plain ``load_checkpoint`` reads, for any number of ranks.

There is one file of model states, or at stage 3 one per rank; one per expert; and one of optimizer states per rank.

Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_checkpoint``, ``_save_moe_checkpoint``, ``_save_zero_checkpoint``,
``load_checkpoint``), runtime/zero/stage_1_and_2.py (``state_dict``, ``_rigid_load_state_dict``), runtime/zero/stage3.py
(``_rigid_state_dict``, ``_rigid_load_state_dict``) and runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import Opaque, OrderedDict, Size, TensorRef, TorchDType, walk
from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.formats.zero.module import DATA_KEYS
from ckpttool.model import MASTER
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder, Placement, sample_checks
from ckpttool.storage import LATEST
from ckpttool.targets.torch import TorchFileBuilder, copy_embedded, opaque_object, plain_file, view
from ckpttool.targets.zero.layout import TargetGroups, piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.model import Checkpoint, Parameter
    from ckpttool.plan import TargetFile
    from ckpttool.targets.zero.experts import LocalParameter, Share
    from ckpttool.targets.zero.layout import Fragment, Shape


LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
"""Module of DeepSpeed's classes."""


def loss_scaler(source: object, dtype: str) -> Opaque:
    """Return DeepSpeed's loss scaler object: the source's, or a new one with the same state.

    Args:
        source: State of the source's loss scaler, as pickled; None if it has none.
        dtype: Compute dtype of the target run.
    """
    if isinstance(source, Opaque):
        return source
    kept = source if isinstance(source, dict) else {}
    if not kept.get("dynamic_loss_scale", dtype == "F16"):
        return opaque_object(LOSS_SCALERS, "LossScaler", {"cur_scale": kept.get("cur_scale", 1.0), "dynamic": False})
    # Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py (``CreateLossScaler``) and runtime/config.py (defaults).
    return opaque_object(
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


def is_dynamic(scaler: Opaque) -> bool:
    """Whether the loss scale is dynamic."""
    state = scaler.state
    return bool(state.get("dynamic")) if isinstance(state, dict) else False


def scales_losses(scaler: object) -> bool:
    """Return whether a run scales its losses: outside fp16, DeepSpeed saves a scaler whose scale is always 1.

    Args:
        scaler: State of the source's loss scaler, as pickled; None if it has none.
    """
    state = scaler.state if isinstance(scaler, Opaque) else scaler
    if not isinstance(state, dict):
        return scaler is not None
    return bool(state.get("dynamic") or state.get("dynamic_loss_scale")) or state.get("cur_scale") != 1


class ModelFiles:
    """Plans the model-states files.

    Args:
        groups: The parameter groups of the target.
        builder: Collects the copies.
        tag: Directory of the files.
    """

    def __init__(self, groups: TargetGroups, builder: CopyBuilder, tag: str) -> None:
        self._groups = groups
        self._builder = builder
        self._tag = tag

    def _name(self, rank: int) -> str:
        prefix = f"zero_pp_rank_{rank}_" if self._groups.shape.stage == 3 else ""
        return f"{self._tag}/{prefix}mp_rank_00_model_states.pt"

    def files(self) -> list[TargetFile]:
        """Return one file, or at stage 3 one per rank; below stage 3 also one per expert."""
        files = [self.file(rank) for rank in range(self._groups.shape.ranks if self._groups.shape.stage == 3 else 1)]
        return files if self._groups.shape.stage == 3 else [*files, *self._expert_files()]

    def _expert_files(self) -> Iterator[TargetFile]:
        experts = [(layer.number, expert) for layer in self._groups.experts.layers for expert in range(layer.experts)]
        files = {
            (layer, expert): TorchFileBuilder(
                f"{self._tag}/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt", self._builder
            )
            for layer, expert in experts
        }
        modules: dict[tuple[int, int], OrderedDict] = {key: OrderedDict() for key in files}
        tensors = [
            (p.name, self._groups.checkpoint.weights(p), self._groups.shape.dtype)
            for p in self._groups.checkpoint.parameters
        ]
        tensors += [(b.name, b.state, b.state.dtype) for b in self._groups.checkpoint.buffers]
        for name, state, dtype in tensors:
            for layer, expert, part in self._groups.experts.parts(name, state.shape):
                file = files[layer, expert]
                storage = file.storage(dtype, part.numel, [Placement(state, dtype, 0, part.first, part.numel)])
                modules[layer, expert][part.name] = view(storage, dtype, 0, part.shape)
        for key, file in files.items():
            yield file.build(modules[key])

    def file(self, rank: int, *, shared: bool = True) -> TargetFile:
        """Return the model states of a rank; with ``shared``, also weights and buffers that are equal on all ranks."""
        checkpoint = self._groups.checkpoint
        file = TorchFileBuilder(self._name(rank), self._builder)
        frozen = [p for p in checkpoint.parameters if p.frozen]
        module = self._shared(file) if shared else OrderedDict()
        # A weights-only source does not record frozen parameters: the engine must find all parameters in the module.
        # If the source excludes frozen parameters, the list must be absent too.
        known = bool(checkpoint.groups) and not checkpoint.excludes_frozen
        lists_frozen = self._groups.shape.stage >= (2 if shared else 3) and known
        step = {"skipped_steps": checkpoint.skipped_steps, "global_steps": checkpoint.step or 0}
        if checkpoint.samples is not None:  # DeepSpeed computes a missing count
            step["global_samples"] = checkpoint.samples
        client = copy_embedded(file, checkpoint, checkpoint.client_state)
        root = {
            "module": module,
            "buffer_names": [b.name for b in checkpoint.buffers],
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, Size(parameters[name].shape)) for name in names)
                for names, parameters in self._buffers()
            ],
            "frozen_param_shapes": OrderedDict((p.name, Size(p.shape)) for p in frozen) if lists_frozen else None,
            "shared_params": dict(checkpoint.aliases) if rank == 0 else {},
            "frozen_param_fragments": self._frozen(file, frozen, module, rank) if lists_frozen else None,
            "lr_scheduler": copy_embedded(file, checkpoint, checkpoint.scheduler),
            **{key: copy_embedded(file, checkpoint, checkpoint.data_states.get(key)) for key in DATA_KEYS},
            **step,
            "dp_world_size": self._groups.shape.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self._groups.config(),
            "ds_version": self._groups.release,
            **self._groups.experts.metadata(rank, self._groups.shape.stage),
            **client,
        }
        return file.build(root)

    def _shared(self, file: TorchFileBuilder) -> OrderedDict:
        """Return the module's state dict, with tied names and buffers."""
        module = self._placeholders(file) if self._groups.shape.stage == 3 else self._module(file)
        for buffer in self._groups.checkpoint.buffers:
            if not self._groups.experts.owns(buffer.name):
                module[buffer.name] = file.whole(buffer.state)
        for alias, name in self._groups.checkpoint.aliases.items():
            if name in module:
                module[alias] = module[name]
        return module

    def _buffers(self) -> list[tuple[list[str], Mapping[str, LocalParameter]]]:
        """Return the names in every flat buffer, and the local parameter of each name."""
        if self._groups.shape.stage == 3:
            return [
                (list(sub.sizes), shares[0].parameters)
                for subs, shares in zip(self._groups.subs, self._groups.shares, strict=True)
                for sub in subs
            ]
        groups = zip(self._groups.groups, self._groups.shares, strict=True)
        return [(names, shares[0].parameters) for names, shares in groups]

    def _module(self, file: TorchFileBuilder) -> OrderedDict:
        """Return whole weights; the weights of a group are views of one flat storage, as in DeepSpeed's files."""
        dtype = self._groups.shape.dtype
        views: dict[str, TensorRef] = {}
        # A weights-only source does not record buffers: all tensors keep their dtype, and DeepSpeed casts on load.
        for names, flat in (
            zip(self._groups.groups, self._groups.flat, strict=True) if self._groups.checkpoint.groups else ()
        ):
            if any(name not in self._groups.parameters or self._groups.experts.owns(name) for name in names):
                continue  # experts are in separate files
            offsets = flat.offsets()
            width = itemsize(dtype)
            pieces = [
                Placement(self._groups.checkpoint.weights(self._groups.parameters[n]), dtype, offsets[n] * width)
                for n in names
            ]
            storage = file.storage(dtype, flat.partition * flat.ranks, pieces)
            views |= {n: view(storage, dtype, offsets[n], self._groups.parameters[n].shape) for n in names}
        module = OrderedDict()
        for p in self._groups.checkpoint.parameters:
            if not self._groups.experts.owns(p.name):
                module[p.name] = views[p.name] if p.name in views else file.whole(p.module_state)
        return module

    def _placeholders(self, file: TorchFileBuilder) -> OrderedDict:
        module = OrderedDict()
        for p in self._groups.checkpoint.parameters:
            if self._groups.experts.owns(p.name):
                continue
            dtype = self._groups.shape.dtype if not p.frozen else p.module_state.dtype
            module[p.name] = view(file.storage(dtype, 0, []), dtype, 0, (0,))
        return module

    def _frozen(
        self, file: TorchFileBuilder, frozen: Sequence[Parameter], module: Mapping[str, TensorRef], rank: int
    ) -> OrderedDict:
        """Return frozen weights: at stage 3 this rank's part of each, padded; at stage 2 the tensors of the module."""
        result = OrderedDict()
        for p in frozen:
            if self._groups.shape.stage < 3:
                result[p.name] = module[p.name]
                continue
            state, size = p.module_state, piece(p.numel, self._groups.shape.ranks)
            first = min(p.numel, rank * size)
            pieces = [Placement(state, state.dtype, 0, first, min(size, p.numel - first))]
            result[p.name] = view(file.storage(state.dtype, size, pieces), state.dtype, 0, (size,))
        return result


MUON = "momentum_buffer"
"""Muon's state. At stages 1 and 2 each rank stores whole matrices: all that have a fragment in its partition."""


class OptimizerFiles:
    """Plans the optimizer files.

    Args:
        groups: The parameter groups of the target.
        builder: Collects the copies.
        tag: Directory of the files.
    """

    def __init__(self, groups: TargetGroups, builder: CopyBuilder, tag: str) -> None:
        self._groups = groups
        self._builder = builder
        self._tag = tag
        self._scaler = loss_scaler(groups.checkpoint.loss_scaler, groups.shape.dtype)

    def files(self) -> list[TargetFile]:
        """Return one file per rank."""
        return [self.file(rank) for rank in range(self._groups.shape.ranks)]

    def file(self, rank: int) -> TargetFile:
        """Return the file of a rank: its partitions of all optimizer states."""
        prefix = "bf16_" if self._groups.shape.dtype == "BF16" else ""
        file = TorchFileBuilder(f"{self._tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", self._builder)
        places = [self._groups.place(g, rank) for g in range(len(self._groups.groups))]
        if self._groups.shape.stage == 3:
            fragments = [
                [sub_group.rank_fragments(part) for sub_group in sub_groups]
                for sub_groups, (_, part) in zip(self._groups.subs, places, strict=True)
            ]
            states = self._stage3(file, rank, places, fragments)
        else:
            states = self._stage12(
                file, places, [f[part] for f, (_, part) in zip(self._groups.fragments, places, strict=True)]
            )
        root = {"optimizer_state_dict": states, "ds_config": self._groups.config(), "ds_version": self._groups.release}
        return file.build(root)

    def _stage12(
        self, file: TorchFileBuilder, places: Sequence[tuple[Share, int]], fragments: Sequence[Sequence[Fragment]]
    ) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        groups = []
        masters = []
        mappings = []
        for g, (group, flat) in enumerate(zip(self._groups.source_groups, self._groups.flat, strict=True)):
            names, (share, part) = self._groups.names[g], places[g]
            values: dict[str, Any] = {k: file.scalar(s) for k, s in group.scalars.items()}
            for key in self._groups.keys[g]:
                if group.hyperparameters.get("use_muon") and key == MUON:
                    values[key] = self._whole(file, key, fragments[g], share)
                else:
                    values[key] = self._partition(
                        file, key, self._groups.dtype(names, key), fragments[g], flat.partition, share
                    )
            if values:
                state[g] = values
            groups.append({**file.hyperparameters(self._groups.experts.hyperparameters_of(group)), "params": [g]})
            unpadded = flat.partition - flat.padding(part)
            masters.append(
                self._partition(file, MASTER, self._groups.dtype(names, MASTER), fragments[g], unpadded, share)
            )
            mappings.append(OrderedDict((f.name, _address(f)) for f in fragments[g]))
        return {
            "loss_scaler": self._scaler,
            "dynamic_loss_scale": is_dynamic(self._scaler),
            "overflow": False,
            **self._clipping(),
            "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": self._groups.shape.stage,
            "group_paddings": [flat.padding(part) for flat, (_, part) in zip(self._groups.flat, places, strict=True)],
            "partition_count": [flat.ranks for flat in self._groups.flat],
            "ds_version": self._groups.release,
            "param_slice_mappings": mappings,
            **self._aligned(),
        }

    def _clipping(self) -> dict[str, float]:
        """Return the limit of the gradients' norm if the source's configuration has one.

        Otherwise the run that loads the file keeps its own: DeepSpeed's default has been 0 (off) and 1.

        Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_load_global_state``) and runtime/constants.py.
        """
        limit = self._groups.checkpoint.ds_config.get("gradient_clipping")
        return {"clip_grad": limit} if isinstance(limit, int | float) else {}

    def _aligned(self) -> dict[str, Any]:
        """Return the record of the alignment; without it, DeepSpeed assumes that parameters are not aligned."""
        return (
            {"param_alignment_paddings": [f.paddings() for f in self._groups.flat]}
            if self._groups.shape.alignment > 1
            else {}
        )

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
        for g, group in enumerate(self._groups.source_groups):
            names, (share, _) = self._groups.names[g], places[g]
            numbers = []
            for sub, own_fragments in zip(self._groups.subs[g], fragments[g], strict=True):
                number = len(masters)
                numbers.append(number)
                values: dict[str, Any] = {k: file.scalar(s) for k, s in group.scalars.items()}
                for key in self._groups.keys[g]:
                    values[key] = self._partition(
                        file, key, self._groups.dtype(names, key), own_fragments, sub.partition, share
                    )
                if values:
                    state[number] = values
                dtype = self._groups.dtype(names, MASTER)
                masters.append(self._partition(file, MASTER, dtype, own_fragments, sub.partition, share))
                shared.append(self._groups.experts.partition_group(group, share, rank, number))
            groups.append({**file.hyperparameters(self._groups.experts.hyperparameters_of(group)), "params": numbers})
        return {
            "zero_stage": 3,
            "loss_scaler": self._scaler,
            "dynamic_loss_scale": is_dynamic(self._scaler),
            "overflow": False,
            "partition_count": self._groups.shape.ranks,
            **({"ds_zero_partition_groups": shared} if self._groups.experts.layers else {}),
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": masters,
        }

    def _partition(
        self,
        file: TorchFileBuilder,
        key: str,
        dtype: str,
        fragments: Sequence[Fragment],
        numel: int,
        share: Share,
    ) -> TensorRef:
        """Add one rank's partition of a flat buffer; padding is zeros."""
        width = itemsize(dtype)
        pieces = []
        for f in fragments:
            local = share.parameters[f.name]
            if local.name in self._groups.fresh and key not in self._groups.parameters[local.name].states:
                continue
            pieces.append(
                Placement(
                    self._groups.state(local.name, key), dtype, f.position * width, local.first + f.first, f.numel
                )
            )
        return view(file.storage(dtype, numel, pieces), dtype, 0, (numel,))

    def _whole(self, file: TorchFileBuilder, key: str, fragments: Sequence[Fragment], share: Share) -> TensorRef:
        """Add whole parameters: all that have a fragment in a partition."""
        parameters = [share.parameters[f.name] for f in fragments]
        dtype = self._groups.dtype([local.name for local in parameters], key)
        pieces, numel = [], 0
        for local in parameters:
            state = self._groups.parameters[local.name].states.get(key)
            if state is not None:
                pieces.append(Placement(state, dtype, numel * itemsize(dtype), local.first, local.numel))
            numel += local.numel
        return view(file.storage(dtype, numel, pieces), dtype, 0, (numel,))


def _address(fragment: Fragment) -> Opaque:
    state = {"numel": fragment.numel, "start": fragment.position}
    return opaque_object("deepspeed.utils.tensor_fragment", "fragment_address", state)


def plan_zero(checkpoint: Checkpoint, shape: Shape, *, tag: str) -> CopyPlan:
    """Plan a native checkpoint: every rank's files under ``tag``, and ``latest``.

    Args:
        checkpoint: The source.
        shape: Ranks and stage.
        tag: Name of the checkpoint.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    _check_hyperparameters(checkpoint)
    groups, builder = TargetGroups(checkpoint, shape), CopyBuilder(checkpoint)
    optimizer, model = OptimizerFiles(groups, builder, tag), ModelFiles(groups, builder, tag)
    files = [*optimizer.files(), *model.files(), plain_file(LATEST, tag.encode())]
    return CopyPlan(builder.sources, builder.casts, tuple(files), sample_checks(checkpoint))


def plan_rank(
    checkpoint: Checkpoint, shape: Shape, rank: int, *, tag: str, fresh: frozenset[str] = frozenset()
) -> CopyPlan:
    """Plan the part of a native checkpoint for one rank: its partition, and the structure of its model states.

    The plan leaves out tensors that are equal on all ranks: weights cast from the fp32 master weights, buffers and,
    below stage 3, frozen parameters.

    Args:
        checkpoint: As for ``plan_zero``.
        shape: Ranks and stage.
        rank: The data-parallel rank.
        tag: Name of the checkpoint.
        fresh: Parameters whose states the checkpoint lacks in part or wholly; the missing states are zero.

    Returns:
        A plan of two files: optimizer states, model states.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    groups, builder = TargetGroups(checkpoint, shape, fresh), CopyBuilder(checkpoint)
    optimizer, model = OptimizerFiles(groups, builder, tag), ModelFiles(groups, builder, tag)
    files = (optimizer.file(rank), model.file(rank, shared=False))
    return CopyPlan(builder.sources, builder.casts, files)


def local_shapes(checkpoint: Checkpoint, shape: Shape, rank: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return (local name, shape) of each parameter on one rank of the target, for each group in the optimizer's order.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    groups = TargetGroups(checkpoint, shape)
    places = (groups.place(g, rank) for g in range(len(groups.groups)))
    return [[(name, local.shape) for name, local in share.parameters.items()] for share, _ in places]


def _check_hyperparameters(checkpoint: Checkpoint) -> None:
    """Check that the hyper-parameters are complete: DeepSpeed's load replaces the run's.

    Source: torch 2.13, optim/optimizer.py (``load_state_dict``).
    """
    for number, group in enumerate(checkpoint.groups):
        if group.parameters and not group.hyperparameters:
            problem = (
                f"holds no hyper-parameters (lr, betas, ...) of group {number}, as with elastic_checkpoint: "
                "a run that loads the result could not take a step"
            )
            hint = "resume with ckpttool.load(engine, ...), or convert to universal: both keep the run's"
            raise PlanError(checkpoint.location, problem, hint)
        tensors = [key for key, v in group.hyperparameters.items() if any(isinstance(x, TensorRef) for x in walk(v))]
        if tensors:
            problem = f"holds hyper-parameter {tensors[0]} of group {number} as a tensor of several numbers"
            raise PlanError(checkpoint.location, problem, "resume on the same number of ranks")
