"""An S3 server in a separate process, with a bucket that is filled and inspected without the code under test."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "testing"
SECRET = "testing"  # noqa: S105 (the server asks for no password)
REGION = "us-east-1"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": REGION,
    # Without these a client may ask the network, or the developer's own files, who it is.
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    # Each client reads these certificates when it is made, although the server speaks plain HTTP: one instead of 140.
    "AWS_CA_BUNDLE": str(Path(__file__).with_name("authority.pem")),
}
"""What a client needs in its environment to be let in, and to find nothing else."""

RARE_COLLECTIONS = (50_000, 20, 50)
"""Thresholds of the garbage collector. With those of Python it takes a twentieth of the time of the tests."""

OF_THEIR_OWN: list[dict[str, Any]] = [
    {"requester_pays": True},
    {"s3_additional_kwargs": {"RequestPayer": "requester"}},
    {"client_kwargs": {"verify": False}},
    {"config_kwargs": {"s3": {"addressing_style": "path"}}},
]
"""Options of s3fs that may change what its requests say."""


def share_descriptions() -> None:
    """Let all clients of this process share what botocore has read about S3: each reads it anew, in 0.1 s."""
    import botocore.loaders
    import botocore.session

    botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Start a server on a free port, and give its URL once it listens.

    It is a process, not a mock: what crosses a socket is what is tested. It ends when its standard input does, so that
    it outlives no test run, not even one that was killed.

    Raises:
        RuntimeError: It did not start.
    """
    # Isolated (-I): this file's directory is not to be searched for modules.
    process = subprocess.Popen(
        [sys.executable, "-I", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    with process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the S3 server ended with {process.wait()} before it listened")
        try:
            yield f"http://127.0.0.1:{int(port)}"
        finally:
            process.kill()


def client(endpoint: str) -> Any:
    """boto3's client for an endpoint, which answers for what is on the server: no retries, no caches."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, max_pool_connections=32),
    )


def forget_everything(endpoint: str) -> None:
    """Let a server drop all that it holds."""
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")):  # noqa: S310
        pass


@dataclass(frozen=True)
class Bucket:
    """A bucket, seen past ckpttool and past the proxy."""

    endpoint: str
    """URL of the server itself."""
    name: str
    boto: Any
    """A client of boto3, for what the methods here do not do."""

    def url(self, key: str = "") -> str:
        """s3://BUCKET/KEY."""
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes) -> str:
        """Write an object whole; its ETag."""
        return str(self.boto.put_object(Bucket=self.name, Key=key, Body=data)["ETag"])

    def get(self, key: str) -> bytes:
        """An object's bytes."""
        data = self.boto.get_object(Bucket=self.name, Key=key)["Body"].read()
        assert isinstance(data, bytes)
        return data

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.boto.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects below a prefix, sorted."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Sizes of all objects below a prefix."""
        pages = self.boto.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

    def upload(self, directory: Path, prefix: str) -> list[str]:
        """Copy a directory's files to below a prefix; their keys. A link is copied as what it leads to, as AWS does."""
        sources = sorted(p for p in directory.rglob("*") if p.is_file())
        keys = [f"{prefix.rstrip('/')}/{p.relative_to(directory).as_posix()}" for p in sources]
        for source, key in zip(sources, keys, strict=True):
            self.boto.upload_file(str(source), self.name, key)
        return keys

    def download(self, prefix: str, directory: Path) -> None:
        """Copy all objects below a prefix into a directory."""
        prefix = prefix.rstrip("/") + "/"
        for key in self.keys(prefix):
            target = directory / key.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.get(key))

    def uploads(self) -> list[tuple[str, str]]:
        """Key and id of every multipart upload that was neither completed nor aborted: what is still paid for."""
        pages = self.boto.get_paginator("list_multipart_uploads").paginate(Bucket=self.name)
        return sorted((item["Key"], item["UploadId"]) for page in pages for item in page.get("Uploads", ()))

    def parts(self, key: str, upload: str) -> dict[int, int]:
        """Sizes of a pending upload's parts, by their numbers."""
        pages = self.boto.get_paginator("list_parts").paginate(Bucket=self.name, Key=key, UploadId=upload)
        return {item["PartNumber"]: item["Size"] for page in pages for item in page.get("Parts", ())}


def _make_requests_atomic() -> None:
    """Answer one request at a time, once its body has arrived.

    moto looks for an object and then writes it, in one of many threads: of several conditional writes two may win.
    """
    from moto.s3.responses import S3Response

    lock = threading.Lock()

    def one_at_a_time(answer: Any) -> Any:
        def locked(*arguments: Any) -> Any:
            with lock:
                return answer(*arguments)

        return locked

    # Their callers have read the body: a slow client keeps nobody waiting.
    for name in ("_bucket_response", "_key_response"):
        setattr(S3Response, name, one_at_a_time(getattr(S3Response, name)))


def _serve() -> None:
    import botocore.utils
    from moto import backends
    from moto.core import serialize
    from moto.server import ThreadedMotoServer

    modules = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules  # it looks at its own files twice for each request
    # A listing parses the time of each of its objects again.
    read_time = functools.lru_cache(10_000)(botocore.utils.parse_to_aware_datetime)
    serialize.parse_to_aware_datetime = read_time  # type: ignore[attr-defined]
    _make_requests_atomic()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # the server's threads may wait for connections that nobody will close


if __name__ == "__main__":
    _serve()
