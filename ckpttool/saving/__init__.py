"""Saves of many ranks into one directory, which is a checkpoint when all of it is there and not before.

Knows ranks, files and storages; not what is in the files, and no framework.
"""

from __future__ import annotations
