"""Read the parts of a path or URL, and open its storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError, StorageError
from ckpttool.messages import brief, without_secrets
from ckpttool.storage.base import FOLLOW_LINKS
from ckpttool.storage.local import LOCAL
from ckpttool.storage.urls import is_chain, is_url, scheme_of

if TYPE_CHECKING:
    from ckpttool.storage.base import WritableStorage
    from ckpttool.storage.fsspec import RemoteStorage


EXTRAS = {
    "s3": "ckpttool[s3]",
    "s3a": "ckpttool[s3]",
    "gs": "ckpttool[gcs]",
    "gcs": "ckpttool[gcs]",
    "az": "ckpttool[azure]",
    "abfs": "ckpttool[azure]",
    "abfss": "ckpttool[azure]",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""Package to install by scheme."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How the storages of a command are opened.

    Raises:
        ArgumentError: The options of the storage contain the other one.
    """

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # it may hold secrets
    """Options for the fsspec class of URLs: keys, an endpoint, ... None: fsspec's own configuration."""
    follow_links: bool = False
    """Follow symbolic links of a local checkpoint that leave its root, to any file that the user may read."""

    def __post_init__(self) -> None:
        if not isinstance(self.storage_options, Mapping | None):
            problem = f"is {brief(self.storage_options)}, not a mapping"
            raise ArgumentError("storage_options", problem, 'pass a dict, such as {"endpoint_url": "http://..."}')
        given = self.storage_options or {}
        endpoint = given.get("endpoint_url") or (given.get("client_kwargs") or {}).get("endpoint_url")
        if isinstance(endpoint, str) and "://" not in endpoint:
            problem = "has an endpoint_url without http:// or https://"  # it may contain a secret
            raise ArgumentError("storage_options", problem, "write http://HOST:PORT, or https://HOST")
        if FOLLOW_LINKS in (self.storage_options or {}):
            problem = f"contains {FOLLOW_LINKS}, which is an option of ckpttool and not of a storage"
            hint = f"pass {FOLLOW_LINKS} as a parameter of its own"
            raise ArgumentError("storage_options", problem, hint, (FOLLOW_LINKS,))


def open_storage(url: str, options: Mapping[str, Any] | None = None) -> WritableStorage:
    """Open the storage of a path or URL.

    Args:
        url: A local path, ``file://...``, or a URL of any scheme of fsspec.
        options: Options of the fsspec class; ignored for local paths.

    Raises:
        StorageError: The scheme is unknown, or its package is not installed.
    """
    if not is_url(url):
        return LOCAL
    return open_remote(url, options or {})


def open_remote(url: str, options: Mapping[str, Any]) -> RemoteStorage:
    """Open the storage of a URL.

    Raises:
        StorageError: The scheme is unknown, or its package is not installed.
    """
    scheme = scheme_of(url)
    if is_chain(url):
        raise StorageError(url, "is a chain of URLs, which ckpttool does not read", "pass only the last of them")
    # Imported only for URLs: the import takes a third of the time of a small command.
    try:
        import fsspec
        from fsspec.core import split_protocol  # noqa: F401  fails with an incomplete installation
    except ImportError:
        raise _not_installed(url, EXTRAS.get(scheme, "fsspec")) from None
    from ckpttool.storage.fsspec import RemoteStorage
    from ckpttool.storage.retry import NO_CREDENTIALS, OPTIONS, bad_options

    kind: type[RemoteStorage] = RemoteStorage
    given: dict[str, Any] = {"use_listings_cache": False, **options}
    try:
        cls = fsspec.get_filesystem_class(scheme)
        if scheme in {"s3", "s3a"}:
            from ckpttool.storage.s3 import S3Storage
            from ckpttool.storage.s3_client import single_attempt, with_defaults

            kind, given, cls = S3Storage, with_defaults(given), single_attempt(cls)
        from_url = cls._get_kwargs_from_urls(url)
        fs = cls(**{**{k: v for k, v in from_url.items() if k not in {"path", "fo"}}, **given})
    except ImportError:
        raise _not_installed(url, EXTRAS.get(scheme, f"the package of fsspec for {scheme}://")) from None
    except ValueError as error:
        if "not known" in str(error):
            raise StorageError(without_secrets(url), f"{scheme}:// is not a known storage", "check the URL") from None
        if "credential" in str(error):  # adlfs requires credentials in its constructor
            raise StorageError(without_secrets(url), *NO_CREDENTIALS, OPTIONS) from error
        raise bad_options(without_secrets(url), error) from error
    except (TypeError, OSError) as error:
        raise bad_options(without_secrets(url), error) from error
    return kind(fs)


def _not_installed(url: str, package: str) -> StorageError:
    return StorageError(without_secrets(url), f"needs {package}", f"pip install '{package}'")
