"""The live state of a torch run on this rank: plain, DDP, FSDP2, HSDP or tensor-parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.extensions.proof.live_state import (
    LiveState,
    SavedDigests,
    number_of,
    options_of,
    scheduler_values,
    type_of,
    values_of,
)
from ckpttool.integrations.torch.chunks import bytes_of
from ckpttool.integrations.torch.live import named_tensors, pieces_of, wrapped_class
from ckpttool.integrations.torch.load import OF_THE_RUN, rounded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.integrations.torch.chunks import CapturedChunks, Entry
    from ckpttool.integrations.torch.live import Piece
    from ckpttool.integrations.torch.live_run import LiveRun
    from ckpttool.integrations.torch.load import PreparedRun
    from ckpttool.saving.files import Payload


def live_state(run: LiveRun) -> LiveState:
    """Return the live state of a torch run.

    Raises:
        ArgumentError: A tensor is distributed as partial sums, or the optimizers have no parameter of the model.
    """
    states = {name: one.state_dict() for name, one in run.extra.items()}
    return state_of(run, pieces_of(run.named, run.optimizers), states)


def state_of(run: LiveRun, pieces: Sequence[Piece], extra: Mapping[str, Any]) -> LiveState:
    """Return the state of a torch run from its parts.

    Args:
        run: The run.
        pieces: The parts of its tensors.
        extra: The states of its other objects, by name.
    """
    others = {key: text for name, one in extra.items() for key, text in values_of(f"extra.{name}", one).items()}
    found = _optimizer_facts(run) if run.optimizers else {}
    of_groups = found.get("group_of", {})
    parameters = run.named.parameters
    return LiveState(
        pieces=pieces,
        ungrouped=[name for name, p in parameters.items() if p.requires_grad and name not in of_groups],
        values=scheduler_values(run.schedulers) | others,
        aliases=run.named.aliases,
        others=run.named.others,
        frozen=[name for name, p in parameters.items() if not p.requires_grad],
        trains=bool(run.optimizers),
        pending=_pending_gradients(run.named.module) if run.optimizers else "",
        **found,
    )


def _optimizer_facts(run: LiveRun) -> dict[str, Any]:
    """Return the facts of the optimizers beside their tensors, by their names in ``RankFacts``."""
    numbers: dict[str, dict[str, float]] = {}
    types: dict[str, dict[str, str]] = {}
    unproven: dict[str, str] = {}
    group_of = {}
    strangers = 0
    names = run.named.names
    for number, (owner, group) in enumerate(run.groups):
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            if not name:
                strangers += 1
                continue
            group_of[name] = number
            for key, value in owner.state.get(parameter, {}).items():
                if (found := number_of(key, value, parameter)) is not None:
                    numbers.setdefault(key, {})[name] = found
                    types.setdefault(key, {})[name] = type_of(value)
                elif isinstance(value, torch.Tensor) and wrapped_class(value):
                    unproven[key] = f"it is a {wrapped_class(value)}, not a tensor"
                elif (
                    isinstance(value, torch.Tensor)
                    or value is None
                    or (isinstance(value, list | tuple | dict) and not value)
                ):
                    continue
                else:
                    unproven[key] = f"it is a {type(value).__name__}, not a tensor"
    if strangers:
        unproven[f"{strangers} parameters of the optimizer"] = "the model does not have them"
    options = [options_of(group) for _, group in run.groups]
    return {"numbers": numbers, "types": types, "unproven": unproven, "groups": options, "group_of": group_of}


def _pending_gradients(module: Any) -> str:
    """Return the gradients that a module has, as text for the user; "" if there are none."""
    found = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is not None]
    if not found:
        return ""
    return f"the gradients of {len(found):,} parameters, to which the next backward pass adds"


def saved_digests(captured: CapturedChunks, save: Save, rank_state: Any, rank: int, *, waits: bool) -> SavedDigests:
    """Return the digests that a save records, of the bytes that this rank writes."""
    described, memory = captured.described, captured.memory
    entries, pieces = described.entries, described.pieces
    state = state_of(captured.live, pieces, described.extra).with_given(save.client_state, rank_state)
    digested: Collection[int] = captured.payloads.keys()
    held: dict[int | None, Payload] = {entries[n].piece: one for n, one in captured.payloads.items()}
    if save.written.files is not None:
        digested = range(len(entries)) if rank == 0 else ()
        copied = ((n, memory.copy_of(bytes_of(one.tensor))) for n, one in enumerate(pieces)) if memory else ()
        held |= {n: payload for n, payload in copied if payload is not None}
    copies = _copies(entries, captured.shared, rank, {*digested})
    used = () if waits else held.items()
    parts = {n: _copied(pieces[n], payload) for n, payload in used if n is not None}
    return SavedDigests(replace(state, pending=""), parts, copies, waits=waits)


def _copies(
    entries: Sequence[Entry], shared: Mapping[str, Any], rank: int, digested: Collection[int]
) -> dict[int, bool]:
    """Return the parts that several ranks have; True for one that another rank digests.

    A device digests at the speed of its memory, and its bytes would be copied for a checksum: there all ranks digest.
    """
    found = {}
    for n, entry in enumerate(entries):
        kinds = shared["kinds"][shared["of"][n]]
        alone = kinds[rank] < 0 or kinds.count(kinds[rank]) == 1
        if entry.piece is not None and not (alone or entry.one_writer) and entry.tensor.device.type == "cpu":
            found[entry.piece] = n not in digested
    return found


def _copied(piece: Piece, payload: Payload) -> Piece:
    """Return a part whose elements are a copy in host memory."""
    if not payload.nbytes:
        return piece
    tensor = torch.frombuffer(payload.read(0, payload.nbytes), dtype=piece.tensor.dtype)
    return replace(piece, tensor=tensor.reshape(piece.tensor.shape))


def is_on_accelerator(run: LiveRun) -> bool:
    """Return whether the weights of a torch run are on an accelerator."""
    return any(parameter.device.type != "cpu" for parameter in run.named.parameters.values())


def read_again(run: LiveRun) -> LiveState:
    """Return the live state of a torch run after a load."""
    return live_state(replace(run, named=named_tensors(run.named.module)))


def left_out(run: LiveRun, prepared: PreparedRun, report: LoadReport) -> tuple[frozenset[str], dict[str, str]]:
    """Return the kinds of state that a load did not restore, and the states that it rounded."""
    without = OF_THE_RUN | {
        key
        for (_, group), saved in zip(run.groups, prepared.options, strict=True)
        for key, value in saved.items()
        if isinstance(rate := group.get(key), torch.Tensor)
        and float(value) != float(rate) == float(torch.tensor(float(value), dtype=rate.dtype, device="cpu"))
    }
    if len(prepared.schedulers) < len(run.schedulers) or not report.scheduler or prepared.reordered:
        without |= {"scheduler"}  # its lists have the order of groups
    if prepared.extra.keys() != run.extra.keys():
        without |= {"extra"}
    return without, rounded(prepared.wanted)
