"""Parts of uploads: signed, with checksums, and repeated after temporary failures."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import StorageError
from ckpttool.storage import open_storage
from ckpttool.storage.s3 import MIN_PART_BYTES
from tests.faults import s3_faults as faults
from tests.wording import refused

if TYPE_CHECKING:
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


def test_parts_are_signed_and_sent_with_their_checksums(s3: Bucket, proxy: Proxy) -> None:
    _write(s3)
    assert _stored(s3) == DATA
    sent = proxy.requests("upload_part")
    assert len(sent) == 2
    for request, part in zip(sent, (DATA[:MIN_PART_BYTES], DATA[MIN_PART_BYTES:]), strict=True):
        headers = request.headers
        assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=")
        assert "x-amz-checksum-crc32" in headers["authorization"]  # it is signed, too
        # Nothing else keeps what is sent without encryption from being changed on its way.
        assert headers["x-amz-content-sha256"] == hashlib.sha256(part).hexdigest()


def test_parts_are_sent_with_the_options(s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options: dict[str, Any] = {"key": "FROMOPTIONS", "secret": "sesame", "token": "talk"}
    _write(s3, **options, client_kwargs={"region_name": "eu-north-1"})
    sent = proxy.requests("upload_part")
    for request in sent:
        assert "Credential=FROMOPTIONS/" in request.headers["authorization"]
        assert "/eu-north-1/s3/" in request.headers["authorization"]
        assert request.headers["x-amz-security-token"] == "talk"


@pytest.mark.parametrize("fault", [faults.ACCESS_DENIED, faults.EXPIRED_TOKEN], ids=lambda f: f.code)
def test_a_denied_part_is_an_error(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", "partNumber=2", times=None)
    with refused(StorageError):
        _write(s3)
    sent = proxy.requests("upload_part")
    assert len(sent) == 2


@pytest.mark.parametrize("fault", [faults.SLOW_DOWN, faults.INTERNAL_ERROR], ids=lambda f: f.code)
def test_a_passing_failure_is_retried(fault: faults.Answer, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(fault, "upload_part", times=3)
    storage = _write(s3)
    assert _stored(s3) == DATA
    sent = proxy.requests("upload_part")
    assert len(sent) == 5
    assert storage.retries.count == 3


def test_a_missing_object_is_reported(s3: Bucket, proxy: Proxy) -> None:
    proxy.add(faults.NO_SUCH_UPLOAD, "upload_part", "partNumber=2", times=None)
    with refused(StorageError):
        _write(s3)
    assert len(proxy.requests("upload_part")) == 2
