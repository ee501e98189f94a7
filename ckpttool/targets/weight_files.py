"""Plan the files that ``consolidate`` and exports write: whole weights, optimizer states and sidecar files beside them.

``formats.optimizer_states`` reads the optimizer states.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.arguments import check_choice, checked_size
from ckpttool.containers import safetensors
from ckpttool.dtypes import DTYPES, TRAINING_DTYPES
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.optimizer_states import METADATA, NOT_FINITE, STEM, UNEVEN, VERSION
from ckpttool.formats.sidecars import find_sidecars
from ckpttool.messages import brief
from ckpttool.model import BY_ROWS, MASTER, MODULE, TensorFloat, TensorInteger
from ckpttool.model.names import ORDER
from ckpttool.plan import CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder, Placement, sample_checks
from ckpttool.targets.sidecars import with_sidecars
from ckpttool.targets.weights import (
    Weight,
    WeightSelection,
    index_file,
    parse_renamings,
    renamed,
    select_weights,
    shard_names,
    split_into_shards,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.formats.sidecars import SidecarFile
    from ckpttool.model import Checkpoint, ParamGroup, ScalarState
    from ckpttool.plan import ConsistencyChecks


INDEX = "model.safetensors.index.json"
"""Name of the index over several files."""


def plan_safetensors(
    checkpoint: Checkpoint,
    selection: WeightSelection,
    *,
    max_shard_bytes: int,
    consistency: ConsistencyChecks | None,
    stem: str = "model",
) -> CopyPlan:
    """Plan ``model.safetensors``, or shards and ``model.safetensors.index.json``, as ``safetensors_files``."""
    builder = CopyBuilder(checkpoint)
    files = safetensors_files(checkpoint, builder, selection, max_shard_bytes=max_shard_bytes, stem=stem)
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


def safetensors_files(
    checkpoint: Checkpoint,
    builder: CopyBuilder,
    selection: WeightSelection,
    *,
    max_shard_bytes: int,
    stem: str = "model",
    metadata: Mapping[str, str] = MappingProxyType({}),
    first: Mapping[str, str] = MappingProxyType({}),
) -> list[TargetFile]:
    """Plan the files of some tensors: ``STEM.safetensors``, or shards and ``STEM.safetensors.index.json``.

    A tied tensor is stored once, under its owner's name, as ``save_pretrained`` does; the header's metadata lists the
    other names, as ``safetensors.torch.save_model`` does.

    Source: transformers 5, modeling_utils.py (``save_pretrained``); huggingface_hub, serialization/_base.py.

    Args:
        checkpoint: The source.
        builder: Builds the copies of the plan.
        selection: The tensors.
        max_shard_bytes: Maximum bytes of tensors in a shard, unless a single tensor is larger.
        stem: Prefix of the file names.
        metadata: Further metadata of every file.
        first: Further metadata of the first file.

    Raises:
        PlanError: A tensor has a name that the format cannot store, or the header of a file is too large.
    """
    check_names(checkpoint.location, [*(w.name for w in selection.weights), *selection.aliases])
    taken = {"format", *metadata, *first} & set(selection.aliases)
    if taken:
        problem = f"a tied tensor is named {min(taken)}, which the header of safetensors uses for something else"
        raise PlanError(checkpoint.location, problem, "give it another name with rename", ("rename",))
    shards = split_into_shards(selection.weights, max_shard_bytes)
    names = shard_names(stem, "safetensors", len(shards))
    files = []
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        more = {**metadata, **(first if number == 0 else {})}
        files.append(safetensors_file(builder, name, shard, selection, more))
        if len(files[-1].literals[0][1]) > safetensors.MAX_HEADER_BYTES:
            problem = f"gives {name} a header of more than {safetensors.MAX_HEADER_BYTES:,} bytes"
            raise PlanError(checkpoint.location, problem, "choose a smaller max_shard_size", ("max_shard_size",))
    if len(files) > 1:
        files.append(index_file(f"{stem}.safetensors.index.json", names, shards, selection))
    return files


def check_names(location: str, names: Iterable[str]) -> None:
    """Refuse names that the format cannot store.

    Args:
        location: The source, for errors.
        names: Names of tensors.

    Raises:
        PlanError: A name is refused.
    """
    for name in names:
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            problem = f"a tensor is named {brief(name, 200)}"
            raise PlanError(location, problem, "leave it out with exclude: safetensors cannot hold it", ("exclude",))


def safetensors_file(
    builder: CopyBuilder, name: str, shard: Sequence[Weight], selection: WeightSelection, more: Mapping[str, str]
) -> TargetFile:
    """Plan one file.

    Args:
        builder: Builds the copies of the plan.
        name: Name of the file.
        shard: Its tensors.
        selection: Holds their tied names.
        more: Further metadata.
    """
    tensors = [safetensors.Tensor(w.name, w.dtype, w.state.shape) for w in shard]
    here = {w.name for w in shard}
    metadata = {**{a: n for a, n in selection.aliases.items() if n in here}, "format": "pt", **more}
    header, begin = safetensors.build(tensors, metadata)
    copies, gathers = builder.copies([Placement(w.state, w.dtype, begin[w.name]) for w in shard])
    return TargetFile(name, len(header) + sum(w.nbytes for w in shard), ((0, header),), copies, gathers)


class _NoJsonError(Exception):
    """A value that JSON does not have."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a fingerprint of a save, equal for equal files: from names, sizes and recorded checksums.

    The weights and the optimizer's states of one output have it, so that a mix of two outputs is noticed.
    """
    import hashlib  # importing it takes longer than most plans

    sha = hashlib.sha256(f"{checkpoint.tag} {checkpoint.step} {checkpoint.samples}".encode())
    for file in checkpoint.files:
        sha.update(f"\0{file.name} {file.nbytes}".encode("utf-8", "surrogatepass"))
        sha.update(" ".join(f"{record.crc32:08x}" for record in file.records if record.crc_recorded).encode())
    return sha.hexdigest()[:32]


def optimizer_files(
    checkpoint: Checkpoint, builder: CopyBuilder, *, dtype: str, max_shard_bytes: int
) -> tuple[list[TargetFile], list[str]]:
    """Plan ``optimizer.safetensors``, or parts of it and an index.

    Args:
        checkpoint: The source.
        builder: Builds the copies of the plan.
        dtype: Type of the weights beside. States have the master weights, and the frozen ones, that do not fit in it.
        max_shard_bytes: Maximum bytes of tensors in a part, unless a single tensor is larger.

    Returns:
        The files, and one remark for each value that they do not keep.

    Raises:
        PlanError: The source has no optimizer states.
    """
    if not checkpoint.groups or not any(p.optimizer_states or MASTER in p.states for p in checkpoint.parameters):
        problem = checkpoint.left_out or "holds no optimizer states"
        raise PlanError(checkpoint.location, problem, "leave out optimizer", ("optimizer",))
    if checkpoint.of_other_shape:
        problem = f"has optimizer states of other shapes than their parameters: {checkpoint.of_other_shape}"
        raise PlanError(checkpoint.location, problem, "leave out optimizer", ("optimizer",))
    states: list[Weight] = []
    keys: dict[str, None] = {}
    for parameter in checkpoint.parameters:
        own, weights = parameter.optimizer_states, checkpoint.weights(parameter)
        if dtype != "F32" and MASTER in parameter.states:
            own = {MASTER: weights, **own}
        elif parameter.frozen and weights.dtype != dtype != "F32" and DTYPES[weights.dtype].floating:
            own = {MODULE: weights, **own}
        for key, state in own.items():
            keys[key] = None
            states.append(Weight(f"{key}.{parameter.name}", state, "F32" if key == MASTER else state.dtype))
    if not states:
        problem = "holds no optimizer states with a value for each element"
        raise PlanError(checkpoint.location, problem, "leave out optimizer, or convert it to dcp", ("optimizer",))
    if ambiguous := [key for key in keys if any(key.startswith(f"{other}.") for other in keys)]:
        problem = f"names an optimizer state {ambiguous[0]}, which begins with the name of another"
        raise PlanError(checkpoint.location, problem, "convert it to dcp or to universal")
    description, losses = _description(checkpoint, list(keys))
    files = safetensors_files(
        checkpoint,
        builder,
        WeightSelection(tuple(states), {}),
        max_shard_bytes=max_shard_bytes,
        stem=STEM,
        first={METADATA: description},
    )
    return files, losses


def _description(checkpoint: Checkpoint, keys: list[str]) -> tuple[str, list[str]]:
    """Return the JSON text, and remarks on omitted values."""
    from ckpttool.targets.zero.writer import scales_losses  # imports much, and is needed here alone

    losses = [f"not kept: {name}, which belongs to no parameter" for name in checkpoint.nonpartitionable]
    if scales_losses(checkpoint.loss_scaler):
        losses.append("not kept: the loss scale; a resumed fp16 run begins with a new one")
    numbers = {p.name: _numbers(p.numbers) for p in checkpoint.parameters if p.numbers}
    described: dict[str, Any] = {
        "version": UNEVEN if numbers else VERSION,
        "save": fingerprint(checkpoint),
        "step": checkpoint.step,
        "samples": checkpoint.samples,
        "skipped_steps": checkpoint.skipped_steps,
        "dtype": checkpoint.dtype,
        "deepspeed_version": checkpoint.deepspeed_version,
        "states": keys,
        "groups": [_group(group, number, losses) for number, group in enumerate(checkpoint.groups)],
        "buffers": [buffer.name for buffer in checkpoint.buffers],
    }
    slicings = {p.name: p.slicing for p in checkpoint.parameters if p.slicing != BY_ROWS}
    if numbers:
        described["numbers"] = numbers
    if slicings:
        described["slicings"] = {
            name: {"dim": s.dim, "parts": s.parts, "view": _json(s.view), "vocabulary": s.vocabulary}
            for name, s in slicings.items()
        }
    described |= _values(checkpoint, losses)
    return json.dumps(described, separators=(",", ":")), losses


def _values(checkpoint: Checkpoint, losses: list[str]) -> dict[str, Any]:
    """Return scheduler, client state and configuration, as far as JSON has their values."""
    found: dict[str, Any] = {}
    if checkpoint.scheduler is not None:
        try:
            found["scheduler"] = _json(checkpoint.scheduler)
        except _NoJsonError:
            losses.append("not kept: the state of the scheduler, which JSON cannot hold")
    for name, values in (("client_state", checkpoint.client_state), ("ds_config", checkpoint.ds_config)):
        kept = found[name] = {}
        for key, value in values.items():
            try:
                kept |= _json({key: value})
            except _NoJsonError:
                losses.append(f"not kept: {key} of the {name.replace('_', ' ')}, which JSON cannot hold")
    return found


def _group(group: ParamGroup, number: int, losses: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in group.hyperparameters.items():
        try:
            options |= _json({key: value})
        except _NoJsonError:
            losses.append(f"not kept: hyper-parameter {key} of group {number}, which JSON cannot hold")
    return {"parameters": list(group.parameters), "hyperparameters": options, "scalars": _numbers(group.scalars)}


def _numbers(numbers: Mapping[str, ScalarState]) -> dict[str, Any]:
    return {key: {"value": _json(s.value), "dtype": s.dtype, "shape": list(s.shape)} for key, s in numbers.items()}


def _json(value: object) -> Any:
    """Return a value as JSON has it.

    Raises:
        _NoJsonError: JSON does not have it.
    """
    if isinstance(value, TensorFloat | TensorInteger):
        return {"value": _json(float(value) if isinstance(value, float) else int(value)), "dtype": value.dtype}
    if value is None or type(value) in {bool, int, str}:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {NOT_FINITE: str(value)}
    if type(value) in {list, tuple}:
        return [_json(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, dict) and all(type(key) is str for key in value) and value.keys() != {NOT_FINITE}:
        return {key: _json(item) for key, item in value.items()}
    raise _NoJsonError


LORA = (
    "contains a LoRA adapter under PEFT's names: adapter_only exports it for PEFT, merge_lora merges it into its base"
)
"""Remark on weights of PEFT that are exported as they are."""
TRAINING_POINT = (
    "the weights are schedule-free's training point, not its average: for evaluation, save after optimizer.eval()"
)
"""Remark on weights that a schedule-free optimizer trains.

