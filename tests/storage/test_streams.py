"""Streams of bytes written in parts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckpttool.storage import LOCAL
from ckpttool.storage.streams import write_stream

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 1 << 20
PIECES = 24


def _write(path: Path, value: int) -> None:
    writer = LOCAL.writer(str(path), PIECE * PIECES)
    write_stream(writer, (bytes([value]) * PIECE for _ in range(PIECES)), at_once=1)
    writer.commit()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # there are threads, but none that the child needs
def test_processes_that_were_forked_after_a_save_write_bytes_of_their_own(tmp_path: Path) -> None:
    """The buffers that are kept for the next file must not be shared with a forked process."""
    _write(tmp_path / "first", 1)
    if not (child := os.fork()):
        try:
            for number in range(4):
                _write(tmp_path / f"child{number}", 2)
        finally:
            os._exit(0)
    for number in range(4):
        _write(tmp_path / f"parent{number}", 3)
    os.waitpid(child, 0)
    for name, value in (("parent", 3), ("child", 2)):
        for number in range(4):
            assert (tmp_path / f"{name}{number}").read_bytes().count(value) == PIECE * PIECES
