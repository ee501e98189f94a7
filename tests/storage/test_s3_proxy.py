"""The proxy of the storage tests: every fault happens as described, so that no test passes without its fault."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import s3fs
from botocore.exceptions import ClientError

from tests.faults import s3_faults as faults
from tests.faults.rules import Before
from tests.faults.s3_faults import Cut, Flip, Hang, Latency, Request, Shorter, Unranged
from tests.faults.s3_proxy import Proxy
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.storage.server import Bucket

DATA = os.urandom(3 << 20)
SIGNED = {"Authorization": f"AWS4-HMAC-SHA256 Credential={server.KEY}/20250101/us-east-1/s3/aws4_request"}
"""The server looks at who signs, and not whether."""


@pytest.fixture
def boto(proxy: Proxy) -> Iterator[Any]:
    """A client that goes through the proxy and does not try again."""
    client = server.client(proxy.url)
    yield client
    client.close()


@contextlib.contextmanager
def answer(
    proxy: Proxy, method: str, target: str, body: bytes | None = None, *, byte_range: str = "", timeout: float = 10
) -> Iterator[http.client.HTTPResponse]:
    """What comes back when nothing in between is clever."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(proxy.url).port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request(method, target, body, {**SIGNED, "Range": byte_range} if byte_range else SIGNED)
        yield connection.getresponse()


# ------------------------------------------------------------------------------------------------ server and bucket


def test_server_is_another_process_that_ends() -> None:
    with server.running() as endpoint:
        port = urlsplit(endpoint).port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/", headers=SIGNED)
            assert connection.getresponse().status == 200
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection), pytest.raises(ConnectionRefusedError):
        connection.connect()


def test_bucket_copies_trees(s3: Bucket, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "one").write_bytes(b"1")
    (tree / "two").write_bytes(b"22")
    (tree / "empty").write_bytes(b"")
    assert s3.upload(tree, "below/here") == ["below/here/a/b/one", "below/here/empty", "below/here/two"]
    assert s3.sizes() == {"below/here/a/b/one": 1, "below/here/empty": 0, "below/here/two": 2}
    s3.download("below/here", tmp_path / "back")
    assert (tmp_path / "back" / "a" / "b" / "one").read_bytes() == b"1"
    s3.delete("below/here/two")
    assert s3.keys("below/here/t") == []
    assert s3.url("x") == f"s3://{s3.name}/x"


def test_bucket_knows_pending_uploads(s3: Bucket) -> None:
    upload = s3.boto.create_multipart_upload(Bucket=s3.name, Key="k")["UploadId"]
    s3.boto.upload_part(Bucket=s3.name, Key="k", UploadId=upload, PartNumber=2, Body=b"abc")
    assert s3.uploads() == [("k", upload)]
    assert s3.parts("k", upload) == {2: 3}
    assert s3.keys() == []
    s3.boto.abort_multipart_upload(Bucket=s3.name, Key="k", UploadId=upload)
    assert s3.uploads() == []


def test_buckets_are_fresh(s3: Bucket) -> None:
    assert [b["Name"] for b in s3.boto.list_buckets()["Buckets"]] == [s3.name]
    assert s3.keys() == []


# --------------------------------------------------------------------------------------------------- without a fault


