"""What stores and networks say, in plain words, and whether asking again may help."""

from __future__ import annotations

import errno
import random
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.errors import CkptError, StorageError
from ckpttool.storage.base import WAIT
from ckpttool.storage.error_texts import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Tally:
    """Counts, in every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        """One more."""
        with self._lock:
            self.count += 1


ATTEMPTS = 7
"""How often a call is made before it is given up."""
PATIENCE = 120.0
"""Seconds after which it is not made again, but for a second time: some clients try again themselves, for a minute."""
FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each pause is up to twice as long as the one before it."""
LONGEST_PAUSE = 8.0
"""Seconds that no pause is longer than."""

MISSING = "does not exist"
"""What is wrong with a path at which nothing is."""
NO_BUCKET = "there is no such bucket"
_SIGN_IN = "sign in again, or check the environment, the profile and --storage-option"
_EXPIRED = ("the credentials have expired", _SIGN_IN)
_STILL_EXPIRED = "refreshed credentials are still expired"
"""What botocore says in the text of a RuntimeError alone."""
NO_CREDENTIALS = ("there are no credentials", _SIGN_IN)
"""What is wrong where a store wants some, and what to do."""
_MEANING = {
    "NoSuchBucket": (NO_BUCKET, "check the name, the region and the endpoint"),
    "InvalidBucketName": ("is no valid name of a bucket", "check the name"),
    "NoSuchKey": (MISSING, "check the path"),
    "NoSuchUpload": ("its upload was aborted by somebody else", "see that no other run writes it, then try again"),
    "404": (MISSING, "check the path"),
    "AccessDenied": ("access denied", "check what these credentials may do"),
    "AllAccessDisabled": ("access denied", "check what these credentials may do"),
    "403": ("access denied", "check what these credentials may do"),
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
    "PermanentRedirect": ("lies in another region", "name it with --storage-option client_kwargs.region_name=..."),
    "301": ("lies in another region", "name it with --storage-option client_kwargs.region_name=..."),
    "400": ("the request was refused, without a reason", _SIGN_IN),
    "PreconditionFailed": ("changed while it was being read", WAIT),
    "412": ("changed while it was being read", WAIT),
    "InvalidRange": ("changed while it was being read", WAIT),
    "416": ("changed while it was being read", WAIT),
    "EntityTooLarge": ("is larger than the store takes", "choose a smaller --max-shard-size"),
    "QuotaExceeded": ("no space left", "free some space or choose another place"),
    "ContainerNotFound": (NO_BUCKET, "check the name, the account and the endpoint"),
    "BlobNotFound": (MISSING, "check the path"),
    "AuthenticationFailed": ("the credentials are not accepted", _SIGN_IN),
    "InvalidAuthenticationInfo": ("the credentials are not accepted", _SIGN_IN),
    "InvalidResourceName": ("is no name that the store takes", "check the URL"),
    "OutOfRangeInput": ("is no name that the store takes", "check the URL"),
}
"""Codes of S3 and Azure, and of HTTP where there is no other, after which asking again does not help."""
_PASSING = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "RequestTimeoutException", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "OperationAborted", "BadDigest", "IncompleteBody",
    "XAmzContentSHA256Mismatch", "500", "502", "503", "504", "429", "408", "409",
}  # fmt: skip
_MEANING_OF_CLASS = {
    "NoCredentialsError": NO_CREDENTIALS,
    "PartialCredentialsError": ("the credentials are incomplete", _SIGN_IN),
    "CredentialRetrievalError": ("the credentials cannot be had", _SIGN_IN),
    "TokenRetrievalError": _EXPIRED,
    "UnauthorizedSSOTokenError": _EXPIRED,
    "ProfileNotFound": ("the profile is not there", "check AWS_PROFILE and ~/.aws/config"),
    "NoRegionError": ("no region is known", "name it with --storage-option client_kwargs.region_name=..."),
    "InvalidRegionError": ("the region is no valid name", "check the region"),
    "ParamValidationError": ("is no name that the store takes", "check the URL"),
    "DefaultCredentialsError": NO_CREDENTIALS,
    "RefreshError": _EXPIRED,
    "ClientAuthenticationError": ("the credentials are not accepted", _SIGN_IN),
    "TypeError": ("its options do not fit", "check --storage-option"),
    "FileNotFoundError": (MISSING, "check the path"),
    "PermissionError": ("access denied", "check what these credentials may do"),
    "NotADirectoryError": ("is not a directory", "pass a checkpoint's directory"),
    "IsADirectoryError": ("is a directory", "pass a file"),
    "FileExistsError": ("exists already", "choose another name"),
    "NotImplementedError": ("cannot be done on this storage", "copy it to local disk first"),
}
"""By the name of an exception's class; those of packages that need not be installed among them."""
_PASSING_CLASSES = {
    "HTTPClientError", "EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError",
    "ClientPayloadError", "ClientConnectionError", "ServerDisconnectedError", "IncompleteRead", "IncompleteReadError",
    "ResponseParserError", "ResponseStreamingError", "FlexibleChecksumError", "FSTimeoutError", "TimeoutError",
    "ConnectionError", "HttpResponseError", "ServiceRequestError", "ShortReadError",
}  # fmt: skip
_PASSING_NUMBERS = {
    errno.EBUSY, errno.EIO, getattr(errno, "EREMOTEIO", errno.EIO), errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE,
    errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EAGAIN,
}  # fmt: skip
_PLAIN_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG}
"""What storages say that are disks of other machines."""


