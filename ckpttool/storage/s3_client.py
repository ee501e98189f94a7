"""Make requests to S3 with the options of an s3fs file system.

s3fs passes all bytes of all requests through one thread, its event loop. A blocking client of botocore, which s3fs is
based on too, makes the same requests in the threads that need the answers, and moves several times as many bytes.
"""

from __future__ import annotations

import io
import os
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import s3fs
from botocore import UNSIGNED
from botocore.config import Config
from botocore.session import Session
from fsspec.asyn import sync
from s3fs.errors import translate_boto_error
from s3fs.utils import ParamKwargsHelper

from ckpttool.storage.fsspec import CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

READ_BYTES = 1 << 18
"""Bytes to read from a connection at a time: urllib3 copies them twice, which is fast in the processor's cache."""
KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
"""botocore's names of credentials."""


class SingleAttemptFileSystem(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs without retries of its own: ``retry.call`` retries.

    A class of its own has a cache of instances of its own: the user's instances with the same options keep their
    retries. Source: s3fs 2026, core.py (``S3FileSystem.retries``).
    """

    retries = 1


def single_attempt(kind: type[Any]) -> type[Any]:
    """Return the class to use in the place of a file system class of S3."""
    return SingleAttemptFileSystem if kind is s3fs.S3FileSystem else kind


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add defaults for concurrent ranges and for retries by ckpttool to s3fs's options; given options take precedence.

    Raises:
        ValueError: An option has the wrong form.
    """
    config = {
        "max_pool_connections": 2 * CONNECTIONS,  # botocore's own default is 10
        "connect_timeout": 10,
        "read_timeout": 20,
        "retries": {"total_max_attempts": 1},  # retry.call retries all kinds of errors
        **dict(options.get("config_kwargs", {})),
    }
    return {**options, "config_kwargs": config}


class _Body:
    """The body of a request: a stream over a buffer, because botocore takes no buffer, and bytes would be a copy.

    Args:
        data: Its bytes.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, nbytes: int | None = None) -> memoryview:
        """Return the next bytes, at most ``nbytes``."""
        end = len(self._data) if nbytes is None or nbytes < 0 else self._at + nbytes
        found = self._data[self._at : end]
        self._at += len(found)
        return found

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at


def client_of(fs: Any) -> BlockingClient | EventLoopClient:
    """Return a client with the options of a file system.

    Args:
        fs: An instance of s3fs's class, or of a class derived from it.
    """
    own_requests = type(fs) not in {s3fs.S3FileSystem, SingleAttemptFileSystem} or fs.session is not None
    unknown = {"connector_args", "http_session_cls", "warm_up_loader_caches"} & set(fs.config_kwargs)
    return EventLoopClient(fs) if own_requests or unknown else BlockingClient(fs)


class BlockingClient:
    """Makes requests with botocore. Threads and forked processes may share it.

    Args:
        fs: The file system with the options.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._lock = threading.Lock()
        self._made: tuple[int, Any, Callable[[str, dict[str, Any]], dict[str, Any]]] | None = None

    def request(self, operation: str, **given: Any) -> dict[str, Any]:
        """Make a request; return botocore's answer.

        Args:
            operation: Name of a method of botocore's client.
            given: Its parameters, with a bytes-like object as ``Body``; those of s3fs's options that the operation has
                are added.

        Raises:
            OSError: The store refused the request; of the class that s3fs gives its code, and with botocore's error as
                its cause.
            Exception: The request failed without an answer; botocore's error.
        """
        client, known = self._client()
        parameters = {**self._fs.s3_additional_kwargs, **self._fs.req_kw, **given}
        if "Body" in given:
            parameters["Body"] = _Body(given["Body"])
        try:
            answer: dict[str, Any] = getattr(client, operation)(**known(operation, parameters))
        except Exception as error:
            translated = translate_boto_error(error)
            if translated is error:
                raise
            raise translated from error
        return answer

    def content(self, answer: dict[str, Any], buffer: memoryview) -> int:
        """Read the content of an answer into a buffer, of at least its length; return the number of bytes."""
        filled = 0
        with closing(answer["Body"]) as body:
            while count := body.readinto(buffer[filled : filled + READ_BYTES]):
                filled += count
        return filled

    def sends_checksums(self) -> bool:
        """Return whether botocore adds checksums to requests."""
        return _sends_checksums(self._client()[0])

    def _client(self) -> tuple[Any, Callable[[str, dict[str, Any]], dict[str, Any]]]:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():  # a forked process must not use these connections
                client = self._connect()
                self._made = os.getpid(), client, ParamKwargsHelper(client).filter_dict
            return self._made[1:]

    def _connect(self) -> Any:
        """Make a client as s3fs does. Source: s3fs 2026, core.py (``S3FileSystem.set_session``)."""
        fs = self._fs
        own = dict(zip((*KEYS, "endpoint_url"), (fs.key, fs.secret, fs.token, fs.endpoint_url), strict=True))
        given = dict(fs.client_kwargs)
        own = {name: value for name, value in own.items() if value is not None and value != given.get(name)}
        if "use_ssl" not in given:
            own["use_ssl"] = fs.use_ssl
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": fs.read_timeout, **fs.config_kwargs}
        if fs.anon:
            own, given = ({k: v for k, v in some.items() if k not in KEYS} for some in (own, given))
            config["signature_version"] = UNSIGNED
        return Session(**fs.kwargs).create_client("s3", config=Config(**config), **own, **given)


class EventLoopClient:
    """Makes requests with s3fs, for options that only s3fs or a class derived from it knows. Threads may share it.

    Args:
        fs: The file system.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def request(self, operation: str, **given: Any) -> dict[str, Any]:
        """Make a request; see ``BlockingClient.request``."""
        if "Body" in given:
            given["Body"] = io.BytesIO(given["Body"])
        answer: dict[str, Any] = self._fs.call_s3(operation, **given)
        return answer

    def content(self, answer: dict[str, Any], buffer: memoryview) -> int:
        """Read the content of an answer into a buffer; see ``BlockingClient.content``."""
        with closing(answer["Body"]) as body:
            data = sync(self._fs.loop, body.read)
        buffer[: len(data)] = data
        return len(data)

    def sends_checksums(self) -> bool:
        """Return whether botocore adds checksums to requests."""
        return _sends_checksums(self._fs.s3)


def _sends_checksums(client: Any) -> bool:
    return getattr(client.meta.config, "request_checksum_calculation", None) == "when_supported"


def read_content(client: BlockingClient | EventLoopClient, check: Callable[[int], object], **given: Any) -> memoryview:
    """Return the content of an object or a range of it, after a check of its number of bytes."""
    answer = client.request("get_object", **given)
    nbytes = int(answer["ContentLength"])
    try:
        check(nbytes)
    except BaseException:
        answer["Body"].close()
        raise
    buffer = np.empty(nbytes, np.uint8).data
    return buffer[: client.content(answer, buffer)]
