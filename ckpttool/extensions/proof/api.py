"""Prove that the live state of a run equals a saved one: compare digests taken in place with a checkpoint's."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.digest import tensor_digests
from ckpttool.analysis.extract import read_part
from ckpttool.digests import kind_of
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError, ProofError
from ckpttool.extensions.proof.comparison import Comparison, Scope, compare
from ckpttool.extensions.proof.rank_digest import EXPERT, RankDigest, merge
from ckpttool.extensions.proof.state_digest import StateDigest, state_digest
from ckpttool.formats import LIVE_ORDER, Opening, in_order, open_checkpoint, source_paths, source_storage
from ckpttool.integrations.live.choice import is_engine
from ckpttool.messages import brief
from ckpttool.model import MODULE
from ckpttool.model.items import WEIGHTS, Mismatch, TensorDigest, canonical, difference
from ckpttool.model.names import with_names_of
from ckpttool.model.selection import contents, find
from ckpttool.plan.casts import cast
from ckpttool.registry import with_options
from ckpttool.saving.coordination import TIMEOUT, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.extensions.proof.live_state import LiveState
    from ckpttool.formats import Source
    from ckpttool.integrations.torch.live import Piece
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks

LOG = logging.getLogger(__name__)
HINT = "do not train on: build a new model and optimizer, and load again"
SHOWN = 100
"""Most mismatches that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of a proof: the compared state equals the saved one."""

    path: str
    """Directory of the checkpoint."""
    step: int | None
    """Steps of the saved run."""
    ranks: int
    """Ranks whose state was digested."""
    tensors: int
    """Tensors compared: weights, module copies, buffers and optimizer states."""
    states: tuple[str, ...]
    """Names of the compared states: "weights", "module", "exp_avg", "step", "hyper-parameters", "scheduler", ..."""
    recorded: bool
    """True if the save recorded the digests, false if they are digests of the files."""
    unproven: tuple[str, ...] = ()
    """State that was not compared, as text for the user."""
    seconds: float = 0.0
    """Wall time."""

    def __str__(self) -> str:
        at = "" if self.step is None else f" {'at' if self.recorded else 'of'} step {self.step:,}"
        what = "the state saved" if self.recorded else "the files"
        line = (
            f"proven: {self.tensors:,} tensors on {self.ranks} rank{'s' * (self.ranks != 1)} equal {what}{at} "
            f"({', '.join(self.states)}; {self.seconds:.2f} s)"
        )
        return f"{line}; not compared: {'; '.join(self.unproven)}" if self.unproven else line


def live_digest(model: Any, optimizer: Any = None, scheduler: Any = None, *, timeout: float = TIMEOUT) -> StateDigest:
    """Digest the live state of a run in place; call it on every rank.

    The same state has the same digests on any number of ranks, under plain torch, DDP, FSDP2, HSDP, tensor parallelism
    and DeepSpeed at any ZeRO stage.

    Args:
        model: A DeepSpeed engine, or a torch module: plain, DDP, or with DTensors.
        optimizer: The module's optimizer, or a list of several; an engine has its own.
        scheduler: The learning-rate scheduler of the module, or of an engine that has none.
        timeout: Seconds that a rank may lag.

    Returns:
        The digests. Parts of the state that cannot be digested, such as lists of tensors, are named in the log.

    Raises:
        ProofError: Ranks have different values of the same part, or their parts do not cover a tensor once.
        CkptError: The state cannot be digested; on every rank.
    """
    from ckpttool.integrations.torch.collectives import ranks_of_process_group

    ranks = ranks_of_process_group("digest", timeout)

    def decide(messages: list[Any]) -> dict[str, Any]:
        merged = merge(RankDigest.of_ranks(messages))
        if merged.contradictions:
            raise _error("live_digest", merged.contradictions)
        left_out = [f"{key}: {why}" for key, why in merged.unproven.items()]
        left_out += [f"{item.name} of ranks after the first" for item in merged.apart if item.key == WEIGHTS]
        if left_out:
            LOG.warning("live_digest left out %s", "; ".join(left_out))
        return merged.state.to_json()

    def own() -> dict[str, str]:
        return _state_of(model, optimizer, scheduler).digest().to_json()

    decided = ranks.exchange("live_digest", own, decide)
    ranks.finish()
    return StateDigest.from_json(decided)


@with_options
def prove(  # noqa: PLR0913  public API
    model: Any,
    src: Source,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    tag: str | None = None,
    weights_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    trust_names: bool = False,
    timeout: float = TIMEOUT,
) -> Proof:
    """Prove that the live state of a run equals a checkpoint; call it on every rank, before the next step.

    The live state is digested in place, on the device that has it, and no tensor is gathered. It is compared with the
    digests that the save recorded in the manifest; without those, with digests of the files.

    Args:
        model: A DeepSpeed engine, or a torch module: plain, DDP, or with DTensors; or several modules by name.
        optimizer: The module's optimizer, or a list of several; an engine has its own. Without it, only weights and
            buffers of a torch module are compared.
        scheduler: The learning-rate scheduler of the module, or several by name; or of an engine that has none.
        extra: Of a torch model, the other objects that were saved with it, by name.
        weights_only: Whether to compare only weights and buffers.
        timeout: Seconds that a rank may lag.

    Returns:
        The proof; printed, it is one line.

    Raises:
        ProofError: A part of the state differs; names the first one, and its rank and elements. On every rank.
        CkptError: The checkpoint is damaged, or the state cannot be digested; on every rank.
    """
    from ckpttool.integrations.torch.collectives import open_together, ranks_of_process_group

    opening = Opening(storage_options, follow_links)
    ranks = ranks_of_process_group("prove", timeout)
    asked: dict[str, Any] = {"src": repr(src), "tag": tag, "weights_only": weights_only}
    asked |= {"optimizer": optimizer is not None, "scheduler": scheduler is not None, "extra": sorted(extra or {})}
    paths = ranks.together("prove", partial(source_paths, src), asked)
    storage = source_storage(paths, opening)
    read = partial(open_checkpoint, paths, tag=tag, storage=storage, trust_names=trust_names)
    checkpoint = open_together(paths[0], storage, read, ranks)
    subject = partial(_state_of, model, optimizer, scheduler, extra)
    proof = prove_state(subject, checkpoint, ranks, Scope(weights_only=weights_only))
    ranks.finish()
    return proof


def prove_state(subject: Callable[[], LiveState], checkpoint: Checkpoint, ranks: Ranks, scope: Scope) -> Proof:
    """Compare the live state of all ranks with a checkpoint; errors as for ``prove``.

    Args:
        subject: Returns the ``LiveState`` of this rank.
        checkpoint: The checkpoint, the same on all ranks.
        ranks: The ranks that take part.
        scope: The restored part.
    """
    began, path = time.perf_counter(), checkpoint.location
    recorded = checkpoint.digests is not None
    made = attempt(partial(_with_names_of_state, subject, checkpoint, scope))

    def own() -> dict[str, Any]:
        state, named = made.result()
        saved = None if recorded else state_digest(named, (ranks.rank, ranks.size)).to_json()
        order = [EXPERT.sub(r"\1N", name) for name in state.group_of] if LIVE_ORDER in named.remarks else []
        return {"live": state.digest().to_json(), "saved": saved, "order": canonical(order)}

    def decide(messages: list[Any]) -> Comparison:
        _, named = made.result()
        orders = [message["order"] for message in messages]
        if odd := next((rank for rank, order in enumerate(orders) if order != orders[0]), 0):
            problem = (
                f"numbers the optimizer's parameters, and rank {odd} lists others than rank 0, or in another order"
            )
            raise PlanError(path, problem, "build the optimizer alike on all ranks, or leave it out")
        saved = _expected(named, [message["saved"] for message in messages])
        found = compare(saved, RankDigest.of_ranks([message["live"] for message in messages]), named, scope)
        if not found.mismatches and not found.tensors:
            raise PlanError(path, "has no tensor that the live state has: nothing is proven", "pass its model")
        return found._replace(mismatches=found.mismatches[:SHOWN])

    found = Comparison(*ranks.exchange(path, own, decide))
    state, checkpoint = made.result()
    mismatches = [Mismatch(*one) for one in found.mismatches]
    if not mismatches and found.rounded:
        mismatches = _compare_rounded(found.rounded, checkpoint, ranks)
    if mismatches:
        mismatches[0] = _located(mismatches[0], state, checkpoint, ranks)
        raise _error(path, mismatches)
    return Proof(
        path=path,
        step=checkpoint.step,
        ranks=ranks.size,
        tensors=found.tensors,
        states=tuple(found.states),
        recorded=recorded,
        unproven=tuple(found.notes),
        seconds=time.perf_counter() - began,
    )


def _with_names_of_state(
    subject: Callable[[], LiveState], checkpoint: Checkpoint, scope: Scope
) -> tuple[LiveState, Checkpoint]:
    """Return the live state of this rank, and the checkpoint by its names, with the optimizer's states in its order."""
    state = subject()
    of_optimizer = state.trains and not (scope.weights_only or scope.without_optimizer)
    ordered = in_order(checkpoint, [*state.group_of]) if of_optimizer and checkpoint.digests is None else checkpoint
    return state, with_names_of(ordered, {*(piece.name for piece in state.pieces), *state.aliases})


