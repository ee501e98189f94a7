"""Runs of Ray Train on a small cluster of this host, one after the other; what came of them is written down.

Most runs share a job of Ray: for each one of Ray's jobs, its driver and the process that forks its workers import Ray.

A run: {"name", "run", "arguments"}.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import runpy
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.storage import MARK
from tests import forked
from tests.faults.s3_proxy import Proxy
from tests.storage import server
from tests.under_ray import frameworks, loops, pages, worker_forks
from tests.under_ray.pages import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

END = "-- end of this command"
"""Printed between the commands of an example."""
ENVIRONMENT = {
    **server.ENVIRONMENT,
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # of workers that no test may need
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_usage_threshold": "0.98",  # it counts what other programs of the host use
    "RAY_worker_niceness": "0",  # by default workers wait for all other tests
}

SECONDS = 1200
"""How long one run may take before it counts as stuck: ten times what the longest takes on a quiet machine."""


IMPORTED = (
    "aiohttp", "jsonschema", "pandas", "pyarrow.dataset", "pyarrow.json", "pyarrow.parquet", "pydantic.v1", "requests",
    "rich.live", "transformers.trainer", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "ckpttool.integrations.huggingface", "ckpttool.saving.two_phase",
)  # fmt: skip
"""What Ray and the train functions import, beside DeepSpeed: before their workers are forked."""


APART = ("example", "fsdp2")
"""Runs that leave the cluster by themselves: each has a process of its own."""


def run(jobs: list[dict[str, Any]], directory: Path) -> None:
    """Do the runs that were asked for; of one that fails, its name and the error stay."""
    os.environ |= ENVIRONMENT
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # one process less to start for each group of workers
    sys.path.append(str(EXAMPLES))
    os.chdir(directory)
    for name in IMPORTED:
        importlib.import_module(name)
    with worker_forks.of_this_process(), _cluster(directory) as address:
        os.environ["RAY_ADDRESS"] = address
        for _, together in itertools.groupby(jobs, lambda job: job["name"] if job["run"] in APART else ""):
            forked.statuses_of(1, partial(_do, list(together), directory))


@contextlib.contextmanager
def _cluster(directory: Path) -> Iterator[str]:
    """Address of a cluster of one node, which a process of its own has started."""
    end, ending = os.pipe()

    def head() -> None:
        os.close(ending)
        forked.end_if_stuck(SECONDS)
        import ray

        worker_forks.use()
        ray.init(
            address="local", num_cpus=3, include_dashboard=False, object_store_memory=80 << 20, logging_level="error",
            log_to_driver=False,
        )  # fmt: skip
        loops.note(str(directory), "address.json", ray.get_runtime_context().gcs_address)
        os.read(end, 1)
        ray.shutdown()

    started = forked.fork_all(1, head)
    os.close(end)
    while (address := loops.read(str(directory), "address.json")) is None:
        assert os.waitpid(started[0], os.WNOHANG) == (0, 0), "the cluster did not start"
        time.sleep(0.02)
    try:
        yield address
    finally:
        os.close(ending)
        forked.wait_for(started)


def _do(jobs: list[dict[str, Any]], directory: Path) -> None:
    """Do runs in this process; what one of them prints goes to a file of its name."""
    runs: dict[str, Callable[..., None]] = {
        "deaths": _deaths, "resume": _resume, "bucket": _bucket, "ending": _ending, "example": _example,
        "frameworks": _frameworks, "several": _several, "pages": _pages,
        "fsdp2": _fsdp2, "torch": _torch,
    }  # fmt: skip
    import ray

    for job in jobs:
        forked.end_if_stuck(SECONDS)
        name = job["name"]
        try:
            with (directory / f"{name}.printed").open("w") as printed, contextlib.redirect_stdout(printed):
                if job["run"] not in APART and not ray.is_initialized():
                    _join()
                runs[job["run"]](directory, *job["arguments"])
        except BaseException:
            (directory / f"{name}.failed").write_text(traceback.format_exc())
            ray.shutdown()
    ray.shutdown()


def _join() -> None:
    """Join the cluster."""
    import ray

    ray.init(logging_level="error", log_to_driver=bool(os.environ.get("CKPTTOOL_TEST_LOG")))


def fit(loop: Any, config: dict[str, Any], workers: int, *, validation: Any = None, **run: Any) -> Any:
    """Run a train function on so many workers."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5})
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=scaling, run_config=RunConfig(**run),
        validation_config=validation,
    ).fit()  # fmt: skip


def _told(result: Any) -> dict[str, Any]:
    best = [(checkpoint.path, metrics) for checkpoint, metrics in result.best_checkpoints or []]
    return {"newest": result.checkpoint and result.checkpoint.path, "best": best, "metrics": result.metrics}


