"""Large ranges through obstore: its requests, its credentials, and the fallback to s3fs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.errors import StorageError
from ckpttool.storage import open_storage
from ckpttool.storage.s3 import BULK_BYTES
from ckpttool.storage.s3_obstore import ObstoreRanges
from tests.faults.s3_faults import Answer, Cut
from tests.storage import server
from tests.storage.large import write_weights
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.s3_faults import Request
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

SIZE = 3 * BULK_BYTES


def _by_obstore(request: Request) -> bool:
    return not request.headers["user-agent"].lower().startswith("aiobotocore")


def _reads(proxy: Proxy) -> tuple[list[Request], list[Request]]:
    """Requests for bytes: those of obstore, and those of s3fs."""
    made = proxy.requests("get_object")
    return [r for r in made if _by_obstore(r)], [r for r in made if not _by_obstore(r)]


@pytest.fixture
def object_url(s3: Bucket) -> str:
    """An object of three ranges that are large enough."""
    s3.put("object", bytes(range(256)) * (SIZE // 256))
    return s3.url("object")


def _read(url: str, number: int = 0, **options: Any) -> bytes:
    with open_storage(url, options).open(url) as reader:
        return reader.read(number * BULK_BYTES, (number + 1) * BULK_BYTES)


EXPECTED = bytes(range(256)) * (BULK_BYTES // 256)


def test_large_ranges_come_through_obstore_and_small_ones_through_s3fs(
    s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    weights = write_weights(tmp_path / "weights")
    s3.upload(weights, "weights")
    ckpttool.cp(s3.url("weights"), tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    fast, slow = _reads(proxy)
    total = (weights / "model.safetensors").stat().st_size
    assert sum(r.sent for r in fast) > 0.8 * total
    assert all(r.headers["if-match"] for r in fast)
    assert slow
    assert all(r.sent < BULK_BYTES for r in slow)


def test_without_obstore_s3fs_does_it_all(object_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert _read(object_url) == EXPECTED
    assert not _reads(proxy)[0]


@pytest.mark.parametrize("options", server.OF_THEIR_OWN, ids=lambda o: next(iter(o)))
def test_options_that_change_requests_are_left_to_s3fs(options: dict[str, Any], object_url: str, proxy: Proxy) -> None:
    assert _read(object_url, **options) == EXPECTED
    assert not _reads(proxy)[0]
    assert _reads(proxy)[1]


def test_options_that_are_known_are_followed(object_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options: dict[str, Any] = {"key": "FROMOPTIONS", "secret": "sesame", "client_kwargs": {"region_name": "eu-north-1"}}
    assert _read(object_url, **options) == EXPECTED
    fast, slow = _reads(proxy)
    assert not slow
    assert ["Credential=FROMOPTIONS/" in r.headers["authorization"] for r in fast] == [True]
    assert "/eu-north-1/s3/" in fast[0].headers["authorization"]


def test_an_empty_key_signs_nothing(s3: Bucket, object_url: str, proxy: Proxy) -> None:
    s3.boto.put_object_acl(Bucket=s3.name, Key="object", ACL="public-read")
    s3.boto.put_bucket_acl(Bucket=s3.name, ACL="public-read")
    assert _read(object_url, anon=True) == EXPECTED
    fast, slow = _reads(proxy)
    assert len(fast) == 1
    assert not slow
    assert "authorization" not in fast[0].headers


def _credentials_that_last(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let credentials come from a program, anew each time, as those of a role or of single sign-on; returns it."""
    asked = tmp_path / "asked"
    program = tmp_path / "program.py"
    program.write_text(f"""
import datetime, json, pathlib
until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds={seconds})
path = pathlib.Path({str(asked)!r})
count = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (count + 1))
print(json.dumps({{"Version": 1, "AccessKeyId": f"NUMBER{{count}}", "SecretAccessKey": "sesame", "SessionToken": "open",
                  "Expiration": until.isoformat()}}))
""")
    config = tmp_path / "config"
    config.write_text(f"[default]\nregion = us-east-1\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return program


def test_credentials_that_expire_are_renewed(
    object_url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore is told until when they hold, and asks anew."""
    _credentials_that_last(4, tmp_path, monkeypatch)
    storage = open_storage(object_url, {})
    with storage.open(object_url) as reader:
        for number in range(2):
            assert reader.read(number * BULK_BYTES, (number + 1) * BULK_BYTES) == EXPECTED
            time.sleep(4.1)
    fast, slow = _reads(proxy)
    assert not slow
    used = [r.headers["authorization"].partition("Credential=")[2].partition("/")[0] for r in fast]
    assert len(set(used)) == 2
    assert all(r.headers["x-amz-security-token"] == "open" for r in fast)


@pytest.mark.parametrize("worked", [False, True], ids=["at first", "later"])
def test_credentials_that_cannot_be_renewed_are_one_clear_line(
    worked: bool, object_url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _credentials_that_last(4, tmp_path, monkeypatch)
    storage = open_storage(object_url, {})
    with storage.open(object_url) as reader:
        if worked:
            assert reader.read(0, BULK_BYTES) == EXPECTED
            assert [len(made) for made in _reads(proxy)] == [1, 0]
            time.sleep(4.1)
        program.write_text("raise SystemExit('sesame')")
        retried = storage.retries.count
        with refused(StorageError) as raised:
            reader.read(BULK_BYTES, 2 * BULK_BYTES)
    assert storage.retries.count == retried
    assert "sesame" not in str(raised.value)


def test_credentials_that_are_renewed_too_late_are_one_clear_line(
    object_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _credentials_that_last(-1, tmp_path, monkeypatch)
    with refused(StorageError):
        open_storage(object_url, {}).open(object_url)


def test_a_store_that_is_refused_to_obstore_is_read_by_s3fs_from_then_on(object_url: str, proxy: Proxy) -> None:
    """Another region, a certificate, a proxy: s3fs gets there."""
    rule = proxy.add(Answer(301, "PermanentRedirect", ""), "get_object", "object")
    with open_storage(object_url, {}).open(object_url) as reader:
        assert reader.read(0, BULK_BYTES) == EXPECTED
        assert reader.read(BULK_BYTES, 2 * BULK_BYTES) == EXPECTED
    fast, slow = _reads(proxy)
    assert (rule.fired, len(fast), len(slow)) == (1, 1, 2)


def test_a_refusal_after_success_is_put_to_s3fs_once(object_url: str, proxy: Proxy) -> None:
    with open_storage(object_url, {}).open(object_url) as reader:
        assert reader.read(0, BULK_BYTES) == EXPECTED
        proxy.add(Answer(403, "AccessDenied", ""), "get_object", "object")
        assert reader.read(BULK_BYTES, 2 * BULK_BYTES) == EXPECTED
        assert reader.read(2 * BULK_BYTES, 3 * BULK_BYTES) == EXPECTED
    fast, slow = _reads(proxy)
    assert (len(fast), len(slow)) == (3, 1)


def test_a_passing_failure_is_retried_through_obstore(object_url: str, proxy: Proxy) -> None:
    with open_storage(object_url, {}).open(object_url) as reader:
        assert reader.read(0, BULK_BYTES) == EXPECTED
        proxy.add(Cut("answer"), "get_object", "object")
        proxy.add(Answer(503, "SlowDown", ""), "get_object", "object")
        assert reader.read(BULK_BYTES, 2 * BULK_BYTES) == EXPECTED
    fast, slow = _reads(proxy)
    assert (len(fast), len(slow)) == (4, 0)


def test_a_process_that_was_forked_asks_s3fs(object_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore's threads are not there: it would wait for them for ever."""
    storage: Any = open_storage(object_url, {})
    ranges = ObstoreRanges(storage.fs, object_url.split("/")[2])
    assert bytes(ranges.get("object", 0, 5, "") or b"") == EXPECTED[:5]
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert ranges.get("object", 0, 5, "") is None
