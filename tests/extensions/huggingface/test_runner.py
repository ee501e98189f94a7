"""A script that knows nothing of ckpttool is run by ``python -m ckpttool.integrations.huggingface``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import ckpttool
from tests import forked, scripts
from tests.frameworks.torn import tear

pytestmark = pytest.mark.deepspeed
SCRIPT = str(Path(__file__).with_name("plain_script.py"))


def test_a_script_that_cannot_be_changed_saves_commits_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    command = ["-m", "ckpttool.integrations.huggingface", SCRIPT, run]
    (first,) = scripts.run(tmp_path / "first", ["transformers.trainer"], (2, [*command, "4", "last"]))
    assert "steps [1, 2, 3, 4] callbacks" in first
    assert "CkptCallback" in first
    assert "beside huggingface" in first, "modules beside the script cannot be imported"
    assert not ckpttool.verify(f"{run}/checkpoint-4", deep=True).findings
    tear(tmp_path / "run" / "checkpoint-4")
    (second,) = scripts.run(tmp_path / "second", ["transformers.trainer"], (1, [*command, "6", "last"]))
    assert any("checkpoint-4" in line and "was not committed" in line for line in second.splitlines())
    assert "steps [1, 2, 3, 4, 5, 6] callbacks" in second


def _run(script: str) -> object:
    """Run a script as the command does; return what the process ends with: a text is printed, and the status 1."""
    sys.argv[1:] = [script]
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("ckpttool.integrations.huggingface", run_name="__main__", alter_sys=True)
    return caught.value.code


def test_a_script_that_does_not_exist_is_named_in_one_line(tmp_path: Path) -> None:
    told = forked.call(_run, str(tmp_path / "train.py"), imports=["transformers.trainer"])
    assert told == f"SCRIPT: {tmp_path}/train.py does not exist; pass the path of a training script"
