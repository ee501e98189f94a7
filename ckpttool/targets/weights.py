"""Select and name the tensors of a weights-only output: whole weights or a PEFT adapter, their names, their files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import DTYPES, SHORT_NAMES, castable, itemsize
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.messages import brief
from ckpttool.model import MODULE
from ckpttool.model.names import adapter_name
from ckpttool.model.selection import GLOBS, matcher
from ckpttool.plan import COPY, TargetFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.model import Checkpoint, Parameter, State


MAX_NAME = 4096
"""Maximum length of a new name: a substitution of a hostile name must not fill memory."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """One rule for names. Names that it does not match are kept."""

    text: str
    """The rule as the user wrote it."""
    apply: Callable[[str], str]
    """Returns the new name."""
    ready_made: bool = False
    """Whether it is one of READY_MADE. Unlike a substitution, it may match no name."""


def _substitutions(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Return a function that replaces every match of each pattern, in order."""
    compiled = [(re.compile(pattern), new) for pattern, new in pairs]

    def apply(name: str) -> str:
        for pattern, new in compiled:
            name = pattern.sub(new, name)
        return name

    return apply


# Source: torch 2.13, nn/parallel/distributed.py, _dynamo/eval_frame.py (``OptimizedModule``), distributed/fsdp/
# _common_utils.py (``FSDP_WRAPPED_MODULE``) and distributed/algorithms/_checkpoint/checkpoint_wrapper.py; peft 0.21,
# peft_model.py and tuners/tuners_utils.py (``base_layer``).
READY_MADE: dict[str, Callable[[str], str]] = {
    "module": _substitutions((r"^module\.", "")),
    "compile": _substitutions((r"(^|\.)_orig_mod\.", r"\1")),
    "fsdp": _substitutions((r"(^|\.)_fsdp_wrapped_module\.", r"\1"), (r"(^|\.)_checkpoint_wrapped_module\.", r"\1")),
    "peft": _substitutions((r"^base_model\.model\.", ""), (r"\.base_layer\.", ".")),
}
"""Ready-made maps by name, of the wrappers around a module."""


def parse_renamings(rules: Sequence[str]) -> list[Renaming]:
    """Parse rules: names of READY_MADE, or substitutions like sed's with Python's regular expressions.

    Raises:
        ArgumentError: A rule is neither.
    """
    rules = [rules] if isinstance(rules, str) else rules
    return [
        Renaming(rule, READY_MADE[rule], ready_made=True) if rule in READY_MADE else _substitution(rule)
        for rule in rules
    ]


def _substitution(rule: str) -> Renaming:
    hint = f"write 's/PATTERN/REPLACEMENT/', or one of {', '.join(READY_MADE)}"
    mark = rule[1:2]
    if not rule.startswith("s") or not mark or mark.isalnum() or mark in {"\\", "_", " "}:
        raise ArgumentError("rename", f"is {brief(rule)}, which is not a rule", hint)
    # The separator is escaped by a backslash inside the pattern and the replacement.
    parts = re.split(rf"(?<!\\){re.escape(mark)}", rule[2:])
    if len(parts) != 3 or not set(parts[2]) <= {"g", "i"}:
        raise ArgumentError("rename", f"is {brief(rule)}, which does not have two parts and then g or i", hint)
    pattern, new = (part.replace(f"\\{mark}", mark) for part in parts[:2])
    try:
        compiled = re.compile(pattern, re.IGNORECASE if "i" in parts[2] else 0)
        compiled.sub(new, "")  # parses the replacement
    except (re.error, IndexError) as error:
        raise ArgumentError("rename", f"is {brief(rule)}, which is not a regular expression: {error}", hint) from None
    count = 0 if "g" in parts[2] else 1
    return Renaming(rule, lambda name: compiled.sub(new, name, count=count))


def renamed(
    selection: WeightSelection, table: Mapping[str, str], rules: Sequence[Renaming], location: str
) -> tuple[WeightSelection, list[str]]:
    """Return the same tensors under new names, and a note on each ready-made map that changed nothing.

    Args:
        selection: The tensors; tied names are renamed too.
        table: New names by old ones; applied first.
        rules: Applied in order.
        location: Path of the checkpoint, for errors.

    Raises:
        PlanError: Two tensors would have one name, a name would be empty, or a rule or an entry matches nothing.
    """
    names = [*(w.name for w in selection.weights), *selection.aliases]
    if unknown := [name for name in table if name not in set(names)]:
        problem = f"holds no {unknown[0]}, which the table of new names lists"
        raise PlanError(location, problem, "correct rename_map; inspect lists the names", ("rename_map",))
    new = {name: table.get(name, name) for name in names}
    notes = []
    for rule in rules:
        applied = {name: rule.apply(current) for name, current in new.items()}
        if applied == new and rule.ready_made:
            notes.append(f"rename {rule.text} changes no name")
        elif applied == new:
            problem = f"holds no name that {brief(rule.text)} changes"
            raise PlanError(location, problem, "correct rename, or leave it out; inspect lists the names", ("rename",))
        new = applied
    _check_names(new, selection.aliases, location)
    aliases = {new[a]: new[n] for a, n in selection.aliases.items() if new[a] != new[n]}
    return WeightSelection(tuple(w.renamed(new[w.name]) for w in selection.weights), aliases), notes


