"""Load open checkpoints into engines of DeepSpeed: all ranks read, then each hands its state to its engine."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpttool.errors import PlanError
from ckpttool.integrations.deepspeed.engine import (
    batch_notes,
    check_loadable,
    drop_gradients,
    inspect_engine,
    keeps_loss_scale,
    micro_batches,
    warn_of,
    whole_layers,
)
from ckpttool.integrations.deepspeed.load_partitions import fill_engine
from ckpttool.integrations.deepspeed.match import match
from ckpttool.integrations.deepspeed.prepared import NativeState, PlannedState
from ckpttool.integrations.deepspeed.read_state import read_state
from ckpttool.integrations.live.rank_states import read_rank_states
from ckpttool.integrations.live.report import LoadReport
from ckpttool.integrations.live.run import after_load, changing_run
from ckpttool.integrations.torch.collectives import check_on_all_ranks, unexpected_is_damage
from ckpttool.integrations.torch.run_state import load_options
from ckpttool.model import MASTER, MODULE
from ckpttool.registry import hooks
from ckpttool.saving.coordination import attempt
from ckpttool.saving.provenance import note_restored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks

LEFT_OUT = "the client state contains objects that cannot be built, or need allow: it is left out"
"""Note of a load of weights only."""


def restore_engines(pairs: Sequence[tuple[Any, Checkpoint]], options: LoadOptions, ranks: Ranks) -> list[LoadReport]:
    """Load open checkpoints into several engines: all are read before the first engine changes.

    Args:
        pairs: Each engine with its checkpoint; all reads use its ``storage``.
        options: What to restore, and how to read.
        ranks: The ranks that take part.

    Raises:
        CkptError: A checkpoint does not fit its engine or cannot be read; on every rank, before any engine changed.
            With ``staged=False`` the error says if an engine is half loaded.
    """
    with contextlib.ExitStack() as wrapped:
        for engine, _ in pairs:
            wrapped.enter_context(whole_layers(engine))
        read = [_read(engine, checkpoint, options, ranks) for engine, checkpoint in pairs]
        for one in read if not (options.staged or options.dry_run) else ():
            with changing_run(one.prepared.checkpoint.location, options):
                _fill(one, options, ranks)
        return [_load(one, options, ranks) for one in read]


class _Read(NamedTuple):
    """The state of one engine, read but not yet loaded."""

    live: LiveEngine
    prepared: NativeState | PlannedState
    rank_state: Any
    rank_states: Sequence[Any]
    batch: Sequence[str]
    """Notes on batch sizes that differ from the save."""
    seconds: float = 0.0


def _read(engine: Any, checkpoint: Checkpoint, options: LoadOptions, ranks: Ranks) -> _Read:
    """Read the state of an engine, on every rank.

    Raises:
        CkptError: As for ``restore_engines``.
    """
    began = time.perf_counter()
    made = attempt(partial(_read_own, engine, checkpoint, options))

    def decide(methods: list[str]) -> None:
        if odd := next((rank for rank, method in enumerate(methods) if method != methods[0]), 0):
            problem = f"fits the engine of rank 0 ({methods[0]}) and of rank {odd} ({methods[odd]}) in different ways"
            raise PlanError(checkpoint.location, problem, "build the same model on all ranks")

    ranks.exchange(checkpoint.location, lambda: _method(made.result().prepared), decide)
    read = made.result()
    prepared = read.prepared
    if options.staged and isinstance(prepared, PlannedState) and prepared.checks is not None:
        check_on_all_ranks(prepared.checks, checkpoint, ranks)
    return read._replace(seconds=time.perf_counter() - began)


def _fill(read: _Read, options: LoadOptions, ranks: Ranks) -> None:
    """Read the state of an engine straight into it, on every rank.

    Raises:
        CkptError: Reading failed on a rank; on every rank.
    """
    prepared = cast("PlannedState", read.prepared)
    ranks.together(prepared.checkpoint.location, partial(fill_engine, read.live, prepared, options))
    if prepared.checks is not None:
        check_on_all_ranks(prepared.checks, prepared.checkpoint, ranks)


def _method(prepared: NativeState | PlannedState) -> str:
    """Return the method of a load, as a report names it."""
    return "native" if isinstance(prepared, NativeState) else "planned"


def _read_own(engine: Any, checkpoint: Checkpoint, options: LoadOptions) -> _Read:
    """Read the state of this rank."""
    with unexpected_is_damage(checkpoint.location):
        live = inspect_engine(engine)
        check_loadable(live)
        for hook in hooks("before_load"):
            hook(live, options)
        options = load_options(checkpoint, options)
        prepared = read_state(live, match(live, checkpoint, options), options)
        own, states = read_rank_states(live, checkpoint, options)
        batch = [] if options.weights_only else batch_notes(engine, checkpoint)
        prepared = replace(prepared, notes=(*prepared.notes, *_pending(live), *batch))
    return _Read(live, prepared, own, states, batch)


def _load(read: _Read, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Load the state that was read, on every rank.

    Raises:
        PlanError: DeepSpeed raised an error.
    """
    began = time.perf_counter()
    live, prepared, checkpoint = read.live, read.prepared, read.prepared.checkpoint
    engine = live.engine
    client_state = checkpoint.client_state if prepared.run_state is None else prepared.run_state["client_state"]
    if checkpoint.client_state and not client_state:
        prepared = replace(prepared, notes=(*prepared.notes, LEFT_OUT))
    if not options.dry_run:
        warn_of(checkpoint, read.batch)
        client_state = _inject(live, prepared, client_state, options)
        note_restored(engine, checkpoint)
    report = _report(live, prepared, client_state, options, read.seconds + time.perf_counter() - began)
    report = replace(report, rank_state=read.rank_state, rank_states=read.rank_states)
    return after_load(report, live, prepared, options, ranks)


