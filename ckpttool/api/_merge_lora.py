"""Open what ``consolidate`` needs to merge LoRA adapters: configurations, the base model and the sidecar files."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.api._tied_embeddings import check_embedding, config_of, is_head, with_tied_head
from ckpttool.errors import LayoutError, PlanError
from ckpttool.formats.sidecars import SidecarFile, find_sidecars
from ckpttool.model.lora import CONFIG, adapters_of, merge_lora
from ckpttool.storage import connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class MergedSource:
    """A model with adapters merged, as ``consolidate`` writes it."""

    checkpoint: Checkpoint
    """Its weights."""
    companions: tuple[SidecarFile, ...]
    """Configuration of the base model, tokenizer of the training run if it has one."""
    notes: tuple[str, ...]
    """Remarks for the user."""


def merged_source(checkpoint: Checkpoint, base: Checkpoint | None, adapter: Sequence[str]) -> MergedSource:
    """Merge adapters into the weights of their base model.

    Args:
        checkpoint: The checkpoint with the adapters.
        base: The base model; None if ``checkpoint`` holds it.
        adapter: Names of the adapters to merge, in this order; none for the only one.

    Raises:
        PlanError: The adapters or the base model do not fit.
        LayoutError: A configuration is damaged.
    """
    chosen = _chosen(checkpoint, [adapter] if isinstance(adapter, str) else adapter)
    configs = {name: _config(checkpoint, name, alone=len(adapters_of(checkpoint)) == 1) for name in chosen}
    files = {} if base is None else {f.name: f for f in find_sidecars(connect(base.storage), base.root)}
    files |= {f.name: f for f in find_sidecars(connect(checkpoint.storage), checkpoint.root)}
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
    return MergedSource(merged.checkpoint, tuple(files[name] for name in sorted(files)), tuple(notes))


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
        PlanError: There is none.
        LayoutError: It is damaged.
    """
    storage = connect(checkpoint.storage)
    # PEFT saves an adapter that is not called "default" in a directory of its name.
    paths = [posixpath.join(checkpoint.root, adapter, CONFIG)] if adapter else []
    if alone or adapter in {"", "default"}:
        paths.append(posixpath.join(checkpoint.root, CONFIG))
    path = next((path for path in paths if storage.exists(path)), None)
    if path is None:
        problem = f"has no {CONFIG}, which records the scaling of the adapter"
        raise PlanError(checkpoint.root, problem, f"copy the one of the training run to {paths[-1]}")
    try:
        config = json.loads(storage.read_text(path))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise LayoutError(path, "is not a JSON object", "restore it from a copy")
    return config


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
