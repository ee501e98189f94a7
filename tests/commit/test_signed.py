"""Saves that release 0.1.0 signed are read, copied and restored like others; nothing compares their signatures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.commit.manifest import read_manifest
from ckpttool.errors import LayoutError
from ckpttool.formats import open_whole
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import HostPayload, PlainFile
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LATEST, LOCAL, MANIFEST
from tests.cli.command import EXTENSIONS_READING
from tests.cli.command import ckpttool as command
from tests.saving.checkpoints import OF_SIGNATURE, sign, version
from tests.truth import source, tag_directory
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

BUNDLED = "zero2-dp2-bf16-sgd"
SIGNED = Path(__file__).with_name("signed.json")
"""The manifest that release 0.1.0 wrote for the files of this checkpoint, with ``sign_key``."""


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """The root of a signed save."""
    root = tmp_path / "root"
    shutil.copytree(tag_directory(BUNDLED), root / "global_step3")
    shutil.copyfile(SIGNED, root / "global_step3" / MANIFEST)
    (root / LATEST).write_text("global_step3")
    return root


def test_a_signed_save_is_read_and_compared(signed: Path) -> None:
    manifest = read_manifest(LOCAL, str(signed / "global_step3"))
    assert (manifest.tag, manifest.step, manifest.files.keys()) == ("global_step3", 3, version(0).keys())
    open_whole(LOCAL, str(signed / "global_step3"), committed=True)
    report = ckpttool.verify(signed, deep=True)
    assert (report.findings, report.records_checked, report.records_unrecorded) == ((), 3, 0)
    assert ckpttool.digest(signed) == ckpttool.digest(source(BUNDLED))
    assert [(entry.whole, entry.committed) for entry in ckpttool.ls(signed).entries] == [(True, True)]


READING: list[Sequence[str]] = [
    ("inspect",), ("verify",), ("digest",), ("ls",), ("diff", "OTHER"), ("extract", "head.weight", "OUT.npy"),
    *((name,) for name in EXTENSIONS_READING),
]  # fmt: skip
WRITING: list[Sequence[str]] = [
    ("consolidate", "OUT", "--to", "safetensors"), ("convert", "OUT", "--to", "dcp"),
    ("convert", "OUT", "--to", "zero", "--world-size", "1"), ("convert", "OUT", "--to", "universal"), ("cp", "OUT"),
]  # fmt: skip


@pytest.mark.parametrize("given", [*READING, *WRITING], ids=" ".join)
def test_every_command_takes_a_signed_save(given: Sequence[str], signed: Path, tmp_path: Path) -> None:
    places = {"OTHER": source(BUNDLED), "OUT": str(tmp_path / "out"), "OUT.npy": str(tmp_path / "out.npy")}
    name, *arguments = (places.get(one, one) for one in given)
    done = command(name, signed, *arguments)
    assert done.code == 0, done


def test_a_copy_has_the_bytes_of_the_manifest(signed: Path, tmp_path: Path) -> None:
    ckpttool.cp(signed, tmp_path / "copy")
    assert (tmp_path / "copy" / "global_step3" / MANIFEST).read_bytes() == SIGNED.read_bytes()


def test_the_copy_of_one_of_several_engines_has_no_signature(tmp_path: Path) -> None:
    files = {f"{name}/{path}": data for name in ("a", "b") for path, data in version(0).items()}
    engine: dict[str, Any] = {"step": 1, "stage": 2, "groups": [], "optimizer": "", "batch": {}}
    request = Request("t", 1, 2, engines={"a": engine, "b": engine})
    save(LOCAL, str(tmp_path), Alone(), request, [PlainFile(name, HostPayload(data)) for name, data in files.items()])
    sign(tmp_path / "t")
    report = ckpttool.cp(tmp_path / "t" / "a", tmp_path / "copy")
    (path,) = (tmp_path / "copy").rglob(MANIFEST)
    assert not any(field in path.read_text() for field in OF_SIGNATURE)
    assert ckpttool.verify(path.parent, deep=True).findings == ()
    assert not any("signature" in note for note in report.notes)


def test_a_signed_save_is_restored_and_followed_by_others(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="a restore needs torch")
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    ckpttool.CheckpointManager(tmp_path).save(model, optimizer=False, step=1)
    sign(tmp_path / "step-1")
    manager = ckpttool.CheckpointManager(tmp_path)
    manager.restore(other, optimizer=False, require_committed=True)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    manager.save(other, optimizer=False, step=2)
    assert [read_manifest(LOCAL, str(tmp_path / f"step-{n}")).number for n in (1, 2)] == [1, 2]


def test_a_changed_signature_is_damage_of_the_manifest(signed: Path) -> None:
    path = signed / "global_step3" / MANIFEST
    found = json.loads(path.read_text())
    found["hmac_sha256"] = found["hmac_sha256"][::-1]
    path.write_text(json.dumps(found))
    with refused(LayoutError):
        read_manifest(LOCAL, str(signed / "global_step3"))
