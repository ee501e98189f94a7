"""Which weights a base model ties to its input embedding: safetensors store them once and do not tell.

Source: transformers 5, ``PreTrainedModel.tie_weights`` and ``_tied_weights_keys`` of the models.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats.sidecars import SidecarFile
    from ckpttool.model import Checkpoint

HEAD = "lm_head.weight"
"""The output projection of causal language models."""
EMBEDDINGS = (
    "embed_tokens", "wte", "shared", "word_embeddings", "embed_in", "tok_embeddings", "tokens_embed", "embeddings",
)  # fmt: skip
"""Names of the module of the input embedding in transformers' models."""
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")
"""Names of modules that may have the shape of the input embedding, but are never tied to it."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the class names of causal language models."""
HEADLESS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    "ForImageClassification", "ForAudioClassification", "Model",
)  # fmt: skip
"""Ends of the class names of models without an output projection over the vocabulary; LMHeadModel is none of them."""


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
        base: The base model; None if ``checkpoint`` holds it.
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
