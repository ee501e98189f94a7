"""Requests to an S3 server, and what networks and servers do to them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable

Headers: TypeAlias = list[tuple[str, str]]

_BUFFER = 1 << 20
_MID = 1000
"""Where a body is cut if the test does not say: late enough that some of it arrived."""


# ----------------------------------------------------------------------------------------------------- what was seen


@dataclass
class Request:
    """A request, and what became of it."""

    method: str
    target: str
    """Path and query as they were sent."""
    path: str
    """/BUCKET/KEY, decoded."""
    query: dict[str, str]
    """Decoded; a name without a value has an empty one."""
    headers: dict[str, str]
    """Names in lower case."""
    started: float
    """When its head had arrived (time.perf_counter)."""
    ended: float | None = None
    """When its answer was given or its connection dropped; None: it is in flight."""
    status: int | None = None
    """Of the answer that the client was given; None: none."""
    received: int = 0
    """Bytes of body from the client."""
    sent: int = 0
    """Bytes of body to the client."""
    faults: list[Action] = field(default_factory=list)
    """What was done to it."""
    forwarded: bool = False
    """Whether the server heard of it."""

    @property
    def key(self) -> str:
        """The object's key; empty for a request about the bucket."""
        return self.path.lstrip("/").partition("/")[2]

    @property
    def range(self) -> tuple[int, int] | None:
        """The bytes that were asked for, as start and end (exclusive); None: all, or none that have both."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2]) + 1) if match else None

    @property
    def operation(self) -> str:
        """Which of S3's operations it is, by its name in botocore's clients: ``get_object``, ``upload_part``, ..."""
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


# ------------------------------------------------------------------------------------------------- what may be done


@dataclass(frozen=True)
class Latency:
    """Wait before the request goes on. Others do not wait with it."""

    seconds: float


@dataclass(frozen=True)
class Before:
    """Call a function before the request goes on: it may change what the server holds. In a thread of its own."""

    call: Callable[[Request], object]


@dataclass(frozen=True)
class Unranged:
    """Drop the Range header, as servers that do not know it do: the answer is 200 and the whole object."""


@dataclass(frozen=True)
class Answer:
    """Answer in the server's place, which hears nothing of it. The request's body is read first."""

    status: int
    code: str
    message: str = "injected"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Cut:
    """End the connection.

    Args:
        where: "request": after so many bytes of the request's body. "before": the whole request was read, the server
            hears nothing. "after": the server did what was asked, and its answer is lost. "answer": after so many bytes
            of the answer's body, whose Content-Length promised more.
        at: How many bytes of the body pass, for "request" and "answer".
        reset: Send a reset, as a host that died or a firewall does; else close, as a server does that goes away.
    """

    where: str
    at: int = _MID
    reset: bool = True


@dataclass(frozen=True)
class Shorter:
    """Leave out the last bytes of the answer's body and give a Content-Length that agrees: nothing looks wrong.

    Args:
        by: How many bytes.
        relabel: Whether the Content-Range tells of it, too.
    """

    by: int = 1
    relabel: bool = False


@dataclass(frozen=True)
class Flip:
    """Change one bit of the answer's body.

    Args:
        at: Which byte's.
    """

    at: int = 0


@dataclass(frozen=True)
class Hang:
    """Say nothing more, until the client goes away.

    Args:
        at: After how many bytes of the answer's body; None: before the answer, of which the server hears nothing.
    """

    at: int | None = None


Prelude: TypeAlias = Latency | Before | Unranged
"""What happens to a request that then goes its way."""
Fault: TypeAlias = Answer | Cut | Shorter | Flip | Hang
"""What happens to a request instead."""
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
"""What S3 answers to a completion or copy that failed after it had begun to answer."""


SECONDS_TO_SETTLE = 10.0
"""How long requests that a rule acts on may take to be over once a test asks."""


@dataclass
class Rule:
    """What to do to which requests.

    Args:
        action: What to do.
        operation: S3's operation by its name in botocore's clients; None: all.
        match: Is searched for in the decoded path and query.
        when: Must also hold.
        nth: The first matching request to act on, from 1.
        times: How many to act on from there; None: all.
        each: Count for each distinct request, by method, target and range, instead of for all together: with ``nth=1``
            and ``times=1``, every request fails once and then works.
    """

    action: Action
    operation: str | None = None
    match: str = ""
    when: Callable[[Request], bool] | None = None
    nth: int = 1
    times: int | None = 1
    each: bool = False
    busy: int = 0
    """Requests that it acts on and that are not over."""
    done: int = 0
    """How often it was done so far; see ``fired``."""
    _seen: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def fired(self) -> int:
        """How often it was really done: not merely that a request matched, but that the client got to feel it.

        A client may have felt it before the proxy has noted it: what is not over is waited for.
        """
        end = time.monotonic() + SECONDS_TO_SETTLE
        while self.busy and time.monotonic() < end:
            time.sleep(0.005)
        return self.done

    def due(self, request: Request) -> bool:
        """Whether to act on a request that has come; counts it."""
        if self.operation not in (None, request.operation) or not re.search(self.match, unquote(request.target)):
            return False
        if self.when is not None and not self.when(request):
            return False
        what = (request.method, request.target, request.headers.get("range", "")) if self.each else ()
        self._seen[what] = seen = self._seen.get(what, 0) + 1
        return seen >= self.nth and (self.times is None or seen < self.nth + self.times)
