"""Run directories of Ray Train, read without Ray: commits, the snapshot's list, and other storages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import left_by_workers
from ckpttool.catalog.runs import last_commit, run_candidates, run_commits
from ckpttool.catalog.snapshot import SNAPSHOT, directory_name, latest_of_ray, listed_by_ray
from ckpttool.checksums import of_bytes
from ckpttool.commit.manifest import CHECKSUM, Manifest, checksum
from ckpttool.errors import LayoutError, PlanError
from ckpttool.formats.layouts import is_of_trainer
from ckpttool.storage import LOCAL, MANIFEST, MARK
from ckpttool.storage.safe_files import temporary_name
from tests.cli.command import ckpttool as command
from tests.forked import on_ranks
from tests.truth import HERE, source

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.server import Bucket

NAME = "zero2-dp2-bf16"
OF_RAY = "checkpoint_2026-11-21_16-18-02.826416"


def _save(run: Path, name: str, tag: str = "global_step3") -> Path:
    shutil.copytree(source(NAME), run / name)
    (run / name / "global_step3").rename(run / name / tag)
    (run / name / "latest").write_text(tag)
    return run / name / tag


def _commit(run: Path, step: int, token: str, created: float, number: int = 0) -> str:
    name = directory_name(step, number, token)
    directory = _save(run, name, f"global_step{step}")
    manifest = Manifest(
        tag=f"global_step{step}", step=step, created=created, attempt=token, world_size=2, stage=2, number=number,
        metrics={"loss": 1.0 / (step or 1)}, files={p.name: of_bytes(p.read_bytes()) for p in directory.iterdir()},
    )  # fmt: skip
    (directory / MANIFEST).write_bytes(manifest.to_json())
    os.utime(directory / MANIFEST, (created, created))
    return name


def _list(run: Path, *names: str) -> None:
    results = [{"version": 0, "checkpoint_dir_name": name, "metrics": {}} for name in names]
    latest = results[-1] if results else None
    snapshot = {"ray_version": "2.60.0", "checkpoint_results": results[:-1], "latest_checkpoint_result": latest}
    (run / SNAPSHOT).write_text(json.dumps(snapshot))


def test_the_newest_commit_comes_first_and_of_one_step_the_later(tmp_path: Path) -> None:
    names = [_commit(tmp_path, 9, "bb", 3.0), _commit(tmp_path, 10, "cc", 1.0), _commit(tmp_path, 10, "aa", 2.0)]
    torn = tmp_path / directory_name(11, 1, "dd") / "global_step11"
    torn.mkdir(parents=True)
    (torn / MARK).write_text("{}")
    _save(tmp_path, OF_RAY)
    (tmp_path / ".validate_storage_marker").touch()
    assert [os.path.basename(c.root) for c in run_commits(LOCAL, str(tmp_path))] == [names[2], names[1], names[0]]
    assert run_commits(LOCAL, str(tmp_path / "nowhere")) == []


def test_commits_of_one_step_are_in_the_order_of_commits_whatever_the_clock_says(tmp_path: Path) -> None:
    names = [_commit(tmp_path, 3, token, 1.0, number) for token, number in (("aa", 1), ("cc", 2), ("bb", 3))]
    for name, seconds in zip(names, (3e6, 2e6, 1e6), strict=True):
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (seconds, seconds))
    assert [os.path.basename(c.root) for c in run_commits(LOCAL, str(tmp_path))] == names[::-1]
    assert last_commit(LOCAL, str(tmp_path)) == ("bb", 3)
    assert last_commit(LOCAL, str(tmp_path / "nowhere")) == ("", 0)


def test_checkpoints_removed_by_ray_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, stays = _commit(tmp_path, 1, "aa", 1.0), _commit(tmp_path, 2, "bb", 2.0)
    listing = LOCAL.listing

    def removing(path: str) -> Any:
        found = listing(path)
        if path == str(tmp_path):
            shutil.rmtree(tmp_path / gone)
        return found

    monkeypatch.setattr(LOCAL, "listing", removing)
    assert [os.path.basename(c.root) for c in run_commits(LOCAL, str(tmp_path))] == [stays]


@pytest.mark.parametrize("name", [OF_RAY, "ckpttool_00000012_0a1b2c3d", "ckpttool_00000012_000003_0a1b2c3d"])
def test_names_of_checkpoints_are_known(name: str) -> None:
    assert is_of_trainer(name)
    assert not is_of_trainer(f"{name}.removed")
    assert not is_of_trainer(f".{name}")


def test_a_run_is_listed_with_what_it_was_reported_with(tmp_path: Path) -> None:
    own = _commit(tmp_path, 5, "aa", 1.0)
    _save(tmp_path, OF_RAY)
    _save(tmp_path, "epoch-1")  # a name that a user chose, and Ray lists
    _save(tmp_path, "elsewhere")
    _list(tmp_path, OF_RAY, "epoch-1/global_step3")
    entries = {e.name: e for e in ckpttool.ls(tmp_path).entries}
    assert {n: (e.whole, e.reported) for n, e in entries.items()} == {
        own: (True, False), OF_RAY: (True, True), "epoch-1": (True, True), "elsewhere": (False, False),
    }  # fmt: skip
    assert entries[own].metrics["loss"] == 0.2


def test_a_file_in_the_manifest_but_not_on_disk_is_reported(tmp_path: Path) -> None:
    name = _commit(tmp_path, 5, "aa", 1.0)
    manifest = tmp_path / name / "global_step5" / MANIFEST
    told = json.loads(manifest.read_text())
    told["files"] = {"gone.pt": {"nbytes": 0, "chunk_bytes": 1 << 20, "crc32": ""}}
    manifest.write_text(json.dumps({**told, CHECKSUM: checksum(told)}))
    (entry,) = ckpttool.ls(tmp_path).entries
    assert not entry.whole
    assert "gone.pt: is missing" in (entry.problem or "")


def test_prune_never_removes_what_rays_snapshot_lists(tmp_path: Path) -> None:
    names = [_commit(tmp_path, step, "aa", float(step)) for step in (1, 2, 3, 4)]
    _list(tmp_path, names[0])
    decisions = {d.entry.name: d for d in ckpttool.prune(tmp_path, keep_last=1)}
    assert [decisions[n].keep for n in names] == [True, False, False, True]
    assert decisions[names[0]].reason == "Ray Train's snapshot lists it"
    assert [(tmp_path / n).exists() for n in names] == [True, False, False, True]


def test_ray_resumes_from_the_last_checkpoint_of_its_snapshot(tmp_path: Path) -> None:
    assert latest_of_ray(LOCAL, str(tmp_path)) == ""
    _list(tmp_path, OF_RAY, "deep/er")
    assert latest_of_ray(LOCAL, str(tmp_path)) == "deep/er"
    assert listed_by_ray(LOCAL, str(tmp_path)) == {OF_RAY, "deep"}
    _list(tmp_path, "../elsewhere")
    with pytest.raises(LayoutError, match="not a snapshot"):
        latest_of_ray(LOCAL, str(tmp_path))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"checkpoint_results": [', '{"checkpoint_results": 1}'])
def test_prune_refuses_where_the_snapshot_cannot_be_read(tmp_path: Path, text: str) -> None:
    names = [_commit(tmp_path, step, "aa", float(step)) for step in (1, 2)]
    (tmp_path / SNAPSHOT).write_text(text)
    with pytest.raises(LayoutError, match="not a snapshot"):
        listed_by_ray(LOCAL, str(tmp_path))
    assert len(ckpttool.ls(tmp_path).entries) == 2
    with pytest.raises(LayoutError, match=SNAPSHOT):
        ckpttool.prune(tmp_path, keep_last=1)
    assert all((tmp_path / name).exists() for name in names)


@pytest.mark.parametrize(
    ("inner", "fixture"),
    [("checkpoint", "zero3-dp2-bf16-trainer/checkpoint-3"), ("checkpoint.ckpt", "zero3-dp2-bf16-lightning")],
)
def test_every_command_reads_the_checkpoints_of_rays_callbacks(tmp_path: Path, inner: str, fixture: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(HERE / "checkpoints" / fixture, run / OF_RAY / inner)
    _list(run, OF_RAY)
    assert ckpttool.inspect(run / OF_RAY).root == str(run / OF_RAY / inner)
    assert not ckpttool.verify(run / OF_RAY, deep=True).findings
    ckpttool.consolidate(run / OF_RAY, tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "config.json").exists() == (HERE / "checkpoints" / fixture / "config.json").exists()
    (entry,) = ckpttool.ls(run).entries
    assert (entry.name, entry.whole, entry.reported) == (OF_RAY, True, True)


# ------------------------------------------------------------------------------------------------- documented saves


@pytest.mark.parametrize("inner", ["epoch", "x/y"])
def test_a_checkpoint_in_a_folder_of_a_checkpoint_is_found(inner: str, tmp_path: Path) -> None:
    _save(tmp_path, f"{OF_RAY}/{inner}")
    _list(tmp_path, OF_RAY)
    directory = str(tmp_path / OF_RAY / inner / "global_step3")
    assert ckpttool.inspect(tmp_path / OF_RAY).location == directory
    assert not ckpttool.verify(tmp_path / OF_RAY, deep=True).findings
    (entry,) = ckpttool.ls(tmp_path).entries
    assert (entry.name, entry.whole, entry.step, entry.reported) == (OF_RAY, True, 3, True)
    (decision,) = ckpttool.prune(tmp_path, keep_last=1)
    assert decision.keep
    assert run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {OF_RAY}) == [directory]


@pytest.mark.parametrize("names", [("a", "b"), ("critic", "policy"), ("actor", "critic")])
def test_the_folders_of_two_engines_are_one_checkpoint(names: tuple[str, str], tmp_path: Path) -> None:
    for inner in names:
        _save(tmp_path, f"{OF_RAY}/{inner}")
    (entry,) = ckpttool.ls(tmp_path).entries
    assert (entry.name, entry.whole) == (OF_RAY, True)
    with pytest.raises(LayoutError, match=f"pass one of its checkpoints: {names[0]}, {names[1]}"):
        ckpttool.inspect(tmp_path / OF_RAY)
    assert run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {OF_RAY}) == [str(tmp_path / OF_RAY)]


def test_the_checkpoints_of_a_run_are_not_those_of_the_directory_above(tmp_path: Path) -> None:
    _save(tmp_path / "run", "x")
    _save(tmp_path, OF_RAY)
    assert [e.name for e in ckpttool.ls(tmp_path).entries] == [OF_RAY]


def test_a_checkpoint_that_ray_names_and_nobody_reads_is_an_error(tmp_path: Path) -> None:
    own = _commit(tmp_path, 5, "aa", 1.0, 1)
    (tmp_path / OF_RAY).mkdir()
    (tmp_path / OF_RAY / "model.pt").write_text("weights")
    _list(tmp_path, own, OF_RAY)
    with pytest.raises(LayoutError, match=f"{OF_RAY}: is the checkpoint that Ray resumes from, and contains none"):
        run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {own, OF_RAY})
    newer = _commit(tmp_path, 6, "bb", 4e9, 2)  # Ray has not heard of it
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {own, OF_RAY})
    assert [os.path.basename(os.path.dirname(path)) for path in found] == [newer, own]
    entries = {e.name: e for e in ckpttool.ls(tmp_path).entries}
    assert entries[OF_RAY].problem == "contains no checkpoint"


@pytest.mark.parametrize("late", [True, False])
def test_a_commit_that_ray_names_and_that_is_not_there_is_not_passed_over_in_silence(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = (_commit(tmp_path, step, f"{step:08x}", float(step), step) for step in (3, 6))
    (tmp_path / newer).rename(tmp_path.with_name(f"{tmp_path.name}-hidden"))
    monkeypatch.setattr(
        "ckpttool.catalog.runs.time.sleep",
        lambda _: tmp_path.with_name(f"{tmp_path.name}-hidden").rename(tmp_path / newer) if late else None,
    )
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / newer), {older, newer})
    assert [os.path.basename(os.path.dirname(path)) for path in found] == ([newer, older] if late else [older])
    said = f"Ray resumes from {newer}, which holds no finished checkpoint; resuming from {older}"
    assert (said in caplog.text) == (not late)


def test_older_checkpoints_of_the_documented_way_are_tried_too(tmp_path: Path) -> None:
    names = [f"checkpoint_2026-11-21_16-18-0{n}.826416" for n in range(3)]
    saved = [str(_save(tmp_path, name, f"global_step{2 * n}")) for n, name in enumerate(names)]
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / names[2]), {*names, "checkpoint_removed"})
    assert found == saved[::-1]
    _commit(tmp_path, 1, "aa", 4e9, 1)
    commit = str(tmp_path / _commit(tmp_path, 3, "bb", 5e9, 2) / "global_step3")
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / names[2]), {p.name for p in tmp_path.iterdir()})
    assert found[:2] == [saved[2], commit], "of step 4, then of step 3"
    assert set(saved) < set(found)


@pytest.mark.parametrize("step", [2, 3, 8])
def test_what_ray_got_last_is_newer_than_all_that_it_knows(step: int, tmp_path: Path) -> None:
    names = [_commit(tmp_path, step, "aa", 1.0, 1), _commit(tmp_path, step, "bb", 4e9, 2)]
    other = _save(tmp_path, OF_RAY)  # at step 3
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {*names, OF_RAY})
    assert found[0] == str(other)
    found = run_candidates(LOCAL, str(tmp_path), str(tmp_path / OF_RAY), {names[0], OF_RAY})
    assert found.index(str(other)) == (0 if step < 3 else 1), "of a later step, or committed later"


def test_saves_of_an_engine_that_counts_no_steps_are_in_the_order_of_the_commits(tmp_path: Path) -> None:
    names = [_commit(tmp_path, 0, token, 1.0, number) for number, token in enumerate(("cc", "aa", "dd", "bb"), 1)]
    assert sorted(names) == names
    assert [e.name for e in ckpttool.ls(tmp_path).entries] == names
    states = [line.split()[-1] for line in command("ls", tmp_path).stdout.splitlines()[1:]]
    assert states == ["whole", "whole", "whole", "newest"]
    ckpttool.prune(tmp_path, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == names[2:]


@pytest.mark.parametrize("step", [0, 5])
def test_prune_without_the_snapshot_keeps_the_newest_of_both_kinds(step: int, tmp_path: Path) -> None:
    """Saves of Ray's documented way and commits, in turn; the documented ones are at step 3."""
    steps = (step, 6) if step else (3, 3)
    own = [_commit(tmp_path, steps[0], "aa", 2e9, 1), _commit(tmp_path, steps[1], "bb", 4e9, 2)]
    documented = [OF_RAY.replace("11-21", f"11-2{n}") for n in (1, 2, 3)]
    for name, written in zip(documented, (1e9, 3e9, 5e9), strict=True):
        _save(tmp_path, name)
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (written, written))
    expected = [own[1], own[0]] if step else [documented[2], own[1], documented[1], own[0], documented[0]]
    ranked = sorted(ckpttool.ls(tmp_path).entries, key=lambda e: -e.rank)
    assert [e.name for e in ranked][: len(expected)] == expected
    shutil.rmtree(tmp_path / own[1])
    ckpttool.prune(tmp_path, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == [own[0] if step else documented[2]]


SAVED = {"documented": (4, 8), "ours": (6, 10)}
"""Steps of the saves of a run that changed its way twice, in the order of the steps."""


@on_ranks(1)
def _save_in_both_ways(run: str) -> list[str]:
    import torch

    from ckpttool import CheckpointManager
    from ckpttool.integrations.live.choice import run_of
    from ckpttool.integrations.live.request import Save
    from tests.deepspeed.engines import build

    engine, manager = build(2, "bf16", "one", "adamw"), CheckpointManager(run)
    names = []
    for step in range(1, 11):
        engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().mean())
        engine.step()
        if step in SAVED["documented"]:
            names.append(OF_RAY.replace("16-18", f"16-{step:02d}"))
            engine.save_checkpoint(f"{run}/{names[-1]}")
        if step in SAVED["ours"]:
            attempt, number = manager.committed or ("", 0)
            names.append(directory_name(step, number + 1, "ab12cd34"))
            manager.save_into(
                f"{run}/{names[-1]}", run_of(engine), Save(metrics={"step": step}, before=(attempt, number))
            )
    return names


