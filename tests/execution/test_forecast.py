"""A dry run tells what a run needs, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.server import Bucket

NAME = "zero2-dp4-bf16"


COMMANDS: dict[str, Callable[..., Any]] = {
    "consolidate": lambda out, **options: ckpttool.consolidate(source(NAME), out, to="safetensors", **options),
    "cast": lambda out, **options: ckpttool.consolidate(
        source(NAME), out, to="safetensors", dtype="bf16", max_shard_size="4kB", **options
    ),
    "convert": lambda out, **options: ckpttool.convert(source(NAME), out, to="universal", **options),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_dry_run_tells_what_a_run_needs(command: Callable[..., Any], tmp_path: Path) -> None:
    planned = command(tmp_path / "below" / "out", dry_run=True).written
    assert os.listdir(tmp_path) == []
    needs = planned.needs
    assert needs.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert needs.memory_bytes > 10_000_000
    done = command(tmp_path / "out").written
    assert done.needs is None
    assert (done.nbytes_read, done.nbytes_written) == (planned.nbytes_read, planned.nbytes_written)


def test_a_bucket_has_no_free_bytes_to_report(s3: Bucket) -> None:
    before = s3.sizes()
    needs = ckpttool.consolidate(source(NAME), s3.url("out"), to="safetensors", dry_run=True).written.needs
    assert needs is not None
    assert needs.free_bytes is None
    assert s3.sizes() == before
    assert s3.uploads() == []


def test_the_memory_is_not_more_than_was_told(tmp_path: Path) -> None:
    """In a process of its own, of a model that is much larger than the buffers."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({f"w{n}": np.ones((1 << 20,), np.float32) for n in range(40)}, str(tmp_path / "model.safetensors"))
    script = (
        "import ckpttool, json, pathlib, sys\n"
        "run = lambda **more: ckpttool.consolidate(sys.argv[1], sys.argv[2], to='safetensors', dtype='bf16', **more)\n"
        "needs = run(dry_run=True).written.needs\n"
        "run()\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "peak = int(status.split('VmHWM:')[1].split()[0]) << 10\n"  # getrusage counts the process before exec
        "print(json.dumps([needs.memory_bytes, peak]))\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    told, taken = json.loads(done.stdout)
    assert taken <= 1.1 * told
    assert told <= 3 * taken
