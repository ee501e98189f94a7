"""Outputs in a bucket appear complete or not at all, whatever fails meanwhile."""

from __future__ import annotations

import _thread
import base64
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool
from ckpttool.errors import CkptError, StorageError
from ckpttool.execution.output_bucket import BucketOutput
from ckpttool.plan import COPY, CopyPlan, TargetFile
from ckpttool.storage import MARK, open_storage, retry
from ckpttool.storage import fsspec as remote
from ckpttool.storage import s3 as s3_module
from ckpttool.storage.s3 import MIN_PART_BYTES, S3Writer
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.cli.command import ckpttool_process
from tests.faults import s3_faults as faults
from tests.faults.rules import Before
from tests.faults.s3_faults import Cut, Hang
from tests.storage import server
from tests.storage.large import TENSORS, write_weights
from tests.storage.places import Memory, Remote, files_in
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.storage import Writer
    from tests.faults.s3_faults import Action, Request
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

PART_BYTES = MIN_PART_BYTES // 16
"""Size of the parts of most tests, on a server that takes them."""
SHARDS = {"to": "safetensors", "max_shard_size": 750_000}
"""Two files of three parts, and the index that makes them look whole."""
LARGE_SHARDS = {"to": "safetensors", "max_shard_size": "12MB"}
"""The same of parts as large as commands make them."""
IMPATIENT = {"config_kwargs": {"read_timeout": 1.5}}
"""For requests that hang. What merely takes its time on a busy machine must not be sent again elsewhere."""
LARGE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def s3_server() -> Iterator[tuple[str, Any]]:
    """A server that takes small parts, which make the tests quick."""
    server.share_descriptions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3_UPLOAD_PART_MIN_SIZE", str(PART_BYTES))
        with server.running() as endpoint:
            client = server.client(endpoint)
            yield endpoint, client
            client.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 1.4 MB on local disk."""
    tensors = {name: max(1000, numel // 16) for name, numel in TENSORS.items()}
    return str(write_weights(tmp_path_factory.mktemp("small") / "run", tensors))


@pytest.fixture
def weights(small: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, which this process writes in small parts."""
    monkeypatch.setattr(s3_module, "MIN_PART_BYTES", PART_BYTES)
    return small


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 22 MB on local disk, for commands in processes of their own."""
    return str(write_weights(tmp_path_factory.mktemp("large") / "run"))


def _written(weights: str, options: dict[str, Any], out: Path) -> dict[str, bytes]:
    ckpttool.consolidate(weights, out, **options)
    return files_in(out)


@pytest.fixture(scope="module")
def expected(small: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is to be written."""
    return _written(small, SHARDS, tmp_path_factory.mktemp("expected") / "out")


