"""A checkpoint of a PEFT model, and its base model -> the checkpoint of the model with LoRA adapters merged.

LoRA and DoRA of linear layers are merged; all else is refused.

Source: peft 0.21, tuners/lora/layer.py, tuners/lora/model.py (``_create_and_replace``), tuners/lora/config.py
(``LoraConfig``), utils/other.py (``get_pattern_key``, ``ModulesToSaveWrapper``) and utils/save_and_load.py
(``get_peft_model_state_dict``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import castable
from ckpttool.errors import PlanError
from ckpttool.extensions.merging.averaging import Combination
from ckpttool.extensions.merging.formulas import LowRankUpdate, MergedWeight
from ckpttool.messages import brief
from ckpttool.model import MODULE, UNKNOWN_GROUP, Buffer, Checkpoint, Parameter, State
from ckpttool.model.places import Computed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PREFIX = "base_model.model."
"""Prefix of the names in a PEFT model."""
_MATRIX = re.compile(r"(?P<layer>.+?)\.lora_(?P<kind>[AB])(?:\.(?P<adapter>[^.]+))?\.weight", re.DOTALL)
_MAGNITUDE = re.compile(
    r"(?P<layer>.+)\.lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?", re.DOTALL
)
_SAVED = re.compile(r"(?P<layer>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)", re.DOTALL)
_SAVED_AGAIN = re.compile(r"(?P<layer>.+)\.modules_to_save\.(?P<rest>weight|bias)", re.DOTALL)
"""A second copy that PEFT saves with ``bias="all"``, without the name of the adapter."""
_WRAPPED = (".base_layer.weight", ".base_layer.bias")
"""Ends of the names of a linear layer's own tensors."""
_ORIGINAL = re.compile(r"(?P<layer>.+)\.original_module\.(?P<rest>.+)", re.DOTALL)
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
    "fan_in_fan_out",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "alora_invocation_tokens",
)
"""Fields of a configuration that ask for another computation, or for layers that are not linear."""
MERGE_WITH_PEFT = "merge it with PEFT, or leave out merge_lora"


@dataclass(slots=True)
class _Layer:
    """The tensors of one adapter in one layer."""

    a: State | None = None
    b: State | None = None
    magnitude: State | None = None


@dataclass(slots=True)
class _Parts:
    """The tensors of a PEFT model, by their part in it; with the names of the base model."""

    layers: dict[str, dict[str, _Layer]] = field(default_factory=dict)
    """By adapter and layer."""
    saved: dict[str, dict[str, str]] = field(default_factory=dict)
    """``modules_to_save``, by adapter: the tensor's own name by its name in the base model."""
    plain: dict[str, str] = field(default_factory=dict)
    """All other tensors."""
    originals: dict[str, str] = field(default_factory=dict)
    """Tensors that ``modules_to_save`` replaces."""

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters; "" where a file contains a single one, without its name."""
        return sorted({*self.layers, *self.saved})


def adapters_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the LoRA adapters in a checkpoint; "" in a file of a single adapter, which has no name.

    Raises:
        PlanError: It has no adapters, or adapters of layers that are not linear.
    """
    found = _parts(checkpoint, _states(checkpoint)).adapters
    if not found:
        problem = "holds no LoRA adapter: no parameter is named like one"
        raise PlanError(checkpoint.location, problem, "leave out merge_lora", ("merge_lora",))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class MergedModel:
    """A model with adapters merged."""

    checkpoint: Checkpoint
    """Its weights, under the base model's names."""
    added: tuple[str, ...]
    """Tensors that were trained whole and that the base model does not store: it ties them to others."""


