"""Messages and logs: no secret of a URL or an option, bounded length, printable characters."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.errors import CkptError, LayoutError
from ckpttool.messages import brief, hide_secrets, printable, without_secrets
from tests.cli.command import EXTENSIONS_READING, ckpttool_process
from tests.cli.command import ckpttool as command
from tests.truth import source

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "cAnArY0123456789"
URLS = [
    f"https://127.0.0.1:9/run/model.safetensors?X-Amz-Credential=a&X-Amz-Signature={CANARY}",
    f"https://user:{CANARY}@127.0.0.1:9/run",
    f"simplecache::http://user:{CANARY}@127.0.0.1:9/x",
    f"zip://a::http://user:{CANARY}@127.0.0.1:9",
    f"filecache::s3://AKIA:{CANARY}@b/x",
    f"filecache::s3://AKIA:a/{CANARY}@b/x",
    f"s3://AKIA:{CANARY}@b/x",
    f"abfs://c@account.dfs.core.windows.net/run?sig={CANARY}",
    f"abfss://c:{CANARY}@account/run",
    f"nosuch://user:{CANARY}@h/x",
    f"memory://run?token={CANARY}",
    f"file://user:{CANARY}@h/x",
    f"gs://b/x#access_token={CANARY}",
]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.storage.retry.ATTEMPTS", 1)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def _lines(url: str, tmp_path: Path) -> list[tuple[object, ...]]:
    src, out = source("zero2-dp2-bf16"), tmp_path / "out"
    return [
        ("inspect", url),
        ("inspect", url, src),
        ("verify", url, "--json"),
        ("ls", url, "--json"),
        ("prune", url, "--keep-last", "1"),
        *((name, url) for name in EXTENSIONS_READING),
        ("diff", src, url),
        ("extract", src, "up.weight", f"{url}/x.npy"),
        ("consolidate", src, url, "--to", "safetensors"),
        ("convert", src, url, "--to", "dcp"),
        ("cp", src, url),
        ("cp", url, out),
    ]


@pytest.mark.parametrize("url", URLS)
def test_no_command_shows_a_secret_of_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = _lines(url, tmp_path)
    if url.startswith(("s3", "https", "abfs", "gs")):  # these open a connection, or try to
        lines = lines[:1] if url.startswith("https") else []
    for line in lines:
        for debug in ((), ("--debug",)):
            try:
                done = command(*line, *debug)
            except Exception as error:
                text = hide_secrets(f"{error!r}")
            else:
                text = done.stdout + done.stderr
            assert CANARY not in text, (line, text)


def test_a_process_shows_no_secret_in_a_traceback(tmp_path: Path) -> None:
    for url in (URLS[2], URLS[3]):
        done = ckpttool_process("inspect", url, "--debug", cwd=tmp_path)
        assert done.stderr.startswith("Traceback")
        assert CANARY not in done.stdout + done.stderr


def test_a_removed_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert command("ls", "root").error == "Error: working directory: was removed; change to another directory"
    assert command("ls", source("zero2-dp2-bf16")).code == 0


def test_wrong_usage_shows_no_secret(tmp_path: Path) -> None:
    done = command("inspect", tmp_path, "--storage-option", f"{CANARY}")
    assert done.code == 2
    assert CANARY not in done.stderr


def test_errors_and_logs_show_no_secret() -> None:
    for url in URLS:
        assert CANARY not in str(CkptError(url, f"is not {url}", f"try {url}, or {url}"))
        assert CANARY not in printable(f"removed {url}")
        assert CANARY not in without_secrets(url)
        assert CANARY not in hide_secrets(json.dumps({"src": url, "notes": [f"at {url}"]}))


def test_texts_without_secrets_stay_as_they_are() -> None:
    for text in ("/a/b:c@d", "a: b", "s3://bucket/run/a=b", "http://host:9000/x", "C:/x", "user@host", "x=1?y", "a::b"):
        assert hide_secrets(text) == text


# ------------------------------------------------------------------------------------------------- values


def test_a_name_of_megabytes_makes_a_short_line(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as error:
        ckpttool.inspect(tmp_path, tag="x" * 20_000_000)
    assert len(str(error.value)) < 20_000
    with pytest.raises(CkptError) as error:
        raise CkptError("x" * 20_000_000, "y" * 20_000_000, "z\n" * 20_000_000)
    assert len(str(error.value)) < 20_000


def test_an_error_shortens_the_name_of_a_parameter() -> None:
    name = "model." + "y" * 5000 + ".weight"
    line = str(LayoutError("/run/file.pt", f"lacks {name} of layer 3", "pass /run"))
    assert line.startswith("/run/file.pt: lacks model.yyy")
    assert line.endswith("yyy.weight of layer 3; pass /run")
    assert len(line) < 300


def test_brief_is_bounded_whatever_the_value() -> None:
    exponential: list[object] = []
    for _ in range(60):
        exponential = [exponential, exponential]
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic
    huge = 1 << 10_000_000

    class Rude:
        def __repr__(self) -> str:
            raise AssertionError("was asked")

    values = [exponential, cyclic, huge, "x" * 10**8, b"x" * 10**8, Rude(), {(Rude(),): [huge]}, [[0] * 10**6] * 10**6]
    began = time.monotonic()
    for value in values:
        assert len(brief(value)) <= 103
        assert brief(value).isprintable()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("value", [1, -5, 1.5, None, True, "a'b", b"x", [1, 2], (1,), (), {"a": [1]}, [{}], 2**64])
def test_brief_shows_small_values_as_python_does(value: object) -> None:
    assert brief(value) == repr(value)