def _compare_rounded(rounded: Mapping[str, str], checkpoint: Checkpoint, ranks: Ranks) -> list[Mismatch]:
    """Compare weights that a run keeps in a narrower type than the save: they must equal the cast saved ones."""
    live = {name: TensorDigest.parse(text) for name, text in rounded.items()}
    stored = {alias: checkpoint.aliases.get(alias, alias) for alias in live}
    there = {c.name: c for c in contents(checkpoint) if c.key == WEIGHTS}

    def own() -> dict[str, str]:
        share = [name for name in live if stored[name] in there][ranks.rank :: ranks.size]
        tensors = [replace(there[stored[name]], name=name) for name in share]
        dtypes = {name: live[name].dtype for name in share}
        found = tensor_digests(checkpoint, tensors, jobs=None, dtypes=dtypes)
        return {name: str(one) for (_, name), one in found.items()}

    def decide(messages: list[Any]) -> list[list[Any]]:
        saved = {name: TensorDigest.parse(text) for own in messages for name, text in own.items()}
        problems = {name: difference(one, live[name]) for name, one in saved.items()}
        return [[WEIGHTS, name, problem, True] for name, problem in problems.items() if problem][:SHOWN]

    found = ranks.exchange(checkpoint.location, own, decide)
    return [Mismatch(*one) for one in found]


