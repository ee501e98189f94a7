"""The index of a save of a torch run describes what ``.metadata`` and the archives do, or it is not used."""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.errors import LayoutError
from ckpttool.formats import dcp
from ckpttool.formats.chunk_index import CHUNK_INDEX, StoredChunk, StoredEntry, chunk_index, read_chunk_index
from ckpttool.model import CheckpointFile
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch = pytest.importorskip("torch")

METADATA = b"some metadata"


def _entries(seed: int) -> list[StoredEntry]:
    """Draw entries, with names, shapes and places of any kind."""
    draw = random.Random(seed)  # noqa: S311
    found = []
    for n in range(draw.randrange(12)):
        path = tuple(draw.choice(["model", "optim", "ä\ud800\n", "a.b", "0", ""]) for _ in range(draw.randrange(4)))
        shape = tuple(draw.randrange(5) for _ in range(draw.randrange(4)))
        is_object = draw.random() < 0.2
        chunks = [
            StoredChunk(
                () if is_object else tuple(draw.randrange(9) for _ in shape),
                () if is_object else tuple(draw.randrange(9) for _ in shape),
                f"__{draw.randrange(3)}_0.distcp",
                draw.randrange(1 << 50),
                draw.randrange(1 << 40),
                draw.randrange(1 << 10),
            )
            for _ in range(1 if is_object else draw.randrange(4))
        ]
        keys: tuple[str | int, ...] = (*path, n)
        found.append(StoredEntry(keys, None if is_object else "BF16", () if is_object else shape, chunks))
    return found


def _read(directory: Path, content: bytes, metadata: bytes = METADATA) -> list[StoredEntry] | None:
    (directory / CHUNK_INDEX).write_bytes(content)
    LOCAL.refresh([])
    found = read_chunk_index(LOCAL, str(directory), metadata)
    return None if found is None else list(found)


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    for seed in range(60):
        entries = _entries(seed)
        assert _read(tmp_path, chunk_index(entries, METADATA)) == entries


def test_an_index_of_other_metadata_is_not_used(tmp_path: Path) -> None:
    assert read_chunk_index(LOCAL, str(tmp_path), METADATA) is None
    content = chunk_index(_entries(3), METADATA)
    for other in (METADATA + b"x", METADATA[:-1], METADATA[:-1] + b"?"):
        assert _read(tmp_path, content, other) is None
    assert _read(tmp_path, _changed(content, lambda header: header.update(version=2))) is None


def _changed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    text, _, binary = zlib.decompress(content).partition(b"\n")
    header = json.loads(text)
    change(header)
    return zlib.compress(json.dumps(header).encode() + b"\n" + binary)


def _first(key: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["entries"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("entries"),
        lambda header: header.pop("files"),
        lambda header: header["entries"].pop(),
        lambda header: header["entries"].append(header["entries"][0]),
        lambda header: header.update(files=[]),
        lambda header: header.update(files=["../__0_0.distcp"]),
        lambda header: header.update(files=[".."]),
        lambda header: header.update(files=["a\0"]),
        lambda header: header.update(files=[7]),
        _first(0, "model"),
        _first(0, [None]),
        _first(1, 4),
        _first(1, None),
        _first(2, [-1, 3]),
        _first(2, [True, 3]),
        _first(2, ["3", 3]),
        _first(3, 3),
        _first(3, -1),
        lambda header: header["entries"].__setitem__(0, 5),
        lambda header: header["entries"].__setitem__(0, []),
        lambda header: header.update(entries=7),
    ],
)
def test_an_index_of_another_form_is_damaged(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    chunks = [StoredChunk((0, 0), (2, 3), "__0_0.distcp", 64, 900, 640)]
    content = chunk_index([StoredEntry(("model", "w"), "F32", (2, 3), chunks)], METADATA)
    with pytest.raises(LayoutError, match="is damaged"):
        _read(tmp_path, _changed(content, change))


def test_deep_nesting_is_damage(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="is damaged"):
        _read(tmp_path, zlib.compress(b"[" * 100_000 + b"\n"))


def test_changed_bytes_are_damage_or_are_not_used(tmp_path: Path) -> None:
    content = chunk_index(_entries(5), METADATA)
    draw = random.Random(1)  # noqa: S311
    for _ in range(300):
        at = draw.randrange(len(content))
        for changed in (content[:at], content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]):
            with contextlib.suppress(LayoutError):
                _read(tmp_path, changed)


