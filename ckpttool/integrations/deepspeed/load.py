"""Resume a live DeepSpeed engine from any checkpoint, on any number of ranks, with no conversion in between.

Every rank reads only what it owns. A load has two halves: the first reads, and may fail; then the ranks agree that all
have succeeded; the second changes the engine. So a damaged file leaves no engine half loaded, and no rank waits for one
that has given up.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError, PlanError
from ckpttool.execution.streaming import memory_bytes
from ckpttool.formats import open_checkpoint, source_paths, source_storage
from ckpttool.integrations.deepspeed.engine import look
from ckpttool.integrations.deepspeed.load_plan import Reading, keeps_loss_scale, prepare
from ckpttool.integrations.deepspeed.pending import drop_gradients, micro_batches
from ckpttool.integrations.deepspeed.report import LoadReport
from ckpttool.integrations.torch.collectives import (
    Agree,
    agree_on_all_ranks,
    check_on_all_ranks,
    open_together,
    own_ranks,
)
from ckpttool.model import MASTER, MODULE
from ckpttool.saving.coordination import agree_to_begin

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.execution.read_checks import Check
    from ckpttool.formats import Source
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.deepspeed.load_plan import Prepared
    from ckpttool.model import Checkpoint

TIMEOUT = 1800.0
"""Seconds that a rank may be behind, if nothing else is asked for."""


def load(
    engine: Any,
    src: Source,
    *,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    check: Check = "read",
    trust_names: bool = False,
    allow: Collection[str] = (),
    timeout: float = TIMEOUT,
) -> LoadReport:
    """Load a checkpoint into a DeepSpeed engine, whatever the ranks and the ZeRO stage that it was saved with.

    To be called on every rank, like ``engine.load_checkpoint``. Where ranks, stage and parameters are as they were,
    DeepSpeed gets what its own files hold; otherwise each rank reads the ranges that it owns, from the N ranks' files.
    Unlike ``engine.load_checkpoint`` it unpickles nothing: ckpttool reads the files and builds what is in them.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        src: As for ``inspect``.
        tag: As for ``inspect``.
        strict: Whether both must hold the same parameters and buffers. If not, what is missing keeps the engine's
            values, and what has no place is left out; the report names both.
        weights_only: Load masters, weights and buffers from any source that holds weights, and leave the optimizer's
            states, the counters and the scheduler as they are.
        dry_run: Say what would be loaded; the engine stays as it is.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.
        memory: Bytes, or a text like "256MB", that requests in flight may take on each rank where the checkpoint is
            distant; default: 256 MB.
        check: Which recorded CRC-32 to compare with what all ranks read, before the engine is touched; as for
            ``consolidate``. Where there is a manifest, every byte is compared with that.
        trust_names: As for ``inspect``.
        allow: Classes ("module.Class") of objects in the client state that are built as the file says, which runs
            their code. Plain data, tensors, numpy arrays, paths and dates need none.
        timeout: Seconds that a rank may be behind the others.

    Returns:
        What was restored; ``client_state`` is what the user's code saved along.

    Raises:
        CkptError: The checkpoint is not sound or does not fit the engine; the same on every rank.
        ValueError: ``memory`` is no size.
    """
    began = time.perf_counter()
    paths: list[str] = []

    def ready() -> None:
        memory_bytes(memory)
        paths.extend(source_paths(src))
        source_storage(paths, storage_options)
        look(engine)

    ranks = own_ranks("load")
    asked: dict[str, Any] = {
        "tag": tag,
        "strict": strict,
        "weights_only": weights_only,
        "dry_run": dry_run,
        "check": check,
    }
    asked["allow"] = sorted(allow)
    agree_to_begin(ranks, _named(src), {**asked, "src": _named(src)}, ready, timeout=timeout)
    checkpoint = open_together(
        paths[0],
        source_storage(paths, storage_options),
        lambda: open_checkpoint(paths, tag=tag, options=storage_options, trust_names=trust_names),
        ranks,
        timeout=timeout,
    )
    report = restore_engine(
        engine, checkpoint, strict=strict, weights_only=weights_only, dry_run=dry_run, memory=memory_bytes(memory),
        check=check, allow=allow, agree=partial(agree_on_all_ranks, ranks, checkpoint.location, timeout=timeout),
    )  # fmt: skip
    return replace(report, seconds=time.perf_counter() - began)


def _named(src: Source) -> str:
    """What errors call a source."""
    try:
        return ", ".join(source_paths(src))
    except (TypeError, ValueError):
        return repr(src)[:200]


def preview(
    engine: Any,
    src: Source,
    *,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    timeout: float = TIMEOUT,
) -> LoadReport:
    """Say what ``load`` would do; no weights are read, and the engine stays as it is.

    Args:
        engine: As for ``load``.
        src: As for ``inspect``.
        tag: As for ``inspect``.
        strict: As for ``load``.
        weights_only: As for ``load``.
        storage_options: As for ``load``.
        allow: As for ``load``.
        timeout: As for ``load``.

    Raises:
        CkptError: The checkpoint is not sound or does not fit the engine; the same on every rank.
    """
    return load(
        engine, src, tag=tag, strict=strict, weights_only=weights_only, dry_run=True, storage_options=storage_options,
        allow=allow, timeout=timeout,
    )  # fmt: skip


def restore_engine(
    engine: Any,
    checkpoint: Checkpoint,
    *,
    strict: bool = True,
    weights_only: bool = False,
    dry_run: bool = False,
    memory: int | str | None = None,
    check: Check = "read",
    allow: Collection[str] = (),
    agree: Agree | None = None,
) -> LoadReport:
    """Load a checkpoint that is open already; to be called on every rank with the same.

    Args:
        engine: As for ``load``.
        checkpoint: The checkpoint; everything is read through its ``storage``.
        strict: As for ``load``.
        weights_only: As for ``load``.
        dry_run: As for ``load``.
        memory: As for ``load``.
        check: As for ``load``.
        allow: As for ``load``.
        agree: Lets the ranks agree between the halves; default: ``agree_on_all_ranks`` of the process group.

    Raises:
        CkptError: The checkpoint does not fit the engine or cannot be read; on every rank, and no engine was touched.
    """
    began = time.perf_counter()
    live: LiveEngine | None = None
    prepared: Prepared | None = None
    error: BaseException | None = None
    try:
        room = memory_bytes(memory)
        live = look(engine)
        prepared = prepare(
            live, checkpoint, strict=strict, weights_only=weights_only, dry_run=dry_run,
            reading=Reading(room, check, tuple(allow)),
        )  # fmt: skip
    except BaseException as problem:  # raised again below, when all ranks know
        error = problem
    if agree is None:
        agree = partial(agree_on_all_ranks, own_ranks("restore"), checkpoint.location, timeout=TIMEOUT)
    agree(error)
    if error is not None or live is None or prepared is None:
        raise error or LayoutError(checkpoint.location, "was not read", "this is a bug in ckpttool")
    if prepared.checks is not None:
        check_on_all_ranks(prepared.checks, checkpoint, agree)
    prepared = replace(prepared, notes=(*prepared.notes, *_pending(live)))
    client_state: Mapping[str, Any] = {} if weights_only else checkpoint.client_state
    if not dry_run:
        from ckpttool.integrations.deepspeed import inject

        try:
            if weights_only:
                inject.hand_over_weights(live, prepared)
            else:
                returned = inject.hand_over(live, prepared)
                client_state = {key: returned[key] for key in checkpoint.client_state if key in returned}
            drop_gradients(live)
        except Exception as failed:
            told = f"could not be handed to the engine, which is half loaded now: {type(failed).__name__}: {failed}"
            raise PlanError(checkpoint.location, told, "build the engine anew") from failed
    return _report(live, prepared, client_state, weights_only, dry_run, time.perf_counter() - began)


def _pending(live: LiveEngine) -> list[str]:
    """What is said of gradients that wait in the engine for the end of a step."""
    count = micro_batches(live)
    if not count:
        return []
    batches = "a micro batch" if count == 1 else f"{count} micro batches"
    return [f"{batches} had been accumulated since the last step: those gradients are dropped"]


def _report(
    live: LiveEngine,
    prepared: Prepared,
    client_state: Mapping[str, Any],
    weights_only: bool,
    dry_run: bool,
    seconds: float,
) -> LoadReport:
    checkpoint, fitted = prepared.checkpoint, prepared.fitted
    source = checkpoint if fitted is None else fitted.checkpoint
    restored = [p for p in source.parameters if p.states]
    states = {key: None for p in restored if not p.frozen for key in p.states if key not in {MASTER, MODULE}}
    kept = () if fitted is None else fitted.kept
    missing = () if fitted is None else fitted.missing
    notes = [*prepared.notes]
    scheduler = live.engine.lr_scheduler is not None and not weights_only
    if scheduler and checkpoint.scheduler is None:
        notes.append("the checkpoint has no state for the scheduler: it stays as it is")
    scale = keeps_loss_scale(live, checkpoint) or prepared.road == "native"
    if not weights_only and not scale and live.dtype == "F16":
        notes.append("the checkpoint has no loss scale for fp16: the engine keeps its own")
    if live.engine.load_universal_checkpoint():
        notes.append("load_universal in the engine's configuration was passed over: no conversion is needed")
    groups = range(len(live.hyperparameters)) if not weights_only else ()
    return LoadReport(
        path=checkpoint.location,
        tag=checkpoint.tag,
        step=checkpoint.step,
        road=prepared.road,
        dry_run=dry_run,
        weights_only=weights_only,
        source=checkpoint.topology,
        source_stage=checkpoint.stage,
        target=live.topology,
        target_stage=live.stage,
        parameters=len(restored),
        elements=sum(p.numel for p in restored),
        buffers=len(checkpoint.buffers if fitted is None or prepared.road == "native" else fitted.buffers),
        states=() if weights_only else tuple(states),
        groups_restored=tuple(g for g in groups if g not in kept),
        groups_kept=kept if not weights_only else tuple(range(len(live.hyperparameters))),
        scheduler=scheduler and checkpoint.scheduler is not None,
        loss_scale=scale and not weights_only and bool(live.stage or live.wrapper),
        missing=missing,
        unexpected=() if fitted is None else fitted.unexpected,
        notes=tuple(dict.fromkeys(notes)),
        nbytes_read=prepared.nbytes_read,
        seconds=seconds,
        client_state=client_state,
    )
