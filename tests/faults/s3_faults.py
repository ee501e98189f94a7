"""Describe requests to an S3 server, and faults to inject into them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.faults.rules import Before

Headers: TypeAlias = list[tuple[str, str]]

_BUFFER = 1 << 20
_MID = 1000
"""Default position of a cut in a body, in bytes."""


# ---------------------------------------------------------------------------------------------------------- requests


@dataclass
class Request:
    """A request and its outcome."""

    method: str
    target: str
    """Path and query, encoded."""
    path: str
    """/BUCKET/KEY, decoded."""
    query: dict[str, str]
    """Decoded; a name without a value has an empty one."""
    headers: dict[str, str]
    """Names in lower case."""
    started: float
    """Time of the arrival of its head (time.perf_counter)."""
    ended: float | None = None
    """Time of the end of its answer or connection; None while it is in flight."""
    status: int | None = None
    """Status of the answer to the client; None without an answer."""
    received: int = 0
    """Bytes of body from the client."""
    sent: int = 0
    """Bytes of body to the client."""
    faults: list[Action] = field(default_factory=list)
    """Faults injected into it."""
    forwarded: bool = False
    """Whether the proxy has forwarded it to the server."""

    @property
    def key(self) -> str:
        """Key of the object; "" for a request on the bucket."""
        return self.path.lstrip("/").partition("/")[2]

    @property
    def range(self) -> tuple[int, int] | None:
        """Requested range [start, end); None for the whole object or for a range without both ends."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2]) + 1) if match else None

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for repeats of one request."""
        return self.method, self.target, self.headers.get("range", "")

    @property
    def operation(self) -> str:
        """Name of the S3 operation in botocore's clients: ``get_object``, ``upload_part``, ..."""
        about = "object" if self.key else "bucket"
        for method, names, operation in _OPERATIONS:
            if self.method == method and names <= self.query.keys() and operation[1] in (about, ""):
                return operation[0]
        return f"{self.method.lower()}_{about}"


_OPERATIONS: tuple[tuple[str, set[str], tuple[str, str]], ...] = (
    ("POST", {"uploads"}, ("create_multipart_upload", "object")),
    ("POST", {"uploadId"}, ("complete_multipart_upload", "object")),
    ("POST", {"delete"}, ("delete_objects", "bucket")),
    ("PUT", {"uploadId", "partNumber"}, ("upload_part", "object")),
    ("DELETE", {"uploadId"}, ("abort_multipart_upload", "object")),
    ("GET", {"uploadId"}, ("list_parts", "object")),
    ("GET", {"uploads"}, ("list_multipart_uploads", "bucket")),
    ("GET", {"list-type"}, ("list_objects_v2", "bucket")),
    ("PUT", set(), ("create_bucket", "bucket")),
)


# ------------------------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Latency:
    """Delay the request; other requests go on."""

    seconds: float


@dataclass(frozen=True)
class Unranged:
    """Drop the Range header, like a server without support for ranges: the answer is 200 and the whole object."""


@dataclass(frozen=True)
class Answer:
    """Answer in place of the server, after reading the body of the request; the server gets no request."""

    status: int
    code: str
    message: str = "injected"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Cut:
    """End the connection.

    Args:
        where: "request": after ``at`` bytes of the request's body. "before": after the whole request, which the server
            does not get. "after": the server has executed the request, and its answer is lost. "answer": after ``at``
            bytes of the answer's body, which is shorter than its Content-Length then.
        at: Bytes of the body that pass, for "request" and "answer".
        reset: Whether to send a reset, like a dead host or a firewall; otherwise close, like a server that stops.
    """

    where: str
    at: int = _MID
    reset: bool = True


@dataclass(frozen=True)
class Shorter:
    """Omit the last bytes of the answer's body, and adapt the Content-Length.

    Args:
        by: Number of omitted bytes.
        relabel: Whether to adapt the Content-Range too.
    """

    by: int = 1
    relabel: bool = False


@dataclass(frozen=True)
class Flip:
    """Change one bit of the answer's body.

    Args:
        at: Position of the byte in the body.
    """

    at: int = 0


@dataclass(frozen=True)
class Hang:
    """Send nothing more until the client closes the connection.

    Args:
        at: Bytes of the answer's body that pass; None to hang before the answer, without forwarding the request.
    """

    at: int | None = None


Prelude: TypeAlias = Latency | Before | Unranged
"""Action before a request is forwarded."""
Fault: TypeAlias = Answer | Cut | Shorter | Flip | Hang
"""Action that replaces or damages the answer."""
Action: TypeAlias = Prelude | Fault

INTERNAL_ERROR = Answer(500, "InternalError", "We encountered an internal error. Please try again.")
SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate.")
UNAVAILABLE = Answer(503, "ServiceUnavailable", "Service is unable to handle request.")
EXPIRED_TOKEN = Answer(400, "ExpiredToken", "The provided token has expired.")
REQUEST_TIMEOUT = Answer(
    400,
    "RequestTimeout",
    "Your socket connection to the server was not read from or written to within the timeout period.",
)
ACCESS_DENIED = Answer(403, "AccessDenied", "Access Denied")
NO_SUCH_KEY = Answer(404, "NoSuchKey", "The specified key does not exist.")
NO_SUCH_UPLOAD = Answer(404, "NoSuchUpload", "The specified multipart upload does not exist.")
LATE_ERROR = Answer(200, "InternalError", "We encountered an internal error. Please try again.")
"""Answer of S3 to a completion or copy that fails after the status was sent."""