def test_proxy_passes_everything_on_and_knows_what_it_was(s3: Bucket, proxy: Proxy, boto: Any) -> None:
    name = s3.name
    boto.put_object(Bucket=name, Key="a b/ü", Body=DATA)
    assert s3.get("a b/ü") == DATA
    assert boto.get_object(Bucket=name, Key="a b/ü")["Body"].read() == DATA
    assert boto.get_object(Bucket=name, Key="a b/ü", Range="bytes=10-19")["Body"].read() == DATA[10:20]
    assert boto.head_object(Bucket=name, Key="a b/ü")["ContentLength"] == len(DATA)
    assert boto.list_objects_v2(Bucket=name, Prefix="a b/")["KeyCount"] == 1
    upload = boto.create_multipart_upload(Bucket=name, Key="m")["UploadId"]
    part = boto.upload_part(Bucket=name, Key="m", UploadId=upload, PartNumber=1, Body=DATA)
    assert boto.list_parts(Bucket=name, Key="m", UploadId=upload)["Parts"][0]["Size"] == len(DATA)
    assert len(boto.list_multipart_uploads(Bucket=name)["Uploads"]) == 1
    done = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    boto.complete_multipart_upload(Bucket=name, Key="m", UploadId=upload, MultipartUpload=done)
    assert s3.get("m") == DATA
    upload = boto.create_multipart_upload(Bucket=name, Key="m")["UploadId"]
    boto.abort_multipart_upload(Bucket=name, Key="m", UploadId=upload)
    boto.delete_object(Bucket=name, Key="m")
    boto.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "a b/ü"}]})
    assert s3.keys() == []

    assert [r.operation for r in proxy.log] == [
        "put_object", "get_object", "get_object", "head_object", "list_objects_v2", "create_multipart_upload",
        "upload_part", "list_parts", "list_multipart_uploads", "complete_multipart_upload", "create_multipart_upload",
        "abort_multipart_upload", "delete_object", "delete_objects",
    ]  # fmt: skip
    put, whole, some, head = proxy.log[:4]
    assert (put.key, put.received, put.status) == ("a b/ü", len(DATA), 200)
    assert (whole.range, whole.sent, whole.status) == (None, len(DATA), 200)
    assert (some.range, some.sent, some.status) == ((10, 20), 10, 206)
    assert (head.sent, head.status) == (0, 200)
    assert all(r.forwarded and not r.faults and r.ended is not None for r in proxy.log)
    assert proxy.bytes_by_key() == {"a b/ü": len(DATA) + 10}
    assert len(proxy.requests("get_object", "/a b/")) == 2
    assert proxy.most_in_flight() == 1
    assert proxy.connections == 1


def test_proxy_takes_bodies_in_chunks(s3: Bucket, proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(proxy.url).port, timeout=10)
    with contextlib.closing(connection):
        pieces = iter([DATA[:1000], DATA[1000:]])
        connection.request("PUT", f"/{s3.name}/k", pieces, SIGNED, encode_chunked=True)
        assert connection.getresponse().status == 200
    assert s3.get("k") == DATA
    assert proxy.log[0].received == len(DATA)


def test_bodies_do_not_pile_up(s3: Bucket, proxy: Proxy) -> None:
    s3.put("big", bytes(64 << 20))
    with answer(proxy, "GET", f"/{s3.name}/big") as got:
        time.sleep(0.5)  # reads nothing
        assert proxy.log[0].sent < 32 << 20  # what the kernel holds for both connections
        assert len(got.read()) == 64 << 20


def test_a_dead_server_is_the_beds_own_failure() -> None:
    def ask() -> None:
        with (
            Proxy("http://127.0.0.1:9") as proxy,
            contextlib.suppress(http.client.RemoteDisconnected),
            answer(proxy, "GET", "/b/k"),
        ):
            pass

    with pytest.raises(RuntimeError, match="the S3 server does not answer"):
        ask()


def test_no_socket_is_left_where_a_client_does_not_read(s3: Bucket) -> None:
    s3.put("key", DATA)
    with socket.socket() as client, Proxy(s3.endpoint) as proxy:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", proxy.port))
        request = f"GET /{s3.name}/key HTTP/1.1\r\nHost: proxy\r\nAuthorization: {SIGNED['Authorization']}\r\n\r\n"
        client.sendall(request.encode())
        client.recv(1)
        time.sleep(0.1)  # the proxy now waits until the client reads more
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del proxy
        gc.collect()
    assert [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)] == []


# ------------------------------------------------------------------------------------------------------------- rules


