"""The same checkpoint gives the same bytes in every run and on every path of reading."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from ckpttool.execution import copy as copy_module
from ckpttool.storage import local_writer
from tests.cli.command import ckpttool, ckpttool_process
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS = [
    ("--to", "safetensors"),
    ("--to", "torch", "--dtype", "bf16", "--max-shard-size", "4kB"),
    ("--to", "safetensors", "--dtype", "fp16", "--max-shard-size", "9kB"),
]


def _written(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("name", ["zero2-dp4-bf16", "zero3-dp3-bf16", "zero3-dp2-bf16-trainer"])
def test_two_runs_write_the_same_bytes(
    name: str,
    options: tuple[str, ...],
    checkpoint_copy: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = tmp_path / "first"
    assert ckpttool_process("consolidate", source(name), first, *options, "--jobs", 1).code == 0
    expected = _written(first)
    copy = checkpoint_copy(name)
    elsewhere = copy / "checkpoint-3" if name.endswith("trainer") else copy
    for path in copy.rglob("*"):
        os.utime(path, ns=(1, 1))
    # Threads, long copies cut into many, another place, another time, another seed of hashes.
    monkeypatch.setattr(copy_module, "SIZES", copy_module.Sizes(task_elements=37))
    assert ckpttool("consolidate", elsewhere, tmp_path / "second", *options, "--jobs", 4).code == 0
    assert _written(tmp_path / "second") == expected
    # Where the kernel cannot copy, and into an output that was there.
    monkeypatch.setattr(local_writer, "copy_range", lambda *_: False)
    shutil.copytree(first, tmp_path / "third")
    assert ckpttool("consolidate", elsewhere, tmp_path / "third", *options, "--jobs", 2, "--overwrite").code == 0
    assert _written(tmp_path / "third") == expected
