"""The option ``--html`` of commands: their report as a page."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

import ckpttool
from ckpttool.cli._options import JSON, RETENTION
from ckpttool.cli._output import Output, is_given, print_line, write
from ckpttool.cli.reading import VIEWS
from ckpttool.errors import ArgumentError, CkptError, StorageError
from ckpttool.execution.destination import check_file, write_file
from ckpttool.extensions.pages.catalog import catalog_page
from ckpttool.extensions.pages.checkpoint import checkpoint_page, damaged_page
from ckpttool.extensions.pages.diff import diff_page
from ckpttool.extensions.pages.page import BEGIN
from ckpttool.extensions.pages.statistics import stats_page
from ckpttool.formats import Opening, open_checkpoint, source_paths, source_storage
from ckpttool.storage import local_path, open_storage, parent, walk, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.catalog.retention import Decisions
    from ckpttool.formats import Source

STDOUT = "-"
"""The name of the standard output."""
MAX_FILES = 2_000
"""Maximum number of files in the page of a directory that cannot be opened."""


class Html(Output):
    """A page.

    Args:
        out: File to write, or STDOUT.
    """

    def __init__(self, out: str) -> None:
        self.out = out

    def check(self, context: click.Context) -> None:
        """Refuse a page that must not be written, before any work is done.

        Only a page is replaced: a mistyped name must not cost a file of a checkpoint.

        Raises:
            click.UsageError: The page and JSON or a view, a page on the terminal, or of deleted checkpoints.
            ArgumentError: The path is empty.
            StorageError: The path is a directory, or an existing file that is not a page, or it cannot be written.
        """
        command, given, out = context.command.name, context.params, self.out
        if command == "inspect" and (given["name"] or any(given[view] for view in VIEWS)):
            raise click.UsageError("choose one of --html and a view")
        if command == "prune" and not given["dry_run"]:
            raise click.UsageError("--html is for --dry-run")
        if is_given(JSON):
            raise click.UsageError("choose one of --html and --json")
        if out == STDOUT:
            if sys.stdout.isatty():
                raise click.UsageError("--html - writes to the standard output: redirect it to a file")
            return
        if not out:
            raise ArgumentError("html", "is an empty name", "name a file, such as page.html")
        options = given["storage_options"]
        storage, shown = open_storage(out, options), without_credentials(local_path(out))
        if out.endswith("/") or storage.is_dir(shown):
            raise StorageError(shown, "is a directory", "name a file, such as page.html")
        if not storage.remote and not storage.is_dir(parent(shown)):
            problem = "cannot be written: its directory does not exist"
            raise StorageError(shown, problem, f"create {parent(shown)} first")
        check_file(out, overwrite=True, options=options)
        if not storage.exists(shown):
            return
        with storage.open(shown) as reader:
            begin = reader.read(0, min(len(BEGIN), reader.nbytes))
        if begin != BEGIN.encode():
            raise StorageError(shown, "exists already and is not a page of ckpttool", "choose another name")

    def show(self, report: Any, context: click.Context) -> None:
        """Write the page atomically, in the place of an earlier one, and print its path without credentials.

        On S3 a name that ends with ``.html`` has the content type of a page, so that a browser shows it.

        Raises:
            CkptError: The checkpoint that was verified is missing or damaged, without a finding.
            StorageError: The page cannot be written.
        """
        data = PAGES[context.command.name or ""](report, context.params)
        if self.out == STDOUT:
            write(data)
            return
        path = write_file(self.out, [data], overwrite=True, options=context.params["storage_options"])
        print_line(f"{path}: wrote a page")


def _of_verify(report: VerifyReport, given: Mapping[str, Any]) -> bytes:
    """Build the page of a checkpoint with its findings, also if it cannot be opened."""
    opening = Opening(given["storage_options"], given["follow_links"])
    src, tag = given["src"], given["tag"]
    try:
        checkpoint = open_checkpoint(src, tag=tag, opening=opening, trust_names=given["trust_names"])
    except CkptError:
        if not report.findings:
            raise
        directories = _directories(src, tag, opening)
        shown = replace(report, location=without_credentials(local_path(directories[0])))
        return damaged_page(shown, _files_below(directories, opening))
    return checkpoint_page(checkpoint, report)


def _directories(src: Source, tag: str | None, opening: Opening) -> list[str]:
    """Return the directory of a tag if a source has it, or else all directories of the source."""
    paths = source_paths(src)
    if tag is None:
        return paths
    tags = [f"{path.rstrip('/')}/{tag}" for path in paths]
    return [path for path in tags if source_storage([path], opening).is_dir(local_path(path))] or paths


def _files_below(paths: Sequence[str], opening: Opening) -> list[tuple[str, int]]:
    """Return the names and sizes of the first files below some directories, if they can be listed."""
    found: list[tuple[str, int]] = []
    for path in paths:
        with contextlib.suppress(CkptError):
            entries = islice(walk(source_storage([path], opening), local_path(path)), MAX_FILES - len(found))
            found += [(name, entry.nbytes) for name, entry in entries if not entry.is_dir]
    return found


def _of_prune(report: Decisions, given: Mapping[str, Any]) -> bytes:
    """Build the page of the checkpoints under the root, with the decisions."""
    found = ckpttool.ls(given["root"], **{name: given[name] for name in ("storage_options", "follow_links")})
    return catalog_page(found, report, {rule: given[rule] for rule in RETENTION if given[rule] is not None})


PAGES: dict[str, Callable[[Any, Mapping[str, Any]], bytes]] = {
    "inspect": lambda report, _: checkpoint_page(report),
    "verify": _of_verify,
    "diff": lambda report, _: diff_page(report),
    "ls": lambda report, _: catalog_page(report),
    "prune": _of_prune,
    "stats": lambda report, _: stats_page(report),
}
"""The page of the report of each command, made with the arguments of the command."""
