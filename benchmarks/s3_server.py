"""A small S3 server on the loopback that uses little CPU time, so that benchmarks measure the client.

Bodies are sent from the page cache to the socket (``sendfile``) and written from the socket to a file; a multipart
upload is completed by recording its parts, not by copying them. It supports the requests for storing and reading files:
GET and HEAD with ranges, PUT, multipart uploads, listing, DELETE one or many, If-Match and If-None-Match. It ignores
signatures and checksums. An ETag is a unique string, never the MD5 of the bytes, because computing MD5 would take most
of the time, and S3 itself promises it for few objects. ``--latency`` and ``--rate`` simulate the distance to S3.

    python benchmarks/s3_server.py --serve bucket=/some/directory
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import io
import itertools
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUFFER = 256 << 10
"""Bytes that a thread takes from its socket at a time: they are in the processor's cache when they are written."""
UNKNOWN = frozenset(
    {
        "acl",
        "attributes",
        "cors",
        "legal-hold",
        "lifecycle",
        "policy",
        "retention",
        "select",
        "tagging",
        "torrent",
        "versionId",
        "versioning",
        "versions",
    }
)
"""Parameters of requests that this server does not support."""
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


# ------------------------------------------------------------------------------------------------------ for callers


@dataclass(frozen=True)
class Server:
    """A server that runs in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]

    def cpu(self) -> float:
        """Seconds of processor time that it took so far, the kernel's on its behalf included."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def environment(self) -> dict[str, str]:
        """Environment variables that make S3 clients use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Server]:
    """Run a server with these arguments of the command line, on a free port.

    Raises:
        RuntimeError: The server did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, "--until-eof", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise RuntimeError(f"the S3 server ended with {process.wait()}")
        try:
            yield Server(url, process)
        finally:
            process.stdin.close()  # it removes its directory


# ---------------------------------------------------------------------------------------------------- stored objects


class S3Error(Exception):
    """Error answer to a client."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Stored:
    """An object, or a part of one."""

    files: tuple[tuple[Path, int], ...]
    """Files whose bytes follow one another, with their sizes."""
    headers: dict[str, str] = field(default_factory=dict)
    """Content-Type and metadata."""
    own: bool = True
    """Whether the files are the server's to remove."""
    tag: str = field(default_factory=lambda: f'"{uuid.uuid4().hex}-1"')
    """The ETag, in a form that clients do not interpret as MD5."""
    time: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(size for _, size in self.files)

    def remove(self) -> None:
        """Remove the files; readers with open files can still read them."""
        if self.own:
            for path, _ in self.files:
                path.unlink(missing_ok=True)


@dataclass
class Upload:
    """A multipart upload that is not complete."""

    key: str
    headers: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)
    started: float = field(default_factory=time.time)


@dataclass
class Bucket:
    """Objects and uploads by their names."""

    objects: dict[str, Stored] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    """The objects' keys, sorted by their UTF-8 as S3 does it."""
    uploads: dict[str, Upload] = field(default_factory=dict)

    def put(self, key: str, stored: Stored) -> None:
        """Add an object; replace an existing one."""
        old = self.objects.get(key)
        if old is None:
            bisect.insort(self.keys, key)
        else:
            old.remove()
        self.objects[key] = stored

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        stored = self.objects.pop(key, None)
        if stored is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]
            stored.remove()


