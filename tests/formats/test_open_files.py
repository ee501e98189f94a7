"""Names recorded in files: archives without a name, and trusted names."""

from __future__ import annotations

import io
import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError
from tests import damage
from tests.cli.command import ckpttool as command
from tests.truth import HERE
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _without_name(path: Path) -> None:
    """Save a file anew as an object store's client does: through memory, so that torch calls the archive "archive"."""
    buffer = io.BytesIO()
    torch.save(torch.load(path, weights_only=False, map_location="cpu"), buffer)
    path.write_bytes(buffer.getvalue())


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", ["zero3-dp4-bf16", "zero2-dp2-bf16", "zero1-dp2-bf16-muon"])
def test_a_copy_of_another_ranks_file_is_refused_though_archives_have_no_name(
    name: str, checkpoint_copy: Callable[[str], Path]
) -> None:
    copy = checkpoint_copy(name)
    for path in damage.files_of(copy, "optim"):
        _without_name(path)
    assert ckpttool.digest(copy) == ckpttool.digest(HERE / "checkpoints" / name)
    shutil.copyfile(damage.optimizer_file(copy, 0), damage.optimizer_file(copy, 1))
    path = damage.optimizer_file(copy, 1)
    for read in (ckpttool.digest, ckpttool.load_state_dict):
        with pytest.raises(CkptError) as caught:
            read(copy)
        assert str(caught.value).startswith(str(path))


def test_a_copy_of_another_parameters_moments_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    copy = checkpoint_copy("universal-zero3-dp2-bf16")
    by_shape: dict[tuple[int, ...], list[Path]] = {}
    for path in sorted(copy.rglob("exp_avg.pt")):
        value = torch.load(path, weights_only=False)
        tensor = value["param"] if isinstance(value, dict) else value
        by_shape.setdefault(tuple(tensor.shape), []).append(path)
    first, second = next(paths for paths in by_shape.values() if len(paths) > 1)[:2]
    _without_name(second)
    ckpttool.inspect(copy)
    shutil.copyfile(first, second)
    with refused(CkptError):
        ckpttool.inspect(copy)


def test_names_are_trusted_where_the_user_says_so(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    """The files of one rank renamed as another's, on purpose: read by their names, and told."""
    copy = checkpoint_copy("zero3-dp4-bf16")
    one, two = damage.optimizer_file(copy, 1), damage.optimizer_file(copy, 2)
    right = {name: tensor.clone() for name, tensor in ckpttool.load_state_dict(copy).items()}
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    for arguments in (["inspect", copy], ["consolidate", copy, tmp_path / "out", "--to", "safetensors"]):
        refused = command(*arguments)
        assert refused.code == 3
        assert "were renamed or swapped" in refused.stderr
        assert "--trust-names" in refused.stderr
        trusted = command(*arguments, "--trust-names", "--json")
        assert trusted.code == 0, trusted.stderr
        told = json.loads(trusted.stdout)
        told = [*told["notes"], *told.get("remarks", ())]
        assert [line for line in told if line.startswith("2 files were saved under other names")]
    swapped = ckpttool.load_state_dict(copy, trust_names=True)
    assert {n: t.shape for n, t in swapped.items()} == {n: t.shape for n, t in right.items()}
    assert any(not torch.equal(swapped[n], right[n]) for n in right)