def merge_lora(
    checkpoint: Checkpoint, base: Checkpoint | None, configs: Mapping[str, Mapping[str, Any]]
) -> MergedModel:
    """Return the model with adapters merged.

    Args:
        checkpoint: The checkpoint with the adapters.
        base: The base model; None if ``checkpoint`` contains it.
        configs: ``adapter_config.json`` of each adapter to merge, in the order of merging.

    Raises:
        PlanError: A weight is missing or has another shape, or the adapters cannot be merged.
    """
    for adapter, config in configs.items():
        _check_config(checkpoint, adapter, config)
        if base is not None:
            _check_initialisation(checkpoint, config)
    first = checkpoint if base is None else base
    combination = Combination([checkpoint] if base is None else [base, checkpoint])
    own = {n: combination.state(0 if base is None else 1, s) for n, s in _states(checkpoint).items()}
    parts = _parts(checkpoint, own)
    tensors = _base_tensors(checkpoint, base, parts, own, configs)
    updates: dict[str, list[LowRankUpdate]] = {}
    for adapter, config in configs.items():
        for layer, found in parts.layers.get(adapter, {}).items():
            updates.setdefault(layer, []).append(_update(checkpoint, layer, found, config))
    aliases = _aliases(checkpoint, base, tensors)
    has_conv1d = _has_conv1d(tensors)
    for layer, merged in updates.items():
        name = _named(tensors, aliases, f"{layer}.weight", checkpoint)
        tensors[name] = _merged(checkpoint, name, tensors[name], merged, has_conv1d=has_conv1d)
    buffers = {b.name for c in (checkpoint, base) if c is not None for b in c.buffers}
    buffers = {_clean(name) for name in buffers}
    made = replace(
        first,
        parameters=tuple(
            Parameter(n, s.shape, UNKNOWN_GROUP, {MODULE: s}) for n, s in tensors.items() if n not in buffers
        ),
        buffers=tuple(Buffer(n, s) for n, s in tensors.items() if n in buffers),
        aliases=aliases,
        groups=(),
        files=tuple(combination.files),
        replicas=tuple(combination.replicas),
        has_newer_copies=False,
        notes=(*checkpoint.notes, *(() if base is None else base.notes)),
        remarks=(*checkpoint.remarks, *(() if base is None else base.remarks)),
    )
    stored = parts.plain.keys() | parts.originals.keys() if base is None else _states(base).keys()
    return MergedModel(made, tuple(name for name in tensors if name not in stored))


def _states(checkpoint: Checkpoint) -> dict[str, State]:
    held = {p.name: checkpoint.weights(p) for p in checkpoint.parameters}
    return held | {b.name: b.state for b in checkpoint.buffers}


def _clean(name: str) -> str:
    """Return the name of a tensor in the base model."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _parts(checkpoint: Checkpoint, states: Mapping[str, State]) -> _Parts:
    """Sort the tensors of a PEFT model.

    Raises:
        PlanError: A tensor belongs to an adapter of another method, or of a layer that is not linear.
    """
    parts = _Parts()
    wrapped = {n.rpartition(".base_layer.")[0] for n in states if ".base_layer." in n}
    for name, state in states.items():
        if found := _MATRIX.fullmatch(name):
            setattr(_layer(parts, found), found["kind"].lower(), state)
        elif found := _MAGNITUDE.fullmatch(name):
            _layer(parts, found).magnitude = state
        elif found := _SAVED.fullmatch(name):
            own = parts.saved.setdefault(found["adapter"], {})
            own[_clean(f"{found['layer']}.{found['rest']}")] = name
        elif found := _SAVED_AGAIN.fullmatch(name):
            parts.plain.setdefault(_clean(f"{found['layer']}.{found['rest']}"), name)
        elif found := _ORIGINAL.fullmatch(name):
            parts.originals[_clean(f"{found['layer']}.{found['rest']}")] = name
        elif ".lora_" in name or (_modules(name) & wrapped and not name.endswith(_WRAPPED)):
            problem = f"holds {name}, which is not of LoRA or DoRA of a linear layer"
            raise PlanError(checkpoint.location, problem, MERGE_WITH_PEFT, ("merge_lora",))
        else:
            parts.plain[_clean(name)] = name
    return parts


def _modules(name: str) -> set[str]:
    """Return the names of all modules around a tensor."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _layer(parts: _Parts, found: re.Match[str]) -> _Layer:
    layers = parts.layers.setdefault(found["adapter"] or "", {})
    return layers.setdefault(_clean(found["layer"] + ".").removesuffix("."), _Layer())


