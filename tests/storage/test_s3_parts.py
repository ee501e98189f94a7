"""Parts of uploads sent by botocore from the thread that has the bytes."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import StorageError
from ckpttool.storage import open_storage
from ckpttool.storage.s3 import MIN_PART_BYTES
from ckpttool.storage.s3_parts import _PartBody
from tests.faults import s3_faults as faults
from tests.storage import server

if TYPE_CHECKING:
    from tests.faults.s3_faults import Request
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

DATA = bytes(range(256)) * (MIN_PART_BYTES // 256) + b"the last part"
KEY = "a folder/ü+&=.bin"


def _write(s3: Bucket, **options: Any) -> Any:
    storage: Any = open_storage(s3.url(KEY), options)
    upload = storage.upload(s3.url(KEY), len(DATA))
    try:
        for start in (0, MIN_PART_BYTES):
            upload.write(start, bytearray(DATA[start : start + MIN_PART_BYTES]))
        upload.commit()
    except BaseException:
        upload.discard()
        raise
    return storage


def _stored(s3: Bucket) -> bytes:
    return bytes(s3.boto.get_object(Bucket=s3.name, Key=KEY)["Body"].read())


def _parts(proxy: Proxy) -> tuple[list[Request], list[Request]]:
    """Those that botocore sent, and those of s3fs."""
    made = proxy.requests("upload_part")
    by_s3fs = [r for r in made if "aiobotocore" in r.headers["user-agent"]]
    return [r for r in made if r not in by_s3fs], by_s3fs


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
def test_options_that_change_requests_are_left_to_s3fs(options: dict[str, Any], s3: Bucket, proxy: Proxy) -> None:
    _write(s3, **options)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert not sent
    assert len(by_s3fs) == 2


@pytest.mark.parametrize("fault", [faults.ACCESS_DENIED, faults.EXPIRED_TOKEN], ids=lambda f: f.code)
def test_a_denied_request_is_denied_to_s3fs_too(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", "partNumber=2", times=None)
    with pytest.raises(StorageError, match=r"access denied|the credentials have expired"):
        _write(s3)
    sent, by_s3fs = _parts(proxy)
    assert (len(sent), len(by_s3fs)) == (2, 0)


@pytest.mark.parametrize("fault", [faults.SLOW_DOWN, faults.INTERNAL_ERROR], ids=lambda f: f.code)
def test_a_passing_failure_is_retried(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", times=3)
    storage = _write(s3)
    assert _stored(s3) == DATA
    sent, by_s3fs = _parts(proxy)
    assert (len(sent), len(by_s3fs)) == (5, 0)
    assert storage.retries.count == 3


def test_a_missing_object_is_reported(s3: Bucket, proxy: Proxy) -> None:
    proxy.add(faults.NO_SUCH_UPLOAD, "upload_part", "partNumber=2", times=None)
    with pytest.raises(StorageError, match="another process aborted its upload"):
        _write(s3)
    assert len(_parts(proxy)[0]) == 2


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
        sender = storage.part_client()
        received: list[bytes] = []
        server = threading.Thread(target=_receive_slowly, args=(listening, received), daemon=True)
        server.start()
        assert sender.send(DATA, 1, {"Bucket": "b", "Key": KEY, "UploadId": "u"}, "") == '"there"'
        server.join()
    assert received == [DATA]


def test_a_forked_process_makes_connections_of_its_own(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = open_storage(s3.url(KEY), {})
    client = storage.part_client()
    first = client._opened()
    assert client._opened() is first
    monkeypatch.setattr(client, "_process", -1)
    assert client._opened() is not first


def test_a_body_reads_as_a_stream_and_copies_nothing() -> None:
    data = bytearray(range(200))
    body, stream = _PartBody(memoryview(data)), io.BytesIO(data)
    assert len(body) == 200
    for nbytes in (0, 3, 64, None, 5, -1):
        assert body.read(nbytes) == stream.read(nbytes)
        assert body.tell() == stream.tell()
    for offset, whence in ((10, os.SEEK_SET), (7, os.SEEK_CUR), (-20, os.SEEK_END), (0, os.SEEK_END), (0, os.SEEK_SET)):
        assert body.seek(offset, whence) == stream.seek(offset, whence)
        assert body.read(30) == stream.read(30)
    body.seek(0)
    whole = body.read()
    data[0] = 77
    assert whole[0] == 77
