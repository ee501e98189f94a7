"""The output of workers and of remote sources in a directory: an interrupted run can go on from its complete files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpttool.execution.output import DirectoryOutput
from ckpttool.plan import COPY, TargetFile
from ckpttool.storage.journal import Journal
from ckpttool.storage.safe_files import Directory

if TYPE_CHECKING:
    from pathlib import Path


def test_only_complete_files_are_in_the_journal(tmp_path: Path) -> None:
    files = [TargetFile(name, 6, (), np.zeros(0, COPY)) for name in ("whole", "half")]
    with Directory.open(str(tmp_path)) as directory, DirectoryOutput(directory, Journal(directory)) as output:
        for file, parts in zip(files, ((b"abc", b"def"), (b"abc",)), strict=True):
            target = output.begin(file)
            for number, part in enumerate(parts):
                target.write(3 * number, memoryview(part))
    with Directory.open(str(tmp_path)) as directory:
        again = DirectoryOutput(directory, Journal(directory))
        assert [again.has(file) for file in files] == [True, False]
    assert (tmp_path / "whole").read_bytes() == b"abcdef"