@pytest.mark.deepspeed
def test_rules_count_saves_of_both_ways_by_their_steps(tmp_path: Path) -> None:
    (names,) = _save_in_both_ways(str(tmp_path))
    entries = ckpttool.ls(tmp_path).entries
    assert [(entry.name, entry.step, entry.whole) for entry in entries] == [
        (name, step, True) for name, step in zip(names, (4, 6, 8, 10), strict=True)
    ]
    for entry in entries:
        assert not ckpttool.verify(entry.path, deep=True).findings
    for keep, kept in ((3, names[1:]), (2, names[2:])):
        ckpttool.prune(tmp_path, keep_last=keep)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    shutil.rmtree(tmp_path / names[3])
    ckpttool.prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == [names[2]], "also if the newest is the documented one"


def test_commands_open_the_newest_whole_checkpoint_of_a_run(tmp_path: Path) -> None:
    names = [_commit(tmp_path, step, "aa", 1.0, number) for number, step in enumerate((10, 20, 15), 1)]
    assert ckpttool.inspect(tmp_path).location == str(tmp_path / names[2] / "global_step15")
    next((tmp_path / names[2]).rglob("*optim_states.pt")).unlink()
    opened = ckpttool.inspect(tmp_path)
    assert opened.location == str(tmp_path / names[1] / "global_step20")
    assert names[2] in opened.remarks[0]
    for name in names:
        (tmp_path / name / "latest").unlink()
        (tmp_path / name / f"global_step{int(name.split('_')[1])}" / MANIFEST).unlink()
    assert ckpttool.inspect(tmp_path).location == str(tmp_path / names[1] / "global_step20"), "by the numbers in names"