def test_latency_does_not_queue(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", b"data")
    rule = proxy.add(Latency(0.5), "get_object", times=None)

    def get(_: int) -> bytes:
        with answer(proxy, "GET", f"/{s3.name}/k") as got:
            return got.read()

    began = time.perf_counter()
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(get, range(24))) == [b"data"] * 24
    assert 0.5 <= time.perf_counter() - began < 12  # which 24 in a row would take
    assert rule.fired == 24
    assert proxy.most_in_flight() >= 12  # on a busy machine not all of them begin within the time of the first


def test_rules_choose_their_requests(s3: Bucket, proxy: Proxy) -> None:
    def statuses(*targets: str, byte_range: str = "") -> list[int]:
        got = []
        for target in targets:
            with answer(proxy, "GET", f"/{s3.name}/{target}", byte_range=byte_range) as response:
                got.append(response.status)
        return got

    s3.put("a", b"a")
    s3.put("b", b"b")
    second = proxy.add(faults.SLOW_DOWN, "get_object", "/a$", nth=2, times=2)
    assert statuses("a", "b", "b", "a", "b", "a", "a") == [200, 200, 200, 503, 200, 503, 200]
    assert second.fired == 2

    proxy.clear()
    once_each = proxy.add(faults.INTERNAL_ERROR, each=True)
    assert statuses("a", "a", "b", "b", "a") == [500, 200, 500, 200, 200]
    assert statuses("a", "a", byte_range="bytes=0-0") == [500, 206]
    assert once_each.fired == 3

    proxy.clear()
    always = proxy.add(faults.ACCESS_DENIED, times=None, when=lambda r: r.key == "b")
    assert statuses("b", "a", "b") == [403, 200, 403]
    assert always.fired == 2
    assert [r.faults for r in proxy.log] == [[faults.ACCESS_DENIED], [], [faults.ACCESS_DENIED]]

    proxy.clear()
    first = proxy.add(faults.SLOW_DOWN)
    then = proxy.add(faults.INTERNAL_ERROR)
    waits = proxy.add(Latency(0.01), times=None)
    assert statuses("a", "a", "a") == [503, 500, 200]
    assert (first.fired, then.fired, waits.fired) == (1, 1, 3)

    proxy.clear()
    assert statuses("a") == [200]
    other = proxy.add(faults.SLOW_DOWN, "put_object")
    assert statuses("a") == [200]
    assert other.fired == 0


