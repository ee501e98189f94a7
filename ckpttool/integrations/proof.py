"""Prove that the live state of a run equals a saved one: compare digests taken in place with a checkpoint's."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.digest import state_digest
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import CkptError, LayoutError, ProofError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.formats import open_checkpoint, opening_options, source_paths, source_storage
from ckpttool.model import MODULE
from ckpttool.model.selection import find
from ckpttool.model.state_digest import WEIGHTS, Mismatch, StateDigest, merge
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ckpttool.formats import Source
    from ckpttool.integrations.torch.live import LiveState, Piece
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks

TIMEOUT = 1800.0
"""Default of ``timeout``: seconds that a rank may lag."""
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
    """Whether the digests were taken of the live state at the save; otherwise the files were digested."""
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
        optimizer: The module's optimizer; an engine has its own.
        scheduler: The module's learning-rate scheduler; an engine has its own.
        timeout: Seconds that a rank may lag.

    Raises:
        ProofError: Ranks have different values of the same part, or their parts do not cover a tensor once.
        CkptError: The state cannot be digested; on every rank.
    """
    ranks = _ranks("digest")

    def decide(messages: list[Any]) -> dict[str, Any]:
        _raise_first("live_digest", messages)
        found, problems, _ = merge([message["live"] for message in messages])
        if problems:
            raise _error("live_digest", problems)
        return found.to_json()

    message = _message(lambda: {"live": _state_of(model, optimizer, scheduler).message()})
    return StateDigest.from_json(ranks.agree("live_digest", message, decide, timeout=timeout))


def prove(  # noqa: PLR0913  public API
    model: Any,
    src: Source,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    tag: str | None = None,
    weights_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    open_budget: float = 1.0,
    trust_names: bool = False,
    timeout: float = TIMEOUT,
) -> Proof:
    """Prove that the live state of a run equals a checkpoint; call it on every rank, before the next step.

    The live state is digested in place, on the device that has it, and no tensor is gathered. It is compared with the
    digests that the save recorded in the manifest; without those, with digests of the files.

    Args:
        model: As for ``live_digest``.
        src: As for ``inspect``.
        optimizer: As for ``live_digest``; without it, only weights and buffers of a torch module are compared.
        scheduler: As for ``live_digest``.
        tag: As for ``inspect``.
        weights_only: Whether to compare only weights and buffers.
        storage_options: As for ``inspect``.
        follow_links: As for ``inspect``.
        open_budget: As for ``inspect``.
        trust_names: As for ``inspect``.
        timeout: Seconds that a rank may lag.

    Returns:
        The proof; printed, it is one line.

    Raises:
        ProofError: A part of the state differs; names the first one, and its rank and elements. On every rank.
        CkptError: The checkpoint is damaged, or the state cannot be digested; on every rank.
    """
    from ckpttool.integrations.torch.collectives import open_together

    options = opening_options(storage_options, follow_links, open_budget)
    ranks = _ranks("prove")
    paths = source_paths(src)
    checkpoint = open_together(
        paths[0],
        source_storage(paths, options),
        lambda: open_checkpoint(paths, tag=tag, options=options, trust_names=trust_names),
        ranks,
        timeout=timeout,
    )
    subject = partial(_state_of, model, optimizer, scheduler)
    return prove_state(subject, checkpoint, ranks, weights_only=weights_only, timeout=timeout)


def prove_state(
    subject: Callable[[], LiveState],
    checkpoint: Checkpoint,
    ranks: Ranks,
    *,
    weights_only: bool = False,
    without: Collection[str] = (),
    without_names: Collection[str] = (),
    timeout: float,
) -> Proof:
    """Compare the live state of all ranks with a checkpoint; arguments and errors as for ``prove``.

    Args:
        subject: Returns the ``LiveState`` of this rank.
        checkpoint: The checkpoint, the same on all ranks.
        ranks: The ranks that take part.
        weights_only: As for ``prove``.
        without: States and groups of values that are not compared: "scheduler", "loss_scale", "groups", "module".
        without_names: Parameters and buffers that are not compared.
        timeout: Seconds that a rank may lag.
    """
    began = time.perf_counter()
    states: list[LiveState] = []

    def own() -> dict[str, Any]:
        states.append(subject())
        found: dict[str, Any] = {"live": states[0].message()}
        if checkpoint.digests is None:
            found["saved"] = state_digest(checkpoint, (ranks.rank, ranks.size)).to_json()
        return found

    def decide(messages: list[Any]) -> dict[str, Any]:
        _raise_first(checkpoint.location, messages)
        live, problems, unproven = merge([message["live"] for message in messages])
        saved = _expected(checkpoint, [message.get("saved") for message in messages])
        live = _with_aliases(live, {k: v for message in messages for k, v in message["live"]["aliases"].items()})
        others = {name for message in messages for name in message["live"]["others"]}
        names = {*without_names, *others}
        comparable, left_out = _comparable(saved, live, checkpoint, weights_only, {*without, *unproven}, names)
        if held := sorted(others & saved.tensors.get(WEIGHTS, {}).keys()):
            left_out.append(f"{', '.join(held)}: neither a parameter nor a buffer")
        problems += comparable.mismatches(live)
        left_out += _uncovered(comparable, [message["live"]["pieces"] for message in messages], checkpoint)
        return {
            "problems": [list(problem) for problem in problems[:SHOWN]],
            "tensors": comparable.count,
            "states": _compared(comparable),
            "unproven": [*(f"{key}: {why}" for key, why in unproven.items()), *left_out],
        }

    verdict = ranks.agree(checkpoint.location, _message(own), decide, timeout=timeout)
    problems = [Mismatch(*problem) for problem in verdict["problems"]]
    if problems:
        problems[0] = _located(problems[0], states[0], checkpoint, ranks, timeout)
        raise _error(checkpoint.location, problems)
    return Proof(
        path=checkpoint.location,
        step=checkpoint.step,
        ranks=ranks.size,
        tensors=verdict["tensors"],
        states=tuple(verdict["states"]),
        recorded=checkpoint.digests is not None,
        unproven=tuple(verdict["unproven"]),
        seconds=time.perf_counter() - began,
    )


