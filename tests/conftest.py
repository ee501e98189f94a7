"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import quick, sampling, wording
from tests.scheduling import FileScheduling
from tests.storage import server
from tests.truth import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path


settings.register_profile("default", deadline=None, max_examples=32, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")

LONG = ("tests/extensions/pages/", "tests/storage/", "tests/saving/")
"""Directories with files that take longest, of those without DeepSpeed: begun last, one of them would be waited for."""

# What is imported and collected lives as long as the process; ``pytest_collection_finish`` enables it again.
gc.disable()
# DeepSpeed asks this when it is imported; the tests that use it have no other accelerator to offer.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# A second thread costs more than it computes of tensors as small as those of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``make quick`` and ``make thorough``."""
    what = "leave out slow tests, all but one checkpoint of each kind, and files whose packages are not installed"
    parser.addoption("--quick", action="store_true", help=what)
    what = "try all checkpoints, all points of failure and all hostile files instead of some of them"
    parser.addoption("--thorough", action="store_true", help=what)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that import a package that is not installed."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("--quick") and is_test and quick.missing_package(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what ``make quick`` leaves out, and what only ``make thorough`` runs; group the rest for processes."""
    if not config.getoption("--thorough"):
        is_left_out = quick.is_left_out if config.getoption("--quick") else sampling.is_left_out
        left_out = {item for item in items if is_left_out(item)}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of the garbage collector, whose work is then less; so is a fork's."""
    gc.freeze()
    gc.set_threshold(*server.RARE_COLLECTIONS)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and one of them all tests of Ray: their clusters would disturb each other."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _rank(item: pytest.Item) -> int:
    """Order of a test among those of several processes: the longest groups first."""
    if item.get_closest_marker("ray"):
        return 0
    if item.get_closest_marker("deepspeed"):
        return 1
    return 2 if item.nodeid.startswith(LONG) else 3


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process; give DeepSpeed the GPU where the tests that need one are run alone."""
    sampling.begin(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells do in the background; tests send it to processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr", "") == "gpu":
        os.environ["DS_ACCELERATOR"] = "cuda"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Compare the messages that a test expects with the golden file."""
    with wording.of_test(item.nodeid, getattr(item, "funcargs", {}).get("tmp_path")):
        yield


@pytest.fixture
def checkpoint_copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a bundled checkpoint to where a test may damage it."""

    def copy(name: str) -> Path:
        target = tmp_path / "checkpoints" / name
        shutil.copytree(HERE / "checkpoints" / name, target)
        return target

    return copy


@pytest.fixture(autouse=True)
def no_client_of_another_test() -> Iterator[None]:
    """Close the S3 clients that fsspec has cached: their endpoint is that of the environment as it was."""
    yield
    if (module := sys.modules.get("ckpttool.storage.s3_client")) is not None:
        from fsspec.asyn import sync

        for fs in module.SingleAttemptFileSystem._cache.values():
            if fs._s3 is not None:  # s3fs itself would wait for a tenth of a second, and then leave open sockets
                sync(fs.loop, fs._s3creator.__aexit__, None, None, None)
        module.SingleAttemptFileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, Any]]:
    """URL of a running S3 server and boto3's client for it; started when the first test of this worker asks."""
    server.share_descriptions()
    with server.running() as endpoint:
        client = server.client(endpoint)
        yield endpoint, client
        client.close()


@pytest.fixture
def s3(s3_server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Bucket]:
    """A fresh bucket. Clients that the test, or a command that it runs, makes find what lets them in."""
    for name, value in server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    endpoint, client = s3_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
    client.create_bucket(Bucket=bucket.name)
    yield bucket
    server.forget_everything(endpoint)


@pytest.fixture
def crash_points(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Counts the points at which a test broke something, for the summary."""

    def tried(count: int) -> None:
        assert count > 0
        request.node.user_properties.append(("crash points", count))

    return tried


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many points were tried, in all processes."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call"]
    counts = [count for report in reports for name, count in report.user_properties if name == "crash points"]
    if counts:
        terminalreporter.write_line(f"crash points tried: {sum(counts):,}")