def test_commands_name_the_newest_checkpoints_of_a_run_saved_in_both_ways(tmp_path: Path) -> None:
    names = [_commit(tmp_path, step, "aa", 1.0, number) for number, step in enumerate((10, 20, 15), 1)]
    _save(tmp_path, OF_RAY)
    for call in (ckpttool.verify, ckpttool.inspect):
        with pytest.raises(LayoutError, match=f"{names[2]} or, saved without ckpttool, {tmp_path / OF_RAY}$"):
            call(tmp_path)


@pytest.mark.parametrize("name", [MARK, temporary_name(MARK)], ids=["whole", "begun"])
def test_a_leftover_with_a_marker_alone_is_seen_and_removed(name: str, tmp_path: Path) -> None:
    whole = _commit(tmp_path, 5, "aa", 1.0, 1)
    torn = tmp_path / directory_name(6, 2, "bb") / "global_step6"
    torn.mkdir(parents=True)
    (torn / name).write_text("{}" if name == MARK else "")
    entries = {e.name: e for e in ckpttool.ls(tmp_path).entries}
    assert entries[torn.parent.name].torn == "uncommitted"
    assert all(d.keep for d in ckpttool.prune(tmp_path, torn=True)), "younger than an hour"
    ckpttool.prune(tmp_path, torn=True, grace=0)
    assert [p.name for p in tmp_path.iterdir()] == [whole]


