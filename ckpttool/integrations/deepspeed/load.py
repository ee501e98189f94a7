"""Resume a live DeepSpeed engine from any checkpoint, on any number of ranks, with no conversion in between.

Every rank reads only its own state. A load has two halves. The first half reads, and may fail; then the ranks agree
that all reads succeeded; the second half changes the engine. A damaged file therefore never leaves an engine half
loaded, and no rank waits for a failed rank.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import PlanError
from ckpttool.formats import Opening, open_checkpoint, source_paths, source_storage
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
from ckpttool.integrations.deepspeed.match import match
from ckpttool.integrations.deepspeed.prepared import LoadOptions, NativeState, PlannedState, check_switches
from ckpttool.integrations.deepspeed.rank_states import read_rank_states
from ckpttool.integrations.deepspeed.read_state import read_state
from ckpttool.integrations.deepspeed.report import LoadReport
from ckpttool.integrations.proof import Proof, prove_state
from ckpttool.integrations.state_comparison import Scope
from ckpttool.integrations.torch.collectives import (
    check_on_all_ranks,
    open_together,
    ranks_of_process_group,
    unexpected_is_damage,
)
from ckpttool.integrations.torch.run_state import load_options
from ckpttool.model import MASTER, MODULE
from ckpttool.saving.coordination import TIMEOUT, Ranks, attempt
from ckpttool.saving.provenance import note_restored

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpttool.execution.checks import Check
    from ckpttool.formats import Source
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.torch.live import LiveState
    from ckpttool.integrations.torch.load import LiveRun
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

LEFT_OUT = "the client state contains objects that cannot be built, or need allow: it is left out"
"""Note of a load of weights only."""


def load(  # noqa: PLR0913  public API
    engine: Any,
    src: Source,
    *,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    optimizer: Any = True,
    scheduler: Any = True,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    memory: int | str | None = None,
    check: Check = "read",
    trust_names: bool = False,
    allow: Collection[str] = (),
    prove: bool | None = None,
    timeout: float = TIMEOUT,
) -> LoadReport:
    """Load any checkpoint into a live run of DeepSpeed or torch, on any number of ranks and at any ZeRO stage.

    Call it on every rank, like ``engine.load_checkpoint``. If ranks, stage and parameters match the save, DeepSpeed
    gets the content of its own files; otherwise each rank reads its ranges from the files of all ranks. Unlike
    ``engine.load_checkpoint`` it runs no pickle: ckpttool parses the files and builds the objects in them.

    A torch model may be plain, or under DDP, FSDP2, HSDP or tensor parallelism. Its parameters, buffers and optimizer
    states are filled in place, in the types that the run has. No step is taken, no hook is called, and gradients are
    dropped.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned, or a torch model.
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        strict: Whether checkpoint and engine must have the same parameters and buffers. If not, missing ones keep the
            engine's values, and unexpected ones are left out; the report names both.
        weights_only: Load weights, fp32 master weights and buffers from any source, and leave the optimizer's states,
            the counters and the scheduler unchanged. The report has the client state.
        optimizer: Of a torch model, its optimizer, or a list of several. Of an engine, whether to restore the
            optimizer's states and hyper-parameters. False: only weights, fp32 master weights, buffers, counters and the
            scheduler are restored.
        scheduler: Of a torch model, its learning-rate scheduler. Of an engine, whether to restore it.
        dry_run: Report the result of a load, without reading weights or changing the run.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.
        memory: Bytes of requests in flight on each rank, for a remote source: a number, or "256MB" (default).
        check: Recorded CRC-32 to compare with the bytes of all ranks, before the engine changes: of records read
            "read" whole, "full" also of partly read ones, "off" none. With a manifest, every byte is compared with its
            checksums.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        allow: Classes ("module.Class") of objects in the client state to build, which runs their code. Plain data,
            tensors, numpy arrays, paths and dates are always built.
        prove: Whether to digest the live state after the load, in place, and compare it with the saved one; see
            ``ckpttool.prove``. Default: if the save recorded digests and the state is on an accelerator.
        timeout: Seconds that a rank may lag.

    Returns:
        A report of the restored state; its ``client_state`` is the state saved by the user's code.

    Raises:
        ProofError: With ``prove``, the live state differs from the saved one; on every rank, after the load.
        CkptError: The checkpoint is damaged or does not fit the engine, or an argument is wrong; on every rank.
    """
    opening = Opening(storage_options, follow_links)
    of_deepspeed = hasattr(engine, "save_checkpoint") or type(engine).__module__.startswith("deepspeed.")
    of_torch = hasattr(engine, "named_parameters") and not of_deepspeed
    options = LoadOptions(
        strict=strict,
        weights_only=weights_only,
        optimizer=bool(optimizer) if isinstance(optimizer, int) else True,
        scheduler=bool(scheduler) if isinstance(scheduler, int) else True,
        dry_run=dry_run,
        memory=memory,
        check=check,
        prove=prove,
        allow=tuple(allow),
    )
    began = time.perf_counter()
    ranks = ranks_of_process_group("load", timeout)
    name = _named(src)
    asked = {"tag": tag, "src": name, "engine": "a torch model" if of_torch else "an engine"} | options.agreed()
    if of_torch:
        asked |= {"optimizer": _classes_of(optimizer), "scheduler": _classes_of(scheduler)}

    def begin() -> tuple[list[str], Storage, LiveRun | None]:
        if not of_torch:
            check_switches(optimizer=optimizer, scheduler=scheduler)
            return *_source(engine, src, options, opening), None
        from ckpttool.integrations.torch.load import torch_run  # imports torch

        paths = source_paths(src)
        run = torch_run(engine, optimizer, scheduler, options)
        return paths, source_storage(paths, opening), run

    paths, storage, run = ranks.together(name, begin, asked)
    read = partial(open_checkpoint, paths, tag=tag, opening=opening, trust_names=trust_names, module_only=weights_only)
    checkpoint = open_together(paths[0], storage, read, ranks)
    if run is None:
        report = restore_engine(engine, checkpoint, options, ranks)
    else:
        from ckpttool.integrations.torch.load import load_run

        report = load_run(run, checkpoint, options, ranks)
    return replace(report, seconds=time.perf_counter() - began)


def _classes_of(given: Any) -> list[str]:
    """Return the classes of optimizers or schedulers, which are the same on all ranks."""
    return [type(one).__name__ for one in (given if isinstance(given, list | tuple) else [given])]


def _source(engine: Any, src: Source, options: LoadOptions, opening: Opening) -> tuple[list[str], Storage]:
    """Return the paths of a source and their storage, if this rank can load it."""
    _ = options.memory_bytes  # raises for a text that is not a size
    paths = source_paths(src)
    inspect_engine(engine)
    return paths, source_storage(paths, opening)


def _named(src: Source) -> str:
    """Return the name of a source in errors."""
    try:
        return ", ".join(source_paths(src))
    except (TypeError, ValueError):
        return repr(src)[:200]


def restore_engine(engine: Any, checkpoint: Checkpoint, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Load an open checkpoint; call it on every rank with the same checkpoint.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        checkpoint: The checkpoint; all reads use its ``storage``.
        options: What to restore, and how to read.
        ranks: The ranks that take part.

    Raises:
        ProofError: As for ``load``.
        CkptError: The checkpoint does not fit the engine or cannot be read; on every rank, before any engine changed.
    """
    with whole_layers(engine):
        return _load(_read(engine, checkpoint, options, ranks), options, ranks)


