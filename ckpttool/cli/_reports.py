"""Print reports as text."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.json_report import describe, describe_state, title
from ckpttool.cli._map import print_map
from ckpttool.cli._output import print_facts, print_json, print_line, print_table, terminal_width, write_bytes
from ckpttool.commit import DIRTY, RESTORED_FROM, REVISION
from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import SHORT_NAMES, itemsize
from ckpttool.messages import name_some
from ckpttool.model import UNKNOWN_GROUP
from ckpttool.units import format_age, format_ago, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpttool import AverageReport, ConsolidateReport, ConvertReport, CpReport
    from ckpttool.analysis.diff import Difference, DiffReport
    from ckpttool.analysis.stats import TensorStats
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.api._run import Written
    from ckpttool.catalog.entries import Catalog, CatalogEntry
    from ckpttool.catalog.retention import Decision
    from ckpttool.commit.marks import Pin
    from ckpttool.execution.checks import ReadReport
    from ckpttool.model import Checkpoint, ParamGroup, State


WHO_LOADS = {
    "zero": "load_checkpoint",
    "universal": "load_universal",
    "dcp": "torch.distributed.checkpoint",
    "ranks": "the ranks of FSDP2",
}
"""Name of each target's loader."""
WIDE = 140
"""Columns of a terminal that has room for a small histogram in each row of statistics."""
SKETCH_COLUMNS = 16
"""Characters of that histogram."""
RARE_STATISTICS = ["norm", "zeros", "type", "mean", "max", "min"]
"""The columns of statistics that a narrow terminal lacks, the first of them first."""
BARS = " ▁▂▃▄▅▆▇█"
"""Characters of rising height."""


def print_consolidate_report(report: ConsolidateReport) -> None:
    """Print the written files, or those planned by a dry run."""
    contents = f"{report.tensors} tensors, {report.elements:,} elements, parameters in {report.dtype}"
    print_line(_summary(report.written, contents))
    _print_weights(report)


def print_average_report(report: AverageReport) -> None:
    """Print the weight of each source and the written files, or those planned by a dry run."""
    kind = "a ZeRO checkpoint" if report.dtype is None else f"parameters in {report.dtype}"
    contents = (
        f"the mean of {len(report.sources)} checkpoints, {report.tensors} tensors, {report.elements:,} elements, {kind}"
    )
    print_line(_summary(report.written, contents))
    rows = [(s.location, _number(s.step), f"{s.weight:.6g}") for s in report.sources]
    print_table(["source", "step", "weight"], rows, right=["step", "weight"])
    _print_weights(report)


def print_convert_report(report: ConvertReport) -> None:
    """Print the written files, or those planned by a dry run."""
    written = report.written
    print_line(_summary(written, f"{report.tag} for {WHO_LOADS[report.to]}, {len(written.files)} files"))
    _print_remarks(written, report.notes)


def print_cp_report(report: CpReport) -> None:
    """Print the size of the copy and its notes."""
    written = report.written
    verb = "was there already, with the same bytes:" if written.there else "copied"
    print_line(
        f"{written.out}: {verb} {len(written.files)} files, {format_size(written.nbytes_written)} in "
        f"{written.seconds:.1f} s{', latest names it' if report.latest else ''}"
    )
    _print_remarks(written, report.notes)


def _summary(written: Written, contents: str) -> str:
    """Return the line with the output, the duration, and the bytes written and read."""
    verb = "would write" if written.dry_run else "wrote"
    if written.there:
        verb = "was there already, nothing was written:"
    took = "" if written.dry_run else f" in {written.seconds:.1f} s"
    return (
        f"{written.out}: {verb} {contents}, {format_size(written.nbytes_written)}{took} "
        f"(read {format_size(written.nbytes_read)})"
    )


def _print_weights(report: ConsolidateReport | AverageReport) -> None:
    """Print the files, the tied names, the notes and the comparisons of written weights."""
    written = report.written
    print_table(["file", "size"], [(f.name, format_size(f.nbytes)) for f in written.files], right=["size"])
    for alias, name in report.tied.items():
        print_line(f"{alias} is tied to {name}: stored once")
    _print_remarks(written, report.notes)
    if written.overflowed:
        print_line(
            f"warning: {written.overflowed:,} values are too large for {report.dtype} and became infinite; "
            "use bf16 or fp32",
            color="yellow",
        )