def _base_tensors(
    checkpoint: Checkpoint,
    base: Checkpoint | None,
    parts: _Parts,
    own: Mapping[str, State],
    configs: Mapping[str, Mapping[str, Any]],
) -> dict[str, State]:
    """Return the tensors of the model before merging: of the base, and those that were trained whole."""
    layers = [layer for adapter in configs for layer in parts.layers.get(adapter, {})]
    packed = parts.plain if base is None else _states(base)
    if attention := [layer for layer in layers if f"{layer}.in_proj_weight" in packed]:
        problem = f"has an adapter of {attention[0]}, an nn.MultiheadAttention, which holds several weights in one"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT", ("merge_lora",))
    held = [layer for layer in layers if f"{layer}.weight" in parts.plain]
    ties = _clean_aliases(checkpoint) if base is None else base.aliases
    if tied := [layer for layer in layers if f"{layer}.weight" in {*ties, *ties.values()}]:
        problem = f"has an adapter of {tied[0]}, whose weight the base model ties to another layer"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT", ("base",))
    if base is None:
        if missing := [layer for layer in layers if f"{layer}.weight" not in parts.plain]:
            problem = f"holds no base weight of {missing[0]}: frozen weights were left out when it was saved"
            raise PlanError(
                checkpoint.location,
                problem,
                "give the model that it was trained on as base: a directory or URL",
                ("base",),
            )
        tensors = {name: own[stored] for name, stored in parts.plain.items()}
        tensors |= {n: own[s] for n, s in parts.originals.items()}
    else:
        if len(held) == len(layers) and _states(base).keys() <= {*parts.plain, *parts.originals}:
            problem = f"holds the base weight of {held[0]} itself"
            raise PlanError(checkpoint.location, problem, "leave out base: two models may differ", ("base",))
        tensors = _states(base)
        whole = [m for config in configs.values() for m in config.get("modules_to_save") or ()]
        if unknown := [n for n in parts.plain if not _held(n, tensors, base) and not _is_in(n, whole)]:
            problem = f"holds {unknown[0]}, which the base model lacks"
            hint = (
                "give the model that it was trained on as base; if it ties that tensor to another, merge it with PEFT"
            )
            raise PlanError(checkpoint.location, problem, hint, ("base",))
        plain = {n: own[s] for n, s in parts.plain.items()}
        apart = [
            m for c in configs.values() if not c.get("ensure_weight_tying") for m in c.get("modules_to_save") or ()
        ]
        _untie(tensors, {n: s for n, s in plain.items() if _is_in(n, apart)}, base.aliases)
        _replace(tensors, plain, base)
    saved = [adapter for adapter in configs if parts.saved.get(adapter)]
    if len(saved) > 1:
        problem = f"has modules_to_save in the adapters {' and '.join(saved)}, but only one can be in the output"
        raise PlanError(checkpoint.location, problem, "choose one with adapter", ("adapter",))
    for adapter in saved:
        trained = {n: own[s] for n, s in parts.saved[adapter].items()}
        if not configs[adapter].get("ensure_weight_tying"):
            _untie(tensors, trained, _clean_aliases(base or checkpoint))
        _replace(tensors, trained, base or checkpoint)
    return tensors


def _untie(tensors: dict[str, State], trained: Mapping[str, State], aliases: Mapping[str, str]) -> None:
    """Keep the weights of the base model under the other names of a tensor that was trained apart from them.

    PEFT trains a copy of a module in ``modules_to_save``; tensors tied to the module keep the base weights.
    """
    for alias, name in aliases.items():
        if name in trained and name in tensors and alias not in trained:
            tensors.setdefault(alias, tensors[name])


def _held(name: str, tensors: Mapping[str, State], base: Checkpoint) -> bool:
    return base.aliases.get(name, name) in tensors


