"""A proxy before an S3 server that sees every request, and can do to it what networks and servers do."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import struct
import termios
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
    from types import TracebackType

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


# -------------------------------------------------------------------------------------------------------- the proxy


class Proxy:
    """Stands before a server from ``with`` to its end.

    Rules are asked in their order. All of a request's preludes happen, and the first fault.

    Args:
        upstream: URL of the server.
    """

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname or "", address.port or 80)
        self.rules: list[Rule] = []
        self.log: list[Request] = []
        """All requests so far, in the order in which they came."""
        self.broken: list[BaseException] = []
        """What went wrong in the proxy itself. Leaving ``with`` raises the first: a fault of the bed is no fault of
        the code under test."""
        self.connections = 0
        """How many were accepted."""
        self.port = 0
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """The endpoint to give to a client."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self.broken and kind is None:
            raise self.broken[0]

    def add(
        self,
        action: Action,
        operation: str | None = None,
        match: str = "",
        *,
        when: Callable[[Request], bool] | None = None,
        nth: int = 1,
        times: int | None = 1,
        each: bool = False,
    ) -> Rule:
        """Do something to some requests; see Rule. The rule tells how often it was done."""
        rule = Rule(action, operation, match, when, nth, times, each)
        self.rules = [*self.rules, rule]
        return rule

    def clear(self) -> None:
        """Forget all rules and requests."""
        self.rules = []
        self.log = []

    # -------------------------------------------------------------------------------------------- asking what was seen

    def requests(self, operation: str | None = None, match: str = "") -> list[Request]:
        """Those of an operation (botocore's name for it) whose decoded path and query match."""
        return [r for r in list(self.log) if operation in (None, r.operation) and re.search(match, unquote(r.target))]

    def most_in_flight(self, operation: str | None = None, match: str = "") -> int:
        """The largest number of such requests at one moment."""
        return _most_at_once((r.started, r.ended) for r in self.requests(operation, match))

    def bytes_by_key(self) -> dict[str, int]:
        """Bytes of bodies that objects' reads gave to the client."""
        totals: dict[str, int] = {}
        for request in self.requests("get_object"):
            totals[request.key] = totals.get(request.key, 0) + request.sent
        return totals

    # ------------------------------------------------------------------------------------------------------ serving it

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            connection = _Connection(self, reader, writer, self._upstream)
            try:
                await connection.serve()
            except (OSError, EOFError, asyncio.CancelledError):
                pass  # the client went away, or the test is over
            except Exception as e:
                self.broken.append(e)
            finally:
                connection.close()
                tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_BUFFER, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """A client's connection, and the one to the server that serves it."""

    def __init__(
        self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: tuple[str, int]
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._address = upstream
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        _without_delay(writer)

    async def serve(self) -> None:
        """Answer requests until the client has no more, or a rule ends it."""
        while (head := await _read_head(self._reader)) is not None:
            line, headers = head
            method, target, _ = line.split(" ", 2)
            request = _described(method, target, headers)
            self._proxy.log.append(request)
            try:
                if not await self._handle(request, headers):
                    return
            finally:
                request.ended = time.perf_counter()

    def close(self) -> None:
        """Let both connections go."""
        self._writer.close()
        if self._server is not None:
            self._server[1].close()

    async def _handle(self, request: Request, headers: Headers) -> bool:
        """Answer one request; whether the connection can carry another."""
        busy: list[Rule] = []
        try:
            return await self._by_rules(request, headers, busy)
        finally:
            for rule in busy:
                rule.busy -= 1

    async def _by_rules(self, request: Request, headers: Headers, busy: list[Rule]) -> bool:
        """Answer one request as the rules say; those that act are added to ``busy``."""
        fault: Rule | None = None
        for rule in self._proxy.rules:
            if fault is not None and not isinstance(rule.action, Prelude):
                continue
            if not rule.due(request):
                continue
            rule.busy += 1
            busy.append(rule)
            if isinstance(rule.action, Prelude):
                headers = await _prelude(rule.action, request, headers)
                _fire(rule, request)
            else:
                fault = rule
        if fault is None:
            return await self._forward(request, headers, None)
        match fault.action:
            case Answer() as answer:
                await self._drain(request)
                _fire(fault, request)
                await self._send_error(request, answer)
                return True
            case Hang(at=None):
                await self._drain(request)
                _fire(fault, request)
                await self._reader.read(1)  # until the client goes away
                return False
            case Cut(where="request", at=at):
                await self._drain(request, at)
                if request.received < at:
                    return False  # it was too short, the rule has not fired
                return await self._cut(fault, request)
            case Cut(where="before"):
                await self._drain(request)
                return await self._cut(fault, request)
        return await self._forward(request, headers, fault)

    async def _forward(self, request: Request, headers: Headers, fault: Rule | None) -> bool:
        """Give the request to the server, and the answer to the client."""
        server, to_server = await self._connected()
        chunked = "transfer-encoding" in request.headers
        _write_head(to_server, f"{request.method} {request.target} HTTP/1.1", headers, {"expect", "connection"})
        request.forwarded = True
        async for piece in self._body(request):
            await _write(to_server, piece, chunked)
        await _write_end(to_server, chunked)

        head = await _read_head(server)
        if head is None:
            raise RuntimeError(f"the S3 server closed the connection instead of answering {request.target}")
        line, answer = head
        status = int(line.split(" ", 2)[1])
        bodiless = request.method == "HEAD" or status in (204, 304)
        length = 0 if bodiless else _length(answer)
        pieces = _pieces(server, length)
        if fault is not None and isinstance(fault.action, Cut) and fault.action.where == "after":
            async for _ in pieces:
                pass
            return await self._cut(fault, request)
        if fault is not None and isinstance(fault.action, Shorter) and length and length >= fault.action.by:
            answer = _shortened(answer, length - fault.action.by, relabel=fault.action.relabel)
        chunked = length is None
        request.status = status
        _write_head(self._writer, line, answer, {"connection"})
        kept = await self._answer(request, pieces, length, fault, chunked=chunked)
        if any(name.lower() == "connection" and value.lower() == "close" for name, value in answer):
            to_server.close()  # the client's stays open, as S3 would have it
            self._server = None
        return kept

    async def _answer(
        self, request: Request, pieces: AsyncIterator[bytes], length: int | None, fault: Rule | None, *, chunked: bool
    ) -> bool:
        """Pass the body of the server's answer on, or what the fault leaves of it."""
        action = fault.action if fault is not None else None
        limit = action.at if isinstance(action, Cut | Hang) else None
        if isinstance(action, Shorter) and length and length >= action.by:
            limit = length - action.by
        async for piece in pieces:
            if fault is not None and isinstance(action, Flip) and 0 <= action.at - request.sent < len(piece):
                at = action.at - request.sent
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                _fire(fault, request)
            passed = piece if limit is None else piece[: max(limit - request.sent, 0)]
            limited = len(passed) < len(piece)
            # What is noted before it is sent is there when the client has it and the test looks.
            if fault is not None and limited and not isinstance(action, Cut) and action not in request.faults:
                _fire(fault, request)
            request.sent += len(passed)
            await _write(self._writer, passed, chunked)
            if fault is not None and limited and isinstance(action, Cut):
                return await self._cut(fault, request)
            if limited and isinstance(action, Hang):
                await self._reader.read(1)  # until the client goes away
                return False
        await _write_end(self._writer, chunked)
        return True

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection to the server, anew if it has closed it since the last request."""
        if self._server is not None and self._server[0].at_eof():
            self._server[1].close()
            self._server = None
        if self._server is None:
            try:
                self._server = await asyncio.open_connection(*self._address, limit=_BUFFER)
            except OSError as e:
                raise RuntimeError("the S3 server does not answer") from e
            _without_delay(self._server[1])
        return self._server

    async def _body(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The request's body, piece by piece; the client is told to send it if it waits for that."""
        if "100-continue" in request.headers.get("expect", "").lower():
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = "transfer-encoding" in request.headers
        length = None if chunked else int(request.headers.get("content-length", "0"))
        pieces = _chunks(self._reader) if length is None else _pieces(self._reader, length)
        async for piece in pieces:
            request.received += len(piece)
            yield piece

    async def _drain(self, request: Request, limit: int | None = None) -> None:
        """Read the request's body, at least so many bytes of it, and let it go."""
        async with contextlib.aclosing(self._body(request)) as pieces:
            async for _ in pieces:
                if limit is not None and request.received >= limit:
                    return

    async def _send_error(self, request: Request, answer: Answer) -> None:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{escape(answer.code)}</Code><Message>{escape(answer.message)}</Message>"
            f"<Resource>{escape(request.path)}</Resource><RequestId>0123456789ABCDEF</RequestId></Error>"
        ).encode()
        if request.method == "HEAD":
            body = b""  # S3 can only give the status
        headers = [*answer.headers, ("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        request.status, request.sent = answer.status, len(body)
        _write_head(self._writer, f"HTTP/1.1 {answer.status} {answer.code}", headers, set())
        await _write(self._writer, body, chunked=False)

    async def _cut(self, rule: Rule, request: Request) -> bool:
        """End the connection once the client has what was sent before."""
        assert isinstance(rule.action, Cut)
        connection = self._writer.get_extra_info("socket")
        await self._writer.drain()
        patience = time.perf_counter() + 5
        # A reset takes back what was not delivered.
        while _unsent(self._writer) and time.perf_counter() < patience:
            await asyncio.sleep(0.001)
        _fire(rule, request)
        if rule.action.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        return False


# ---------------------------------------------------------------------------------------------------- HTTP's messages


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, Headers] | None:
    """First line and headers; None: the other side has closed. What only says "go on" is skipped."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as e:
            if e.partial:
                raise
            return None
        line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        if line.startswith("HTTP/1.1 100"):
            continue
        return line, [(name, value.strip()) for name, _, value in (field.partition(":") for field in rest)]


def _write_head(writer: asyncio.StreamWriter, line: str, headers: Headers, dropped: set[str]) -> None:
    kept = (f"{name}: {value}" for name, value in headers if name.lower() not in dropped)
    writer.write(("\r\n".join([line, *kept]) + "\r\n\r\n").encode("latin-1"))


async def _pieces(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """A body of a known length, as it arrives; None: one in chunks.

    Raises:
        EOFError: The connection ended before it.
    """
    if length is None:
        async for piece in _chunks(reader):
            yield piece
        return
    while length:
        piece = await reader.read(min(length, _BUFFER))
        if not piece:
            raise EOFError
        length -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A body in chunks, without their framing. Trailers of HTTP's are dropped: S3's are in the body."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        async for piece in _pieces(reader, size):
            yield piece
        await reader.readline()
    while (await reader.readline()).strip():
        pass


async def _write(writer: asyncio.StreamWriter, piece: bytes, chunked: bool) -> None:
    """Send a piece of a body, no faster than the other side takes it."""
    if piece:
        writer.writelines([b"%x\r\n" % len(piece), piece, b"\r\n"] if chunked else [piece])
        await writer.drain()


async def _write_end(writer: asyncio.StreamWriter, chunked: bool) -> None:
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def _length(headers: Headers) -> int | None:
    """Of an answer's body; None: it comes in chunks.

    Raises:
        RuntimeError: It ends with the connection, which no server here does.
    """
    values = {name.lower(): value for name, value in headers}
    if "chunked" in values.get("transfer-encoding", ""):
        return None
    if "content-length" not in values:
        raise RuntimeError("the S3 server gave an answer without a length")
    return int(values["content-length"])


def _shortened(headers: Headers, length: int, *, relabel: bool) -> Headers:
    """The headers of a body that is shorter."""
    changed = []
    for name, value in headers:
        new = value
        if name.lower() == "content-length":
            new = str(length)
        elif name.lower() == "content-range" and relabel:
            match = re.fullmatch(r"bytes (\d+)-\d+/(.*)", value)
            assert match is not None
            new = f"bytes {match[1]}-{int(match[1]) + length - 1}/{match[2]}"
        changed.append((name, new))
    return changed


# -------------------------------------------------------------------------------------------------------------- parts


def _described(method: str, target: str, headers: Headers) -> Request:
    address = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
    lower = {name.lower(): value for name, value in headers}
    return Request(method, target, unquote(address.path), query, lower, time.perf_counter())


async def _prelude(action: Prelude, request: Request, headers: Headers) -> Headers:
    """Let something happen before a request goes on; the headers with which it does."""
    match action:
        case Latency(seconds=seconds):
            await asyncio.sleep(seconds)
        case Before(call=call):
            await asyncio.to_thread(call, request)
        case Unranged():
            headers = [(name, value) for name, value in headers if name.lower() != "range"]
    return headers


def _fire(rule: Rule, request: Request) -> None:
    rule.done += 1
    request.faults.append(rule.action)


def _most_at_once(spans: Iterable[tuple[float, float | None]]) -> int:
    """The largest number of spans that share a moment."""
    steps = []
    for start, end in spans:
        steps.append((start, 1))
        if end is not None:
            steps.append((end, -1))
    most = now = 0
    for _, step in sorted(steps):  # at one moment, what ends does so before what starts
        now += step
        most = max(most, now)
    return most


def _unsent(writer: asyncio.StreamWriter) -> int:
    """Bytes that the other host has not acknowledged."""
    if writer.transport.get_write_buffer_size():
        return writer.transport.get_write_buffer_size()
    number = writer.get_extra_info("socket").fileno()
    if number < 0:  # closed meanwhile: the other host has hung up
        return 0
    answer = fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def _without_delay(writer: asyncio.StreamWriter) -> None:
    """asyncio does this by itself, but says so nowhere."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
