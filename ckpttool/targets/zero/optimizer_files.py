"""Plan the optimizer files of a native checkpoint: one per rank.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``state_dict``) and runtime/zero/stage3.py
(``_rigid_state_dict``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.containers.values import Opaque, OrderedDict, TensorRef
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.model import MASTER
from ckpttool.plan.builder import Placement
from ckpttool.targets.torch_file import TorchFileBuilder, opaque_object, view
from ckpttool.targets.zero.loss_scaler import is_dynamic, loss_scaler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import ScalarState
    from ckpttool.plan import TargetFile
    from ckpttool.plan.builder import CopyBuilder
    from ckpttool.targets.zero.experts import Share
    from ckpttool.targets.zero.groups import TargetGroups
    from ckpttool.targets.zero.layout import Fragment

MUON = "momentum_buffer"
"""Muon's state. At stages 1 and 2 each rank holds whole matrices: all that have a fragment in its partition."""


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
            values: dict[str, Any] = {k: _scalar(file, s) for k, s in group.scalars.items()}
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
                values: dict[str, Any] = {k: _scalar(file, s) for k, s in group.scalars.items()}
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


def _scalar(file: TorchFileBuilder, scalar: ScalarState) -> object:
    if scalar.dtype is None:
        return scalar.value
    return file.scalar(np.array(scalar.value).astype(numpy_dtype(scalar.dtype)).tobytes(), scalar.dtype, scalar.shape)


def _address(fragment: Fragment) -> Opaque:
    state = {"numel": fragment.numel, "start": fragment.position}
    return opaque_object("deepspeed.utils.tensor_fragment", "fragment_address", state)
