"""The law of flipped bits: whatever bit of a checkpoint flips, what is written is right, or the command fails.

``CKPTTOOL_FLIPS=20000 pytest tests/property/test_flipped_bits.py`` tries so many flips.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError
from ckpttool.storage import LocalReader
from tests import sampling
from tests.truth import HERE, NAMES, raw_bytes, source, tag_directory

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

FLIPS = int(os.environ.get("CKPTTOOL_FLIPS", "400"))
"""Flips of one run of all tests here."""


def _tree(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def _records(out: Path) -> dict[str, Any]:
    """What a copy holds: every record of its archives, and other files as they are."""
    found: dict[str, Any] = {}
    for name, data in _tree(out).items():
        if not data.startswith(b"PK"):
            found[name] = data
            continue
        with LocalReader(str(out / name)) as reader:
            records = read_torch_file(reader).records
        found[name] = {r.name: data[r.where.start : r.where.end] for r in records}
    return found


def _consolidate(src: str, out: Path, **options: Any) -> tuple[Any, Any]:
    report = ckpttool.consolidate(src, out, **options)
    return _tree(out), report.written.checks


def _convert(src: str, out: Path, **options: Any) -> tuple[Any, Any]:
    report = ckpttool.convert(src, out, **options)
    return _tree(out), report.written.checks


def _cp(src: str, out: Path) -> tuple[Any, Any]:
    report = ckpttool.cp(src, out)
    return _records(out), report.written.checks


def _extract(src: str, out: Path) -> tuple[Any, Any]:
    """The largest parameter; of a record that is needed in part, the rest is read."""
    largest = max(ckpttool.inspect(src).parameters, key=lambda p: p.numel)
    report = ckpttool.extract(src, largest.name, out.with_suffix(".npy"), check="full")
    return out.with_suffix(".npy").read_bytes(), report.checks


def _load_state_dict(src: str, out: Path) -> tuple[Any, Any]:
    weights = ckpttool.load_state_dict(src)
    held = {name: raw_bytes(tensor) for name, tensor in weights.items()}
    return held, weights.checks()


def _verify(src: str, _: Path) -> tuple[Any, Any]:
    for finding in ckpttool.verify(src, deep=True).findings:
        raise CkptError(finding.path, finding.problem, finding.hint)
    return "sound", None


COMMANDS: dict[str, Callable[[str, Path], tuple[Any, Any]]] = {
    "consolidate": partial(_consolidate, to="safetensors"),
    "consolidate bf16": partial(_consolidate, to="torch", dtype="bf16"),
    "convert zero": partial(_convert, to="zero", world_size=3),
    "convert universal": partial(_convert, to="universal"),
    "convert dcp": partial(_convert, to="dcp"),
    "cp": _cp,
    "extract": _extract,
    "load_state_dict": _load_state_dict,
    "verify": _verify,
}


@dataclass
class Bed:
    """A copy of a checkpoint to flip bits in, and what each command makes of it while it is sound."""

    name: str
    place: Path
    right: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        whole = HERE / "checkpoints" / self.name
        shutil.copytree(whole, self.place / "copy")
        self.src = str(self.place / "copy" / Path(source(self.name)).relative_to(whole))
        tag = self.place / "copy" / Path(tag_directory(self.name)).relative_to(whole)
        self.files = sorted(p for p in tag.rglob("*") if p.is_file() and p.stat().st_size)

    def run(self, command: str) -> tuple[Any, Any]:
        out = self.place / "out"
        try:
            return COMMANDS[command](self.src, out)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def try_one(self, command: str, draw: random.Random) -> None:
        if command not in self.right:
            try:
                self.right[command] = self.run(command)[0]
            except CkptError:
                self.right[command] = None  # what this command does not do for such a checkpoint
        if self.right[command] is None:
            return
        path = draw.choice(self.files)
        at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        where = f"{self.name}: {command}: bit {bit} of byte {at} of {path.name}"
        refused = ""
        try:
            found, checks = self.run(command)
        except CkptError as error:
            refused = str(error)
        finally:
            path.write_bytes(sound)
        if refused:
            assert str(self.place) in refused, f"{where}: no file is named: {refused}"
            self.outcomes["refused"] += 1
        elif found == self.right[command]:
            self.outcomes["right"] += 1
        else:
            # Files of a form that records no checksum: the report says so.
            assert str(path) in checks.without, f"{where}: what was written is wrong, and nothing was said"
            self.outcomes["without checksum"] += 1


@pytest.mark.parametrize("name", sampling.some(sampling.swept(NAMES), 6))
def test_a_flipped_bit_is_refused_or_makes_no_difference(name: str, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {FLIPS}")  # noqa: S311
    bed = Bed(name, tmp_path)
    first = 4 * NAMES.index(name)  # so that a few flips of each try all commands
    for n in range(first, first + max(9, FLIPS // len(NAMES))):
        bed.try_one(list(COMMANDS)[n % len(COMMANDS)], draw)
    print(dict(bed.outcomes))  # noqa: T201
