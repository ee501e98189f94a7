"""Killed and failed conversions: no output looks complete, and another run resumes them."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import storage
from ckpttool.errors import ChecksumError, LayoutError, StorageError
from ckpttool.storage.base import WHOLE
from tests.cli.command import ckpttool as run
from tests.cli.command import staging_of
from tests.faults.disks import watching
from tests.faults.rules import Before, Fail, Nothing, Rule, interrupt
from tests.truth import source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

SRC = source("zero2-dp2-bf16")


def _convert(out: Path, *, resume: bool) -> None:
    ckpttool.convert(SRC, out, to="zero", world_size=3, stage=3, resume=resume)


def _writes(out: Path) -> int:
    writes = Rule(Nothing(), "pwrite")
    with watching(writes):
        _convert(out, resume=False)
    return len(writes.matched)


def _bytes(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_failure_leaves_nothing_unless_it_is_to_be_gone_on_with(tmp_path: Path) -> None:
    half = _writes(tmp_path / "whole") // 2
    for resume in (False, True):
        out = tmp_path / f"out-{resume}"
        with (
            watching(Rule(Fail("ENOSPC"), "pwrite", nth=1 + half)),
            pytest.raises(StorageError, match="no space"),
        ):
            _convert(out, resume=resume)
        assert not out.exists()
        assert len(staging_of(out)) == resume


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_going_on_writes_only_what_is_missing_and_gives_the_same_bytes(share: float, tmp_path: Path) -> None:
    writes = _writes(tmp_path / "whole")
    out = tmp_path / "out"
    with watching(Rule(Before(interrupt), "pwrite", nth=1 + int(share * writes))), pytest.raises(KeyboardInterrupt):
        _convert(out, resume=True)
    rest = Rule(Nothing(), "pwrite")
    with watching(rest):
        _convert(out, resume=True)
    assert _bytes(out) == _bytes(tmp_path / "whole")
    assert len(rest.matched) < writes or share < 0.2
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_consolidation_is_resumed_at_its_files(tmp_path: Path) -> None:
    def consolidate(out: Path, *, resume: bool) -> None:
        ckpttool.consolidate(SRC, out, to="safetensors", max_shard_size="3kB", resume=resume)

    writes = Rule(Nothing(), "pwrite")
    with watching(writes):
        consolidate(tmp_path / "whole", resume=False)
    half = 1 + len(writes.matched) // 2
    for resume in (False, True):
        with watching(Rule(Before(interrupt), "pwrite", nth=half)), pytest.raises(KeyboardInterrupt):
            consolidate(tmp_path / "out", resume=resume)
        assert len(staging_of(tmp_path / "out")) == resume
    rest = Rule(Nothing(), "pwrite")
    with watching(rest):
        consolidate(tmp_path / "out", resume=True)
    assert 0 < len(rest.matched) < len(writes.matched)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


@pytest.mark.parametrize("nth", range(1, 8))
def test_the_sources_of_completed_files_are_checked_by_the_run_that_resumes(nth: int, tmp_path: Path) -> None:
    """A record is checked when all of it was read, which the interrupted run may not have done."""
    shutil.copytree(SRC, tmp_path / "src")
    checkpoint = ckpttool.inspect(tmp_path / "src")
    (embedding,) = (p for p in checkpoint.parameters if p.name == "embed.weight")
    place = embedding.states["fp32"].extents[0]
    with open(checkpoint.path(int(place["file"])), "r+b") as file:
        file.seek(int(place["offset"]))
        byte = file.read(1)[0]
        file.seek(int(place["offset"]))
        file.write(bytes([byte ^ 1]))

    def consolidate() -> None:
        options: dict[str, Any] = {"to": "safetensors", "max_shard_size": "3kB", "jobs": 1, "resume": True}
        ckpttool.consolidate(tmp_path / "src", tmp_path / "out", **options)

    with watching(Rule(Before(interrupt), "pwrite", nth=nth)), pytest.raises((KeyboardInterrupt, ChecksumError)):
        consolidate()
    with pytest.raises(ChecksumError):
        consolidate()
    assert not (tmp_path / "out").exists()


def test_leftovers_of_another_conversion_are_not_resumed(tmp_path: Path) -> None:
    writes = _writes(tmp_path / "whole")
    out = tmp_path / "out"
    with watching(Rule(Before(interrupt), "pwrite", nth=1 + writes // 2)), pytest.raises(KeyboardInterrupt):
        ckpttool.convert(SRC, out, to="zero", world_size=2, stage=3, resume=True)
    again = Rule(Nothing(), "pwrite")
    with watching(again):
        _convert(out, resume=True)
    assert len(again.matched) == writes
    assert _bytes(out) == _bytes(tmp_path / "whole")


def test_a_source_that_was_rewritten_in_place_is_read_anew(tmp_path: Path) -> None:
    ckpttool.consolidate(SRC, tmp_path / "src", to="safetensors")
    weights = tmp_path / "src" / "model.safetensors"

    def consolidate(out: Path) -> None:
        ckpttool.consolidate(weights.parent, out, to="safetensors", dtype="bf16", max_shard_size="3kB", resume=True)

    writes = Rule(Nothing(), "pwrite")
    with watching(writes):
        consolidate(tmp_path / "old")
    half = 1 + len(writes.matched) // 2
    with watching(Rule(Before(interrupt), "pwrite", nth=half)), pytest.raises(KeyboardInterrupt):
        consolidate(tmp_path / "out")
    before, data = weights.stat(), weights.read_bytes()
    with weights.open("r+b") as file:  # the same header, other values, and the time of the last change as it was
        file.seek(len(data) // 2)
        file.write(bytes(len(data) - len(data) // 2))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    consolidate(tmp_path / "out")
    consolidate(tmp_path / "new")
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "new") != _bytes(tmp_path / "old")


def test_a_file_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    writes = _writes(tmp_path / "whole")
    out = tmp_path / "out"
    with watching(Rule(Before(interrupt), "pwrite", nth=1 + int(0.9 * writes))), pytest.raises(KeyboardInterrupt):
        _convert(out, resume=True)
    (staging,) = staging_of(out)
    left = next(staging.rglob("*_optim_states.pt"))
    os.truncate(left, 100)
    _convert(out, resume=True)
    assert _bytes(out) == _bytes(tmp_path / "whole")


def test_without_resume_what_is_left_is_cleared_away(tmp_path: Path) -> None:
    writes = _writes(tmp_path / "whole")
    out = tmp_path / "out"
    with watching(Rule(Before(interrupt), "pwrite", nth=1 + int(0.9 * writes))), pytest.raises(KeyboardInterrupt):
        _convert(out, resume=True)
    again = Rule(Nothing(), "pwrite")
    with watching(again):
        _convert(out, resume=False)
    assert len(again.matched) == writes
    assert _bytes(out) == _bytes(tmp_path / "whole")


def test_an_output_refused_by_prove_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = storage.write_at

    def wrong(fd: int, data: bytes | memoryview, start: int, target: str) -> None:
        changed = bytearray(data)
        if isinstance(data, memoryview) and "optim" in target:  # a tensor's bytes, not a header
            changed[-1] ^= 1
        right(fd, memoryview(changed), start, target)

    _convert(tmp_path / "whole", resume=False)
    with monkeypatch.context() as patch:
        patch.setattr("ckpttool.storage.local_writer.write_at", wrong)
        with refused(LayoutError):
            ckpttool.convert(SRC, tmp_path / "out", to="zero", world_size=3, stage=3, resume=True, prove=True)
    _convert(tmp_path / "out", resume=True)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "--to", "zero", "--world-size", 3, "--stage", 3),
        ("convert", "--to", "universal"),
        ("convert", "--to", "dcp"),
        ("consolidate", "--to", "safetensors", "--max-shard-size", "3kB"),
    ],
    ids=lambda arguments: arguments[2],
)
def test_resuming_a_finished_run_writes_nothing(arguments: tuple[object, ...], tmp_path: Path) -> None:
    command, *options = arguments
    assert run(command, SRC, tmp_path / "out", *options).code == 0
    before = _bytes(tmp_path / "out")
    (tmp_path / "out" / WHOLE).write_text("")  # killed right after the commit
    changes = Rule(Nothing(), ("create", "pwrite", "rename", "mkdir"))
    with watching(changes):
        done = run(command, SRC, tmp_path / "out", *options, "--resume", "--prove")
    assert done.code == 0, done
    assert f"{tmp_path}/out: was there already, nothing was written: " in done.stdout
    assert changes.matched == []
    assert _bytes(tmp_path / "out") == before
    assert "is not empty" in run(command, SRC, tmp_path / "out", *options).error


def test_resuming_does_not_take_another_output_for_its_own(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    rename = {out: ["s/embed/embad/"], other: ["s/embed/embid/"]}
    for path in (out, other):
        ckpttool.consolidate(SRC, path, to="safetensors", rename=rename[path])
    path = out / "model.safetensors"
    assert path.stat().st_size == (other / "model.safetensors").stat().st_size, "only the bytes tell the two apart"
    again = partial(ckpttool.consolidate, SRC, out, to="safetensors", resume=True)
    assert again(rename=rename[out]).written.there
    with refused(StorageError):
        again(rename=rename[other])
    (out / "notes.txt").write_text("mine")
    with refused(StorageError):
        again(rename=rename[out])
    (out / "notes.txt").unlink()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with refused(StorageError):
        again(rename=rename[out])
