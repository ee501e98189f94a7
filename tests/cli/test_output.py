"""Outputs of ``consolidate``: refused destinations, permissions, leftovers."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

import ckpttool as api
from ckpttool.errors import StorageError
from ckpttool.execution import copy
from ckpttool.storage import MARK, open_storage
from ckpttool.storage.safe_files import MOVE
from ckpttool.storage.staging import staged
from tests import damage
from tests.cli.command import (
    EXTENSIONS_READING,
    ckpttool,
    ckpttool_process,
    ckpttool_without_privileges,
    leftover,
    remains,
)
from tests.faults.disks import watching
from tests.faults.rules import Before, Rule
from tests.truth import read_safetensors, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.storage.server import Bucket

CHECKPOINT = source("zero2-dp2-bf16")


def consolidate(out: object, *options: object) -> tuple[object, ...]:
    to = () if "--to" in options else ("--to", "safetensors")
    return ("consolidate", CHECKPOINT, out, *to, *options)


# ------------------------------------------------------------------------------------------------- what is there


def test_missing_directories_are_made(tmp_path: Path) -> None:
    assert ckpttool(*consolidate(tmp_path / "a/b/out/")).code == 0
    assert remains(tmp_path) == ["a", "a/b", "a/b/out", "a/b/out/model.safetensors"]


def test_empty_directory_is_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert ckpttool(*consolidate(out)).code == 0
    assert remains(tmp_path) == ["out", "out/model.safetensors"]


def test_link_to_an_empty_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    assert ckpttool(*consolidate(tmp_path / "out")).code == 0
    assert remains(tmp_path / "real") == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["out", "real"]


def test_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    error = ckpttool(*consolidate(out)).error
    assert error == f"Error: {out}: already exists and is not empty; choose another OUT or pass --overwrite"
    assert remains(tmp_path) == ["out", "out/notes.txt"]


def test_file_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    for options in [(), ("--overwrite",)]:
        error = ckpttool(*consolidate(out, *options)).error
        assert error == f"Error: {out}: already exists and is not a directory; choose another OUT"
    assert ckpttool(*consolidate(out / "below")).error == f"Error: {out}: is not a directory; choose another OUT"
    assert out.read_text() == "mine"


def test_dangling_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("gone")
    assert "already exists and is not a directory" in ckpttool(*consolidate(tmp_path / "out")).error
    assert remains(tmp_path) == ["out"]


def test_empty_name_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options in [(), ("--overwrite",)]:
        assert ckpttool(*consolidate("", *options)).error.startswith("Error: OUT: is an empty name")
    assert remains(tmp_path) == []


def test_url_is_no_directory_called_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = "Error: nowhere://bucket/out: nowhere:// is not a known storage; check the URL"
    assert ckpttool(*consolidate("nowhere://bucket/out")).error == error
    assert ckpttool("inspect", "nowhere://bucket/out").error == error
    assert remains(tmp_path) == []


def test_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    assert "file name too long; choose another path" in ckpttool(*consolidate(tmp_path / ("x" * 300))).error
    assert remains(tmp_path) == []


def test_foreign_files_next_to_the_output_are_not_removed(tmp_path: Path) -> None:
    """Of these names, one that a run could have made is refused, and others are in no run's way."""
    for kind in ("private", "directory", "plain files", "file", "link"):
        root = tmp_path / kind
        path = leftover(root / "out", 0o700 if kind == "private" else 0o755)
        (root / "out.partial").mkdir()
        (root / "else").mkdir()
        (root / "else/mine").touch()
        if kind in {"file", "link"}:
            path.rmdir()
            path.touch() if kind == "file" else path.symlink_to("else")
        else:
            (path / "work").mkdir() if kind == "directory" else (path / "thesis.txt").touch()
        before = remains(root)
        done = ckpttool(*consolidate(root / "out"))
        if kind == "private":
            assert done.error == f"Error: {path}: was not made by ckpttool; {MOVE}"
        else:
            assert done.code == 0
            shutil.rmtree(root / "out")
        assert remains(root) == before


