"""The second half of a load: pass the prepared state to DeepSpeed's own loading code.

Source: DeepSpeed 0.19.8, runtime/engine.py (``load_checkpoint``, ``_load_checkpoint``, ``_load_zero_checkpoint``),
runtime/zero/stage_1_and_2.py (``_load_legacy_checkpoint``, ``update_lp_params``), runtime/bf16_optimizer.py and
runtime/zero/stage3.py (``_rigid_load_state_dict``).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ckpttool.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.formats.zero.module import DATA_KEYS
from ckpttool.integrations.deepspeed.engine import OFFLOAD, WHOLE, data_sampler, has_optimizer, version
from ckpttool.integrations.deepspeed.load_native import base_state, native_files, own_experts
from ckpttool.integrations.deepspeed.prepared import NativeState, PlannedState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.deepspeed.load_native import OwnExpert
    from ckpttool.integrations.deepspeed.prepared import Replicas
    from ckpttool.model import Checkpoint

TAG = "checkpoint"
"""Tag of the scratch directory: DeepSpeed lists the directory."""
BROADCAST_BYTES = 1 << 25
"""Bytes of one broadcast."""
_STACKED = re.compile(r".*\.experts\.w[123]")


class Handover(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed is not followed
    """Checkpoint engine that returns content from memory in place of files.

    Args:
        files: Function that returns the content of a file, by file name. DeepSpeed loads some files twice: it inspects
            the first of a list before it loads the list (runtime/state_dict_factory.py, ``check_ckpt_list``).
    """

    def __init__(self, files: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.name = "ckpttool"
        self._files = files

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file.

        Raises:
            LayoutError: DeepSpeed requests an unexpected file.
        """
        name = os.path.basename(path)
        if name not in self._files:
            problem = f"was not prepared, but DeepSpeed {version()} loads it"
            raise LayoutError(name, problem, "convert the checkpoint, and use engine.load_checkpoint")
        return self._files[name]()

    def create(self, info: Any) -> None:
        """Not supported: this engine only loads."""
        raise NotImplementedError

    def save(self, state_dict: Any, path: str) -> None:
        """Not supported: this engine only loads."""
        raise NotImplementedError

    def commit(self, info: Any) -> None:
        """Not supported: this engine only loads."""
        raise NotImplementedError


def hand_over(live: LiveEngine, prepared: NativeState | PlannedState, *, scheduler: bool = True) -> dict[str, Any]:
    """Load the prepared state into the engine; return the client state in DeepSpeed's form.

    Args:
        live: The engine.
        prepared: The state.
        scheduler: Whether to load the state of the learning-rate scheduler.
    """
    checkpoint, engine = prepared.checkpoint, live.engine
    files, names = _files(live, prepared)
    scheduler = scheduler and engine.lr_scheduler is not None and checkpoint.scheduler is not None
    strict = prepared.fitted is None or not (prepared.fitted.missing or prepared.fitted.unexpected)
    left_out = live.model.left_out if live.model is not None else ()
    if live.model is not None and (left_out or live.model.others):
        strict = False  # the names were compared; the module's own loading functions may take others
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as scratch:
        os.mkdir(os.path.join(scratch, TAG))
        for name in names:
            with open(os.path.join(scratch, TAG, os.path.basename(name)), "wb"):
                pass
        replacements: dict[str, Any] = {
            "checkpoint_engine": Handover(files),
            "load_universal_checkpoint": lambda: False,  # no conversion is needed
        }
        if isinstance(prepared, PlannedState):
            replacements["zero_load_from_fp32_weights"] = lambda: True  # the 16-bit weights are updated below
            replacements["zero_elastic_checkpoint"] = lambda: False
        if live.partitions_states:
            # BF16_Optimizer of a pipeline partitions at stage 0 too; else DeepSpeed passes it the model's file.
            replacements["zero_optimization"] = lambda: True
        _prepare_data_states(live, prepared)
        kept = _set_aside(live, prepared)
        if live.stage == 3:
            # DeepSpeed rebuilds torch's Adagrad with its partitions, and its load adds them once more.
            for group in live.optimizer.optimizer.param_groups:
                group["params"] = []
        with _attributes_replaced(engine, replacements):
            _, client_state = engine.load_checkpoint(
                scratch, TAG, load_module_strict=strict, load_lr_scheduler_states=scheduler
            )
    files.clear()
    prepared.release()
    _put_back(live, kept)
    if scheduler and prepared.fitted is not None:
        _restore_rates(live, checkpoint, prepared.fitted.unrestored_groups)
    if left_out and live.stage in {1, 2}:
        live.optimizer.update_lp_params()
    if isinstance(prepared, PlannedState):
        _update_weights(live)
        _broadcast_replicas(live, prepared.replicas)
    return dict(client_state or {})