def restore_engines(pairs: Sequence[tuple[Any, Checkpoint]], options: LoadOptions, ranks: Ranks) -> list[LoadReport]:
    """Load open checkpoints into several engines: all are read before the first engine changes.

    Args:
        pairs: Each engine with its checkpoint.
        options: As for ``restore_engine``.
        ranks: As for ``restore_engine``.

    Raises:
        ProofError: As for ``load``.
        CkptError: As for ``restore_engine``.
    """
    with contextlib.ExitStack() as wrapped:
        for engine, _ in pairs:
            wrapped.enter_context(whole_layers(engine))
        read = [_read(engine, checkpoint, options, ranks) for engine, checkpoint in pairs]
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
        CkptError: As for ``restore_engine``.
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
    if isinstance(prepared, PlannedState) and prepared.checks is not None:
        check_on_all_ranks(prepared.checks, checkpoint, ranks)
    return read._replace(seconds=time.perf_counter() - began)


def _method(prepared: NativeState | PlannedState) -> str:
    """Return the method of a load, as a report names it."""
    return "native" if isinstance(prepared, NativeState) else "planned"


def _read_own(engine: Any, checkpoint: Checkpoint, options: LoadOptions) -> _Read:
    """Read the state of this rank."""
    from ckpttool.integrations.deepspeed.live_state import check_provable  # imports torch

    with unexpected_is_damage(checkpoint.location):
        live = inspect_engine(engine)
        check_loadable(live)
        if options.prove:
            check_provable(live)
        options = load_options(checkpoint, options)
        prepared = read_state(live, match(live, checkpoint, options), options)
        own, states = read_rank_states(live, checkpoint, options)
        batch = [] if options.weights_only else batch_notes(engine, checkpoint)
        prepared = replace(prepared, notes=(*prepared.notes, *_pending(live), *batch))
    return _Read(live, prepared, own, states, batch)


def _load(read: _Read, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Load the state that was read, on every rank.

    Raises:
        ProofError: As for ``load``.
        PlanError: DeepSpeed raised an error.
    """
    from ckpttool.integrations.deepspeed.live_state import unprovable  # imports torch

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
    wanted = options.prove
    if wanted is None:
        wanted = checkpoint.digests is not None and engine.device.type != "cpu" and not unprovable(live)
    if wanted and not options.dry_run:
        report = replace(report, proof=_prove(live, prepared, report, ranks))
    return report


def _prove(live: LiveEngine, prepared: NativeState | PlannedState, report: LoadReport, ranks: Ranks) -> Proof:
    """Prove the state that a load has restored.

    Raises:
        ProofError: It differs from the saved state; on every rank.
    """
    from ckpttool.integrations.deepspeed.live_state import engine_state  # imports torch
    from ckpttool.integrations.torch.live import values_of

    checkpoint, fitted = prepared.checkpoint, prepared.fitted
    without = {"module"} if live.dtype != checkpoint.dtype else set()
    without |= set() if report.scheduler else {"scheduler"}
    without |= set() if report.loss_scale else {"loss_scale"}
    without |= {"groups"} if report.groups_kept else set()

    def subject() -> LiveState:
        state = engine_state(inspect_engine(live.engine))  # after the load: hyper-parameters have changed
        values = {**state.values, **values_of("client_state", report.client_state)}
        own = {} if report.rank_state is None else values_of("rank_state", report.rank_state)
        return replace(state, values=values, own={**state.own, **own})

    scope = Scope(
        weights_only=report.weights_only,
        without_optimizer=not (report.optimizer or report.weights_only),
        without=frozenset(without),
        without_names=frozenset(report.unexpected),
        without_states_of=frozenset() if fitted is None else fitted.fresh,
        casts=isinstance(prepared, PlannedState),
    )
    return prove_state(subject, checkpoint, ranks, scope)


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
