"""Retry calls to remote storages, and translate their errors to error messages."""

from __future__ import annotations

import errno
import re
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ckpttool.errors import CkptError, StorageError
from ckpttool.messages import HIDDEN, printable
from ckpttool.storage.base import DENIED, MISSING, WAIT, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.concurrency import Tally

T = TypeVar("T")
P = ParamSpec("P")


ATTEMPTS = 7
"""Most attempts of a call."""
PATIENCE = 120.0
"""Seconds after which only a second attempt is made: some clients retry by themselves for a minute."""
FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each pause is at most twice as long as the previous one."""
LONGEST_PAUSE = 8.0
"""Longest pause in seconds."""

MAX_SAID = 300
"""Most characters of a store's message to show."""
CHECKSUMS = (
    "the store may not know the checksum headers of newer botocore: set storage_options "
    "config_kwargs.request_checksum_calculation=when_required"
)
"""Hint for a store that refuses a request with checksum headers; botocore sends them since 1.36."""
_WITH_CHECKSUMS = {"PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload", "DeleteObjects"}
"""Operations whose requests have checksum headers."""
_OF_CHECKSUMS = {
    "NotImplemented",
    "InvalidArgument",
    "InvalidRequest",
    "InvalidDigest",
    "MissingContentLength",
    "MalformedTrailerError",
    "XAmzContentSHA256Mismatch",
    "BadDigest",
}
"""Codes by which stores refuse these headers."""
_NAMES_CHECKSUM = re.compile(r"checksum|x-amz-trailer|content-sha256|aws-chunked|trailing header", re.IGNORECASE)
_KEY = re.compile(r"A[KS]IA\w+|(?=[a-z+/=_-]*[A-Z0-9])[A-Za-z0-9+/=_]{20,}")
"""A word that may be a key, a token or a signature."""
NO_BUCKET = "the bucket does not exist"
_SIGN_IN = "sign in again, or check the environment, the profile and storage_options"
_EXPIRED = ("the credentials have expired", _SIGN_IN)
_STILL_EXPIRED = "refreshed credentials are still expired"
"""Text of botocore's RuntimeError; it has no class of its own."""
NO_CREDENTIALS = ("no credentials were found", _SIGN_IN)
"""Error message and hint for a store that requires credentials."""
OPTIONS = ("storage_options", "max_shard_size")
"""Parameters that the hints name."""
_MESSAGE_OF_CODE = {
    "NoSuchBucket": (NO_BUCKET, "check the name, the region and the endpoint"),
    "InvalidBucketName": ("has an invalid bucket name", "check the name"),
    "NoSuchKey": (MISSING, "check the path"),
    "NoSuchUpload": ("another process aborted its upload", "check that no other run writes it, then try again"),
    "404": (MISSING, "check the path"),
    "AccessDenied": (DENIED[1], "check the permissions of these credentials"),
    "AllAccessDisabled": (DENIED[1], "check the permissions of these credentials"),
    "403": (DENIED[1], "check the permissions of these credentials"),
    "401": ("the credentials are not accepted", _SIGN_IN),
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": ("the credentials are not accepted", _SIGN_IN),
    "InvalidAccessKeyId": ("the credentials are not accepted", _SIGN_IN),
    "SignatureDoesNotMatch": ("the credentials are not accepted", _SIGN_IN),
    "InvalidClientTokenId": ("the credentials are not accepted", _SIGN_IN),
    "AuthorizationHeaderMalformed": ("the region or the credentials are wrong", _SIGN_IN),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it, then try again"),
    "PermanentRedirect": ("is in another region", "set storage_options client_kwargs.region_name=..."),
    "301": ("is in another region", "set storage_options client_kwargs.region_name=..."),
    "400": ("the request was refused, without a reason", _SIGN_IN),
    "PreconditionFailed": ("changed while it was being read", WAIT),
    "412": ("changed while it was being read", WAIT),
    "InvalidRange": ("changed while it was being read", WAIT),
    "416": ("changed while it was being read", WAIT),
    "EntityTooLarge": ("is larger than the store allows", "choose a smaller max_shard_size"),
    "QuotaExceeded": ("no space left", "free some space or choose another place"),
    "ContainerNotFound": (NO_BUCKET, "check the name, the account and the endpoint"),
    "BlobNotFound": (MISSING, "check the path"),
    "AuthenticationFailed": ("the credentials are not accepted", _SIGN_IN),
    "InvalidAuthenticationInfo": ("the credentials are not accepted", _SIGN_IN),
    "InvalidResourceName": ("is not a name that the store accepts", "check the URL"),
    "OutOfRangeInput": ("is not a name that the store accepts", "check the URL"),
}
"""Error message and hint by code of S3 or Azure, or by HTTP status without a code; retries do not help."""
_DENIED = {"AccessDenied", "AllAccessDisabled"}
"""Codes with a message that names the permission or the rule."""
_TEMPORARY_CODES = {
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "RequestTimeoutException",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "OperationAborted",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "500",
    "502",
    "503",
    "504",
    "429",
    "408",
    "409",
}
_MESSAGE_OF_CLASS = {
    "NoCredentialsError": NO_CREDENTIALS,
    "PartialCredentialsError": ("the credentials are incomplete", _SIGN_IN),
    "CredentialRetrievalError": ("the credentials cannot be obtained", _SIGN_IN),
    "TokenRetrievalError": _EXPIRED,
    "UnauthorizedSSOTokenError": _EXPIRED,
    "ProfileNotFound": ("the profile does not exist", "check AWS_PROFILE and ~/.aws/config"),
    "NoRegionError": ("no region is set", "set storage_options client_kwargs.region_name=..."),
    "InvalidRegionError": ("the region name is invalid", "check the region"),
    "ParamValidationError": ("is not a name that the store accepts", "check the URL"),
    "DefaultCredentialsError": NO_CREDENTIALS,
    "RefreshError": _EXPIRED,
    "ClientAuthenticationError": ("the credentials are not accepted", _SIGN_IN),
    "FileNotFoundError": (MISSING, "check the path"),
    "PermissionError": (DENIED[1], "check the permissions of these credentials"),
    "NotADirectoryError": ("is not a directory", "pass a checkpoint's directory"),
    "IsADirectoryError": ("is a directory", "pass a file"),
    "FileExistsError": ("exists already", "choose another name"),
    "NotImplementedError": ("cannot be done on this storage", "copy it to local disk first"),
}
"""Error message and hint by class name of an exception; the packages of some classes may not be installed."""
_TEMPORARY_CLASSES = {
    "HTTPClientError",
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ClientPayloadError",
    "ClientConnectionError",
    "ServerDisconnectedError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseParserError",
    "ResponseStreamingError",
    "FlexibleChecksumError",
    "FSTimeoutError",
    "TimeoutError",
    "ConnectionError",
    "HttpResponseError",
    "ServiceRequestError",
    "ShortReadError",
}
_TEMPORARY_NUMBERS = {
    errno.EBUSY,
    errno.EIO,
    getattr(errno, "EREMOTEIO", errno.EIO),
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EAGAIN,
}
_DISK_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG}
"""Errors of remote file systems such as SFTP that mean the same as on local disk."""


