"""Host memory on huge pages: to touch memory page by page takes longer than to read a file from the page cache into it.

Source: Linux, madvise(2): ``MADV_HUGEPAGE``, and ``MADV_POPULATE_WRITE`` since Linux 5.14.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ckpttool.concurrency import default_jobs, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE_PAGE = 1 << 21
PART_BYTES = 1 << 28
"""Bytes whose pages a thread allocates; a multiple of ``HUGE_PAGE``."""
_POPULATE_WRITE = 23


def empty(nbytes: int) -> Any:
    """Return uninitialised bytes, a 1-D tensor of uint8 on the CPU that is about to be written as a whole.

    Raises:
        MemoryError: Not enough memory.
    """
    import torch

    try:
        return populated(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    except RuntimeError as error:
        raise MemoryError(f"cannot allocate {nbytes:,} bytes") from error


def populated(tensor: Any) -> Any:
    """Allocate the pages of a new 1-D tensor of uint8 on the CPU at once, by several threads if they are many.

    Systems that cannot do so allocate later.
    """
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.numel()) // HUGE_PAGE * HUGE_PAGE
    advise = _madvise()
    if start < end and advise is not None:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
        parts = ((at, min(PART_BYTES, end - at)) for at in range(start, end, PART_BYTES))
        tasks = (partial(advise, ctypes.c_void_p(at), ctypes.c_size_t(n), _POPULATE_WRITE) for at, n in parts)
        for _ in in_threads(tasks, default_jobs() if end - start > PART_BYTES else 1):
            pass
    return tensor


@cache
def _madvise() -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return found if hasattr(mmap, "MADV_HUGEPAGE") else None
