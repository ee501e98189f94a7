"""Read the parts of a path or URL."""

from __future__ import annotations

import posixpath
import re

from ckpttool.errors import StorageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|::.*://)")
"""Scheme of a URL; in a chain of URLs, the first one's."""
_AZURE = {"abfs", "abfss", "az", "adl", "wasb", "wasbs"}
"""Schemes whose URLs have a container before the "@"."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL of a remote storage."""
    return scheme_of(path) not in {"", "file", "local"}


def scheme_of(path: str) -> str:
    """Return the scheme of a URL in lower case; "" for a path."""
    match = _SCHEME.match(path)
    return match[1].lower() if match else ""


def local_path(path: str) -> str:
    """Return the path of a ``file://`` URL; other paths and URLs unchanged."""
    if scheme_of(path) not in {"file", "local"}:
        return path
    rest = path.split("://", 1)[1]
    host, slash, tail = rest.partition("/")
    if host not in {"", "localhost"}:
        raise StorageError(path, "names a host", "write file:///path for a local path")
    from urllib.parse import unquote  # importing it takes longer than opening a local file

    return unquote(slash + tail)


def absolute_path(path: str) -> str:
    """Return a local path as an absolute one, without ``file://``; a URL without a slash at the end."""
    return path.rstrip("/") if is_url(path) else posixpath.abspath(local_path(path))


def parent(path: str) -> str:
    """Return the parent directory; for a bucket the bucket itself."""
    if is_url(path) and "/" not in path.split("://", 1)[1].strip("/"):
        return path
    return posixpath.dirname(path) or "."


def whole_path(path: str) -> str:
    """Return a path that ends with a name: "." and "..", which hide it, made absolute, and without a final slash."""
    hidden = not is_url(path) and posixpath.basename(path) in {"", ".", ".."}
    return posixpath.abspath(path) if hidden else path


def without_credentials(url: str) -> str:
    """Remove user and password from a URL, so that it still names the same file; compare ``without_secrets``."""
    if not is_url(url) or scheme_of(url) in _AZURE:
        return url
    scheme, rest = url.split("://", 1)
    host, _, tail = rest.partition("/")
    if "@" in host:
        return f"{scheme}://{rest[len(host.rpartition('@')[0]) + 1 :]}"
    # A secret key of AWS may contain a slash. Otherwise the text after a colon is a port number.
    if "@" in tail and re.search(r"^[^\[]*:(?!\d*$)", host):
        return f"{scheme}://{tail.partition('@')[2]}"
    return url


def is_chain(url: str) -> bool:
    """Return whether a URL is a chain of fsspec, such as ``simplecache::s3://bucket/run``."""
    return is_url(url) and "::" in url