def _print_remarks(written: Written, notes: Sequence[str]) -> None:
    """Print the digest, the notes, the comparisons with checksums, and, for a dry run, the needed space and memory."""
    if written.digest is not None:
        print_line(f"{written.digest} (source and output match)", color="green")
    for note in notes:
        print_line(f"note: {note}", color="yellow")
    for name in written.kept:
        print_line(f"note: the file of OUT that differed is kept as {name}", color="yellow")
    print_checks(written.checks)
    if (needs := written.needs) is not None:
        free = "" if needs.free_bytes is None else f"; {format_size(needs.free_bytes)} are free there"
        print_line(f"needs: about {format_size(needs.memory_bytes)} of memory{free}")


def write_page(html: str, data: bytes, given: dict[str, Any]) -> None:
    """Write the page of ``--html``, and print its path; with "-", write only the page, to the standard output.

    Args:
        html: The value of ``--html``.
        data: The page.
        given: Options of the command.

    Raises:
        StorageError: It cannot be written.
    """
    from ckpttool.api import _pages

    if html == _pages.STDOUT:
        write_bytes(data)
        return
    print_line(f"{_pages.write_page(html, data, storage_options=given['storage_options'])}: wrote a page")


def print_checks(checks: ReadReport | None) -> None:
    """Print the records and files without a compared checksum."""
    if checks is None:
        return
    if checks.unchecked:
        first = checks.unchecked[0]
        print_line(
            f"note: {len(checks.unchecked):,} records were needed in part and are unchecked ({first.file}: "
            f"{first.record}{', ...' if len(checks.unchecked) > 1 else ''}); --check full reads the rest of them",
            color="yellow",
        )
    if checks.without:
        print_line(
            f"note: {len(checks.without):,} files have bytes without a checksum "
            f"({checks.without[0]}{', ...' if len(checks.without) > 1 else ''})",
            color="yellow",
        )


def print_catalog(found: Catalog) -> None:
    """Print one row for each checkpoint, then defects of latest."""
    from ckpttool.catalog.retention import by_series  # the other commands need no catalog

    now = time.time()
    newest = "" if any(entry.latest for entry in found.entries) else _newest(found)
    rows = [
        (
            entry.name,
            _kind(entry),
            _number(entry.world_size),
            _number(entry.step),
            format_size(entry.nbytes),
            "" if entry.saved is None else format_age(now - entry.saved),
            _state(entry, newest),
        )
        for entry in found.entries
    ]
    right = ["ranks", "step", "size", "age"]
    print_table(
        ["checkpoint", "format", "ranks", "step", "size", "age", "state"],
        rows,
        right=right,
        whole=["format"],
        prose=["state"],
        rare=["ranks", "age", "format"],
    )
    models = by_series([entry for entry in found.entries if entry.series])
    if len(models) > 1:
        names = "; ".join(name_some([entry.name for entry in own], 3) for own in models)
        print_line(
            f"note: checkpoints of {len(models)} models or series of names; the rules of prune hold for each: {names}"
        )
    for problem in found.problems:
        print_line(f"note: {problem}", color="yellow")


def _newest(found: Catalog) -> str:
    """Return the name of the newest whole checkpoint; "" unless there are several."""
    whole = [entry for entry in found.entries if entry.whole and entry.rank]
    return max(whole, key=lambda entry: entry.rank).name if len(whole) > 1 else ""


def _state(entry: CatalogEntry, newest: str) -> str:
    if entry.whole:
        state = "latest" if entry.latest else "newest" if entry.name == newest else "whole"
    elif entry.is_root:
        state = entry.problem or ""
    else:
        state = f"{'latest, ' if entry.latest else ''}{entry.condition}: {entry.problem}"
    if entry.pin is not None:
        state = f"{state}, {_pinned(entry.pin)}"
    return f"{state}, a link to {entry.link}" if entry.link else state


def _pinned(pin: Pin) -> str:
    when = format_ago(time.time() - pin.when)
    return f"pinned by {pin.who} {when}: {pin.why}" if pin.who else f"pinned: {pin.why}"


def print_pin(src: str, pin: Pin, *, removed: bool = False) -> None:
    """Print who pinned a checkpoint, and why."""
    print_line(f"{src}: {'unpinned; it was ' if removed else ''}pinned by {pin.who or '?'}: {pin.why}")


