"""Save one checkpoint from many ranks atomically: readers accept the directory only when all files are there.

This package knows ranks, files and storages; neither the content of the files nor a framework.
"""

from __future__ import annotations
