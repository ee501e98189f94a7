"""Inspect a live DeepSpeed engine: ranks, partitioning, groups, names, global batch and accumulated gradients.

No save has accumulated gradients, and a load, which replaces their weights, drops them.

Source: DeepSpeed 0.19.8, runtime/engine.py (``zero_grad``, ``micro_steps``), runtime/zero/stage_1_and_2.py
(``__init__``, ``independent_gradient_partition_epilogue``, ``step``), runtime/zero/stage3.py (``zero_grad``,
``_create_fp16_partitions_with_defragmentation``: the next micro batch overwrites the partitions) and
runtime/bf16_optimizer.py (``clear_hp_grads``).
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import itemsize
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.model import Topology
from ckpttool.model.batch import BatchSizes, equal_batch, fitting_numbers, saved_batch
from ckpttool.targets.zero.match import LiveModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.model import Checkpoint


PARTITIONED = {"DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"}
"""DeepSpeed's optimizer wrappers that partition states."""
OFFLOAD = "DeepSpeedZeRoOffload"
"""DeepSpeed's class in place of an optimizer, in a ZeRO-3 engine without one: it partitions only weights."""
WHOLE = {"FP16_Optimizer", "FP16_UnfusedOptimizer"}
"""DeepSpeed's optimizer wrappers that keep whole fp32 master weights on every rank."""
_ENGINE = (
    "checkpoint_engine",
    "load_checkpoint",
    "_load_checkpoint",
    "_get_ckpt_name",
    "_get_rank_zero_ckpt_name",
    "_get_expert_ckpt_name",
    "load_universal_checkpoint",
    "zero_load_from_fp32_weights",
    "zero_elastic_checkpoint",
    "zero_nvme_offload_optimizer",
    "param_names",
    "mp_world_size",
    "checkpoint_mp_rank",
    "seq_dp_world_size",
    "seq_data_parallel_group",
    "has_moe_layers",
    "lr_scheduler",
    "bfloat16_enabled",
    "fp16_enabled",
)
_OPTIMIZER = {
    "DeepSpeedZeroOptimizer": (
        "bit16_groups",
        "bit16_groups_flat",
        "single_partition_of_fp32_groups",
        "round_robin_gradients",
        "dp_process_group",
        "update_lp_params",
        "refresh_fp32_params",
        "optimizer",
        "load_state_dict",
    ),
    "BF16_Optimizer": (
        "bf16_groups",
        "bf16_groups_flat",
        "fp32_groups_flat_partition",
        "dp_process_group",
        "update_lp_params",
        "refresh_fp32_params",
        "optimizer",
        "load_state_dict",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        "fp16_groups",
        "sub_group_to_group_id",
        "fp32_partitioned_groups_flat",
        "sub_group_size",
        "dp_process_group",
        "checkpoint_event_prologue",
        "checkpoint_event_epilogue",
        "optimizer",
        "load_state_dict",
    ),
    "FP16_Optimizer": ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
    OFFLOAD: ("partition_all_parameters", "persistent_parameters"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveEngine:
    """A live engine, with its settings and topology."""

    engine: Any
    """The engine itself."""
    wrapper: str
    """DeepSpeed's class around the optimizer, or ``OFFLOAD``; "" if there is none."""
    stage: int
    """ZeRO stage; 0 without partitioning."""
    topology: Topology
    """Ranks."""
    rank: int
    """Index of this rank in its data-parallel group."""
    model_rank: int
    """Index of this rank among the tensor- and pipeline-parallel ranks."""
    dtype: str
    """Compute dtype, safetensors' spelling."""
    round_robin: bool
    sub_group_size: int
    alignment: int
    """Alignment, in elements, of each parameter in a flat buffer."""
    model: LiveModel | None
    """Names and shapes; None for a pipeline-parallel model."""
    hyperparameters: Sequence[dict[str, Any]]
    """Hyperparameters of each optimizer group."""

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's wrapper, or the optimizer itself."""
        return self.engine.optimizer

    @property
    def partitions_states(self) -> bool:
        """Whether the engine partitions master weights and optimizer states over ranks."""
        return self.wrapper in PARTITIONED

    @property
    def world(self) -> Any:
        """The data-parallel process group."""
        return self.optimizer.dp_process_group if self.partitions_states else self.engine.seq_data_parallel_group

    @property
    def masters(self) -> list[Any]:
        """This rank's flat partitions of fp32 weights: by group, or at stage 3 by sub-group."""
        names = {"DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups"}
        names |= {"BF16_Optimizer": "fp32_groups_flat_partition"}
        names |= {"DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat"}
        return list(getattr(self.optimizer, names[self.wrapper]))

    def parameters(self) -> dict[str, Any]:
        """The module's parameters by their first names."""
        return dict(self.engine.module.named_parameters())

    def buffers(self) -> dict[str, Any]:
        """The module's persistent buffers."""
        return persistent_buffers(self.engine.module)


@contextlib.contextmanager
def whole_layers(engine: Any) -> Iterator[None]:
    """Context manager: take away the wrappers of layers that drop random tokens, as DeepSpeed saves names without them.

    DeepSpeed itself loads those names only into an engine whose layers are not yet wrapped.

    Source: DeepSpeed 0.19.8, runtime/data_pipeline/data_routing/helper.py (``convert_to_random_ltd``,
    ``remove_random_ltd_state_dict``).
    """
    module: Any = getattr(engine, "module", None)
    named = module.named_modules() if hasattr(module, "named_modules") and not _is_pipeline(module) else ()
    wrappers = {name: m for name, m in named if type(m).__name__ == "RandomLayerTokenDrop"}

    def replace(layers: dict[str, Any]) -> None:
        for name, layer in layers.items():
            above, _, own = name.rpartition(".")
            module.get_submodule(above)._modules[own] = layer

    replace({name: wrapper.random_ltd_layer for name, wrapper in wrappers.items()})
    try:
        yield
    finally:
        replace(wrappers)


def parameters_on_nvme(live: LiveEngine) -> bool:
    """Return whether the engine keeps parameters on NVMe: DeepSpeed saves such an engine, but cannot load into it.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py (``_rigid_load_state_dict``: ``fp16_param.data`` of None).
    """
    return any(flat is None for flat in getattr(live.optimizer, "fp16_partitioned_groups_flat", ()))


def check_loadable(live: LiveEngine) -> None:
    """Check that DeepSpeed can load into an engine.

    After its load into an optimizer on NVMe, module weights and moments have the initial values, without an error.

    Raises:
        PlanError: It cannot.

    Source: DeepSpeed 0.19.8, ``load_checkpoint`` in a new process; tried on the CPU with 1 rank, on a GPU with 2.
    """
    if parameters_on_nvme(live):
        problem = f"has parameters on NVMe: DeepSpeed {version()} cannot load into it"
        raise PlanError("the engine", problem, 'set "device" of offload_param to "cpu"')
    if live.engine.zero_nvme_offload_optimizer():
        problem = f"keeps its optimizer on NVMe: a load by DeepSpeed {version()} leaves initial values there"
        raise PlanError("the engine", problem, 'set "device" of offload_optimizer to "cpu"')


def data_sampler(engine: Any) -> Any:
    """Return the sampler of an engine with curriculum learning; None without one.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_common_checkpoint_state``).
    """
    loader = getattr(engine, "training_dataloader", None)
    learns = loader is not None and engine.curriculum_learning_enabled()
    return getattr(loader, "data_sampler", None) if learns else None


def check_engine(engine: Any) -> None:
    """Check that an object is an engine of ``deepspeed.initialize``.

    Raises:
        ArgumentError: It is not.
    """
    if hasattr(engine, "checkpoint_engine") and hasattr(engine, "save_checkpoint"):
        return
    kind = type(engine)
    what = f"is of class {kind.__module__.partition('.')[0]}.{kind.__name__}".replace("builtins.", "")
    hint = "pass the engine, the first value that deepspeed.initialize returns"
    raise ArgumentError("engine", f"{what}, not a DeepSpeed engine of a training run", hint)


def inspect_engine(engine: Any) -> LiveEngine:
    """Inspect an engine.

    Raises:
        ArgumentError: It is not an engine.
        PlanError: The optimizer's wrapper is unknown, or this release of DeepSpeed has other attributes.
    """
    check_engine(engine)
    require(engine, "engine", _ENGINE)
    optimizer = engine.optimizer
    wrapper, name = _wrapper_of(optimizer), type(optimizer).__name__
    unknown = not wrapper and engine.zero_optimization() and optimizer is not None
    if name == "MiCS_Optimizer" or unknown or (wrapper == OFFLOAD and engine.has_moe_layers):
        raise PlanError(f"{name} of DeepSpeed {version()}", "is not known to ckpttool", "use engine.load_checkpoint")
    require(optimizer, name, _OPTIMIZER.get(wrapper, ()))
    stage = int(engine.zero_optimization_stage()) if wrapper in PARTITIONED else 0
    stage = max(1, stage) if wrapper in PARTITIONED else 0  # BF16_Optimizer partitions at stage 0 of a pipeline too
    stage = 3 if wrapper == OFFLOAD else stage
    pipeline = int(getattr(engine.module, "num_stages", 1)) if _is_pipeline(engine.module) else 1
    ranks, rank = _size_and_rank(
        optimizer.dp_process_group if wrapper in PARTITIONED else engine.seq_data_parallel_group
    )
    dtype = "BF16" if engine.bfloat16_enabled() else "F16" if engine.fp16_enabled() else "F32"
    aligned = stage in {1, 2} and getattr(optimizer, "parameter_alignment", False)
    groups = getattr(optimizer, "optimizer", optimizer).param_groups if has_optimizer(optimizer) else []
    return LiveEngine(
        engine=engine,
        wrapper=wrapper,
        stage=stage,
        topology=Topology(
            data_parallel=ranks,
            tensor_parallel=engine.mp_world_size // pipeline,
            pipeline_parallel=pipeline,
            expert_parallel=max(expert_sizes(engine), default=1),
        ),
        rank=rank,
        model_rank=int(engine.checkpoint_mp_rank),
        dtype=dtype,
        round_robin=stage in {1, 2} and bool(getattr(optimizer, "round_robin_gradients", False)),
        sub_group_size=int(getattr(optimizer, "sub_group_size", 0) or 0) or 1 << 62,
        alignment=16 // math.gcd(16, itemsize(dtype)) if aligned else 1,
        model=None if _is_pipeline(engine.module) else _model(engine, wrapper),
        hyperparameters=[{k: v for k, v in group.items() if k != "params"} for group in groups],
    )


def inspect_for_save(engine: Any) -> LiveEngine:
    """Inspect an engine that is to be saved.

    Raises:
        ArgumentError: It is not an engine.
        PlanError: A restore does not know its optimizer.
    """
    check_engine(engine)
    try:
        return inspect_engine(engine)
    except PlanError as error:
        raise PlanError(error.path, error.problem, "save with engine.save_checkpoint") from error


def _wrapper_of(optimizer: Any) -> str:
    """Return the name of DeepSpeed's class around an optimizer; "" without one."""
    known = [c.__name__ for c in type(optimizer).__mro__ if c.__name__ in {*PARTITIONED, *WHOLE, OFFLOAD}]
    return known[0] if known and (known[0] == OFFLOAD or has_optimizer(optimizer)) else ""


def has_optimizer(optimizer: Any) -> bool:
    """Return whether an engine trains; without an optimizer DeepSpeed keeps None, ``OFFLOAD`` or a wrapper of a dummy.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_configure_zero_optimizer``), runtime/bf16_optimizer.py.
    """
    if optimizer is None or type(optimizer).__name__ == OFFLOAD:
        return False
    return bool(getattr(optimizer, "using_real_optimizer", True))


def replaced_parameters(optimizer: Any) -> str:
    """Return why an optimizer beside whole masters has no state dict; "" for others.

    torch's Adagrad makes its states when it is built, and DeepSpeed then puts fp32 masters into its groups.

    Source: torch 2.13, optim/optimizer.py (``state_dict``); DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py.
    """
    if _wrapper_of(optimizer) not in WHOLE:
        return ""
    inner = optimizer.optimizer
    known = {id(p) for group in inner.param_groups for p in group["params"]}
    if all(id(p) in known for p in inner.state if hasattr(p, "data_ptr")):
        return ""
    return f"{type(inner).__name__} has states of parameters that DeepSpeed has replaced by masters"


def version() -> str:
    """DeepSpeed's version."""
    import deepspeed

    return str(deepspeed.__version__)


def require(owner: Any, description: str, names: Sequence[str]) -> None:
    """Check that the engine has the attributes that a load uses.

    Raises:
        PlanError: This release of DeepSpeed lacks an attribute.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        problem = f"has no {missing[0]} of the {description}, which ckpttool needs"
        raise PlanError(f"DeepSpeed {version()}", problem, "convert the checkpoint, and use engine.load_checkpoint")


def persistent_buffers(module: Any) -> dict[str, Any]:
    """The buffers in a module's state dict, by name."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: buffers[name] for name in module.state_dict() if name in buffers}


def shape_of(parameter: Any) -> tuple[int, ...]:
    """The shape of a parameter before stage 3 partitions it."""
    return tuple(int(n) for n in getattr(parameter, "ds_shape", parameter.shape))


def _model(engine: Any, wrapper: str) -> LiveModel:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        if id(p) in first:
            aliases[name] = first[id(p)]
        else:
            first[id(p)] = name
            shapes[name] = shape_of(p)
    groups = [[first[id(p)] for p in group if id(p) in first] for group in _groups(engine.optimizer, wrapper)]
    buffers = {name: tuple(b.shape) for name, b in persistent_buffers(engine.module).items()}
    state_dict, known = engine.module.state_dict(), {*shapes, *aliases, *buffers}
    return LiveModel(
        shapes=shapes,
        groups=groups,
        buffers=buffers,
        aliases=aliases,
        others=[name for name in state_dict if name not in known],
        left_out=[name for name in shapes if name not in state_dict],
    )


def _groups(optimizer: Any, wrapper: str) -> list[list[Any]]:
    """The trained parameters of every group, in the optimizer's order."""
    if wrapper == "DeepSpeedZeroOptimizer_Stage3":
        result: list[list[Any]] = [[] for _ in range(max(optimizer.sub_group_to_group_id.values(), default=-1) + 1)]
        for number, sub_group in enumerate(optimizer.fp16_groups):
            result[optimizer.sub_group_to_group_id[number]] += sub_group
        return result
    if wrapper in {"DeepSpeedZeroOptimizer", "BF16_Optimizer"}:
        groups = optimizer.bit16_groups if wrapper == "DeepSpeedZeroOptimizer" else optimizer.bf16_groups
    elif wrapper in WHOLE:
        groups = optimizer.fp16_groups
    else:
        groups = [group["params"] for group in optimizer.param_groups] if has_optimizer(optimizer) else []
    return [list(group) for group in groups]


def _is_pipeline(module: Any) -> bool:
    return any(c.__name__ == "PipelineModule" for c in type(module).__mro__)


def expert_sizes(engine: Any) -> set[int]:
    """Return the expert-parallel sizes of the layers of experts; empty without such layers."""
    if not engine.has_moe_layers:
        return set()
    from deepspeed.utils import groups

    # Not groups._get_max_expert_size_name(): it also returns groups of earlier engines.
    layers = [
        getattr(m, "ep_group_name", None) or getattr(m, "expert_group_name", None) for m in engine.module.modules()
    ]
    return {int(groups._get_expert_parallel_world_size(name)) for name in layers if name}


def _size_and_rank(group: Any) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_world_size(group), dist.get_rank(group)


def keeps_loss_scale(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Whether the engine can use the checkpoint's loss scale: it was saved, and by a run of the same dtype."""
    return checkpoint.loss_scaler is not None and checkpoint.dtype == live.dtype


LOG = logging.getLogger(__name__)


def engine_batch(engine: Any) -> BatchSizes:
    """Return the batch sizes of an engine."""
    return BatchSizes(
        int(engine.train_batch_size()),
        int(engine.train_micro_batch_size_per_gpu()),
        int(engine.gradient_accumulation_steps()),
    )


def batch_notes(engine: Any, checkpoint: Checkpoint) -> list[str]:
    """Return a note if the global batch differs, with the batch sizes that would give the saved one."""
    saved, own = saved_batch(checkpoint), engine_batch(engine)
    if saved is None or saved.whole == own.whole:
        return []
    ranks = max(1, own.whole // max(1, (own.micro or 1) * (own.accumulation or 1)))
    equal = equal_batch(saved.whole, ranks, own.micro)
    told = f"the global batch is {own.whole} samples, but was {saved.whole} in the saved run;"
    if equal is None:
        return [f"{told} {saved.whole} cannot be divided by {ranks} ranks: {fitting_numbers(saved.whole, ranks)}"]
    return [f"{told} for an equal one set {equal}"]


def warn_of(checkpoint: Checkpoint, notes: Sequence[str]) -> None:
    """Log notes as warnings, on the first rank."""
    import torch.distributed as dist

    for note in notes if not dist.is_initialized() or dist.get_rank() == 0 else ():
        LOG.warning("%s: %s", checkpoint.location, note)


def micro_batches(engine: Any) -> int:
    """Return the number of micro batches accumulated since the last step; 1 if there are some, but nothing counts them.

    Accelerate and the Trainer notify the engine before each micro batch whether a step follows, and call ``step`` only
    then, so that ``micro_steps`` counts steps. Where the caller accumulates (``managed_gradient_accumulation``), the
    engine is not informed.
    """
    boundary = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if boundary is not None:
        return int(not boundary)
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return 0
    return int(engine.micro_steps) % max(1, int(engine.gradient_accumulation_steps()))


def drop_gradients(live: LiveEngine) -> None:
    """Drop accumulated gradients, as after a step."""
    engine, optimizer = live.engine, live.optimizer
    count = micro_batches(engine)
    if not count:
        return
    if live.wrapper:
        optimizer.zero_grad()
    for parameter in engine.module.parameters():
        parameter.grad = None
    if live.wrapper == "DeepSpeedZeroOptimizer":
        _drop_partitions(optimizer)
    if engine._is_gradient_accumulation_boundary is None:
        engine.micro_steps -= count
    else:
        engine.set_gradient_accumulation_boundary(True)  # as after a step


def _drop_partitions(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in kept:
            kept[group] = None
    if hasattr(optimizer, "_offload_accumulated_param_ids"):
        optimizer._offload_accumulated_param_ids = set()
