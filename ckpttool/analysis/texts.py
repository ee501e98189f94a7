"""Checkpoints as blocks of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ckpttool.blocks import Facts, Line, Table
from ckpttool.commit import DIRTY, RESTORED_FROM, REVISION
from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import SHORT_NAMES, itemsize
from ckpttool.formats import FORMATS
from ckpttool.model import UNKNOWN_GROUP
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint, ParamGroup, State

SHOWN = 12
"""Maximum number of names in a summary."""


def states_of(c: Checkpoint, name: str) -> Iterator[tuple[str, State]]:
    """Yield the states of a parameter or buffer, by its name or a tied name.

    Raises:
        PlanError: No parameter or buffer has that name.
    """
    stored = c.aliases.get(name, name)
    found = False
    for owner, key, state in c.states():
        if owner == stored:
            found = True
            yield key, state
    if not found:
        from ckpttool.model.selection import no_such_parameter  # a correct name does not need it

        raise no_such_parameter(c, name)


def title(c: Checkpoint) -> list[str]:
    """Return format, topology and step of the checkpoint, in a few words."""
    over = _layout_of_ranks(c)
    kind = next((known.kinds[c.format] for known in FORMATS if c.format in known.kinds), c.format)
    if c.format == "zero" and not c.stage:
        kind = "DeepSpeed without ZeRO (stage 0) over {ranks}"
    title = [kind.format(stage=c.stage, ranks=over), SHORT_NAMES.get(c.dtype, c.dtype.lower())]
    if c.step is not None:
        title.append(f"step {c.step}" + (f" ({c.skipped_steps} skipped)" if c.skipped_steps else ""))
    return title


def _layout_of_ranks(c: Checkpoint) -> str:
    t = c.topology
    degrees = [
        (t.data_parallel, "data-parallel"),
        (t.tensor_parallel, "tensor-parallel"),
        (t.pipeline_parallel, "pipeline-parallel"),
    ]
    if t.tensor_parallel == t.pipeline_parallel == 1:
        ranks = f"{t.data_parallel} {'rank' if t.data_parallel == 1 else 'ranks'}"
    else:
        ranks = " x ".join(f"{n} {name}" for n, name in degrees if n > 1) + " ranks"
    return ranks + (f", experts over {t.expert_parallel}" if t.expert_parallel > 1 else "")


def notes(c: Checkpoint) -> Iterator[Block]:
    """Yield the notes about a checkpoint."""
    for note in (*c.notes, *c.remarks):
        yield Line(f"note: {note}", color="yellow")


def checkpoint(c: Checkpoint) -> Iterator[Block]:
    """Yield what ``ckpttool inspect`` prints without an option."""
    yield from _summary(c)
    yield from notes(c)


def _summary(c: Checkpoint) -> Iterator[Block]:
    yield Line(f"{c.tag}: {', '.join(title(c))}")
    version = c.deepspeed_version or ("" if c.thin else "version not recorded")
    yield Facts(
        [
            ("location", c.location),
            ("DeepSpeed", version if c.latest is not None and c.format != "dcp" else ""),
            ("mesh", "" if c.mesh is None else f"{c.mesh}, on {c.mesh.device}"),
            ("parameters", ", ".join(_counts(c))),
            ("tied", _first([f"{a} = {n}" for a, n in c.aliases.items()])),
            ("buffers", _first([f"{b.name} ({dtype(b.state.dtype)})" for b in c.buffers])),
            ("states", _states(c)),
            ("files", f"{len(c.files)}, {format_size(c.nbytes)}"),
            ("loss scale", _loss_scale(c)),
            ("scheduler", _short(c.scheduler)),
            *((name.replace("_", " "), _short(state)) for name, state in c.data_states.items()),
            ("client state", _first([f"{_short(k)} {_short(v)}" for k, v in c.client_state.items()])),
            ("not sliceable", _first(c.of_one_layout)),
            ("metrics", _first([f"{_short(k)} {_short(v)}" for k, v in c.metrics.items()])),
            *_provenance(c),
        ]
    )
    if c.groups:
        yield Line("")
        yield from _groups(c)


def _provenance(c: Checkpoint) -> list[tuple[str, str]]:
    """Return the provenance that a save recorded."""
    found = c.provenance
    tree = " (and changes that were not committed)" if found.get(DIRTY) else ""
    revision = found.get(REVISION, "")
    parent = found.get(RESTORED_FROM, {})
    return [
        ("git", f"{revision}{tree}" if revision else ""),
        ("restored from", f"{parent['path']}, step {parent['step']}" if parent else ""),
    ]


def _counts(c: Checkpoint) -> list[str]:
    """Return the numbers of trained, frozen and unclassified parameters."""
    kinds: dict[str, list[int]] = {}
    for p in c.parameters:
        kind = "frozen" if p.frozen else "" if p.group == UNKNOWN_GROUP else "trainable"
        kinds.setdefault(kind, []).append(p.numel)
    return [f"{len(n)} {kind}".strip() + f" ({sum(n):,} elements)" for kind, n in sorted(kinds.items(), reverse=True)]


def _groups(c: Checkpoint) -> Iterator[Block]:
    numel = {p.name: p.numel for p in c.parameters}
    shown = ["lr", "weight_decay", "betas", "momentum", "eps"]
    columns = [k for k in shown if any(k in g.hyperparameters for g in c.groups)]
    rows = [
        [
            str(i),
            str(len(g.parameters)),
            f"{sum(numel[n] for n in g.parameters):,}",
            *(_short(g.hyperparameters.get(k, "")) for k in columns),
            _scalars(g),
        ]
        for i, g in enumerate(c.groups)
    ]
    yield Table(
        ["group", "parameters", "elements", *columns, "optimizer"],
        rows,
        right=["parameters", "elements"],
        whole=columns,
        prose=["optimizer"],
        rare=columns[::-1],
    )


def parameters(c: Checkpoint) -> Iterator[Block]:
    """Yield a row for each parameter, buffer and tied name."""
    rows = []
    for p in c.parameters:
        states = ", ".join(_state_label(key, s.dtype) for key, s in p.tensors.items())
        kind = "frozen" if p.frozen else "" if p.group == UNKNOWN_GROUP else f"group {p.group}"
        rows.append([p.name, _shape(p.shape), f"{p.numel:,}", kind, states])
    rows += [[b.name, _shape(b.state.shape), f"{b.state.numel:,}", "buffer", dtype(b.state.dtype)] for b in c.buffers]
    rows += [[alias, "", "", "tied", f"= {name}"] for alias, name in c.aliases.items()]
    yield Table(
        ["parameter", "shape", "elements", "kind", "states"],
        rows,
        right=["elements"],
        whole=["shape", "kind"],
        prose=["states"],
        rare=["elements"],
    )


def ranks(c: Checkpoint) -> Iterator[Block]:
    """Yield a row for each rank that has files of its own."""
    elements: Counter[int] = Counter()
    padding: Counter[int] = Counter()
    several = any(f.model_rank is not None for f in c.files)
    nbytes: Counter[int] = Counter()
    for _, _, state in c.states():
        width = itemsize(state.dtype)
        for row in state.extents:
            file = int(row["file"])
            count = int(row["numel"]) * int(row["runs"])
            elements[file] += count
            padding[file] += int(row["padding"])
            nbytes[file] += count * width
    ranks: dict[tuple[int, int], list[int]] = {}
    for i, f in enumerate(c.files):
        ranks.setdefault((-1 if f.rank is None else f.rank, -1 if f.model_rank is None else f.model_rank), []).append(i)
    rows = [
        [
            *("all" if n < 0 else str(n) for n in (rank if several else rank[:1])),
            f"{sum(elements[i] for i in files):,}",
            f"{sum(padding[i] for i in files):,}",
            format_size(sum(nbytes[i] for i in files)),
            format_size(sum(c.files[i].nbytes for i in files)),
            ", ".join(c.files[i].name for i in files),
        ]
        for rank, files in sorted(ranks.items())
    ]
    right = ["elements", "padding", "tensors", "on disk"]
    header = ["rank", "model rank"] if several else ["rank"]
    yield Table([*header, "elements", "padding", "tensors", "on disk", "files"], rows, right=right, rare=right)


def files(c: Checkpoint) -> Iterator[Block]:
    """Yield a row for each file."""
    rows = [[f.name, f.kind, "all" if f.rank is None else str(f.rank), format_size(f.nbytes)] for f in c.files]
    yield Table(["file", "states of", "rank", "size"], rows, right=["size"], whole=["rank"], rare=["states of"])


def parameter(c: Checkpoint, name: str) -> Iterator[Block]:
    """Yield a row for each byte range of a parameter or buffer."""
    rows = []
    for key, state in states_of(c, name):
        width = itemsize(state.dtype)
        for row in state.extents:
            file = c.files[int(row["file"])]
            first, count, runs = int(row["start"]), int(row["numel"]), int(row["runs"])
            more = f", and {runs - 1} more every {int(row['pitch']):,}" if runs > 1 else ""
            rows.append(
                [
                    key,
                    dtype(state.dtype),
                    "all" if file.rank is None else str(file.rank),
                    f"{first:,} to {first + count:,}{more}" if count else "none",
                    str(int(row["offset"])),
                    str(count * runs * width),
                    str(int(row["padding"]) * width),
                    file.name,
                ]
            )
    shape = next(state.shape for _, state in states_of(c, name))
    stored = c.aliases.get(name)
    yield Line(f"{name}: shape {_shape(shape)}" + (f", tied to {stored}" if stored else ""))
    right = ["elements", "offset", "bytes", "padding"]
    columns = ["state", "type", "rank", "elements", "offset", "bytes", "padding", "file"]
    yield Table(columns, rows, right=right, whole=["type", "rank"], rare=["padding", "type"])


# ------------------------------------------------------------------------------------------------- words


def dtype(name: str) -> str:
    """Return the usual name of a dtype: bf16 for BF16."""
    return SHORT_NAMES.get(name, name.lower())


def _first(items: Sequence[str]) -> str:
    """Return the first few items of a list, and the number of the others."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _states(c: Checkpoint) -> str:
    sizes: Counter[tuple[str, str]] = Counter()
    for _, key, state in c.states():
        if key != "buffer":
            sizes[key, state.dtype] += state.nbytes
    return ", ".join(f"{_state_label(key, kind)} {format_size(nbytes)}" for (key, kind), nbytes in sizes.items())


