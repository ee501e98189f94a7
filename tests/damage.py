"""Ways to damage a copy of a good checkpoint: one function for each thing that goes wrong, or that somebody does."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import StorageRef, TensorRef, walk
from ckpttool.storage import LocalReader
from tests.hostile import attacks, zip_file
from tests.truth import tag_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.containers.torch_file import TorchFile

# ------------------------------------------------------------------------------------------------- which file


def tag_of(root: Path) -> Path:
    """The directory that holds the files."""
    return root / (root / "latest").read_text()


def files_of(root: Path, kind: str) -> list[Path]:
    """The "optim" or "model" files of a checkpoint, by rank."""

    def rank(path: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)", path.name)
        return int(found[1]) if found else 0

    return sorted(tag_of(root).glob(f"*{kind}*_states.pt"), key=rank)


def optimizer_file(root: Path, rank: int = 0) -> Path:
    return files_of(root, "optim")[rank]


def model_file(root: Path, rank: int = 0) -> Path:
    return files_of(root, "model")[rank]


# ------------------------------------------------------------------------------------------------- bytes


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    """What a power cut leaves of a file whose blocks were never written."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path, at: int) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def flip_in_master(path: Path) -> None:
    """Change one bit in the middle of the largest master of an optimizer file, as a failing disk does."""
    with LocalReader(str(path)) as reader:
        file = read_torch_file(reader)
    states = file.root["optimizer_state_dict"]
    masters = states.get("fp32_flat_groups") or states["single_partition_of_fp32_groups"]
    where = max((file.locate(master) for master in masters), key=lambda w: w.nbytes)
    flip(path, (where.start + where.end) // 2)


def seal(path: Path) -> None:
    """Record the checksums of what a file holds now: it is damaged, but was saved so."""
    with LocalReader(str(path)) as reader:
        records = torch_zip.parse(reader)
    data = bytearray(path.read_bytes())
    for record in records:
        crc = zlib.crc32(data[record.where.start : record.where.end])
        if crc == record.crc32 or not record.crc_recorded:
            continue
        name = record.name.encode()
        for magic, crc_at, name_at in ((b"PK\x03\x04", 14, 30), (b"PK\x01\x02", 16, 46)):
            at = data.find(magic)
            while data[at + name_at : at + name_at + len(name)] != name:
                at = data.find(magic, at + 1)
                assert at >= 0
            data[at + crc_at : at + crc_at + 4] = crc.to_bytes(4, "little")
    path.write_bytes(data)


def break_zip_directory(path: Path) -> None:
    """Overwrite the signature of the first entry of the central directory."""
    data = path.read_bytes()
    at = data.index(b"PK\x01\x02")
    path.write_bytes(data[:at] + b"????" + data[at + 4 :])


def make_text(path: Path) -> None:
    """What a failed download leaves: an error page under the file's name."""
    path.write_text("<html><title>404 Not Found</title></html>\n" * 20)


def make_git_lfs_pointer(path: Path) -> None:
    """What a clone without Git LFS leaves."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def make_hostile(path: Path, marker: Path, attack: str = "os.system") -> None:
    """A pickle that creates the file ``marker`` if it is obeyed."""
    path.write_bytes(zip_file(attacks(str(marker))[attack]))


# ------------------------------------------------------------------------------------------------- another save


def mix_in(path: Path, other: str) -> None:
    """Take a file from another bundled checkpoint, under the name that it has there."""
    shutil.copyfile(Path(tag_directory(other)) / path.name, path)


def name_as_fp16(path: Path) -> None:
    """Give an optimizer file the name that an fp16 engine would have given it."""
    path.rename(path.with_name(path.name.removeprefix("bf16_")))


def resave(root: Path, *, step: int) -> None:
    """Make the checkpoint a later save of the same run: other masters, another step, the same layout."""
    for path in files_of(root, "optim"):
        data = bytearray(path.read_bytes())
        with LocalReader(str(path)) as reader:
            file = read_torch_file(reader)
        states = file.root["optimizer_state_dict"]
        for master in states.get("fp32_flat_groups") or states["single_partition_of_fp32_groups"]:
            where = file.locate(master)
            values = np.frombuffer(bytes(data[where.start : where.end]), np.float32) * np.float32(1.5)
            data[where.start : where.end] = values.tobytes()
        for counter in [v for v in walk(file.root) if isinstance(v, TensorRef) and v.shape == ()]:
            where = file.locate(counter)
            data[where.start : where.end] = np.float32(step).tobytes()
        path.write_bytes(data)
        seal(path)
    for path in files_of(root, "model"):
        edit(path, lambda states: states.update(global_steps=step))


# ------------------------------------------------------------------------------------------------- structure


def edit_optimizer(root: Path, change: Callable[[dict[str, Any]], object], ranks: slice = slice(None)) -> None:
    """Change the ``optimizer_state_dict`` of every rank, or of some."""
    for path in files_of(root, "optim")[ranks]:
        edit(path, lambda states: change(states["optimizer_state_dict"]))


def edit_model(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the model states of every rank."""
    for path in files_of(root, "model"):
        edit(path, change)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the structure of a file and write it anew, in a form that is sound in itself; payloads stay."""
    with LocalReader(str(path)) as reader:
        file = read_torch_file(reader)
        payloads = {key: reader.read(where.start, where.end) for key, where in file.storages.items()}
    change(file.root)
    _write(path, file, payloads)


def _write(path: Path, file: TorchFile, payloads: dict[str, bytes]) -> None:
    mentioned = {v.key for v in walk(file.root) if isinstance(v, StorageRef)}
    payloads = {key: data for key, data in payloads.items() if key in mentioned}
    sizes = {key: len(data) for key, data in payloads.items()}
    built = torch_zip.build(pickle(file.root, path=str(path)), sizes, prefix="archive", path=str(path))
    path.write_bytes(assembled(built, payloads))


def assembled(built: torch_zip.BuiltArchive, payloads: dict[str, bytes], *, checksums: bool = True) -> bytes:
    """The bytes of an archive."""
    known = {key: zlib.crc32(data) for key, data in payloads.items()} if checksums else {}
    out = bytearray(b"?" * built.nbytes)
    for n, (key, (offset, literal)) in enumerate(zip([*payloads, None], built.literals, strict=True)):
        own = {key: known[key]} if key in known else {} if key is not None else known
        out[offset : offset + len(literal)] = built.literal(n, own)
    for key, where in built.payloads.items():
        out[where.start : where.end] = payloads[key]
    return bytes(out)


def swap_equals(root: Path) -> None:
    """Swap two parameters of one size in ``param_shapes``: lengths still add up, and the order is wrong."""

    def swap(states: dict[str, Any]) -> None:
        shapes = states["param_shapes"][1]
        names = list(shapes)
        i, j = names.index("norm.weight"), names.index("norm.bias")
        names[i], names[j] = names[j], names[i]
        states["param_shapes"][1] = type(shapes)((name, shapes[name]) for name in names)

    edit_model(root, swap)


def rename_parameter(root: Path, old: str, new: str) -> None:
    """Give a parameter another name, wherever it stands in any file."""
    for path in files_of(root, "model") + files_of(root, "optim"):
        edit(path, lambda states: _rename(states, old, new))


def _rename(root: object, old: str, new: str) -> None:
    for value in walk(root):
        if isinstance(value, dict) and (old in value or old in [v for v in value.values() if isinstance(v, str)]):
            pairs = [(new if k == old else k, new if isinstance(v, str) and v == old else v) for k, v in value.items()]
            value.clear()
            value.update(pairs)


def laughs(depth: int = 60) -> list[Any]:
    """A few bytes of pickle that unfold to 2**depth values."""
    value: list[Any] = ["ha"]
    for _ in range(depth):
        value = [value, value]
    return value


def cycle() -> list[Any]:
    """A list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value
