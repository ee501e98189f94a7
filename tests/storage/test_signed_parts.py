"""Parts of uploads that the thread which has them sends: as s3fs would, or s3fs is asked."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import urllib3

from ckpttool.errors import StorageError
from ckpttool.storage import open_storage, retry, s3_client, s3_parts
from ckpttool.storage.s3 import MIN_PART_BYTES
from tests.storage import proxy as faults
from tests.storage import server

if TYPE_CHECKING:
    from tests.storage.proxy import Proxy, Request
    from tests.storage.server import Bucket

DATA = bytes(range(256)) * (MIN_PART_BYTES // 256) + b"the last part"
KEY = "a folder/ü+&=.bin"


def _write(s3: Bucket, **options: Any) -> None:
    storage: Any = open_storage(s3.url(KEY), options)
    upload = storage.create(s3.url(KEY), len(DATA))
    try:
        for start in (0, MIN_PART_BYTES):
            upload.write(start, bytearray(DATA[start : start + MIN_PART_BYTES]))
        upload.commit()
    except BaseException:
        upload.discard()
        raise


def _stored(s3: Bucket) -> bytes:
    return bytes(s3.boto.get_object(Bucket=s3.name, Key=KEY)["Body"].read())


def _parts(proxy: Proxy) -> tuple[list[Request], list[Request]]:
    """Those that threads sent, and those of s3fs."""
    made = proxy.requests("upload_part")
    by_s3fs = [r for r in made if r.headers["user-agent"].startswith("aiobotocore")]
    return [r for r in made if r not in by_s3fs], by_s3fs


def _signature(request: Request, secret: str) -> str:
    """What the signature of a request is to be, by what went over the wire.

    Source: AWS, "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)".
    """
    said = dict(item.strip().split("=", 1) for item in request.headers["authorization"].partition(" ")[2].split(","))
    scope, signed = said["Credential"].partition("/")[2], said["SignedHeaders"].split(";")
    path, _, query = request.target.partition("?")
    pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&") if pair)
    headers = "".join(f"{name}:{request.headers[name].strip()}\n" for name in signed)
    digest = request.headers["x-amz-content-sha256"]
    canonical = "\n".join([request.method, path, "&".join(pairs), headers, said["SignedHeaders"], digest])
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, hashed])
    key = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


def test_signatures_are_what_a_store_computes(s3: Bucket, proxy: Proxy) -> None:
    _write(s3)
    made = [*_parts(proxy)[0], *proxy.requests("create_multipart_upload"), *proxy.requests("complete_multipart_upload")]
    assert len(made) == 4  # those of s3fs show that what is computed here is right
    for request in made:
        expected = _signature(request, server.ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
        assert request.headers["authorization"].endswith(f"Signature={expected}"), request.operation


def test_parts_are_signed_and_sent_with_their_checksums(s3: Bucket, proxy: Proxy) -> None:
    _write(s3)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert len(sent) == 2
    assert not by_s3fs
    for request, part in zip(sent, (DATA[:MIN_PART_BYTES], DATA[MIN_PART_BYTES:]), strict=True):
        headers = request.headers
        assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=")
        assert "x-amz-checksum-crc32" in headers["authorization"]  # it is signed, too
        # Nothing else keeps what is sent without encryption from being changed on its way.
        assert headers["x-amz-content-sha256"] == hashlib.sha256(part).hexdigest()


@pytest.mark.parametrize("checksum", ["AAAAAA==", ""])
def test_over_https_a_checksum_is_enough(checksum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    storage: Any = open_storage("s3://b", {"endpoint_url": "https://store.invalid"})
    where = {"Bucket": "b", "Key": "k", "UploadId": "a/b+"}
    url, headers = storage.sender_of_parts()._signed(DATA, 3, where, checksum)
    assert url == "https://store.invalid/b/k?partNumber=3&uploadId=a%2Fb%2B"
    expected = "UNSIGNED-PAYLOAD" if checksum else hashlib.sha256(DATA).hexdigest()
    assert headers["X-Amz-Content-SHA256"] == expected
    assert headers.get("x-amz-checksum-crc32", "") == checksum


@pytest.mark.parametrize("expires", [None, "in a while"])
def test_credentials_that_expire_are_asked_for_again(
    expires: str | None, s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def credentials_of(fs: Any) -> tuple[Any, Any]:
        found, _ = await s3_client.credentials_of(fs)
        asked.append(found)
        return found, expires

    monkeypatch.setattr(s3_parts, "credentials_of", credentials_of)
    _write(s3)
    assert _stored(s3) == DATA
    assert len(_parts(proxy)[0]) == 2
    assert len(asked) == (1 if expires is None else 2)


def test_options_that_are_known_are_followed(s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options: dict[str, Any] = {"key": "FROMOPTIONS", "secret": "sesame", "token": "talk"}
    _write(s3, **options, client_kwargs={"region_name": "eu-north-1"})
    sent, by_s3fs = _parts(proxy)
    assert not by_s3fs
    for request in sent:
        assert "Credential=FROMOPTIONS/" in request.headers["authorization"]
        assert "/eu-north-1/s3/" in request.headers["authorization"]
        assert request.headers["x-amz-security-token"] == "talk"


@pytest.mark.parametrize("options", server.OF_THEIR_OWN, ids=lambda o: next(iter(o)))
def test_what_may_change_requests_is_left_to_s3fs(options: dict[str, Any], s3: Bucket, proxy: Proxy) -> None:
    _write(s3, **options)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert not sent
    assert len(by_s3fs) == 2


def test_where_a_proxy_stands_between_s3fs_goes_through_it(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    storage: Any = open_storage(s3.url(KEY), {})
    assert storage.sender_of_parts() is None
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    other: Any = open_storage(s3.url(KEY), {"use_listings_cache": False})
    assert other.sender_of_parts() is not None


@pytest.mark.parametrize("fault", [faults.ACCESS_DENIED, faults.EXPIRED_TOKEN], ids=lambda f: f.code)
def test_what_is_denied_is_denied_to_s3fs_as_well(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", "partNumber=2", times=None)
    with pytest.raises(StorageError, match=r"access denied|the credentials have expired"):
        _write(s3)
    sent, by_s3fs = _parts(proxy)
    assert (len(sent), len(by_s3fs)) == (2, 0)


@pytest.mark.parametrize(
    "fault",
    [
        faults.Answer(403, "SignatureDoesNotMatch"), faults.Answer(400, "AuthorizationHeaderMalformed"),
        faults.Answer(301, "PermanentRedirect"), faults.Answer(400, ""),
    ],
    ids=lambda f: f.code,
)  # fmt: skip
def test_what_is_refused_s3fs_asks_again(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", "partNumber=1", times=1)
    _write(s3)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert (len(sent), len(by_s3fs)) == (1, 2)  # and does all that follows: nothing has been taken so far


@pytest.mark.parametrize("fault", [faults.SLOW_DOWN, faults.INTERNAL_ERROR], ids=lambda f: f.code)
def test_what_passes_is_tried_again(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", times=3)
    before = retry.RETRIES.count
    _write(s3)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert (len(sent), len(by_s3fs)) == (5, 0)
    assert retry.RETRIES.count == before + 3


def test_what_is_gone_is_said(s3: Bucket, proxy: Proxy) -> None:
    proxy.add(faults.NO_SUCH_UPLOAD, "upload_part", "partNumber=2", times=None)
    with pytest.raises(StorageError, match="its upload was aborted by somebody else"):
        _write(s3)
    assert len(_parts(proxy)[0]) == 2


class _Broken:
    """A pool of connections that fail."""

    def __init__(self, storage: Any, after: int) -> None:
        self.pool = storage.sender_of_parts()._pool
        self.after = after
        self.asked = 0

    def request(self, *arguments: Any, **options: Any) -> Any:
        self.asked += 1
        if self.asked == self.after + 1:
            raise urllib3.exceptions.SSLError("no certificate of ours")
        return self.pool.request(*arguments, **options)


@pytest.mark.parametrize("after", [0, 1])
def test_what_is_not_reached(after: int, s3: Bucket, proxy: Proxy) -> None:
    storage: Any = open_storage(s3.url(KEY), {})
    storage.sender_of_parts()._pool = broken = _Broken(storage, after)
    upload = storage.create(s3.url(KEY), len(DATA))
    before = retry.RETRIES.count
    for start in (0, MIN_PART_BYTES):
        upload.write(start, DATA[start : start + MIN_PART_BYTES])
    upload.commit()
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    # At first s3fs may know better, for good; once it worked, it is the network, which is tried again.
    assert (len(sent), len(by_s3fs)) == ((0, 2) if after == 0 else (2, 0))
    assert (broken.asked, retry.RETRIES.count - before) == ((1, 0) if after == 0 else (3, 1))


def test_a_socket_is_given_little_at_once(s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it is given has to be gone within its timeout, which a slow link would not do for a whole part."""
    given: list[int] = []
    send = http.client.HTTPConnection.send

    def noted(connection: Any, data: Any) -> None:
        given.append(len(data))
        send(connection, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", noted)
    _write(s3)
    assert len(_parts(proxy)[0]) == 2
    assert _stored(s3) == DATA
    assert sum(given) > len(DATA)
    assert max(given) <= 1 << 18


def _receive_slowly(listening: socket.socket, received: list[bytes]) -> None:
    """Take a request, but not at once, and answer it."""
    connection, _ = listening.accept()
    with connection:
        time.sleep(1)
        taken = b""
        while (head := taken.find(b"\r\n\r\n")) < 0 or len(taken) < head + 4 + len(DATA):
            taken += (piece := connection.recv(1 << 20))
            if not piece:
                return
        received.append(taken[head + 4 :])
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "there"\r\nContent-Length: 0\r\n\r\n')


def test_sending_is_given_more_time_than_connecting(s3: Bucket) -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = {"connect_timeout": 0.1, "read_timeout": 20}
        storage: Any = open_storage("s3://b", {"endpoint_url": endpoint, "config_kwargs": config})
        sender = storage.sender_of_parts()
        received: list[bytes] = []
        server = threading.Thread(target=_receive_slowly, args=(listening, received), daemon=True)
        server.start()
        assert sender.send(DATA, 1, {"Bucket": "b", "Key": KEY, "UploadId": "u"}, "") == '"there"'
        server.join()
    assert received == [DATA]


def test_a_process_that_was_forked_leaves_it_to_s3fs(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = open_storage(s3.url(KEY), {})
    sender = storage.sender_of_parts()
    monkeypatch.setattr(sender, "_process", -1)
    assert sender.send(b"", 1, {"Bucket": s3.name, "Key": KEY, "UploadId": "u"}, "") is None