def _state_label(key: str, kind: str) -> str:
    """Return a state with its dtype, unless they are equal: the fp32 master weights are named fp32 in any dtype."""
    return key if key == dtype(kind) else f"{key} {dtype(kind)}"


def _scalars(group: ParamGroup) -> str:
    return ", ".join(f"{_short(name)} {_short(scalar.value)}" for name, scalar in group.scalars.items())


def _loss_scale(c: Checkpoint) -> str:
    state = getattr(c.loss_scaler, "state", None)
    if not isinstance(state, dict) or not state.get("dynamic"):
        return ""
    return f"{_short(state.get('cur_scale'))} (dynamic)"


def _short(value: Any) -> str:
    """Return a value in a few words: scalars unchanged, containers by their size."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple) and len(value) <= 4 and all(isinstance(v, int | float) for v in value):
        return "(" + ", ".join(_short(v) for v in value) + ")"
    if isinstance(value, dict) and len(value) <= 2 and all(isinstance(v, int | float | str) for v in value.values()):
        return ", ".join(f"{_short(k)} {_short(v)}" for k, v in value.items())
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"({len(value)} {'entry' if len(value) == 1 else 'entries'})"
    if isinstance(value, TensorRef):
        return f"({dtype(value.dtype)} tensor, {_shape(value.shape)})"
    if isinstance(value, bytes | bytearray):
        return f"({len(value)} bytes)"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
