"""Reads from a bucket: number of requests, failures, changes meanwhile, and messages."""

from __future__ import annotations

import collections
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckpttool
from ckpttool.errors import StorageError
from ckpttool.storage import open_storage, retry, without_secrets
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.s3_client import SingleAttemptFileSystem
from tests import sampling
from tests.cli.command import EXTENSIONS_READING, ckpttool_process
from tests.cli.command import ckpttool as command
from tests.faults import s3_faults as faults
from tests.faults.rules import Before
from tests.faults.s3_faults import Cut, Hang, Latency, Shorter, Unranged
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.faults.s3_faults import Action
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

NAME = "zero3-dp4-bf16"
OPTIONS = {"config_kwargs": {"read_timeout": 0.7}}
SHORT = ("--storage-option", "config_kwargs.read_timeout=1")
pytestmark = pytest.mark.usefixtures("s3_client")
either_client = pytest.mark.parametrize("s3_client", sampling.some(["blocking", "event loop"], 1), indirect=True)
"""For tests of what both clients have in common."""
PAYLOADS = "optim_states"
"""The files that weights are read from."""


@pytest.fixture
def run(s3: Bucket) -> str:
    """A checkpoint in the bucket."""
    s3.upload(Path(source(NAME)), "run")
    return s3.url("run")


# ------------------------------------------------------------------------------------------------- how often


def _made(kind: str, directory: Path) -> str:
    """A checkpoint of some kind on local disk."""
    if kind in {"safetensors", "torch"}:
        ckpttool.consolidate(source(NAME), directory, to=kind, max_shard_size=3000)  # type: ignore[arg-type]
    elif kind == "dcp":
        ckpttool.convert(source(NAME), directory, to="dcp")
    else:
        return source(kind)
    return str(directory)


