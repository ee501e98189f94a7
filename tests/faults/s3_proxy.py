"""Run a proxy in front of an S3 server that logs every request and injects faults of networks and servers."""

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
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
    from types import TracebackType

from tests.faults import s3_http
from tests.faults.rules import Before, Rule
from tests.faults.s3_faults import (
    _BUFFER,
    Action,
    Answer,
    Cut,
    Flip,
    Hang,
    Headers,
    Latency,
    Prelude,
    Request,
    Shorter,
    Unranged,
)

# -------------------------------------------------------------------------------------------------------- the proxy


class Proxy:
    """Context manager that runs the proxy.

    The proxy evaluates rules in order. It applies all matching preludes to a request, and the first matching fault.

    Args:
        upstream: URL of the server.
    """

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname or "", address.port or 80)
        self.rules: list[Rule] = []
        self.log: list[Request] = []
        """All requests so far, in the order of arrival."""
        self.broken: list[BaseException] = []
        """Errors of the proxy itself. The end of ``with`` raises the first, so that a test does not blame the code
        under test."""
        self.connections = 0
        """Number of accepted connections."""
        self.port = 0
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """Endpoint for clients."""
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
        """Add a rule; see ``Rule`` for the arguments. ``Rule.fired`` counts its actions."""
        rule = Rule(action, operation, match, when, nth, times, each)
        self.rules = [*self.rules, rule]
        return rule

    def clear(self) -> None:
        """Drop all rules and logged requests."""
        self.rules = []
        self.log = []

    # -------------------------------------------------------------------------------------------- asking what was seen

    def requests(self, operation: str | None = None, match: str = "") -> list[Request]:
        """Return the requests of an operation (botocore's name) whose decoded path and query match."""
        return [r for r in list(self.log) if operation in (None, r.operation) and re.search(match, unquote(r.target))]

    def most_in_flight(self, operation: str | None = None, match: str = "") -> int:
        """Return the largest number of concurrent requests."""
        return _most_at_once((r.started, r.ended) for r in self.requests(operation, match))

    def bytes_by_key(self) -> dict[str, int]:
        """Return the bytes of bodies sent to the client for reads, by key of the object."""
        totals: dict[str, int] = {}
        for request in self.requests("get_object"):
            totals[request.key] = totals.get(request.key, 0) + request.sent
        return totals

    # ------------------------------------------------------------------------------------------------------ serving it

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        served: dict[_Connection, asyncio.Task[None]] = {}

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            connection = _Connection(self, reader, writer, self._upstream)
            served[connection] = asyncio.create_task(self._serve_connection(connection))

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_BUFFER, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in served.values():
            task.cancel()
        await asyncio.gather(*served.values(), return_exceptions=True)
        for connection in served:
            connection.abort()
        await asyncio.sleep(0)  # the sockets are closed in the next turn of the loop

    async def _serve_connection(self, connection: _Connection) -> None:
        try:
            await connection.serve()
        except (OSError, EOFError):
            pass  # the client closed the connection
        except Exception as e:
            self.broken.append(e)
        finally:
            connection.close()


