"""Load a checkpoint of any format into a live torch run: plain, DDP, FSDP2, HSDP, tensor parallelism, or several.

Each rank reads only the parts that it has. As a load into an engine, it has two halves: all ranks read, and agree that
all reads succeeded; then each fills its tensors in place. With ``staged=False`` the first half reads no tensor.
No step of the optimizer is taken and no hook is called.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ckpttool.containers.values import Opaque, TensorRef, walk
from ckpttool.dtypes import BY_TORCH_NAME, castable, itemsize
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.copies import failed_checks
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import VirtualFile
from ckpttool.formats import in_order
from ckpttool.formats.torch_run import OF_EACH_RANK
from ckpttool.integrations.live.rank_states import RankStates
from ckpttool.integrations.live.report import LoadReport
from ckpttool.integrations.live.run import after_load, changing_run, thin_error
from ckpttool.integrations.torch.collectives import broadcast_parts, check_on_all_ranks, unexpected_is_damage
from ckpttool.integrations.torch.fill import Part, fill
from ckpttool.integrations.torch.live import drop_gradients, has_gradients, piece_of, type_name
from ckpttool.integrations.torch.memory import empty, populated
from ckpttool.integrations.torch.optimizers import Forms
from ckpttool.integrations.torch.run_state import load_options, read_run_state
from ckpttool.integrations.torch.schedulers import Unfit, check_loads, file_beside, has_state, state_for
from ckpttool.model import UNKNOWN_GROUP, ScalarState, TensorFloat, TensorInteger, Topology
from ckpttool.model.items import STEP, WEIGHTS
from ckpttool.model.names import with_names_of
from ckpttool.plan.builder import Placement, pack, sample_checks, source_files
from ckpttool.registry import hooks
from ckpttool.saving.coordination import attempt
from ckpttool.targets.zero.match import fit, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.integrations.torch.live import Piece
    from ckpttool.integrations.torch.live_run import LiveRun
    from ckpttool.integrations.torch.optimizers import Form
    from ckpttool.model import Checkpoint, Parameter, ParamGroup, State
    from ckpttool.saving.coordination import Ranks
    from ckpttool.targets.zero.match import Fitted

OF_THE_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options of a group that say how a run computes; it keeps its own."""
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Options that schedulers add to a group."""
SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
"""Keys of the state of a GradScaler of torch that is enabled."""
CHOSEN = frozenset({"weight_decay", "eps", "betas", "momentum", "dampening", "alpha", "rho"})
"""Options that a user chooses, beside those that are on or off, and that no optimizer changes."""
DIRECT_BYTES = 1 << 20
"""Bytes of a part on the CPU from which a state is read into a new tensor, with no copy."""
SHARE_BYTES = 1 << 22
"""The bytes that a rank reads for all are a multiple of this: the size of requests with the default ``memory``."""
REBUILD = "build the optimizer of the saved run, or pass weights_only=True"


class _Wanted(NamedTuple):
    """A tensor of this rank that is to be filled."""

    key: str
    """"weights", or the state of the optimizer."""
    name: str
    """Parameter or buffer of the model."""
    state: State
    """Its values in the checkpoint."""
    piece: Piece
    """The part that this rank has: of the tensor, or of its parameter."""
    dtype: str
    """The type to fill it in, safetensors' spelling."""
    parameter: torch.Tensor
    """The parameter or buffer."""
    live: torch.Tensor | None
    """The tensor of the run; None for a state that its optimizer does not have yet."""

    def made(self) -> torch.Tensor | None:
        """Return a new tensor for the state, to be read into directly; None if its values are to be copied."""
        nbytes = self.piece.tensor.numel() * itemsize(self.dtype)
        if self.key == WEIGHTS or self.piece.first is None or nbytes < DIRECT_BYTES:
            return None
        if self.piece.shape != tuple(self.parameter.shape):
            return None
        made = torch.empty_like(self.parameter.detach(), dtype=_torch_type(self.dtype))
        local = _local(made)
        if local.device.type != "cpu" or not local.is_contiguous():
            return None
        populated(local.view(-1).view(torch.uint8))
        return made

    def own(self) -> torch.Tensor:
        """Return the tensor to fill: the run's, or a new one for a state that its optimizer does not have yet."""
        if self.live is not None:
            return self.live
        return torch.zeros_like(self.parameter, dtype=_torch_type(self.dtype), requires_grad=False)

    def part(self, start: int, own: torch.Tensor) -> Part:
        """Return how to fill ``own``, whose values begin at byte ``start`` of the file."""
        row = self.piece.shape[1:] if self.piece.first is None else None
        return Part(start, _torch_type(self.dtype), _local(own), row, self.columns)

    @property
    def placement(self) -> Placement:
        """The range to read: of a part whose elements are not one run, all columns of its rows."""
        part, shape = self.piece.tensor, self.piece.shape
        if self.piece.first is not None:
            return Placement(self.state, self.dtype, 0, self.piece.first, part.numel())
        starts = cast("tuple[int, ...]", self.piece.starts)
        row = math.prod(shape[1:])
        return Placement(self.state, self.dtype, 0, starts[0] * row, part.shape[0] * row if part.numel() else 0)

    @property
    def columns(self) -> tuple[slice, ...]:
        """The columns of its rows; empty for a part whose elements are one run."""
        if self.piece.first is not None:
            return ()
        starts = cast("tuple[int, ...]", self.piece.starts)
        return tuple(slice(start, start + n) for start, n in zip(starts[1:], self.piece.tensor.shape[1:], strict=True))

    def values(self, found: torch.Tensor) -> torch.Tensor:
        """Return the values of the part: its rows, cut to its columns."""
        part = self.piece.tensor
        if self.piece.first is not None or not part.numel():
            return found.view(part.shape)
        columns = (slice(None), *self.columns)
        return found.view(part.shape[0], *self.piece.shape[1:])[columns]


