"""Tests that need a GPU; run them with ``-m gpu``."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool.integrations.torch.pickling import describe
from ckpttool.saving.files import ArchiveFile
from tests.gpu import checks
from tests.gpu.test_fixtures import command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.deepspeed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)"),
]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host's memory, as a save on a GPU has it."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    accelerator = pytest.importorskip("deepspeed.accelerator")
    if accelerator.get_accelerator().device_name() != "cuda":
        pytest.skip("DeepSpeed was imported for the CPU already: run these tests alone (-m gpu)")
    from ckpttool.integrations.live.host_memory import HostMemory

    return HostMemory(pinned=True)


def _state() -> dict[str, Any]:
    flat = torch.arange(1_000_003, dtype=torch.float32, device="cuda")
    return {
        "views": [flat[5:17], flat[500_000:900_000]],
        "half": torch.randn(1001, device="cuda").bfloat16(),
        "offloaded": torch.randn(70_001).pin_memory(),
        "on the host": torch.arange(9),
        "empty": torch.empty(0, device="cuda"),
        "scalar": torch.tensor(2.5, device="cuda"),
    }


def _written(pickled: Any, held: Any) -> bytes:
    return b"".join(ArchiveFile("file.pt", pickled.structure, held).stream())


def _same(a: Any, b: Any) -> None:
    for key in b:
        for x, y in zip(a[key], b[key], strict=True) if isinstance(b[key], list) else [(a[key], b[key])]:
            assert x.device == y.device, key
            assert torch.equal(x, y), key


def test_tensors_of_a_gpu_and_of_the_host_are_held_as_they_were(memory: Any) -> None:
    for _ in range(3):
        state = _state()
        expected = {key: [t.clone() for t in v] if isinstance(v, list) else v.clone() for key, v in state.items()}
        memory.begin()
        pickled = describe(state)
        held = memory.hold(pickled.storages)
        memory.settle()
        for value in state.values():  # the train loop goes on
            for tensor in value if isinstance(value, list) else [value]:
                tensor.zero_()
        _same(torch.load(io.BytesIO(_written(pickled, held)), weights_only=False), expected)
    assert memory.kinds <= {"registered", "pinned"}


def test_copies_wait_for_other_streams(memory: Any) -> None:
    memory.begin()
    values, other = torch.zeros(50_000_000, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(50):
            values += 1
    memory.begin()
    pickled = describe({"values": values})
    held = memory.hold(pickled.storages)
    memory.settle()
    found = torch.load(io.BytesIO(_written(pickled, held)), weights_only=False, map_location="cpu")
    assert torch.equal(found["values"], torch.full((50_000_000,), 50.0))


def test_memory_that_gpus_copy_to_is_pinned(memory: Any) -> None:
    memory.begin()
    memory.hold(describe({"values": torch.ones(3_000_000, device="cuda")}).storages)
    memory.settle()
    assert all(block.is_pinned() for block in memory._blocks)


def test_the_command_makes_a_fixture(tmp_path: Path) -> None:
    code, printed = command("--only", "zero2-bf16", "--ranks", "2", "--out", str(tmp_path))
    assert code == 0, printed
    fixture = checks.Fixture(tmp_path / "zero2-bf16", "cuda")
    for check in (checks.provenance, checks.size, checks.training, checks.sound):
        check(fixture)
    assert json.loads((tmp_path / "report.json").read_text())["machine"]["gpu"]


def test_generators_of_all_devices_are_restored_and_derived() -> None:
    import ckpttool

    torch.cuda.manual_seed_all(5)
    torch.rand(3, device="cuda")
    saved = ckpttool.rng_state()
    assert len(saved["cuda"]["states"]) == torch.cuda.device_count()
    drawn = torch.rand(7, device="cuda")
    torch.rand(100, device="cuda")
    ckpttool.set_rng_state(saved)
    assert torch.equal(torch.rand(7, device="cuda"), drawn)
    derived = [ckpttool.derive_rng_state([saved, saved], rank, 3) for rank in range(3)]
    streams = []
    for state in derived:
        ckpttool.set_rng_state(state)
        streams.append(tuple(torch.rand(7, device="cuda").tolist()))
    assert len({*streams, tuple(drawn.tolist())}) == 4
    ckpttool.set_rng_state(derived[1])
    assert tuple(torch.rand(7, device="cuda").tolist()) == streams[1]
