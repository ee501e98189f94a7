"""Plan the model-states files of a native checkpoint: one, or at stage 3 one per rank; and one per expert.

Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_checkpoint``, ``_save_moe_checkpoint``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.containers.values import OrderedDict, Size, TensorRef
from ckpttool.dtypes import itemsize
from ckpttool.plan.builder import Placement
from ckpttool.targets.embedded import copy_embedded
from ckpttool.targets.torch_file import TorchFileBuilder, view
from ckpttool.targets.zero.layout import piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.model import Parameter
    from ckpttool.plan import TargetFile
    from ckpttool.plan.builder import CopyBuilder
    from ckpttool.targets.zero.experts import LocalParameter
    from ckpttool.targets.zero.groups import TargetGroups


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
        # A weights-only source does not tell frozen parameters: the engine must find all parameters in the module.
        # Without frozen parameters in the source (exclude_frozen_parameters) the list must be absent too.
        lists_frozen = self._groups.shape.stage >= (2 if shared else 3) and bool(checkpoint.groups) and bool(frozen)
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
            "data_sampler": None,
            "random_ltd": None,
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
        """Return whole weights; those of a group are views of one flat storage, as in DeepSpeed's files."""
        dtype = self._groups.shape.dtype
        views: dict[str, TensorRef] = {}
        # A weights-only source does not tell buffers: all tensors keep their dtype, and DeepSpeed casts on load.
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
