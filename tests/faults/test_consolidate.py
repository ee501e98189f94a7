"""A failure at any operation: the output is complete, unchanged, or not accepted by readers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ckpttool.cli._errors import INTERRUPTED
from ckpttool.execution import copy
from ckpttool.storage.base import WHOLE
from tests import sampling
from tests.cli.command import Outcome, ckpttool, remains, staging_of
from tests.faults.disks import OF_COMMANDS, is_no_cleanup, watching
from tests.faults.rules import Before, Fail, Nothing, Rule, interrupt
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """A command to break."""

    id: str
    checkpoint: str
    options: tuple[str, ...]
    old: tuple[str, ...] | None = None
    """Options of the run whose output is overwritten; None: there is no output yet."""


RUNS = [
    Run("one file", "zero2-dp2-bf16", ("--to", "safetensors")),
    Run("shards, cast", "zero3-dp2-bf16", ("--to", "torch", "--max-shard-size", "3kB", "--dtype", "bf16")),
    Run("with companions", "zero2-dp2-bf16-trainer", ("--to", "safetensors", "--max-shard-size", "9kB")),
    Run("one over shards", "zero3-dp2-bf16-trainer", ("--to", "safetensors", "--overwrite", "--prove"),
        ("--to", "safetensors", "--max-shard-size", "9kB")),
    Run("shards over one", "zero2-dp2-bf16-trainer", ("--to", "torch", "--max-shard-size", "9kB", "--overwrite"),
        ("--to", "safetensors")),
]  # fmt: skip
INTO_EMPTY = Run("an empty one", "zero3-dp2-bf16-trainer", ("--to", "safetensors", "--max-shard-size", "9kB"))


def _contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()} if directory.exists() else {}


def _prepare(run: Run, root: Path) -> dict[str, bytes]:
    """The output as it is before the run that is broken."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    old = root.with_name("old")
    if run.old is not None and not old.exists():
        assert ckpttool("consolidate", source(run.checkpoint), old, *run.old).code == 0
        (old / "notes.txt").write_text("mine")
    if run.old is not None:
        shutil.copytree(old, root / "out")
    return _contents(root / "out")


def _consolidate(run: Run, root: Path, rule: Rule, jobs: int = 1) -> Outcome:
    with watching(rule):
        return ckpttool("consolidate", source(run.checkpoint), root / "out", *run.options, "--jobs", jobs)


def _assert_nothing_false(run: Run, root: Path, before: dict[str, bytes]) -> None:
    assert [p.name for p in root.iterdir()] == (["out"] if run.old is not None else [])
    # What was there is put back.
    assert _contents(root / "out") == before


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.id)
@pytest.mark.parametrize("fault", [Fail("ENOSPC"), Before(interrupt)], ids=["ENOSPC", "^C"])
def test_failure_at_every_operation(run: Run, fault: Fail | Before, tmp_path: Path) -> None:
    root = tmp_path / "root"
    _prepare(run, root)
    interrupts = isinstance(fault, Before)
    recorded = Rule(Nothing(), OF_COMMANDS, when=is_no_cleanup)
    assert _consolidate(run, root, recorded).code == 0
    good = _contents(root / "out")
    assert {"open", "create", "pwrite", "preadv", "rename"} <= set(recorded.matched)
    for at in sampling.some(range(len(recorded.matched)), 6, key=f"{run.id} {interrupts}"):
        before = _prepare(run, root)
        rule = Rule(fault, OF_COMMANDS, when=is_no_cleanup, nth=at + 1)
        done = _consolidate(run, root, rule)
        assert rule.matched[: at + 1] == recorded.matched[: at + 1]
        assert rule.done == 1
        if done.code == 0:
            assert recorded.matched[at] == "mkdir", "it was there already"
            assert _contents(root / "out") == good
            continue
        if interrupts:
            assert (done.code, done.stdout) == (INTERRUPTED, "")
            assert done.stderr.strip() == "Error: interrupted; nothing was left half-written"
        else:
            assert done.error
        _assert_nothing_false(run, root, before)
    # What is left after the last failure does not keep the next run from succeeding.
    assert ckpttool("consolidate", source(run.checkpoint), root / "out", *run.options).code == 0
    assert _contents(root / "out") == good