class _Number(NamedTuple):
    """A state of a parameter that is one number."""

    name: str
    key: str
    value: float | int | bool
    form: Form


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedRun:
    """The state of this rank but for the values of its tensors; nothing is loaded yet."""

    checkpoint: Checkpoint
    fitted: Fitted
    wanted: Sequence[_Wanted]
    """The tensors to fill."""
    numbers: Sequence[_Number]
    client_state: Mapping[str, Any]
    states: tuple[str, ...]
    """Names of the optimizer's states."""
    schedulers: Mapping[str, Any]
    """The state to load into each scheduler by its name; without those that keep their own."""
    reordered: bool
    """Whether the groups of a scheduler's optimizer are not the groups of the checkpoint, in their order."""
    extra: Mapping[str, Any]
    """The state to load into other objects by their names; without those that keep their own."""
    options: Sequence[Mapping[str, Any]]
    """Options to set in each group."""
    rank_state: Any
    """This rank's state, if as many data-parallel ranks saved it; else None."""
    rank_states: Sequence[Any]
    """The states of all ranks that saved."""
    notes: tuple[str, ...]

    def whole(self) -> str | None:
        """Return a hash that is equal on ranks that need the same bytes; None if this rank needs a part of a tensor."""
        if any(one.piece.tensor.numel() != math.prod(one.piece.shape) for one in self.wanted):
            return None
        listed = [(one.key, one.name, one.dtype, list(one.piece.shape)) for one in self.wanted]
        return hashlib.sha256(repr(listed).encode()).hexdigest()


class _Read(NamedTuple):
    """The values that this rank has read."""

    memory: torch.Tensor
    """The bytes of the tensors to be filled by copies."""
    tensors: Sequence[tuple[_Wanted, torch.Tensor]]
    """Each of them and its values, in ``memory``; none after a dry run."""
    made: Sequence[tuple[_Wanted, torch.Tensor]]
    """Each other state, and the tensor that has its values: a new one, or with ``staged=False`` the run's."""
    nbytes: int
    """Bytes that this rank has read, or would read."""
    checks: ReadChecks | None
    """The checksums of the bytes read."""
    ends: Sequence[int]
    """For each rank, where the bytes end that it has read; empty if every rank has read all that it needs."""