class Store:
    """All buckets. Its lock protects the tables; bodies are read and written without it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.buckets: dict[str, Bucket] = {}
        self._names = itertools.count()

    def new_file(self) -> Path:
        """Path of the next body."""
        return self.root / str(next(self._names))

    def bucket(self, name: str) -> Bucket:
        """A bucket by its name."""
        try:
            return self.buckets[name]
        except KeyError:
            raise S3Error(404, "NoSuchBucket") from None

    def object(self, bucket: str, key: str) -> Stored:
        """An object by its key."""
        try:
            return self.bucket(bucket).objects[key]
        except KeyError:
            raise S3Error(404, "NoSuchKey") from None

    def upload(self, bucket: str, upload: str) -> Upload:
        """A pending upload by its id."""
        try:
            return self.bucket(bucket).uploads[upload]
        except KeyError:
            raise S3Error(404, "NoSuchUpload") from None

    def adopt(self, name: str, directory: Path) -> None:
        """Serve a directory's files as a bucket's objects, in place."""
        bucket = self.buckets.setdefault(name, Bucket())
        for path in directory.rglob("*"):
            if path.is_file():
                stored = Stored(((path, path.stat().st_size),), own=False)
                bucket.put(path.relative_to(directory).as_posix(), stored)


# ----------------------------------------------------------------------------------------------- one client at a time


class Connection:
    """Answers the requests of one connection, in a thread."""

    def __init__(self, store: Store, peer: socket.socket, latency: float, rate: float) -> None:
        self.store = store
        self.peer = peer
        self.stream = io.BufferedReader(peer.makefile("rb", 0), 1 << 16)
        self.latency = latency
        self.rate = rate
        self.buffer = memoryview(bytearray(BUFFER))
        self.method = self.name = self.key = ""
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}

    def serve(self) -> None:
        """Answer until the client disconnects."""
        with self.peer, self.stream, contextlib.suppress(OSError, EOFError):
            self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._read_head():
                if self.latency:
                    time.sleep(self.latency)
                try:
                    self._handle()
                except S3Error as e:
                    body = f"<Error><Code>{e.code}</Code><Message>{e.code}</Message></Error>"
                    self._answer(e.status, body)

    def _read_head(self) -> bool:
        line = self.stream.readline()
        if not line:
            return False
        self.method, target, _ = line.decode("latin-1").split(" ", 2)
        self.headers = {}
        while (line := self.stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        path, _, query = target.partition("?")
        self.name, _, self.key = unquote(path).lstrip("/").partition("/")
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        if "100-continue" in self.headers.get("expect", "").lower():
            self.peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _handle(self) -> None:
        about = "object" if self.key else "bucket" if self.name else "service"
        known = not self.query.keys() & UNKNOWN and "x-amz-copy-source" not in self.headers
        if known and self.method == "PUT" and about == "object":
            return self._put()
        body = bytearray()
        self._read_body(body.extend)
        for method, where, names, call in _OPERATIONS:
            if known and method == self.method and where == about and names <= self.query.keys():
                return call(self, bytes(body))
        raise S3Error(501, "NotImplemented")

    # -------------------------------------------------------------------------------------------------------- bodies

    def _read_body(self, take: Callable[[memoryview], object]) -> None:
        """Yield the request's body without up to two layers of chunks: HTTP's, and S3's with its checksums at the
        end.
        """
        layered = "aws-chunked" in self.headers.get("content-encoding", "") or self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-")
        if "chunked" in self.headers.get("transfer-encoding", ""):
            if layered:
                whole = bytearray()
                self._read_chunks(self.stream, whole.extend)
                return self._read_chunks(io.BytesIO(whole), take)
            return self._read_chunks(self.stream, take)
        if layered:
            return self._read_chunks(self.stream, take)
        return self._read(self.stream, int(self.headers.get("content-length", 0)), take)

    def _read(self, stream: io.BufferedIOBase, length: int, take: Callable[[memoryview], object]) -> None:
        began, total = time.perf_counter(), length
        while length:
            got = stream.readinto(self.buffer[: min(length, BUFFER)])
            if not got:
                raise EOFError
            take(self.buffer[:got])
            length -= got
            self._slow_down(began, total - length)

    def _read_chunks(self, stream: io.BufferedIOBase, take: Callable[[memoryview], object]) -> None:
        while size := int(stream.readline().partition(b";")[0], 16):
            self._read(stream, size, take)
            stream.readline()
        while stream.readline().strip():
            pass  # trailers

    def _slow_down(self, began: float, done: int) -> None:
        if self.rate:
            time.sleep(max(0.0, began + done / self.rate - time.perf_counter()))

    def _receive(self) -> Stored:
        """Store the request's body."""
        path = self.store.new_file()
        with path.open("wb", buffering=0) as file:
            try:
                self._read_body(file.write)
                size = file.tell()
            except BaseException:
                path.unlink()
                raise
        kept = {n: v for n, v in self.headers.items() if n == "content-type" or n.startswith("x-amz-meta-")}
        return Stored(((path, size),), kept)

    # ------------------------------------------------------------------------------------------------------- objects

    def _put(self) -> None:
        stored = self._receive()
        try:
            with self.store.lock:
                if "uploadId" in self.query:
                    parts = self.store.upload(self.name, self.query["uploadId"]).parts
                    old = parts.get(number := int(self.query["partNumber"]))
                    parts[number] = stored
                    if old is not None:
                        old.remove()
                else:
                    self._check_absent()
                    self.store.bucket(self.name).put(self.key, stored)
        except S3Error:
            stored.remove()
            raise
        self._answer(200, headers={"ETag": stored.tag})

    def _check_absent(self) -> None:
        if self.headers.get("if-none-match") == "*" and self.key in self.store.bucket(self.name).objects:
            raise S3Error(412, "PreconditionFailed")

    def _get(self, _: bytes) -> None:
        with self.store.lock, contextlib.ExitStack() as opened:
            stored = self.store.object(self.name, self.key)
            wanted = self.headers.get("if-match", stored.tag)
            if wanted not in (stored.tag, stored.tag.strip('"'), "*"):
                raise S3Error(412, "PreconditionFailed")
            start, end = self._range(stored.size)
            pieces, offset = [], 0
            for path, size in stored.files:
                if offset < end and start < offset + size and self.method == "GET":
                    file = opened.enter_context(path.open("rb", buffering=0))
                    pieces.append((file.fileno(), max(start - offset, 0), min(end - offset, size)))
                offset += size
            keep_open = opened.pop_all()
        headers = {
            "ETag": stored.tag,
            "Last-Modified": formatdate(stored.time, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "binary/octet-stream",
            **{name.title(): value for name, value in stored.headers.items()},
            "Content-Length": str(end - start),
        }
        partial = "range" in self.headers and stored.size > 0
        if partial:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size}"
        with keep_open:
            self._send_head(206 if partial else 200, headers, more=bool(pieces))
            began, sent = time.perf_counter(), 0
            for descriptor, low, high in pieces:
                position = low
                while position < high:
                    count = min(high - position, BUFFER * 4 if self.rate else 1 << 30)
                    done = os.sendfile(self.peer.fileno(), descriptor, position, count)
                    position += done
                    sent += done
                    self._slow_down(began, sent)

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if match is None or not size or match[0] == "bytes=-":
            return 0, size
        if not match[1]:
            return max(size - int(match[2]), 0), size
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if start >= size or start >= end:
            raise S3Error(416, "InvalidRange")
        return start, end

    def _delete(self, _: bytes) -> None:
        with self.store.lock:
            self.store.bucket(self.name).delete(self.key)
        self._answer(204)

    # ------------------------------------------------------------------------------------------------------- uploads

    def _create_upload(self, _: bytes) -> None:
        kept = {n: v for n, v in self.headers.items() if n == "content-type" or n.startswith("x-amz-meta-")}
        upload = uuid.uuid4().hex
        with self.store.lock:
            self.store.bucket(self.name).uploads[upload] = Upload(self.key, kept)
        self._answer_xml("InitiateMultipartUploadResult", f"{self._here()}<UploadId>{upload}</UploadId>")

    def _complete_upload(self, body: bytes) -> None:
        named = [
            (int(_child(part, "PartNumber")), _child(part, "ETag").strip('"'))
            for part in ElementTree.fromstring(body)  # noqa: S314 (from the benchmark's own client)
        ]
        with self.store.lock:
            self._check_absent()
            upload = self.store.upload(self.name, self.query["uploadId"])
            if [number for number, _ in named] != sorted({number for number, _ in named}):
                raise S3Error(400, "InvalidPartOrder")
            if not named or any(n not in upload.parts or upload.parts[n].tag.strip('"') != tag for n, tag in named):
                raise S3Error(400, "InvalidPart")
            if any(upload.parts[number].size < 5 << 20 for number, _ in named[:-1]):
                raise S3Error(400, "EntityTooSmall")
            bucket = self.store.bucket(self.name)
            del bucket.uploads[self.query["uploadId"]]
            chosen = [upload.parts.pop(number) for number, _ in named]
            stored = Stored(tuple(file for part in chosen for file in part.files), upload.headers)
            bucket.put(upload.key, stored)
            for part in upload.parts.values():
                part.remove()
        self._answer_xml("CompleteMultipartUploadResult", f"{self._here()}<ETag>{escape(stored.tag)}</ETag>")

    def _abort_upload(self, _: bytes) -> None:
        with self.store.lock:
            upload = self.store.upload(self.name, self.query["uploadId"])
            del self.store.bucket(self.name).uploads[self.query["uploadId"]]
            for part in upload.parts.values():
                part.remove()
        self._answer(204)

    def _list_parts(self, _: bytes) -> None:
        with self.store.lock:
            parts = sorted(self.store.upload(self.name, self.query["uploadId"]).parts.items())
        items = "".join(
            f"<Part><PartNumber>{number}</PartNumber><LastModified>{_iso(part.time)}</LastModified>"
            f"<ETag>{escape(part.tag)}</ETag><Size>{part.size}</Size></Part>"
            for number, part in parts
        )
        self._answer_xml(
            "ListPartsResult",
            f"{self._here()}<UploadId>{self.query['uploadId']}</UploadId><IsTruncated>false</IsTruncated>{items}",
        )

    def _list_uploads(self, _: bytes) -> None:
        with self.store.lock:
            uploads = sorted((u.key, name, u.started) for name, u in self.store.bucket(self.name).uploads.items())
        prefix = self.query.get("prefix", "")
        items = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId><Initiated>{_iso(started)}</Initiated></Upload>"
            for key, name, started in uploads
            if key.startswith(prefix)
        )
        self._answer_xml(
            "ListMultipartUploadsResult", f"<Bucket>{self.name}</Bucket><IsTruncated>false</IsTruncated>{items}"
        )

    # ------------------------------------------------------------------------------------------------------- buckets

    def _list(self, _: bytes) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        limit = min(int(self.query.get("max-keys", 1000)), 1000)
        after = unquote(self.query.get("continuation-token", "")) or self.query.get("start-after", "")
        url = self.query.get("encoding-type") == "url"
        objects: list[tuple[str, Stored]] = []
        folders: list[str] = []
        last = ""
        truncated = False
        with self.store.lock:
            bucket = self.store.bucket(self.name)
            at = max(bisect.bisect_left(bucket.keys, prefix), bisect.bisect_right(bucket.keys, after))
            while at < len(bucket.keys) and (key := bucket.keys[at]).startswith(prefix):
                rest, found, _after = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                folder = prefix + rest + found if found else ""
                if folder and after.startswith(folder):
                    at = bisect.bisect_left(bucket.keys, folder + chr(0x10FFFF), at)  # was in the page before
                    continue
                if len(objects) + len(folders) == limit:
                    truncated = True
                    break
                if folder:
                    folders.append(folder)
                    last = folder
                    at = bisect.bisect_left(bucket.keys, folder + chr(0x10FFFF), at)
                else:
                    objects.append((key, bucket.objects[key]))
                    last = key
                    at += 1

        def text(value: str) -> str:
            return quote(value) if url else escape(value)

        items = [
            f"<Name>{self.name}</Name><Prefix>{text(prefix)}</Prefix><KeyCount>{len(objects) + len(folders)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(truncated).lower()}</IsTruncated>"
        ]
        if url:
            items.append("<EncodingType>url</EncodingType>")
        if truncated:
            items.append(f"<NextContinuationToken>{quote(last)}</NextContinuationToken>")
        items += (
            f"<Contents><Key>{text(key)}</Key><LastModified>{_iso(o.time)}</LastModified><ETag>{escape(o.tag)}</ETag>"
            f"<Size>{o.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, o in objects
        )
        items += (f"<CommonPrefixes><Prefix>{text(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        self._answer_xml("ListBucketResult", "".join(items))

    def _delete_many(self, body: bytes) -> None:
        keys = [
            _child(item, "Key")
            for item in ElementTree.fromstring(body)  # noqa: S314 (from the benchmark's own client)
            if item.tag.endswith("Object")
        ]
        with self.store.lock:
            bucket = self.store.bucket(self.name)
            for key in keys:
                bucket.delete(key)
        self._answer_xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def _create_bucket(self, _: bytes) -> None:
        with self.store.lock:
            self.store.buckets.setdefault(self.name, Bucket())
        self._answer(200)

    def _head_bucket(self, _: bytes) -> None:
        self.store.bucket(self.name)
        self._answer(200)

    def _locate_bucket(self, _: bytes) -> None:
        self.store.bucket(self.name)
        self._answer_xml("LocationConstraint", "")

    def _list_buckets(self, _: bytes) -> None:
        names = "".join(
            f"<Bucket><Name>{name}</Name><CreationDate>{_iso(0)}</CreationDate></Bucket>"
            for name in sorted(self.store.buckets)
        )
        self._answer_xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>")

    # ------------------------------------------------------------------------------------------------------- answers

    def _here(self) -> str:
        return f"<Bucket>{self.name}</Bucket><Key>{escape(self.key)}</Key>"

    def _answer_xml(self, root: str, inner: str) -> None:
        self._answer(200, f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{NAMESPACE}">{inner}</{root}>')

    def _answer(self, status: int, body: str = "", headers: dict[str, str] | None = None) -> None:
        data = body.encode() if self.method != "HEAD" else b""
        described = {"Content-Type": "application/xml"} if data else {}
        length = {"Content-Length": str(len(data))} if status != 204 else {}
        self._send_head(status, {**(headers or {}), **described, **length}, more=bool(data))
        if data:
            self.peer.sendall(data)

    def _send_head(self, status: int, headers: dict[str, str], *, more: bool) -> None:
        lines = (f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} S3\r\nx-amz-request-id: 0\r\n{''.join(lines)}\r\n".encode("latin-1")
        self.peer.sendall(head, socket.MSG_MORE if more else 0)


_OPERATIONS: tuple[tuple[str, str, set[str], Callable[[Connection, bytes], None]], ...] = (
    ("GET", "object", {"uploadId"}, Connection._list_parts),
    ("GET", "object", set(), Connection._get),
    ("HEAD", "object", set(), Connection._get),
    ("POST", "object", {"uploads"}, Connection._create_upload),
    ("POST", "object", {"uploadId"}, Connection._complete_upload),
    ("DELETE", "object", {"uploadId"}, Connection._abort_upload),
    ("DELETE", "object", set(), Connection._delete),
    ("GET", "bucket", {"list-type"}, Connection._list),
    ("GET", "bucket", {"uploads"}, Connection._list_uploads),
    ("GET", "bucket", {"location"}, Connection._locate_bucket),
    ("POST", "bucket", {"delete"}, Connection._delete_many),
    ("PUT", "bucket", set(), Connection._create_bucket),
    ("HEAD", "bucket", set(), Connection._head_bucket),
    ("GET", "service", set(), Connection._list_buckets),
)


def _child(element: ElementTree.Element, name: str) -> str:
    """Text of a child, whatever its namespace."""
    return next((child.text or "" for child in element if child.tag.rpartition("}")[2] == name), "")


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(moment))


# -------------------------------------------------------------------------------------------------------- as a script


def _serve(store: Store, listener: socket.socket, latency: float, rate: float) -> None:
    while True:
        peer, _ = listener.accept()
        connection = Connection(store, peer, latency, rate)
        threading.Thread(target=connection.serve, daemon=True).start()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--root", type=Path, help="directory of uploaded objects; default: a temporary directory")
    parser.add_argument("--serve", action="append", default=[], metavar="BUCKET=DIR", help="read a directory in place")
    parser.add_argument("--bucket", action="append", default=[], help="an empty bucket to begin with")
    parser.add_argument("--latency", type=float, default=0, help="seconds before each answer")
    parser.add_argument(
        "--rate", type=float, default=0, help="bytes per second and connection, each way; 0: all there is"
    )
    parser.add_argument("--until-eof", action="store_true", help="end with standard input")
    arguments = parser.parse_args()

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    root = Path(tempfile.mkdtemp(prefix="s3-", dir=arguments.root))
    try:
        store = Store(root)
        for name in arguments.bucket:
            store.buckets[name] = Bucket()
        for spec in arguments.serve:
            name, _, directory = spec.partition("=")
            store.adopt(name, Path(directory).resolve())
        listener = socket.create_server(("127.0.0.1", arguments.port), backlog=1024)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        threading.Thread(target=_serve, args=(store, listener, arguments.latency, arguments.rate), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            if arguments.until_eof:
                sys.stdin.read()
            else:
                threading.Event().wait()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
