"""Which tensors a PEFT adapter is made of, and what the adapter's file calls them.

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
"""What the names of the adapters' parts of a layer begin with; the adapter's own name follows."""
SAVED = "modules_to_save"
"""A layer that is trained whole and saved with the adapter; the adapter's name follows."""
STEM = "adapter_model"
"""Name of the file, without its ending."""
CONFIG = "adapter_config.json"
"""What PEFT needs beside it."""


def select_adapter(checkpoint: Checkpoint, *, source: str, dtype: str) -> WeightSelection:
    """The adapter's tensors, under the names of its file.

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
    """(the adapter, the tensor's name in its file) of a parameter; None if it belongs to none."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.startswith(TUNERS):
            return parts[i + 1], ".".join(parts[: i + 1] + parts[i + 2 :])
        if part == SAVED:
            return parts[i + 1], ".".join(parts[:i] + parts[i + 2 :])
    return None
