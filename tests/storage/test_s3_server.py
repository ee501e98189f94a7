"""The S3 server of the benchmarks behaves like S3."""

from __future__ import annotations

import http.client
import importlib.util
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.storage.server import Bucket, client

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = os.urandom((5 << 20) + 10)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the server reads where they lie."""
    directory = tmp_path_factory.mktemp("served")
    for name in ("a", "d/1", "d/2", "d/e/3", "e/4", "ü x"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode())
    return directory


@pytest.fixture(scope="module")
def bucket(tree: Path) -> Iterator[Bucket]:
    path = Path(__file__).parents[2] / "benchmarks" / "s3_server.py"
    spec = importlib.util.spec_from_file_location("s3_server", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "s3_server", module)
        spec.loader.exec_module(module)
    with module.running("--bucket", "empty", "--serve", f"served={tree}") as server:
        boto = client(server.url)
        yield Bucket(server.url, "empty", boto)
        boto.close()


def test_objects(bucket: Bucket) -> None:
    tag = bucket.put("x/ü y", DATA)
    assert bucket.get("x/ü y") == DATA
    assert bucket.put("x/ü y", DATA[:9]) != tag
    assert bucket.get("x/ü y") == DATA[:9]
    bucket.put("x/none", b"")
    assert bucket.get("x/none") == b""
    assert bucket.sizes("x/") == {"x/ü y": 9, "x/none": 0}
    bucket.boto.delete_objects(Bucket="empty", Delete={"Objects": [{"Key": "x/ü y"}, {"Key": "x/none"}]})
    assert bucket.keys("x/") == []


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("0-0", 0, 1), ("5242875-5242884", 5242875, 5242885), ("5242885-", 5242885, None), ("-3", -3, None),
     ("100-99999999", 100, None)],
)  # fmt: skip
def test_ranges_cross_parts(bucket: Bucket, asked: str, start: int, end: int | None) -> None:
    upload = bucket.boto.create_multipart_upload(Bucket="empty", Key="m")["UploadId"]
    tags = [
        bucket.boto.upload_part(Bucket="empty", Key="m", UploadId=upload, PartNumber=n, Body=body)["ETag"]
        for n, body in ((3, DATA[: 5 << 20]), (7, DATA[5 << 20 :]))
    ]
    assert bucket.uploads() == [("m", upload)]
    assert bucket.parts("m", upload) == {3: 5 << 20, 7: 10}
    done = {"Parts": [{"PartNumber": n, "ETag": tag} for n, tag in zip((3, 7), tags, strict=True)]}
    bucket.boto.complete_multipart_upload(Bucket="empty", Key="m", UploadId=upload, MultipartUpload=done)
    assert bucket.uploads() == []
    got = bucket.boto.get_object(Bucket="empty", Key="m", Range=f"bytes={asked}")
    assert got["Body"].read() == DATA[start:end]
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert bucket.get("m") == DATA
    bucket.delete("m")


def test_listing(bucket: Bucket) -> None:
    pages = bucket.boto.get_paginator("list_objects_v2").paginate(
        Bucket="served", Delimiter="/", PaginationConfig={"PageSize": 1}
    )
    found = [[*(o["Key"] for o in p.get("Contents", ())), *(c["Prefix"] for c in p.get("CommonPrefixes", ()))]
             for p in pages]  # fmt: skip
    assert found == [["a"], ["d/"], ["e/"], ["ü x"]]
    page = bucket.boto.list_objects_v2(Bucket="served", Prefix="d/", Delimiter="/")
    assert [(o["Key"], o["Size"]) for o in page["Contents"]] == [("d/1", 3), ("d/2", 3)]
    assert [c["Prefix"] for c in page["CommonPrefixes"]] == ["d/e/"]
    after = bucket.boto.list_objects_v2(Bucket="served", StartAfter="d/2")
    assert [o["Key"] for o in after["Contents"]] == ["d/e/3", "e/4", "ü x"]


def test_errors(bucket: Bucket) -> None:
    def code(operation: str, **arguments: Any) -> str:
        with pytest.raises(ClientError) as caught:
            getattr(bucket.boto, operation)(Bucket="empty", **arguments)
        return str(caught.value.response["Error"]["Code"])

    bucket.put("k", b"0123")
    assert code("get_object", Key="none") == "NoSuchKey"
    assert code("head_object", Key="none") == "404"
    assert code("get_object", Key="k", Range="bytes=4-") == "InvalidRange"
    assert code("get_object", Key="k", IfMatch='"other"') == "PreconditionFailed"
    assert code("put_object", Key="k", Body=b"", IfNoneMatch="*") == "PreconditionFailed"
    assert code("upload_part", Key="k", UploadId="none", PartNumber=1, Body=b"") == "NoSuchUpload"
    assert code("abort_multipart_upload", Key="k", UploadId="none") == "NoSuchUpload"
    assert code("get_object_acl", Key="k") == "NotImplemented"
    assert code("copy_object", Key="l", CopySource="empty/k") == "NotImplemented"
    with pytest.raises(ClientError, match="NoSuchBucket"):
        bucket.boto.list_objects_v2(Bucket="none")
    assert bucket.get("k") == b"0123"


def test_a_checkpoint_used_in_place_is_not_removed(bucket: Bucket, tree: Path) -> None:
    bucket.boto.delete_object(Bucket="served", Key="e/4")
    bucket.boto.put_object(Bucket="served", Key="a", Body=b"new")
    assert (tree / "e" / "4").read_bytes() == b"e/4"
    assert (tree / "a").read_bytes() == b"a"


@pytest.mark.parametrize("http_chunks", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_bodies_in_s3s_chunks(bucket: Bucket, http_chunks: bool, signed: bool) -> None:
    """As newer clients send them: each chunk maybe signed, a checksum behind."""
    signature = b";chunk-signature=" + b"0" * 64 if signed else b""
    chunks = [b"%x%s\r\n%s\r\n" % (len(part), signature, part) for part in (DATA[:65536], DATA[65536:])]
    chunks.append(b"0" + signature + b"\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n")
    headers = {
        "Content-Encoding": "aws-chunked",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": str(len(DATA)),
        "x-amz-trailer": "x-amz-checksum-crc32",
    }
    body = iter(chunks) if http_chunks else b"".join(chunks)
    with closing(http.client.HTTPConnection("127.0.0.1", urlsplit(bucket.endpoint).port, timeout=10)) as connection:
        for _ in range(1 if http_chunks else 2):  # the connection is left where the next request begins
            connection.request("PUT", "/empty/chunked", body, headers, encode_chunked=http_chunks)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
        connection.request("HEAD", "/empty/chunked")
        answer = connection.getresponse()
        assert answer.read() == b""
        assert answer.headers["Content-Length"] == str(len(DATA))
    assert bucket.get("chunked") == DATA