class ShortReadError(Exception):
    """A store sent fewer bytes than it was asked for."""


def call(path: str, function: Callable[[], T], retries: Tally) -> T:
    """Do something that may fail for a while, again and again with growing pauses.

    Args:
        path: What errors call the file.
        function: What to do; it must do no harm if done twice.
        retries: Counts the repeated attempts.

    Raises:
        StorageError: It failed for good, or too often.
    """
    pause = FIRST_PAUSE
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except CkptError:
            raise
        except Exception as error:
            found = explain(path, error)
            if found is not None:
                raise found from error
            if attempt == ATTEMPTS or (attempt > 1 and time.monotonic() - began > PATIENCE):
                problem = f"the store failed {attempt} times, at last with {_in_short(error)}"
                raise StorageError(path, problem, "check the network and the endpoint, then try again") from error
        retries.add()
        # At random, so that many who failed at once do not come back at once.
        time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError


def explain(path: str, error: BaseException) -> StorageError | None:
    """Say a failure in plain words; None if it may pass."""
    code, status = _codes(error)
    for known in (code, "" if code and status == "400" else status):  # any code says more than that
        if known in _PASSING:
            return None
        if known in _MEANING:
            return StorageError(path, *_MEANING[known])
    chain = _chain(error)
    if any(_STILL_EXPIRED in str(link) for link in chain):
        return StorageError(path, *_EXPIRED)
    for link in chain:
        for name in (c.__name__ for c in type(link).__mro__):
            # ConnectionError and TimeoutError before the OSError that they are.
            if name in _MEANING_OF_CLASS:
                return StorageError(path, *_MEANING_OF_CLASS[name])
            if name in _PASSING_CLASSES:
                return None
    # s3fs turns codes that it does not know into EIO; a status of 4xx says that it is our fault all the same.
    if not status.startswith("4") and any(isinstance(e, OSError) and e.errno in _PASSING_NUMBERS for e in chain):
        return None
    if not code and (full := next((e for e in chain if isinstance(e, OSError) and e.errno in _PLAIN_NUMBERS), None)):
        return storage_error(path, full)
    return StorageError(path, f"the store said {_in_short(error)}", "check the URL and --storage-option")


def _codes(error: BaseException) -> tuple[str, str]:
    """The code that the store gave, and the status of its answer; "" where there is none."""
    for link in _chain(error):
        response: Any = getattr(link, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return code, str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        for attribute in ("status", "status_code", "code"):  # of aiohttp, azure, gcsfs
            value = getattr(link, attribute, None)
            if isinstance(value, int) and 400 <= value < 600:
                named = getattr(link, "error_code", None)  # of azure, where some are members of an enumeration
                return str(getattr(named, "value", named or "")), str(value)
        if any(c.__name__ in _PASSING_CLASSES for c in type(link).__mro__):
            break  # what it wraps may have a number that no store gave: aiohttp calls a body that is cut off "400"
    return "", ""


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__
    return links


def _in_short(error: BaseException) -> str:
    """The store's own code, or the class of the error. Not its text: it may quote what was sent, secrets included."""
    code, status = _codes(error)
    if code or status:
        return code or f"HTTP {status}"
    if isinstance(error, ShortReadError):
        return str(error)
    return type(_chain(error)[-1]).__name__
