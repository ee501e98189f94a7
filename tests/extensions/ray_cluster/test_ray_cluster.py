"""Consolidation and conversion on a real Ray cluster: the bytes, and lost nodes and processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import ckpttool
from ckpttool.errors import CkptError, PlanError, StorageError
from ckpttool.execution import distributed
from ckpttool.extensions.ray_cluster import cluster as ray_tasks
from ckpttool.storage.staging import SHARED
from tests import damage, sampling
from tests.cli.command import ckpttool as command
from tests.cli.command import ckpttool_process, staging_of
from tests.faults import s3_faults as faults
from tests.faults.rules import Before
from tests.faults.s3_proxy import Proxy
from tests.storage import server
from tests.storage.large import write_weights
from tests.storage.places import files_in
from tests.truth import HERE, source
from tests.under_ray.driver import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.faults.s3_faults import Request

pytestmark = [
    pytest.mark.ray,
    # Ray's processes and files outlive the objects that stand for them here.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MB = 1 << 20
LARGE = 1_000_000
"""Requests for more bytes than this are for tensors, and made by tasks."""
SMALL_NODE = {"num_cpus": 1, "object_store_memory": 80 * MB}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each, both on this machine; this process has joined it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={**SMALL_NODE, "include_dashboard": False})
        nodes.add_node(**SMALL_NODE)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        yield nodes
        assert ray.is_initialized(), "a cluster that this process had joined was left"
        ray.shutdown()
        nodes.shutdown()
        del nodes
        gc.collect()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 22 MB on local disk."""
    return write_weights(tmp_path_factory.mktemp("large") / "run")


@pytest.fixture
def bucket(s3_server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> server.Bucket:
    """A fresh bucket."""
    for name, value in server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    endpoint, client = s3_server
    found = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
    client.create_bucket(Bucket=found.name)
    return found


@pytest.fixture
def proxy(bucket: server.Bucket) -> Iterator[Proxy]:
    """A proxy before the server of the bucket."""
    with Proxy(bucket.endpoint) as found:
        yield found


def _through(proxy: Proxy) -> dict[str, Any]:
    return {"endpoint_url": proxy.url}


def _small_tasks(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(distributed, "TASK_BYTES", nbytes)


def _beside_progress(stderr: str) -> list[str]:
    """What a command says but for how far it is, which it tells when it takes longer than a few seconds."""
    return [line for line in stderr.splitlines() if not line.startswith(("consolidate: ", "convert: "))]


def _told(report: Any) -> Any:
    return replace(report, written=replace(report.written, out="", seconds=0.0))


# ------------------------------------------------------------------------------------------------- the same bytes

CONSOLIDATIONS: dict[str, dict[str, Any]] = {
    "zero3-dp2-bf16": {"dtype": "fp32"},
    "zero2-dp4-bf16": {"dtype": "bf16", "max_shard_size": "4KB"},
    "zero2-dp2-bf16-legacy": {"dtype": "fp16", "max_shard_size": "4KB"},
    "autotp-zero2-tp2-dp2-bf16-fused": {"dtype": "bf16"},
    "megatron-zero1-tp2-dp2-bf16": {"dtype": "fp32", "to": "torch"},
    "zero2-dp2-bf16-trainer": {"dtype": "bf16", "prove": True},
}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "zero3-dp4-bf16": {"to": "zero", "world_size": 3, "stage": 2},
    "zero2-dp2-bf16": {"to": "zero", "world_size": 3, "stage": 3, "prove": True},
    "megatron-zero2-tp2-dp2-bf16": {"to": "universal"},
    "zero1-dp2-bf16-muon": {"to": "universal"},
    "zero2-dp3-bf16": {"to": "dcp"},
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", sampling.some(CONSOLIDATIONS, 4))
def test_consolidation_gives_the_bytes_of_a_local_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 1001)  # which cuts elements
    given: dict[str, Any] = {"to": "safetensors", **CONSOLIDATIONS[name]}
    done: list[tuple[int, int]] = []
    expected = ckpttool.consolidate(source(name), tmp_path / "here", **given)
    report = ckpttool.consolidate(
        source(name), tmp_path / "there", **given, ray=True, progress=lambda n, of: done.append((n, of))
    )
    assert files_in(tmp_path / "there") == files_in(tmp_path / "here")
    assert _told(report) == _told(expected)
    assert len(done) > 4
    assert done == sorted(done)
    assert done[-1] == (report.written.nbytes_written, report.written.nbytes_written)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", sampling.some(CONVERSIONS, 3))
def test_conversion_gives_the_bytes_of_a_local_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tasks(monkeypatch, 1001)
    expected = ckpttool.convert(source(name), tmp_path / "here", **CONVERSIONS[name])
    report = ckpttool.convert(source(name), tmp_path / "there", **CONVERSIONS[name], ray="auto")
    assert files_in(tmp_path / "there") == files_in(tmp_path / "here")
    # Tasks read what they cast for themselves, as who writes to a bucket does: it may be another's to copy.
    remote = ckpttool.convert(source(name), "memory://there/out", **CONVERSIONS[name], dry_run=True)
    assert _told(report) == _told(
        replace(expected, written=replace(expected.written, nbytes_read=remote.written.nbytes_read))
    )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("options", "name"),
    sampling.some(
        itertools.product(
            [
                {"to": "zero", "world_size": 2, "stage": 3, "dtype": "bf16"},
                {"to": "dcp"},
                {"to": "ranks", "layout": "verl", "world_size": 2},
            ],
            ["torch2.6.0-fsdp-3", "torch2.9.1-hsdp-4"],
        ),
        3,
    ),
    ids=lambda value: value if isinstance(value, str) else value["to"],
)
def test_files_of_fsdp_give_the_bytes_of_a_local_conversion(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 1001)
    run = HERE / "fsdp" / name / "verl"
    for ray in (None, True):
        ckpttool.convert(run, tmp_path / str(ray), **options, ray=ray)
    assert files_in(tmp_path / "True") == files_in(tmp_path / "None")


