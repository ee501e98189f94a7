"""List, read and write files on local disk, in S3 buckets and in other storages of fsspec."""

from __future__ import annotations

from ckpttool.messages import without_secrets
from ckpttool.storage.base import (
    BESIDE,
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    MARK,
    PIN,
    THINNING,
    Entry,
    PartWriter,
    RangeReader,
    Reader,
    Storage,
    StorageSpec,
    WritableStorage,
    Writer,
    find_text,
    walk,
)
from ckpttool.storage.error_texts import WAIT, ExistsError, storage_error, translate_os_errors
from ckpttool.storage.local import LOCAL, LOCAL_SPEC, LocalReader, LocalStorage, is_linked, link_into, links_below
from ckpttool.storage.opening import (
    absolute_path,
    is_url,
    local_path,
    open_storage,
    parent,
    scheme_of,
    without_credentials,
)
from ckpttool.storage.posix import copy_range, reserve, write_at
from ckpttool.storage.removal import HALF_REMOVED, aside_name, is_gone, is_half_removed
from ckpttool.storage.specs import connect

__all__ = [
    "BESIDE",
    "HALF_REMOVED",
    "LATEST",
    "LATEST_UNIVERSAL",
    "LOCAL",
    "LOCAL_SPEC",
    "MANIFEST",
    "MARK",
    "PIN",
    "THINNING",
    "WAIT",
    "Entry",
    "ExistsError",
    "LocalReader",
    "LocalStorage",
    "PartWriter",
    "RangeReader",
    "Reader",
    "Storage",
    "StorageSpec",
    "WritableStorage",
    "Writer",
    "absolute_path",
    "aside_name",
    "connect",
    "copy_range",
    "find_text",
    "is_gone",
    "is_half_removed",
    "is_linked",
    "is_url",
    "link_into",
    "links_below",
    "local_path",
    "open_storage",
    "parent",
    "reserve",
    "scheme_of",
    "storage_error",
    "translate_os_errors",
    "walk",
    "without_credentials",
    "without_secrets",
    "write_at",
]
