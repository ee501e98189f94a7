"""Compare two checkpoints of any formats and topologies, tensor by tensor."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.blocks import Line, Shown, Table
from ckpttool.concurrency import default_jobs, in_order
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import SHORT_NAMES
from ckpttool.errors import LayoutError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader, chunk_elements
from ckpttool.model import TensorFloat, TensorInteger
from ckpttool.model.items import OPTION, STATE, Item, paired, tied_names
from ckpttool.model.selection import WEIGHTS, contents, matcher
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint, State
    from ckpttool.units import Advance


OTHERS = "steps, hyper-parameters, scheduler, loss scale and client state"
"""The values that are compared besides tensors."""
NUMBERS = (int, float, TensorInteger, TensorFloat)
SEQUENCES = (list, tuple)
MAX_ROWS = 30
"""Rows of a table that a terminal shows."""
MAX_DEPTH = 100
"""Maximum number of containers around a value that is compared."""
MAX_VALUES = 1_000_000
"""Maximum number of other values of one checkpoint; a short pickle can expand without end."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Comparison of one tensor."""

    name: str
    """Parameter or buffer."""
    state: str
    """"weights", or the optimizer's name for the state."""
    kind: str
    """"equal", "values", "shape", "only in a" or "only in b"."""
    dtypes: tuple[str | None, str | None]
    """Types in a and b, safetensors' spelling; equal values in two types are equal."""
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    """Shapes in a and b."""
    differing: int = 0
    """Elements beyond the tolerance; NaN equals NaN."""
    max_abs: float = 0.0
    """Largest absolute difference of finite elements; infinite if one side is not finite."""
    max_rel: float = 0.0
    """Largest difference relative to b."""


@dataclass(frozen=True, slots=True)
class OtherDifference:
    """A value besides the tensors that differs: a step, a hyper-parameter, a part of the scheduler or client state."""

    name: str
    """The value; of a hyper-parameter also the parameters that have it."""
    a: str
    """In a; "" where it is missing."""
    b: str
    """In b; "" where it is missing."""


@dataclass(frozen=True, slots=True)
class DiffReport(Shown):
    """Result of comparing two checkpoints."""

    a: str
    """The first."""
    b: str
    """The second."""
    tensors: tuple[Difference, ...]
    """All tensors, in the order of a; tensors only in b follow."""
    notes: tuple[str, ...]
    """Notes on states that were not compared."""
    others: tuple[OtherDifference, ...] | None = None
    """Other values that differ; None if only tensors were compared."""

    @property
    def compared(self) -> str:
        """The compared values, in a few words."""
        tensors = "weights and optimizer states" if any(t.state != WEIGHTS for t in self.tensors) else "weights"
        return tensors if self.others is None else f"{tensors}; {OTHERS}"

    @property
    def different(self) -> tuple[Difference, ...]:
        """Tensors that differ."""
        return tuple(t for t in self.tensors if t.kind != "equal")

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.different and not self.others

    def blocks(self) -> Iterator[Block]:
        """Yield one row for each tensor that differs, then the verdict."""
        different = self.different
        if different:
            rows = [_row(d) for d in different]
            right = ["differing", "max abs", "max rel"]
            yield Table(
                ["tensor", "state", "differs in", "a", "b", "differing", "max abs", "max rel"],
                rows,
                right=right,
                whole=["differs in", "a", "b"],
                rare=["max rel", "b", "a"] if any(d.kind == "shape" for d in different) else ["b", "a", "max rel"],
                most=MAX_ROWS,
            )
        if self.others:
            rows = [(o.name, o.a or "-", o.b or "-") for o in self.others]
            yield Table(["value", "a", "b"], rows, prose=["value", "a", "b"], most=MAX_ROWS)
        for note in self.notes:
            yield Line(f"note: {note}", color="yellow")
        retyped = sum(1 for d in self.tensors if d.kind == "equal" and d.dtypes[0] != d.dtypes[1])
        if retyped:
            yield Line(f"note: {retyped} tensors have equal values in different types", color="yellow")
        count = len(self.tensors)
        verdict = f"equal ({count} tensors: {self.compared})"
        if not self.equal:
            values = "" if self.others is None else f", other values that differ: {len(self.others)}"
            verdict = f"{len(different)} of {count} tensors differ{values} ({self.compared})"
        yield Line(verdict, color="green" if self.equal else "red")