def load_run(run: LiveRun, checkpoint: Checkpoint, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Load an open checkpoint into a torch run; call it on every rank with the same checkpoint.

    Raises:
        CkptError: The checkpoint does not fit the run or cannot be read; on every rank, before the run changed.
    """
    began = time.perf_counter()
    made = attempt(partial(_prepare, run, checkpoint, options, ranks))

    def needs() -> dict[str, Any]:
        return {"schedulers": [*made.result().schedulers], "whole": made.result().whole()}

    def decide(told: list[dict[str, Any]]) -> bool:
        """Return whether ranks divide the bytes to read: from remote storage, if all need the same."""
        restored = [one["schedulers"] for one in told]
        if odd := next((rank for rank, one in enumerate(restored) if one != restored[0]), 0):
            problem = (
                f"has a scheduler that fits the run on rank {odd if restored[odd] else 0} alone of ranks 0 and {odd}"
            )
            raise PlanError(checkpoint.location, problem, "build the same scheduler on all ranks")
        needed = {one["whole"] for one in told}
        divides = len(told) > 1 and len(needed) == 1 and None not in needed and checkpoint.storage.remote
        return divides and options.staged

    divided = ranks.exchange(checkpoint.location, needs, decide)
    prepared = made.result()
    with changing_run(checkpoint.location, options):
        nbytes = _load(run, prepared, options, ranks, divided=divided)
    report = _report(run, prepared, options, ranks, nbytes, time.perf_counter() - began)
    return after_load(report, run, prepared, options, ranks)


def _load(run: LiveRun, prepared: PreparedRun, options: LoadOptions, ranks: Ranks, *, divided: bool) -> int:
    """Read the values of all ranks, and load them; return the bytes that this rank has read."""
    location = prepared.checkpoint.location
    read = ranks.together(location, partial(_read, prepared, options, ranks, divided=divided))
    if read.checks is not None:
        check_on_all_ranks(read.checks, prepared.checkpoint, ranks)
    if read.ends:
        broadcast_parts(read.memory, read.ends)
    if run.extra and not options.dry_run:  # first: the rest of the run is unchanged if one fails
        ranks.together(location, partial(_load_extra, run, prepared))
    if not options.dry_run:
        with torch.no_grad():
            _commit(run, prepared, read)
    return read.nbytes


# ------------------------------------------------------------------------------------------------------- first half


def _prepare(run: LiveRun, checkpoint: Checkpoint, options: LoadOptions, ranks: Ranks) -> PreparedRun:
    """Match the checkpoint with the run, and read its objects.

    Raises:
        CkptError: The checkpoint does not fit, or reading failed.
    """
    if checkpoint.thin and not options.without_optimizer:
        raise thin_error(checkpoint)
    with unexpected_is_damage(checkpoint.location):
        for hook in hooks("before_load"):
            hook(run, options)
        options = load_options(checkpoint, options)
        model = run.model()
        if run.optimizers:
            checkpoint = in_order(checkpoint, run.order, [len(group["params"]) for _, group in run.groups])
        checkpoint = with_names_of(checkpoint, [*model.shapes, *model.buffers, *model.aliases])
        # Numbers of single parameters are matched here: a torch run keeps them by parameter.
        bare = replace(checkpoint, parameters=tuple(replace(p, numbers={}) for p in checkpoint.parameters))
        fitted = fit(bare, model, strict=options.strict, weights_only=options.without_optimizer)
        _check_trained(run, checkpoint, fitted)
        saved_parameters = {p.name: p for p in checkpoint.parameters}
        wanted = [*_weights(run, fitted)]
        numbers: list[_Number] = []
        known: list[set[str]] = []
        for (owner, group), saved in zip(run.groups, fitted.checkpoint.groups, strict=True):
            forms = Forms(owner, group)
            known.append(forms.options)
            for name in (*saved.parameters, *run.frozen(group)):
                source = saved_parameters.get(fitted.stored[name])
                states, own_numbers = _states_of(run, checkpoint, source, owner, forms, name)
                wanted += states
                numbers += own_numbers
        objects = [
            {key: value for key, value in group.hyperparameters.items() if isinstance(value, Opaque)}
            for group in fitted.checkpoint.groups
        ]
        given = {name: checkpoint.data_states[name] for name in run.extra if name in checkpoint.data_states}
        of_all = {name: state for name, state in given.items() if state != OF_EACH_RANK}
        run_state = read_run_state(checkpoint, options, {"options": objects, "extra": of_all})
        schedulers, reordered, kept = _scheduler_states(run, checkpoint, fitted, run_state["scheduler"], options)
        notes = [*fitted.notes, *map(str, checkpoint.notes), *checkpoint.remarks, *_notes(run, checkpoint, wanted)]
        notes += kept
        of_ranks = RankStates(checkpoint, options)
        same = len(of_ranks) == ranks.size and of_ranks.saved_by(ranks.rank) == (ranks.size, 1, 1)
        of_rank = of_ranks.other_states(ranks.rank) if same and len(of_all) < len(given) else {}
        extra, of_extra = _extra_states(run, checkpoint, run_state["extra"], of_rank)
        notes += of_extra if not options.weights_only else []
        new = [*map(_options, fitted.checkpoint.groups, run_state["options"], known)]
        for (_, group), own_options in zip(run.groups, new, strict=True):
            _check_options(checkpoint, group, own_options)
        notes += _replaced(run, new)
        return PreparedRun(
            checkpoint=checkpoint,
            fitted=fitted,
            wanted=wanted,
            numbers=numbers,
            states=tuple(sorted({one.key for one in wanted} - {WEIGHTS} | {one.key for one in numbers})),
            client_state=run_state["client_state"],
            schedulers=schedulers,
            reordered=reordered,
            extra=extra,
            options=new,
            rank_state=of_ranks[ranks.rank] if same and not options.weights_only else None,
            rank_states=() if options.weights_only else of_ranks,
            notes=tuple(notes),
        )


def _check_trained(run: LiveRun, checkpoint: Checkpoint, fitted: Fitted) -> None:
    """Check that every trained parameter of the model whose states the checkpoint has is in an optimizer.

    Raises:
        ArgumentError: One is in none.
    """
    own = set(run.order)
    states = {p.name for p in checkpoint.parameters if p.optimizer_states and not p.frozen}
    left_out = [
        name
        for name, parameter in run.named.parameters.items()
        if run.optimizers and parameter.requires_grad and name not in own and fitted.stored[name] in states
    ]
    if left_out:
        problem = f"lists no {listed(left_out)} of the model, whose states the checkpoint has"
        raise ArgumentError("optimizer", problem, "pass all optimizers as a list")


def _places(run: LiveRun, scheduler: Any, checkpoint: Checkpoint, fitted: Fitted) -> list[int | None]:
    """Return the saved group of each group of a scheduler's optimizer; None if its parameters were in several."""
    owner = getattr(scheduler, "optimizer", None)
    group_of = {p.name: p.group for p in checkpoint.parameters}
    groups = [group for _, group in run.groups] if owner is None else owner.param_groups
    places: list[int | None] = []
    for index, group in enumerate(groups):
        names = run.trained(group)
        found = {group_of.get(fitted.stored[name]) for name in names} - {None}
        alone = index if not found and len(groups) == len(checkpoint.groups) else None
        places.append(found.pop() if len(found) == 1 else alone)
    return places


def _scheduler_states(
    run: LiveRun, checkpoint: Checkpoint, fitted: Fitted, saved: Any, options: LoadOptions
) -> tuple[dict[str, Any], bool, list[str]]:
    """Return the states to load into the schedulers.

    Args:
        run: The run.
        checkpoint: The checkpoint.
        fitted: The checkpoint matched with the run.
        saved: The saved state, of several schedulers by name.
        options: The options of the load.

    Returns:
        The states by name; whether groups have another order than in the checkpoint; and notes on the others.

    Raises:
        ArgumentError: A scheduler does not take its state.
    """
    found: dict[str, Any] = {}
    notes, reordered = [], False
    for name, scheduler in run.schedulers.items() if options.scheduler else ():
        own = saved if not name else saved.get(name) if isinstance(saved, Mapping) else None
        places = _places(run, scheduler, checkpoint, fitted)
        owner = getattr(scheduler, "optimizer", None)
        reordered |= places != [n for n, (one, _) in enumerate(run.groups) if owner is None or one is owner]
        try:
            found[name] = state_for(scheduler, checkpoint, own, places, len(checkpoint.groups))
        except Unfit as unfit:
            file = "" if has_state(checkpoint) else file_beside(checkpoint)
            hint = f"; {file} is not read: load it with scheduler.load_state_dict(torch.load(...))" if file else ""
            which = f"the scheduler {name}" if name else "the scheduler"
            notes.append(f"{which} keeps its state, and computes the next rate from it: {unfit}{hint}")
            continue
        if not options.dry_run:
            check_loads(scheduler, found[name])
    return found, reordered, notes


def _extra_states(
    run: LiveRun, checkpoint: Checkpoint, of_all: Mapping[str, Any], of_rank: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the states to load into the other objects of the run, and notes on those that keep their own.

    Args:
        run: The run.
        checkpoint: The checkpoint.
        of_all: The saved states that all ranks had.
        of_rank: Those that this rank had; empty on other ranks than saved them.
    """
    found = {**of_all, **{name: own for name, own in of_rank.items() if name in run.extra}}
    notes = []
    for name, one in run.extra.items():
        if name in found:
            continue
        if scaler := _of_loss_scale(one.state_dict(), checkpoint):
            found[name] = scaler
            notes.append(f"{name} has the loss scale of DeepSpeed, and its own settings")
        elif name in checkpoint.data_states:
            notes.append(f"{name} keeps its state: each rank saved its own, and other ranks load now")
        else:
            notes.append(f"{name} keeps its state: the checkpoint has none")
    if left := sorted(checkpoint.data_states.keys() - run.extra.keys()) if checkpoint.stage is None else []:
        notes.append(f"not restored: {', '.join(left)}; pass extra=... with the objects by these names")
    return found, notes


def _is_scaler(state: Any) -> bool:
    """Return whether a state is of torch's GradScaler."""
    return isinstance(state, Mapping) and state.keys() == SCALER


def _of_loss_scale(own: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state of torch's GradScaler with the loss scale of DeepSpeed; empty for other objects.

    Source: torch 2.13, amp/grad_scaler.py (``state_dict``); DeepSpeed 0.19, runtime/fp16/loss_scaler.py
    (``DynamicLossScaler.update_scale``).
    """
    state = getattr(checkpoint.loss_scaler, "state", None)
    if not _is_scaler(own) or not isinstance(state, Mapping) or not isinstance(state.get("cur_scale"), int | float):
        return {}
    now, last = (state.get(key) for key in ("cur_iter", "last_overflow_iter"))
    since = now - last - 1 if isinstance(now, int) and isinstance(last, int) else 0
    tracker = max(since, 0) % max(int(own["growth_interval"]), 1)
    return {**own, "scale": float(state["cur_scale"]), "_growth_tracker": tracker}


def _load_extra(run: LiveRun, prepared: PreparedRun) -> None:
    """Load the states of the other objects.

    Raises:
        PlanError: One does not take its state.
    """
    for name, state in prepared.extra.items():
        try:
            run.extra[name].load_state_dict(copy.deepcopy(state))
        except Exception as error:
            problem = f"has a state of {name} that cannot be loaded: {type(error).__name__}: {error}"
            raise PlanError(prepared.checkpoint.location, problem, "build the object of the saved run") from error


def _options(saved: ParamGroup, objects: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the options to set in a group: the saved ones that its optimizer has, or that schedulers add.

    Args:
        saved: The group of the checkpoint.
        objects: Options that are objects of other libraries, such as numbers of numpy, built.
        known: Options of the optimizer.
    """
    found = {**saved.hyperparameters, **objects}
    if STEP in known and STEP not in found and STEP in saved.scalars:  # some optimizers count in their groups
        found[STEP] = saved.scalars[STEP].value
    return {key: value for key, value in found.items() if key in (known | OF_SCHEDULERS) - OF_THE_RUN}


def _replaced(run: LiveRun, new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note on the options of the run that the checkpoint's replace; rates differ in every resume."""
    scheduled = {"betas", "momentum"} if run.schedulers else set()
    found: dict[str, None] = {}
    for (_, group), saved in zip(run.groups, new, strict=True):
        for key in sorted(saved.keys() & group.keys() - scheduled):
            own, value = _numbers(group[key]), _numbers(saved[key])
            if (key in CHOSEN or isinstance(group[key], bool)) and own and value and own != value:
                found[f"{key} {saved[key]} for {group[key]}"] = None
    return [f"options of the checkpoint replace the run's: {', '.join(found)}"] if found else []


def _numbers(option: Any) -> list[float]:
    """Return the numbers of an option; empty for anything else."""
    several = [*option] if isinstance(option, list | tuple) else [option]
    return several if all(isinstance(one, int | float) for one in several) else []


def _check_options(checkpoint: Checkpoint, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that the saved options can be set, before the run changes.

    Raises:
        PlanError: One has another form than in the run, or a tensor that is not read.
    """
    for key, value in saved.items():
        own = group.get(key)
        several = isinstance(own, list | tuple) and any(isinstance(one, torch.Tensor) for one in own)
        live = [*own] if own is not None and several else [own]
        found = [*value] if several and isinstance(value, list | tuple) else [value]
        fits = len(live) == len(found) and all(
            isinstance(new, int | float) for old, new in zip(live, found, strict=True) if isinstance(old, torch.Tensor)
        )
        if not fits or any(isinstance(one, TensorRef) for one in walk([value])):
            problem = f"has the option {key} of a group in another form than the run, or with a tensor of many elements"
            raise PlanError(checkpoint.location, problem, REBUILD)


def _weights(run: LiveRun, fitted: Fitted) -> Iterator[_Wanted]:
    """Yield the parameters and buffers that the checkpoint has.

    Raises:
        PlanError: One has a type that cannot be converted.
    """
    states = {p.name: fitted.checkpoint.weights(p) for p in fitted.checkpoint.parameters if p.states}
    for name, tensor in (*run.named.parameters.items(), *run.named.buffers.items()):
        state = states.get(name) or fitted.buffers.get(name)
        if state is not None:
            piece = piece_of(WEIGHTS, name, tensor)
            yield _castable(fitted.checkpoint, _Wanted(WEIGHTS, name, state, piece, piece.dtype, tensor, tensor))


def _castable(checkpoint: Checkpoint, one: _Wanted) -> _Wanted:
    if not castable(one.state.dtype, one.dtype):
        types = f"{one.state.dtype}, which cannot be converted to the {one.dtype} of the run"
        problem = f"has {one.key} of {one.name} in {types}"
        raise PlanError(checkpoint.location, problem, "load it into a run of that type, and then change the run's type")
    return one


def _states_of(
    run: LiveRun, checkpoint: Checkpoint, source: Parameter | None, owner: Any, forms: Forms, name: str
) -> tuple[list[_Wanted], list[_Number]]:
    """Return the optimizer's states of one parameter; none if the checkpoint has none of it.

    Raises:
        PlanError: The optimizer keeps other states than the checkpoint has.
    """
    if source is None:
        return [], []
    parameter = run.named.parameters[name]
    states, numbers = source.optimizer_states, _numbers_of(checkpoint, source)
    kept = forms.of(parameter)
    if kept is None:
        problem = f"is {type(owner).__name__}, whose states are unknown before its first step"
        raise PlanError("optimizer", problem, "load it with torch, or pass weights_only=True")
    if not states and not any(key in numbers for key in kept if key != STEP):
        moments = any(form.first and not form.number for form in kept.values())
        if moments or STEP not in numbers:  # never updated
            return [], []
    surplus = (states.keys() | numbers.keys()) - kept.keys() - {STEP}
    lacking = {key for key, form in kept.items() if form.first} - states.keys() - numbers.keys()
    if surplus or lacking:
        there = ", ".join(sorted(states.keys() | numbers.keys())) or "no states"
        here = ", ".join(sorted(key for key, form in kept.items() if form.first)) or "no states"
        problem = f"holds {there} of {name}, but the run's {type(owner).__name__} keeps {here}"
        raise PlanError(checkpoint.location, problem, REBUILD)
    piece = piece_of(WEIGHTS, name, parameter)
    found, counted = [], []
    for key, form in kept.items():
        single = form.number or math.prod(form.shape_for(piece.shape)) == 1
        if single and key in numbers and (form.number or key not in states):
            shape = form.shape if form.number else form.shape_for(piece.shape)
            counted.append(_Number(name, key, numbers[key].value, form._replace(shape=shape)))
        elif not form.number and key in states:
            _check_spread(owner, parameter, key, name)
            shape = form.shape_for(piece.shape)
            if states[key].shape not in {shape, *([(), (1,)] if math.prod(shape) == 1 else [])}:
                problem = f"has {key} of {name} of shape {list(states[key].shape)}, not {list(shape)}"
                raise PlanError(checkpoint.location, problem, REBUILD)
            live, dtype = owner.state.get(parameter, {}).get(key), type_name(form.dtype)
            own = piece
            if shape != piece.shape:
                if live is None and hasattr(parameter, "placements"):
                    problem = f"is {type(owner).__name__}, whose {key} has another shape than {name}, which is sharded"
                    raise PlanError("optimizer", problem, "load it after its first step, or pass weights_only=True")
                live = parameter.new_zeros(shape, dtype=form.dtype, requires_grad=False) if live is None else live
                own = piece_of(key, name, live)
            found.append(_castable(checkpoint, _Wanted(key, name, states[key], own, dtype, parameter, live)))
        elif key in states or key in numbers:
            kind = "a number" if form.number else "a tensor"
            problem = f"has {key} of {name} in another form than the run's {type(owner).__name__}, where it is {kind}"
            raise PlanError(checkpoint.location, problem, REBUILD)
    return found, counted


def _numbers_of(checkpoint: Checkpoint, source: Parameter) -> Mapping[str, ScalarState]:
    """Return the numbers of a parameter; the step of some optimizers is an option of their groups."""
    found = checkpoint.numbers(source)
    group = UNKNOWN_GROUP if source.group is None else source.group
    options = checkpoint.groups[group].hyperparameters if 0 <= group < len(checkpoint.groups) else {}
    return {STEP: ScalarState(options[STEP], None), **found} if STEP in options else found


def _check_spread(owner: Any, parameter: Any, key: str, name: str) -> None:
    """Check that a state that the optimizer has is spread over the ranks as its parameter is.

    Raises:
        PlanError: It is not.
    """
    own = owner.state.get(parameter, {}).get(key)
    if own is not None and hasattr(own, "placements") != hasattr(parameter, "placements"):
        problem = f"has {key} of {name}, which is spread over the ranks in another way than the parameter"
        raise PlanError("optimizer", problem, "load it with its framework, or pass weights_only=True")


def rounded(wanted: Iterable[_Wanted]) -> dict[str, str]:
    """Return the names of the states that a narrower type rounds, and the two types."""
    bits = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}
    return {
        one.key: f"{one.state.dtype} to {one.dtype}"
        for one in wanted
        if one.state.dtype != one.dtype and bits.get(one.state.dtype, 0) >= bits.get(one.dtype, 0)
    }


def _notes(run: LiveRun, checkpoint: Checkpoint, wanted: Sequence[_Wanted]) -> Iterator[str]:
    """Yield notes on state that is rounded, dropped, or not restored."""
    for key, types in rounded(wanted).items():
        yield f"{key} are rounded from {types}, the type of the run"
    if has_gradients(run.named.module):
        yield "the gradients that the run has are dropped"
    if run.optimizers and not run.schedulers and has_state(checkpoint):
        yield "the checkpoint has the state of a scheduler, which is not restored: pass scheduler=..."
    scaled = any(_is_scaler(one.state_dict()) for one in run.extra.values())
    if checkpoint.loss_scaler is not None and checkpoint.dtype == "F16" and run.optimizers and not scaled:
        yield 'the loss scale is not restored: pass extra={"scaler": scaler} with the GradScaler of the run'


def _read(prepared: PreparedRun, options: LoadOptions, ranks: Ranks, *, divided: bool) -> _Read:
    """Read the parts of this rank into host memory; if ranks divide them, its share; unstaged, into the run.

    Raises:
        CkptError: Reading failed.
    """
    checkpoint = prepared.checkpoint
    with unexpected_is_damage(checkpoint.location):
        direct = not (options.dry_run or divided or (options.staged and checkpoint.storage.remote))
        new = [_destination(one, options) if direct else None for one in prepared.wanted]
        wanted = [one for one, tensor in zip(prepared.wanted, new, strict=True) if tensor is None]
        made = [(one, tensor) for one, tensor in zip(prepared.wanted, new, strict=True) if tensor is not None]
        plan, offsets = pack(checkpoint, (one.placement for one in wanted))
        own_plan, own_offsets = pack(checkpoint, (one.placement for one, _ in made))
        total = plan.files[0].nbytes
        if options.dry_run:
            return _Read(empty(0), [], [], plan.nbytes_read, None, ())
        memory = empty(total)
        step = -(-total // (ranks.size * SHARE_BYTES)) * SHARE_BYTES if divided else total
        first, last = (min(total, step * rank) for rank in ((ranks.rank, ranks.rank + 1) if divided else (0, 1)))
        checks = checks_for(source_files(checkpoint), checkpoint, options.check)
        with Sources(source_files(checkpoint), checks) as sources:
            if ranks.rank == 0:
                for problem in failed_checks(sample_checks(checkpoint), advance=lambda _: None, sources=sources):
                    sources.finish_checks()  # which names a damaged file
                    raise problem
            if last > first:
                with VirtualFile(plan, plan.files[0], sources, memory=options.memory_bytes) as file:
                    file.seek(first)
                    file.readinto(memoryview(memory.numpy())[first:last])
            if made:
                with VirtualFile(own_plan, own_plan.files[0], sources, memory=options.memory_bytes) as file:
                    parts = [one.part(at, own) for at, (one, own) in zip(own_offsets, made, strict=True)]
                    fill(file, parts, options.memory_bytes)
            sources.check_unchanged()
    found = []
    for one, at in zip(wanted, offsets, strict=True):
        numel = one.placement.numel or 0
        dtype = _torch_type(one.dtype)
        values = memory[at : at + numel * dtype.itemsize].view(dtype)
        found.append((one, one.values(values)))
    ends = [min(total, step * (rank + 1)) for rank in range(ranks.size)] if divided else []
    nbytes = last - first if divided else plan.nbytes_read + own_plan.nbytes_read
    return _Read(memory, found, made, nbytes, checks, ends)


def _destination(one: _Wanted, options: LoadOptions) -> torch.Tensor | None:
    """Return the tensor to read a state straight into; None if its values are to be copied."""
    if options.staged:
        return one.made()
    made = one.made() if one.live is None else None
    return one.own() if made is None else made


def _torch_type(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, next(key for key, dtype in BY_TORCH_NAME.items() if dtype.name == name))
    return found


# ------------------------------------------------------------------------------------------------------ second half


def _commit(run: LiveRun, prepared: PreparedRun, read: _Read) -> None:
    """Fill the run in place, and give its optimizers the states that were read into new tensors."""
    tensors = {**run.named.parameters, **run.named.buffers}
    states: dict[str, dict[str, Any]] = {}
    owners = {name: owner for owner, group in run.groups for name in (*run.trained(group), *run.frozen(group))}
    for wanted, values in read.tensors:
        own = wanted.own()
        _local(own).copy_(values)
        if wanted.key != WEIGHTS:
            states.setdefault(wanted.name, {})[wanted.key] = own
    for wanted, own in read.made:
        if wanted.key != WEIGHTS:
            states.setdefault(wanted.name, {})[wanted.key] = own
    for number in prepared.numbers:
        parameter = tensors[number.name]
        own = owners[number.name].state.get(parameter, {}).get(number.key)
        states.setdefault(number.name, {})[number.key] = _filled(own, number, _local(parameter).device)
    for owner, group in run.groups:
        for parameter in group["params"]:
            owner.state.pop(parameter, None)  # states that the checkpoint lacks would be stale
    for name, own in states.items():
        owners[name].state[tensors[name]] = own
    drop_gradients(run.named.module)
    for name, state in prepared.schedulers.items():
        run.schedulers[name].load_state_dict(copy.deepcopy(dict(state)))
    filled: set[int] = set()
    for (_, group), saved in zip(run.groups, prepared.options, strict=True):
        filled |= _set_options(group, saved, filled)


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    tensor = tensor.detach()
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


def _filled(own: Any, number: _Number, device: torch.device) -> Any:
    """Return a number in the form that the optimizer keeps it in."""
    if number.form.dtype is None:
        return number.value
    if isinstance(own, torch.Tensor):
        _local(own).fill_(number.value)
        return own
    return torch.full(number.form.shape, number.value, dtype=number.form.dtype, device=number.form.device or device)


def _set_options(group: dict[str, Any], saved: Mapping[str, Any], filled: Collection[int]) -> set[int]:
    """Give a group the saved options; a learning rate that is a tensor is filled in place.

    Args:
        group: The group.
        saved: Its options.
        filled: Identities of the tensors of other groups: those that share one get a copy.

    Returns:
        Identities of the tensors that were filled.
    """
    own: set[int] = set()
    for key, value in saved.items():
        plain = type(value).__mro__[1](value) if isinstance(value, TensorFloat | TensorInteger) else value
        if isinstance(tensor := group.get(key), torch.Tensor):
            group[key] = tensor.clone() if id(tensor) in filled else tensor
            group[key].fill_(plain)
            own.add(id(tensor))
        elif isinstance(tensor, list | tuple) and any(isinstance(one, torch.Tensor) for one in tensor):  # betas
            pairs = zip(tensor, plain, strict=True)
            group[key] = type(tensor)(torch.full_like(a, b) if isinstance(a, torch.Tensor) else b for a, b in pairs)
        else:
            group[key] = copy.deepcopy(plain)
    return own


# ----------------------------------------------------------------------------------------------------------- report


def _report(
    run: LiveRun, prepared: PreparedRun, options: LoadOptions, ranks: Ranks, nbytes: int, seconds: float
) -> LoadReport:
    checkpoint, fitted = prepared.checkpoint, prepared.fitted
    have = [p for p in fitted.checkpoint.parameters if p.states]
    groups = range(len(run.groups))
    kept = tuple(n for n in groups if n in fitted.unrestored_groups)
    return LoadReport(
        path=checkpoint.location,
        tag=checkpoint.tag,
        step=checkpoint.step,
        method="planned",
        dry_run=options.dry_run,
        weights_only=options.weights_only,
        optimizer=not options.without_optimizer,
        source=checkpoint.topology,
        source_stage=checkpoint.stage,
        target=Topology(data_parallel=ranks.size),
        target_stage=None,
        parameters=len(have),
        elements=sum(p.numel for p in have),
        buffers=len(fitted.buffers),
        states=prepared.states,
        groups_restored=tuple(n for n in groups if n not in kept),
        groups_kept=kept,
        scheduler=bool(prepared.schedulers),
        loss_scale=False,
        missing=fitted.missing,
        unexpected=fitted.unexpected,
        notes=tuple(dict.fromkeys(prepared.notes)),
        nbytes_read=nbytes,
        seconds=seconds,
        client_state=prepared.client_state,
        rank_state=prepared.rank_state,
        rank_states=prepared.rank_states,
        extra=tuple(prepared.extra),
    )
