"""Read and write the HTTP/1.1 messages that an S3 proxy forwards."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

from tests.faults.s3_faults import _BUFFER, Headers


async def read_head(reader: asyncio.StreamReader) -> tuple[str, Headers] | None:
    """Read first line and headers; None if the other side has closed. Skips "100 Continue"."""
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


def write_head(writer: asyncio.StreamWriter, line: str, headers: Headers, dropped: set[str]) -> None:
    kept = (f"{name}: {value}" for name, value in headers if name.lower() not in dropped)
    writer.write(("\r\n".join([line, *kept]) + "\r\n\r\n").encode("latin-1"))


async def pieces(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """Yield a body of ``length`` bytes in pieces; None for a chunked body.

    Raises:
        EOFError: The connection ended before the body.
    """
    if length is None:
        async for piece in chunks(reader):
            yield piece
        return
    while length:
        piece = await reader.read(min(length, _BUFFER))
        if not piece:
            raise EOFError
        length -= len(piece)
        yield piece


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield a chunked body without its framing. Drops HTTP trailers; those of S3 are in the body."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        async for piece in pieces(reader, size):
            yield piece
        await reader.readline()
    while (await reader.readline()).strip():
        pass


async def write(writer: asyncio.StreamWriter, piece: bytes, chunked: bool) -> None:
    """Send a piece of a body, and wait until the other side accepts more."""
    if piece:
        # Not writelines: drain does not wait for it in Python 3.12 and 3.13 before 3.12.9 and 3.13.2 (CVE-2024-12254).
        for part in (b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,):
            writer.write(part)
        await writer.drain()


async def write_end(writer: asyncio.StreamWriter, chunked: bool) -> None:
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def length(headers: Headers) -> int | None:
    """Return the length of an answer's body; None for a chunked body.

    Raises:
        RuntimeError: The answer has no length; the servers of these tests always send one.
    """
    values = {name.lower(): value for name, value in headers}
    if "chunked" in values.get("transfer-encoding", ""):
        return None
    if "content-length" not in values:
        raise RuntimeError("the S3 server gave an answer without a length")
    return int(values["content-length"])


def shortened(headers: Headers, length: int, *, relabel: bool) -> Headers:
    """Return the headers for a shorter body."""
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
