"""The page of one checkpoint."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.json_report import as_plain, describe
from ckpttool.analysis.layout import layout
from ckpttool.analysis.texts import title
from ckpttool.extensions.pages.page import page
from ckpttool.messages import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.model import Checkpoint

SCRIPTS = (
    "vendor/d3-hierarchy.min.js", "layout.js", "layout_picture.js", "layout_view.js", "files.js", "checkpoint.js",
)  # fmt: skip
"""Scripts of the page."""
MAX_EXTRA = 100_000
"""Longest client state, configuration or scheduler in a page, in characters of JSON."""
MAX_ALIASES = 2_000
"""Maximum number of tied names in a page."""


def checkpoint_page(checkpoint: Checkpoint, report: VerifyReport | None = None) -> bytes:
    """Build the page of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        report: Report of ``verify``, to be shown; None if it was not run.
    """
    data = checkpoint_data(checkpoint)
    if report is not None:
        data["findings"] = as_plain(report)["findings"]
    return page("checkpoint", f"{checkpoint.tag}: {', '.join(title(checkpoint))}", data, scripts=SCRIPTS)


def notebook_frame(checkpoint: Checkpoint) -> str:
    """Return the page in a frame for a notebook, where its script cannot reach the notebook."""
    page_text = html.escape(checkpoint_page(checkpoint).decode())
    style = "width: 100%; height: 760px; border: 1px solid #8884; border-radius: 8px"
    name = html.escape(printable(checkpoint.tag, 100))
    return f'<iframe sandbox="allow-scripts" title="{name}" style="{style}" srcdoc="{page_text}"></iframe>'


def damaged_page(report: VerifyReport, files: Sequence[tuple[str, int]]) -> bytes:
    """Build the page of a directory that cannot be opened as a checkpoint.

    Args:
        report: Report of ``verify``.
        files: Names and sizes of the files that are there.
    """
    data = {"location": report.location, "findings": as_plain(report)["findings"], "files": as_plain(list(files))}
    about = f"{report.location} cannot be opened as a checkpoint"
    return page("damaged", about, data, scripts=SCRIPTS[-1:])


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the data of the page: the values of ``inspect --json`` under "checkpoint", and the layout."""
    told = as_plain(describe(checkpoint))
    found = layout(checkpoint)
    omitted = []
    for key in ("client_state", "scheduler", "data_states", "loss_scaler", "ds_config"):
        if len(json.dumps(told[key], allow_nan=False)) > MAX_EXTRA:
            told[key] = None
            omitted.append(f"{key} is too long for a page: inspect --json prints it")
    if len(told["aliases"]) > MAX_ALIASES:
        told["aliases"] = dict(list(told["aliases"].items())[:MAX_ALIASES])
        omitted.append(f"Only {MAX_ALIASES:,} tied names are listed")
    if found["folded"]:
        _fold(told, found["tensors"])
        omitted.append("The checkpoint has so many tensors that those with similar names are one block")
    if found["joined"]:
        omitted.append("The checkpoint has so many files that files of one kind are one bar; offsets count through all")
    counts = {"files": len(told.pop("files"))}  # files of the layout have the same keys
    about = ", ".join(title(checkpoint))
    return {"about": about, "checkpoint": told, "layout": found, "counts": counts, "omitted": omitted}


def _fold(told: dict[str, Any], tensors: dict[str, list[Any]]) -> None:
    """Replace the parameters of a description by the tensors of a folded layout."""
    told["buffers"] = []
    told["parameters"] = [
        {
            "name": name,
            "shape": tensors["shape"][i],
            "numel": tensors["numel"][i],
            "group": None if tensors["group"][i] == -2 else tensors["group"][i],
            "frozen": tensors["kind"][i] == "frozen",
            "states": {},
            "count": tensors["count"][i],
        }
        for i, name in enumerate(tensors["name"])
    ]
    for group in told["groups"]:
        group["count"] = len(group["parameters"])
        group["parameters"] = []
