"""Runs that are interrupted or killed, and two runs at once, in separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckpttool.cli._errors import INTERRUPTED
from tests.cli.command import ckpttool, ckpttool_process, remains, staging_of
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

CHECKPOINT = source("zero3-dp2-bf16")
SLOW = """
import os, sys, time
from ckpttool.execution import copy
from ckpttool.cli import main
write = os.pwrite
def slow(*arguments):
    done = write(*arguments)
    sys.stderr.write("writing\\n")
    sys.stderr.flush()
    time.sleep(0.05)
    return done
os.pwrite = slow
copy.SIZES = copy.Sizes(task_elements=50)
main()
"""
"""The command, at a crawl; it says when it is in the middle of writing."""


@contextlib.contextmanager
def slow_run(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is in the middle of writing."""
    command = [sys.executable, "-c", SLOW, "consolidate", CHECKPOINT, str(out), "--to", "safetensors", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stderr is not None
            for _ in range(3):
                assert run.stderr.readline() == "writing\n"
            yield run
        finally:
            if run.poll() is None:
                run.kill()


def _last_line(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=300)
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


def assert_staged(root: Path) -> None:
    """Check what is there while the output is being written."""
    (staging,) = root.iterdir()
    assert staging_of(root / "out") == [staging]
    assert remains(staging) == [".ckpttool-staging", "model.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [(), ("--dtype", "bf16", "--jobs", "3")], ids=["alone", "threads"])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, options: tuple[str, ...], tmp_path: Path) -> None:
    with slow_run(tmp_path / "out", *options) as run:
        assert_staged(tmp_path)
        run.send_signal(number)
        assert _last_line(run) == "Error: interrupted; nothing was left half-written"
    assert run.returncode == INTERRUPTED
    assert remains(tmp_path) == []


def test_run_that_is_killed_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with slow_run(out) as run:
        run.kill()
        run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert_staged(tmp_path)
    assert ckpttool_process("inspect", out).error.endswith("does not exist; check the path")
    assert ckpttool("consolidate", CHECKPOINT, out, "--to", "torch").code == 0
    assert remains(tmp_path) == ["out", "out/pytorch_model.bin"]


def test_overwriting_run_that_is_killed_leaves_the_old_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ckpttool("consolidate", CHECKPOINT, out, "--to", "torch").code == 0
    before = (out / "pytorch_model.bin").read_bytes()
    with slow_run(out, "--overwrite") as run:
        run.kill()
        run.communicate()
    assert remains(out) == ["pytorch_model.bin"]
    assert (out / "pytorch_model.bin").read_bytes() == before


def test_a_second_run_to_the_same_output_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with slow_run(out) as run:
        run.send_signal(signal.SIGSTOP)  # it must not be done before the others have met it
        for options in ([], ["--overwrite"]):
            error = ckpttool_process("consolidate", CHECKPOINT, out, "--to", "torch", *options).error
            assert error == f"Error: {out}: another run is writing it; wait for that run, or choose another OUT"
        assert ckpttool("consolidate", CHECKPOINT, tmp_path / "other", "--to", "safetensors").code == 0
        run.send_signal(signal.SIGCONT)
        _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()
