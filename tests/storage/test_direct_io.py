"""File systems on which files are written with direct I/O."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.storage.local_writer import file_system_of


@pytest.mark.linux
def test_file_systems_are_distinguished() -> None:
    assert file_system_of("/proc") == "proc"
    assert file_system_of("/sys") in {"sysfs", ""}
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    known = {line.split(" - ")[1].split()[0] for line in lines}
    assert file_system_of(".") in {*known, ""}