Source: schedulefree 1.4, adamw_schedulefree.py (``eval``, ``train``: state "z", and "train_mode" of each group)."""


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Selection, type and file format of the weights; the fields are arguments of ``consolidate``."""

    to: str
    dtype: str
    weights_from: Literal["masters", "module"] = "masters"
    max_shard_size: int | str = "5GB"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    exclude_frozen: bool = False
    adapter_only: bool = False
    rename: Sequence[str] = ()
    rename_map: Mapping[str, str] = field(default_factory=dict)
    optimizer: bool = False

    def check(self) -> None:
        """Refuse values that no checkpoint allows.

        Raises:
            ArgumentError: A value is refused.
        """
        check_choice("weights_from", self.weights_from, ("masters", "module"))
        check_choice("to", self.to, ("safetensors", "torch"))
        check_choice("dtype", self.dtype, tuple(TRAINING_DTYPES))
        checked_size("max_shard_size", self.max_shard_size)
        if self.adapter_only and (self.to != "safetensors" or self.include or self.exclude or self.exclude_frozen):
            problem = "writes the whole adapter, as safetensors"
            hint = 'leave out include, exclude and exclude_frozen, and write to="safetensors"'
            raise ArgumentError("adapter_only", problem, hint, ("include", "exclude", "exclude_frozen", "to"))
        parse_renamings(self.rename)
        selects = self.include or self.exclude or self.exclude_frozen or self.adapter_only
        renames = self.rename or self.rename_map
        if self.optimizer and self.to != "safetensors":
            hint = 'write to="safetensors", or leave out optimizer'
            raise ArgumentError("optimizer", "is written as safetensors only", hint, ("to", "optimizer"))
        if self.optimizer and (self.weights_from != "masters" or selects or renames):
            problem = "writes the whole model with its own names, as safetensors, from the fp32 master weights"
            others = (
                "weights_from",
                "include",
                "exclude",
                "exclude_frozen",
                "adapter_only",
                "rename",
                "rename_map",
            )
            raise ArgumentError("optimizer", problem, f"leave out {', '.join(others)}", others)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A plan of weight files, with facts for a report."""

    plan: CopyPlan
    selection: WeightSelection
    index: str
    """Name of the file that is committed last; "" for a single file."""
    companions: tuple[str, ...]
    """Sidecar files that are copied."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint."""