def test_before_may_change_the_object_between_two_reads(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", b"old!")
    asked: list[Request] = []

    def overwrite(request: Request) -> None:
        asked.append(request)
        s3.put("k", b"new!")

    rule = proxy.add(Before(overwrite), "get_object", nth=2)
    tags = []
    for expected in (b"ol", b"ne", b"ne"):
        with answer(proxy, "GET", f"/{s3.name}/k", byte_range="bytes=0-1") as got:
            assert got.read() == expected
            tags.append(got.headers["ETag"])
    assert rule.fired == 1
    assert asked == [proxy.log[1]]
    assert tags[0] != tags[1] == tags[2]


# ---------------------------------------------------------------------------------------------------- wrong answers


@pytest.mark.parametrize(
    "fault",
    [
        faults.INTERNAL_ERROR, faults.SLOW_DOWN, faults.UNAVAILABLE, faults.EXPIRED_TOKEN, faults.REQUEST_TIMEOUT,
        faults.ACCESS_DENIED, faults.NO_SUCH_KEY, faults.NO_SUCH_UPLOAD,
    ],
    ids=lambda fault: fault.code,
)  # fmt: skip
def test_errors_are_as_s3_gives_them(s3: Bucket, proxy: Proxy, boto: Any, fault: faults.Answer) -> None:
    rule = proxy.add(fault, times=3)
    with pytest.raises(ClientError) as caught:
        boto.put_object(Bucket=s3.name, Key="k", Body=DATA)
    assert caught.value.response["Error"]["Code"] == fault.code
    assert caught.value.response["Error"]["Message"] == fault.message
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == fault.status
    with pytest.raises(ClientError) as caught:
        boto.list_objects_v2(Bucket=s3.name)
    assert caught.value.response["Error"]["Code"] == fault.code
    with answer(proxy, "HEAD", f"/{s3.name}/k") as got:
        assert (got.status, got.read()) == (fault.status, b"")
    assert rule.fired == 3
    assert not any(r.forwarded for r in proxy.log)
    assert s3.keys() == []
    boto.put_object(Bucket=s3.name, Key="k", Body=DATA)  # and then on the same connection
    assert s3.get("k") == DATA
    assert proxy.connections == 2  # boto's, and the other's


def test_late_error_comes_with_200(s3: Bucket, proxy: Proxy, boto: Any) -> None:
    upload = boto.create_multipart_upload(Bucket=s3.name, Key="m")["UploadId"]
    tag = boto.upload_part(Bucket=s3.name, Key="m", UploadId=upload, PartNumber=1, Body=b"1")["ETag"]
    rule = proxy.add(faults.LATE_ERROR, "complete_multipart_upload")
    done = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    with pytest.raises(ClientError, match="InternalError"):
        boto.complete_multipart_upload(Bucket=s3.name, Key="m", UploadId=upload, MultipartUpload=done)
    assert rule.fired == 1
    assert proxy.log[-1].status == 200
    assert s3.uploads() == [("m", upload)]


@pytest.mark.parametrize("relabel", [False, True])
def test_shorter_looks_whole(s3: Bucket, proxy: Proxy, relabel: bool) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Shorter(5, relabel))
    with answer(proxy, "GET", f"/{s3.name}/k", byte_range="bytes=100-1000099") as got:
        assert got.status == 206
        assert got.headers["Content-Length"] == str(1_000_000 - 5)
        end = 1_000_094 if relabel else 1_000_099
        assert got.headers["Content-Range"] == f"bytes 100-{end}/{len(DATA)}"
        assert got.read() == DATA[100 : 1_000_100 - 5]
    assert rule.fired == 1
    assert proxy.log[0].sent == 1_000_000 - 5


@pytest.mark.parametrize("at", [0, 1_234_567, len(DATA) - 1])
def test_flip_changes_one_bit(s3: Bucket, proxy: Proxy, at: int) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Flip(at))
    with answer(proxy, "GET", f"/{s3.name}/k") as got:
        data = got.read()
    assert len(data) == len(DATA)
    assert [(i, a ^ b) for i, (a, b) in enumerate(zip(data, DATA, strict=True)) if a != b] == [(at, 1)]
    assert rule.fired == 1


def test_unranged_gives_all(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Unranged())
    with answer(proxy, "GET", f"/{s3.name}/k", byte_range="bytes=0-9") as got:
        assert got.status == 200
        assert got.read() == DATA
    assert rule.fired == 1
    assert proxy.log[0].range == (0, 10)


# ------------------------------------------------------------------------------------------------ dead connections


@pytest.mark.parametrize(("reset", "error"), [(True, ConnectionResetError), (False, http.client.RemoteDisconnected)])
def test_cut_before_the_request_arrives(s3: Bucket, proxy: Proxy, reset: bool, error: type[Exception]) -> None:
    rule = proxy.add(Cut("before", reset=reset))
    with pytest.raises(error), answer(proxy, "PUT", f"/{s3.name}/k", DATA):
        pass
    assert rule.fired == 1
    assert (proxy.log[0].received, proxy.log[0].forwarded, proxy.log[0].status) == (len(DATA), False, None)
    assert s3.keys() == []