class ShortReadError(Exception):
    """A store sent a different number of bytes than requested."""


def call(path: str, function: Callable[[], T], retries: Tally) -> T:
    """Call a function; retry temporary failures with growing pauses.

    Args:
        path: Path of the file, for error messages.
        function: The function; a repeated call must have no further effect.
        retries: Counts the repeated attempts.

    Raises:
        StorageError: The failure is permanent, or all attempts failed.
    """
    pauses = growing(FIRST_PAUSE, LONGEST_PAUSE)
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except CkptError:
            raise
        except Exception as error:
            permanent = explain(path, error)
            if permanent is not None:
                raise permanent from error
            if attempt == ATTEMPTS or (attempt > 1 and time.monotonic() - began > PATIENCE):
                problem = f"the store failed {attempt} times, last with {_short_name(error)}{_at_endpoint(error)}"
                hint = _hint(error, "check the network and the endpoint, then try again")
                raise StorageError(path, problem, hint, OPTIONS if hint == CHECKSUMS else ()) from error
        retries.add()
        time.sleep(next(pauses))
    raise AssertionError


def growing(first: float, longest: float) -> Iterator[float]:
    """Yield pauses in seconds: random, so that many processes that failed together do not retry together."""
    import random  # hardly any command retries

    pause = first
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311
        pause = min(2 * pause, longest)


