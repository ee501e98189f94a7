"""Files in the place of a checkpoint's: pointers of git-lfs and git-annex, error pages, compressed files, dead links.

An error about such a file is replaced by one that names the stand-in, with the command that brings the content.

Source: git-lfs, docs/spec.md (the first line of a pointer); git-annex, doc/internals/pointer_file.mdwn; RFC 1952 and
8878 (the first bytes of gzip and Zstandard).
"""

from __future__ import annotations

import os
import posixpath
import re
from functools import cached_property
from typing import TYPE_CHECKING

from ckpttool.errors import CkptError, ContainerError, LayoutError, LinkError
from ckpttool.storage import dead_links, is_link, leading_nowhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.formats.fields import Report
    from ckpttool.storage import Storage

ANOTHER_TAG = re.compile(r"\b(choose|use) another tag\b")
OR_ANOTHER_TAG = re.compile(r",? or (choose|use) another tag\b")
ONE_TAG = "choose one with tag: "
"""Start of a list of tags in a hint."""
HEAD_BYTES = 512
"""Most bytes of a file that are compared."""
RELINK = "copy the file to which it leads, or remove the link"
"""Hint for a dead link of unknown origin."""
STAND_INS = (
    (rb"version https://git-lfs\.github\.com/spec/", "is a pointer of git-lfs, not the file", "run: git lfs pull"),
    (rb"[./]*(\.git)?/annex/objects/", "is a pointer of git-annex, not the file", "run: git annex get"),
    (rb"\s*(<!doctype html|<html)", "is an HTML page, such as an error of a server", "download the file again"),
    (rb"\s*(<\?xml|<error>)", "is an XML document, such as an error of a server", "download the file again"),
    (rb"\x1f\x8b", "is compressed with gzip", "decompress it, under its name without .gz"),
    (rb"\x28\xb5\x2f\xfd", "is compressed with Zstandard", "decompress it, under its name without .zst"),
)
"""Patterns of the first bytes of a file, its description, and the next step."""


class Explainer:
    """Replaces errors about stand-ins, and names another tag; the same error is replaced by the same one.

    Args:
        storage: Storage of the checkpoint.
        report: Receives the findings, with those errors replaced.
        other_tag: Returns a tag of the same root that is whole; "" if it finds no whole one, None without another
            tag.
    """

    def __init__(self, storage: Storage, report: Report, other_tag: Callable[[], str | None]) -> None:
        self._storage, self._report, self._find_other = storage, report, other_tag
        self._replaced: dict[int, tuple[CkptError, CkptError]] = {}

    def __call__(self, error: CkptError) -> None:
        """Report a finding."""
        self._report(self.explain(error))

    def explain(self, error: CkptError) -> CkptError:
        """Return ``explained`` of an error; the same object for the same error, and for one that it has returned."""
        if id(error) not in self._replaced:
            better = error if getattr(error, "directories", ()) else self._with_tag(explained(self._storage, error))
            self._replaced |= {id(error): (error, better), id(better): (better, better)}
        return self._replaced[id(error)][1]

    def _with_tag(self, error: CkptError) -> CkptError:
        """Return the error with a tag that is whole, if its hint says to choose one; without the advice if none is."""
        choose = ANOTHER_TAG.search(error.hint)
        if type(error).__init__ is not CkptError.__init__ or not (choose or ONE_TAG in error.hint):
            return error
        other, hint = self._other, error.hint
        if choose is None:
            several = ", " in hint.partition(ONE_TAG)[2]
            hint = f"{hint} (newest whole one: {other})" if other and several else hint
        elif other is None:
            hint = OR_ANOTHER_TAG.sub("", hint)
        elif other:
            hint = ANOTHER_TAG.sub(lambda found: f'{found[1]} tag="{other}", which is whole', hint, count=1)
        else:
            return error
        options = (*error.options, "tag") if other and "tag" not in error.options else error.options
        return type(error)(error.path, error.problem, hint, options)

    @cached_property
    def _other(self) -> str | None:
        return self._find_other()


def explained(storage: Storage, error: CkptError) -> CkptError:
    """Return an error that names a stand-in at the path of the given error; else the given one."""
    if isinstance(error, LinkError):
        return error
    if is_dead(storage, error.path):
        return ContainerError(error.path, leading_nowhere(error.path), _next_step(error.path) or RELINK)
    if not isinstance(error, ContainerError | LayoutError):
        return error  # the file cannot be read: no second request
    if not storage.is_dir(error.path):
        return _of_content(storage, error) if storage.exists(error.path) else error
    dead = [posixpath.join(error.path, name) for name in dead_links(storage, error.path)]
    if not dead:
        return error
    more = f", and {len(dead) - 1} links more" if len(dead) > 1 else ""
    problem = f"{error.problem}; {posixpath.basename(dead[0])} {leading_nowhere(dead[0])}{more}"
    return type(error)(error.path, problem, _next_step(dead[0]) or error.hint, error.options)


def is_dead(storage: Storage, path: str) -> bool:
    """Return whether a path is a link that leads nowhere, or to itself."""
    return is_link(storage, path) and not os.path.exists(path)


def _of_content(storage: Storage, error: CkptError) -> CkptError:
    try:
        with storage.open(error.path) as reader:
            head = reader.read(0, min(reader.nbytes, HEAD_BYTES))
    except CkptError:
        return error
    for pattern, problem, hint in STAND_INS:
        if re.match(pattern, head, re.IGNORECASE):
            return ContainerError(error.path, problem, hint)
    return error


def _next_step(path: str) -> str:
    """Return what brings the file of a dead link; "" if that is unknown."""
    target = os.readlink(path)
    if ".git/annex/objects/" in target:
        return "run: git annex get"
    blobs = "copy the directory blobs of the Hugging Face cache too, or copy with the links followed (cp -rL)"
    return blobs if "/blobs/" in target else ""
