"""Print reports of ``delta`` and ``apply``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.cli._output import print_line
from ckpttool.cli._reports import print_checks, print_written
from ckpttool.units import format_size

if TYPE_CHECKING:
    from ckpttool.api.apply import ApplyReport
    from ckpttool.api.delta import DeltaReport

SHOWN_NAMES = 5
"""Names of new or removed tensors in one line."""


def print_delta_report(report: DeltaReport) -> None:
    """Print what differs, and the written file."""
    percent = 100 * report.changed / max(report.elements, 1)
    print_line(
        f"{report.changed:,} of {report.elements:,} elements differ in {report.dtype} ({percent:.2f} %), in "
        f"{report.changed_tensors} of {report.tensors} tensors, {report.whole_tensors} of them stored whole "
        f"(read {format_size(report.nbytes_read)})"
    )
    for what, names in (("only in B", report.added), ("only in A", report.removed)):
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            print_line(f"{what}: {', '.join(names[:SHOWN_NAMES])}{more}")
    if report.dry_run:
        print_line(f"{report.out}: would write {format_size(report.nbytes_payload)} of indices and values")
    for file in report.files:
        print_line(f"{report.out}/{file.name}: wrote {format_size(file.nbytes)} in {report.seconds:.1f} s")
    if report.digest is not None:
        print_line(f"{report.digest}: the same of B and of the delta applied to A", color="green")
    for note in report.notes:
        print_line(f"note: {note}", color="yellow")
    if report.overflowed:
        problem = f"{report.overflowed:,} values are too large for {report.dtype} and became infinite"
        print_line(f"warning: {problem}; use bf16 or fp32", color="yellow")
    for checks in report.checks:
        print_checks(checks)


def print_apply_report(report: ApplyReport) -> None:
    """Print the written files, or those planned by a dry run."""
    verb = "would write" if report.dry_run else "wrote"
    took = "" if report.dry_run else f" in {report.seconds:.1f} s"
    count = f"{len(report.deltas)} delta{'s' if len(report.deltas) > 1 else ''}"
    print_line(
        f"{report.out}: {verb} {report.a} with {count} applied, {report.tensors} tensors, "
        f"{report.elements:,} elements, most in {report.dtype}, {format_size(report.nbytes_written)}{took}"
    )
    print_line(f"{report.ends}: the weights that {report.deltas[-1]} ends at", color="green")
    print_written(report)