class _Connection:
    """A client's connection and its connection to the server."""

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
        """Answer requests until the client or a rule ends the connection."""
        while (head := await s3_http.read_head(self._reader)) is not None:
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
        """Close both connections once all is sent."""
        self._writer.close()
        if self._server is not None:
            self._server[1].close()

    def abort(self) -> None:
        """Close both connections at once: the client may read no more."""
        self._writer.transport.abort()
        if self._server is not None:
            self._server[1].transport.abort()

    async def _handle(self, request: Request, headers: Headers) -> bool:
        """Answer one request; return whether the connection stays open."""
        busy: list[Rule] = []
        try:
            return await self._by_rules(request, headers, busy)
        finally:
            for rule in busy:
                rule.busy -= 1

    async def _by_rules(self, request: Request, headers: Headers, busy: list[Rule]) -> bool:
        """Answer one request according to the rules; add the rules that act to ``busy``."""
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
                    return False  # the body was too short: the rule has not fired
                return await self._cut(fault, request)
            case Cut(where="before"):
                await self._drain(request)
                return await self._cut(fault, request)
        return await self._forward(request, headers, fault)

    async def _forward(self, request: Request, headers: Headers, fault: Rule | None) -> bool:
        """Forward the request to the server, and the answer to the client."""
        server, to_server = await self._connected()
        chunked = "transfer-encoding" in request.headers
        s3_http.write_head(to_server, f"{request.method} {request.target} HTTP/1.1", headers, {"expect", "connection"})
        request.forwarded = True
        async for piece in self._body(request):
            await s3_http.write(to_server, piece, chunked)
        await s3_http.write_end(to_server, chunked)

        head = await s3_http.read_head(server)
        if head is None:
            raise RuntimeError(f"the S3 server closed the connection instead of answering {request.target}")
        line, answer = head
        status = int(line.split(" ", 2)[1])
        bodiless = request.method == "HEAD" or status in (204, 304)
        length = 0 if bodiless else s3_http.length(answer)
        pieces = s3_http.pieces(server, length)
        if fault is not None and isinstance(fault.action, Cut) and fault.action.where == "after":
            async for _ in pieces:
                pass
            return await self._cut(fault, request)
        if fault is not None and isinstance(fault.action, Shorter) and length and length >= fault.action.by:
            answer = s3_http.shortened(answer, length - fault.action.by, relabel=fault.action.relabel)
        chunked = length is None
        request.status = status
        s3_http.write_head(self._writer, line, answer, {"connection"})
        kept = await self._answer(request, pieces, length, fault, chunked=chunked)
        if any(name.lower() == "connection" and value.lower() == "close" for name, value in answer):
            to_server.close()  # the client's connection stays open, as with S3
            self._server = None
        return kept

    async def _answer(
        self, request: Request, pieces: AsyncIterator[bytes], length: int | None, fault: Rule | None, *, chunked: bool
    ) -> bool:
        """Forward the body of the server's answer, changed by the fault."""
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
            # Counted before it is sent, so that a test that has the answer sees the count.
            if fault is not None and limited and not isinstance(action, Cut) and action not in request.faults:
                _fire(fault, request)
            request.sent += len(passed)
            await s3_http.write(self._writer, passed, chunked)
            if fault is not None and limited and isinstance(action, Cut):
                return await self._cut(fault, request)
            if limited and isinstance(action, Hang):
                await self._reader.read(1)  # until the client goes away
                return False
        await s3_http.write_end(self._writer, chunked)
        return True

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection to the server; reconnect if the server has closed it."""
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
        """Yield the request's body in pieces; send "100 Continue" if the client waits for it."""
        if "100-continue" in request.headers.get("expect", "").lower():
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = "transfer-encoding" in request.headers
        length = None if chunked else int(request.headers.get("content-length", "0"))
        pieces = s3_http.chunks(self._reader) if length is None else s3_http.pieces(self._reader, length)
        async for piece in pieces:
            request.received += len(piece)
            yield piece

    async def _drain(self, request: Request, limit: int | None = None) -> None:
        """Read and drop the request's body, or at least ``limit`` bytes of it."""
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
            body = b""  # an answer to HEAD has no body
        headers = [*answer.headers, ("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        request.status, request.sent = answer.status, len(body)
        s3_http.write_head(self._writer, f"HTTP/1.1 {answer.status} {answer.code}", headers, set())
        await s3_http.write(self._writer, body, chunked=False)

    async def _cut(self, rule: Rule, request: Request) -> bool:
        """End the connection after the client has received the bytes sent so far."""
        assert isinstance(rule.action, Cut)
        connection = self._writer.get_extra_info("socket")
        await self._writer.drain()
        patience = time.perf_counter() + 5
        # A reset drops undelivered bytes.
        while _unsent(self._writer) and time.perf_counter() < patience:
            await asyncio.sleep(0.001)
        _fire(rule, request)
        if rule.action.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        return False


# -------------------------------------------------------------------------------------------------------------- parts


def _described(method: str, target: str, headers: Headers) -> Request:
    address = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
    lower = {name.lower(): value for name, value in headers}
    return Request(method, target, unquote(address.path), query, lower, time.perf_counter())


async def _prelude(action: Prelude, request: Request, headers: Headers) -> Headers:
    """Apply an action before a request is forwarded; return the headers to forward."""
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
    """Return the largest number of spans that overlap at one moment."""
    steps = []
    for start, end in spans:
        steps.append((start, 1))
        if end is not None:
            steps.append((end, -1))
    most = now = 0
    for _, step in sorted(steps):  # at equal times, ends come before starts
        now += step
        most = max(most, now)
    return most


def _unsent(writer: asyncio.StreamWriter) -> int:
    """Return the number of bytes that the other host has not acknowledged."""
    if writer.transport.get_write_buffer_size():
        return writer.transport.get_write_buffer_size()
    number = writer.get_extra_info("socket").fileno()
    if number < 0:  # the other host has closed the connection meanwhile
        return 0
    answer = fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def _without_delay(writer: asyncio.StreamWriter) -> None:
    """Set TCP_NODELAY; asyncio does so too, but does not document it."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