@pytest.mark.parametrize(
    "kind", [NAME, "zero2-dp4-bf16", "universal-zero3-dp2-bf16", "safetensors", "torch", "dcp", "zero3-dp2-bf16-nvme"]
)
def test_looking_at_a_checkpoint_takes_few_requests(kind: str, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    keys = s3.upload(Path(_made(kind, tmp_path / "made")), "run")
    proxy.clear()
    ckpttool.inspect(s3.url("run"))
    asked = collections.Counter(r.key for r in proxy.requests("get_object"))
    assert max(asked.values()) <= 3, asked
    listed = collections.Counter(r.query["prefix"] for r in proxy.requests("list_objects_v2"))
    assert max(listed.values()) == 1, listed  # what was read is of the versions that were listed
    assert len(listed) <= 8
    assert len(proxy.requests()) <= 3 * len(keys) + 8
    assert not proxy.requests("head_object")


def test_looking_at_four_ranks_reads_little_and_at_once(run: str, s3: Bucket, proxy: Proxy) -> None:
    proxy.add(Latency(0.1), times=None)
    ckpttool.inspect(run)
    assert len(proxy.requests("get_object")) <= 3 * len(s3.keys())
    assert sum(proxy.bytes_by_key().values()) <= 1.2 * sum(s3.sizes().values())
    assert proxy.most_in_flight("get_object") >= 4


def test_of_large_files_only_the_ends_are_read(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    from tests.storage.large import write_weights

    s3.upload(write_weights(tmp_path / "large"), "run")
    ckpttool.inspect(s3.url("run"))
    assert sum(proxy.bytes_by_key().values()) < 200_000
    s3.boto.upload_file(_torch_file(tmp_path), s3.name, "torch/pytorch_model.bin")
    proxy.clear()
    ckpttool.inspect(s3.url("torch"))
    assert sum(proxy.bytes_by_key().values()) < 500_000


def test_thousands_of_parameters_take_no_more_requests(
    checkpoint_copy: Callable[[str], Path], s3: Bucket, proxy: Proxy
) -> None:
    import torch

    run = checkpoint_copy("zero2-dp2-bf16")
    path = next(run.glob("*/mp_rank_00_model_states.pt"))
    states = torch.load(path, weights_only=False)
    states["beside the model"] = {f"a.record.with.a.long.name.{i}": torch.zeros(6000) for i in range(3000)}
    torch.save(states, path)
    s3.upload(run, "run")
    proxy.clear()
    proxy.add(Latency(0.3), "get_object", times=None)
    ckpttool.inspect(s3.url("run"))
    asked = collections.Counter(r.key for r in proxy.requests("get_object"))
    assert max(asked.values()) <= 3, asked
    first, second, *_ = proxy.requests("get_object", path.name)
    assert first.ended is not None
    assert second.started < first.ended  # both ends at once


def _torch_file(directory: Path) -> str:
    import torch

    path = str(directory / "pytorch_model.bin")
    torch.save({f"layer{i}.weight": torch.zeros(100_000) for i in range(20)}, path)
    return path


def test_reading_keeps_many_requests_in_flight(run: str, proxy: Proxy) -> None:
    proxy.add(Latency(0.1), "get_object", times=None)
    ckpttool.digest(run)
    assert proxy.most_in_flight("get_object") >= 4


# ------------------------------------------------------------------------------------------------- changed


def _rewrite(s3: Bucket, match: str) -> None:
    """Write an object anew: as long as it was, but not the same."""
    key = next(k for k in s3.keys() if match in k)  # noqa: SIM118
    data = s3.get(key)
    s3.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def test_an_object_rewritten_after_its_listing(run: str, s3: Bucket) -> None:
    checkpoint = ckpttool.inspect(run)
    name = checkpoint.parameters[0].name
    for rank in range(4):
        _rewrite(s3, f"rank_{rank}_mp_rank_00_optim")
    with refused(StorageError):
        ckpttool.extract(checkpoint, name)


def test_an_object_removed_after_it_was_looked_at(run: str, s3: Bucket) -> None:
    checkpoint = ckpttool.inspect(run)
    for key in s3.keys():  # noqa: SIM118
        if PAYLOADS in key:
            s3.delete(key)
    with refused(StorageError):
        ckpttool.extract(checkpoint, checkpoint.parameters[0].name)


@pytest.mark.parametrize("nth", sampling.some([1, 5, 9, 13], 2))
@pytest.mark.parametrize("out", ["local", "s3"])
def test_an_object_rewritten_while_it_is_read(
    out: str, nth: int, run: str, s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    rule = proxy.add(Before(lambda _: _rewrite(s3, "rank_2_mp_rank_00_optim")), "get_object", PAYLOADS, nth=nth)
    target = str(tmp_path / "out") if out == "local" else s3.url("out")
    done = command("consolidate", run, target, "--to", "safetensors")
    if sum(PAYLOADS in r.key for r in proxy.requests("get_object")) < nth:
        assert done.code == 0  # it was over before
        return
    assert len(rule._seen) == 1
    assert "changed" in done.error
    assert "rank_2" in done.error
    assert not (tmp_path / "out").exists()
    assert s3.keys("out") == []


def test_an_object_that_changes_between_reads_is_noticed(run: str, s3: Bucket, tmp_path: Path) -> None:
    """All was read of what was there before: what is written would still be a mixture of two moments."""
    from ckpttool.storage.local_writer import DirectoryWriter

    right = DirectoryWriter.write
    rewritten: list[bool] = []

    def write(self: Any, start: int, data: memoryview) -> None:
        if not rewritten:
            rewritten.append(True)
            _rewrite(s3, "rank_2_mp_rank_00_optim")
        right(self, start, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectoryWriter, "write", write)
        done = command("consolidate", run, tmp_path / "out", "--to", "safetensors")
    assert "changed while it was being read" in done.error
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- faults

READS: dict[str, Action] = {
    "500": faults.INTERNAL_ERROR,
    "503": faults.SLOW_DOWN,
    "unavailable": faults.UNAVAILABLE,
    "timeout": faults.REQUEST_TIMEOUT,
    "before": Cut("before"),
    "closed": Cut("before", reset=False),
    "no body": Cut("answer", 0),
    "mid body": Cut("answer", 500),
    "short body": Cut("answer", 500, reset=False),
    "liar": Shorter(7),
    "honest liar": Shorter(7, relabel=True),
}


@pytest.mark.parametrize("fault", sampling.some(READS, 2))
def test_every_read_may_fail_once(fault: str, run: str, proxy: Proxy) -> None:
    rule = proxy.add(READS[fault], "get_object", each=True)
    other = proxy.add(READS[fault], "list_objects_v2", each=True) if fault in {"500", "503", "before"} else rule
    assert ckpttool.digest(run, storage_options=OPTIONS) == ckpttool.digest(source(NAME))
    assert rule.fired >= 8
    assert other.fired >= 2


@either_client
@pytest.mark.parametrize("fault", [Hang(), Hang(300)], ids=["silent", "mid body"])
def test_a_read_that_hangs_is_made_again(fault: Hang, run: str, proxy: Proxy) -> None:
    rule = proxy.add(fault, "get_object", PAYLOADS, each=True)
    assert ckpttool.digest(run, storage_options=OPTIONS) == ckpttool.digest(source(NAME))
    assert rule.fired >= 4


def test_a_server_that_knows_no_ranges_is_not_read_whole(run: str, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    from tests.storage.large import write_weights

    rule = proxy.add(Unranged(), "get_object", each=True)
    assert ckpttool.digest(run) == ckpttool.digest(source(NAME))
    proxy.clear()
    s3.upload(write_weights(tmp_path / "large"), "large")
    rule = proxy.add(Unranged(), "get_object", times=None)
    error = command("inspect", s3.url("large")).error
    assert "large/model.safetensors: the store failed 7 times, last with 22,4" in error
    assert "bytes instead of " in error
    assert rule.fired == 0 or proxy.requests("get_object")
    assert len(proxy.requests("get_object")) == retry.ATTEMPTS
    whole = s3.sizes("large/")["large/model.safetensors"]
    assert all(r.sent < whole for r in proxy.requests("get_object"))


@pytest.mark.parametrize("fault", sampling.some([k for k in READS if k != "timeout"], 4, key="given up"))
def test_a_read_that_always_fails_is_given_up(fault: str, run: str, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    rule = proxy.add(READS[fault], "get_object", "rank_2_mp_rank_00_optim", times=None)
    done = command("consolidate", run, tmp_path / "out", "--to", "torch", *SHORT)
    assert re.search(
        r"/run/\w+/\w*rank_2_mp_rank_00_optim_states\.pt: the store failed 7 times, last with ", done.error
    )
    # aiohttp itself asks once more where a connection was closed that it had used before.
    assert retry.ATTEMPTS <= rule.fired <= 2 * retry.ATTEMPTS
    assert not (tmp_path / "out").exists()


def test_a_listing_that_always_fails_is_given_up(run: str, proxy: Proxy) -> None:
    rule = proxy.add(faults.UNAVAILABLE, "list_objects_v2", times=None)
    assert "/run: the store failed 7 times, last with ServiceUnavailable" in command("inspect", run).error
    assert rule.fired == retry.ATTEMPTS


# ------------------------------------------------------------------------------------------------- for good

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIASESAMESESAME",
    "AWS_SECRET_ACCESS_KEY": "sesame/open+sesame",
    "AWS_SESSION_TOKEN": "sesametoken",
}


def _assert_no_secret(text: str) -> None:
    assert "sesame" not in text.lower()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (faults.EXPIRED_TOKEN, "the credentials have expired"),
        (faults.ACCESS_DENIED, "access denied"),
        (faults.Answer(403, "InvalidAccessKeyId", "AKIASESAMESESAME"), "the credentials are not accepted"),
        (faults.Answer(403, "SignatureDoesNotMatch", "sesame"), "the credentials are not accepted"),
        (faults.Answer(403, "RequestTimeTooSkewed", "sesame"), "this machine's clock is wrong"),
        (faults.Answer(404, "NoSuchBucket", "sesame"), "the bucket does not exist"),
        (faults.Answer(400, "AuthorizationHeaderMalformed", "sesame"), "the region or the credentials are wrong"),
        (faults.Answer(418, "Teapot", "AKIASESAMESESAME"), "the store answered Teapot"),
    ],
    ids=lambda v: v.code if isinstance(v, faults.Answer) else "",
)
@pytest.mark.parametrize("operation", sampling.some(["list_objects_v2", "get_object"], 1))
def test_a_permanent_failure_is_reported_at_once(
    operation: str, fault: faults.Answer, problem: str, run: str, proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    proxy.add(fault, operation, times=None)
    error = command("inspect", run).error
    assert problem in error
    assert run in error
    _assert_no_secret(error)
    asked = collections.Counter((r.target, r.range) for r in proxy.requests(operation))
    assert max(asked.values()) == 1


@either_client
def test_there_is_no_such_bucket_or_key(s3: Bucket, proxy: Proxy) -> None:
    for name in ("inspect", "verify", *EXTENSIONS_READING):
        assert command(name, "s3://no-such-bucket/run").code == 3
    error = command("inspect", "s3://no-such-bucket/run").error
    assert error.startswith("Error: s3://no-such-bucket/run: the bucket does not exist; ")
    error = command("inspect", s3.url("none/at/all")).error
    assert error == f"Error: {s3.url('none/at/all')}: does not exist; check the path"
    proxy.clear()
    command("inspect", s3.url("none/at/all"))
    assert len(proxy.log) <= 4
    error = command("consolidate", source(NAME), "s3://no-such-bucket/run", "--to", "torch").error
    assert "the bucket does not exist" in error


def test_an_endpoint_at_which_nobody_is(s3: Bucket, run: str) -> None:
    error = command("inspect", run, "--storage-option", "endpoint_url=http://127.0.0.1:9").error
    assert f"{run}: the store failed 7 times, last with " in error
    error = command("inspect", run, "--storage-option", "endpoint_url=sesame").error
    assert error.startswith("Error: --storage-option: has an endpoint_url without http:// or https://; ")
    _assert_no_secret(error)


@either_client
def test_no_credentials_and_no_profile(s3: Bucket, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    error = command("inspect", run).error
    assert error.startswith(f"Error: {run}: no credentials were found; ")
    monkeypatch.setenv("AWS_PROFILE", "sesame")
    SingleAttemptFileSystem.clear_instance_cache()
    error = command("inspect", run).error
    assert error.startswith(f"Error: {run}: the profile does not exist; ")
    _assert_no_secret(error)


@either_client
def test_secrets_are_shown_nowhere(
    s3: Bucket, run: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Those that reach the store in a process of their own, where whatever libraries log is seen too."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with_user = run.replace("://", "://AKIASESAMESESAME:sesame%2Fopen@")
    options = ("--storage-option", "key=AKIASESAMESESAME", "--storage-option", "secret=sesame/open+sesame")
    proxy.add(faults.ACCESS_DENIED, "get_object", PAYLOADS, times=None)
    reaching: list[tuple[object, ...]] = [
        ("inspect", run, *options), ("consolidate", with_user, tmp_path / "out", "--to", "torch"),
        ("consolidate", source(NAME), with_user, "--to", "torch"),
    ]  # fmt: skip
    others: list[tuple[object, ...]] = [
        ("inspect", run), ("inspect", with_user), ("inspect", run, "--storage-option", "sesame"),
        ("inspect", run, "--storage-option", "no_such_option=sesame"),
        ("inspect", run, "--storage-option", "config_kwargs=sesame"),
        ("inspect", run, "--storage-option", "client_kwargs.endpoint_url=sesame"),
    ]  # fmt: skip
    for arguments in (*reaching, *others):
        done = (ckpttool_process if arguments in reaching else command)(*arguments)
        assert done.code in {2, 3}, (arguments, done)
        _assert_no_secret(done.stdout + done.stderr)
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1 or done.code == 2, done
    _assert_no_secret("".join(capfd.readouterr()))


@either_client
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_report_of_faults_shows_no_secrets(json: tuple[str, ...], s3: Bucket) -> None:
    where = s3.url("none")
    done = ckpttool_process("verify", where.replace("://", "://AKIASESAMESESAME:sesame%2Fopen@"), *json)
    assert done.code == 1
    assert where in done.stdout
    _assert_no_secret(done.stdout + done.stderr)


@either_client
def test_successful_commands_show_no_secrets_either(s3: Bucket, run: str) -> None:
    done = ckpttool_process("inspect", run, "--json", "--params", env={**os.environ, **SECRETS})
    assert (done.code, done.stderr) == (0, "")
    _assert_no_secret(done.stdout)


@either_client
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user:pass@host/path", "sftp://host/path"),
        ("sftp://user:p@ss@host/path", "sftp://host/path"),
        ("sftp://user:p/ss@host/path", "sftp://host/path"),
        ("s3://bucket/run@home/a", "s3://bucket/run@home/a"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("abfs://container@account.dfs.core.windows.net/run", "abfs://container@account.dfs.core.windows.net/run"),
        ("abfss://container@account/run", "abfss://container@account/run"),
        ("/local/s3://user:pass@host", "/local/s3://host"),
        ("https://h/x?X-Amz-Signature=abc&a=b", "https://h/x?..."),
        ("simplecache::http://user:pass@h/x", "simplecache::http://h/x"),
        ("zip://a::http://user:pass@h", "zip://a::http://h"),
        ("filecache::s3://AKIA:pa/ss@b/x", "filecache::s3://b/x"),
        ("abfs://c@account.dfs.core.windows.net/run?sig=abc", "abfs://c@account.dfs.core.windows.net/run?..."),
        ("/here/simplecache::http:/user:pass@h/x", "/here/simplecache::http:/h/x"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@either_client
def test_unknown_and_missing_schemes(tmp_path: Path) -> None:
    assert "nonsense:// is not a known storage" in command("inspect", "nonsense://a/b").error
    assert command("inspect", " s3://bucket/run").error.endswith("does not exist; check the path")
    assert "names a host" in command("inspect", "file://host/a").error
    for url in ("s3://", "s3:///run", "memory://none", "memory://"):
        assert command("inspect", url).code == 3
    assert "pip install" in command("inspect", "gs://bucket/run").error


def test_several_places_at_once_are_refused(s3: Bucket, run: str) -> None:
    error = command("inspect", run, "--part", source(NAME)).error
    assert "is not on the same storage as" in error


# ------------------------------------------------------------------------------------------- storages without more


@pytest.fixture
def in_memory() -> str:
    """A checkpoint on a storage that neither checks lengths nor can be asked for a version."""
    ckpttool.cp(source(NAME), "memory://somewhere/run")
    return "memory://somewhere/run"


@either_client
def test_a_short_answer_is_never_taken_for_a_whole_one(in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *given, **span: read(*given, **span)[:-1])
    with pytest.raises(StorageError, match=f"the store failed {retry.ATTEMPTS} times, last with .* bytes instead"):
        ckpttool.inspect(in_memory)


@either_client
def test_a_file_rewritten_during_inspect_is_an_error(in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MemoryFileSystem.cat_file

    def rewritten(fs: MemoryFileSystem, path: str, **span: Any) -> Any:
        if path.endswith(".pt"):
            fs.pipe_file(path, read(fs, path))  # the same bytes, anew
        return read(fs, path, **span)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", rewritten)
    with refused(StorageError):
        ckpttool.inspect(in_memory)


def test_a_read_is_of_the_version_that_was_listed(s3: Bucket) -> None:
    s3.put("object", b"a" * 1000)
    with open_storage(s3.url("object")).open(s3.url("object")) as reader:
        assert reader.read(0, 10) == b"a" * 10
        s3.put("object", b"b" * 1000)
        with refused(StorageError):
            reader.read(10, 20)


@either_client
def test_files_that_could_not_be_restored_are_not_overwritten(in_memory: str) -> None:
    error = command("consolidate", in_memory, in_memory, "--to", "torch", "--prove", "--overwrite").error
    assert "an overwrite on a remote storage has replaced the old files; write to another directory" in error


@either_client
def test_a_prune_that_fails_in_a_bucket_is_finished_by_the_next(
    in_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpttool.cp(f"{in_memory}/global_step3", "memory://somewhere/two")
    storage = open_storage(in_memory)
    run = "/somewhere/two"
    storage.fs.copy(f"{run}/global_step3", f"{run}/global_step10", recursive=True)  # type: ignore[attr-defined]
    storage.fs.pipe_file(f"{run}/latest", b"global_step10")  # type: ignore[attr-defined]
    delete = RemoteStorage.delete

    def fail_after_one(storage: RemoteStorage, paths: Iterable[str]) -> None:
        some = list(paths)
        delete(storage, some[:1])
        if len(some) > 1:
            raise StorageError("somewhere", "failed", "try again")

    monkeypatch.setattr(RemoteStorage, "delete", fail_after_one)
    told = r"global_step3: is removed only in part: failed, when 1 of its \d files and directories were removed"
    with pytest.raises(StorageError, match=told):
        ckpttool.prune("memory://somewhere/two", keep_last=1)
    monkeypatch.undo()
    torn, kept = ckpttool.ls("memory://somewhere/two").entries
    assert (torn.problem, kept.whole) == ("half removed by a run that was killed", True)
    assert [d.keep for d in ckpttool.prune("memory://somewhere/two", keep_last=1)] == [False, True]
    assert [e.name for e in ckpttool.ls("memory://somewhere/two").entries] == ["global_step10"]
