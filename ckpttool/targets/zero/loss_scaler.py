"""The loss scaler of a native checkpoint.

Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

from ckpttool.containers.values import Opaque, TorchDType
from ckpttool.targets.torch_file import opaque_object

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
