"""Memory that is allocated at once."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.integrations.torch import memory


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_pages_are_allocated_before_they_are_written() -> None:
    before = _resident_kb()
    held = memory.empty(100 << 20)
    assert _resident_kb() - before > 90 << 10
    assert (held.dtype, held.numel()) == (torch.uint8, 100 << 20)


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, memory.HUGE_PAGE - 1, 3 * memory.HUGE_PAGE + 5])
def test_memory_of_any_size_can_be_written(nbytes: int) -> None:
    held = memory.empty(nbytes)
    held.fill_(7)
    assert held.sum().item() == 7 * nbytes


@pytest.mark.parametrize("answer", [None, -1])
def test_a_system_without_the_advice_allocates_later(answer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(*arguments: Any) -> int:
        asked.append(arguments[-1])
        return -1

    monkeypatch.setattr(memory, "_madvise", lambda: None if answer is None else refuse)
    assert memory.empty(8 << 20).fill_(1).sum().item() == 8 << 20
    assert len(asked) == (0 if answer is None else 2)


def test_too_much_memory_is_no_fault_of_a_file() -> None:
    with pytest.raises(MemoryError, match="cannot allocate 1,152,921,504,606,846,976 bytes"):
        memory.empty(1 << 60)
