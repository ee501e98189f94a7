"""Select the tensors of a PEFT adapter and name them as in the adapter's file.

Source: peft 0.19, utils/save_and_load.py (``get_peft_model_state_dict``) and tuners' ``prefix`` attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import PlanError
from ckpttool.targets.weights import WeightSelection, select_weights

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

TUNERS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "vera_",
    "oft_",
    "boft_",
    "hra_",
    "bone_",
    "fourierft_",
    "randlora_",
    "road_",
)
"""Name prefixes of an adapter's tensors in a layer; the adapter's name follows."""
SAVED = "modules_to_save"
"""Name of a layer trained whole and saved with the adapter; the adapter's name follows."""
STEM = "adapter_model"
"""File name, without its suffix."""
CONFIG = "adapter_config.json"
"""The sidecar file that PEFT needs."""


def select_adapter(checkpoint: Checkpoint, *, source: str, dtype: str) -> WeightSelection:
    """Select the adapter's tensors, under the names of its file.

    Args:
        checkpoint: The source.
        source: As for ``select_weights``.
        dtype: As for ``select_weights``.

    Raises:
        PlanError: There is no adapter, or there are several.
    """
    parameters = {p.name for p in checkpoint.parameters}
    names = {name: found for name in parameters if (found := adapter_name(name))}
    adapters = sorted({adapter for adapter, _ in names.values()})
    if not adapters:
        hint = "leave out adapter_only=True"
        problem = "holds no PEFT adapter: no parameter is named like one"
        raise PlanError(checkpoint.location, problem, hint, ("adapter_only",))
    if len(adapters) > 1:
        problem = f"holds several adapters: {', '.join(adapters)}"
        hint = "leave out adapter_only=True, and choose one with include '*.NAME.*'"
        raise PlanError(checkpoint.location, problem, hint, ("adapter_only", "include"))
    chosen = select_weights(
        checkpoint, source=source, dtype=dtype, include=(), exclude=(), exclude_frozen=False, only=frozenset(names)
    )
    return WeightSelection(tuple(w.renamed(names[w.name][1]) for w in chosen.weights), {})


def adapter_name(name: str) -> tuple[str, str] | None:
    """Return (adapter, tensor name in its file) of a parameter; None if it belongs to no adapter."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.startswith(TUNERS):
            return parts[i + 1], ".".join(parts[: i + 1] + parts[i + 2 :])
        if part == SAVED:
            return parts[i + 1], ".".join(parts[:i] + parts[i + 2 :])
    return None