def _expected(checkpoint: Checkpoint, shares: Sequence[Any]) -> StateDigest:
    """Return the digests that the save recorded, or the digests of the files: each rank has computed a share."""
    if checkpoint.digests is None:
        found = [StateDigest.from_json(share) for share in shares]
        keys = dict.fromkeys(key for one in found for key in one.tensors)
        tensors = {key: {n: d for one in found for n, d in one.tensors.get(key, {}).items()} for key in keys}
        return replace(found[0], tensors=tensors)
    try:
        return StateDigest.from_json(checkpoint.digests)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = "has digests of the state that are not understood"
        raise LayoutError(
            checkpoint.location, problem, "was it saved by a later release of ckpttool? upgrade"
        ) from error


def _located(problem: Mismatch, state: LiveState, checkpoint: Checkpoint, ranks: Ranks) -> Mismatch:
    """Return a mismatch of a tensor with the first rank and the elements that differ from the files."""
    if not problem.of_values:
        return problem

    def own() -> list[int] | None:
        pieces = [p for p in state.pieces if (p.key, p.name) == (problem.key, problem.name)]
        try:
            return next(filter(None, (_different_range(checkpoint, piece) for piece in pieces)), None)
        except CkptError:  # the files do not have it
            return []

    def decide(ranges: list[Any]) -> str:
        for rank, found in enumerate(ranges):
            if found:
                first, last, count = found
                return f" (on rank {rank}, {count:,} of the elements {first:,} to {last:,})"
        if [] in ranges or checkpoint.digests is None:
            return ""
        return " (the files hold the live values, and differ from the digests that the save recorded)"

    where = ranks.exchange(checkpoint.location, own, decide)
    return problem._replace(problem=f"{problem.problem}{where}")


