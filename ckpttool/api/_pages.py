"""Write the pages of commands with ``--html``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError, CkptError, StorageError
from ckpttool.formats import Opening, open_checkpoint, source_paths, source_storage
from ckpttool.storage import local_path, open_storage, parent, without_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.catalog.listing import Catalog
    from ckpttool.catalog.retention import Decision
    from ckpttool.formats import Source

STDOUT = "-"
"""The name of the standard output."""
MAX_FILES = 2_000
"""Maximum number of files in the page of a directory that cannot be opened."""


def check_page(out: str, *, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a page that must not be written, before any work is done.

    Only a page is replaced: a mistyped name must not cost a file of a checkpoint.

    Raises:
        ArgumentError: The path is empty.
        StorageError: The path is a directory, or an existing file that is not a page.
    """
    from ckpttool.execution.destination import check_file
    from ckpttool.pages import BEGIN

    if out == STDOUT:
        return
    if not out:
        raise ArgumentError("html", "is an empty name", "name a file, such as page.html")
    storage, shown = open_storage(out, storage_options), without_credentials(local_path(out))
    if out.endswith("/") or storage.is_dir(shown):
        raise StorageError(shown, "is a directory", "name a file, such as page.html")
    if not storage.remote and not storage.is_dir(parent(shown)):
        raise StorageError(shown, "cannot be written: its directory does not exist", f"create {parent(shown)} first")
    check_file(out, overwrite=True, options=storage_options)
    if not storage.exists(shown):
        return
    with storage.open(shown) as reader:
        begin = reader.read(0, min(len(BEGIN), reader.nbytes))
    if begin != BEGIN.encode():
        raise StorageError(shown, "exists already and is not a page of ckpttool", "choose another name")


def write_page(out: str, data: bytes, *, storage_options: Mapping[str, Any] | None) -> str:
    """Write a page atomically, in the place of an earlier one; return its path or URL without credentials.

    On S3 a name that ends with ``.html`` has the content type of a page, so that a browser shows it.

    Raises:
        StorageError: It cannot be written.
    """
    from ckpttool.execution.destination import write_file

    return write_file(out, [data], overwrite=True, options=storage_options)


def page_of_source(
    src: Source,
    report: VerifyReport | None = None,
    *,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    trust_names: bool = False,
) -> bytes:
    """Build the page of a checkpoint.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        report: Result of ``verify``: the page shows its findings, also for a checkpoint that cannot be opened.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.

    Raises:
        CkptError: The checkpoint is missing or damaged, without a finding.
    """
    from ckpttool.pages.checkpoint import checkpoint_page, damaged_page

    opening = Opening(storage_options, follow_links)
    try:
        checkpoint = open_checkpoint(src, tag=tag, opening=opening, trust_names=trust_names)
    except CkptError:
        if report is None or not report.findings:
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
    from itertools import islice

    from ckpttool.storage import local_path, walk

    found: list[tuple[str, int]] = []
    for path in paths:
        with contextlib.suppress(CkptError):
            entries = islice(walk(source_storage([path], opening), local_path(path)), MAX_FILES - len(found))
            found += [(name, entry.nbytes) for name, entry in entries if not entry.is_dir]
    return found


def page_of_catalog(found: Catalog, decisions: Sequence[Decision] = (), rules: Mapping[str, Any] = {}) -> bytes:
    """Build the page of the checkpoints under a root.

    Args:
        found: The checkpoints.
        decisions: Decisions of ``prune`` to show beside them.
        rules: The rules of these decisions, by the parameters of ``prune``.
    """
    from ckpttool.analysis.json_report import as_plain
    from ckpttool.pages import CHARTS, CHARTS_STYLES, page
    from ckpttool.units import format_duration

    given = dict(rules)
    if isinstance(seconds := given.get("keep_for"), int | float):
        given["keep_for"] = format_duration(seconds)
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    steps = [None if entry.order[0] < 0 else entry.order[0] for entry in found.entries]
    states = [entry.condition for entry in found.entries]
    plain = {"catalog": as_plain(found), "decisions": as_plain(decisions)}
    data = {**plain, "steps": steps, "states": states, "rules": shown}
    about = f"{found.root}: {len(found.entries)} checkpoints"
    return page("catalog", about, data, scripts=(*CHARTS, "catalog.js"), styles=CHARTS_STYLES)