# ------------------------------------------------------------------------------------------------------------- a save


def _saved(root: Path) -> Path:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model[0].weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), amsgrad=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    ckpttool.CheckpointManager(root).save(model, optimizer=optimizer, step=1, client_state={"epoch": 2})
    return root / "step-1"


def layout(path: Path) -> dict[Any, Any]:
    """Everything that the reader finds, with the rows of each tensor."""
    checkpoint = ckpttool.inspect(path)
    found: dict[Any, Any] = {
        (name, key): (s.shape, s.dtype, s.extents.tolist()) for name, key, s in checkpoint.states()
    }
    found["files"] = [(file.name, file.nbytes) for file in checkpoint.files]
    found["numbers"] = {p.name: dict(checkpoint.numbers(p)) for p in checkpoint.parameters}
    found["groups"] = [(group.parameters, dict(group.hyperparameters)) for group in checkpoint.groups]
    found["kinds"] = [(p.name, p.frozen, p.group) for p in checkpoint.parameters], checkpoint.aliases
    return found


def test_a_save_has_one_layout_by_its_index_and_by_its_archives(tmp_path: Path, monkeypatch: Any) -> None:
    path = _saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "stored_chunks", lambda *_: pytest.fail("the metadata is not needed"))
        by_index = layout(path)
    monkeypatch.setattr(dcp, "read_chunk_index", lambda *_: None)
    assert by_index == layout(path)


def test_a_chunk_beyond_its_tensor_or_archive_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    metadata = (path / ".metadata").read_bytes()
    entries = list(read_chunk_index(LOCAL, str(path), metadata) or ())
    at = next(n for n, entry in enumerate(entries) if entry.shape == (5, 3))
    (chunk,) = entries[at].chunks
    for other in (
        chunk._replace(offsets=(1, 0)),
        chunk._replace(sizes=(5, 4)),
        chunk._replace(first=chunk.nbytes),
        chunk._replace(first=0),
        chunk._replace(start=1 << 40),
        chunk._replace(file="__9_0.distcp"),
    ):
        with pytest.raises(LayoutError):
            _located(path, entries[at]._replace(chunks=[other]))


def test_chunks_that_do_not_fill_a_tensor_are_not_sound(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    entries = list(read_chunk_index(LOCAL, str(path), (path / ".metadata").read_bytes()) or ())
    entry = next(entry for entry in entries if entry.shape == (5, 3))
    (chunk,) = entry.chunks
    upper, lower = chunk._replace(sizes=(2, 3)), chunk._replace(sizes=(3, 3), offsets=(2, 0), first=chunk.first + 24)
    sizes = [1 << 20] * 4
    assert _located(path, entry._replace(chunks=[lower, upper])).place.sound(15, "F32", sizes)
    for chunks in ([upper], [lower], [upper, upper, lower], [upper, lower._replace(offsets=(1, 0))]):
        assert not _located(path, entry._replace(chunks=chunks)).place.sound(15, "F32", sizes)
    assert not _located(path, entry._replace(chunks=[lower, upper])).place.sound(15, "F32", [chunk.start] * 4)


def _located(path: Path, entry: StoredEntry) -> Any:
    files = [CheckpointFile(".metadata", 1, "metadata", None, "", container="dcp")]
    return dcp.Shards(LOCAL, str(path), {}, files).indexed(entry)