# ------------------------------------------------------------------------------------------------- storages


def test_the_storages_of_a_run_are_opened_as_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    s3fs = pytest.importorskip("s3fs")
    from fsspec.implementations.local import LocalFileSystem

    from ckpttool.integrations.ray_run import storage_of, url_of
    from ckpttool.storage import LOCAL

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for local in (fs.LocalFileSystem(), fs.PyFileSystem(fs.FSSpecHandler(LocalFileSystem()))):
        assert storage_of(local) is LOCAL
        assert url_of(local, "/runs/a") == "/runs/a"

    native = fs.S3FileSystem(
        endpoint_override="host:9000", scheme="http", access_key="k", secret_key="s",  # noqa: S106
        region="eu-west-1",
    )  # fmt: skip
    storage: Any = storage_of(native)
    opened = storage.fs
    assert (opened.endpoint_url, opened.key, opened.secret) == ("http://host:9000", "k", "s")
    assert opened.client_kwargs["region_name"] == "eu-west-1"
    assert url_of(native, "bucket/run") == "s3://bucket/run"

    given = s3fs.S3FileSystem(endpoint_url="http://host:9000", key="k", secret="s")  # noqa: S106
    retries = given.retries
    storage = storage_of(fs.PyFileSystem(fs.FSSpecHandler(given)))
    opened = storage.fs
    assert opened is not given, "Ray goes on using that one"
    assert given.retries == retries
    assert not opened.dircache.use_listings_cache, "other workers write, too"
    assert (opened.endpoint_url, opened.key) == ("http://host:9000", "k")


