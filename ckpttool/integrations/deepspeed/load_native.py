"""Native load: read the files that DeepSpeed would load, for an engine with the same partitioning."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError
from ckpttool.integrations.deepspeed.prepared import NativeState
from ckpttool.integrations.torch.objects import read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint
    from ckpttool.targets.zero.match import Fitted

EXPERT_LAYERS = {"MoE", "AutoEPMoELayer"}
"""DeepSpeed's modules that contain experts."""


def read_native(
    live: LiveEngine,
    checkpoint: Checkpoint,
    fitted: Fitted | None,
    options: LoadOptions,
) -> NativeState:
    """Read the files for this rank.

    Raises:
        CkptError: A file is missing, or reading failed.
    """
    from ckpttool.integrations.deepspeed import stage0
    from ckpttool.integrations.deepspeed.states import check_form  # imports torch

    numbers = {file.name: number for number, file in enumerate(checkpoint.files)}
    needed = [name for name in native_files(live, list(numbers)) if name in numbers]
    nbytes = sum(checkpoint.files[numbers[name]].nbytes for name in needed)

    def read(name: str) -> Any:
        if name not in numbers:
            raise LayoutError(f"{checkpoint.location}/{name}", "is missing", "restore it from a copy")
        return read_file(checkpoint, numbers[name], options)

    # Without ZeRO the optimizer only numbers its parameters: names come from a comparison of weights.
    by_name = (
        not live.stage and live.model is not None and not live.engine.has_moe_layers and live.optimizer is not None
    )
    files: dict[str, Any] = {}
    reads = not options.dry_run or (not live.stage and (not by_name or stage0.needs_weights(live, checkpoint)))
    if reads:
        files = {name: _completed(live, _rigid(live, read(name))) for name in needed}
    for content in files.values():
        if (base := base_state(content)) is not None:
            check_form(live, checkpoint, base)
    if by_name and fitted is not None and live.model is not None:
        names = stage0.saved_names(checkpoint)
        model_states = files.get(needed[0])
        checkpoint, fitted = stage0.prepare_whole(live, checkpoint, fitted, model_states, names, strict=options.strict)
    for content in files.values() if not live.stage and not by_name else ():
        if isinstance(content, dict) and content.get("optimizer") is not None:
            stage0.check_wrapper(live, checkpoint, content)
            stage0.check_places(live, checkpoint, content)
    notes = () if fitted is None else fitted.notes
    return NativeState(
        checkpoint=checkpoint,
        fitted=fitted,
        nbytes_read=nbytes,
        files=files,
        read_file=read,
        notes=(*notes, *map(str, checkpoint.notes), *checkpoint.remarks),
    )


def _rigid(live: LiveEngine, content: Any) -> Any:
    """Return the content of a file with the optimizer's whole state dict, which elastic checkpoints leave out.

    They list the states of each group, without padding; DeepSpeed loads them only if the groups have a step.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_get_base_optimizer_state``,
    ``_restore_step_from_elastic_checkpoint``).
    """
    states = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    listed = states.get("base_optimizer_state") if isinstance(states, dict) else None
    if states is None or not isinstance(listed, list):
        return content
    step = states.pop("base_optimizer_state_step", None)
    options = [group if step is None else {**group, "step": step} for group in live.hyperparameters]
    masters = zip(listed, states["single_partition_of_fp32_groups"], live.masters, strict=True)
    states["base_optimizer_state"] = {
        "state": {
            number: {key: _padded(value, lean, own) for key, value in group.items()}
            for number, (group, lean, own) in enumerate(masters)
            if group
        },
        "param_groups": [{**group, "params": [number]} for number, group in enumerate(options)],
    }
    return content


def _completed(live: LiveEngine, content: Any) -> Any:
    """Return the content of a file with all parameters that are frozen now: DeepSpeed lists those frozen at the save.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``load_module_state_dict``, ``_get_zero_frozen_param_attributes``).
    """
    fragments = content.get("frozen_param_fragments") if isinstance(content, dict) else None
    if fragments is not None and live.stage < 3:
        module = content["module"]
        for name, p in live.parameters().items():
            if not p.requires_grad and name in module:
                fragments.setdefault(name, module[name])
    return content


def base_state(content: Any) -> Any:
    """Return the state dict of the inner optimizer in a file; None if it has none."""
    whole = content.get("optimizer_state_dict") or content.get("optimizer") if isinstance(content, dict) else None
    if not isinstance(whole, dict):
        return None
    base = whole.get("base_optimizer_state") or whole.get("optimizer_state_dict") or whole
    return base if isinstance(base, dict) else None


def _padded(value: Any, lean: Any, own: Any) -> Any:
    """Return a state of a partition without padding in the length of the engine's partition."""
    if getattr(value, "shape", None) != lean.shape or lean.shape == own.shape:
        return value
    padded = value.new_zeros(own.shape)
    padded[: value.numel()] = value
    return padded


def native_files(live: LiveEngine, names: Sequence[str]) -> list[str]:
    """Return the names of the checkpoint's files that DeepSpeed loads on this rank.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_load_checkpoint``, ``_get_all_zero_checkpoint_state_dicts``) and
    runtime/pipe/module.py (``load_state_dir``).
    """
    engine = live.engine
    needed = [engine._get_ckpt_name("", "")]
    if live.stage:
        bf16 = engine.bfloat16_enabled()
        needed.append(engine._get_rank_zero_ckpt_name("", "", engine.checkpoint_mp_rank, live.rank, bf16_mode=bf16))
    elif engine.has_moe_layers:
        from deepspeed.utils import groups

        expert_rank = groups._get_expert_parallel_rank(groups._get_max_expert_size_name())
        needed.append(engine._get_optimizer_ckpt_name("", "", expert_rank))
    if live.model is None:
        grid, module = engine.module._grid, engine.module
        rank, ranks = grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()
        for number, layer in enumerate(module.forward_funcs):
            if hasattr(layer, "load_state_dict"):
                files = sorted(fnmatch.filter(names, f"layer_{number + module._local_start:02d}-*model_states.pt"))
                needed += files[rank * len(files) // ranks :][:1]
    if not (live.stage == 3 and engine.has_moe_layers):
        needed += [expert.file for expert in own_experts(engine)]
    return [os.path.basename(name) for name in needed]


@dataclass(frozen=True, slots=True)
class OwnExpert:
    """An expert of this rank."""

    file: str
    """Name of its file."""
    module: str
    """Name of the layer, if its experts are stacked; "" if each expert is a module."""
    local: int
    """Index of the expert on this rank."""
    number: int
    """Index of the expert in the layer."""


def own_experts(engine: Any) -> Iterator[OwnExpert]:
    """Yield the experts whose files DeepSpeed loads.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``load_moe_state_dict``).
    """
    if not engine.has_moe_layers:
        return
    from deepspeed.utils import groups

    layer = 0
    for name, module in engine.module.named_modules():
        kind = {c.__name__ for c in type(module).__mro__}
        if not kind & EXPERT_LAYERS:
            continue
        stacked = "AutoEPMoELayer" in kind
        rank = groups._get_expert_parallel_rank(module.ep_group_name if stacked else module.expert_group_name)
        for local in range(module.num_local_experts):
            number = rank * module.num_local_experts + local
            path = engine._get_expert_ckpt_name("", layer, number, "", checkpoint_mp_rank=engine.checkpoint_mp_rank)
            yield OwnExpert(os.path.basename(path), name if stacked else "", local, number)
        layer += 1
