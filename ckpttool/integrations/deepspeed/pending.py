"""Accumulated gradients of an engine: no save has them, and a load, which replaces their weights, drops them.

Source: DeepSpeed 0.19.8, runtime/engine.py (``zero_grad``, ``micro_steps``), runtime/zero/stage_1_and_2.py
(``independent_gradient_partition_epilogue``, ``step``), runtime/zero/stage3.py (``zero_grad``: the next micro batch
overwrites the partitions) and runtime/bf16_optimizer.py (``clear_hp_grads``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine


def micro_batches(engine: Any) -> int:
    """Return the number of micro batches accumulated since the last step; 1 if there are some, but nothing counts them.

    Accelerate and the Trainer tell the engine before each micro batch whether a step follows, and call ``step`` only
    then, so that ``micro_steps`` counts steps. Where the caller accumulates (``managed_gradient_accumulation``), the
    engine knows nothing of it.
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
