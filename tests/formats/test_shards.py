"""No shard can lie: files that are swapped, copied over each other, stale, foreign or missing.

Whatever is done to the files of any bundled checkpoint, nothing is read as sound that gives other values.
"""

from __future__ import annotations

import itertools
import shutil
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.checksums import Checksums, of_bytes
from ckpttool.commit.manifest import Manifest
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.torch_zip import parse
from ckpttool.containers.values import TensorRef, walk
from ckpttool.errors import CkptError
from ckpttool.storage import MANIFEST, LocalReader
from tests import sampling
from tests.truth import HERE, NAMES, source, tag_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST = 12 if sampling.thorough() else 2
"""Pairs of files of one kind that are tried of each checkpoint; the first and the last are among them."""

NAMELESS = (".swp", "fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "momentum_buffer.pt")
"""Files that say nothing of whose they are: raw elements of NVMe offload, and states of a universal checkpoint, where
those of one shape cannot be told apart unless 16-bit copies or a manifest lie beside them."""


@dataclass
class Bed:
    """A copy of a checkpoint whose files are mixed up, and the digest of what it holds while it is sound."""

    name: str
    place: Path
    counts: Counter[str] = field(default_factory=Counter)
    alike: bool = False
    """Whether the file that was put there agrees in all that files say: only a manifest or the values can tell."""

    def __post_init__(self) -> None:
        whole = HERE / "checkpoints" / self.name
        shutil.copytree(whole, self.place / "copy")
        self.src = str(self.place / "copy" / Path(source(self.name)).relative_to(whole))
        self.tag = self.place / "copy" / Path(tag_directory(self.name)).relative_to(whole)
        self.right = ckpttool.digest(self.src)
        self.files = sorted(p for p in self.tag.rglob("*") if p.is_file())

    def pairs(self) -> Iterator[tuple[Path, Path]]:
        """Files of one kind, of several ranks, layers or parameters."""
        kinds: dict[str, list[Path]] = {}
        for path in self.files:
            if path.suffix in {".pt", ".swp"}:
                kinds.setdefault("".join(c for c in path.name if not c.isdecimal()), []).append(path)
        for paths in kinds.values():
            found = list(itertools.combinations(paths, 2))
            yield from found[: MOST - 1] + found[-1:] if len(found) > MOST else found

    def verdict(self, what: str, *, nameless: bool) -> None:
        """Nothing is read as sound that holds other values."""
        refused = ""
        try:
            found = ckpttool.digest(self.src)
            notes = ckpttool.inspect(self.src).notes
        except CkptError as error:
            refused = str(error)
        if refused:
            assert str(self.place) in refused, what
            self.counts["refused"] += 1
            return
        if found == self.right:
            self.counts["same"] += 1
            return
        findings = ckpttool.verify(self.src).findings
        out = self.place / "out"
        try:
            ckpttool.consolidate(self.src, out, to="safetensors")
        except CkptError:
            assert findings, f"{self.name}: {what}: consolidate refuses what verify calls sound"
            self.counts["refused"] += 1
            return
        finally:
            shutil.rmtree(out, ignore_errors=True)
        assert notes or nameless, f"{self.name}: {what}: other values are read as sound"
        told = ckpttool.verify(self.src).unplaced
        assert notes or self.alike or told, f"{self.name}: {what}: other values are read as sound, and nothing is said"
        self.counts["noted" if notes else "cannot be known"] += 1


def _swapped(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def _copied(a: Path, b: Path) -> None:
    b.write_bytes(a.read_bytes())


def _copied_back(a: Path, b: Path) -> None:
    a.write_bytes(b.read_bytes())


def _missing(a: Path, _: Path) -> None:
    a.unlink()


def _mix(bed: Bed, deed: Callable[[Path, Path], None], *, manifest: bool) -> None:
    for a, b in bed.pairs():
        before = a.read_bytes(), b.read_bytes()
        deed(a, b)
        nameless = not manifest and a.name.endswith(NAMELESS)
        bed.verdict(f"{deed.__name__} {a.relative_to(bed.tag)} {b.relative_to(bed.tag)}", nameless=nameless)
        a.write_bytes(before[0])
        b.write_bytes(before[1])
    print(dict(bed.counts))  # noqa: T201


DEEDS = sampling.some(itertools.product(sampling.swept(NAMES), [_swapped, _copied, _copied_back, _missing]), 19)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "deed"), DEEDS)
def test_no_shard_takes_the_place_of_another(name: str, deed: Callable[[Path, Path], None], tmp_path: Path) -> None:
    _mix(Bed(name, tmp_path), deed, manifest=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.some(NAMES, 10, key="swapped"))
