"""``consolidate``: whole weights in one file or a few, for any loader, also with LoRA adapters merged into them.

A merge also needs the configuration of the model: it says whether the output projection is tied to the input embedding.
If the merge makes the two differ, ``config.json`` of the output says that they are not tied.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._run import Run, Written
from ckpttool.api.options import Options
from ckpttool.arguments import checked_path
from ckpttool.blocks import Shown
from ckpttool.errors import ArgumentError, LayoutError, PlanError
from ckpttool.formats import Source, open_checkpoint, opening_options
from ckpttool.formats.sidecars import SidecarFile, find_sidecars
from ckpttool.messages import brief
from ckpttool.model.lora import CONFIG, adapters_of, merge_lora
from ckpttool.storage import connect, local_path, open_storage, read_json, without_credentials
from ckpttool.targets.weight_files import WeightChoice, plan_weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.model import Checkpoint
    from ckpttool.units import Progress


MAX_BYTES = 1 << 26
"""Maximum size of the file."""


def read_rename_map(
    table: Mapping[str, str] | str | os.PathLike[str] | None, options: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return new names by old ones.

    Args:
        table: The names, the path or URL of a JSON file of them, or None.
        options: Options of the fsspec class of a URL.

    Raises:
        ArgumentError: The table is malformed.
        LayoutError: The file is not a JSON object of texts, or has a name twice.
        StorageError: The file cannot be read.
    """
    if table is None:
        return {}
    if isinstance(table, Mapping):
        if not _is_table(table):
            raise ArgumentError("rename_map", f"is {brief(table)}, not names by names", "write {'old': 'new'}")
        return table
    path = os.fspath(table)
    storage = open_storage(path, options)
    shown = without_credentials(local_path(path))
    with storage.open(shown) as reader:
        if reader.nbytes > MAX_BYTES:
            raise LayoutError(shown, f"has {reader.nbytes:,} bytes, too many for a table of names", "check the path")
        data = reader.read(0, reader.nbytes)
    try:
        found = json.loads(data, object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        raise LayoutError(shown, f"gives {brief(str(error))} two new names", "leave one of them out") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_table(found):
        raise LayoutError(shown, "is not a JSON object of new names by old ones", 'write {"old": "new"}')
    result: Mapping[str, str] = found
    return result


class _DuplicateError(Exception):
    """A JSON object has an entry twice; the text is its key."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _DuplicateError(name)
        result[name] = value
    return result


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


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
        base: The base model; None if ``checkpoint`` contains it.
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
        PlanError: The checkpoint does not contain it.
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


@dataclass(frozen=True, slots=True)
class _Merge:
    """The adapters to merge, and the base model to merge them into."""

    merge_lora: bool
    base: Source | None
    adapter: Sequence[str]

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


@dataclass(frozen=True, slots=True)
class ConsolidateReport(Shown):
    """Result of ``consolidate``."""

    written: Written
    """The output."""
    tensors: int
    """Tensors in it; tied tensors count once."""
    elements: int
    """Elements in it."""
    dtype: str
    """Type of the parameters: "fp32", "bf16" or "fp16"."""
    tied: Mapping[str, str]
    """Tied names: alias to the name the tensor is stored under."""
    sidecars: tuple[str, ...]
    """Sidecar files that were copied: configuration, tokenizer."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint."""

    def blocks(self) -> Iterator[Block]:
        """Yield the written files, or those planned by a dry run."""
        contents = f"{self.tensors} tensors, {self.elements:,} elements, parameters in {self.dtype}"
        yield self.written.line(contents)
        yield from self.written.weights(self)


def consolidate(  # noqa: PLR0913  public API
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "torch"],
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    weights_from: Literal["masters", "module"] = "masters",
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exclude_frozen: bool = False,
    adapter_only: bool = False,
    optimizer: bool = False,
    merge_lora: bool = False,
    base: Source | None = None,
    adapter: Sequence[str] = (),
    rename: Sequence[str] = (),
    rename_map: Mapping[str, str] | str | os.PathLike[str] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    open_budget: float = 1.0,
) -> ConsolidateReport:
    """Merge the shards of a checkpoint into whole weights; the output appears whole or not at all.

    Trainable parameters come from the fp32 master weights, frozen ones from the model's copy; buffers keep their type.

    Args:
        src: As for ``inspect``.
        out: Directory to write: ``model.safetensors`` or ``pytorch_model.bin``, or shards of them with an index.
        to: Kind of file.
        tag: As for ``inspect``.
        dtype: Type of the parameters, cast bit for bit as torch does.
        weights_from: The optimizer's fp32 master weights, or the model's own 16-bit copies (saved at stages 1 and 2).
        max_shard_size: Bytes, or a text like "5GB"; a larger model is split into several files.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        exclude_frozen: Leave out frozen parameters.
        adapter_only: Write the trained PEFT adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.
        optimizer: Also write the optimizer's states, for "safetensors": ``optimizer.safetensors``, from which
            ``convert`` makes a checkpoint to resume from. Weights in fp32 are the master weights; beside others it
            contains these as well.
        merge_lora: Merge the trained LoRA or DoRA adapter into the base model's weights, in fp32, as PEFT does; the
            output has the base model's names.
        base: The base model, as for ``src``; default: the frozen weights in the checkpoint.
        adapter: Names of the adapters to merge, if there are several.
        rename: Rules for the names in the output, applied in order: "s/PATTERN/REPLACEMENT/" with Python's regular
            expressions (flags g, i), or the name of a ready-made map, such as "module" or "peft".
        rename_map: New names by old ones, or the path or URL of a JSON file of them; applied before ``rename``.
        prove: Digest the source and the output, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        dry_run: Plan, but write nothing; the report has the disk space and memory of a run.
        resume: As for ``convert``.
        overwrite: Allow an ``out`` with files, but without a checkpoint: weights of the same kind in it are replaced,
            other files are kept. A replaced sidecar file that differs from the new one is kept as ``NAME.replaced``.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        ray: Address of a Ray cluster that does the work, or True for the one that Ray finds or starts.
        progress: Called with (bytes done, bytes in all).
        allow_partial: Accept a source whose files cannot be proven to be all: safetensors of single ranks.
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.
        follow_links: As for ``inspect``.
        open_budget: As for ``inspect``.

    Raises:
        CkptError: A wrong argument, no sound checkpoint, ``out`` not writable, no match, or a checksum that differs.
    """
    storage_options = opening_options(storage_options, follow_links, open_budget)
    options = Options(
        tag=tag,
        jobs=jobs,
        memory=memory,
        ray=ray,
        progress=progress,
        check=check,
        prove=prove,
        dry_run=dry_run,
        resume=resume,
        overwrite=overwrite,
        allow_partial=allow_partial,
        trust_names=trust_names,
        module_only=weights_from == "module",
        storage_options=storage_options,
    )
    chosen = WeightChoice(
        to,
        dtype,
        weights_from,
        max_shard_size,
        include,
        exclude,
        exclude_frozen,
        adapter_only,
        rename,
        optimizer=optimizer,
    )
    merge = _Merge(merge_lora, base, adapter)
    return _consolidate(src, checked_path("out", out), chosen, merge, rename_map, options)