OF_PYARROW: dict[str, tuple[Any, dict[str, Any]]] = {
    "access_key": ("k", {"key": "k"}),
    "secret_key": ("s", {"secret": "s"}),
    "session_token": ("t", {"token": "t"}),
    "anonymous": (True, {"anon": True}),
    "region": ("eu-west-1", {"client_kwargs": {"region_name": "eu-west-1"}}),
    "request_timeout": (7, {"config_kwargs": {"read_timeout": 7.0}}),
    "connect_timeout": (3, {"config_kwargs": {"connect_timeout": 3.0}}),
    "scheme": ("http", {"use_ssl": False}),
    "endpoint_override": ("host:9000", {"endpoint_url": "https://host:9000"}),
    "background_writes": (False, {}),
    "default_metadata": (
        {"ACL": "bucket-owner-full-control", "Content-Type": "x/y"},
        {"s3_additional_kwargs": {"ACL": "bucket-owner-full-control", "ContentType": "x/y"}},
    ),
    "proxy_options": (
        {"scheme": "http", "host": "proxy", "port": 80, "username": "me", "password": "p@ss"},
        {"config_kwargs": {"proxies": dict.fromkeys(("http", "https"), "http://me:p%40ss@proxy:80")}},
    ),
    "allow_delayed_open": (True, {}),
    "allow_bucket_creation": (True, {}),
    "allow_bucket_deletion": (True, {}),
    "check_directory_existence_before_creation": (True, {}),
    "force_virtual_addressing": (True, {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}),
    "tls_ca_file_path": ("/ca.pem", {"client_kwargs": {"verify": "/ca.pem"}}),
    "role_arn": ("arn:aws:iam::1:role/r", {}),
    "session_name": ("me", {}),
    "external_id": ("x", {}),
    "load_frequency": (60, {}),
    "retry_strategy": (None, {}),
}
"""Every option of ``pyarrow.fs.S3FileSystem``: a value, and what s3fs gets for it."""


