"""Hostile checkpoints, small ones: made anew for every test, from a good checkpoint and from nothing.

``python -m tests.hostile_corpus DIRECTORY`` writes all of them, to be looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.storage import MANIFEST, MARK
from tests import damage
from tests.hostile import attacks, bombs, greedy, lying_tensors, zip_file
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD = "zero2-dp2-bf16"
TAG = "global_step3"


def _edited(change: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """A good checkpoint that something was done to."""

    def make(root: Path, outside: Path) -> None:
        shutil.copytree(source(GOOD), root)
        change(root, outside)

    return make


def _attack(name: str, of: Callable[[bytes], Callable[[Path, Path], None]]) -> Callable[[Path, Path], None]:
    """What would leave a file outside: in the test's own directory, so that no other run can have left it."""
    return lambda root, outside: of(attacks(str(outside / "obeyed"))[name])(root, outside)


def _later(
    data: Callable[[], bytes], of: Callable[[bytes], Callable[[Path, Path], None]]
) -> Callable[[Path, Path], None]:
    """Bytes that are made with the checkpoint."""
    return lambda root, outside: of(data())(root, outside)


def _pickled(data: bytes) -> Callable[[Path, Path], None]:
    return _edited(lambda root, _: _replace(damage.optimizer_file(root), zip_file(data)))


def _replace(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _link(name: str, target: str) -> Callable[[Path, Path], None]:
    def change(root: Path, outside: Path) -> None:
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target.replace("OUTSIDE", str(outside)))

    return _edited(change)


def _safetensors(header: bytes, data: bytes = b"") -> Callable[[Path, Path], None]:
    def make(root: Path, _: Path) -> None:
        root.mkdir()
        (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)

    return make


def _dcp(metadata: bytes) -> Callable[[Path, Path], None]:
    def make(root: Path, _: Path) -> None:
        root.mkdir()
        (root / ".metadata").write_bytes(metadata)
        (root / "__0_0.distcp").write_bytes(bytes(100))

    return make


def _touch(name: str) -> Callable[[Path, Path], None]:
    return _edited(lambda root, _: (root / TAG / name).touch())


def _text(name: str, text: str) -> Callable[[Path, Path], None]:
    return _edited(lambda root, _: _replace(root / name, text.encode()))


def _nested(root: Path, _: Path) -> None:
    inner: dict[str, object] = {"x": 1}
    for _n in range(8):
        inner = {f"{n}": inner for n in range(100)}
    damage.edit_model(root, lambda s: s.update(nested=inner))


def _endless(root: Path, _: Path) -> None:
    damage.edit_model(root, lambda s: s.update(dtype=damage.laughs()))


DIMENSIONS = json.dumps({"a": {"dtype": "F32", "shape": [2] * 200_000, "data_offsets": [0, 4]}}).encode()


def corpus() -> dict[str, Callable[[Path, Path], None]]:
    """What makes each checkpoint: called with the directory to make, and one outside of it that holds a secret."""
    found: dict[str, Callable[[Path, Path], None]] = {
        "companion is a link": _link("vocab.txt", "OUTSIDE/secret"),
        "latest is a link": _link("latest", "OUTSIDE/secret"),
        "directory is a link": _link(f"{TAG}/extra", "OUTSIDE"),
        "link to the root of the disk": _link(f"{TAG}/extra", "/"),
        "link to itself": _link(f"{TAG}/extra", "extra"),
        "link to a device": _link("config.json", "/dev/zero"),
        "manifest is a link": _link(f"{TAG}/{MANIFEST}", "OUTSIDE/secret"),
        "pipe": _edited(lambda root, _: os.mkfifo(root / TAG / "pipe")),
        "mark": _touch(MARK),
        "rank of ten digits": _touch("zero_pp_rank_9999999999_mp_rank_00_optim_states.pt"),
        "expert of ten digits": _touch("layer_0_expert_9999999999_mp_rank_00_model_states.pt"),
        "latest climbs": _text("latest", "../../../../etc"),
        "latest is long": _text("latest", "x" * 1_000_000),
        "latest drives a terminal": _text("latest", "\x1b]0;title\x07"),
        "manifest of another form": _text(f"{TAG}/{MANIFEST}", "[1]"),
        "manifest that nests": _text(f"{TAG}/{MANIFEST}", "[" * 100_000),
        "manifest that climbs": _text(f"{TAG}/{MANIFEST}", json.dumps({"format": 1, "files": {"../../x": {}}})),
        "name with escapes": _edited(lambda root, _: (root / f"{TAG}/\x1b[31m\n.pt").touch()),
        "client state nests": _edited(_nested),
        "value of endless repr": _edited(_endless),
        "dimensions": _safetensors(DIMENSIONS),
        "metadata": _safetensors(b'{"__metadata__":{"a":[]}}'),
        "header nests": _safetensors(b'{"a":' + b"[" * 100_000),
        "header is huge": _safetensors(b"{" + b" " * 1_000_000 + b'"a": {"dtype": "F32", "shape": [-1]}}'),
        "numbers": _safetensors(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}', bytes(4)),
        "dcp that runs a command": _attack("os.system", _dcp),
        "dcp of zeros": _dcp(bytes(1000)),
    }  # fmt: skip
    made = {name: partial(lambda key: greedy(3_000)[key], name) for name in greedy(1)}
    made |= {name: partial(values.__getitem__, name) for values in (lying_tensors(), bombs()) for name in values}
    for name, data in made.items():
        found[f"pickle: {name}"] = _later(data, _pickled)
        found[f"dcp: {name}"] = _later(data, _dcp)
    for name in list(attacks(""))[::4]:
        found[f"attack: {name}"] = _attack(name, _pickled)
    return found


if __name__ == "__main__":
    for number, (_, make) in enumerate(corpus().items()):
        make(Path(sys.argv[1]) / f"{number:03}", Path(sys.argv[1]))