def _different_range(checkpoint: Checkpoint, piece: Piece) -> list[int] | None:
    """Return the first and last index in the whole tensor, and the number, of elements that differ from the files."""
    import numpy as np

    from ckpttool.integrations.torch.digest import as_array

    aliases = [alias for alias, name in checkpoint.aliases.items() if name == piece.name]
    own = {p.name: p.states for p in checkpoint.parameters}
    name = next((n for n in (piece.name, checkpoint.aliases.get(piece.name, ""), *aliases) if n in own), piece.name)
    copied = piece.key == MODULE and MODULE not in own.get(name, ())  # ZeRO-3 makes the copies from the masters
    state = find(checkpoint, name, WEIGHTS if copied else piece.key)
    kind = numpy_dtype(kind_of(piece.dtype))
    values = read_part(checkpoint, state, None).reshape(-1)
    whole = (cast(values, piece.dtype) if copied else values).astype(kind)
    places = np.arange(whole.size)
    if isinstance(piece.starts, int):
        places = places[piece.starts : piece.starts + piece.tensor.numel()]
    else:
        box = tuple(slice(start, start + n) for start, n in zip(piece.starts, piece.tensor.shape, strict=True))
        places = places.reshape(piece.shape)[box].reshape(-1)
    live = as_array(piece.tensor.cpu()).reshape(-1).astype(kind)
    different = places[live.view(f"u{kind.itemsize}") != whole[places].view(f"u{kind.itemsize}")]
    return [int(different[0]), int(different[-1]), len(different)] if len(different) else None


def _state_of(model: Any, optimizer: Any, scheduler: Any, extra: Any = None) -> LiveState:
    """Return the live state of this rank."""
    optimizer = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    if optimizer is not None and not optimizers:
        raise ArgumentError("optimizer", "is an empty list", "pass the optimizers, or leave it out")
    if not all(hasattr(one, "param_groups") for one in optimizers):
        raise ArgumentError("optimizer", f"is {brief(optimizer)}, not an optimizer", "pass the object, not its state")
    schedulers = scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]
    if scheduler is not None and not all(hasattr(one, "state_dict") for one in schedulers):
        raise ArgumentError("scheduler", f"is {brief(scheduler)}, not a scheduler", "pass the object, not its state")
    if is_engine(model):
        from ckpttool.extensions.proof import engine_state
        from ckpttool.extensions.proof.live_state import scheduler_values
        from ckpttool.integrations.deepspeed.engine import inspect_engine, whole_layers

        with whole_layers(model):
            state = engine_state.live_state(inspect_engine(model))
        own = model.lr_scheduler
        return replace(state, values={**state.values, **(scheduler_values(scheduler) if own is None else {})})
    from ckpttool.extensions.proof.torch_state import live_state
    from ckpttool.integrations.torch.live import named_tensors
    from ckpttool.integrations.torch.live_run import LiveRun, checked_extra, one_module

    others = checked_extra(extra)
    several = scheduler if isinstance(scheduler, Mapping) else {"": scheduler}
    return live_state(LiveRun(named_tensors(one_module(model)), optimizers, several, others))


def _error(path: str, problems: Sequence[Mismatch]) -> ProofError:
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    error = ProofError(path, f"is not the live state: {problems[0]}{more}", HINT)
    error.mismatches = tuple(map(str, problems))
    return error