def _check_names(new: Mapping[str, str], aliases: Mapping[str, str], location: str) -> None:
    """Refuse new names that are empty, too long or the same.

    Raises:
        PlanError: A name is refused.
    """
    owners: dict[str, str] = {}
    for name, made in new.items():
        if made != name and (not made or len(made) > MAX_NAME):
            problem = f"would have {name} renamed to {brief(made) if made else 'nothing'}"
            raise PlanError(location, problem, "correct rename", ("rename",))
        other = owners.setdefault(made, name)
        if other != name and aliases.get(name, name) != aliases.get(other, other):
            problem = f"would have both {other} and {name} renamed to {made}"
            raise PlanError(location, problem, "correct rename, or leave one out with exclude", ("rename", "exclude"))


def index_file(
    name: str,
    names: Sequence[str],
    shards: Sequence[Sequence[Weight]],
    selection: WeightSelection,
    *,
    aliases: bool = False,
) -> TargetFile:
    """Return the JSON index of sharded weights.

    Source: huggingface_hub, serialization/_base.py (``StateDictSplit``) and transformers, utils/hub.py.

    Args:
        name: Its file name.
        names: Names of the shards.
        shards: Their tensors.
        selection: The tensors to write.
        aliases: Whether the files contain tied names too.
    """
    where = {w.name: file for file, shard in zip(names, shards, strict=True) for w in shard}
    if aliases:
        where |= {alias: where[stored] for alias, stored in selection.aliases.items()}
    total = sum(w.nbytes for w in selection.weights)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
    data = text.encode()
    return TargetFile(name, len(data), ((0, data),), np.zeros(0, dtype=COPY))


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
        PlanError: The checkpoint has no adapter, or several.
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


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor to write."""

    name: str
    """Its name in the module's state dict."""
    state: State
    """The state to read."""
    dtype: str
    """Type to write."""

    def renamed(self, name: str) -> Weight:
        """Return the same tensor under another name."""
        return Weight(name, self.state, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return self.state.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSelection:
    """The tensors to write."""

    weights: tuple[Weight, ...]
    """In the order of the module, without tied names."""
    aliases: Mapping[str, str]
    """Tied names of the written tensors: alias to the name it is stored under."""

    @property
    def states(self) -> dict[str, tuple[State, str]]:
        """The state to read and the type to write, by name."""
        return {weight.name: (weight.state, weight.dtype) for weight in self.weights}


def select_weights(
    checkpoint: Checkpoint,
    *,
    source: str,
    dtype: str,
    include: Sequence[str],
    exclude: Sequence[str],
    exclude_frozen: bool,
    only: frozenset[str] | None = None,
) -> WeightSelection:
    """Select the tensors to write.

    Trainable parameters come from their fp32 master weights, frozen ones from the module's copy; both are cast to
    ``dtype``. Buffers keep their dtype, because a narrower rotary table or running variance would lose precision. So do
    tensors of other than floating-point types.

    Args:
        checkpoint: The source.
        source: "masters", or "module" for the model's own copies.
        dtype: safetensors' spelling: "F32", "BF16" or "F16".
        include: Globs on full names; empty means all.
        exclude: Globs on full names; they win over ``include``.
        exclude_frozen: Leave out frozen parameters.
        only: Names to choose from; None for all.

    Raises:
        PlanError: No tensor is left, or a parameter has a type that cannot be cast.
    """
    matches = matcher(include, exclude)
    frozen_out = {p.name for p in checkpoint.parameters if exclude_frozen and p.frozen}
    # A tied name selects its tensor, which is stored under the owner's name.
    wanted = {checkpoint.aliases.get(n, n) for n in _all_names(checkpoint) if matches(n)} - frozen_out
    if only is not None:
        wanted &= only
    weights = []
    for parameter in checkpoint.parameters:
        if parameter.name in wanted:
            state = _weights_of(checkpoint, parameter, source)
            if not DTYPES[state.dtype].floating:
                weights.append(Weight(parameter.name, state, state.dtype))  # such as the codes of a quantised layer
                continue
            if not castable(state.dtype, dtype):
                problem = f"{parameter.name} is {state.dtype} and cannot be cast to {SHORT_NAMES[dtype]}"
                raise PlanError(checkpoint.location, problem, "leave it out with exclude", ("exclude",))
            weights.append(Weight(parameter.name, state, dtype))
    weights += [Weight(b.name, b.state, b.state.dtype) for b in checkpoint.buffers if b.name in wanted]
    if not weights:
        globs = ("include", "exclude", "exclude_frozen")
        raise PlanError(
            checkpoint.location, "no parameter is left to write", f"check {', '.join(globs)}: {GLOBS}", globs
        )
    aliases = {a: n for a, n in checkpoint.aliases.items() if n in wanted and matches(a)}
    return WeightSelection(tuple(weights), aliases)


def _weights_of(checkpoint: Checkpoint, parameter: Parameter, source: str) -> State:
    if source == "module" and MODULE not in parameter.states:
        problem = f"keeps no copy of {parameter.name} but the master: stage 3 saves none"
        raise PlanError(checkpoint.location, problem, "leave weights_from at masters", ("weights_from",))
    return checkpoint.weights(parameter) if source == "masters" else parameter.states[MODULE]


def _all_names(checkpoint: Checkpoint) -> list[str]:
    return [
        *(p.name for p in checkpoint.parameters),
        *(b.name for b in checkpoint.buffers),
        *checkpoint.aliases,
    ]


def split_into_shards(weights: Sequence[Weight], max_shard_bytes: int) -> list[list[Weight]]:
    """Fill files in the given order; a file exceeds the limit only if a single tensor does."""
    shards: list[list[Weight]] = []
    room = -1
    for weight in weights:
        if not shards or weight.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.nbytes
    return shards


def shard_names(stem: str, extension: str, count: int) -> list[str]:
    """Return Hugging Face's file names: one plain file, or model-00001-of-00003.safetensors and so on."""
    if count == 1:
        return [f"{stem}.{extension}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1)]