def plan_weight_files(
    checkpoint: Checkpoint, chosen: WeightChoice, out: str, companions: tuple[SidecarFile, ...] | None = None
) -> WeightFiles:
    """Choose the weights and the sidecar files, and plan the files.

    Args:
        checkpoint: The source.
        chosen: The weights.
        out: The output directory, for messages.
        companions: Sidecar files to write; None for the files beside the checkpoint.

    Raises:
        CkptError: The checkpoint has no such weights, or new names collide.
    """
    target = TRAINING_DTYPES[chosen.dtype]
    proofs = sample_checks(checkpoint) if chosen.weights_from == "masters" else None
    about = (remark for remark in checkpoint.remarks if chosen.optimizer or remark != ORDER)
    notes = [*map(str, checkpoint.notes), *about]
    if checkpoint.format == "dcp" and not checkpoint.attempt:
        notes.append("its files do not identify their rank or save: two of one shape that were swapped are not noticed")
    training = any(group.hyperparameters.get("train_mode") is True for group in checkpoint.groups)
    if training and any("z" in parameter.states for parameter in checkpoint.parameters):
        notes.append(TRAINING_POINT)
    rules = parse_renamings(chosen.rename)
    if chosen.adapter_only:
        from ckpttool.targets import weights

        selection = weights.select_adapter(checkpoint, source=chosen.weights_from, dtype=target)
        selection, unused = renamed(selection, chosen.rename_map, rules, checkpoint.location)
        plan = plan_safetensors(checkpoint, selection, max_shard_bytes=1 << 62, consistency=proofs, stem=weights.STEM)
        companions = find_sidecars(checkpoint, (weights.CONFIG, "README.md"))
        if weights.CONFIG not in {c.name for c in companions}:
            notes.append(f"{weights.CONFIG} is missing beside the checkpoint: PEFT needs one in {out}")
        index = ""
    else:
        selection = select_weights(
            checkpoint,
            source=chosen.weights_from,
            dtype=target,
            include=chosen.include,
            exclude=chosen.exclude,
            exclude_frozen=chosen.exclude_frozen,
        )
        selection, unused = renamed(selection, chosen.rename_map, rules, checkpoint.location)
        limit = checked_size("max_shard_size", chosen.max_shard_size)
        if chosen.optimizer:
            plan, index, losses = _plan_with_optimizer(checkpoint, selection, target, limit, proofs)
            notes += losses
        else:
            plan, index = _plan_weights(chosen.to, checkpoint, selection, limit, proofs)
        if companions is None:
            companions = find_sidecars(checkpoint)
            if any(".lora_A." in one.name for one in selection.weights):
                notes.append(LORA)
    plan = with_sidecars(plan, companions, target)
    return WeightFiles(plan, selection, index, tuple(c.name for c in companions), (*notes, *unused))


