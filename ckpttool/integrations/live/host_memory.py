"""Reusable host memory for a rank's state during saves: allocated once, pinned for copies from a GPU."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpttool.integrations.torch.memory import HUGE_PAGE, populated
from ckpttool.saving.files import HostPayload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.integrations.torch.pickling import StorageBytes

LOG = logging.getLogger(__name__)
ALIGNMENT = 64
"""Alignment in bytes of tensors that are copied to the host."""
PORTABLE = 1
"""Source: CUDA's runtime API, ``cudaHostRegisterPortable``: pinned for every GPU of the process."""


class HostMemory:
    """Host memory for one rank's state, reused by every save.

    Args:
        pinned: Whether a GPU copies to it.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Any] = []
        self._block = 0
        self._devices: set[int | None] = set()
        self._on_their_way: list[Any] = []
        self._copies: dict[tuple[bool, int, int], HostPayload] = {}
        """The copies of this save, by the place of the bytes: whether in host memory, address and size."""
        self.kinds: set[str] = set()
        """Kinds of its blocks: "registered", "pinned" or "pageable"."""

    @property
    def nbytes(self) -> int:
        """Total bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def begin(self) -> None:
        """Begin a save: release the contents of the previous one."""
        self._block = 0
        self._devices.clear()
        self._on_their_way.clear()
        self._copies.clear()
        if self._pinned:
            # DeepSpeed computes and copies offloaded state on its own streams. Copies on the current stream, and reads
            # of host memory, do not wait for those.
            self._wait_for(None)

    def hold(self, storages: Mapping[str, StorageBytes]) -> dict[str, HostPayload]:
        """Copy the bytes of storages; the copies are complete when ``settle`` returns."""
        total = sum(-(-s.nbytes // ALIGNMENT) * ALIGNMENT for s in storages.values())
        memory = self._take(total)
        payloads = {}
        at = 0
        for key, storage in storages.items():
            target = memory[at : at + storage.nbytes]
            if storage.on_host:
                _copy(target, storage.tensor)
            else:
                self._fetch(target, storage.tensor)
            payloads[key] = HostPayload(memoryview(target.numpy()))
            self._copies[storage.on_host, storage.address, storage.nbytes] = payloads[key]
            at += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        return payloads

    def copy_of(self, storage: StorageBytes) -> HostPayload | None:
        """Return the copy of some bytes that ``hold`` has made since ``begin``; None without one."""
        return self._copies.get((storage.on_host, storage.address, storage.nbytes))

    def settle(self) -> None:
        """Wait for copies from devices."""
        for index in self._devices:
            self._wait_for(index)
        self._on_their_way.clear()

    def _fetch(self, target: Any, source: Any) -> None:
        """Start an asynchronous copy from a device."""
        index = source.device.index
        if index not in self._devices:
            self._wait_for(index)  # a model may span several devices
            self._devices.add(index)
        target.copy_(source, non_blocking=True)
        # The allocator could reuse memory of another stream while this stream still copies it.
        self._on_their_way.append(source)

    @staticmethod
    def _wait_for(index: int | None) -> None:
        torch.accelerator.synchronize(index)

    def _take(self, nbytes: int) -> Any:
        # One block per file: file sizes are the same in each save.
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
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if not self._pinned:
            return _mapped(nbytes)
        kind, block = _pinned(nbytes)
        if kind == "pageable" and kind not in self.kinds:
            LOG.warning("%s bytes cannot be pinned, so that saves take longer; raise the limit (ulimit -l)", nbytes)
        self.kinds.add(kind)
        return block


def _copy(target: Any, source: Any) -> None:
    """Copy bytes within host memory."""
    if torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        # memcpy writes large blocks past the caches; torch's copy first reads the memory it overwrites.
        np.copyto(target.numpy(), source.numpy())


def _mapped(nbytes: int) -> Any:
    """Allocate memory on huge pages: faster to touch first and to pin."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
    block = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE, flags=flags)
    return populated(torch.frombuffer(block, dtype=torch.uint8))


def _pinned(nbytes: int) -> tuple[str, Any]:
    """Allocate pinned memory, if the system allows it; return its kind and the memory.

    torch's pinned allocator rounds up to a power of two and returns nothing to the system (torch 2.13,
    ATen/core/CachingHostAllocator.h): too much for shards of many GB, so it is the second choice.
    """
    block = _mapped(nbytes)
    if _register(block):
        return "registered", block
    try:
        return "pinned", torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError:
        return "pageable", block


def _register(block: Any) -> bool:
    """Pin existing memory until it is freed; return whether that succeeded."""
    if not torch.cuda.is_available():
        return False
    address, cuda = block.data_ptr(), torch.cuda.cudart()
    try:
        if int(cuda.cudaHostRegister(address, block.numel(), PORTABLE)):
            _forget_error()
            return False
    except RuntimeError:
        return False
    # Not at interpreter exit: CUDA may already be shut down.
    weakref.finalize(block, cuda.cudaHostUnregister, address).atexit = False
    return True


def _forget_error() -> None:
    """Clear a handled CUDA error: otherwise the next kernel launch raises it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