def _is_in(name: str, modules: Sequence[str]) -> bool:
    """Return whether a tensor belongs to a module that a configuration names by the end of its name."""
    return any(f".{module}." in f".{name}" for module in modules)


def _replace(tensors: dict[str, State], trained: Mapping[str, State], base: Checkpoint) -> None:
    """Replace tensors of the base model by trained ones.

    Raises:
        PlanError: The base model has no such tensor, or one of another shape.
    """
    for name, state in trained.items():
        known = tensors.get(name) or tensors.get(base.aliases.get(name, name))
        if known is not None and known.shape != state.shape:
            problem = f"has {name} with shape {list(known.shape)}, but it was trained with {list(state.shape)}"
            raise PlanError(base.location, problem, "give the model that it was trained on as base", ("base",))
        tensors[name] = state


def _aliases(checkpoint: Checkpoint, base: Checkpoint | None, tensors: Mapping[str, State]) -> dict[str, str]:
    """Return tied names of the result; a name with a tensor of its own is not tied any more."""
    known = _clean_aliases(base or checkpoint)
    return {a: n for a, n in known.items() if a not in tensors and n in tensors}


def _clean_aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tied names as the base model has them."""
    return {_clean(_base_name(alias)): _clean(_base_name(name)) for alias, name in checkpoint.aliases.items()}


def _base_name(name: str) -> str:
    found = _ORIGINAL.fullmatch(name)
    return f"{found['layer']}.{found['rest']}" if found else name


def _named(tensors: Mapping[str, State], aliases: Mapping[str, str], name: str, checkpoint: Checkpoint) -> str:
    """Return the name that a tensor is stored under.

    Raises:
        PlanError: The base model lacks it.
    """
    stored = aliases.get(name, name)
    if stored not in tensors:
        problem = f"has an adapter of {name}, which the base model lacks"
        raise PlanError(checkpoint.location, problem, "give the model that it was trained on as base", ("base",))
    return stored


def _update(checkpoint: Checkpoint, layer: str, found: _Layer, config: Mapping[str, Any]) -> LowRankUpdate:
    a, b = found.a, found.b
    if a is None or b is None:
        problem = f"holds only one of lora_A and lora_B of {layer}"
        raise PlanError(checkpoint.location, problem, "restore it from a copy")
    if len(a.shape) != 2 or len(b.shape) != 2:
        problem = f"has an adapter of the convolution {layer}"
        raise PlanError(checkpoint.location, problem, MERGE_WITH_PEFT, ("merge_lora",))
    rank = a.shape[0]
    if b.shape[1] != rank or not rank:
        problem = f"has lora_A and lora_B of {layer} with shapes {list(a.shape)} and {list(b.shape)}"
        raise PlanError(checkpoint.location, problem, "restore it from a copy")
    allowed = _ranks_of(config, layer)
    if rank not in allowed and None not in allowed:
        problem = f"has matrices of rank {rank} for {layer}, but {CONFIG} says {' or '.join(map(str, sorted(allowed)))}"
        raise PlanError(checkpoint.location, problem, "restore the file that was saved with the adapter")
    alpha = float(_by_pattern(config.get("alpha_pattern"), layer, config["lora_alpha"]))
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRankUpdate(a, b, scaling, found.magnitude)


def _has_conv1d(tensors: Mapping[str, State]) -> bool:
    """Return whether a model has layers of transformers' Conv1D, whose weights are (input features, output features).

    Non-square weights are recognised by the shape of their bias. Square weights are ambiguous, and PEFT records
    ``fan_in_fan_out`` of its last layer only.
    """
    biases = ((state, tensors.get(f"{name.removesuffix('.weight')}.bias")) for name, state in tensors.items())
    return any(
        bias is not None and len(s.shape) == 2 and s.shape[0] != s.shape[1] and bias.shape == s.shape[1:]
        for s, bias in biases
    )


def _merged(
    checkpoint: Checkpoint, name: str, base: State, updates: Sequence[LowRankUpdate], *, has_conv1d: bool
) -> State:
    """Return the state of a merged weight.

    Raises:
        PlanError: Its shape or type does not fit, it is a Conv1D, or the adapters are DoRA and others.
    """
    for update in updates:
        expected = (update.b.shape[0], update.a.shape[1])
        if base.shape == expected[::-1] and (has_conv1d or base.shape != expected):
            problem = f"has an adapter of {name}, which may be a Conv1D: only linear layers are merged"
            raise PlanError(checkpoint.location, problem, MERGE_WITH_PEFT, ("merge_lora",))
        if base.shape != expected:
            problem = f"has an adapter for {name} of shape {list(expected)}, but the base model has {list(base.shape)}"
            raise PlanError(checkpoint.location, problem, "give the model that it was trained on as base", ("base",))
    if not castable(base.dtype, "F32"):
        problem = f"has an adapter of {name}, which is {base.dtype} in the base model"
        raise PlanError(checkpoint.location, problem, "give a model in fp32, bf16 or fp16 as base", ("base",))
    if len(updates) > 1 and any(update.magnitude is not None for update in updates):
        problem = f"has several adapters, one of them DoRA, of {name}"
        hint = "choose one with adapter, or merge them with PEFT"
        raise PlanError(checkpoint.location, problem, hint, ("adapter",))
    return State(base.shape, "F32", Computed(base.numel), formula=MergedWeight(base, tuple(updates)))


def _check_config(checkpoint: Checkpoint, adapter: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that is damaged, or whose adapter is not merged like LoRA.

    Raises:
        PlanError: The configuration is damaged or not supported.
    """
    of = f"{CONFIG} of adapter {adapter}" if adapter else CONFIG
    if config.get("peft_type") != "LORA":
        problem = f"has the PEFT method {brief(config.get('peft_type'))} in {of}, not LORA"
        raise PlanError(checkpoint.location, problem, MERGE_WITH_PEFT, ("merge_lora",))
    if used := [name for name in _UNSUPPORTED if config.get(name)]:
        problem = f"was trained with {used[0]} (in {of}): only plain LoRA and DoRA of linear layers are merged"
        raise PlanError(checkpoint.location, problem, MERGE_WITH_PEFT, ("merge_lora",))
    if not isinstance(config.get("lora_alpha"), int | float):
        raise PlanError(checkpoint.location, f"has no number lora_alpha in {of}", "restore the file from a copy")
    if not isinstance(config.get("r"), int | float | None):
        raise PlanError(checkpoint.location, f"has no number r in {of}", "restore the file from a copy")
    _check_patterns(checkpoint, config, "alpha_pattern")
    _check_patterns(checkpoint, config, "rank_pattern")


def _check_initialisation(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refuse an adapter whose initialisation changed the base weights: it does not fit the original weights.

    Source: peft 0.21, ``LoraLayer.update_layer`` (``pissa_init``, ``olora_init``, ``corda_init``, ``loftq_init``, ...).

    Raises:
        PlanError: The initialisation changed them.
    """
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower() not in SAME_BASE:
        problem = f"has an adapter with init_lora_weights={brief(how)}, which changed the weights of the base model"
        hint = "merge it with PEFT, or pass the checkpoint of the training run with its frozen weights"
        raise PlanError(checkpoint.location, problem, hint)


def _by_pattern(patterns: Any, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _ranks_of(config: Mapping[str, Any], layer: str) -> set[Any]:
    """Return the ranks that a configuration allows for a layer: of all matching patterns, as PEFT reorders them."""
    patterns = config.get("rank_pattern") or {}
    found = {value for pattern, value in patterns.items() if _by_pattern({pattern: value}, layer, None) is not None}
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
            problem = f"has {brief(pattern)} in {field} of {CONFIG}, which is not a number with a simple pattern"
            raise PlanError(checkpoint.location, problem, "restore the file from a copy, or merge it with PEFT")