def test_no_two_swapped_shards_are_taken_for_each_other(name: str, tmp_path: Path) -> None:
    """Of checkpoints that the test above, which takes one of each kind, may not take."""
    _mix(Bed(name, tmp_path), _swapped, manifest=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "deed"), DEEDS)
def test_none_does_where_there_is_a_manifest(name: str, deed: Callable[[Path, Path], None], tmp_path: Path) -> None:
    bed = Bed(name, tmp_path)
    manifest = Manifest(
        bed.tag.name, 3, 0.0, "0", 1, 0, files={str(p.relative_to(bed.tag)): _sums(p) for p in bed.files}
    )
    (bed.tag / MANIFEST).write_bytes(manifest.to_json())
    assert len(ckpttool.verify(bed.src, deep=True).findings) == len(ckpttool.verify(source(name), deep=True).findings)
    _mix(bed, deed, manifest=True)
    assert not bed.counts["cannot be known"] + bed.counts["noted"]


def _sums(path: Path) -> Checksums:
    """Checksums of a file, as a save has them."""
    data = path.read_bytes()
    sums = of_bytes(data)
    if not data.startswith(b"PK"):
        return sums
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    return sums._replace(directory=(start, zlib.crc32(data[start:])))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.swept(NAMES))
def test_no_shard_of_another_checkpoint_is_taken(name: str, tmp_path: Path) -> None:
    """Files of the same name from the other bundled checkpoints."""
    bed = Bed(name, tmp_path)
    shards = [p for p in bed.files if p.suffix in {".pt", ".swp"}]
    for path in shards[:6] if len(shards) > 1 else ():  # one file alone is a whole checkpoint
        before = path.read_bytes()
        others = [p for other in NAMES if (p := Path(tag_directory(other)) / path.relative_to(bed.tag)).exists()]
        for other in [p for p in others if p.read_bytes() != before][:MOST]:
            # Where only the bytes of tensors differ, nothing tells whose they are; nor does the type of a layer of
            # vectors, which may be buffers.
            alike = _structure(other) == _structure(path) or (path.name.startswith("layer_") and _vectors(path))
            path.write_bytes(other.read_bytes())
            bed.alike = alike
            bed.verdict(f"{path.name} of {other}", nameless=alike or path.name.endswith(NAMELESS))
            path.write_bytes(before)
    print(dict(bed.counts))  # noqa: T201


def _vectors(path: Path) -> bool:
    """Whether a file holds no tensor of more than one dimension."""
    with LocalReader(str(path)) as reader:
        return all(len(v.shape) < 2 for v in walk(read_torch_file(reader).root) if isinstance(v, TensorRef))


def _structure(path: Path) -> bytes:
    """The pickle of a file."""
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        return data
    with LocalReader(str(path)) as reader:
        (where,) = (r.where for r in parse(reader) if r.name.endswith("/data.pkl"))
    return data[where.start : where.end]


def test_a_universal_checkpoint_whose_master_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    """Not a crash, where the module's copies beside the states are looked at as well."""
    bed = Bed("universal-zero2-dp2-bf16", tmp_path)
    path = next(p for p in bed.files if p.name == "fp32.pt")
    path.write_bytes(path.read_bytes()[:200])
    findings = ckpttool.verify(bed.src, deep=True).findings
    assert [f for f in findings if f.path == str(path)]