def _files(live: LiveEngine, prepared: NativeState | PlannedState) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the functions for ``Handover``, and the names of the files that DeepSpeed looks for on this rank."""
    checkpoint, engine = prepared.checkpoint, live.engine
    files: dict[str, Callable[[], Any]]
    if isinstance(prepared, NativeState):
        read_file, contents = prepared.read_file, prepared.files
        files, names = {}, []
        for file in checkpoint.files:
            if file.kind in {"model", "layer", "expert"} and file.rank in {None, live.rank}:
                names.append(file.name)
            if file.name not in contents:
                # DeepSpeed only counts the files of other ranks.
                ranks = {"mp_world_size": live.engine.mp_world_size} if file.kind == "model" else {}
                is_inspected = file.kind in {"model", "layer"}
                files[file.name] = partial(dict, ranks) if is_inspected else partial(read_file, file.name)
            elif file.kind in {"model", "layer"}:
                files[file.name] = partial(contents.__getitem__, file.name)
            else:
                files[file.name] = partial(contents.pop, file.name)
    else:
        model, *others = native_files(live, [])
        names = [model, *others[: bool(live.stage)]]
        files = {name: lambda: prepared.optimizer for name in names} | {model: partial(_model_states, live, prepared)}
        if live.stage < 3:
            experts = list(own_experts(engine))
            files |= {expert.file: partial(_expert_states, live, expert) for expert in experts}
            names += [expert.file for expert in experts]
    return files, names


def _prepare_data_states(live: LiveEngine, prepared: NativeState | PlannedState) -> None:
    """Take away absent states of data efficiency, which DeepSpeed would load, and the clusters of an earlier load.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_load_checkpoint``) and
    runtime/data_pipeline/data_sampling/data_sampler.py (``load_state_dict`` adds clusters).
    """
    for content in prepared.contents():
        for key in DATA_KEYS:
            if isinstance(content, dict) and content.get(key, ()) is None:
                del content[key]
    sampler = data_sampler(live.engine)
    if sampler is not None and "data_sampler" in prepared.checkpoint.data_states and hasattr(sampler, "data_clusters"):
        sampler.data_clusters, sampler.data_cluster_sizes = [], []


def _set_aside(live: LiveEngine, prepared: NativeState | PlannedState) -> list[tuple[int, str, Any]]:
    """Take values out of the optimizer's states that torch's load would change.

    torch casts tensors to the type of their parameter, also in containers, and rebuilds values other than numbers: text
    is lost, numpy arrays fail. DeepSpeed's kernels choose the types of their tensors by their settings, which may
    differ. Muon's momenta have the type of the gradients at stages 1 and 2, and are fp32 elsewhere. A dict of tensors
    is left in its place, too: the optimizer's own load may take it apart, as bitsandbytes does.

    Source: torch 2.13, optim/optimizer.py (``load_state_dict``, ``_process_value_according_to_param_policy``).

    Returns:
        Index of the parameter, name of the state, and value.
    """
    found: list[tuple[int, str, Any]] = []
    if not live.stage and not has_optimizer(live.optimizer):
        return found
    inner = getattr(live.optimizer, "optimizer", live.optimizer)
    by_settings = type(inner).__module__.startswith("deepspeed." if live.stage in {0, 3} else "deepspeed.ops.")
    for content in prepared.contents():
        base = base_state(content) or {}
        has_groups = isinstance(base.get("state"), dict) and "param_groups" in base
        numbers = [number for group in base["param_groups"] for number in group["params"]] if has_groups else []
        for index, number in enumerate(numbers):
            states = base["state"].get(number, {})
            for key, value in list(states.items()):
                if isinstance(value, torch.Tensor):
                    if not by_settings and key != "step":
                        found.append((index, key, value))
                elif _is_dict_of_tensors(value):
                    found.append((index, key, value))
                elif not isinstance(value, int | float | complex | None):
                    found.append((index, key, states.pop(key)))
    return found


def _put_back(live: LiveEngine, kept: Sequence[tuple[int, str, Any]]) -> None:
    """Put the values back that ``_set_aside`` took, as they were saved."""
    if not kept:
        return
    inner = getattr(live.optimizer, "optimizer", live.optimizer)
    owners = [p for group in inner.param_groups for p in group["params"]]
    if live.stage == 3:
        group_of, flats = live.optimizer.sub_group_to_group_id, live.optimizer.fp32_partitioned_groups_flat
        owners = [flats[i] for i in sorted(range(len(flats)), key=lambda i: (group_of[i], i))]
    for index, key, value in kept:
        owner = owners[index]
        loaded = inner.state[owner].get(key)
        if _is_dict_of_tensors(value) and loaded is None:
            continue
        if not isinstance(value, torch.Tensor):
            _move_tensors(value, owner.device)
            inner.state[owner][key] = value
        elif isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype and loaded.shape == value.shape:
            inner.state[owner][key] = value.to(loaded.device, copy=True)


def _is_dict_of_tensors(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


def _move_tensors(value: Any, device: torch.device) -> None:
    """Move the tensors in a container to a device, in place: containers of any class are not replaced."""
    if isinstance(value, torch.Tensor):
        value.data = value.data.to(device)
    elif isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        for item in value.values() if isinstance(value, dict) else value:
            _move_tensors(item, device)


def hand_over_run(live: LiveEngine, prepared: PlannedState, *, scheduler: bool) -> None:
    """Load the counters and the scheduler, without the optimizer.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_load_checkpoint``).
    """
    checkpoint, engine = prepared.checkpoint, live.engine
    engine.global_steps = checkpoint.step or 0
    computed = engine.global_steps * engine.train_batch_size()
    engine.global_samples = computed if checkpoint.samples is None else checkpoint.samples
    engine.skipped_steps = checkpoint.skipped_steps
    saved = (prepared.run_state or {}).get("scheduler")
    if scheduler and engine.lr_scheduler is not None and saved is not None:
        engine.lr_scheduler.load_state_dict(saved)
        _restore_rates(live, checkpoint, range(len(live.hyperparameters)))


def _restore_rates(live: LiveEngine, checkpoint: Checkpoint, kept: Collection[int]) -> None:
    """Set the learning rates of groups without saved hyper-parameters by the scheduler.

    Source: DeepSpeed 0.19.8, runtime/lr_schedules.py (``get_lr``: the rates since the last step).
    """
    scheduler, saved = live.engine.lr_scheduler, checkpoint.scheduler
    if not kept or scheduler is None or not isinstance(saved, dict):
        return
    driven = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    groups = live.optimizer.param_groups
    if driven is not None and not all(one is other for one, other in zip(driven, groups, strict=False)):
        return  # the scheduler drives an optimizer that DeepSpeed has replaced
    rates = saved.get("_last_lr")
    if rates is None and saved.get("last_batch_iteration", -1) >= 0 and hasattr(scheduler, "get_lr"):
        rates = scheduler.get_lr()
    for number, group in enumerate(groups):
        if number in kept and rates is not None and len(rates) == len(groups):
            group["lr"] = rates[number]


def hand_over_weights(live: LiveEngine, prepared: PlannedState) -> None:
    """Load only fp32 master weights, weights and buffers."""
    optimizer = live.optimizer
    if live.wrapper == OFFLOAD:
        optimizer.partition_all_parameters()
        _broadcast_replicas(live, prepared.replicas)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        return
    if live.stage:
        if live.stage == 3:
            optimizer.checkpoint_event_prologue()
        states = prepared.optimizer["optimizer_state_dict"]
        kept = (
            "param_alignment_paddings",
            "single_partition_of_fp32_groups",
            "fp32_flat_groups",
            "ds_zero_partition_groups",
        )
        partitions = {key: states[key] for key in kept if key in states}
        for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
            if hasattr(optimizer, key):
                partitions[key] = getattr(optimizer, key)
        partitions |= {"ds_version": version(), "base_optimizer_state": {}}
        ranks: list[Any] = [None] * live.topology.data_parallel
        ranks[live.rank] = partitions
        optimizer.load_state_dict(ranks, load_optimizer_states=False, load_from_fp32_weights=True)
        if live.stage == 3:
            fragments = prepared.model["frozen_param_fragments"] or {}
            parameters = live.parameters()
            for name, values in fragments.items():
                parameters[name].ds_tensor.data.copy_(values)
            optimizer.checkpoint_event_epilogue()
        del ranks, partitions, states
        prepared.release()
    _update_weights(live)
    _broadcast_replicas(live, prepared.replicas)


@contextlib.contextmanager
def _attributes_replaced(engine: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: replace attributes of an engine."""
    saved = {name: engine.__dict__[name] for name in attributes if name in engine.__dict__}
    engine.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            engine.__dict__.pop(name, None)
        engine.__dict__.update(saved)


