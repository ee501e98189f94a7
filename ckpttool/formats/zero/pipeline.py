"""Read the layers of a pipeline: their stages, and the names of their tensors in the whole model.

Source: DeepSpeed 0.19, runtime/pipe/module.py (``PipelineModule``, ``ckpt_layer_path``, ``save_state_dict``).
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from typing import TYPE_CHECKING

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.zero.module import mapped_sizes, read_buffer_names, read_param_shapes
from ckpttool.model import Replica

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats.zero.files import LayerFile, ZeroFiles
    from ckpttool.model import State

TIED = "tied_modules."


class Layers:
    """The layer files of a pipeline.

    Args:
        layers: All layer files.
        stages: The files of each pipeline stage, for one tensor-parallel rank.
        tensor_rank: The tensor-parallel rank.
    """

    def __init__(self, layers: Sequence[LayerFile], stages: Sequence[ZeroFiles], tensor_rank: int) -> None:
        self.of_stage: list[dict[str, State]] = [{} for _ in stages]
        """The tensors of each stage, by name."""
        self.replicas: list[Replica] = []
        """Tied layers: several stages save them."""
        self.remarks: list[str] = []
        """Remarks for the user."""
        self.model_ranks: dict[int, int] = {}
        """Index of the file of each layer: the model-parallel rank that wrote it; its name has only the tensor-parallel
        rank."""
        sizes = [_sizes(s) for s in stages]
        trained = {name: numel for stage in sizes for name, numel in stage.items()}
        named = [
            {n.partition(".")[0] for n in {*own, *read_buffer_names(files.model[0])}}
            for own, files in zip(sizes, stages, strict=True)
        ]
        stage = 0
        first: dict[str, State] = {}
        for layer in layers:
            if layer.tensor_rank != tensor_rank:
                continue
            # The stage of a layer without trained parameters is not recorded; it is the stage of the previous layer.
            stage = next((i for i, numbers in enumerate(named) if str(layer.layer) in numbers), stage)
            self.model_ranks[layer.file.file_index] = stages[stage].model_rank
            tensors = {
                str(name): whole_tensor(layer.file.torch, layer.file.file_index, ref)
                for name, ref in layer.file.fields.values.items()
                if isinstance(ref, TensorRef)
            }
            prefix = self._prefix(layer.layer, tensors, trained)
            for local, state in tensors.items():
                name = prefix + local
                if name in first:
                    self.replicas.append(Replica(name, first[name], state))
                else:
                    first[name] = self.of_stage[stage][name] = state
        wanted = dict.fromkeys([*trained, *(n for files in stages for n in sorted(read_buffer_names(files.model[0])))])
        if gone := next((name for name in wanted if name not in first), None):
            raise _missing(gone, layers, stages[0], tensor_rank)
        if not trained and layers:
            for files in stages:
                _check_shapes(files, [state.shape for state in first.values()])
            numbers = sorted({layer.layer for layer in layers})
            told = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
            self.remarks.append(f"no file records the number of layers: layers {told} are present")
        self.shapes = {name: state.shape for name, state in first.items()}
        """Shapes of the tensors of all stages."""

    def _prefix(self, number: int, tensors: Mapping[str, State], trained: Mapping[str, int]) -> str:
        """Return the prefix of a layer's names: its number, or the key of its tie."""
        own = f"{number}."
        if any(own + local in trained for local in tensors):
            return own
        tied: dict[str, dict[str, int]] = {}
        for name, numel in trained.items():
            if name.startswith(TIED) and "." in name[len(TIED) :]:
                key, _, local = name[len(TIED) :].partition(".")
                tied.setdefault(f"{TIED}{key}.", {})[local] = numel
        fitting = [
            prefix
            for prefix, sizes in tied.items()
            if all(local in tensors and tensors[local].numel == numel for local, numel in sizes.items())
        ]
        if len(fitting) > 1:
            keys = ", ".join(prefix.removeprefix(TIED).rstrip(".") for prefix in fitting)
            self.remarks.append(
                f"layer {number} may be any of the tied modules {keys}: its copies are named by its number"
            )
        return fitting[0] if len(fitting) == 1 else own


def _check_shapes(files: ZeroFiles, shapes: Sequence[tuple[int, ...]]) -> None:
    """Compare the layers with an optimizer without names: each of its parameters needs a tensor of its shape.

    This does not find every missing layer: frozen tensors and tensors of other stages may have the same shapes.

    Raises:
        LayoutError: The layers have too few tensors of a shape.
    """
    optimizer = files.model[0].fields.optional("optimizer", dict) or {}
    if files.expert_optimizer or "fp32_groups_flat" in optimizer:
        return  # experts are in other files, flat states have other shapes
    base = optimizer.get("optimizer_state_dict", optimizer)
    states = base.get("state") if isinstance(base, dict) else None
    left = Counter(shapes)
    # Adafactor's rows and columns of a matrix lack one of its dimensions.
    factors = {shape[:i] + shape[i + 1 :] for shape in shapes for i in range(len(shape))}
    for values in states.values() if isinstance(states, dict) else ():
        tensors = values.values() if isinstance(values, dict) else ()
        own = {ref.shape for ref in tensors if isinstance(ref, TensorRef) and ref.shape}
        if len(own) != 1 or own & factors:
            continue  # no shape, or perhaps a tensor with a shape other than its parameter's
        left.subtract(own)
        if left[shape := own.pop()] < 0:
            directory, name = posixpath.split(files.model[0].path)
            problem = f"has fewer parameters of shape {shape} than the optimizer in {name}"
            raise LayoutError(directory, problem, f"a layer_*-model_states.pt is missing: {RESTORE}")


def _missing(name: str, layers: Sequence[LayerFile], files: ZeroFiles, tensor_rank: int) -> LayoutError:
    """Return the error for the missing layer of a parameter or buffer."""
    number, directory = name.partition(".")[0], posixpath.dirname(files.model[0].path)
    if not number.isdecimal():
        return LayoutError(directory, f"has no file of the layer that holds {name}", RESTORE)
    sliced = any(re.search(r"-model_\d", layer.file.path) for layer in layers)
    part = f"-model_{tensor_rank:02d}" if sliced else ""
    path = posixpath.join(directory, f"layer_{int(number):02d}{part}-model_states.pt")
    there = any(str(layer.layer) == number and layer.tensor_rank == tensor_rank for layer in layers)
    return LayoutError(path, f"lacks {name}" if there else f"is missing (it holds {name})", RESTORE)


def _sizes(files: ZeroFiles) -> dict[str, int]:
    """Return the elements of each trained parameter of a stage; empty if no file has the names."""
    if files.model[0].fields.values.get("param_shapes") is None:
        groups = mapped_sizes(files) if files.optimizer else []
    else:
        groups = [{n: math.prod(shape) for n, shape in group.items()} for group in read_param_shapes(files)]
    return {name: numel for group in groups for name, numel in group.items()}