@pytest.fixture(scope="module")
def expected_large(large: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is to be written of the large checkpoint."""
    return _written(large, LARGE_SHARDS, tmp_path_factory.mktemp("expected") / "out")


def _assert_nothing_is_left(s3: Bucket) -> None:
    assert s3.keys() == []
    assert s3.uploads() == []


# ------------------------------------------------------------------------------------------------- in order


def test_the_index_is_written_last(weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy) -> None:
    refused = []

    def look(_: Request) -> None:
        refused.append(ckpttool_process("inspect", s3.url("out")).error)

    proxy.add(Before(look), "upload_part", nth=2)
    proxy.add(Before(look), "put_object", match=INDEX)
    ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(s3.url("out")) == expected
    problem = "is being written, or was left half-written by a killed run"
    assert [s3.name in said for said in refused] == [True, True]
    assert problem in refused[1]
    changes = [r for r in proxy.log if r.method != "GET"]
    assert (changes[0].operation, changes[0].key) == ("put_object", f"out/{MARK}")
    assert (changes[-1].operation, changes[-1].key) == ("delete_object", f"out/{MARK}")
    assert (changes[-2].operation, changes[-2].key) == ("put_object", f"out/{INDEX}")
    before = [r.operation for r in changes[1:-2]]
    assert sorted(before) == ["complete_multipart_upload"] * 2 + ["create_multipart_upload"] * 2 + ["upload_part"] * 6
    assert before[-2:] == ["complete_multipart_upload"] * 2
    assert all(a.ended <= changes[-2].started for a in changes[1:-2] if a.ended is not None)
    assert s3.uploads() == []


def test_latest_comes_last(s3: Bucket, proxy: Proxy) -> None:
    ckpttool.convert(source("zero3-dp2-bf16"), s3.url("out"), to="zero", world_size=2)
    puts = proxy.requests("put_object")
    assert [r.key for r in (puts[0], puts[-1])] == [f"out/{MARK}", "out/latest"]
    assert all(r.ended is not None and r.ended <= puts[-1].started for r in puts[:-1])


def test_parts_are_sent_at_once(weights: str, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(faults.Latency(0.2), "upload_part", times=None)
    ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert proxy.most_in_flight("upload_part") >= 4


def test_the_output_is_prepared_in_parallel_with_the_first_reads(
    weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    s3.upload(Path(weights), "run")
    proxy.clear()
    (mark, create) = (
        proxy.add(faults.Latency(0.5), operation, match=match)
        for operation, match in [("put_object", MARK), ("create_multipart_upload", "out/")]
    )
    ckpttool.consolidate(s3.url("run"), s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert (mark.fired, create.fired) == (1, 1)
    assert Remote(s3).files(s3.url("out")) == expected
    changes = [r for r in proxy.log if r.method != "GET"]
    first = changes[0]
    assert first.ended is not None
    assert (first.operation, first.key) == ("put_object", f"out/{MARK}")
    assert all(r.started >= first.ended for r in changes[1:])
    payloads = [r for r in proxy.requests("get_object") if r.range is not None and r.range[0] > 1 << 16]
    assert min(r.started for r in payloads) < first.ended


def test_a_window_that_fails_before_its_file_is_begun_keeps_nobody_waiting() -> None:
    storage = open_storage("memory://out")
    assert isinstance(storage, remote.RemoteStorage)
    nbytes = 2 * storage.part_bytes(1)
    plan = CopyPlan((), (), (TargetFile("a", nbytes, ((0, bytes(nbytes)),), np.zeros(0, COPY)),))
    gone = OSError("the first window could not be read")
    seen: list[BaseException] = []

    def write_the_second(target: Writer) -> None:
        try:
            target.write(nbytes // 2, memoryview(bytes(nbytes // 2)))
        except BaseException as error:
            seen.append(error)

    def write() -> None:
        output = BucketOutput(storage, "memory://out", plan, overwrite=False, replaces=lambda _: False)
        with output.committed():
            target = output.begin(plan.files[0])
            target.fail(gone)
            second = threading.Thread(target=write_the_second, args=(target,), daemon=True)
            second.start()
            second.join(60)
            assert not second.is_alive()
            raise gone

    with pytest.raises(OSError, match="the first window"):
        write()
    assert seen == [gone]
    assert not storage.exists("memory://out")


# ------------------------------------------------------------------------------------------------- faults

ONCE: dict[str, Action] = {
    "500": faults.INTERNAL_ERROR,
    "503": faults.SLOW_DOWN,
    "timeout": faults.REQUEST_TIMEOUT,
    "before": Cut("before"),
    "after": Cut("after"),
    "in the request": Cut("request", 0),
    "hang": Hang(),
}
WRITES = [
    "put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload", "delete_object",
    "list_objects_v2",
]  # fmt: skip


@pytest.mark.parametrize("fault", ONCE)
def test_every_request_may_fail_once(
    fault: str, weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy
) -> None:
    writes = WRITES[-3:] if fault == "hang" else WRITES  # each takes a second
    options = IMPATIENT if fault == "hang" else {}
    rules = [proxy.add(ONCE[fault], operation, each=True) for operation in writes]
    ckpttool.consolidate(weights, s3.url("out"), storage_options=options, **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(s3.url("out")) == expected
    assert s3.uploads() == []
    assert [rule.fired > 0 for rule in rules] == [True] * len(rules) or fault == "in the request"


def test_a_completion_that_fails_late_is_made_again(
    weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy
) -> None:
    rule = proxy.add(faults.LATE_ERROR, "complete_multipart_upload", each=True)
    ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert rule.fired == 2
    assert Remote(s3).files(s3.url("out")) == expected


@pytest.mark.parametrize(
    ("operation", "match", "fault"),
    [
        ("put_object", MARK, "503"), ("put_object", INDEX, "after"), ("create_multipart_upload", "", "503"),
        ("upload_part", "partNumber=2", "after"), ("complete_multipart_upload", "", "503"),
        ("complete_multipart_upload", LARGE, "after"),
    ],
)  # fmt: skip
def test_a_permanent_failure_leaves_nothing(
    operation: str, match: str, fault: str, weights: str, s3: Bucket, proxy: Proxy
) -> None:
    rule = proxy.add(ONCE[fault], operation, match, times=None)
    done = command("consolidate", weights, s3.url("out"), "--to", "safetensors", "--max-shard-size", "750000")
    assert f"s3://{s3.name}/out/" in done.error
    assert f"the store failed {retry.ATTEMPTS} times, last with " in done.error
    assert rule.fired >= retry.ATTEMPTS
    _assert_nothing_is_left(s3)


@pytest.mark.parametrize("operation", ["put_object", "create_multipart_upload", "upload_part"])
@pytest.mark.parametrize("fault", [faults.ACCESS_DENIED, faults.EXPIRED_TOKEN], ids=lambda f: f.code)
def test_a_denied_request_is_reported_at_once(
    operation: str, fault: faults.Answer, weights: str, s3: Bucket, proxy: Proxy
) -> None:
    proxy.add(fault, operation, times=None)
    with pytest.raises(StorageError, match=r"access denied|the credentials have expired"):
        ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    targets = [r.target for r in proxy.requests(operation)]
    assert len(targets) == len(set(targets))  # none was made twice
    _assert_nothing_is_left(s3)


def test_where_cleaning_up_fails_too_the_mark_stays(
    weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy
) -> None:
    proxy.add(faults.ACCESS_DENIED, "upload_part", "partNumber=2", times=None)
    proxy.add(faults.ACCESS_DENIED, "abort_multipart_upload", times=None)
    with pytest.raises(StorageError, match="access denied"):
        ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert s3.keys() == [f"out/{MARK}"]
    assert s3.uploads()
    proxy.clear()
    ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(s3.url("out")) == expected
    assert s3.uploads() == []


def test_an_upload_aborted_by_another_process_is_reported(weights: str, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(faults.NO_SUCH_UPLOAD, "complete_multipart_upload", times=None)
    with pytest.raises(StorageError, match="another process aborted its upload"):
        ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    _assert_nothing_is_left(s3)


def test_uploads_of_others_are_left_alone(weights: str, s3: Bucket, proxy: Proxy) -> None:
    mine = s3.boto.create_multipart_upload(Bucket=s3.name, Key="out/theirs")["UploadId"]
    proxy.add(faults.ACCESS_DENIED, "upload_part", times=None)
    with pytest.raises(StorageError):
        ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert s3.uploads() == [("out/theirs", mine)]


# ------------------------------------------------------------------------------------------------- stopped


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart_upload"])
def test_interrupted_run_leaves_nothing(operation: str, weights: str, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(Before(lambda _: _thread.interrupt_main()), operation, nth=2)
    proxy.add(faults.Latency(0.3), operation, times=None)
    with pytest.raises(KeyboardInterrupt):
        ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    _assert_nothing_is_left(s3)


def _killed(proxy: Proxy, operation: str, nth: int, *arguments: object) -> None:
    """Run a command until it makes a request, and kill it there."""
    asked = threading.Event()

    def wait(_: Request) -> None:
        asked.set()
        time.sleep(1)

    rule = proxy.add(Before(wait), operation, nth=nth)
    with subprocess.Popen([sys.executable, "-m", "ckpttool", *map(str, arguments)], stderr=subprocess.PIPE) as run:
        try:
            assert asked.wait(30), run.stderr.read() if run.stderr and run.poll() is not None else "nothing was asked"
        finally:
            run.kill()
    assert run.returncode < 0
    assert rule.fired == 1  # and is over: the server may have taken what the command had sent
    proxy.clear()


def test_killed_run_is_refused_and_cleared_away(
    large: str, expected_large: dict[str, bytes], s3: Bucket, proxy: Proxy
) -> None:
    out = s3.url("out")
    run = ("consolidate", large, out, "--to", "safetensors", "--max-shard-size", "12MB")
    _killed(proxy, "upload_part", 5, *run, "--jobs", 1)
    assert s3.keys() == [f"out/{MARK}"]
    left = s3.uploads()
    assert left
    assert s3.name in command("inspect", out).error
    assert command(*run).code == 0
    assert Remote(s3).files(out) == expected_large
    assert s3.uploads() == []
    aborted = {(r.key, r.query["uploadId"]) for r in proxy.requests("abort_multipart_upload")}
    assert aborted == set(left)


def test_killed_at_the_end_is_refused_and_cleared_away(
    large: str, expected_large: dict[str, bytes], s3: Bucket, proxy: Proxy
) -> None:
    out = s3.url("out")
    run = ("consolidate", large, out, "--to", "safetensors", "--max-shard-size", "12MB")
    _killed(proxy, "put_object", 2, *run)
    assert s3.keys() == [f"out/{n}" for n in sorted([MARK, *(n for n in expected_large if n != INDEX)])]
    assert "was left half-written" in command("inspect", out).error
    assert command(*run).code == 0
    assert Remote(s3).files(out) == expected_large


def test_resumed_run_sends_only_what_is_missing(large: str, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    ckpttool.convert(large, tmp_path / "whole", to="dcp")
    whole = files_in(tmp_path / "whole")
    run = ("convert", large, s3.url("out"), "--to", "dcp", "--resume")
    _killed(proxy, "upload_part", 4, *run, "--jobs", 1)
    ((key, number),) = s3.uploads()
    held = s3.parts(key, number)
    assert len(held) >= 3
    assert command(*run).code == 0
    sent = [int(r.query["partNumber"]) for r in proxy.requests("upload_part")]
    assert not set(sent) & set(held)
    assert {*sent, *held} == set(range(1, -(-len(whole[os.path.basename(key)]) // (5 << 20)) + 1))
    assert not proxy.requests("create_multipart_upload")
    assert Remote(s3).files(s3.url("out")) == whole
    assert s3.uploads() == []


def test_another_run_does_not_go_on_with_it(large: str, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    other = write_weights(tmp_path / "other", {"first.weight": 2_800_000})
    ckpttool.convert(other, tmp_path / "whole", to="dcp")
    _killed(proxy, "upload_part", 3, "convert", large, s3.url("out"), "--to", "dcp", "--resume", "--jobs", 1)
    assert command("convert", other, s3.url("out"), "--to", "dcp", "--resume").code == 0
    assert Remote(s3).files(s3.url("out")) == files_in(tmp_path / "whole")
    assert s3.uploads() == []


def test_failed_run_may_be_gone_on_with(s3: Bucket, proxy: Proxy) -> None:
    out = s3.url("out")
    arguments = {"to": "zero", "world_size": 2, "resume": True}
    proxy.add(faults.ACCESS_DENIED, "put_object", r"out/latest", times=None)
    with refused(StorageError):
        ckpttool.convert(source("zero3-dp2-bf16"), out, **arguments)  # type: ignore[arg-type]
    assert f"out/{MARK}" in s3.keys()  # noqa: SIM118
    proxy.clear()
    ckpttool.convert(source("zero3-dp2-bf16"), out, **arguments)  # type: ignore[arg-type]
    assert [r.key for r in proxy.requests("put_object")] == [f"out/{MARK}", "out/latest"]
    assert ckpttool.digest(out) == ckpttool.digest(source("zero3-dp2-bf16"))


# ------------------------------------------------------------------------------------------------- what was there


def test_an_existing_output_is_refused_before_any_work(s3: Bucket, proxy: Proxy) -> None:
    s3.put("out/theirs", b"theirs")
    s3.put("file", b"theirs")
    for to in (["consolidate", "--to", "torch"], ["convert", "--to", "dcp"]):
        for out, problem in (("out", "is not empty"), ("file", "is not a directory")):
            done = command(to[0], "/none", s3.url(out), *to[1:])  # the source is not even looked for
            assert f"s3://{s3.name}/{out}: already exists and {problem}" in done.error
    assert {r.method for r in proxy.log} == {"GET"}
    assert s3.keys() == ["file", "out/theirs"]


def test_overwriting_replaces_weights_and_leaves_the_rest(weights: str, expected: dict[str, bytes], s3: Bucket) -> None:
    out = s3.url("out")
    ckpttool.consolidate(source("zero3-dp2-bf16"), out, to="torch", max_shard_size=3000)
    s3.put("out/theirs", b"theirs")
    s3.put("out/deeper/model.safetensors", b"theirs")
    ckpttool.consolidate(weights, out, overwrite=True, **SHARDS)  # type: ignore[arg-type]
    theirs = {"theirs": b"theirs", "deeper/model.safetensors": b"theirs"}
    assert Remote(s3).files(out) == {**expected, **theirs}
    ckpttool.consolidate(weights, out, overwrite=True, **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(out) == {**expected, **theirs}


def test_overwriting_run_that_fails_leaves_what_was_there(
    weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    out = s3.url("out")
    ckpttool.consolidate(weights, out, **SHARDS)  # type: ignore[arg-type]
    other = write_weights(tmp_path / "other", {"a": 190_000, "b": 190_000})
    proxy.add(faults.ACCESS_DENIED, "upload_part", "partNumber=3", times=None)
    with pytest.raises(StorageError):
        ckpttool.consolidate(other, out, overwrite=True, **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(out) == expected
    assert s3.uploads() == []


class _Careful:
    """A file that is there when it is committed, as Google's and Azure's are."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path, self._data = fs, path, b""

    def write(self, data: bytes | bytearray) -> None:
        self._data += bytes(data)

    def close(self) -> None:
        pass

    def commit(self) -> None:
        _piped(self._fs, self._path, self._data)

    def discard(self) -> None:
        pass


@pytest.mark.usefixtures("small_stream_parts")
def test_overwriting_run_that_fails_leaves_what_was_there_on_other_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory as implementation

    monkeypatch.setattr(implementation.MemoryFileSystem, "open", lambda self, path, *_, **__: _Careful(self, path))
    monkeypatch.setattr(implementation.MemoryFileSystem, "pipe_file", _piped)
    place = Memory()
    out = place.new()
    ckpttool.consolidate(source("zero3-dp2-bf16"), out, to="safetensors")
    before = place.files(out)
    assert set(before) == {"model.safetensors"}
    with monkeypatch.context() as patch:
        _fail_windows(patch, lambda start: start == 2048)
        with refused(StorageError):
            ckpttool.consolidate(source("zero3-dp4-bf16"), out, to="safetensors", overwrite=True)
    assert place.files(out) == before
    ckpttool.consolidate(source("zero3-dp4-bf16"), out, to="safetensors", overwrite=True)
    assert place.files(out) != before


def test_a_killed_runs_leftovers_do_not_open_the_door(s3: Bucket, proxy: Proxy, large: str) -> None:
    """What else is in OUT was there before: without --overwrite it is as safe as without the mark."""
    s3.put("out/model.safetensors", b"theirs")
    run = ("consolidate", large, s3.url("out"), "--to", "safetensors", "--max-shard-size", "12MB")
    _killed(proxy, "upload_part", 2, *run, "--overwrite")
    assert "already exists and is not empty" in command(*run).error
    assert s3.get("out/model.safetensors") == b"theirs"
    assert command(*run, "--overwrite").code == 0
    assert "out/model.safetensors" not in s3.keys()  # noqa: SIM118


def test_a_killed_run_that_replaced_nothing_leaves_the_old_weights(
    large: str, expected_large: dict[str, bytes], s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    """The marker names the files of both runs: only those that the killed run made itself are its leftovers."""
    out = s3.url("out")
    ckpttool.consolidate(large, out, **LARGE_SHARDS)  # type: ignore[arg-type]
    other = write_weights(tmp_path / "other", {"a": 3_000_000, "b": 3_000_000})
    run = ("consolidate", other, out, "--to", "safetensors", "--max-shard-size", "12MB")
    _killed(proxy, "upload_part", 2, *run, "--overwrite")
    old = {f"out/{name}": data for name, data in expected_large.items()}
    assert "already exists and is not empty" in command(*run).error
    assert {key: s3.get(key) for key in old} == old
    proxy.add(faults.ACCESS_DENIED, "upload_part", "partNumber=2", times=None)
    assert command(*run, "--overwrite").code == 3
    proxy.clear()
    assert Remote(s3).files(out) == expected_large
    assert s3.uploads() == []
    assert command(*run, "--overwrite").code == 0
    assert Remote(s3).files(out) != expected_large


def test_a_mark_that_is_not_ours_is_refused(s3: Bucket, weights: str) -> None:
    for content in (b"", b"[]", b'{"key": "", "files": 1}', b"\xff"):
        s3.put(f"out/{MARK}", content)
        with pytest.raises(StorageError):
            ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    s3.put("theirs", b"theirs")
    s3.put(f"out/{MARK}", b'{"key": "", "files": ["../theirs", "/theirs", "a/../../theirs"]}')
    ckpttool.consolidate(weights, s3.url("out"), **SHARDS)  # type: ignore[arg-type]
    assert s3.get("theirs") == b"theirs"


# ------------------------------------------------------------------------------------------------- proofs


def _flip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part that is written have a wrong byte."""
    right = S3Writer.write

    def wrong(self: S3Writer, start: int, data: bytes | memoryview) -> None:
        right(self, start, bytes(data[:-1]) + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(S3Writer, "write", wrong)


@pytest.mark.parametrize("to", ["consolidate", "convert"])
def test_a_wrong_output_is_removed(to: str, weights: str, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    _flip(monkeypatch)
    go: Callable[[], object] = {
        "consolidate": lambda: ckpttool.consolidate(weights, s3.url("out"), prove=True, **SHARDS),  # type: ignore[arg-type]
        "convert": lambda: ckpttool.convert(weights, s3.url("out"), to="dcp", prove=True),
    }[to]
    with refused(CkptError):
        go()
    _assert_nothing_is_left(s3)


def test_an_interrupted_proof_leaves_nothing(weights: str, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpttool.analysis.digest.same_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpttool.consolidate(weights, s3.url("out"), prove=True, **SHARDS)  # type: ignore[arg-type]
    _assert_nothing_is_left(s3)


def test_a_wrong_output_that_cannot_be_removed_is_refused(
    weights: str, expected: dict[str, bytes], s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is there during the comparison, and goes last: a kill then leaves nothing that looks right."""
    proxy.add(faults.ACCESS_DENIED, "delete_object", times=None)
    with monkeypatch.context() as patch:
        _flip(patch)
        with refused(CkptError):
            ckpttool.consolidate(weights, s3.url("out"), prove=True, **SHARDS)  # type: ignore[arg-type]
    proxy.clear()
    assert s3.keys() == [f"out/{name}" for name in sorted([MARK, *expected])]
    assert "was left half-written" in command("verify", s3.url("out"), "--deep").stdout
    ckpttool.consolidate(weights, s3.url("out"), prove=True, **SHARDS)  # type: ignore[arg-type]
    assert Remote(s3).files(s3.url("out")) == expected


def test_a_wrong_output_is_not_resumed(weights: str, s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {**SHARDS, "resume": True}
    _flip(monkeypatch)
    proxy.add(faults.ACCESS_DENIED, "put_object", INDEX, times=None)
    with refused(StorageError):
        ckpttool.consolidate(weights, s3.url("out"), **run)
    proxy.clear()
    assert f"out/{LARGE}" in s3.keys()  # noqa: SIM118
    with refused(CkptError):
        ckpttool.consolidate(weights, s3.url("out"), prove=True, **run)
    _assert_nothing_is_left(s3)


# ------------------------------------------------------------------------------------------------- every request

TINY: dict[str, Any] = {"to": "safetensors", "max_shard_size": 9000}
"""Shards that one request writes each."""
OLD, NEW = source("zero3-dp2-bf16-trainer"), source("zero2-dp2-bf16-trainer")


def _requests(proxy: Proxy, function: Callable[[], object]) -> int:
    """The number of requests that a command makes."""
    proxy.clear()
    proxy.log.clear()
    function()
    return len(proxy.log)


def _cut_off(proxy: Proxy, nth: int, function: Callable[[], object]) -> None:
    """Run a command that reaches the store no more from its n-th request on: it leaves what a kill leaves there."""
    proxy.add(faults.ACCESS_DENIED, nth=nth, times=None)
    with contextlib.suppress(CkptError):
        function()
    proxy.clear()


def _fail_windows(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """Let windows of the sources fail, by their first byte in the file that is written."""
    from ckpttool.execution.copy import PartAssembler

    right = PartAssembler.assemble

    def assemble(self: PartAssembler, start: int, end: int) -> tuple[memoryview, int]:
        if fails(start):
            raise StorageError("window", "failed on purpose", "")
        return right(self, start, end)

    monkeypatch.setattr(PartAssembler, "assemble", assemble)


def _fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let a run fail after some windows of its sources, before it replaces a file."""
    calls = itertools.count()
    _fail_windows(monkeypatch, lambda _: next(calls) >= count)


def _is_refused(out: str) -> bool:
    verified = command("verify", out, "--deep")
    absent = verified.code == 3 and "does not exist" in verified.stderr
    return command("inspect", out).code == 3 and (verified.code == 1 or absent)


@pytest.mark.parametrize("how", ["parts", "small"])
def test_a_kill_at_any_request_leaves_a_whole_output_or_none(how: str, weights: str, s3: Bucket, proxy: Proxy) -> None:
    src, options = (weights, SHARDS) if how == "parts" else (OLD, TINY)
    out = s3.url("out")

    def run() -> None:
        ckpttool.consolidate(src, out, prove=True, jobs=1, **options)

    count = _requests(proxy, run)
    whole = Remote(s3).files(out)
    for nth in sampling.some(range(1, count + 1), 4, key=how):
        for name in Remote(s3).files(out):
            s3.delete(f"out/{name}")
        _cut_off(proxy, nth, run)
        if Remote(s3).files(out) != whole:
            assert _is_refused(out), nth
        run()
        assert Remote(s3).files(out) == whole
        assert s3.uploads() == []


def test_a_kill_while_replacing_leaves_no_mixture_not_even_after_another_failure(
    s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = s3.url("out")

    def write(src: str) -> None:
        ckpttool.consolidate(src, out, overwrite=True, jobs=1, **TINY)

    write(NEW)
    new = Remote(s3).files(out)
    write(OLD)
    old = Remote(s3).files(out)
    assert set(old) == set(new)
    assert old != new
    count = _requests(proxy, lambda: write(NEW))
    mixed = 0
    for nth in sampling.some(range(1, count + 1), 5, key="replacing"):
        write(OLD)
        _cut_off(proxy, nth, lambda: write(NEW))
        left = Remote(s3).files(out)
        assert left in (old, new) or _is_refused(out), nth
        with monkeypatch.context() as patch:
            _fail_after(patch, 2)
            with pytest.raises(StorageError, match="on purpose"):
                write(NEW)
        left = Remote(s3).files(out)
        mixed += left not in (old, new)
        assert left in (old, new) or _is_refused(out), nth
    assert mixed
    write(NEW)
    assert Remote(s3).files(out) == new


# ------------------------------------------------------------------------------------------------- threads


def _within(seconds: float, function: Callable[[], object]) -> BaseException | None:
    """What a function raised; it must end in time."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@pytest.mark.usefixtures("small_stream_parts")
@pytest.mark.parametrize("memory", ["1KB", "9KB", "256MB"])
@pytest.mark.parametrize("jobs", [1, 2, 16])
@pytest.mark.parametrize("at", [None, 0, 1024, 5120])
def test_parts_wait_for_each_other_and_for_memory_but_not_forever(
    at: int | None, jobs: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Memory()
    out = place.new()
    if at is not None:
        _fail_windows(monkeypatch, lambda start: start == at)
    src = source("zero3-dp2-bf16")
    error = _within(20, lambda: ckpttool.convert(src, out, to="zero", world_size=2, jobs=jobs, memory=memory))
    if at is None:
        assert error is None
        assert ckpttool.digest(out) == ckpttool.digest(src)
    else:
        assert "failed on purpose" in str(error)
        assert place.files(out) == {}


@pytest.mark.usefixtures("small_stream_parts")
def test_a_file_system_that_commits_nothing_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some open a file where it is to lie, and know no other way."""
    import fsspec.implementations.memory as implementation

    fs = implementation.MemoryFileSystem()

    class Direct:
        """A file that is there from its first byte on."""

        def __init__(self, path: str) -> None:
            self._path = path
            self._data = b""

        def write(self, data: bytes | bytearray) -> None:
            self._data += bytes(data)
            fs.pipe_file(self._path, self._data)

        def close(self) -> None:
            pass

    def opened(self: object, path: str, mode: str = "rb", **_: Any) -> Direct:
        assert mode == "wb"
        return Direct(path)

    place = Memory()
    out = place.new()
    with monkeypatch.context() as patch:
        patch.setattr(implementation.MemoryFileSystem, "open", opened)
        patch.setattr(implementation.MemoryFileSystem, "pipe_file", _piped)
        ckpttool.consolidate(source("zero3-dp2-bf16"), out, to="safetensors")
        assert set(place.files(out)) == {"model.safetensors"}
        _fail_windows(patch, lambda start: start == 2048)
        with refused(StorageError):
            ckpttool.consolidate(source("zero3-dp2-bf16"), out + "2", to="safetensors")
    assert place.files(out + "2") == {}


def _piped(self: Any, path: str, value: bytes, **_: Any) -> None:
    from fsspec.implementations.memory import MemoryFile

    self.store[path] = MemoryFile(self, path, bytes(value))


# ------------------------------------------------------------------------------------------------- memory

MEASURED = """
import resource, sys
import ckpttool, ckpttool.storage.s3
from ckpttool.execution.copy import PartAssembler
from ckpttool.execution.output_bucket import BucketOutput
def peak():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmHWM"))
small, large, out, memory = sys.argv[1:]
ckpttool.consolidate(small, out + "-small", to="safetensors", memory=memory)
before = peak()
ckpttool.consolidate(large, out, to="safetensors", memory=memory)
print(peak() - before)
"""


def test_memory_stays_within_what_was_asked_for(s3: Bucket, tmp_path: Path) -> None:
    s3.upload(write_weights(tmp_path / "small", {"a": 3_000_000}), "small")
    s3.upload(write_weights(tmp_path / "large", {"a": 8_000_000, "b": 6_000_000}), "large")
    arguments = [s3.url("small"), s3.url("large"), s3.url("out"), "24MB"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True, timeout=300
    )
    grown = int(done.stdout)
    # Of 56 MB: the memory asked for, and buffers of libraries that the small run had not touched.
    assert grown < (24 << 20) + (16 << 20), f"{grown:,}"
    ((_, nbytes),) = s3.sizes("out/").items()
    assert nbytes > 56_000_000


@pytest.mark.parametrize("memory", ["64KB", "1"])
def test_less_memory_than_a_window_needs_will_do(
    memory: str, weights: str, expected: dict[str, bytes], s3: Bucket
) -> None:
    options = {**SHARDS, "memory": memory}
    ckpttool.consolidate(weights, s3.url("out"), **options)  # type: ignore[arg-type]
    assert Remote(s3).files(s3.url("out")) == expected
    with contextlib.suppress(ValueError):
        ckpttool.consolidate(weights, s3.url("none"), to="torch", memory=0)


def test_a_new_save_is_listed_as_being_saved(s3: Bucket) -> None:
    s3.put(f"out/{MARK}", b'{"key": "", "files": ["latest"]}')
    problem = "is being written, or was left half-written by a killed run; wait for that run, or write it again"
    assert command("inspect", s3.url("out")).error == f"Error: {s3.url('out')}: {problem}"


@pytest.mark.parametrize("configured", ["when_supported", "when_required"])
def test_the_store_can_compare_each_part_with_its_checksum(
    configured: str, large: str, s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", configured)
    ckpttool.cp(large, s3.url("weights"))
    data = files_in(large)["model.safetensors"]
    parts = {int(r.query["partNumber"]): r.headers for r in proxy.requests("upload_part")}
    assert sorted(parts) == list(range(1, -(-len(data) // MIN_PART_BYTES) + 1))
    for number, headers in parts.items():
        part = data[(number - 1) * MIN_PART_BYTES : number * MIN_PART_BYTES]
        expected = base64.b64encode(zlib.crc32(part).to_bytes(4, "big")).decode()
        assert headers.get("x-amz-checksum-crc32") == (expected if configured == "when_supported" else None)


def test_parts_of_other_storages_are_as_many_as_azure_takes_and_as_large_as_google_wants() -> None:
    storage = open_storage("memory://b")
    assert isinstance(storage, remote.RemoteStorage)
    for nbytes in (0, 1, remote.PART_BYTES, 390 << 30, 391 << 30, 5 << 40):
        part = storage.part_bytes(nbytes)
        assert part >= remote.PART_BYTES
        assert part % remote.PART_UNIT == 0
        assert -(-nbytes // part) <= remote.MAX_PARTS


def test_bytes_are_held_back_for_at_most_one_part(small_stream_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory as implementation

    asked: list[Any] = []
    opened = implementation.MemoryFileSystem.open

    def noted(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if "autocommit" in options:  # not a small file, which is put whole
            asked.append(options.get("block_size"))
        return opened(self, path, mode, **options)

    monkeypatch.setattr(implementation.MemoryFileSystem, "open", noted)
    ckpttool.convert(source("zero3-dp2-bf16"), Memory().new(), to="zero", world_size=1)
    assert set(asked) == {small_stream_parts}
