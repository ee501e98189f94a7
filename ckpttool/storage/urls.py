"""From a path or URL to the storage it lies in."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ckpttool.errors import StorageError
from ckpttool.messages import without_secrets
from ckpttool.storage.base import OF_OPENING
from ckpttool.storage.local import LOCAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.storage.base import WritableStorage
    from ckpttool.storage.fsspec import RemoteStorage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|::.*://)")
"""A chain of URLs has the scheme of its first link."""
_AZURE = {"abfs", "abfss", "az", "adl", "wasb", "wasbs"}
"""In their URLs, a container stands before the "@"."""
EXTRAS = {
    "s3": "ckpttool[s3]", "s3a": "ckpttool[s3]", "gs": "ckpttool[gcs]", "gcs": "ckpttool[gcs]",
    "az": "ckpttool[azure]", "abfs": "ckpttool[azure]", "abfss": "ckpttool[azure]", "hf": "huggingface_hub",
    "sftp": "paramiko", "ssh": "paramiko", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""What to install for a scheme."""


def is_url(path: str) -> bool:
    """Whether a path lies elsewhere than on local disk."""
    return scheme_of(path) not in {"", "file", "local"}


def scheme_of(path: str) -> str:
    """The scheme of a URL in lower case; "" for a path."""
    match = _SCHEME.match(path)
    return match[1].lower() if match else ""


def local_path(path: str) -> str:
    """The path that a ``file://`` URL means; everything else as it is."""
    if scheme_of(path) not in {"file", "local"}:
        return path
    rest = path.split("://", 1)[1]
    host, slash, tail = rest.partition("/")
    if host not in {"", "localhost"}:
        raise StorageError(path, "names a host", "write file:///path for a local path")
    return unquote(slash + tail)


def parent(path: str) -> str:
    """The directory that holds a file or directory; that of a bucket is the bucket."""
    if is_url(path) and "/" not in path.split("://", 1)[1].strip("/"):
        return path
    return posixpath.dirname(path) or "."


def without_credentials(url: str) -> str:
    """A URL without the user and password in it, which still leads to the same place; see ``without_secrets``."""
    if not is_url(url) or scheme_of(url) in _AZURE:
        return url
    scheme, rest = url.split("://", 1)
    host, _, tail = rest.partition("/")
    if "@" in host:
        return f"{scheme}://{rest[len(host.rpartition('@')[0]) + 1 :]}"
    # A secret key of Amazon's may hold a slash. What follows a colon is else the number of a port.
    if "@" in tail and re.search(r"^[^\[]*:(?!\d*$)", host):
        return f"{scheme}://{tail.partition('@')[2]}"
    return url


def is_chain(url: str) -> bool:
    """Whether a URL is one of fsspec's chains, such as ``simplecache::s3://bucket/run``."""
    return is_url(url) and "::" in url


def open_storage(url: str, options: Mapping[str, Any] | None = None) -> WritableStorage:
    """The storage that a path or URL lies in.

    Args:
        url: A local path, ``file://...``, or a URL of any scheme that fsspec knows.
        options: What to tell the storage's fsspec class; nothing for local paths.

    Raises:
        StorageError: There is no such scheme, or the package for it is not installed.
    """
    if not is_url(url):
        return LOCAL
    return open_remote(url, options or {})


def open_remote(url: str, options: Mapping[str, Any]) -> RemoteStorage:
    """The storage of a URL.

    Raises:
        StorageError: There is no such scheme, or what it needs is not installed.
    """
    scheme = scheme_of(url)
    if is_chain(url):
        raise StorageError(url, "is a chain of URLs, which ckpttool does not read", "pass the last of them alone")
    # Imported for URLs alone: fsspec takes a third of the time that a small command needs.
    try:
        import fsspec
        from fsspec.core import split_protocol  # noqa: F401  part of what is installed, or not
    except ImportError:
        raise _not_installed(url, EXTRAS.get(scheme, "fsspec")) from None
    from ckpttool.storage.fsspec import RemoteStorage

    kind: type[RemoteStorage] = RemoteStorage
    given: dict[str, Any] = {"use_listings_cache": False, **{k: v for k, v in options.items() if k not in OF_OPENING}}
    try:
        if scheme in {"s3", "s3a"}:
            from ckpttool.storage.s3 import S3Storage, with_defaults

            kind, given = S3Storage, with_defaults(given)
        cls = fsspec.get_filesystem_class(scheme)
        from_url = cls._get_kwargs_from_urls(url)
        fs = cls(**{**{k: v for k, v in from_url.items() if k not in {"path", "fo"}}, **given})
    except ImportError:
        raise _not_installed(url, EXTRAS.get(scheme, f"what fsspec needs for {scheme}://")) from None
    except ValueError as error:
        if "not known" in str(error):
            raise StorageError(
                without_secrets(url), f"{scheme}:// is no storage that is known", "check the URL"
            ) from None
        if "credential" in str(error):  # adlfs asks for them at once
            from ckpttool.storage.retry import NO_CREDENTIALS

            raise StorageError(without_secrets(url), *NO_CREDENTIALS) from error
        raise StorageError(without_secrets(url), "its options do not fit", "check --storage-option") from error
    except (TypeError, OSError) as error:
        raise StorageError(without_secrets(url), "its options do not fit", "check --storage-option") from error
    return kind(fs)


def _not_installed(url: str, package: str) -> StorageError:
    return StorageError(without_secrets(url), f"needs {package}", f"pip install '{package}'")
