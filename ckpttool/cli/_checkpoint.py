"""A checkpoint's layout as JSON, whose keys are field names and stable, and as tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.description import describe, describe_state, title
from ckpttool.cli._output import print_facts, print_json, print_line, print_table
from ckpttool.commit import DIRTY, RESTORED_FROM, REVISION
from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import SHORT_NAMES, itemsize
from ckpttool.errors import PlanError
from ckpttool.model import UNKNOWN_GROUP
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.model import Checkpoint, ParamGroup, State


def print_checkpoint_json(checkpoint: Checkpoint, name: str | None) -> None:
    """Print everything except extents, or one parameter with its extents.

    Raises:
        PlanError: There is no parameter of that name.
    """
    print_json(_parameter(checkpoint, name) if name is not None else describe(checkpoint))


def _parameter(c: Checkpoint, name: str) -> dict[str, Any]:
    states = dict(states_of(c, name))
    return {
        "name": c.aliases.get(name, name),
        "states": {
            key: {**describe_state(s), "extents": [_extent(c, s, row) for row in s.extents]}
            for key, s in states.items()
        },
    }


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
        raise PlanError(c.location, f"holds no parameter {name}", "inspect --params lists the names")


def _extent(c: Checkpoint, state: State, row: Any) -> dict[str, Any]:
    file = c.files[int(row["file"])]
    width = state.nbytes // state.numel if state.numel else 0
    extent = {
        "file": file.name,
        "rank": file.rank,
        "offset": int(row["offset"]),
        "nbytes": int(row["numel"]) * int(row["runs"]) * width,
        "start": int(row["start"]),
        "numel": int(row["numel"]),
        "padding": int(row["padding"]),
    }
    if row["runs"] > 1:
        extent |= {key: int(row[key]) for key in ("runs", "pitch", "stride")}
    return extent


SHOWN = 12
"""Maximum number of names in a summary."""


def print_checkpoint(checkpoint: Checkpoint, view: str | None, name: str | None) -> None:
    """Print one view: a summary, parameters, ranks, files, or the byte ranges of one parameter."""
    if name is not None:
        _print_parameter(checkpoint, name)
    elif view == "params":
        _print_parameters(checkpoint)
    elif view == "ranks":
        _print_ranks(checkpoint)
    elif view == "files":
        _print_files(checkpoint)
    else:
        _print_summary(checkpoint)
    for note in (*checkpoint.notes, *checkpoint.remarks):
        print_line(f"note: {note}", color="yellow")


def _print_summary(c: Checkpoint) -> None:
    print_line(f"{c.tag}: {', '.join(title(c))}")
    version = c.deepspeed_version or "version not recorded"
    print_facts(
        [
            ("location", c.location),
            ("DeepSpeed", version if c.latest is not None else ""),
            ("parameters", ", ".join(_counts(c))),
            ("tied", _first([f"{a} = {n}" for a, n in c.aliases.items()])),
            ("buffers", _first([f"{b.name} ({dtype(b.state.dtype)})" for b in c.buffers])),
            ("states", _states(c)),
            ("files", f"{len(c.files)}, {format_size(c.nbytes)}"),
            ("loss scale", _loss_scale(c)),
            ("scheduler", _short(c.scheduler)),
            ("client state", _first([f"{_short(k)} {_short(v)}" for k, v in c.client_state.items()])),
            ("not sliceable", _first(c.nonpartitionable)),
            ("metrics", _first([f"{_short(k)} {_short(v)}" for k, v in c.metrics.items()])),
            *_provenance(c),
        ]
    )
    if c.groups:
        print_line("")
        _print_groups(c)


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


def _print_groups(c: Checkpoint) -> None:
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
    print_table(["group", "parameters", "elements", *columns, "optimizer"], rows, right=["parameters", "elements"])


def _print_parameters(c: Checkpoint) -> None:
    rows = []
    for p in c.parameters:
        states = ", ".join(_state(key, s.dtype) for key, s in p.states.items())
        kind = "frozen" if p.frozen else "" if p.group == UNKNOWN_GROUP else f"group {p.group}"
        rows.append([p.name, _shape(p.shape), f"{p.numel:,}", kind, states])
    rows += [[b.name, _shape(b.state.shape), f"{b.state.numel:,}", "buffer", dtype(b.state.dtype)] for b in c.buffers]
    rows += [[alias, "", "", "tied", f"= {name}"] for alias, name in c.aliases.items()]
    print_table(["parameter", "shape", "elements", "kind", "states"], rows, right=["elements"])


def _print_ranks(c: Checkpoint) -> None:
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
    print_table([*header, "elements", "padding", "tensors", "on disk", "files"], rows, right=right)


def _print_files(c: Checkpoint) -> None:
    rows = [[f.name, f.kind, "all" if f.rank is None else str(f.rank), format_size(f.nbytes)] for f in c.files]
    print_table(["file", "states of", "rank", "size"], rows, right=["size"])


def _print_parameter(c: Checkpoint, name: str) -> None:
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
    print_line(f"{name}: shape {_shape(shape)}" + (f", tied to {stored}" if stored else ""))
    right = ["elements", "offset", "bytes", "padding"]
    print_table(["state", "type", "rank", "elements", "offset", "bytes", "padding", "file"], rows, right=right)


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
    return ", ".join(f"{_state(key, kind)} {format_size(nbytes)}" for (key, kind), nbytes in sizes.items())


def _state(key: str, kind: str) -> str:
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