@pytest.mark.usefixtures("cluster")
def test_files_of_fsdp_give_the_bytes_of_a_local_consolidation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tasks(monkeypatch, 1001)
    for ray in (None, True):
        run = HERE / "fsdp" / "torch2.9.1-hsdp-4" / "verl"
        ckpttool.consolidate(run, tmp_path / str(ray), to="safetensors", dtype="bf16", ray=ray)
    assert files_in(tmp_path / "True") == files_in(tmp_path / "None")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("here", "there"), [("disk", "bucket"), ("bucket", "disk"), ("bucket", "bucket")])
def test_buckets_give_the_same_bytes(
    here: str, there: str, weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _small_tasks(monkeypatch, 5 * MB)
    given: dict[str, Any] = {"to": "safetensors", "max_shard_size": "12MB"}
    ckpttool.consolidate(weights, tmp_path / "expected", **given)
    src: Any = weights
    if here == "bucket":
        bucket.upload(weights, "run")
        src = bucket.url("run")
    out: Any = tmp_path / "out" if there == "disk" else bucket.url("out")
    ckpttool.consolidate(src, out, **given, ray=True, storage_options=_through(proxy))
    if there == "bucket":
        bucket.download("out", tmp_path / "out")
        assert bucket.uploads() == []
        changes = [r for r in proxy.log if r.method != "GET" and r.operation != "delete_object"]
        assert changes[-1].key.endswith(".index.json"), "what makes it look whole comes last"
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


@pytest.mark.usefixtures("cluster")
def test_small_files_go_to_a_bucket(tmp_path: Path, bucket: server.Bucket, proxy: Proxy) -> None:
    src = source("zero2-dp2-bf16")
    ckpttool.convert(src, tmp_path / "here", to="universal")
    ckpttool.convert(src, bucket.url("out"), to="universal", ray=True, storage_options=_through(proxy))
    bucket.download("out", tmp_path / "there")
    assert files_in(tmp_path / "there") == files_in(tmp_path / "here")
    assert proxy.requests("put_object")[-1].key == "out/latest_universal"


@pytest.mark.usefixtures("cluster")
def test_weights_in_an_existing_directory_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "pytorch_model.bin").write_text("old")
    src = source("zero3-dp2-bf16")
    ckpttool.consolidate(src, tmp_path / "here", to="safetensors")
    ckpttool.consolidate(src, tmp_path / "out", to="safetensors", overwrite=True, ray=True)
    assert files_in(tmp_path / "out") == {**files_in(tmp_path / "here"), "notes.txt": b"mine"}