def _expected(checkpoint: Checkpoint, shares: Sequence[Any]) -> StateDigest:
    """Return the digests that the save recorded, or the digests of the files: each rank has computed a share.

    Raises:
        LayoutError: The manifest has digests of an unknown form.
    """
    if checkpoint.digests is None:
        found = [StateDigest.from_json(share) for share in shares]
        tensors: dict[str, dict[str, Any]] = {}
        for one in found:
            for key, own in one.tensors.items():
                tensors.setdefault(key, {}).update(own)
        return replace(found[0], tensors=tensors)
    try:
        return StateDigest.from_json(checkpoint.digests)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = "has digests of the state that are not understood"
        raise LayoutError(
            checkpoint.location, problem, "was it saved by a later release of ckpttool? upgrade"
        ) from error


def _with_aliases(live: StateDigest, aliases: Mapping[str, str]) -> StateDigest:
    """Return a live state with its tied parameters under all of their names: formats store them under any."""

    def all_names(own: Mapping[str, Any]) -> dict[str, Any]:
        return {**own, **{alias: own[name] for alias, name in aliases.items() if name in own}}

    return replace(
        live,
        tensors={key: all_names(own) for key, own in live.tensors.items()},
        numbers={key: all_names(own) for key, own in live.numbers.items()},
        group_of=all_names(live.group_of),
    )


def _comparable(
    saved: StateDigest,
    live: StateDigest,
    checkpoint: Checkpoint,
    weights_only: bool,
    without: set[str],
    without_names: set[str],
) -> tuple[StateDigest, list[str]]:
    """Return the part of a saved state that a live one can have, and the parts that it cannot, as text."""
    notes = []
    weights_only = weights_only or not live.group_of
    trained = {name for key, own in saved.tensors.items() if key not in {WEIGHTS, MODULE} for name in own}
    if not weights_only and not trained and {*live.numbers, *live.tensors} - {WEIGHTS, MODULE}:
        notes.append(checkpoint.left_out or "the optimizer's states, which the checkpoint does not hold")
    if not weights_only and (frozen := {*saved.group_of} - {*live.group_of}):
        without_names |= frozen
        notes.append(f"{len(frozen)} parameters that were trained and are frozen now")
    keys = {WEIGHTS, MODULE} if weights_only else {*saved.tensors}
    keys -= without if MODULE in live.tensors else {*without, MODULE}
    tensors = {
        key: {name: one for name, one in own.items() if name not in without_names}
        for key, own in saved.tensors.items()
        if key in keys
    }
    # Files without the names of masters do not identify frozen parameters, whose weights have no other copy.
    copies, own = tensors.get(MODULE, {}), live.tensors.get(MODULE, {})
    for name in [name for name in copies if name not in own and name in live.tensors.get(WEIGHTS, {})]:
        tensors.setdefault(WEIGHTS, {}).setdefault(name, copies.pop(name))
    if weights_only:
        return StateDigest(tensors=tensors), notes
    kinds = {name.partition(".")[0] for name in live.values} - without
    return StateDigest(
        tensors=tensors,
        numbers={
            key: {name: number for name, number in own.items() if name not in without_names}
            for key, own in saved.numbers.items()
            if key not in without
        },
        groups=saved.groups,
        group_of={} if "groups" in without else saved.group_of,
        values={name: text for name, text in saved.values.items() if name.partition(".")[0] in kinds},
    ), notes


