"""Write the pages of commands with ``--html``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint


def check_page(out: str, *, overwrite: bool, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a page that must not be written, before any work is done.

    Raises:
        ArgumentError: The path is empty.
        StorageError: The file exists, and ``overwrite`` is False.
    """
    from ckpttool.execution.output.destination import check_file

    check_file(out, overwrite=overwrite, options=storage_options)


def write_page(out: str, data: bytes, *, overwrite: bool, storage_options: Mapping[str, Any] | None) -> str:
    """Write a page atomically; return its path or URL without credentials.

    Raises:
        StorageError: The file exists and ``overwrite`` is False, or it cannot be written.
    """
    from ckpttool.execution.output.destination import write_file

    return write_file(out, [data], overwrite=overwrite, options=storage_options)


def page_of_source(
    src: Source, *, verify: bool, tag: str | None = None, trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[bytes, VerifyReport | None]:  # fmt: skip
    """Build the page of a checkpoint.

    Args:
        src: As for ``inspect``.
        verify: Whether to verify it too. Then there is a page of findings even if the checkpoint cannot be opened.
        tag: As for ``inspect``.
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Returns:
        The page, and what ``verify`` found.

    Raises:
        CkptError: There is no sound checkpoint, and ``verify`` is False.
    """
    from ckpttool.analysis.pages.checkpoint import checkpoint_page, damaged_page
    from ckpttool.api.inspect import inspect

    report = None
    if verify:
        from ckpttool.api.verify import verify as run_verify

        report = run_verify(src, tag=tag, trust_names=trust_names, storage_options=storage_options)
    try:
        checkpoint: Checkpoint = inspect(src, tag=tag, trust_names=trust_names, storage_options=storage_options)
    except CkptError:
        if report is None or not report.findings:
            raise
        return damaged_page(report), report
    return checkpoint_page(checkpoint, report), report