def _row(one: Difference) -> tuple[str, ...]:
    numbers = f"{one.differing:,}", f"{one.max_abs:.3g}", f"{one.max_rel:.3g}"
    return (
        one.name,
        one.state,
        one.kind,
        _side(one, 0),
        _side(one, 1),
        *(numbers if one.kind == "values" else [""] * 3),
    )


def _side(difference: Difference, side: int) -> str:
    dtype, shape = difference.dtypes[side], difference.shapes[side]
    if dtype is None or shape is None:
        return "-"
    return f"{SHORT_NAMES.get(dtype, dtype.lower())} {' x '.join(map(str, shape)) if shape else 'scalar'}"


def compare(  # noqa: PLR0913  the options of diff
    a: Checkpoint,
    b: Checkpoint,
    *,
    rtol: float,
    atol: float,
    include: Sequence[str],
    exclude: Sequence[str],
    others: bool,
    jobs: int | None,
    advance: Advance,
) -> DiffReport:
    """Compare values in double precision, chunk by chunk.

    Element x of a equals element y of b if |x - y| <= atol + rtol |y|, or if both are NaN.

    Optimizer states are compared if both have any; with ``others`` also steps, hyper-parameters, the scheduler, the
    loss scale and client state.

    Raises:
        LayoutError: There are too many other values.
        ChecksumError: The bytes read differ from those saved.
        StorageError: Reading failed.
    """
    matches = matcher(include, exclude)
    ours, theirs = ({Item(STATE, c.key, c.name): c.state for c in contents(one)} for one in (a, b))
    notes = []
    optimizer = [any(item.key != WEIGHTS for item in held) for held in (ours, theirs)]
    if optimizer[0] != optimizer[1]:
        lacking = (a, b)[optimizer.index(False)]
        why = f": {lacking.left_out}" if lacking.left_out else " holds no optimizer states"
        notes.append(f"{lacking.location}{why}: only weights are compared")
        ours, theirs = ({i: s for i, s in held.items() if i.key == WEIGHTS} for held in (ours, theirs))
    elif loose := dict.fromkeys((*a.nonpartitionable, *b.nonpartitionable)):
        notes.append(f"states that belong to no parameter are not compared: {', '.join([*loose][:5])}")
    tied = tied_names(a.aliases, b.aliases)
    pairs = [pair for pair in paired(ours, theirs, tied) if matches(pair[0].name)]
    files = source_files(a), source_files(b)
    with (
        Sources(files[0], checks_for(files[0], a, "read")) as left,
        Sources(files[1], checks_for(files[1], b, "read")) as right,
    ):
        tasks = (partial(_one, left, right, *pair, (rtol, atol), advance) for pair in pairs)
        with contextlib.closing(in_order(tasks, jobs or default_jobs(remote=left.remote or right.remote))) as results:
            tensors = tuple(results)
        values = (_others(a, left, matches), _others(b, right, matches)) if others else None
        differing = None if values is None else _other_differences(*values, tied)
        for sources in (left, right):
            sources.finish(jobs=jobs)
    return DiffReport(a.location, b.location, tensors, tuple(notes), differing)


def _others(checkpoint: Checkpoint, sources: Sources, matches: Callable[[str], bool]) -> dict[Item, object]:
    """Return steps, hyper-parameters, scheduler, loss scale and client state; no containers."""
    names = ("step", "samples", "skipped_steps", "scheduler", "data_states", "loss_scaler", "client_state")
    given = [Item(OPTION, name) for name in names]
    values = {item: value for item in given if (value := getattr(checkpoint, item.key)) is not None and value != {}}
    parameters = {p.name: p for p in checkpoint.parameters}
    for group in checkpoint.groups:
        for name in filter(matches, group.parameters):
            numbers = {**group.scalars, **(parameters[name].numbers if name in parameters else {})}
            own = {**group.hyperparameters, **{key: number.value for key, number in numbers.items()}}
            values.update((Item(OPTION, key, name), value) for key, value in own.items())
    result: dict[Item, object] = {}
    for item, value in values.items():
        for key, part in _flat(checkpoint, sources, item.key, value):
            result[item._replace(key=key)] = part
            if len(result) > MAX_VALUES:
                problem = f"holds more than {MAX_VALUES:,} values besides its tensors"
                raise LayoutError(checkpoint.location, problem, "compare without all", ("all",))
    return result