@pytest.mark.usefixtures("cluster")
def test_relative_paths_mean_what_they_mean_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(source("zero2-dp2-bf16"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    ckpttool.consolidate("run", "here", to="safetensors")
    ckpttool.consolidate("run", "there", to="safetensors", ray=True)
    assert files_in("there") == files_in("here")


# ------------------------------------------------------------------------------------------------- losses


def _children(node: Any = None) -> list[psutil.Process]:
    """Processes that are doing a task of ours now, on a node or on all."""
    found = []
    raylet = node.all_processes["raylet"][0].process.pid if node is not None else None
    for process in psutil.Process().children(recursive=True) if node is None else psutil.Process(raylet).children():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ckpttool_task"):
                found.append(process)
    return found


def _is_large(request: Request) -> bool:
    return request.range is not None and request.range[1] - request.range[0] > LARGE


@pytest.mark.parametrize("there", ["disk", "bucket"])
def test_a_killed_worker_s_task_is_done_again(
    there: str, cluster: Any, weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy
) -> None:
    bucket.upload(weights, "run")
    killed: list[int] = []

    def kill(_: Request) -> None:
        process = _children()[0]
        process.send_signal(signal.SIGKILL)
        killed.append(process.pid)

    if there == "bucket":
        proxy.add(Before(kill), "upload_part", nth=2)
    else:
        proxy.add(Before(kill), "get_object", when=_is_large, nth=2)
    ckpttool.consolidate(weights, tmp_path / "expected", to="safetensors")
    out: Any = tmp_path / "out" if there == "disk" else bucket.url("out")
    given = ["--to", "safetensors", "--storage-option", f"endpoint_url={proxy.url}", "--ray-address", cluster.address]
    done = ckpttool_process("consolidate", bucket.url("run"), out, *given)
    assert (done.code, _beside_progress(done.stderr)) == (0, [])
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told] == [f"{out}:", "file", "model.safetensors", "note:"]
    assert told[-1].startswith("note: 1 files have bytes without a checksum")
    assert len(killed) == 1
    if there == "bucket":
        bucket.download("out", tmp_path / "out")
        assert bucket.uploads() == []
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


def test_a_node_may_join_while_it_runs_and_be_lost_with_its_tasks(
    cluster: Any, weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 4 * MB)
    monkeypatch.setattr(ray_tasks, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(ray_tasks, "TASKS_PER_CPU", 1)  # none waits for a node that is not there yet
    bucket.upload(weights, "run")
    joined, lost = threading.Event(), threading.Event()
    nodes: list[Any] = []
    found: list[psutil.Process] = []

    def join(_: int, __: int) -> None:
        if not nodes:
            nodes.append(cluster.add_node(**SMALL_NODE))
            joined.set()

    def lose(_: Request) -> None:
        """Hold all that comes until the new node does a task beside the others, and take the node away amid that."""
        assert joined.wait(60)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if len(_children()) >= 3 and _children(nodes[0]):
                found.extend(_children(nodes[0]))
                break
            time.sleep(0.05)
        cluster.remove_node(nodes[0], allow_graceful=False)
        lost.set()

    proxy.add(Before(lose), "get_object", when=_is_large, nth=2)
    proxy.add(Before(lambda _: lost.wait(60)), "get_object", when=_is_large, nth=3, times=None)
    ckpttool.consolidate(weights, tmp_path / "expected", to="safetensors")
    ckpttool.consolidate(
        bucket.url("run"), tmp_path / "out", to="safetensors", ray=True, jobs=1, progress=join,
        storage_options=_through(proxy),
    )  # fmt: skip
    assert lost.is_set()
    assert found, "the new node was given a task, and nobody was idle meanwhile"
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


# ------------------------------------------------------------------------------------------------- errors


def _nothing_is_left(out: Path) -> bool:
    return not out.exists() and not staging_of(out)


def _both(src: Any, out: Path, **given: Any) -> tuple[str, str]:
    """What a local run and one on the cluster fail with."""
    said = []
    for ray in (None, True):
        with pytest.raises(CkptError) as error:
            ckpttool.consolidate(src, out, to="safetensors", ray=ray, **given)
        said.append(str(error.value))
        assert _nothing_is_left(out)
    return said[0], said[1]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "break_",
    [
        lambda root: damage.truncate(damage.optimizer_file(root), 5000),
        lambda root: damage.optimizer_file(root).unlink(),
        lambda root: damage.resave(root, step=4),
        lambda root: damage.flip_in_master(damage.optimizer_file(root, 1)),
    ],
    ids=["torn", "missing", "mixed", "flipped bit"],
)
def test_damaged_sources_give_the_error_of_a_local_run(
    break_: Callable[[Path], object], checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    break_(root)
    here, there = _both(root, tmp_path / "out")
    assert here == there


@pytest.mark.usefixtures("cluster")
def test_a_task_refused_by_the_store_is_one_line(
    weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy
) -> None:
    bucket.upload(weights, "run")
    proxy.add(faults.ACCESS_DENIED, "get_object", when=_is_large, times=None)
    here, there = _both(bucket.url("run"), tmp_path / "out", storage_options=_through(proxy))
    assert here == there
    assert "access denied" in there


@pytest.mark.usefixtures("cluster")
def test_a_failure_leaves_nothing_in_a_bucket(weights: Path, bucket: server.Bucket, proxy: Proxy) -> None:
    proxy.add(faults.ACCESS_DENIED, "upload_part", nth=3, times=None)
    with pytest.raises(StorageError, match="access denied"):
        ckpttool.consolidate(
            weights, bucket.url("out"), to="safetensors", ray=True, storage_options=_through(proxy)
        )  # fmt: skip
    assert (bucket.keys(), bucket.uploads()) == ([], [])


@pytest.mark.usefixtures("cluster")
def test_a_source_that_changes_meanwhile_is_an_error(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 1000)
    root = checkpoint_copy("zero3-dp2-bf16")

    def touch(_: int, __: int) -> None:
        for path in damage.files_of(root, "optim"):
            os.utime(path)

    with pytest.raises(StorageError, match="changed since its layout was read"):
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", ray=True, progress=touch)
    assert _nothing_is_left(tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_a_source_that_changed_after_it_was_read_is_an_error(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")  # one task: when progress is told, all is read

    def touch(_: int, __: int) -> None:
        os.utime(damage.optimizer_file(root))

    with pytest.raises(StorageError, match="changed since its layout was read"):
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", ray=True, progress=touch)
    assert _nothing_is_left(tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_a_directory_that_is_not_shared_is_an_error_that_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of one machine see the same files: that the second node sees others is put on by removing one."""
    _small_tasks(monkeypatch, 1000)
    monkeypatch.setattr(ray_tasks, "_own_node", lambda: "another")

    def hide(_: int, __: int) -> None:
        (staging,) = staging_of(tmp_path / "out")
        shutil.rmtree(staging / SHARED, ignore_errors=True)

    with pytest.raises(StorageError, match="is not the same directory on node") as error:
        ckpttool.consolidate(source("zero3-dp2-bf16"), tmp_path / "out", to="safetensors", ray=True, progress=hide)
    assert f"on node {socket.gethostname()}; all nodes must see the same files" in str(error.value)
    assert _nothing_is_left(tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_a_source_that_a_node_does_not_see_is_an_error_that_names_both(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 1000)
    monkeypatch.setattr(ray_tasks, "_own_node", lambda: "another")
    root = checkpoint_copy("zero3-dp2-bf16")

    def hide(_: int, __: int) -> None:
        for path in damage.files_of(root, "optim"):
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_suffix(".hidden"))

    with pytest.raises(StorageError) as error:
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", ray=True, progress=hide)
    assert f"_optim_states.pt: does not exist, as node {socket.gethostname()} sees it; all nodes" in str(error.value)


@pytest.mark.usefixtures("cluster")
def test_a_conversion_that_failed_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tasks(monkeypatch, 2000)
    src, given = source("zero3-dp4-bf16"), {"to": "zero", "world_size": 4, "resume": True}

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ckpttool.convert(src, tmp_path / "out", **given, ray=True, progress=stop)  # type: ignore[arg-type]
    assert staging_of(tmp_path / "out")
    first: list[int] = []
    ckpttool.convert(src, tmp_path / "out", **given, ray=True, progress=lambda n, _: first.append(n))  # type: ignore[arg-type]
    ckpttool.convert(src, tmp_path / "here", to="zero", world_size=4)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "here")


@pytest.mark.usefixtures("cluster")
def test_an_upload_that_failed_is_gone_on_with(
    weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tasks(monkeypatch, 5 * MB)
    given: dict[str, Any] = {"to": "dcp", "resume": True, "storage_options": _through(proxy)}
    ckpttool.convert(weights, tmp_path / "here", to="dcp")
    proxy.add(faults.ACCESS_DENIED, "upload_part", nth=4, times=None)
    with pytest.raises(StorageError, match="access denied"):
        ckpttool.convert(weights, bucket.url("out"), ray=True, **given)
    first = [r for r in proxy.requests("upload_part") if r.status == 200]
    proxy.clear()
    ckpttool.convert(weights, bucket.url("out"), ray=True, **given)
    second = proxy.requests("upload_part")
    assert first
    assert not {r.target for r in first} & {r.target for r in second}
    bucket.download("out", tmp_path / "there")
    assert files_in(tmp_path / "there") == files_in(tmp_path / "here")


@pytest.mark.usefixtures("cluster")
def test_after_an_error_no_task_is_running(
    weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write into what another run has made there meanwhile."""
    _small_tasks(monkeypatch, 4 * MB)
    bucket.upload(weights, "run")
    proxy.add(faults.Latency(3), "get_object", when=_is_large, nth=2, times=None)
    seen: list[int] = []

    def stop(_: int, __: int) -> None:
        seen.append(len(_children()))
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ckpttool.consolidate(
            bucket.url("run"), tmp_path / "out", to="safetensors", ray=True, jobs=1, progress=stop,
            storage_options=_through(proxy),
        )  # fmt: skip
    assert _children() == []
    assert seen[0] > 0
    assert _nothing_is_left(tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_an_output_that_one_process_must_write_is_refused(tmp_path: Path) -> None:
    done = command("consolidate", source("zero3-dp2-bf16"), "memory://out", "--to", "safetensors", "--ray")
    assert "only one process can write" in done.error


# ------------------------------------------------------------------------------------------------- joining


def test_the_command_joins_a_cluster_and_leaves_it_running(cluster: Any, tmp_path: Path) -> None:
    src = source("zero2-dp2-bf16")
    ckpttool.consolidate(src, tmp_path / "here", to="safetensors")
    done = ckpttool_process(
        "consolidate", src, tmp_path / "there", "--to", "safetensors", "--ray-address", cluster.address
    )
    assert (done.code, _beside_progress(done.stderr)) == (0, [])
    assert done.stdout.startswith(f"{tmp_path / 'there'}: wrote")
    assert files_in(tmp_path / "there") == files_in(tmp_path / "here")
    ckpttool.consolidate(src, tmp_path / "again", to="safetensors", ray=cluster.address)
    assert files_in(tmp_path / "again") == files_in(tmp_path / "here")


def test_a_cluster_that_is_started_ends_with_the_command(tmp_path: Path) -> None:
    arguments = ["convert", source("zero2-dp2-bf16"), str(tmp_path / "out"), "--to", "universal", "--ray-address=local"]
    with subprocess.Popen(
        [sys.executable, "-m", "ckpttool", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT},
    ) as run:  # fmt: skip
        started: set[psutil.Process] = set()
        while run.poll() is None:
            with contextlib.suppress(psutil.Error):
                started |= set(psutil.Process(run.pid).children(recursive=True))
            time.sleep(0.05)
        out, err = run.communicate()
    assert (run.returncode, _beside_progress(err)) == (0, [])
    assert [line.split(":")[0] for line in out.splitlines()] == [str(tmp_path / "out"), *["note"] * out.count("note: ")]
    assert started, "Ray's processes were seen"
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


@pytest.mark.parametrize("interrupt", sampling.some([signal.SIGINT, signal.SIGTERM], 1))
def test_an_interrupted_run_leaves_nothing(
    interrupt: signal.Signals, cluster: Any, weights: Path, tmp_path: Path, bucket: server.Bucket, proxy: Proxy
) -> None:
    bucket.upload(weights, "run")
    asked = threading.Event()

    def hold(_: Request) -> None:
        asked.set()
        time.sleep(2)

    proxy.add(Before(hold), "get_object", when=_is_large, times=None)
    arguments = ["consolidate", bucket.url("run"), str(tmp_path / "out"), "--to", "safetensors"]
    arguments += ["--ray-address", cluster.address, "--storage-option", f"endpoint_url={proxy.url}"]
    with subprocess.Popen([sys.executable, "-m", "ckpttool", *arguments], stderr=subprocess.PIPE, text=True) as run:
        assert asked.wait(60)
        assert staging_of(tmp_path / "out")
        run.send_signal(interrupt)
        _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "\nError: interrupted; nothing was left half-written\n")
    assert _nothing_is_left(tmp_path / "out")


def test_an_address_at_which_nobody_answers_is_one_line_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    began = time.monotonic()
    for given in (address, f"ray://{address}"):
        done = ckpttool_process(
            "consolidate", source("zero3-dp2-bf16"), tmp_path / "out", "--to", "safetensors", "--ray-address", given
        )
        assert done.error.startswith(f"Error: {given}: no Ray cluster answers there; ")
    assert time.monotonic() - began < 30
    assert _nothing_is_left(tmp_path / "out")


def test_an_address_in_the_environment_is_probed_as_well(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    done = ckpttool_process(
        "convert", source("zero3-dp2-bf16"), tmp_path / "out", "--to", "universal", "--ray",
        env={**os.environ, "RAY_ADDRESS": address},
    )  # fmt: skip
    assert done.error.startswith(f"Error: {address}: no Ray cluster answers there; ")


def test_an_invalid_address_is_reported(tmp_path: Path) -> None:
    source_and_out = (source("zero3-dp2-bf16"), tmp_path / "out")
    done = command("convert", *source_and_out, "--to", "universal", "--ray-address", "x")
    assert done.error == "Error: --ray: is 'x', not the address of a Ray cluster; write HOST:PORT, or auto"


@pytest.mark.usefixtures("cluster")
def test_another_cluster_than_the_one_that_was_joined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not the Ray cluster that this process already joined"):
        ckpttool.consolidate(source("zero3-dp2-bf16"), tmp_path / "out", to="safetensors", ray="127.0.0.1:1")


def test_without_ray_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = command("consolidate", source("zero3-dp2-bf16"), tmp_path / "out", "--to", "safetensors", "--ray")
    assert done.error == "Error: ray: is not installed; pip install 'ckpttool[ray]'"
    assert _nothing_is_left(tmp_path / "out")


def test_a_dry_run_starts_no_cluster(tmp_path: Path) -> None:
    given = ("consolidate", source("zero3-dp2-bf16"), tmp_path / "out", "--to", "safetensors", "--dry-run")
    here, there = command(*given), command(*given, "--ray-address=127.0.0.1:1")
    assert there.code == 0
    assert there.stdout.partition("needs: ")[0] == here.stdout.partition("needs: ")[0]
