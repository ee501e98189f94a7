"""The host's memory that a save copies a rank's state to: allocated once, and pinned where a GPU copies to it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpttool.saving.payloads import Held

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.integrations.torch.pickling import StorageBytes

LOG = logging.getLogger(__name__)
ALIGNMENT = 64
"""Alignment in bytes of tensors that are copied to the host."""
HUGE_PAGE = 1 << 21
PORTABLE = 1
"""Source: CUDA's runtime API, ``cudaHostRegisterPortable``: pinned for every GPU of the process."""


class HostMemory:
    """The host's memory for one rank's state, used again for every save.

    Args:
        pinned: Whether a GPU is to copy to it.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Any] = []
        self._block = 0
        self._devices: set[int | None] = set()
        self._on_their_way: list[Any] = []
        self.kinds: set[str] = set()
        """How its blocks were had: "registered", "pinned" or "pageable"."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def begin(self) -> None:
        """Nothing that is held is needed any more."""
        self._block = 0
        self._devices.clear()
        self._on_their_way.clear()
        if self._pinned:
            # DeepSpeed computes, and copies what it offloads, on streams of its own, in either direction: what copies
            # on the current stream, or reads the host's memory, would not wait for them.
            self._wait_for(None)

    def hold(self, storages: Mapping[str, StorageBytes]) -> dict[str, Held]:
        """Copy the bytes of storages; all is there when ``settle`` returns."""
        total = sum(-(-s.nbytes // ALIGNMENT) * ALIGNMENT for s in storages.values())
        memory = self._take(total)
        held = {}
        at = 0
        for key, storage in storages.items():
            target = memory[at : at + storage.nbytes]
            if storage.on_host:
                _copy(target, storage.tensor)
            else:
                self._fetch(target, storage.tensor)
            held[key] = Held(memoryview(target.numpy()))
            at += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        return held

    def settle(self) -> None:
        """Wait for copies from devices."""
        for index in self._devices:
            self._wait_for(index)
        self._on_their_way.clear()

    def _fetch(self, target: Any, source: Any) -> None:
        """Begin a copy from a device."""
        index = source.device.index
        if index not in self._devices:
            self._wait_for(index)  # a model may be spread over several
            self._devices.add(index)
        target.copy_(source, non_blocking=True)
        # Memory that was allocated on another stream could be given away there while it is copied on this one.
        self._on_their_way.append(source)

    @staticmethod
    def _wait_for(index: int | None) -> None:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize(index)

    def _take(self, nbytes: int) -> Any:
        # One block a file: their sizes are the same from save to save.
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if block.numel() >= nbytes:
                self._block += 1
                return block
            del self._blocks[self._block]
        self._blocks.append(self._allocate(nbytes))
        self._block += 1
        return self._blocks[-1]

    def _allocate(self, nbytes: int) -> Any:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if not self._pinned:
            return _mapped(nbytes)
        kind, block = _pinned(nbytes)
        if kind == "pageable" and kind not in self.kinds:
            LOG.warning("%s bytes cannot be pinned, so that saves take longer; raise the limit (ulimit -l)", nbytes)
        self.kinds.add(kind)
        return block


def _copy(target: Any, source: Any) -> None:
    """Copy bytes within the host's memory."""
    if torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        # The C library's copy, which writes what is large past the caches; torch's reads first what it overwrites.
        np.copyto(target.numpy(), source.numpy())


def _mapped(nbytes: int) -> Any:
    """Memory on huge pages, which it takes less time to touch first and to pin."""
    block = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    with contextlib.suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def _pinned(nbytes: int) -> tuple[str, Any]:
    """Memory that a GPU copies to by itself, if there is such memory: how it was had, and the memory.

    Torch's own allocator of pinned memory rounds up to a power of two and gives nothing back to the system (torch 2.13,
    ATen/core/CachingHostAllocator.h), which for shards of many GB is too much: it comes second.
    """
    block = _mapped(nbytes)
    if _register(block):
        return "registered", block
    try:
        return "pinned", torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return "pageable", block


def _register(block: Any) -> bool:
    """Pin memory that is there, for as long as it is; whether that could be done."""
    if not torch.cuda.is_available():
        return False
    address, cuda = block.data_ptr(), torch.cuda.cudart()
    try:
        if int(cuda.cudaHostRegister(address, block.numel(), PORTABLE)):
            _forget_error()
            return False
    except RuntimeError:
        return False
    # Not at the interpreter's end, where CUDA may have ended before.
    weakref.finalize(block, cuda.cudaHostUnregister, address).atexit = False
    return True


def _forget_error() -> None:
    """Let nobody else hear of an error that was dealt with: CUDA keeps it, and the next kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
