"""The configuration that PEFT saves beside a LoRA adapter: its checks, and values by pattern.

Source: peft 0.21, tuners/lora/config.py (``LoraConfig``) and utils/other.py (``get_pattern_key``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Checkpoint

CONFIG = "adapter_config.json"
"""The file that PEFT keeps the scaling in."""
_COSTLY = re.compile(r"\)[*+?{]|\\[1-9]|\(\?[^:]|[+{].*[+{].*[+{]", re.DOTALL)
"""Parts of a pattern that can make matching take exponential time: repeated groups, references, many repetitions."""
MAX_PATTERN = 500
"""Maximum length of a pattern."""
MAX_STARS = 4
"""Repetitions of any length, ``*``, in a pattern must be fewer."""
SAME_BASE = ("gaussian", "eva", "orthogonal")
"""Texts in ``init_lora_weights`` of initialisations that do not change the base weights."""
_UNSUPPORTED = (
    "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "trainable_token_indices", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config", "alora_invocation_tokens",
)  # fmt: skip
"""Fields of a configuration whose merge is another one."""


def check_config(checkpoint: Checkpoint, adapter: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that is damaged, or whose adapter is not merged like LoRA.

    Raises:
        PlanError: It is.
    """
    of = f"{CONFIG} of adapter {adapter}" if adapter else CONFIG
    if config.get("peft_type") != "LORA":
        problem = f"has the PEFT method {brief(config.get('peft_type'))} in {of}, not LORA"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT, or leave out merge_lora", ("merge_lora",))
    if used := [name for name in _UNSUPPORTED if config.get(name)]:
        problem = f"was trained with {used[0]} (in {of}), which is not merged like LoRA"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT, or leave out merge_lora", ("merge_lora",))
    if not isinstance(config.get("lora_alpha"), int | float):
        raise PlanError(checkpoint.location, f"has no number lora_alpha in {of}", "restore the file from a copy")
    if not isinstance(config.get("r"), int | float | None):
        raise PlanError(checkpoint.location, f"has no number r in {of}", "restore the file from a copy")
    _check_patterns(checkpoint, config, "alpha_pattern")
    _check_patterns(checkpoint, config, "rank_pattern")


def check_initialisation(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refuse an adapter whose initialisation changed the base weights: it does not fit those of the base model.

    Source: peft 0.21, ``LoraLayer.update_layer`` (``pissa_init``, ``olora_init``, ``corda_init``, ``loftq_init``, ...).

    Raises:
        PlanError: The initialisation changed them.
    """
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower() not in SAME_BASE:
        problem = f"has an adapter with init_lora_weights={brief(how)}, which changed the weights of the base model"
        hint = "merge it with PEFT, or pass the checkpoint of the training run with its frozen weights"
        raise PlanError(checkpoint.location, problem, hint)


def by_pattern(patterns: Any, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def ranks_of(config: Mapping[str, Any], layer: str) -> set[Any]:
    """Return the ranks that a configuration allows for a layer: of all patterns that match, as PEFT sorts them anew."""
    patterns = config.get("rank_pattern") or {}
    found = {value for pattern, value in patterns.items() if by_pattern({pattern: value}, layer, None) is not None}
    return found or {config.get("r")}


def _check_patterns(checkpoint: Checkpoint, config: Mapping[str, Any], field: str) -> None:
    """Refuse values by pattern that are damaged, or whose patterns may take forever to match.

    Raises:
        PlanError: There is one.
    """
    patterns = config.get(field) or {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else [(patterns, None)]:
        sound = isinstance(pattern, str) and isinstance(value, int | float)
        if sound and not _COSTLY.search(pattern) and len(pattern) <= MAX_PATTERN and pattern.count("*") < MAX_STARS:
            try:
                re.compile(pattern)
            except re.error:
                sound = False
        else:
            sound = False
        if not sound:
            problem = f"has {brief(pattern)} in {field} of {CONFIG}, which is no number by a simple pattern"
            raise PlanError(checkpoint.location, problem, "restore the file from a copy, or merge it with PEFT")
