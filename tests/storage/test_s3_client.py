"""The blocking client of S3: its options and credentials, and the options for which s3fs makes the requests."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import s3fs
import urllib3

import ckpttool
from ckpttool.errors import StorageError
from ckpttool.storage import open_storage
from ckpttool.storage.s3 import S3Storage
from ckpttool.storage.s3_client import SingleAttemptFileSystem
from tests.faults.s3_faults import Latency
from tests.storage import server
from tests.storage.large import write_weights
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.s3_faults import Request
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

BLOCK = 1 << 20
SIZE = 3 * BLOCK


def _by_s3fs(request: Request) -> bool:
    return request.headers["user-agent"].lower().startswith("aiobotocore")


@pytest.fixture
def object_url(s3: Bucket) -> str:
    """An object of three ranges that are large enough."""
    s3.put("object", bytes(range(256)) * (SIZE // 256))
    return s3.url("object")


def _read(url: str, number: int = 0, **options: Any) -> bytes:
    with open_storage(url, options).open(url) as reader:
        return reader.read(number * BLOCK, (number + 1) * BLOCK)


EXPECTED = bytes(range(256)) * (BLOCK // 256)


def test_a_copy_to_a_bucket_and_back_makes_no_request_with_s3fs(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights")
    ckpttool.cp(weights, s3.url("weights"))
    ckpttool.cp(s3.url("weights"), tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    assert {"get_object", "upload_part", "put_object", "list_objects_v2"} <= {r.operation for r in proxy.log}
    assert not any(map(_by_s3fs, proxy.log))
    assert all(r.headers["if-match"] for r in proxy.requests("get_object") if r.range)


class _OfTheUser(s3fs.S3FileSystem):  # type: ignore[misc]
    """A file system that may make other requests than s3fs's."""


@pytest.mark.parametrize("of", ["a class", "a session", "a connector"])
def test_options_that_only_s3fs_knows_are_left_to_it(of: str, object_url: str, proxy: Proxy) -> None:
    session = {"session": importlib.import_module("aiobotocore.session").AioSession()} if of == "a session" else {}
    config = {"config_kwargs": {"connector_args": {"keepalive_timeout": 5}}} if of == "a connector" else {}
    fs = (_OfTheUser if of == "a class" else SingleAttemptFileSystem)(**session, **config, use_listings_cache=False)
    with S3Storage(fs).open(object_url) as reader:
        assert reader.read(0, BLOCK) == EXPECTED
    assert all(map(_by_s3fs, proxy.log))
    assert proxy.requests("get_object")


HEADERS = {"requester_pays": "x-amz-request-payer", "s3_additional_kwargs": "x-amz-request-payer"}


@pytest.mark.parametrize("options", server.OF_THEIR_OWN, ids=lambda o: next(iter(o)))
def test_options_that_change_requests_are_followed(options: dict[str, Any], object_url: str, proxy: Proxy) -> None:
    assert _read(object_url, **options) == EXPECTED
    asked = proxy.requests("get_object")
    assert not any(map(_by_s3fs, asked))
    header = HEADERS.get(next(iter(options)))
    assert header is None or all(r.headers[header] == "requester" for r in asked)