def test_checkpoint_is_not_written_over(checkpoint_copy: Callable[[str], Path]) -> None:
    """Neither by its own name nor by the name of a directory that OUT was staged in."""
    root = checkpoint_copy("zero2-dp2-bf16")
    src = leftover(root / "x")
    for path in (root / "global_step3").iterdir():
        shutil.move(path, src)
    before = remains(root.parent)
    for out in (root, root / "x", src, root.parent):
        done = ckpttool("consolidate", src, out, "--to", "safetensors", "--overwrite")
        assert f"{out}: would be written over the checkpoint in" in done.error
        assert remains(root.parent) == before


def test_directory_that_is_there_stays_the_same_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o700)
    inode = out.stat().st_ino
    assert ckpttool(*consolidate(out)).code == 0
    assert (out.stat().st_ino, out.stat().st_mode & 0o777) == (inode, 0o700)
    assert remains(tmp_path) == ["out", "out/model.safetensors"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    path = leftover(tmp_path / "out")
    (path / MARK).touch()
    (path / "model-00001-of-00002.safetensors").write_bytes(b"x" * 1000)
    leftover(tmp_path / "other")
    assert ckpttool(*consolidate(tmp_path / "out")).code == 0
    assert remains(tmp_path) == [".other.0123456789abcdef.partial", "out", "out/model.safetensors"]


def test_another_run_to_the_same_output_is_refused(tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "out"
    path = leftover(out)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        error = ckpttool(*consolidate(out)).error
    finally:
        os.close(fd)
    assert error == f"Error: {out}: another run is writing it; wait for that run, or choose another OUT"
    assert remains(tmp_path) == [path.name]


@pytest.mark.slow
def test_of_several_runs_at_once_at_most_one_writes_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ckpttool", *map(str, consolidate(out))]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert sum(run.returncode == 0 for run in runs) == out.exists()
    for error in filter(None, errors):
        assert "another run is writing it" in error or "is not empty" in error
    assert remains(tmp_path) == (["out", "out/model.safetensors"] if out.exists() else [])


def _stage_often(out: str) -> set[str]:
    problems = set()
    for _ in range(500):
        try:
            with staged(out, overwrite=True, replaces=lambda _: True) as directory:
                os.close(directory.create("file"))
        except StorageError as error:
            problems.add(error.problem)
    return problems


@pytest.mark.slow
def test_runs_that_create_and_remove_staging_directories_name_each_other(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        assert set().union(*pool.map(_stage_often, [out] * 4)) == {"another run is writing it"}
    assert remains(tmp_path) == ["out", "out/file"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
def test_too_little_memory_is_one_line(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(copy.Copier, "copy", fail)
    done = ckpttool(*consolidate(tmp_path / "out"))
    assert re.fullmatch(r"Error: memory: is not enough \(.+\); free some, or use fewer --jobs", done.error)
    assert remains(tmp_path) == []


# ------------------------------------------------------------------------------------------------- overwriting


def _names(out: Path) -> set[str]:
    """The tensors that a reader of the directory would find."""
    index = out / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    with safe_open(out / "model.safetensors", "np") as file:
        return set(file.keys())


def test_overwriting_leaves_no_stale_weights_and_nothing_else_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ckpttool(*consolidate(out, "--max-shard-size", "3kB")).code == 0
    sharded = remains(out)
    assert len(sharded) > 3
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.bak").write_text("mine")
    (out / "logs").mkdir()
    names = _names(out)
    assert ckpttool(*consolidate(out, "--overwrite")).code == 0
    kept = ["logs", "model.safetensors.bak", "notes.txt"]
    assert remains(out) == sorted([*kept, "model.safetensors"])
    assert _names(out) == names
    assert ckpttool(*consolidate(out, "--overwrite", "--max-shard-size", "3kB")).code == 0
    assert remains(out) == sorted([*kept, *sharded])
    assert ckpttool(*consolidate(out, "--overwrite", "--to", "torch")).code == 0
    assert remains(out) == sorted([*kept, "pytorch_model.bin"])
    assert ckpttool(*consolidate(out, "--overwrite", "--to", "torch", "--max-shard-size", "3kB")).code == 0
    assert ckpttool(*consolidate(out, "--overwrite")).code == 0
    assert remains(tmp_path) == ["out", *sorted(f"out/{name}" for name in [*kept, "model.safetensors"])]


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_model_and_an_adapter_do_not_replace_each_other(where: str, tmp_path: Path, s3: Bucket) -> None:
    trained = source("zero2-dp2-bf16-lora-trainer")
    out = s3.url("out") if where == "bucket" else str(tmp_path / "out")
    model = ("consolidate", source("zero2-dp2-bf16-trainer"), out, "--to", "safetensors", "--max-shard-size", "9kB")
    adapter = ("consolidate", trained, out, "--to", "safetensors", "--adapter-only", "--overwrite")

    def held() -> dict[str, bytes]:
        if where == "bucket":
            return {key.removeprefix("out/"): s3.get(key) for key in s3.keys()}  # noqa: SIM118
        return {path.name: path.read_bytes() for path in Path(out).iterdir()}

    assert ckpttool(*model).code == 0
    before = {name: data for name, data in held().items() if name.startswith("model")}
    assert ckpttool(*adapter).code == 0
    assert before.items() <= held().items()
    adapter_files = {name: data for name, data in held().items() if name.startswith("adapter")}
    assert "adapter_model.safetensors" in adapter_files
    assert ckpttool(*model[:-2], "--overwrite").code == 0
    assert adapter_files.items() <= held().items()
    assert [name for name in held() if name.startswith("model")] == ["model.safetensors"]


def test_overwriting_that_is_refused_keeps_the_old_weights(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert ckpttool(*consolidate(out)).code == 0
    before = (out / "model.safetensors").read_bytes()
    root = checkpoint_copy("zero2-dp2-bf16")
    damage.mix_in(damage.model_file(root), "zero2-dp2-bf16-round-robin")
    assert "two saves are mixed" in ckpttool("consolidate", root, out, "--to", "torch", "--overwrite").error
    (out / "config.json").mkdir()
    trainer = source("zero3-dp2-bf16-trainer")
    error = ckpttool("consolidate", trainer, out, "--to", "safetensors", "--overwrite").error
    assert error == f"Error: {out}/config.json: is a directory; move it out of the way"
    assert remains(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "out"]


def test_dry_run_writes_nothing_and_tells_the_same(tmp_path: Path) -> None:
    out = tmp_path / "a/out"
    planned = json.loads(ckpttool(*consolidate(out, "--dry-run", "--json", "--max-shard-size", "3kB")).stdout)[
        "written"
    ]
    assert remains(tmp_path) == []
    done = json.loads(ckpttool(*consolidate(out, "--json", "--max-shard-size", "3kB")).stdout)["written"]
    assert planned.pop("dry_run")
    assert not done.pop("dry_run")
    assert (planned.pop("seconds"), done.pop("seconds")) > (0, 0)
    assert planned.pop("checks") is None
    assert done.pop("checks")["unchecked"] == []
    assert planned.pop("needs")["memory_bytes"] > 0
    assert done.pop("needs") is None
    assert planned == done
    assert {f["name"]: f["nbytes"] for f in done["files"]} == {p.name: p.stat().st_size for p in out.iterdir()}


# ------------------------------------------------------------------------------------------------- full disks


def test_output_that_cannot_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def nearly_full(path: str) -> os.statvfs_result:
        return os.statvfs_result((*real(path)[:4], 1, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", nearly_full)
    error = ckpttool(*consolidate(tmp_path / "a/out")).error
    assert error.startswith(f"Error: {tmp_path}/a/out: needs 12.5 kB, but only 4.1 kB are free; free some space")
    assert remains(tmp_path) == []
    # What a killed run left there will be free.
    left = leftover(tmp_path / "a/out")
    (left / MARK).touch()
    (left / "model.safetensors").write_bytes(b"x" * 12_288)
    assert ckpttool(*consolidate(tmp_path / "a/out")).code == 0


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 32 kB, or of the size that the test's parameter gives."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '32k')}", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root's rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("inside", ["", "out"])
def test_full_disk_is_an_error_and_nothing_stays(
    small_disk: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 24_000)
    options = () if inside else ("--overwrite",)
    out = small_disk / inside
    assert "needs 12.5 kB, but only " in ckpttool(*consolidate(out, *options)).error
    whole = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda _: whole)  # other programs fill the disk in the meantime
    for to in ("safetensors", "torch"):
        error = ckpttool(*consolidate(out, "--to", to, *options)).error
        assert error.endswith("no space left on the device; free some space or choose another place")
        assert remains(small_disk) == ["ballast"]


# The old and the new weights have 16 kB each, and two markers a page each.
@pytest.mark.parametrize("small_disk", ["40k"], indirect=True)
def test_mount_point_is_written_on_its_own_disk(small_disk: Path, tmp_path: Path) -> None:
    assert ckpttool(*consolidate(small_disk)).code == 0
    assert remains(small_disk) == ["model.safetensors"]
    assert ckpttool(*consolidate(small_disk, "--overwrite", "--to", "torch")).code == 0
    assert remains(small_disk) == ["pytorch_model.bin"]
    assert os.listdir(tmp_path) == ["disk"]


def test_limit_on_the_size_of_files_is_an_error(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = ckpttool_process(*consolidate(tmp_path / "out"), preexec_fn=limit)
    assert "model.safetensors: is larger than a file may be here; raise the limit" in done.error
    assert remains(tmp_path) == []


# ------------------------------------------------------------------------------------------------- an OUT of others


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_an_output_that_another_run_wrote_meanwhile_is_not_replaced(place: str, tmp_path: Path, s3: Bucket) -> None:
    """Both runs found OUT empty; the second one commits while the first one opens its source."""
    out = str(tmp_path / "out") if place == "disk" else s3.url("out")

    def meanwhile(_: object) -> None:
        assert ckpttool_process("consolidate", source("zero3-dp2-bf16"), out, "--to", "safetensors").code == 0

    with watching(Rule(Before(meanwhile), "open", r"zero2-dp2-fp16/.*_states\.pt$")), refused(StorageError):
        api.consolidate(source("zero2-dp2-fp16"), out, to="safetensors")
    assert api.digest(out).weights == api.digest(source("zero3-dp2-bf16")).weights


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_an_edited_sidecar_file_is_kept_by_an_overwrite(place: str, tmp_path: Path, s3: Bucket) -> None:
    out = str(tmp_path / "out") if place == "disk" else s3.url("out")
    storage = open_storage(out, {})
    run = partial(api.consolidate, source("zero2-dp2-bf16-trainer"), out, to="safetensors")
    run()
    first = storage.read_text(f"{out}/config.json")
    edits = []
    for n in (1, 2):
        edits.append(f'{{"edit": {n}}}')
        storage.put(f"{out}/config.json", edits[-1].encode())
        report = run(overwrite=True)
        assert report.written.kept == (f"config.json.replaced{n if n > 1 else ''}",)
        storage.refresh([])
        assert storage.read_text(f"{out}/config.json") == first
    assert [storage.read_text(f"{out}/config.json.replaced{n}") for n in ("", "2")] == edits
    assert run(overwrite=True).written.kept == ()


@pytest.mark.parametrize("held", ["a tag", "a root", "a Trainer's folder"])
def test_an_overwrite_mixes_no_weights_into_another_checkpoint(held: str, tmp_path: Path) -> None:
    name = "zero2-dp2-bf16-trainer" if held == "a Trainer's folder" else "zero2-dp2-bf16"
    root = tmp_path / "held"
    shutil.copytree(source(name), root)
    out = {"a tag": root / "global_step3", "a root": root, "a Trainer's folder": root}[held]
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with refused(StorageError):
        api.consolidate(source("zero3-dp2-bf16"), out, to="safetensors", overwrite=True)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


# ------------------------------------------------------------------------------------------------- permissions


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="ckpttool-test-"))
    directory.chmod(0o777)
    yield directory
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir():
            path.chmod(0o777)
    shutil.rmtree(directory)


def test_file_that_may_not_be_read_is_named(open_directory: Path) -> None:
    root = open_directory / "checkpoint"
    shutil.copytree(CHECKPOINT, root)
    for path in root.rglob("*"):
        path.chmod(0o755)
    secret = damage.optimizer_file(root, 1)
    secret.chmod(0)
    out = open_directory / "out"
    for command in (["inspect", root], ["consolidate", root, out, "--to", "torch"]):
        error = ckpttool_without_privileges(*command).error
        assert error == f"Error: {secret}: permission denied; check its permissions"
    checked = ckpttool_without_privileges("verify", root)
    assert (checked.code, checked.error) == (3, f"Error: {secret}: permission denied; check its permissions")
    listed = ckpttool_without_privileges("ls", root).stdout
    assert f"unreadable: cannot be read: {secret.name}: permission denied" in listed
    assert "torn" not in listed
    secret.chmod(0o644)
    tag = damage.tag_of(root)
    tag.chmod(0)
    for options in [(), ("--tag", "global_step3")]:
        error = ckpttool_without_privileges("inspect", root, *options).error
        assert error == f"Error: {tag}: permission denied; check its permissions"
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "DIR"], ["inspect", "DIR"], ["prune", "DIR", "--keep-last", 1], ["diff", "DIR", "DIR"],
        ["pin", "DIR", "--why", "paper"], *([name, "DIR"] for name in EXTENSIONS_READING), ["digest", "DIR"],
        ["cp", "DIR", "OUT"], ["consolidate", "DIR", "OUT", "--to", "torch"],
        ["convert", "DIR", "OUT", "--to", "universal"],
    ],
    ids=lambda a: a[0],
)  # fmt: skip
def test_a_directory_that_may_not_be_read_is_a_failure_and_not_wrong_usage(
    arguments: list[Any], open_directory: Path
) -> None:
    root = open_directory / "root"
    shutil.copytree(CHECKPOINT, root)
    paths = {"DIR": root, "OUT": open_directory / "out"}
    command = [paths.get(a, a) for a in arguments]
    assert ckpttool(*command).code == 0  # it imports all that the child may not be able to read
    shutil.rmtree(paths["OUT"], ignore_errors=True)
    root.chmod(0)
    assert ckpttool_without_privileges(*command).error.startswith(f"Error: {root}: permission denied; ")
    assert not paths["OUT"].exists()


def test_directory_that_may_not_be_written_is_named(open_directory: Path) -> None:
    closed = open_directory / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    for out in (closed / "out", closed / "a/b/out"):
        done = ckpttool_without_privileges(*consolidate(out))
        assert done.error == f"Error: {closed}: permission denied; cannot create {out} in it; choose another OUT"
    assert remains(closed) == []


def test_directory_made_by_somebody_else_is_enough(open_directory: Path) -> None:
    out = open_directory / "closed/out"
    out.mkdir(parents=True)
    out.chmod(0o777)
    out.parent.chmod(0o555)
    assert ckpttool_without_privileges(*consolidate(out)).code == 0
    assert remains(out) == ["model.safetensors"]
    (out / "model.safetensors").unlink()
    planted = out / ".0123456789abcdef.partial"  # of another user
    planted.mkdir(mode=0o700)
    assert ckpttool_without_privileges(*consolidate(out)).code == 0
    assert sorted(os.listdir(out)) == [planted.name, "model.safetensors"]


def test_output_is_what_the_engine_held(tmp_path: Path) -> None:
    """The other tests here look at names; this one at what is in the file."""
    assert ckpttool(*consolidate(tmp_path / "out")).code == 0
    arrays, _ = read_safetensors(tmp_path / "out/model.safetensors")
    assert (arrays["up.weight"] == truth("zero2-dp2-bf16").arrays["fp32/up.weight"]).all()
