"""The formats: a marker or names of files, and the reader of each.

To add a format, write a module with a function of the type of ``Format.read`` and add a line to ``FORMATS``.
"""

from __future__ import annotations

import importlib
import posixpath
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.layouts import DCP, DCP_PAIR
from ckpttool.formats.zero.files import RUN_STATE

if TYPE_CHECKING:
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


class Format(NamedTuple):
    """One source format."""

    reader: str
    """Module and function of the reader, imported when a checkpoint of the format is read."""
    tagged: bool
    """Whether a root may contain several checkpoints, each in the directory of its tag."""
    marker: str = ""
    """A file (or, with a final slash, a directory) that only this format has; "" if file names identify it."""
    last: tuple[str, ...] = ()
    """Files to write last, because readers take them as the sign of a complete checkpoint."""

    def matches(self, storage: Storage, directory: str) -> bool:
        """Return whether the directory has the format's marker."""
        path = posixpath.join(directory, self.marker.rstrip("/"))
        return bool(self.marker) and (storage.is_dir(path) if self.marker.endswith("/") else storage.exists(path))

    def read(self, storage: Storage, location: Location, report: Report) -> Checkpoint | None:
        """Read the layout of a checkpoint; None if the directory has another format.

        Raises:
            CkptError: The checkpoint is damaged, unless ``report`` collects the finding and reading can continue.
        """
        module, _, function = self.reader.partition(":")
        found: Checkpoint | None = getattr(importlib.import_module(module), function)(storage, location, report)
        return found


FORMATS = (
    Format("ckpttool.formats.dcp:read_dcp", tagged=False, marker=DCP, last=(DCP,)),
    Format("ckpttool.formats.dcp:read_dcp_pair", tagged=False, marker=DCP_PAIR),
    Format("ckpttool.formats.rank_files:read_rank_files", tagged=False),
    Format("ckpttool.formats.shards:read_shards", tagged=False),
    Format(
        "ckpttool.formats.weights:read_weights",
        tagged=False,
        last=("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ),
    Format("ckpttool.formats.universal:read_universal", tagged=True, marker="zero/"),
    Format("ckpttool.formats.torch_run:read_torch_run", tagged=True, marker=RUN_STATE),
    Format("ckpttool.formats.thin:read_thin", tagged=True, marker=RUN_STATE),
    Format("ckpttool.formats.zero.reader:read_zero", tagged=True),
)
"""In the order of the attempts: formats with a marker first."""


def formats_with_tags(*, tagged: bool) -> list[Format]:
    """Return the formats whose checkpoints have a tag, or the formats without tags."""
    return [f for f in FORMATS if f.tagged == tagged]