def _consolidate(
    src: Source,
    out: str,
    chosen: WeightChoice,
    merge: _Merge,
    rename_map: Mapping[str, str] | str | os.PathLike[str] | None,
    options: Options,
) -> ConsolidateReport:
    chosen.check()
    merge.check(chosen)
    run = Run(out, options)
    chosen = replace(chosen, rename_map=read_rename_map(rename_map, options.storage_options))
    chosen.check()  # again, with the table of new names
    checkpoint, companions, notes = _open(src, run, merge, options)
    made = plan_weight_files(checkpoint, chosen, run.destination.out, companions)
    selection = made.selection

    def verify(directory: str) -> str:
        from ckpttool.analysis.digest import same_digest, same_weights

        output = open_checkpoint(directory, options=options.storage_options, unfinished=True)
        if chosen.optimizer:
            return same_digest(checkpoint, output, directory, options.jobs)
        return same_weights(checkpoint, selection.states, output, options.jobs)

    written = run.write(made.plan, checkpoint, last=(made.index,), verify=verify if options.prove else None)
    return ConsolidateReport(
        written=written,
        tensors=len(selection.weights),
        elements=sum(w.state.numel for w in selection.weights),
        dtype=chosen.dtype,
        tied=dict(selection.aliases),
        sidecars=made.companions,
        notes=(*made.notes, *notes),
    )


def _open(
    src: Source, run: Run, merge: _Merge, options: Options
) -> tuple[Checkpoint, tuple[SidecarFile, ...] | None, tuple[str, ...]]:
    """Open the source, and merge its adapters if requested; also return the sidecar files and notes of a merge."""
    (checkpoint,) = run.open([src])
    if not merge.merge_lora:
        return checkpoint, None, ()

    base = None
    if merge.base is not None:
        base = replace(options, tag=None).open(merge.base)
        run.destination.check_apart(base)
    merged = merged_source(checkpoint, base, merge.adapter)
    return merged.checkpoint, merged.companions, merged.notes