def _deaths(directory: Path, deaths: list[str]) -> None:
    from ray.train import FailureConfig

    config = {"facts": str(directory), "run": str(directory / "deaths"), "deaths": deaths}
    result = fit(
        loops.dying, config, 2, name="deaths", storage_path=str(directory),
        failure_config=FailureConfig(max_failures=len(deaths) + 2),
    )  # fmt: skip
    loops.note(str(directory), "deaths.json", _told(result))


def _resume(directory: Path) -> None:
    here: dict[str, Any] = {"name": "documented", "storage_path": str(directory)}
    first = fit(loops.documented, {"facts": str(directory)}, 2, **here)
    loops.note(str(directory), "first.json", _told(first))
    sources = {
        "checkpoint": first.checkpoint, "path": first.checkpoint.path,
        "tag": f"{first.checkpoint.path}/global_step2", "run": str(directory / "documented"),
    }  # fmt: skip
    for name in ("ckpttool_00000001_dead0000/global_step1", "ckpttool_00000001_dead1111"):
        (directory / "documented" / name).mkdir(parents=True)
    (directory / "documented" / "ckpttool_00000001_dead0000" / "global_step1" / MARK).write_text("{}")
    config = {"facts": str(directory), "sources": sources, "missing": str(directory / "nowhere")}
    second = fit(loops.resuming, config, 3, **here)
    loops.note(str(directory), "second.json", _told(second))


def _several(directory: Path, thorough: bool) -> None:
    from ray.train import FailureConfig, ValidationConfig

    validation = ValidationConfig(loops.validate, ray_remote_kwargs={"num_cpus": 0.1})
    config = {"facts": str(directory)}
    again = FailureConfig(max_failures=1)
    parts = [("documented", 2, "several"), ("resumed", 1, "several"), ("resumed again", 2, "several")]
    parts += [("plain", 1, "plain"), ("resumed plain", 1, "plain")] if thorough else []
    for part, workers, name in parts:
        result = fit(
            loops.several, {**config, "part": part}, workers, name=name, storage_path=str(directory),
            validation=validation, failure_config=again,
        )  # fmt: skip
        loops.note(str(directory), f"{part}.json", _told(result))


def _pages(directory: Path, script: str, data: str, bucket: bool, turns: list[int], deaths: list[int]) -> None:
    name = f"{script} {data} {'bucket' if bucket else 'disk'}"
    with contextlib.ExitStack() as stack:
        root, there, url = str(directory / name), {}, ""
        if bucket:
            there["endpoint_url"] = url = stack.enter_context(server.running())
            server.client(url).create_bucket(Bucket="models")
            root = "s3://models/runs"
        for turn in turns:
            way, workers = pages.TURNS[turn]
            watch = {
                "facts": str(directory), "script": script, "name": f"{name} {turn}", "way": way, "workers": workers,
                "dies": turn in deaths,
            }  # fmt: skip
            # The script of Ray's page has no epoch in its checkpoints: a run after it begins at the first one.
            ways = [pages.TURNS[one][0] for one in turns[: turns.index(turn)]]
            runs = len(ways) if script != "bert" else int([*ways[-1:], way] == ["ours", "ours"])
            arguments = ["--workers", str(workers), "--epochs", str(pages.SAVES * (runs + 1))]
            arguments += ["--data", data] if script == "bert" else []
            query = f"?scheme=http&endpoint_override={url[7:]}" if bucket else ""
            pages.run(watch, ["--storage", f"{root}{query}", *arguments])
        loops.note(str(directory), f"{name}.json", _sound(f"{root}/{script}", there))


def _fsdp2(directory: Path, source: str, runs: list[int]) -> None:
    """Continue the newest commit of a run in FSDP2, converted for Ray's template: for an epoch on so many workers."""
    import ray

    import ckpttool

    commits = [entry for entry in ckpttool.ls(directory / source).entries if "epoch" in entry.metrics]
    newest = max(commits, key=lambda entry: entry.rank)
    ckpttool.convert(newest.path, directory / "converted", to="dcp", layout="app")
    epoch = int(newest.metrics["epoch"])
    for number, workers in enumerate(runs, 2):
        arguments = ["--start", "converted", "--workers", str(workers), "--epochs", str(epoch + number)]
        sys.argv[:] = ["ray_fsdp2_documented.py", "--storage", str(directory), *arguments]
        runpy.run_path(str(EXAMPLES / "ray_fsdp2_documented.py"), run_name="__main__")
        print(END)  # noqa: T201
        ray.shutdown()
    loops.note(str(directory), "fsdp2.json", {"epoch": epoch, "newest": newest.path})