def _inject(
    live: LiveEngine, prepared: NativeState | PlannedState, client_state: Mapping[str, Any], options: LoadOptions
) -> Mapping[str, Any]:
    """Load the prepared state into the engine; return the client state as DeepSpeed returns it.

    Raises:
        PlanError: DeepSpeed raised an error; the engine has a part of the state.
    """
    from ckpttool.integrations.deepspeed import inject

    try:
        if options.without_optimizer and isinstance(prepared, PlannedState):
            inject.hand_over_weights(live, prepared)
            if not options.weights_only:
                inject.hand_over_run(live, prepared, scheduler=options.scheduler)
        else:
            returned = inject.hand_over(live, prepared, scheduler=options.scheduler)
            own = {(type(key), repr(key)) for key in client_state}  # a NaN is equal to no other
            client_state = {key: value for key, value in returned.items() if (type(key), repr(key)) in own}
        drop_gradients(live)
    except Exception as error:
        problem = f"could not be loaded, and the engine is half loaded: {type(error).__name__}: {error}"
        raise PlanError(prepared.checkpoint.location, problem, "build a new engine") from error
    return client_state


def _pending(live: LiveEngine) -> list[str]:
    """Notes on gradients that the engine has accumulated since its last step."""
    if not micro_batches(live.engine):
        return []
    return ["micro batches were accumulated since the last step: the load drops their gradients"]


def _report(
    live: LiveEngine,
    prepared: NativeState | PlannedState,
    client_state: Mapping[str, Any],
    options: LoadOptions,
    seconds: float,
) -> LoadReport:
    checkpoint, fitted = prepared.checkpoint, prepared.fitted
    source = checkpoint if fitted is None else fitted.checkpoint
    restored = [p for p in source.parameters if p.states]
    states = {key: None for p in restored if not p.frozen for key in p.states if key not in {MASTER, MODULE}}
    unrestored = () if fitted is None else fitted.unrestored_groups
    missing = () if fitted is None else fitted.missing
    notes = [*prepared.checkpoint.remarks, *prepared.notes]
    scheduler = live.engine.lr_scheduler is not None and options.scheduler and not options.weights_only
    if scheduler and checkpoint.scheduler is None:
        notes.append("the checkpoint has no scheduler state: the engine keeps its own")
    scale = keeps_loss_scale(live, checkpoint) or isinstance(prepared, NativeState)
    if not options.without_optimizer and not scale and live.dtype == "F16":
        notes.append("the checkpoint has no loss scale for fp16: the engine keeps its own")
    if live.engine.load_universal_checkpoint():
        notes.append("load_universal in the engine's configuration is ignored: no conversion is needed")
    groups = range(len(live.hyperparameters)) if not options.without_optimizer else ()
    return LoadReport(
        path=checkpoint.location,
        tag=checkpoint.tag,
        step=checkpoint.step,
        method=_method(prepared),
        dry_run=options.dry_run,
        weights_only=options.weights_only,
        optimizer=not options.without_optimizer,
        source=checkpoint.topology,
        source_stage=checkpoint.stage,
        target=live.topology,
        target_stage=live.stage,
        parameters=len(restored),
        elements=sum(p.numel for p in restored),
        buffers=len(checkpoint.buffers if fitted is None or isinstance(prepared, NativeState) else fitted.buffers),
        states=() if options.without_optimizer else tuple(states),
        groups_restored=tuple(g for g in groups if g not in unrestored),
        groups_kept=unrestored if not options.without_optimizer else tuple(range(len(live.hyperparameters))),
        scheduler=scheduler and checkpoint.scheduler is not None,
        loss_scale=scale and not options.without_optimizer and bool(live.stage or live.wrapper),
        missing=missing,
        unexpected=() if fitted is None else fitted.unexpected,
        notes=tuple(dict.fromkeys(notes)),
        nbytes_read=prepared.nbytes_read,
        seconds=seconds,
        client_state=client_state,
    )