def _model_states(live: LiveEngine, prepared: PlannedState) -> dict[str, Any]:
    """Return the model states, with the weights of the live module: DeepSpeed requires all names."""
    states = prepared.model
    module = live.engine.module.state_dict()
    if live.stage == 3 and live.engine.has_moe_layers:
        # DeepSpeed gathers stacked experts: the values in the live module are not gathered.
        module = {name: value for name, value in module.items() if not _STACKED.fullmatch(name)}
    states["module"] = module
    fragments = states["frozen_param_fragments"]
    if fragments is not None and live.model is not None:
        parameters = live.parameters()
        for name in live.model.frozen:
            fragments.setdefault(name, parameters[name].ds_tensor.data)
    return states


def _expert_states(live: LiveEngine, expert: OwnExpert) -> dict[str, Any]:
    """Return the states of an expert's file: empty, because the module has them; for stacked experts, their values."""
    if not expert.module:
        return {}
    parameters, prefix = live.parameters(), f"{expert.module}.experts"
    names = [f"{prefix}.{kind}" for kind in ("w1", "w2", "w3")]
    return {f"{name}.{expert.number}": parameters[name].data[expert.local] for name in names}


def _update_weights(live: LiveEngine) -> None:
    """Update the 16-bit weights from the fp32 master weights."""
    if live.stage in {1, 2}:
        live.optimizer.update_lp_params()
        if not live.engine.zero_load_from_fp32_weights():
            live.optimizer.refresh_fp32_params()