def _uncovered(saved: StateDigest, pieces: Sequence[Sequence[Any]], checkpoint: Checkpoint) -> list[str]:
    """Return, as text, which live weights have no counterpart among the compared tensors."""
    held = {name for key in (WEIGHTS, MODULE) for name in saved.tensors.get(key, ())}
    held |= {checkpoint.aliases.get(name, name) for name in held}
    held |= {alias for alias, name in checkpoint.aliases.items() if name in held}
    names = dict.fromkeys(piece[1] for own in pieces for piece in own if piece[0] in {WEIGHTS, MODULE})
    lacking = [name for name in names if name not in held]
    return [f"{len(lacking):,} tensors of the model, such as {lacking[0]}"] if lacking else []


def _compared(saved: StateDigest) -> list[str]:
    names = [*saved.tensors, *saved.numbers, *(["hyper-parameters"] if saved.group_of else [])]
    return [*names, *dict.fromkeys(name.partition(".")[0] for name in saved.values)]


def _located(problem: Mismatch, state: LiveState, checkpoint: Checkpoint, ranks: Ranks, timeout: float) -> Mismatch:
    """Return a mismatch of a tensor with the first rank and the elements that differ from the files."""
    if not problem.problem.startswith("has other values"):
        return problem

    def own() -> dict[str, Any]:
        pieces = [p for p in state.pieces if (p.key, p.name) == (problem.key, problem.name)]
        return {"range": next(filter(None, (_different_range(checkpoint, piece) for piece in pieces)), None)}

    def decide(messages: list[Any]) -> str:
        for rank, message in enumerate(messages):
            if message.get("range") is not None:
                first, last, count = message["range"]
                return f"on rank {rank}, {count:,} of the elements {first:,} to {last:,}"
        return "the files hold the live values, and differ from the digests that the save recorded"

    where = ranks.agree(checkpoint.location, _message(own), decide, timeout=timeout)
    return problem._replace(problem=f"{problem.problem} ({where})")


def _different_range(checkpoint: Checkpoint, piece: Piece) -> tuple[int, int, int] | None:
    """Return the first and last index in the whole tensor, and the number, of elements that differ from the files."""
    import numpy as np

    from ckpttool.integrations.torch.live import as_array

    aliases = [alias for alias, name in checkpoint.aliases.items() if name == piece.name]
    own = {p.name: p.states for p in checkpoint.parameters}
    name = next((n for n in (piece.name, checkpoint.aliases.get(piece.name, ""), *aliases) if n in own), piece.name)
    state = find(checkpoint, name, piece.key)
    files = source_files(checkpoint)
    kind = numpy_dtype("F32" if piece.dtype in {"F16", "BF16"} else piece.dtype)
    with Sources(files, checks_for(files, checkpoint, "off")) as sources:
        parts = [values.astype(kind) for _, values in StateReader(sources).chunks(state)]
    whole = np.concatenate(parts) if parts else np.empty(0, kind)
    places = np.arange(whole.size)
    if isinstance(piece.starts, int):
        places = places[piece.starts : piece.starts + piece.tensor.numel()]
    else:
        box = tuple(slice(start, start + n) for start, n in zip(piece.starts, piece.tensor.shape, strict=True))
        places = places.reshape(piece.shape)[box].reshape(-1)
    live = as_array(piece.tensor.cpu()).reshape(-1).astype(kind)
    different = places[live.view(f"u{kind.itemsize}") != whole[places].view(f"u{kind.itemsize}")]
    return (int(different[0]), int(different[-1]), len(different)) if len(different) else None


def _state_of(model: Any, optimizer: Any, scheduler: Any) -> LiveState:
    if hasattr(model, "zero_optimization_stage"):
        from ckpttool.integrations.deepspeed.engine import inspect_engine
        from ckpttool.integrations.deepspeed.live_state import engine_state

        return engine_state(inspect_engine(model))
    from ckpttool.integrations.torch.live import live_state

    return live_state(model, optimizer, scheduler)


def _ranks(purpose: str) -> Ranks:
    from ckpttool.integrations.torch.collectives import ranks_of_process_group

    return ranks_of_process_group(purpose)


def _message(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the message of this rank, or its error: the other ranks wait for either."""
    from ckpttool.saving.coordination import error_to_data

    try:
        return make()
    except CkptError as error:
        return {"error": error_to_data(error)}
    except Exception as error:
        failed = LayoutError("the live state", f"cannot be digested: {type(error).__name__}: {error}", "see the log")
        return {"error": error_to_data(failed)}


def _raise_first(path: str, messages: Sequence[Mapping[str, Any]]) -> None:
    from ckpttool.saving.coordination import error_from_data

    for rank, message in enumerate(messages):
        if "error" in message:
            failed = error_from_data(message["error"])
            raise type(failed)(failed.path, f"rank {rank}: {failed.problem}", failed.hint, failed.options)


def _error(path: str, problems: Sequence[Mismatch]) -> ProofError:
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    error = ProofError(path, f"is not the live state: {problems[0]}{more}", HINT)
    error.mismatches = tuple(map(str, problems))
    return error