def test_options_that_are_known_are_followed(object_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options: dict[str, Any] = {"key": "FROMOPTIONS", "secret": "sesame", "client_kwargs": {"region_name": "eu-north-1"}}
    assert _read(object_url, **options) == EXPECTED
    assert all("Credential=FROMOPTIONS/" in r.headers["authorization"] for r in proxy.log)
    assert all("/eu-north-1/s3/" in r.headers["authorization"] for r in proxy.log)
    assert proxy.requests("get_object")


def test_an_empty_key_signs_nothing(s3: Bucket, object_url: str, proxy: Proxy) -> None:
    s3.boto.put_object_acl(Bucket=s3.name, Key="object", ACL="public-read")
    s3.boto.put_bucket_acl(Bucket=s3.name, ACL="public-read")
    assert _read(object_url, anon=True) == EXPECTED
    assert proxy.requests("get_object")
    assert not any("authorization" in r.headers for r in proxy.log)


def _credentials_that_last(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configure a program that prints new temporary credentials at each call, as a role has; return its path."""
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
    """The program gives their time of expiry, and botocore calls it again after that time."""
    _credentials_that_last(4, tmp_path, monkeypatch)
    storage = open_storage(object_url, {})
    with storage.open(object_url) as reader:
        for number in range(2):
            assert reader.read(number * BLOCK, (number + 1) * BLOCK) == EXPECTED
            time.sleep(4.1)
    asked = proxy.requests("get_object")
    used = [r.headers["authorization"].partition("Credential=")[2].partition("/")[0] for r in asked]
    assert len(set(used)) == 2
    assert all(r.headers["x-amz-security-token"] == "open" for r in asked)


@pytest.mark.parametrize("worked", [False, True], ids=["at first", "later"])
def test_credentials_that_cannot_be_renewed_are_one_clear_line(
    worked: bool, object_url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _credentials_that_last(4, tmp_path, monkeypatch)
    storage = open_storage(object_url, {})
    with storage.open(object_url) as reader:
        if worked:
            assert reader.read(0, BLOCK) == EXPECTED
            assert len(proxy.requests("get_object")) == 1
            time.sleep(4.1)
        program.write_text("raise SystemExit('sesame')")
        retried = storage.retries.count
        with refused(StorageError) as raised:
            reader.read(BLOCK, 2 * BLOCK)
    assert storage.retries.count == retried
    assert "sesame" not in str(raised.value)


def test_credentials_that_are_renewed_too_late_are_one_clear_line(
    object_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _credentials_that_last(-1, tmp_path, monkeypatch)
    with refused(StorageError):
        open_storage(object_url, {}).open(object_url)


def test_a_forked_process_makes_connections_of_its_own(object_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = open_storage(object_url, {})
    assert bytes(storage.get(object_url, 0, 5, "")) == EXPECTED[:5]
    made = storage.client._connected().client
    assert storage.client._connected().client is made
    monkeypatch.setattr("os.getpid", lambda: -1)
    storage.client._lock.acquire()  # as if another thread had connected meanwhile
    assert storage.client._connected().client is not made
    assert bytes(storage.get(object_url, 0, 5, "")) == EXPECTED[:5]


def test_two_values_of_one_option_are_refused(object_url: str) -> None:
    with refused(StorageError):
        _read(object_url, key="FROMOPTIONS", client_kwargs={"aws_access_key_id": "ANOTHER"})


def test_storages_with_the_same_options_share_one_client(object_url: str) -> None:
    first: Any = open_storage(object_url, {"default_block_size": 5 << 20})
    first.fs.connect()  # as a copy of a large object does
    second: Any = open_storage(object_url, {"default_block_size": 5 << 20})
    assert first.client is second.client
    other: Any = open_storage(object_url, {"default_block_size": 6 << 20})
    assert other.client is not first.client


def test_no_more_connections_are_made_than_allowed(object_url: str, proxy: Proxy) -> None:
    storage: Any = open_storage(object_url, {"config_kwargs": {"max_pool_connections": 2}})
    proxy.add(Latency(0.05), "get_object", times=None)
    storage.at_once([partial(storage.get, object_url, start, start + 5, "") for start in range(12)])
    asked = proxy.requests("get_object")
    assert len(asked) == 12
    # All of 12 without a limit; the proxy may record an end after the next start.
    assert max(sum(o.started <= r.started < (o.ended or r.started) for o in asked) for r in asked) <= 4


def test_a_timeout_of_0_is_none(object_url: str) -> None:
    assert _read(object_url, config_kwargs={"read_timeout": 0, "connect_timeout": 0}) == EXPECTED


def test_an_option_of_none_is_left_out(object_url: str, proxy: Proxy) -> None:
    assert _read(object_url, s3_additional_kwargs={"RequestPayer": None}) == EXPECTED
    assert not any("x-amz-request-payer" in r.headers for r in proxy.log)


def test_switched_off_certificates_are_no_warning(object_url: str) -> None:
    assert _read(object_url, client_kwargs={"verify": False}) == EXPECTED
    warnings.warn("an unverified request", urllib3.exceptions.InsecureRequestWarning, stacklevel=1)
