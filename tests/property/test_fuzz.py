"""Damaged and made-up containers, manifests, DCP metadata and headers, for seconds: refused in one line, or read.

``CKPTTOOL_FUZZ_SECONDS=3600`` goes on for an hour.
"""

from __future__ import annotations

import os
import pickle as python_pickle
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.checksums import Checksums
from ckpttool.commit.manifest import Manifest, parse_manifest
from ckpttool.containers import safetensors
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError
from ckpttool.formats import open_checkpoint
from tests import sampling
from tests.hostile import BytesReader, attacks, bombs, zip_file
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("CKPTTOOL_FUZZ_SECONDS", "60" if sampling.thorough() else "8"))
"""For all that is fuzzed together."""
SLOW = 5.0
"""No input of a few kilobytes may take longer, in seconds of CPU."""
INTERESTING = (
    b"\xff" * 8, b"\0" * 8, b"\x80\x02", b"PK\x01\x02", b"PK\x05\x06", b"R", b"Q", b"h\0", b"0", b"[", b"{", b"1e999",
)  # fmt: skip
MANIFEST_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _manifest() -> bytes:
    files = {"a/b.pt": Checksums(5_000_000, 1 << 20, (1, 2, 3, 4, 5), (4_000_000, 7)), "c": Checksums(0, 1 << 20, ())}
    return Manifest("step1", 1, 2.5, "abc", 2, 3, {"loss": 0.5}, {"torch": "2"}, files, (("a", "b"),)).to_json()


def _files() -> list[bytes]:
    found = [p.read_bytes() for p in sorted(Path(source("zero2-dp2-bf16")).rglob("*_states.pt"))]
    return [*found, *(zip_file(d) for d in [*attacks("/nowhere").values(), *bombs().values()] if len(d) < 2000)]


def _headers() -> list[bytes]:
    tensors = [safetensors.Tensor("a", "F32", (2, 3)), safetensors.Tensor("b", "BF16", ())]
    text, _ = safetensors.build(tensors, {"x": "y"})
    return [text + bytes(26)]


def _metadata() -> list[bytes]:
    import torch.distributed.checkpoint.metadata as m
    from torch import Size

    tensor: Any = m.TensorStorageMetadata(
        m.TensorProperties(), Size([4, 2]), [m.ChunkStorageMetadata(Size([0, 0]), Size([4, 2]))]
    )
    plain = m.Metadata({"a": tensor, "b": m.BytesStorageMetadata()}, planner_data={"a": ("model", "a"), "b": ("b",)})
    return [python_pickle.dumps(plain, protocol) for protocol in (2, 4)]


def _read_file(data: bytes, _: Path) -> None:
    read_torch_file(BytesReader(data))


def _read_header(data: bytes, _: Path) -> None:
    safetensors.parse(BytesReader(data))


def _read_manifest(data: bytes, _: Path) -> None:
    try:
        parse_manifest(data)
    except MANIFEST_ERRORS:
        pass  # what read_manifest makes one line of


def _read_metadata(data: bytes, directory: Path) -> None:
    (directory / ".metadata").write_bytes(data)
    (directory / "__0_0.distcp").write_bytes(bytes(100))
    open_checkpoint(str(directory))


TARGETS: dict[str, tuple[Callable[[], list[bytes]], Callable[[bytes, Path], None]]] = {
    "containers": (_files, _read_file),
    "safetensors headers": (_headers, _read_header),
    "manifests": (lambda: [_manifest()], _read_manifest),
    "DCP metadata": (_metadata, _read_metadata),
}


def _mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 2:
            data[at:at] = rng.choice(INTERESTING) * rng.choice((1, 1, 30))
        elif kind == 3:
            part = rng.choice(seeds)
            start = rng.randrange(len(part) + 1)
            data[at:at] = part[start : start + rng.randrange(200)]
        elif kind == 4:
            data[at : at + 4] = rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
        else:
            end = at + rng.randrange(1, 100)
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_the_bytes_they_are_read_or_refused(name: str, tmp_path: Path) -> None:
    make, read = TARGETS[name]
    seeds = make()
    for seed in seeds[:1]:
        read(seed, tmp_path) if name != "DCP metadata" else None
    rng, began, count, kept = random.Random(), time.monotonic(), 0, list(seeds)  # noqa: S311
    while time.monotonic() - began < SECONDS / len(TARGETS):
        data = _mutated(rng, kept)
        (tmp_path / "input").write_bytes(data)  # what is there after a failure is what caused it
        start = time.process_time()
        try:
            read(data, tmp_path)
        except CkptError as error:
            said = str(error)
        else:
            said = ""
            if len(data) < 100_000 and len(kept) < 2000:
                kept.append(data)  # what is still understood leads further
        assert time.process_time() - start < SLOW
        assert len(said) < 20_000
        assert said.isprintable()
        count += 1
    assert count > 10
