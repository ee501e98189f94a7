"""Save one checkpoint from many ranks atomically: readers accept only a complete directory.

This package knows ranks, files and storages; neither the content of the files nor a framework.
"""

from __future__ import annotations