# --------------------------------------------------------------------------------------------------- replicas


def _broadcast_replicas(live: LiveEngine, replicas: Replicas | None) -> None:
    """Broadcast replicated state to all ranks, each slice from the rank that read it."""
    if replicas is None or not replicas.nbytes:
        return
    targets = targets_by_name(live)
    device = "cpu" if dist.get_backend(live.world) == "gloo" else live.engine.device
    own = torch.frombuffer(replicas.own, dtype=torch.uint8) if replicas.own else None
    tensors = iter(replicas.tensors)
    current = next(tensors, None)
    buffer = torch.empty(min(BROADCAST_BYTES, replicas.nbytes), dtype=torch.uint8, device=device)
    for rank, first in enumerate(range(0, replicas.nbytes, replicas.slice_bytes)):
        last = min(first + replicas.slice_bytes, replicas.nbytes)
        for start in range(first, last, BROADCAST_BYTES):
            end = min(start + BROADCAST_BYTES, last)
            piece = buffer[: end - start]
            if rank == live.rank and own is not None:
                piece.copy_(own[start - first : end - first])
            if live.topology.data_parallel > 1:
                dist.broadcast(piece, dist.get_global_rank(live.world, rank), group=live.world)
            while current is not None and current.start < end:
                low, high = max(current.start, start), min(current.start + current.nbytes, end)
                if low < high:
                    dtype = DTYPES[current.dtype]
                    values = piece[low - start : high - start].view(getattr(torch, dtype.torch))
                    element = (low - current.start) // dtype.itemsize
                    for target in targets[current.name]:
                        target.copy(element, values)
                if current.start + current.nbytes > end:
                    break
                current = next(tensors, None)


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor that contains a value, or a rank's partition of it."""

    tensor: torch.Tensor
    start: int = 0
    """First element of the value in the tensor, flattened."""

    def copy(self, first: int, values: torch.Tensor) -> None:
        """Copy the elements of the value from ``first`` on, as far as the tensor contains them, cast to its dtype."""
        low, high = max(first, self.start), min(first + values.numel(), self.start + self.tensor.numel())
        if low >= high:
            return
        values = values[low - first : high - first]
        if self.tensor.is_contiguous():
            self.tensor.view(-1)[low - self.start : high - self.start].copy_(values)
            return
        whole = self.tensor.reshape(-1).clone()
        whole[low - self.start : high - self.start] = values.to(whole.dtype)
        self.tensor.copy_(whole.view(self.tensor.shape))


def targets_by_name(live: LiveEngine) -> dict[str, list[_Target]]:
    """Return the tensors of each replicated value: the parameter or buffer, and its fp32 master weights if any."""
    targets = {name: [_Target(b.data)] for name, b in live.buffers().items()}
    for name, p in live.parameters().items():
        if live.wrapper == OFFLOAD:
            partition = p.ds_tensor.data
            targets[name] = [_Target(partition, dist.get_rank(p.ds_process_group) * partition.numel())]
        else:
            targets[name] = [_Target(p.data)]
    if live.wrapper not in WHOLE:
        return targets
    optimizer = live.optimizer
    names = {id(p): name for name, p in live.parameters().items()}
    for number, group in enumerate(optimizer.fp16_groups):
        for position, p in enumerate(group):
            if live.wrapper == "FP16_Optimizer":
                flat = optimizer.fp16_groups_flat[number]
                at = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
                master = optimizer.fp32_groups_flat[number].data[at : at + p.numel()].view(p.shape)
            else:
                master = optimizer.fp32_groups[number][position].data
            targets[names[id(p)]].append(_Target(master))
    return targets
