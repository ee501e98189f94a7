"""Errors of stores: their messages, and whether a request is retried."""

from __future__ import annotations

import enum
import errno
import logging
import subprocess
import sys
from typing import Any

import aiohttp
import fsspec
import pytest
from aiohttp.http_exceptions import ContentLengthError
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ProfileNotFound,
    ReadTimeoutError,
)
from s3fs.errors import translate_boto_error

from ckpttool.concurrency import Tally
from ckpttool.errors import ArgumentError, StorageError
from ckpttool.storage import Opening, open_storage
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.retry import ATTEMPTS, PATIENCE, ShortReadError, call, explain, growing
from tests.wording import refused


def client_error(code: str, status: int = 400) -> Exception:
    """As s3fs raises what S3 answered; the message holds what must not be shown."""
    return answered(code, "AKIA0sesame0sesame", status=status)


def answered(code: str, message: str, operation: str = "GetObject", status: int = 400) -> Exception:
    """As s3fs raises what a store answered."""
    said = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(said, operation))  # type: ignore[no-any-return]


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


class _AnswerError(Exception):
    """As aiohttp's, gcsfs's and Azure's: the status is an attribute."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("sesame")
        self.__dict__.update(attributes)


class _AzureCode(str, enum.Enum):
    """Some of Azure's codes are members of such a class."""

    OUT_OF_RANGE_INPUT = "OutOfRangeInput"


GOOD = [
    (client_error("NoSuchBucket", 404), "the bucket does not exist"),
    (client_error("NoSuchKey", 404), "does not exist"),
    (client_error("404", 404), "does not exist"),
    (client_error("NoSuchUpload", 404), "another process aborted its upload"),
    (client_error("AccessDenied", 403), "access denied"),
    (client_error("403", 403), "access denied"),
    (client_error("ExpiredToken"), "the credentials have expired"),
    (client_error("InvalidAccessKeyId", 403), "the credentials are not accepted"),
    (client_error("SignatureDoesNotMatch", 403), "the credentials are not accepted"),
    (client_error("PreconditionFailed", 412), "changed while it was being read"),
    (client_error("InvalidRange", 416), "changed while it was being read"),
    (client_error("RequestTimeTooSkewed", 403), "this machine's clock is wrong"),
    (client_error("PermanentRedirect", 301), "is in another region"),
    (client_error("301", 301), "is in another region"),
    (client_error("400", 400), "the request was refused"),
    (client_error("KeyTooLongError"), "the store answered KeyTooLongError"),
    (_AnswerError(status=404), "does not exist"),
    (_AnswerError(status=403), "access denied"),
    (_AnswerError(status_code=401), "the credentials are not accepted"),
    (_AnswerError(code=412), "changed while it was being read"),
    (_AnswerError(status_code=404, error_code="ContainerNotFound"), "the bucket does not exist"),
    (_AnswerError(status_code=404, error_code="BlobNotFound"), "does not exist"),
    (_AnswerError(status_code=403, error_code="AuthenticationFailed"), "the credentials are not accepted"),
    (_AnswerError(status_code=403, error_code="AuthorizationFailure"), "access denied"),
    (_AnswerError(status_code=403, error_code=None), "access denied"),
    (_AnswerError(status_code=400, error_code=_AzureCode.OUT_OF_RANGE_INPUT), "is not a name that the store accepts"),
    (client_error("Teapot", 418), "the store answered Teapot"),
    (NoCredentialsError(), "no credentials were found"),
    (ProfileNotFound(profile="sesame"), "the profile does not exist"),
    (ParamValidationError(report="sesame"), "is not a name that the store accepts"),
    (FileNotFoundError("sesame"), "does not exist"),
    (PermissionError("sesame"), "access denied"),
    (NotADirectoryError("sesame"), "is not a directory"),
    (NotImplementedError("sesame"), "cannot be done on this storage"),
    (ValueError("sesame"), "the store answered ValueError"),
    (OSError(errno.ENOSPC, "sesame"), "no space left"),
]
PASSING = [
    client_error("SlowDown", 503),
    client_error("InternalError", 500),
    client_error("InternalError", 200),
    client_error("ServiceUnavailable", 503),
    client_error("RequestTimeout", 400),
    client_error("Unheard", 503),
    client_error("429", 429),
    _AnswerError(status=502),
    _AnswerError(code=500),
    _AnswerError(status_code=503, error_code="ServerBusy"),
    ReadTimeoutError(endpoint_url="sesame"),
    EndpointConnectionError(endpoint_url="sesame"),
    ShortReadError("1 bytes instead of 2"),
    ConnectionResetError(errno.ECONNRESET, "sesame"),
    BrokenPipeError(errno.EPIPE, "sesame"),
    TimeoutError("sesame"),
    caused(aiohttp.ClientPayloadError("sesame"), ContentLengthError("sesame")),
    caused(ConnectionResetError("sesame"), _AnswerError(code=400)),
    OSError(errno.EIO, "sesame"),
    OSError(errno.ENETUNREACH, "sesame"),
]


def _name(value: object) -> str | None:
    return f"{type(value).__name__}-{value}"[:60] if isinstance(value, Exception) else None


@pytest.mark.parametrize(("error", "problem"), GOOD, ids=_name)
def test_a_permanent_error_is_reported_at_once(error: Exception, problem: str) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with pytest.raises(StorageError) as caught:
        call("s3://b/k", fail, Tally())
    assert len(tries) == 1
    assert str(caught.value).startswith(f"s3://b/k: {problem}")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("User: bob is not authorized to perform: s3:GetObject", ": User: bob is not authorized to perform"),
        ("Access Denied.", ""),
        ("Forbidden", ""),
    ],
)
def test_a_refusal_names_the_permission_that_the_store_names(said: str, shown: str) -> None:
    error = explain("s3://b/k", answered("AccessDenied", said, status=403))
    assert error is not None
    assert error.problem.startswith(f"access denied{shown}")
    assert (error.problem == "access denied") == (not shown)


