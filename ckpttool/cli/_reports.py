"""Reports as a person reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.cli._output import print_line, print_table
from ckpttool.sizes import format_size

if TYPE_CHECKING:
    from ckpttool.api import CopyReport
    from ckpttool.verification import VerifyReport


def print_copy_report(report: CopyReport) -> None:
    """What was written, or would be."""
    verb = "would write" if report.dry_run else "wrote"
    took = "" if report.dry_run else f" in {report.seconds:.1f} s"
    print_line(
        f"{report.out}: {verb} {report.tensors} tensors, {report.elements:,} elements, parameters in {report.dtype}, "
        f"{format_size(report.nbytes_written)}{took} (read {format_size(report.nbytes_read)})"
    )
    print_table(["file", "size"], [(f.name, format_size(f.nbytes)) for f in report.files], right=["size"])
    for alias, name in report.tied.items():
        print_line(f"{alias} is tied to {name}: stored once")
    for note in report.notes:
        print_line(f"note: {note}", color="yellow")
    if report.overflowed:
        print_line(
            f"warning: {report.overflowed:,} values are too large for {report.dtype} and became infinite; "
            "use bf16 or fp32",
            color="yellow",
        )


def print_verify_report(report: VerifyReport) -> None:
    """Every finding in a line of its own, then what was looked at."""
    for finding in report.findings:
        print_line(f"{finding.path}: {finding.problem}" + (f"; {finding.hint}" if finding.hint else ""))
    if not report.files:
        print_line(f"{report.location}: cannot be read as a checkpoint", color="red")
        return
    looked = f"{report.files} files, {format_size(report.nbytes)}, {report.tensors} tensors"
    if report.deep:
        looked += f", {report.records_checked} checksums"
        if report.records_unrecorded:
            looked += f" ({report.records_unrecorded} not recorded)"
    count = len(report.findings)
    verdict = "sound" if not count else f"{count} finding{'s' if count > 1 else ''}"
    how = "every byte read" if report.deep else "structure and samples; --deep reads every byte"
    print_line(f"{report.location}: {verdict} ({looked}; {how})", color="red" if count else "green")