def _torch(directory: Path) -> None:
    """Train an FSDP2 run that dies, and continue it on another number of workers."""
    from ray.train import FailureConfig

    for part, workers, steps in (("first", 2, 4), ("second", 3, 7)):
        config = {"facts": str(directory), "part": part, "steps": steps}
        again = FailureConfig(max_failures=1)
        fit(loops.torch_run, config, workers, name="torch", storage_path=str(directory), failure_config=again)


def _sound(run: str, there: dict[str, Any]) -> list[dict[str, Any]]:
    """What commands make of all checkpoints of a run, in the order of the saves."""
    import ckpttool

    found: list[dict[str, Any]] = []
    for entry in sorted(ckpttool.ls(run, storage_options=there).entries, key=lambda entry: entry.rank):
        found.append({"whole": entry.whole, "reported": entry.reported, "torn": entry.torn, "problem": entry.problem})
        if entry.whole:
            report = ckpttool.verify(entry.path, deep=True, storage_options=there)
            found[-1] |= {"findings": [str(f) for f in report.findings], "notes": [*report.notes]}
    return found


def _ending(directory: Path, endings: list[str]) -> None:
    for how in endings:
        try:
            told = _told(fit(loops.ending, {"how": how}, 2, name=f"ending-{how}", storage_path=str(directory)))
        except Exception as error:
            told = {"error": str(error)}
        loops.note(str(directory), f"ending-{how}.json", told)


def _bucket(directory: Path) -> None:
    import pyarrow.fs
    import s3fs
    from ray.train import CheckpointConfig

    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    facts: dict[str, Any] = {"facts": str(directory), "losses": [0.5], "stage": 3}
    with server.running() as endpoint, Proxy(endpoint) as proxy:
        client = server.client(endpoint)
        client.create_bucket(Bucket="models")
        bucket = server.Bucket(endpoint, "models", client)
        first = fit(
            loops.in_background, {**facts, "name": "uri", "losses": [3.0, 1.0, 2.0, 2.5], "documented": True}, 2,
            name="uri", storage_path=f"s3://models/runs?scheme=http&endpoint_override={proxy.url[7:]}",
            checkpoint_config=keep,
        )  # fmt: skip
        puts = [r.key for o in ("put_object", "complete_multipart_upload") for r in proxy.requests(o, "runs/uri/")]
        sizes = bucket.sizes("runs/uri/")
        told = {**_told(first), "puts": puts, "sizes": sizes}
        loops.note(str(directory), "bucket.json", {**told, **_read(f"s3://{first.checkpoint.path}", proxy, directory)})
        native = pyarrow.fs.S3FileSystem(endpoint_override=proxy.url)
        second = fit(
            loops.in_background,
            {**facts, "name": "native", "stage": 2, "from": first.best_checkpoints[-1][0], "ends": "return"}, 1,
            name="native", storage_path="models/runs", storage_filesystem=native,
        )  # fmt: skip
        wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(s3fs.S3FileSystem(endpoint_url=proxy.url)))
        given = {**facts, "name": "wrapped", "stage": 1, "from": second.checkpoint, "ends": "fails"}
        try:
            fit(
                loops.in_background, given, 2,
                name="wrapped", storage_path="models/runs", storage_filesystem=wrapped,
            )  # fmt: skip
            error = ""
        except Exception as failed:
            error = str(failed)
        reported = _reported(bucket, "runs/wrapped/checkpoint_manager_snapshot.json")
        loops.note(str(directory), "others.json", {**_told(second), "error": error, "reported": reported})


def _reported(bucket: server.Bucket, key: str) -> list[float]:
    """The losses that Ray has recorded of a run, in the order of reports."""
    snapshot = json.loads(bucket.get(key))
    results = [*snapshot["checkpoint_results"], snapshot["latest_checkpoint_result"]]
    found = {result["checkpoint_dir_name"]: result["metrics"]["loss"] for result in results}
    return list(found.values())


def _example(_: Path, script: str, *commands: list[str]) -> None:
    """Run an example, once for each command line; it joins the cluster of RAY_ADDRESS by itself."""
    import ray

    for arguments in commands:
        sys.argv[:] = [script, *arguments]
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        print(END)  # noqa: T201
        ray.shutdown()


def _frameworks(directory: Path, names: list[str]) -> None:
    frameworks.main(str(directory), names)


def _read(url: str, proxy: Proxy, directory: Path) -> dict[str, Any]:
    """What commands make of a checkpoint, and of the run that it lies in."""
    import ckpttool

    there = {"endpoint_url": proxy.url}
    entries = ckpttool.ls(os.path.dirname(url), storage_options=there).entries
    ckpttool.consolidate(url, directory / "consolidated", to="safetensors", storage_options=there)
    return {
        "listed": [(e.name, e.whole, e.reported) for e in entries],
        "step": ckpttool.inspect(url, storage_options=there).step,
        "findings": [str(f) for f in ckpttool.verify(url, deep=True, storage_options=there).findings],
    }
