"""Drop the accumulated gradients of an engine: a load replaces their weights.

Source: DeepSpeed 0.19.8, runtime/engine.py (``zero_grad``, ``micro_steps``), runtime/zero/stage_1_and_2.py
(``independent_gradient_partition_epilogue``, ``step``), runtime/zero/stage3.py (``zero_grad``: the next micro batch
overwrites the partitions) and runtime/bf16_optimizer.py (``clear_hp_grads``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine


def micro_batches(live: LiveEngine) -> int:
    """Return the number of micro batches accumulated since the last step."""
    engine = live.engine
    return int(engine.micro_steps) % max(1, int(engine.gradient_accumulation_steps()))


def drop_gradients(live: LiveEngine) -> None:
    """Drop accumulated gradients, as after a step."""
    count = micro_batches(live)
    if not count:
        return
    engine, optimizer = live.engine, live.optimizer
    if live.wrapper:
        optimizer.zero_grad()
    for parameter in engine.module.parameters():
        parameter.grad = None
    if live.wrapper == "DeepSpeedZeroOptimizer":
        _drop_partitions(optimizer)
    engine.micro_steps -= count


def _drop_partitions(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in kept:
            kept[group] = None
    if hasattr(optimizer, "_offload_accumulated_param_ids"):
        optimizer._offload_accumulated_param_ids = set()
