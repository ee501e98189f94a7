"""Background saves at the end of the interpreter, without torch, on every supported Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.commit import is_commit
from ckpttool.commit.manifest import read_manifest
from ckpttool.storage import LOCAL

PYTHONS = [sys.executable, *filter(None, os.environ.get("CKPTTOOL_TEST_PYTHONS", "").split(os.pathsep))]
"""Others need numpy, isal and ml_dtypes."""
SCRIPT = """
import logging, multiprocessing, os, sys, time
from ckpttool.saving.background import Background
from ckpttool.storage import LOCAL
from ckpttool.saving.files import HostPayload, PlainFile
from ckpttool.saving.two_phase import Request, save
from ckpttool.saving.coordination import Alone
from ckpttool.errors import CkptError

logging.basicConfig(level="INFO")
how, root = sys.argv[1:]

def write():
    time.sleep(0.3)
    if "fails" in how:
        open(root, "w").close()
    try:
        save(LOCAL, root, Alone(), Request("a", 1, 2), [PlainFile("x.bin", HostPayload(b"x" * (9 << 20)))])
    except CkptError as error:
        logging.error("%s", error)
        return error

def begin():
    background = Background()
    background.start(write)
    print("begun", flush=True)

if "child" in how:
    child = multiprocessing.get_context("spawn" if "spawn" in how else "fork").Process(target=begin)
    if __name__ == "__main__":
        child.start()
        child.join()
        os._exit(child.exitcode)
elif "forks" in how:  # as a loader of data does while a save runs
    begin()
    if not (pid := os.fork()):
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
else:
    begin()
    if "exit" in how:
        sys.exit(0)
    if "exception" in how:
        raise ArithmeticError
    if "closed" in how:
        sys.stderr.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("normal", 0), ("exit", 0), ("exception", 1), ("forks", 0), ("fork child", 0), ("spawn child", 0),
        ("normal fails", 120), ("exit fails", 120), ("exception fails", 120), ("closed fails", 120),
        ("fork child fails", 1), ("spawn child fails", 120),
    ],
)  # fmt: skip
def test_a_save_is_over_before_the_program(python: str, how: str, status: int, tmp_path: Path) -> None:
    script, root = tmp_path / "script.py", tmp_path / "root"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [python, str(script), how, str(root)], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert "schedule new futures" not in done.stderr
    if "fails" in how:
        assert "Logging error" not in done.stderr
        if "closed" not in how:
            assert "directory" in done.stderr
    else:
        assert is_commit(LOCAL, f"{root}/a"), done.stderr
        assert read_manifest(LOCAL, f"{root}/a").step == 1