def test_an_endpoint_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.storage.retry.FIRST_PAUSE", 0)

    def fail() -> None:
        raise EndpointConnectionError(endpoint_url="http://user:sesame@minio:9000/bucket/key?sesame=1")

    with pytest.raises(StorageError) as caught:
        call("s3://b/k", fail, Tally())
    assert caught.value.problem.endswith("last with EndpointConnectionError at http://minio:9000")
    assert "sesame" not in str(caught.value)


CHECKSUMS = {
    "of an upload": answered("NotImplemented", "A header you provided is not implemented.", "PutObject", 501),
    "in the message": answered("Odd", "x-amz-sdk-checksum-algorithm is not supported"),
    "after retries": answered("XAmzContentSHA256Mismatch", "mismatch", "UploadPart"),
    "of a read": answered("NotImplemented", "ranges"),
    "unknown": answered("KeyTooLongError", "Your key is too long; secret wJalrXUtnFEMI/K7MDENG/bPxRfiCY"),
}


@pytest.mark.parametrize("what", CHECKSUMS)
def test_the_stores_own_message_is_shown(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.storage.retry.FIRST_PAUSE", 0)

    def fail() -> None:
        raise CHECKSUMS[what]

    with refused(StorageError):
        call("s3://b/k", fail, Tally())


@pytest.mark.parametrize("error", PASSING, ids=_name)
def test_a_temporary_failure_is_retried(error: Exception) -> None:
    assert explain("s3://b/k", error) is None
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with refused(StorageError) as caught:
        call("s3://b/k", fail, Tally())
    assert len(tries) == ATTEMPTS
    assert "sesame" not in str(caught.value)
    assert "\n" not in str(caught.value)

    def fail_at_first() -> str:
        tries.append(1)
        if len(tries) < 2 * ATTEMPTS:
            raise error
        return "done"

    assert call("s3://b/k", fail_at_first, Tally()) == "done"


def test_long_attempts_are_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tries = []

    def fail_late() -> None:
        tries.append(1)
        now[0] += 2 * PATIENCE
        raise TimeoutError

    with refused(StorageError):
        call("az://b/k", fail_late, Tally())
    assert len(tries) == 2


def test_an_error_of_our_own_is_passed_on() -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise StorageError("s3://b/k", "is not text", "")

    with refused(StorageError):
        call("s3://b/k", fail, Tally())
    assert len(tries) == 1


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = growing(0.1, 1.0)
    for most in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert most / 2 <= next(pauses) <= most


def test_an_error_that_is_its_own_cause_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert explain("s3://b/k", first) is not None


class _Picky(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """As adlfs, which wants credentials at once, and logs on its way."""

    protocol = "picky"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if "key" not in options:
            raise ValueError("Must provide either a connection_string or account_name with credentials!!")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        logging.getLogger("picky").error("sesame")
        raise PermissionError(path)

    def pipe_file(self, path: str, value: bytes, *_: Any, **__: Any) -> None:
        raise FileNotFoundError(path)


@pytest.fixture
def picky() -> None:
    fsspec.register_implementation("picky", _Picky, clobber=True)


@pytest.mark.usefixtures("picky")
def test_an_immediate_credentials_error_is_recognised() -> None:
    with refused(StorageError):
        open_storage("picky://b")


@pytest.mark.usefixtures("picky")
def test_states_without_a_parameter_are_noted() -> None:
    storage = open_storage("picky://b", {"key": 1})
    assert isinstance(storage, RemoteStorage)
    with refused(StorageError):
        storage.put("picky://b/x", b"")


def test_files_are_deleted_by_a_library_that_only_removes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adlfs 2025.8."""
    from fsspec.implementations.memory import MemoryFileSystem

    def not_implemented(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "rm_file", not_implemented)
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda self, path: self.store.pop(path))
    storage = open_storage("memory://memory/deleted")
    assert isinstance(storage, RemoteStorage)
    storage.put("memory://memory/deleted/file", b"x")
    storage.delete(["memory://memory/deleted/file"])
    assert not storage.exists("memory://memory/deleted/file")


def test_logs_of_libraries_do_not_hide_the_error() -> None:
    script = (
        "import sys; from tests.storage.test_retry import _Picky; import fsspec; from ckpttool.cli import main;"
        "fsspec.register_implementation('picky', _Picky);"
        "sys.argv = ['ckpttool', 'inspect', 'picky://b/run', '--storage-option', 'key=1']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "Error: picky://b/run: access denied; check the permissions of these credentials\n"


def test_options_of_another_type_and_an_endpoint_without_a_scheme_are_refused() -> None:
    for options in (
        "endpoint_url=http://localhost",
        {"endpoint_url": "localhost:5555"},
        {"client_kwargs": {"endpoint_url": "a"}},
    ):
        with refused(ArgumentError):
            Opening(options)  # type: ignore[arg-type]
    assert Opening({"endpoint_url": "http://localhost:5555"}).storage_options


def test_an_option_that_a_client_does_not_know_is_named() -> None:
    found = explain("s3://bucket/x", TypeError("AioSession.__init__() got an unexpected keyword argument 'nokey'"))
    assert found is not None
    assert found.problem == "has options that its file system does not accept: nokey"
    other = explain("s3://bucket/x", TypeError("an integer is required"))
    assert other is not None
    assert other.problem == "has options that its file system does not accept"