def test_every_option_of_pyarrow_is_followed_or_refused() -> None:
    fs = pytest.importorskip("pyarrow.fs")
    from ckpttool.integrations.ray_run import s3_options

    has = set(re.findall(r"[(, ](\w+)(?:: \w+ )?=", fs.S3FileSystem.__doc__.splitlines()[0])) - {"max_attempts"}
    assert has >= {"role_arn", "default_metadata"}
    assert has <= set(OF_PYARROW)
    plain = s3_options(fs.S3FileSystem(region="r").__reduce__()[1][0])
    for name, (value, expected) in OF_PYARROW.items():
        if name == "retry_strategy" or name not in has:
            continue
        given: dict[str, Any] = {"region": "r", name: value}
        given |= {"secret_key": "s"} if name == "access_key" else {"access_key": "k"} if name == "secret_key" else {}
        given |= {"access_key": "k", "secret_key": "s"} if name == "session_token" else {}
        given |= {"role_arn": "arn"} if name in {"session_name", "external_id"} else {}
        opened = fs.S3FileSystem(**given).__reduce__()[1][0]
        if "role_arn" in given:
            with pytest.raises(
                PlanError, match=r"the option role_arn of pyarrow\.fs\.S3FileSystem, which s3fs does not"
            ):
                s3_options(opened)
            continue
        found = s3_options(opened)
        for key, wanted in expected.items():
            assert (found[key] if not isinstance(wanted, dict) else {k: found[key][k] for k in wanted}) == wanted, name
        assert expected or found == plain, name
    with pytest.raises(PlanError, match="the option newest"):
        s3_options({"newest": True})