def _kind(entry: CatalogEntry) -> str:
    if entry.stage is not None:
        return f"ZeRO-{entry.stage}"
    if entry.thin is not None:
        return f"thin {entry.thin}"
    return entry.format or ""


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def print_decisions(decisions: Sequence[Decision], *, dry_run: bool) -> None:
    """Print one row for each checkpoint, then the freed bytes."""
    rows = [(d.entry.name, _verb(d, dry_run=dry_run), format_size(d.entry.nbytes), d.reason) for d in decisions]
    print_table(["checkpoint", "", "size", "why"], rows, right=["size"], whole=[""], prose=["why"])
    gone, thinned = (sum(map(test, decisions)) for test in (lambda d: not d.keep, lambda d: d.thin is not None))
    would = "would be " if dry_run else ""
    also = f", {thinned} {would}thinned" if thinned else ""
    freed = format_size(sum(d.freed for d in decisions))
    print_line(f"{gone} of {len(decisions)} {would}removed{also}, {freed} freed")
    if thinned and dry_run:
        print_line(
            "note: a dry run reads no tensors: a checkpoint whose values are damaged is kept whole", color="yellow"
        )


def _verb(decision: Decision, *, dry_run: bool) -> str:
    if not decision.keep:
        return "would be removed" if dry_run else "removed"
    if decision.thin is not None:
        return f"{'would be thin' if dry_run else 'thinned'}, {decision.thin}"
    return "kept"


def print_diff_report(report: DiffReport) -> None:
    """Print one row for each tensor that differs, then the verdict."""
    different = report.different
    if different:
        rows = [
            (
                d.name,
                d.state,
                d.kind,
                *(_side(d, i) for i in (0, 1)),
                f"{d.differing:,}" if d.kind == "values" else "",
                f"{d.max_abs:.3g}" if d.kind == "values" else "",
                f"{d.max_rel:.3g}" if d.kind == "values" else "",
            )
            for d in different
        ]
        right = ["differing", "max abs", "max rel"]
        print_table(
            ["tensor", "state", "differs in", "a", "b", "differing", "max abs", "max rel"],
            rows,
            right=right,
            whole=["differs in", "a", "b"],
            rare=["max rel", "b", "a"],
        )
    if report.others:
        rows = [(o.name, o.a or "-", o.b or "-") for o in report.others]
        print_table(["value", "a", "b"], rows, prose=["value", "a", "b"])
    for note in report.notes:
        print_line(f"note: {note}", color="yellow")
    retyped = sum(1 for d in report.tensors if d.kind == "equal" and d.dtypes[0] != d.dtypes[1])
    if retyped:
        print_line(f"note: {retyped} tensors have equal values in different types", color="yellow")
    count = len(report.tensors)
    verdict = f"equal ({count} tensors: {report.compared})"
    if not report.equal:
        values = "" if report.others is None else f", other values that differ: {len(report.others)}"
        verdict = f"{len(different)} of {count} tensors differ{values} ({report.compared})"
    print_line(verdict, color="green" if report.equal else "red")


def _side(difference: Difference, side: int) -> str:
    dtype, shape = difference.dtypes[side], difference.shapes[side]
    if dtype is None or shape is None:
        return "-"
    return f"{SHORT_NAMES.get(dtype, dtype.lower())} {' x '.join(map(str, shape)) if shape else 'scalar'}"


def draws_sketches() -> bool:
    """Return whether the terminal has room for the distributions of ``print_stats``."""
    return terminal_width() >= WIDE


def print_stats(found: Sequence[TensorStats]) -> None:
    """Print one row for each tensor, then the number of tensors with NaN or infinity."""
    rows: list[tuple[str, ...]] = [
        (
            t.name,
            t.state,
            SHORT_NAMES.get(t.dtype, t.dtype.lower()),
            f"{t.numel:,}",
            *(f"{value:.6g}" for value in (t.min, t.max, t.mean, t.norm)),
            *(f"{count:,}" for count in (t.zeros, t.nan, t.inf)),
        )
        for t in found
    ]
    numbers = ["elements", "min", "max", "mean", "norm", "zeros", "NaN", "inf"]
    columns = ["tensor", "state", "type", *numbers]
    if draws_sketches():
        columns.append("min to max")
        rows = [(*row, _sketch(t)) for row, t in zip(rows, found, strict=True)]
    print_table(columns, rows, right=numbers, whole=["type", "min to max"], rare=RARE_STATISTICS)
    odd = [t.name for t in found if t.nan or t.inf]
    if odd:
        print_line(f"{len(odd)} tensors have values that are not finite", color="red")


def _sketch(stats: TensorStats) -> str:
    """Draw the distribution of a tensor's values from the smallest to the largest in a few characters."""
    from ckpttool.analysis.stats import linear_histogram

    counts = linear_histogram(stats, SKETCH_COLUMNS)
    most = max(counts)
    return "".join(BARS[math.ceil((len(BARS) - 1) * count / most)] for count in counts) if most else ""


