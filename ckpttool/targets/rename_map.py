"""Read a file of new names of tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ckpttool.errors import ArgumentError, LayoutError
from ckpttool.messages import brief
from ckpttool.storage import local_path, open_storage, without_credentials

MAX_BYTES = 1 << 26
"""Maximum size of the file."""


def read_rename_map(
    table: Mapping[str, str] | str | os.PathLike[str] | None, options: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return new names by old ones.

    Args:
        table: The names, the path or URL of a JSON file of them, or None.
        options: Options of the fsspec class of a URL.

    Raises:
        ArgumentError: The table is malformed.
        LayoutError: The file is not a JSON object of texts, or has a name twice.
        StorageError: The file cannot be read.
    """
    if table is None:
        return {}
    if isinstance(table, Mapping):
        if not _is_table(table):
            raise ArgumentError("rename_map", f"is {brief(table)}, not names by names", "write {'old': 'new'}")
        return table
    path = os.fspath(table)
    storage = open_storage(path, options)
    shown = without_credentials(local_path(path))
    with storage.open(shown) as reader:
        if reader.nbytes > MAX_BYTES:
            raise LayoutError(shown, f"has {reader.nbytes:,} bytes, too many for a table of names", "check the path")
        data = reader.read(0, reader.nbytes)
    try:
        found = json.loads(data, object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        raise LayoutError(shown, f"gives {brief(str(error))} two new names", "leave one of them out") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_table(found):
        raise LayoutError(shown, "is not a JSON object of new names by old ones", 'write {"old": "new"}')
    result: Mapping[str, str] = found
    return result


class _DuplicateError(Exception):
    """A JSON object has an entry twice; the text is its key."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _DuplicateError(name)
        result[name] = value
    return result


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)