def test_a_buckets_grants_and_metadata_are_on_every_object(s3: Bucket) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    from ckpttool.integrations.ray_run import storage_of, url_of

    bucket, endpoint = s3, s3.endpoint
    native = fs.S3FileSystem(endpoint_override=endpoint, default_metadata={"Content-Type": "x/y", "ACL": "public-read"})
    path = f"{bucket.url('run').removeprefix('s3://')}/file"
    storage_of(native).put(url_of(native, path), b"data")
    key = path.partition("/")[2]
    found = bucket.boto.get_object(Bucket=path.partition("/")[0], Key=key)
    assert (found["Body"].read(), found["ContentType"]) == (b"data", "x/y")
    grants = bucket.boto.get_object_acl(Bucket=path.partition("/")[0], Key=key)["Grants"]
    assert any("AllUsers" in grant["Grantee"].get("URI", "") for grant in grants)


def test_a_storage_that_hides_where_it_begins_is_refused() -> None:
    fs = pytest.importorskip("pyarrow.fs")
    from ckpttool.integrations.ray_run import storage_of

    with pytest.raises(PlanError, match="SubTreeFileSystem"):
        storage_of(fs.SubTreeFileSystem("/runs", fs.LocalFileSystem()))


def test_directories_of_the_user_in_a_run_are_neither_searched_nor_removed(tmp_path: Path) -> None:
    def write(directory: str, step: int, *, of_ray: bool = False, committed: bool = True) -> None:
        tag = tmp_path / directory / f"global_step{step}"
        tag.mkdir(parents=True)
        attempt = f"{step:032x}"
        manifest = Manifest(tag.name, step, 1.0, attempt, 1, 0, number=step).to_json()
        (tag / (MANIFEST if committed else MARK)).write_bytes(manifest if committed else b"{}")
        if of_ray:
            (tag.parent / "ray_metrics.json").write_text("{}")

    write("ckpttool_00000005_000005_ab12cd34", 5, of_ray=True)
    write("epoch_1", 3, of_ray=True)
    write("critic", 9)  # the root of a CheckpointManager of the script
    write("own/checkpoints", 9)
    write("own/checkpoints", 11, committed=False)
    write("epoch_2", 4, of_ray=True, committed=False)
    write("ckpttool_00000007_000007_ab12cd34", 7, committed=False)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    found = [os.path.relpath(path, tmp_path) for path in run_candidates(LOCAL, str(tmp_path), "", ())]
    assert found == ["ckpttool_00000005_000005_ab12cd34/global_step5", "epoch_1/global_step3"]
    assert last_commit(LOCAL, str(tmp_path))[1] == 5
    left, whole = left_by_workers(LOCAL, str(tmp_path), {"epoch_1"}, grace=900.0)
    assert sorted(os.path.relpath(path, tmp_path) for path in left) == ["ckpttool_00000007_000007_ab12cd34", "epoch_2"]
    assert whole == {"ckpttool_00000005_000005_ab12cd34"}


def test_runs_on_a_disk_need_no_s3fs() -> None:
    pytest.importorskip("ray.train")
    script = "import sys; sys.modules['s3fs'] = None; import ckpttool.integrations.ray_train"
    subprocess.run([sys.executable, "-c", script], check=True)