@pytest.mark.parametrize(("reset", "error"), [(True, ConnectionResetError), (False, http.client.RemoteDisconnected)])
def test_cut_after_the_server_did_it(s3: Bucket, proxy: Proxy, reset: bool, error: type[Exception]) -> None:
    rule = proxy.add(Cut("after", reset=reset))
    with pytest.raises(error), answer(proxy, "PUT", f"/{s3.name}/k", DATA):
        pass
    assert rule.fired == 1
    assert proxy.log[0].status is None
    assert s3.get("k") == DATA


@pytest.mark.parametrize("reset", [True, False])
def test_cut_in_the_request(s3: Bucket, proxy: Proxy, reset: bool) -> None:
    body = bytes(64 << 20)  # more than the kernel takes before it asks
    rule = proxy.add(Cut("request", 100_000, reset))
    with pytest.raises((ConnectionResetError, BrokenPipeError)), answer(proxy, "PUT", f"/{s3.name}/k", body):
        pass
    assert rule.fired == 1
    assert 100_000 <= proxy.log[0].received < len(body)
    assert not proxy.log[0].forwarded
    assert s3.keys() == []


@pytest.mark.parametrize("at", [0, 1, 1_500_000, len(DATA) - 1])
def test_reset_in_the_answer(s3: Bucket, proxy: Proxy, at: int) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Cut("answer", at))
    arrived = bytearray()

    def read() -> None:
        with answer(proxy, "GET", f"/{s3.name}/k") as got:
            assert (got.status, got.headers["Content-Length"]) == (200, str(len(DATA)))
            while piece := got.read1(65536):
                arrived.extend(piece)

    with pytest.raises(ConnectionResetError):
        read()
    assert arrived == DATA[:at]
    assert rule.fired == 1
    assert (proxy.log[0].sent, proxy.log[0].status) == (at, 200)


@pytest.mark.parametrize("at", [0, 1_500_000, len(DATA) - 1])
def test_short_answer(s3: Bucket, proxy: Proxy, at: int) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Cut("answer", at, reset=False))
    with answer(proxy, "GET", f"/{s3.name}/k") as got:
        assert got.headers["Content-Length"] == str(len(DATA))
        with pytest.raises(http.client.IncompleteRead) as caught:
            got.read()
    assert caught.value.partial == DATA[:at]
    assert rule.fired == 1


def test_a_cut_after_the_end_does_not_fire(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", b"data")
    rules = [proxy.add(Cut("answer", 4)), proxy.add(Hang(4)), proxy.add(Flip(4)), proxy.add(Shorter(5))]
    for _ in rules:
        with answer(proxy, "GET", f"/{s3.name}/k") as got:
            assert got.read() == b"data"
    rules.append(proxy.add(Cut("request", 5)))
    with contextlib.suppress(http.client.RemoteDisconnected), answer(proxy, "PUT", f"/{s3.name}/k", b"data"):
        pass
    assert [rule.fired for rule in rules] == [0] * 5


def test_hang_says_nothing(s3: Bucket, proxy: Proxy) -> None:
    rule = proxy.add(Hang())
    with pytest.raises(TimeoutError), answer(proxy, "PUT", f"/{s3.name}/k", DATA, timeout=0.5):
        pass
    assert rule.fired == 1
    assert s3.keys() == []


def test_hang_in_the_answer(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", DATA)
    rule = proxy.add(Hang(1_500_000))
    with answer(proxy, "GET", f"/{s3.name}/k", timeout=0.5) as got:
        assert got.read(1_500_000) == DATA[:1_500_000]
        with pytest.raises(TimeoutError):
            got.read(1)
    assert rule.fired == 1


def test_clients_of_the_environment_go_through_the_proxy(s3: Bucket, proxy: Proxy) -> None:
    s3.put("k", DATA)
    rule = proxy.add(faults.SLOW_DOWN, "get_object")
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    assert store.cat_file(s3.url("k"), start=5, end=10) == DATA[5:10]
    assert rule.fired == 1
    assert [r.status for r in proxy.requests("get_object")] == [503, 206]
