"""Live engines of models that are spread over ranks: pipelines, layers cut by hand as Megatron's are, AutoTP, experts.

Each is built as the recipe of the fixtures builds it, over any number of slices and stages, and what its ranks hold is
put together as the model was cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Whole = Callable[[], dict[str, Any]]
"""Everything that all ranks hold together, by "fp32/NAME", "exp_avg/NAME", ..."""

LLAMA = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 20}
SIZES = {"megatron": (8, 4, 4), "megatron-uneven": (8, 5, 3)}


@dataclass(frozen=True)
class Parallel:
    """An engine whose ranks hold parts of a model."""

    engine: Any
    whole: Whole
    step: Callable[[], Any]
    """Takes a step; returns its loss."""


def build(model: str, config: dict[str, Any], *, tensor: int, stages: int, experts: int) -> Parallel:
    """Build the engine of a model.

    Args:
        model: "pipeline", "pipeline-by-hand", "megatron", "megatron-uneven", "autotp", "autotp-uneven", "autotp-fused",
            "moe", "moe-residual", "moe-pyramid", "autoep", "ulysses", "repeated", "zenflow"; or "plain".
        config: DeepSpeed's configuration.
        tensor: Slices of each layer.
        stages: Of the pipeline.
        experts: Ranks that the experts are spread over.
    """
    from recipes import tensor_parallel

    if model == "plain":
        return _plain(config)
    if model == "repeated":
        return _repeated(config)
    if model == "zenflow":
        return _zenflow(config)
    if model == "ulysses":
        return _ulysses(config)
    if model.startswith("moe"):
        return _moe(config, experts, residual=model != "moe", second=(2, 1) if model == "moe-pyramid" else None)
    if model == "autoep":
        return _autoep(config, experts)
    tensor_parallel.RANKS = tensor
    if model.startswith("pipeline"):
        return _pipeline(config, tensor, stages, by_hand=model.endswith("by-hand"))
    return _autotp(model, config) if model.startswith("autotp") else _megatron(config, SIZES[model])


def _optimizer(model: Any) -> Any:
    import torch
    from recipes.tensor_parallel import two_groups

    return torch.optim.AdamW(two_groups(model), betas=(0.5, 0.5), eps=1e-4)  # not what the fixtures have


def _tokens() -> Any:
    import torch

    return torch.arange(12).reshape(2, 6)


def _loss(logits: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), _tokens().flatten())


def _stepper(engine: Any, loss: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> Any:
        value = loss()
        engine.backward(value)
        engine.step()
        return value

    return step


def _pipeline(config: dict[str, Any], tensor: int, stages: int, *, by_hand: bool) -> Parallel:
    import deepspeed
    import torch.distributed as dist
    from recipes.pipeline import pipeline

    topology, model = pipeline(stages, dist.get_world_size() // stages // tensor, tensor, by_hand=by_hand)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    slice_of = topology.get_coord(dist.get_rank()).model if by_hand else 0
    data = itertools.repeat((_tokens(), _tokens()))
    return Parallel(engine, _whole(engine, slice_of), lambda: engine.train_batch(data))


def _megatron(config: dict[str, Any], sizes: tuple[int, int, int]) -> Parallel:
    import deepspeed
    from recipes.tensor_parallel import Grid, megatron_model

    grid = Grid()
    model = megatron_model(grid, sizes)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config, mpu=grid)
    return Parallel(engine, _whole(engine, grid.model_rank), _stepper(engine, lambda: _loss(engine(_tokens()))))


def _autotp(kind: str, config: dict[str, Any]) -> Parallel:
    import deepspeed
    import torch
    from deepspeed.utils import groups
    from recipes import tensor_parallel
    from recipes.parallel import gather

    fused = kind == "autotp-fused"
    sizes = tensor_parallel.UNEVEN if kind == "autotp-uneven" else tensor_parallel.EVEN
    model = tensor_parallel.fused_model() if fused else tensor_parallel.llama(sizes)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    if tensor_parallel.RANKS > 1:
        autotp = tensor_parallel.fused_config() if fused else {"autotp_size": tensor_parallel.RANKS}
        config = {**config, "tensor_parallel": autotp}

    def optimizer(_: Any) -> Any:
        every = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-4}]
        groups_of = tensor_parallel.two_groups(model) if fused else every
        return torch.optim.AdamW(groups_of, betas=(0.5, 0.5), eps=1e-4)

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    slice_, cuts = 0, {}
    if tensor_parallel.RANKS > 1:
        slice_ = groups.get_tensor_model_parallel_rank()
        parts = gather({"tensors": tensor_parallel.whole_slices(engine)})
        known = tensor_parallel.fused_cuts() if fused else None
        cuts = tensor_parallel.find_cuts(parts, gather(slice_), initial, known)

    def loss() -> Any:
        return _loss(engine(_tokens())) if fused else engine(input_ids=_tokens(), labels=_tokens()).loss

    return Parallel(engine, _whole(engine, slice_, cuts), _stepper(engine, loss))


def _plain(config: dict[str, Any]) -> Parallel:
    """The odd model, of which every rank has all, without a scheduler."""
    import deepspeed
    import torch
    from recipes import common, plain

    model = plain.build_model()
    for buffer in (model.positions, model.seen, model.mask):
        buffer.zero_()
    groups = [{**group, "lr": 0.5, "weight_decay": 0.25} for group in plain.param_groups(model)]
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.5), eps=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Parallel(engine, lambda: common.live_tensors(engine), _stepper(engine, lambda: _loss(engine(_tokens()))))


def _repeated(config: dict[str, Any]) -> Parallel:
    """Modules that are registered several times under one parent."""
    import deepspeed
    from recipes import common, repeated

    model = repeated.build_model()
    for buffer in model.buffers():
        buffer.zero_()
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    return Parallel(engine, lambda: common.live_tensors(engine), _stepper(engine, lambda: _loss(engine(_tokens()))))


def _zenflow(config: dict[str, Any]) -> Parallel:
    """With ZenFlow at stages 1 and 2, as it needs a GPU at stage 3."""
    import deepspeed
    import torch
    from recipes import common, zenflow

    class Adam(torch.optim.AdamW):  # type: ignore[misc]  # torch is untyped here
        """Takes what ZenFlow gives its own Adam, which needs a compiled op and counts steps in Python."""

        def step(self, closure: Any = None, *, step_id: int | None = None) -> Any:
            for state in self.state.values():
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32)
            return super().step(closure)

    model = zenflow.build_model()
    for buffer in model.buffers():
        buffer.zero_()
    options = {"lr": 0.5, "betas": [0.5, 0.5], "weight_decay": 0.25}
    config = {**config, "optimizer": {"type": "AdamW", "params": options}, "zero_force_ds_cpu_optimizer": False}
    if (zero := config["zero_optimization"])["stage"] < 3:
        config["zero_optimization"] = {**zero, **zenflow.ZERO}
    optimizer = Adam([{"params": list(model.parameters()), **options}], eps=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Parallel(engine, lambda: common.live_tensors(engine), _stepper(engine, lambda: _loss(engine(_tokens()))))


def _ulysses(config: dict[str, Any]) -> Parallel:
    """Two ranks share each sequence."""
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from recipes import common, sequence
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._release_sequence_parallel_groups()  # of the engine before, whose attention stays registered
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    model = sequence.build_model()
    unit = sequence.register(model)
    config = {**config, **{key: value for key, value in sequence.CONFIG.items() if value is not None}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config, mpu=unit)
    step = _stepper(engine, lambda: sequence.loss_of(engine, torch.arange(8)[None]))
    return Parallel(engine, lambda: common.live_tensors(engine), step)


def _moe(config: dict[str, Any], experts: int, *, residual: bool, second: tuple[int, int] | None) -> Parallel:
    import deepspeed
    import torch
    from recipes import moe
    from recipes.parallel import gather, live_part, merge_tensors, rename, the_same

    model = moe.build_model(experts, residual=residual, second=second)
    optimizer = torch.optim.AdamW(moe.split_groups(model), betas=(0.5, 0.5), eps=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def whole() -> dict[str, Any]:
        part = rename(live_part(engine), moe.global_name(engine.module))
        merged: dict[str, Any] = merge_tensors(gather(part), the_same)
        return merged

    return Parallel(engine, whole, _stepper(engine, lambda: _loss(engine(_tokens())[0])))


def _autoep(config: dict[str, Any], experts: int) -> Parallel:
    import deepspeed
    from deepspeed.utils import groups
    from recipes import moe
    from recipes.parallel import gather, live_part, merge_tensors

    model = moe.mixtral()
    config = {**config, **moe.autoep_config(experts)}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    merge = moe.merge_stacked(gather(groups._get_expert_parallel_rank(f"ep_size_{experts}")))

    def whole() -> dict[str, Any]:
        merged: dict[str, Any] = merge_tensors(gather(live_part(engine)), merge)
        return merged

    tokens = _tokens()
    return Parallel(engine, whole, _stepper(engine, lambda: engine(input_ids=tokens, labels=tokens).loss))


def _whole(engine: Any, slice_: int, cuts: dict[str, Any] | None = None) -> Whole:
    """What puts the ranks' parts together; without ``cuts``, as each parameter says that it was cut."""
    from recipes.parallel import gather, live_part, merge_tensors
    from recipes.tensor_parallel import Average, Same, merge_cut

    own = {name: p.cut for name, p in engine.module.named_parameters() if hasattr(p, "cut")}
    every = cuts or {name: cut for part in gather(own) for name, cut in part.items()}
    # Loaded, the copies of a mean are equal until they are trained.
    every = {name: Same() if isinstance(cut, Average) else cut for name, cut in every.items()}
    merge = merge_cut(every, gather(slice_))

    def whole() -> dict[str, Any]:
        merged: dict[str, Any] = merge_tensors(gather(live_part(engine)), merge)
        return merged

    return whole
