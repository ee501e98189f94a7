"""Host copies during a save: right bytes, complete, allocated once; host memory plays a device."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckpttool.integrations.live import host_memory
from ckpttool.integrations.live.host_memory import ALIGNMENT, HostMemory
from ckpttool.integrations.torch.pickling import StorageBytes, describe

if TYPE_CHECKING:
    from collections.abc import Iterator


class OnDevice(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """A tensor that says that it lies on the second device."""

    device = property(lambda self: torch.device("cuda", 1))


class Distant(StorageBytes):
    """Bytes on a device."""

    def __init__(self, data: bytes) -> None:
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8).as_subclass(OnDevice)
        super().__init__(self._data.untyped_storage(), 0, len(data))
        self.on_host = False

    @property
    def tensor(self) -> Any:
        return self._data


class Cuda:
    """CUDA's runtime, as far as it is used."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  CUDA's name
        if not self._code:
            self.registered[address] = nbytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  the same
        del self.registered[address]
        return 0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The devices that were waited for, one after the other."""
    found: list[int | None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", found.append)
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def _bytes(held: Any) -> list[bytes]:
    return [bytes(one.read(0, one.nbytes)) for one in held.values()]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads for torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_held_bytes_do_not_change_with_the_state(threads: int) -> None:
    assert torch.get_num_threads() == threads  # on which it depends how it is copied
    memory = HostMemory(pinned=False)
    state = {"a": torch.arange(5.0), "b": torch.arange(3, dtype=torch.uint8), "empty": torch.empty(0)}
    memory.begin()
    pickled = describe(state)
    held = memory.hold(pickled.storages)
    expected = _bytes(pickled.storages)
    memory.settle()
    for tensor in state.values():
        tensor.zero_()
    assert _bytes(held) == expected
    assert expected[1] == b"\0\1\2"
    addresses = [np.frombuffer(one.read(0, one.nbytes), np.uint8).ctypes.data for one in held.values() if one.nbytes]
    assert [address % ALIGNMENT for address in addresses] == [0, 0]


def test_the_device_is_synchronised_before_and_after_the_copies(waits: list[int | None]) -> None:
    memory = HostMemory(pinned=True)
    memory.begin()
    assert waits == [None]  # also what is copied to the host's memory on other streams must be there
    held = memory.hold({"0": Distant(b"moments"), "1": StorageBytes(torch.ones(2).untyped_storage(), 0, 8)})
    assert waits == [None, 1]
    held |= memory.hold({"2": Distant(b"more")})
    assert waits == [None, 1]
    memory.settle()
    assert waits == [None, 1, 1]
    assert [one[:7] for one in _bytes(held)] == [b"moments", bytes(torch.ones(2).numpy().tobytes())[:7], b"more"]
    memory.begin()
    memory.hold({"0": Distant(b"moments")})
    memory.settle()
    assert waits == [None, 1, 1, None, 1, 1]


def test_tensors_live_until_their_copy_is_complete(waits: list[int | None]) -> None:
    memory, storage = HostMemory(pinned=True), Distant(b"temporary")
    source = weakref.ref(storage.tensor)
    memory.begin()
    memory.hold({"0": storage})
    del storage
    gc.collect()
    assert source() is not None
    memory.settle()
    gc.collect()
    assert source() is None
    assert waits


@pytest.mark.usefixtures("waits")
def test_memory_is_pinned_once_and_used_again(cuda: Cuda) -> None:
    memory = HostMemory(pinned=True)
    sizes = []
    for _ in range(3):
        memory.begin()
        for nbytes in (100, 5000):
            memory.hold({"0": Distant(b"x" * nbytes)})
        memory.settle()
        sizes.append(dict(cuda.registered))
    assert memory.kinds == {"registered"}
    assert len(sizes[0]) == 2
    assert sizes[0] == sizes[1] == sizes[2]
    assert memory.nbytes == sum(sizes[0].values())


@pytest.mark.usefixtures("waits")
def test_memory_is_unpinned_when_it_is_no_longer_used(cuda: Cuda) -> None:
    memory = HostMemory(pinned=True)
    memory.begin()
    held = memory.hold({"0": Distant(b"x" * 100)})
    (before,) = cuda.registered
    memory.begin()
    del held
    memory.hold({"0": Distant(b"x" * 10_000_000)})  # another block
    gc.collect()
    assert before not in cuda.registered
    assert len(cuda.registered) == 1
    del memory
    gc.collect()
    assert cuda.registered == {}


@pytest.mark.usefixtures("waits")
def test_memory_that_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cuda(code=2))  # out of memory
    forgotten: list[str] = []
    monkeypatch.setattr(host_memory, "_forget_error", lambda: forgotten.append("error"))
    pins: list[int] = []
    empty = torch.empty

    def refuse(*size: Any, **options: Any) -> Any:
        if options.get("pin_memory"):
            pins.append(size[0])
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    memory = HostMemory(pinned=True)
    with caplog.at_level(logging.WARNING, "ckpttool"):
        memory.begin()
        held = memory.hold({"0": Distant(b"bytes")}) | memory.hold({"1": Distant(b"others")})
        memory.settle()
    assert _bytes(held) == [b"bytes", b"others"]
    assert memory.kinds == {"pageable"}
    assert len(pins) == len(forgotten) == 2
    assert len(caplog.records) == 1
    assert "cannot be pinned" in caplog.text
