"""A checkpoint of a PEFT model, and its base model -> the checkpoint of the model with LoRA adapters merged.

Source: peft 0.21, tuners/lora/layer.py, tuners/lora/model.py (``_create_and_replace``), utils/other.py
(``get_pattern_key``, ``ModulesToSaveWrapper``) and utils/save_and_load.py (``get_peft_model_state_dict``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import castable
from ckpttool.errors import PlanError
from ckpttool.model import MODULE, UNKNOWN_GROUP, Buffer, Checkpoint, Parameter, State
from ckpttool.model.derived.combination import Combination
from ckpttool.model.derived.lora_config import CONFIG, by_pattern, check_config, check_initialisation, ranks_of
from ckpttool.model.formulas import LowRankUpdate, MergedWeight, ScaledSum
from ckpttool.model.places import Computed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "base_model.model."
"""Prefix of the names in a PEFT model."""
_MATRIX = re.compile(r"(?P<layer>.+?)\.(?P<kind>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.(?P<what>weight|bias)", re.DOTALL)
_EMBEDDING = re.compile(r"(?P<layer>.+)\.lora_embedding_(?P<kind>[AB])(?:\.(?P<adapter>[^.]+))?", re.DOTALL)
_MAGNITUDE = re.compile(
    r"(?P<layer>.+)\.lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?", re.DOTALL
)
_SAVED = re.compile(r"(?P<layer>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)", re.DOTALL)
_SAVED_AGAIN = re.compile(r"(?P<layer>.+)\.modules_to_save\.(?P<rest>weight|bias)", re.DOTALL)
"""A second copy that PEFT saves with ``bias="all"``, without the name of the adapter."""
_ORIGINAL = re.compile(r"(?P<layer>.+)\.original_module\.(?P<rest>.+)", re.DOTALL)
OTHER_METHODS = re.compile(
    r"\.(?:lora_|adamss_|beft_|boft_|bone_|c3a_|deft_|delora_|fourierft_|frod_|glora_|gralora_|hada_|hira_|hra_|ia3_"
    r"|lily_|ln_tuning_|lokr_|miss_|oft_|osf_|peanut_|poly_|psoft_|pvera_|randlora_|road_|shadow_|shira_|supertuning_"
    r"|tinylora_|token_adapter|trainable_tokens_|unilora_|vblora_|vera_|waveft_)"
)
"""Tensors of other methods. Source: PEFT 0.21, ``prefix`` of each class in peft/tuners/*/model.py."""


@dataclass(slots=True)
class _Layer:
    """The tensors of one adapter in one layer."""

    a: State | None = None
    b: State | None = None
    magnitude: State | None = None
    bias: State | None = None
    embedding: bool = False


@dataclass(slots=True)
class _Parts:
    """The tensors of a PEFT model, by their part in it; names are those of the base model."""

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
        """Names of the adapters; "" where a file holds a single one, without its name."""
        return sorted({*self.layers, *self.saved})


def adapters_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the LoRA adapters in a checkpoint; "" in a file of a single adapter, which has no name.

    Raises:
        PlanError: It has none, or adapters of another method.
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
        base: The base model; None if ``checkpoint`` holds it.
        configs: ``adapter_config.json`` of each adapter to merge, in the order of merging.

    Raises:
        PlanError: A weight is missing or has another shape, or the adapters cannot be merged.
    """
    for adapter, config in configs.items():
        check_config(checkpoint, adapter, config)
        if base is not None:
            check_initialisation(checkpoint, config)
    first = checkpoint if base is None else base
    combination = Combination([checkpoint] if base is None else [base, checkpoint])
    own = {n: combination.state(0 if base is None else 1, s) for n, s in _states(checkpoint).items()}
    parts = _parts(checkpoint, own)
    tensors = _base_tensors(checkpoint, base, parts, own, configs)
    updates: dict[str, list[LowRankUpdate]] = {}
    conv1d: dict[str, set[bool]] = {}
    biases: dict[str, list[tuple[State, float]]] = {}
    for adapter, config in configs.items():
        for layer, found in parts.layers.get(adapter, {}).items():
            updates.setdefault(layer, []).append(update := _update(checkpoint, layer, found, config))
            conv1d.setdefault(layer, set()).add(bool(config.get("fan_in_fan_out")))
            if found.bias is not None:
                biases.setdefault(layer, []).append((found.bias, update.scaling))
    aliases = _aliases(checkpoint, base, tensors)
    kinds = _kinds(tensors)
    for layer, merged in updates.items():
        name = _named(tensors, aliases, f"{layer}.weight", checkpoint)
        known = conv1d[layer] | (_kind_around(kinds, layer) if f"{layer}.bias" in tensors else {False})
        tensors[name] = _merged(checkpoint, name, tensors[name], merged, known, embedding=_is_embedding(parts, layer))
    for layer, terms in biases.items():
        name = _named(tensors, aliases, f"{layer}.bias", checkpoint)
        formula = ScaledSum(tensors[name], tuple(s for s, _ in terms), tuple(f for _, f in terms))
        tensors[name] = State(tensors[name].shape, "F32", Computed(tensors[name].numel), formula=formula)
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
        remarks=(*checkpoint.remarks, *(() if base is None else base.remarks), *_unsure(parts, configs)),
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
        PlanError: A tensor belongs to another method.
    """
    parts = _Parts()
    for name, state in states.items():
        if found := _MATRIX.fullmatch(name):
            layer = _layer(parts, found)
            kind = "bias" if found["what"] == "bias" else found["kind"][-1].lower()
            setattr(layer, kind, state)
        elif found := _SAVED.fullmatch(name):
            own = parts.saved.setdefault(found["adapter"], {})
            own[_clean(f"{found['layer']}.{found['rest']}")] = name
        elif found := _SAVED_AGAIN.fullmatch(name):
            parts.plain.setdefault(_clean(f"{found['layer']}.{found['rest']}"), name)
        elif found := _ORIGINAL.fullmatch(name):
            parts.originals[_clean(f"{found['layer']}.{found['rest']}")] = name
        elif found := _EMBEDDING.fullmatch(name):
            layer = _layer(parts, found)
            layer.embedding = True
            setattr(layer, found["kind"].lower(), state)
        elif found := _MAGNITUDE.fullmatch(name):
            _layer(parts, found).magnitude = state
        elif OTHER_METHODS.search(name):
            problem = f"holds {name}, of a PEFT method other than LoRA and DoRA"
            raise PlanError(
                checkpoint.location, problem, "merge it with PEFT, or leave out merge_lora", ("merge_lora",)
            )
        else:
            parts.plain[_clean(name)] = name
    return parts


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
    if tied := [layer for layer in layers if f"{layer}.weight" in ties]:
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
        _check_copies(checkpoint, base, parts, layers, configs)
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
        problem = f"has modules_to_save in the adapters {' and '.join(saved)}, of which only one can be in the output"
        raise PlanError(checkpoint.location, problem, "choose one with adapter", ("adapter",))
    for adapter in saved:
        trained = {n: own[s] for n, s in parts.saved[adapter].items()}
        if not configs[adapter].get("ensure_weight_tying"):
            _untie(tensors, trained, _clean_aliases(base or checkpoint))
        _replace(tensors, trained, base or checkpoint)
    return tensors


def _check_copies(
    checkpoint: Checkpoint,
    base: Checkpoint,
    parts: _Parts,
    layers: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuse a copy of an adapted weight under a tied name: it is the weight before merging.

    DeepSpeed leaves frozen weights out by the first of their names only.
    """
    whole = [m for config in configs.values() for m in config.get("modules_to_save") or ()]
    adapted = {f"{layer}.weight" for layer in layers}
    if copies := [n for n in parts.plain if base.aliases.get(n) in adapted and not _is_in(n, whole)]:
        problem = f"holds {copies[0]}, which the base model ties to {base.aliases[copies[0]]}, a weight with an adapter"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT", ("base",))


def _untie(tensors: dict[str, State], trained: Mapping[str, State], aliases: Mapping[str, str]) -> None:
    """Keep the weights of the base model under the other names of a tensor that was trained apart from them.

    PEFT trains a copy of a module in ``modules_to_save``; what was tied to the module keeps the base weights.
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
    """Put trained tensors in the place of those of the base model.

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
    """Return tied names of the result; a name with a tensor of its own is tied no more."""
    known = _clean_aliases(base or checkpoint)
    return {a: n for a, n in known.items() if a not in tensors and n in tensors}


def _clean_aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tied names as the base model has them."""
    return {_clean(_plain(alias)): _clean(_plain(name)) for alias, name in checkpoint.aliases.items()}


def _plain(name: str) -> str:
    found = _ORIGINAL.fullmatch(name)
    return f"{found['layer']}.{found['rest']}" if found else name


def _named(tensors: Mapping[str, State], aliases: Mapping[str, str], name: str, checkpoint: Checkpoint) -> str:
    """Return the name that a tensor is stored under.

    Raises:
        PlanError: There is none.
    """
    stored = aliases.get(name, name)
    if stored not in tensors:
        problem = f"has an adapter of {name}, which the base model lacks"
        raise PlanError(checkpoint.location, problem, "give the model that it was trained on as base", ("base",))
    return stored


def _is_embedding(parts: _Parts, layer: str) -> bool:
    return any(layers[layer].embedding for layers in parts.layers.values() if layer in layers)


def _update(checkpoint: Checkpoint, layer: str, found: _Layer, config: Mapping[str, Any]) -> LowRankUpdate:
    a, b = found.a, found.b
    if a is None or b is None:
        problem = f"holds only one of lora_A and lora_B of {layer}"
        raise PlanError(checkpoint.location, problem, "restore it from a copy")
    if len(a.shape) != 2 or len(b.shape) != 2:
        problem = f"has an adapter of the convolution {layer}"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT, or leave out merge_lora", ("merge_lora",))
    rank = a.shape[0]
    if b.shape[1] != rank or not rank:
        problem = f"has lora_A and lora_B of {layer} with shapes {list(a.shape)} and {list(b.shape)}"
        raise PlanError(checkpoint.location, problem, "restore it from a copy")
    allowed = ranks_of(config, layer)
    if rank not in allowed and None not in allowed:
        problem = f"has matrices of rank {rank} for {layer}, but {CONFIG} says {' or '.join(map(str, sorted(allowed)))}"
        raise PlanError(checkpoint.location, problem, "restore the file that was saved with the adapter")
    alpha = float(by_pattern(config.get("alpha_pattern"), layer, config["lora_alpha"]))
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRankUpdate(a, b, scaling, found.magnitude)


def _unsure(parts: _Parts, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a remark if patterns with different values match one layer: PEFT sorts them when it writes the file."""
    for adapter, config in configs.items():
        patterns = config.get("alpha_pattern") or {}
        for layer in parts.layers.get(adapter, {}):
            found = {p: v for p, v in patterns.items() if by_pattern({p: v}, layer, None) is not None}
            if len(set(found.values())) > 1:
                first, *others = found
                return [
                    f"{layer} is scaled by {first} in alpha_pattern, as PEFT does when it reads {CONFIG}; {others[0]} "
                    "also matches, and training took the one that its script named first"
                ]
    return []


def _kinds(tensors: Mapping[str, State]) -> dict[str, set[bool]]:
    """Return which modules hold Conv1D (True) and Linear layers (False); biases tell, if a weight is not square."""
    kinds: dict[str, set[bool]] = {}
    for name, state in tensors.items():
        module = name.removesuffix(".weight")
        bias = tensors.get(f"{module}.bias")
        if bias is None or len(state.shape) != 2 or state.shape[0] == state.shape[1]:
            continue
        while module:
            module = module.rpartition(".")[0]
            kinds.setdefault(module, set()).add(bias.shape == state.shape[1:])
    return kinds


def _kind_around(kinds: Mapping[str, set[bool]], module: str) -> set[bool]:
    """Return the kinds of layers in the smallest module around a layer that holds any."""
    while module and module not in kinds:
        module = module.rpartition(".")[0]
    return kinds.get(module, set())


def _merged(
    checkpoint: Checkpoint, name: str, base: State, updates: Sequence[LowRankUpdate], conv1d: set[bool],
    *, embedding: bool,
) -> State:  # fmt: skip
    """Return the state of a merged weight.

    ``conv1d`` says whether it is of a Conv1D; both values where that is not known. A square one does not tell itself,
    and PEFT keeps one ``fan_in_fan_out`` for all layers, that of the last one.

    Raises:
        PlanError: Its shape or type does not fit, or the adapters are DoRA and others.
    """
    shape = (updates[0].b.shape[0], updates[0].a.shape[1])
    square = base.shape == shape == shape[::-1]
    if square and not embedding and len(conv1d) > 1:
        problem = f"has an adapter of {name}, of which fan_in_fan_out does not tell whether it is a Conv1D"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT")
    transposed = embedding or (True in conv1d if square else base.shape == shape[::-1])
    for update in updates:
        expected = (update.b.shape[0], update.a.shape[1])
        if base.shape != (expected[::-1] if transposed else expected):
            problem = f"has an adapter for {name} of shape {list(expected)}, but the base model has {list(base.shape)}"
            raise PlanError(checkpoint.location, problem, "give the model that it was trained on as base", ("base",))
    if not castable(base.dtype, "F32"):
        problem = f"has an adapter of {name}, which is {base.dtype} in the base model"
        raise PlanError(checkpoint.location, problem, "give a model in fp32, bf16 or fp16 as base", ("base",))
    dora = [update for update in updates if update.magnitude is not None]
    if dora and len(updates) > 1:
        problem = f"has several adapters, one of them DoRA, of {name}"
        hint = "choose one with adapter, or merge them with PEFT"
        raise PlanError(checkpoint.location, problem, hint, ("adapter",))
    if dora and transposed:
        what = "an embedding" if embedding else "a Conv1D (fan_in_fan_out)"
        problem = f"has a DoRA adapter of {name}, which is {what}: that is not merged here"
        raise PlanError(checkpoint.location, problem, "merge it with PEFT")
    return State(base.shape, "F32", Computed(base.numel), formula=MergedWeight(base, tuple(updates), transposed))