def _depth(report: VerifyReport) -> str:
    """Return which parts of a checkpoint were compared."""
    if not report.deep:
        return "structure and samples; --deep reads every byte"
    compared, without = report.records_checked, report.records_unrecorded
    if not without:
        return f"{compared:,} checksums; every byte read"
    where = f"{without:,} records have no checksum: of these" if compared else "no checksums recorded:"
    only = f"{where} only structure, NaN and infinity were checked"
    return f"{compared:,} checksums compared; {only}" if compared else only


def print_verify_report(report: VerifyReport) -> None:
    """Print one line for each finding, then the number of files, tensors and checksums."""
    for finding in report.findings:
        print_line(f"{finding.path}: {finding.problem}" + (f"; {finding.hint}" if finding.hint else ""))
    if not report.files:
        print_line(f"{report.location}: cannot be read as a checkpoint", color="red")
        return
    contents = f"{report.files} files, {format_size(report.nbytes)}, {report.tensors} tensors"
    count = len(report.findings)
    compared = report.deep and not report.records_unrecorded
    verdict = f"{count} finding{'s' if count > 1 else ''}" if count else "sound" if compared else "no finding"
    line = f"{report.location}: {verdict} ({contents}; {_depth(report)})"
    print_line(line, color="red" if count else "green" if compared else "yellow")
    if report.unplaced:
        shown = f"{', '.join(report.unplaced[:2])}{', ...' if len(report.unplaced) > 2 else ''}"
        problem = f"{len(report.unplaced)} files do not identify their rank or parameter ({shown}) without a manifest"
        print_line(f"note: {problem}: two of one shape that were swapped would not be noticed")
    for note in report.notes:
        print_line(f"note: {note}", color="yellow")


def print_checkpoint_json(checkpoint: Checkpoint, name: str | None) -> None:
    """Print everything except extents, or one parameter with its extents.

    Raises:
        PlanError: No parameter has that name.
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
        from ckpttool.model.selection import no_such_parameter  # a correct name does not need it

        raise no_such_parameter(c, name)


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


def print_checkpoint(checkpoint: Checkpoint, views: Sequence[str], name: str | None) -> None:
    """Print parameters, ranks, files or a map; without a view a summary, or the byte ranges of one parameter."""
    known: dict[str, Callable[[Checkpoint], None]] = {
        "params": _print_parameters, "ranks": _print_ranks, "files": _print_files, "map": print_map,
    }  # fmt: skip
    if name is not None:
        _print_parameter(checkpoint, name)
    elif not views:
        _print_summary(checkpoint)
    for number, view in enumerate(views):
        if number:
            print_line("")
        known[view](checkpoint)
    for note in (*checkpoint.notes, *checkpoint.remarks):
        print_line(f"note: {note}", color="yellow")


def _print_summary(c: Checkpoint) -> None:
    print_line(f"{c.tag}: {', '.join(title(c))}")
    version = c.deepspeed_version or "version not recorded"
    print_facts(
        [
            ("location", c.location),
            ("DeepSpeed", version if c.latest is not None else ""),
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
    print_table(
        ["group", "parameters", "elements", *columns, "optimizer"],
        rows,
        right=["parameters", "elements"],
        whole=columns,
        prose=["optimizer"],
        rare=columns[::-1],
    )


def _print_parameters(c: Checkpoint) -> None:
    rows = []
    for p in c.parameters:
        states = ", ".join(_state_label(key, s.dtype) for key, s in p.states.items())
        kind = "frozen" if p.frozen else "" if p.group == UNKNOWN_GROUP else f"group {p.group}"
        rows.append([p.name, _shape(p.shape), f"{p.numel:,}", kind, states])
    rows += [[b.name, _shape(b.state.shape), f"{b.state.numel:,}", "buffer", dtype(b.state.dtype)] for b in c.buffers]
    rows += [[alias, "", "", "tied", f"= {name}"] for alias, name in c.aliases.items()]
    print_table(
        ["parameter", "shape", "elements", "kind", "states"],
        rows,
        right=["elements"],
        whole=["shape", "kind"],
        prose=["states"],
        rare=["elements", "kind"],
    )


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
    print_table([*header, "elements", "padding", "tensors", "on disk", "files"], rows, right=right, rare=right)


def _print_files(c: Checkpoint) -> None:
    rows = [[f.name, f.kind, "all" if f.rank is None else str(f.rank), format_size(f.nbytes)] for f in c.files]
    print_table(["file", "states of", "rank", "size"], rows, right=["size"], whole=["rank"], rare=["states of"])


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
    columns = ["state", "type", "rank", "elements", "offset", "bytes", "padding", "file"]
    print_table(columns, rows, right=right, whole=["type", "rank"], rare=["padding", "type", "bytes", "offset"])


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
