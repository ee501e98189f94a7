"""Merge a trained LoRA adapter into its base model.

A merge needs the configuration of the model: it says whether the output projection is tied to the input embedding. If
the merge makes the two differ, ``config.json`` of the output says that they are not tied.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.api._run import Addition, RunSource
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.extensions.merging.lora import CONFIG, adapters_of, merge_lora
from ckpttool.formats.sidecars import SidecarFile, find_sidecars, sidecar_directory
from ckpttool.storage import connect, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.api._run import Run
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint
    from ckpttool.targets.weight_files import WeightChoice


HEAD = "lm_head.weight"
"""The output projection of causal language models."""
EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "shared",
    "word_embeddings",
    "embed_in",
    "tok_embeddings",
    "tokens_embed",
    "embeddings",
)
"""Names of the module of the input embedding in transformers' models."""
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")
"""Names of modules that may have the shape of the input embedding, but are never tied to it."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the class names of causal language models."""
HEADLESS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForAudioClassification",
    "Model",
)
"""Ends of the class names of models without an output projection over the vocabulary. LMHeadModel has one."""


def config_of(files: Mapping[str, SidecarFile]) -> dict[str, Any]:
    """Return the content of ``config.json``; empty if there is none, or if it is damaged."""
    try:
        found = json.loads(files["config.json"].text or "") if "config.json" in files else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def with_tied_head(base: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return the base model with the tie of HEAD, if it is a causal language model that stores no projection."""
    embedding = _embedding(base)
    if not _has_plain_head(base, config) or HEAD in base.aliases or embedding is None or _has_own_head(base, embedding):
        return base
    return replace(base, aliases={**base.aliases, HEAD: embedding})


def check_embedding(
    checkpoint: Checkpoint, base: Checkpoint | None, modules: Sequence[str], config: Mapping[str, Any]
) -> None:
    """Refuse an embedding that was trained apart from layers that the model may tie to it under unknown names.

    Args:
        checkpoint: The checkpoint with the adapters.
        base: The base model; None if ``checkpoint`` contains it.
        modules: ``modules_to_save`` of the adapters.
        config: ``config.json`` of the model.

    Raises:
        PlanError: Such an embedding.
    """
    architecture = _architecture(config)
    trained = [str(module) for module in modules if str(module).split(".")[-1] in EMBEDDINGS]
    if not trained or not architecture:
        return
    if not architecture.endswith("ForConditionalGeneration"):  # encoder and decoder share one, whatever the head
        if architecture.endswith(HEADLESS) and not architecture.endswith(CAUSAL):
            return
        if base is None or base.aliases:
            return  # DeepSpeed records ties
        embedding = _embedding(base)
        if embedding is not None and (_has_own_head(base, embedding) or _has_plain_head(base, config)):
            return
    problem = f"was trained with {trained[0]} in modules_to_save, which {architecture} ties to other layers"
    raise PlanError(checkpoint.location, problem, "merge it with PEFT, or leave out merge_lora", ("merge_lora",))


def is_head(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor is HEAD or has the shape of the input embedding, to which a loader may tie it."""
    shapes = {p.name: p.shape for p in checkpoint.parameters}
    return name == HEAD or any(
        shapes[name] == shape for other, shape in shapes.items() if other != name and _module(other) in EMBEDDINGS
    )


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _module(name: str) -> str:
    """Return the name of the module that a weight belongs to, without those around it."""
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""


def _embedding(base: Checkpoint) -> str | None:
    """Return the name of the input embedding; None without exactly one."""
    found = [p.name for p in base.parameters if _module(p.name) in EMBEDDINGS]
    return found[0] if len(found) == 1 else None


def _has_own_head(base: Checkpoint, embedding: str) -> bool:
    """Return whether another weight has the shape of the embedding, such as embed_out of GPT-NeoX."""
    shapes = {p.name: p.shape for p in base.parameters if _module(p.name) not in POSITIONS}
    return list(shapes.values()).count(shapes[embedding]) > 1


def _has_plain_head(base: Checkpoint, config: Mapping[str, Any]) -> bool:
    """Return whether the output projection is HEAD: BERT and its like have a head of several layers."""
    others = [
        p.name for p in base.parameters if p.name != HEAD and p.name.startswith(("lm_head.", "cls.", "pred_layer."))
    ]
    return _architecture(config).endswith(CAUSAL) and not others


@dataclass(frozen=True, slots=True)
class Merge(Addition):
    """The adapters to merge, and the base model to merge them into."""

    merge_lora: bool = False
    base: Source | None = None
    adapter: Sequence[str] = ()

    def check(self, chosen: WeightChoice) -> None:
        """Refuse values that no checkpoint allows.

        Raises:
            ArgumentError: There is one.
        """
        for name in ("base", "adapter"):
            if getattr(self, name) and not self.merge_lora:
                hint = f"leave out {name}, or set merge_lora=True"
                raise ArgumentError(name, "is for the merge of adapters", hint, (name, "merge_lora"))
        others = chosen.adapter_only or chosen.exclude_frozen or chosen.optimizer or chosen.weights_from != "masters"
        if self.merge_lora and others:
            problem = "writes the merged model, from the fp32 master weights"
            hint = "leave out adapter_only, exclude_frozen, optimizer and weights_from"
            raise ArgumentError(
                "merge_lora", problem, hint, ("adapter_only", "exclude_frozen", "optimizer", "weights_from")
            )

    def source(self, run: Run, source: RunSource) -> RunSource:
        """Return the source with its adapters merged.

        Raises:
            CkptError: The adapters or the base model do not fit.
        """
        if not self.merge_lora:
            return source
        base = None
        if self.base is not None:
            base = replace(run.options, tag=None).open(self.base)
            run.destination.check_apart(base)
        return merged_source(source.checkpoint, base, self.adapter)


def merged_source(checkpoint: Checkpoint, base: Checkpoint | None, adapter: Sequence[str]) -> RunSource:
    """Merge adapters into the weights of their base model; the tokenizer is the training run's if it has one.

    Args:
        checkpoint: The checkpoint with the adapters.
        base: The base model; None if ``checkpoint`` contains it.
        adapter: Names of the adapters to merge, in this order; none for the only one.

    Raises:
        PlanError: The adapters or the base model do not fit.
        LayoutError: A configuration is damaged.
    """
    chosen = _chosen(checkpoint, [adapter] if isinstance(adapter, str) else adapter)
    configs = {name: _config(checkpoint, name, alone=len(adapters_of(checkpoint)) == 1) for name in chosen}
    files = {} if base is None else {f.name: f for f in find_sidecars(base)}
    files |= {f.name: f for f in find_sidecars(checkpoint)}
    model = config_of(files)
    check_embedding(checkpoint, base, [m for c in configs.values() for m in c.get("modules_to_save") or ()], model)
    merged = merge_lora(checkpoint, base and with_tied_head(base, model), configs)
    notes = [f"merged the adapters {', '.join(chosen)}, in this order"] if len(chosen) > 1 else []
    heads = [name for name in merged.added if is_head(name, merged.checkpoint)]
    if heads and "config.json" in files:
        files["config.json"] = _untied(files["config.json"])
        notes.append(
            f"config.json says tie_word_embeddings: false, as {heads[0]} and the embedding are not equal any more"
        )
    return RunSource(merged.checkpoint, tuple(files[name] for name in sorted(files)), tuple(notes))


def _chosen(checkpoint: Checkpoint, adapter: Sequence[str]) -> list[str]:
    found = adapters_of(checkpoint)
    if unknown := [name for name in adapter if name not in found]:
        problem = f"holds no adapter {unknown[0]}"
        hint = f"choose one of {', '.join(found)} with adapter" if any(found) else "leave out adapter: it has one"
        raise PlanError(checkpoint.location, problem, hint, ("adapter",))
    if not adapter and len(found) > 1:
        problem = f"holds several adapters: {', '.join(found)}"
        raise PlanError(checkpoint.location, problem, "choose with adapter, once for each to merge", ("adapter",))
    if twice := [name for i, name in enumerate(adapter) if name in adapter[:i]]:
        problem = f"would have the adapter {twice[0]} merged twice"
        raise PlanError(checkpoint.location, problem, "name it once with adapter", ("adapter",))
    return list(adapter) or found


def _config(checkpoint: Checkpoint, adapter: str, *, alone: bool) -> dict[str, Any]:
    """Read the configuration of an adapter.

    Raises:
        PlanError: The checkpoint does not contain it.
        LayoutError: It is damaged.
    """
    storage, directory = connect(checkpoint.storage), sidecar_directory(checkpoint)
    # PEFT saves an adapter that is not called "default" in a directory of its name.
    paths = [posixpath.join(directory, adapter, CONFIG)] if adapter else []
    if alone or adapter in {"", "default"}:
        paths.append(posixpath.join(directory, CONFIG))
    path = next((path for path in paths if storage.exists(path)), None)
    if path is None:
        problem = f"has no {CONFIG}, which records the scaling of the adapter"
        raise PlanError(directory, problem, f"copy the one of the training run to {paths[-1]}")
    return read_json(storage, path, "a JSON object", "restore it from a copy")


def _untied(file: SidecarFile) -> SidecarFile:
    """Return ``config.json`` with ``tie_word_embeddings`` false: else a loader would discard the trained projection."""
    try:
        config = json.loads(file.text or "")
    except (ValueError, RecursionError):
        return file
    if not isinstance(config, dict):
        return file
    config["tie_word_embeddings"] = False
    return replace(file, text=json.dumps(config, indent=2) + "\n", changed=True)