def _plan_weights(
    to: str, checkpoint: Checkpoint, selection: WeightSelection, limit: int, consistency: ConsistencyChecks | None
) -> tuple[CopyPlan, str]:
    """Return the plan, and the name of the file that is committed last."""
    if to == "safetensors":
        return plan_safetensors(checkpoint, selection, max_shard_bytes=limit, consistency=consistency), INDEX
    from ckpttool.targets import torch

    return torch.plan_torch(checkpoint, selection, max_shard_bytes=limit, consistency=consistency), torch.INDEX


def _plan_with_optimizer(
    checkpoint: Checkpoint, selection: WeightSelection, dtype: str, limit: int, consistency: ConsistencyChecks | None
) -> tuple[CopyPlan, str, list[str]]:
    """Return the plan, the name of the file that is committed last, and remarks on omitted values."""
    from ckpttool.formats.optimizer_states import SAVE

    builder = CopyBuilder(checkpoint)
    states, losses = optimizer_files(checkpoint, builder, dtype=dtype, max_shard_bytes=limit)
    metadata = {SAVE: fingerprint(checkpoint)}
    files = safetensors_files(checkpoint, builder, selection, max_shard_bytes=limit, metadata=metadata)
    plan = CopyPlan(builder.sources, builder.casts, (*states, *files), consistency)
    return plan, INDEX, losses
