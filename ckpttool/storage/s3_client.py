"""Make requests to S3 with the options of an s3fs file system.

s3fs passes all bytes of all requests through one thread, its event loop. A blocking client of botocore, which s3fs is
based on too, makes the same requests in the threads that need the answers. Measured with 3.5 GB on two cores: uploads
take 0.7 times as long, downloads 0.8 times.
"""

from __future__ import annotations

import io
import os
import threading
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import s3fs
import urllib3
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
TIMEOUTS = ("connect_timeout", "read_timeout")
"""Options in seconds; 0 stands for no limit in s3fs."""
KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
"""botocore's names of credentials."""


class SingleAttemptFileSystem(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs without retries of its own: ``retry.call`` retries.

    A class of its own has a cache of instances of its own: the user's instances with the same options keep their
    retries. Source: s3fs 2026, core.py (``S3FileSystem.retries``).
    """

    retries = 1

    @cached_property
    def blocking(self) -> BlockingClient:
        """The client of all storages with these options: a client of botocore takes 11 MB, and 0.1 s to make."""
        return BlockingClient(self)


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
    of_the_user = type(fs) is not SingleAttemptFileSystem or fs.storage_options.get("session") is not None
    of_s3fs_alone = {"connector_args", "http_session_cls", "warm_up_loader_caches"} & set(fs.config_kwargs)
    return EventLoopClient(fs) if of_the_user or of_s3fs_alone else fs.blocking


class _Connected(NamedTuple):
    """A client of botocore that is connected in this process."""

    client: Any
    known: Callable[[str, dict[str, Any]], dict[str, Any]]
    """Removes the parameters that an operation lacks."""
    slots: threading.Semaphore
    """Bounds the connections: botocore would make more than ``max_pool_connections``, and close them after use."""


class BlockingClient:
    """Makes requests with botocore. Threads and forked processes may share it.

    Args:
        fs: The file system with the options.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._made: _Connected | None = None

    def request(self, operation: str, **given: Any) -> dict[str, Any]:
        """Make a request; return botocore's answer.

        Args:
            operation: Name of a method of botocore's client.
            given: Its parameters, with a bytes-like object as ``Body``; options of s3fs are added if the operation has
                such a parameter.

        Raises:
            OSError: The store refused the request; of the class that s3fs gives its code, and with botocore's error as
                its cause.
            Exception: The request failed without an answer; botocore's error.
        """
        connected = self._connected()
        with connected.slots:
            return self._ask(connected, operation, given)

    def read(self, check: Callable[[int], object], **given: Any) -> memoryview:
        """Return the content of an object or a range of it, after a check of its number of bytes.

        Args:
            check: Called with the number of bytes before they are read; may raise an error.
            given: Parameters of ``get_object``.

        Raises:
            Exception: As ``request``, or the connection broke.
        """
        connected = self._connected()
        with connected.slots:
            answer = self._ask(connected, "get_object", given)
            with closing(answer["Body"]) as body:
                check(answer["ContentLength"])
                buffer = np.empty(answer["ContentLength"], np.uint8).data
                filled = 0
                while count := body.readinto(buffer[filled : filled + READ_BYTES]):
                    filled += count
        return buffer[:filled]

    def _ask(self, connected: _Connected, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        parameters = {**self._fs.s3_additional_kwargs, **self._fs.req_kw, **given}
        if "Body" in given:
            parameters["Body"] = _Body(given["Body"])
        known = connected.known(operation, {k: v for k, v in parameters.items() if v is not None})
        try:
            answer: dict[str, Any] = getattr(connected.client, operation)(**known)
        except Exception as error:
            translated = translate_boto_error(error)
            if translated is error:
                raise
            raise translated from error
        return answer

    def sends_checksums(self) -> bool:
        """Return whether botocore adds checksums to requests."""
        return _sends_checksums(self._connected().client)

    def _connected(self) -> _Connected:
        if self._process != os.getpid():  # a forked process must not use these connections; the lock may be held
            self._begin()
        with self._lock:
            if self._made is None:
                client = self._connect()
                slots = threading.Semaphore(max(1, client.meta.config.max_pool_connections))
                self._made = _Connected(client, ParamKwargsHelper(client).filter_dict, slots)
            return self._made

    def _connect(self) -> Any:
        """Make a client as s3fs does. Source: s3fs 2026, core.py (``S3FileSystem.set_session``)."""
        fs = self._fs
        own = dict(zip((*KEYS, "endpoint_url"), (fs.key, fs.secret, fs.token, fs.endpoint_url), strict=True))
        given = dict(fs.client_kwargs)
        own = {name: value for name, value in own.items() if value is not None and value != given.get(name)}
        if "use_ssl" not in given:
            own["use_ssl"] = fs.use_ssl
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": fs.read_timeout, **fs.config_kwargs}
        config |= {name: config[name] or None for name in TIMEOUTS}
        if fs.anon:
            own, given = ({k: v for k, v in some.items() if k not in KEYS} for some in (own, given))
            config["signature_version"] = UNSIGNED
        if given.get("verify") is False:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the user has chosen it
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

    def read(self, check: Callable[[int], object], **given: Any) -> memoryview:
        """Return the content of an object or a range of it; see ``BlockingClient.read``."""
        answer = self.request("get_object", **given)
        with closing(answer["Body"]) as body:
            check(answer["ContentLength"])
            return memoryview(sync(self._fs.loop, body.read))

    def sends_checksums(self) -> bool:
        """Return whether botocore adds checksums to requests."""
        return _sends_checksums(self._fs.s3)


def _sends_checksums(client: Any) -> bool:
    return getattr(client.meta.config, "request_checksum_calculation", None) == "when_supported"