@pytest.mark.parametrize("at", sampling.some(range(40), 6))
def test_failure_in_one_of_several_threads(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "SIZES", copy.Sizes(task_elements=100))
    run = Run("", "zero3-dp2-bf16", ("--to", "safetensors", "--dtype", "bf16"))
    root = tmp_path / "root"
    before = _prepare(run, root)
    rule = Rule(Fail("EIO"), ("pwrite", "preadv"), nth=at + 1)
    assert "input/output error; check the disk and try again" in _consolidate(run, root, rule, jobs=3).error
    assert rule.done == 1
    _assert_nothing_false(run, root, before)


@pytest.mark.parametrize("change", ["touched", "grown", "cut off"])
def test_source_that_changes_during_the_run(
    change: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_copy("zero3-dp2-bf16")
    path = checkpoint / "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = path.read_bytes()

    def act(_: object) -> None:
        if change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.write_bytes(data + b"x" if change == "grown" else data[:5000])

    def consolidate(rule: Rule) -> Outcome:
        with watching(rule):
            return ckpttool("consolidate", checkpoint, tmp_path / "out", "--to", "safetensors", "--jobs", 1)

    reads = ("preadv", "copy_file_range", "pwrite")
    recorded = Rule(Nothing(), reads)
    assert consolidate(recorded).code == 0
    shutil.rmtree(tmp_path / "out")
    for at in range(len(recorded.matched)):
        path.write_bytes(data)
        os.utime(path)
        error = consolidate(Rule(Before(act), reads, nth=at + 1)).error
        assert error.startswith(f"Error: {path}: ")
        assert "while it was being read" in error or "changed since its layout was read" in error
        assert "wait until the save is over, then try again" in error
        assert remains(tmp_path) == ["checkpoints", *(f"checkpoints/{name}" for name in remains(checkpoint.parent))]


def test_source_that_is_replaced_between_inspection_and_copy_is_noticed(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """A save that replaces its files (rename) leaves the old file open: its name must still lead to it."""
    checkpoint = checkpoint_copy("zero3-dp2-bf16")
    path = checkpoint / "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def act(_: object) -> None:
        copy = tmp_path / "copy"
        shutil.copyfile(path, copy)
        copy.replace(path)

    with watching(Rule(Before(act), "ftruncate")):
        done = ckpttool("consolidate", checkpoint, tmp_path / "out", "--to", "safetensors", "--jobs", 1)
    assert "changed since its layout was read" in done.error
    assert not (tmp_path / "out").exists()


def test_old_output_that_cannot_be_put_back_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in the middle of replacing, and goes on failing: the old weights must not be lost."""
    out = tmp_path / "out"
    arguments = ("consolidate", source("zero2-dp2-bf16"), out, "--to", "safetensors", "--overwrite")
    assert ckpttool(*arguments).code == 0
    old = _contents(out)
    replace, calls = os.replace, 0

    def fail_from_the_fourth_on(a: str, b: str, **directories: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(errno.EIO, "Input/output error")
        replace(a, b, **directories)

    monkeypatch.setattr(os, "replace", fail_from_the_fourth_on)
    error = ckpttool(*arguments).error
    (left,) = staging_of(out)
    assert f"{left}: holds files of OUT that could be neither replaced nor restored" in error
    assert "left half-written by a killed run" in ckpttool("inspect", out).error
    assert _contents(left / ".ckpttool-replaced") == old
    assert "neither replaced nor restored" in ckpttool(*arguments).error
    assert _contents(left / ".ckpttool-replaced") == old
    monkeypatch.undo()
    with watching(Rule(Fail("ENOSPC"), "pwrite", nth=2)):
        assert ckpttool(*arguments).error
    assert _contents(out) == old
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def _read_whole(directory: Path) -> dict[str, bytes] | None:
    """What readers are given, without the file that marks a whole output; None if they refuse the directory."""
    if ckpttool("inspect", directory).code or ckpttool("verify", directory, "--deep").code:
        return None
    return {name: data for name, data in _contents(directory).items() if name != WHOLE}


@pytest.mark.parametrize(
    ("run", "fails"),
    sampling.some(itertools.product([*RUNS, INTO_EMPTY], [False, True]), 7),
    ids=lambda v: v.id if isinstance(v, Run) else "while a failure is cleared away" if v else "",
)
def test_a_kill_at_any_operation_leaves_a_whole_output_or_none(run: Run, fails: bool, tmp_path: Path) -> None:
    root, operations = tmp_path / "root", (*OF_COMMANDS, "rmdir")
    arguments = ("consolidate", source(run.checkpoint), root / "out", *run.options, "--jobs", 1)

    def prepare() -> dict[str, bytes]:
        before = _prepare(run, root)
        if run is INTO_EMPTY:
            (root / "out").mkdir()
        return before

    def broken(rule: Rule) -> Outcome:
        with watching(*[Rule(Fail("ENOSPC"), "pwrite", nth=4)] if fails else [], rule):
            return ckpttool(*arguments)

    prepare()
    assert ckpttool(*arguments).code == 0
    good = _contents(root / "out")
    prepare()
    recorded = Rule(Nothing(), operations)
    assert broken(recorded).code == (3 if fails else 0)
    names = [at for at, name in enumerate(recorded.matched) if name in {"rename", "unlink", "rmdir"}]
    every = range(len(recorded.matched))
    key = f"{run.id} {fails}"
    for at in sorted({*sampling.some(names, 3, key=key), *sampling.some(every, 2, key=key)}):
        before = prepare()
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                broken(Rule(Before(lambda _: os._exit(9)), operations, nth=at + 1))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        for left in root.iterdir():
            assert _read_whole(left) in (None, good, before), (at, recorded.matched[at], left)
        done = ckpttool(*arguments)
        assert _read_whole(root / "out") == good, (at, recorded.matched[at], done.stderr)
        assert "not empty" in done.error if done.code else [p.name for p in root.iterdir()] == ["out"]


@pytest.mark.parametrize("run", [run for run in RUNS if run.old is not None], ids=lambda r: r.id)
def test_what_a_killed_commit_set_aside_is_moved_back(run: Run, tmp_path: Path) -> None:
    root, operations = tmp_path / "root", ("rename", "unlink", "rmdir")
    _prepare(run, root)
    recorded = Rule(Nothing(), operations)
    assert _consolidate(run, root, recorded).code == 0
    good = _contents(root / "out")
    committed = max(at for at, operation in enumerate(recorded.matched) if operation == "rename")
    arguments = ("consolidate", source(run.checkpoint), root / "out", *run.options, "--jobs", 1)
    points = range(committed + 2)
    for at in sorted({committed, *sampling.some(points, 4, key=run.id)}):
        before = _prepare(run, root)
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                _consolidate(run, root, Rule(Before(lambda _: os._exit(9)), operations, nth=at + 1))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        (root / "out" / "notes.txt").unlink()
        error = ckpttool(*(argument for argument in arguments if argument != "--overwrite")).error
        assert "already exists and is not empty" in error or "holds files of OUT that a killed run set aside" in error
        (root / "out" / "notes.txt").write_text("mine")
        assert _consolidate(run, root, Rule(Fail("ENOSPC"), "pwrite", nth=2)).error
        assert _contents(root / "out") == (good if at > committed else before)
        assert [p.name for p in root.iterdir()] == ["out"]
        assert ckpttool(*arguments).code == 0
        assert _contents(root / "out") == good


@pytest.mark.parametrize("name", ["x" * 230, "x" * 255, "ä" * 127])
def test_long_names_that_the_file_system_takes(name: str, tmp_path: Path) -> None:
    assert ckpttool("consolidate", source(RUNS[0].checkpoint), tmp_path / name, *RUNS[0].options).code == 0
    root = tmp_path / "root"
    shutil.copytree(os.path.join(source("zero2-dp2-bf16"), "global_step3"), root / name)
    (root / "latest").write_text(name)
    assert ckpttool("cp", root, tmp_path / "copies" / name).code == 0
    assert _contents(tmp_path / "copies" / name / name) == _contents(root / name)
    assert [len(list(p.iterdir())) for p in (tmp_path, tmp_path / "copies")] == [3, 1]


@pytest.mark.parametrize("command", ["cp", "consolidate"])
def test_a_marker_that_cannot_be_removed_is_an_error(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [command, source("zero2-dp2-bf16"), out, *(["--to", "safetensors"] if command == "consolidate" else [])]
    with watching(Rule(Fail("EIO"), "unlink", rf"{WHOLE}$")):
        done = ckpttool(*arguments)
    written = out / "global_step3" if command == "cp" else out
    assert done.code != 0
    assert done.error.startswith(f"Error: {written}/{WHOLE}: cannot be removed: ")
    assert _read_whole(written)
    if command == "cp":
        assert ckpttool(*arguments).code == 0
        assert (out / "latest").read_text() == "global_step3"
        assert not (written / WHOLE).exists()