def bad_options(path: str, error: BaseException) -> StorageError:
    """Return the error for options that a file system refuses, with the name of the option if the refusal has it."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    problem = "has options that its file system does not accept" + (f": {unknown[1]}" if unknown else "")
    return StorageError(path, problem, "check storage_options", OPTIONS)


def explain(path: str, error: BaseException) -> StorageError | None:
    """Return the StorageError for a permanent failure; None for a temporary one."""
    code, status = _codes(error)
    for known in (code, "" if code and status == "400" else status):  # any other code is more precise than status 400
        if known in _TEMPORARY_CODES:
            return None
        if known in _MESSAGE_OF_CODE:
            problem, hint = _MESSAGE_OF_CODE[known]
            said = _said(error) if known in _DENIED else ""
            more = said.casefold() not in {"", problem, "forbidden"}
            return StorageError(path, f"{problem}: {said}" if more else problem, hint, OPTIONS)
    chain = _chain(error)
    if any(_STILL_EXPIRED in str(link) for link in chain):
        return StorageError(path, *_EXPIRED, OPTIONS)
    for link in chain:
        for name in (c.__name__ for c in type(link).__mro__):
            # The most derived class first: ConnectionError and TimeoutError before OSError.
            if name == "TypeError":
                return bad_options(path, link)
            if name in _MESSAGE_OF_CLASS:
                return StorageError(path, *_MESSAGE_OF_CLASS[name], OPTIONS)
            if name in _TEMPORARY_CLASSES:
                return None
    # s3fs raises EIO for unknown codes; with a status of 4xx the request is wrong all the same.
    if not status.startswith("4") and any(isinstance(e, OSError) and e.errno in _TEMPORARY_NUMBERS for e in chain):
        return None
    if not code and (full := next((e for e in chain if isinstance(e, OSError) and e.errno in _DISK_NUMBERS), None)):
        return storage_error(path, full)
    said = _said(error)
    problem = f"the store answered {_short_name(error)}{f': {said}' if said else ''}"
    return StorageError(path, problem, _hint(error, "check the URL and storage_options"), OPTIONS)


def _codes(error: BaseException) -> tuple[str, str]:
    """Return the code and the HTTP status of the store's answer; "" if there is none."""
    for link in _chain(error):
        response: Any = getattr(link, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return code, str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        for attribute in ("status", "status_code", "code"):  # attributes of aiohttp, azure and gcsfs
            value = getattr(link, attribute, None)
            if isinstance(value, int) and 400 <= value < 600:
                named = getattr(link, "error_code", None)  # of azure: a text or an enumeration member
                return str(getattr(named, "value", named or "")), str(value)
        if any(c.__name__ in _TEMPORARY_CLASSES for c in type(link).__mro__):
            break  # the wrapped error may have a status that no store sent: aiohttp gives a truncated body status 400
    return "", ""


def _said(error: BaseException) -> str:
    """Return the message of the store's answer, without what may be a key or a token; "" without one."""
    message = str(next((found for _, found in _answers(error)), {}).get("Error", {}).get("Message", ""))
    return _KEY.sub(HIDDEN, printable(message, MAX_SAID)).strip().removesuffix(".")


def _at_endpoint(error: BaseException) -> str:
    """Return the endpoint that a client of botocore did not reach, as the rest of a sentence; "" if it is unknown."""
    from urllib.parse import urlsplit  # only errors need it

    given = (getattr(link, "kwargs", None) for link in _chain(error))
    urls = (found.get("endpoint_url") for found in given if isinstance(found, dict))
    parts = urlsplit(next((url for url in urls if isinstance(url, str)), ""))
    return f" at {parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.scheme and parts.netloc else ""


def _hint(error: BaseException, otherwise: str) -> str:
    """Return ``CHECKSUMS`` if a store may have refused a request because of its checksum headers."""
    for operation, answer in _answers(error):
        stated = answer.get("Error", {})
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        refused = operation in _WITH_CHECKSUMS and stated.get("Code") in _OF_CHECKSUMS
        if refused or _NAMES_CHECKSUM.search(f"{stated.get('Message', '')} {' '.join(map(str, headers))}"):
            return CHECKSUMS
    return otherwise


def _answers(error: BaseException) -> list[tuple[str, dict[str, Any]]]:
    """Return the operation and the answer of each error of botocore in a chain."""
    links = [(link, getattr(link, "response", None)) for link in _chain(error)]
    return [(str(getattr(link, "operation_name", "")), found) for link, found in links if isinstance(found, dict)]


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__
    return links


def _short_name(error: BaseException) -> str:
    """Return the store's code, or the class of the error; not its text, which may quote secrets of the request."""
    code, status = _codes(error)
    if code or status:
        return code or f"HTTP {status}"
    if isinstance(error, ShortReadError):
        return str(error)
    return type(_chain(error)[-1]).__name__
