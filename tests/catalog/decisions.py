"""Entries of checkpoints with given fields, the decisions about them, and small roots with real checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalog.listing import CatalogEntry
from ckpttool.catalog.retention import Rules, decide
from ckpttool.commit.manifest import Manifest, read_manifest
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST
from tests.saving.checkpoints import save_version

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.catalog.retention import Decision

NOW = 1_000_000_000.0
DAY = 86400.0


def entry(step: int, **changes: Any) -> CatalogEntry:
    """Return the entry of a whole checkpoint, with changed fields."""
    values: dict[str, Any] = {
        "name": f"step{step}", "path": f"run/step{step}", "format": "zero", "stage": 2, "world_size": 2, "step": step,
        "nbytes": 10, "modified": NOW - 100 * DAY, "whole": True, "problem": None, "latest": False, "link": None,
        "metrics": {}, "saved": NOW - (100 - step) * DAY, "of_run": True,
    }  # fmt: skip
    return CatalogEntry(**{**values, **changes})


def thin_entry(step: int, dtype: str = "bf16") -> CatalogEntry:
    """Return the entry of a thin checkpoint."""
    return entry(step, format="thin", stage=None, thin=dtype, of_run=False)


class Keeping(NamedTuple):
    """The rules of an action that keeps the weights of a checkpoint."""

    dtype: str
    every: int | None


def _rules(given: dict[str, Any]) -> Rules:
    """Return rules, of which ``thin`` and ``thin_every`` are of an action."""
    dtype, every = given.pop("thin", None), given.pop("thin_every", None)
    action: Any = None if dtype is every is None else Keeping(dtype or "bf16", every)
    return Rules(**given, action=action)


def decided(entries: list[CatalogEntry], **rules: Any) -> dict[int | None, Decision]:
    """Return the decisions by step."""
    return {d.entry.step: d for d in decide(entries, _rules(rules), root="run", now=NOW)}


def decisions(entries: list[CatalogEntry], **rules: Any) -> list[tuple[int | None, str]]:
    """Return for each step whether it stays or goes, or the type of the weights that stay."""
    found = decide(entries, _rules(rules), root="run", now=NOW)
    assert all(d.reason for d in found)
    return [(d.entry.step, "goes" if not d.keep else d.thin or "stays") for d in found]


def set_step(directory: Path, step: int, **changes: Any) -> None:
    """Write another step, and other fields, into the manifest of a checkpoint."""
    manifest = read_manifest(LOCAL, str(directory))
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    (directory / MANIFEST).write_bytes(Manifest(**{**fields, "step": step, **changes}).to_json())


def four_commits(root: Path) -> Path:
    """Save step1 to step4 in a root; return it."""
    for number in (1, 2, 3, 4):
        save_version(LOCAL, str(root), Alone(), f"step{number}", 0)
        set_step(root / f"step{number}", number)
    return root