def _flat(
    checkpoint: Checkpoint, sources: Sources, name: str, value: Any, inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, object]]:
    """Yield the parts of a value by name, without containers."""
    if isinstance(value, TensorRef):
        value = _tensor_text(checkpoint, sources, value)
    if isinstance(value, Opaque):
        yield name, value.qualified_name
        value = {key: part for key in ("args", "state", "items", "appended") if (part := getattr(value, key))}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, SEQUENCES) else None
    if items is None or id(value) in inside or len(inside) > MAX_DEPTH:
        yield name, "None" if value is None else value if items is None else "..."
    elif not value:
        yield name, "empty"
    else:
        for key, part in items:
            path = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"
            yield from _flat(checkpoint, sources, path, part, (*inside, id(value)))


def _tensor_text(checkpoint: Checkpoint, sources: Sources, tensor: TensorRef) -> str:
    """Describe a tensor by its type, shape and a digest of its storage."""
    stored = checkpoint.embedded.get(tensor.storage.key)
    digest = hashlib.sha256(repr((tensor.offset, tensor.stride)).encode())
    for _, values in StateReader(sources).chunks(stored) if stored is not None else ():
        digest.update(values.tobytes())
    content = "not in the file" if stored is None else f"digest {digest.hexdigest()[:16]}"
    return f"{tensor.dtype} {list(tensor.shape)}, {content}"


def _other_differences(
    ours: Mapping[Item, object], theirs: Mapping[Item, object], tied: Mapping[str, Sequence[str]]
) -> tuple[OtherDifference, ...]:
    """Compare values; parameters with the same difference are one entry."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for item, x, y in paired(ours, theirs, tied):
        # A number may be an integer in one format and a float in another. NaN equals NaN.
        if not (type(x) in NUMBERS and type(y) in NUMBERS and x == y) and _text(x) != _text(y):
            found.setdefault((item.key, _text(x), _text(y)), []).append(item.name)
    return tuple(OtherDifference(name + _of(owners), x, y) for (name, x, y), owners in found.items())


def _of(parameters: Sequence[str]) -> str:
    more = f" and {len(parameters) - 1} others" if len(parameters) > 1 else ""
    return f" of {parameters[0]}{more}" if parameters[0] else ""


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else repr(value)


def _one(
    left: Sources,
    right: Sources,
    item: Item,
    a: State | None,
    b: State | None,
    tolerance: tuple[float, float],
    advance: Advance,
) -> Difference:
    dtypes = None if a is None else a.dtype, None if b is None else b.dtype
    shapes = None if a is None else a.shape, None if b is None else b.shape
    if a is None or b is None or a.shape != b.shape:
        kind = "only in b" if a is None else "only in a" if b is None else "shape"
        return Difference(item.name, item.key, kind, dtypes, shapes)
    differing, max_abs, max_rel = 0, 0.0, 0.0
    step = chunk_elements(left, right)
    ours, theirs = StateReader(left).chunks(a, step=step), StateReader(right).chunks(b, step=step)
    for (_, x), (_, y) in zip(ours, theirs, strict=True):
        advance(x.nbytes + y.nbytes)
        if x.dtype == y.dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            continue
        count, absolute, relative = _compared(x, y, *tolerance)
        differing += count
        max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
    kind = "values" if differing else "equal"
    return Difference(item.name, item.key, kind, dtypes, shapes, differing, max_abs, max_rel)


def _compared(x: NDArray[Any], y: NDArray[Any], rtol: float, atol: float) -> tuple[int, float, float]:
    """Return (elements beyond the tolerance, largest absolute, largest relative difference) of two chunks."""
    exact = x.dtype.kind in "iub" and y.dtype.kind in "iub"
    if exact and not rtol and not atol and not (x != y).any():
        return 0, 0.0, 0.0
    wide = np.complex128 if "c" in x.dtype.kind + y.dtype.kind else np.float64
    p, q = x.astype(wide), y.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(p - q)
        size = np.abs(q)
        same = (p == q) | (np.isnan(p) & np.isnan(q))
        distance = np.where(same, 0.0, np.where(np.isnan(distance), math.inf, distance))
        # Only infinity equals infinity, whatever the tolerance.
        beyond = ~same & ~(np.isfinite(distance) & (distance <= atol + rtol * size))
        if exact:
            beyond |= (x != y) & (distance == 0)  # integers beyond the range of a double
        relative = np.where(same, 0.0, distance / size)
        relative = np.where(np.isnan(relative), math.inf, relative)
    return int(beyond.sum()), float(distance.max(initial=0.0)), float(relative.max(initial=0.0))
