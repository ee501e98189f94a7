"""Print reports as text."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from ckpttool.cli._output import print_line, print_table, terminal_width, write_bytes
from ckpttool.dtypes import SHORT_NAMES
from ckpttool.units import format_age, format_ago, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool import AverageReport, ConsolidateReport, ConvertReport, CpReport
    from ckpttool.analysis.diff import Difference, DiffReport
    from ckpttool.analysis.stats import TensorStats
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.api._run import Written
    from ckpttool.catalog.entries import Catalog, CatalogEntry
    from ckpttool.catalog.retention import Decision
    from ckpttool.commit.marks import Pin
    from ckpttool.execution.read_checks import ReadReport


WHO_LOADS = {"zero": "load_checkpoint", "universal": "load_universal", "dcp": "torch.distributed.checkpoint"}
"""Name of each target's loader."""
WIDE = 140
"""Columns of a terminal that has room for a small histogram in each row of statistics."""
SKETCH_COLUMNS = 16
"""Characters of that histogram."""
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
    """Return the line that says what was done, how long it took, and how many bytes were written and read."""
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
    """Print the digest, the notes, the comparisons with checksums, and what a dry run found a run to need."""
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


def write_page(page: dict[str, Any], data: bytes, given: dict[str, Any]) -> None:
    """Write the page of ``--html``, and print its path; with "-", write it to the standard output alone.

    Args:
        page: Options of the page.
        data: Its bytes.
        given: Options of the command.

    Raises:
        StorageError: The file exists and must not be replaced, or cannot be written.
    """
    from ckpttool.api import _pages

    if page["html"] == _pages.STDOUT:
        write_bytes(data)
        return
    written = _pages.write_page(
        page["html"], data, overwrite=page["overwrite"], storage_options=given["storage_options"]
    )
    print_line(f"{written}: wrote a page")


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
    now = time.time()
    rows = [
        (
            entry.name,
            _kind(entry),
            _number(entry.world_size),
            _number(entry.step),
            format_size(entry.nbytes),
            "" if entry.saved is None else format_age(now - entry.saved),
            _state(entry),
        )
        for entry in found.entries
    ]
    right = ["ranks", "step", "size", "age"]
    print_table(["checkpoint", "format", "ranks", "step", "size", "age", "state"], rows, right=right)
    for problem in found.problems:
        print_line(f"note: {problem}", color="yellow")


def _state(entry: CatalogEntry) -> str:
    if entry.whole:
        state = "latest" if entry.latest else "whole"
    elif entry.is_root:
        state = entry.problem or ""
    else:
        state = f"{'latest, ' if entry.latest else ''}torn: {entry.problem}"
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
    print_table(["checkpoint", "", "size", "why"], rows, right=["size"])
    gone, thinned = (sum(map(test, decisions)) for test in (lambda d: not d.keep, lambda d: d.thin is not None))
    would = "would be " if dry_run else ""
    also = f", {thinned} {would}thinned" if thinned else ""
    freed = format_size(sum(d.freed for d in decisions))
    print_line(f"{gone} of {len(decisions)} {would}removed{also}, {freed} freed")
    if thinned and dry_run:
        print_line(
            "note: a dry run reads no tensors: a checkpoint whose values are damaged stays whole", color="yellow"
        )


def _verb(decision: Decision, *, dry_run: bool) -> str:
    if not decision.keep:
        return "would go" if dry_run else "removed"
    if decision.thin is not None:
        return f"{'would be thin' if dry_run else 'thinned'}, {decision.thin}"
    return "stays"


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
        print_table(["tensor", "state", "differs in", "a", "b", "differing", "max abs", "max rel"], rows, right=right)
    if report.others:
        print_table(["value", "a", "b"], [(o.name, o.a or "-", o.b or "-") for o in report.others])
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
    if terminal_width() >= WIDE:
        columns.append("min to max")
        rows = [(*row, _sketch(t)) for row, t in zip(rows, found, strict=True)]
    print_table(columns, rows, right=numbers)
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
    """Return what of a checkpoint was compared, and what was not."""
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
        problem = (
            f"{len(report.unplaced)} files do not identify their rank or parameter ({shown}), and there is no manifest"
        )
        print_line(f"note: {problem}: two of one shape that were swapped would not be noticed")
