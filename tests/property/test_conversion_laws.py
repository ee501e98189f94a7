"""``inspect`` and ``verify --deep`` accept every output of ``convert``, for any source and target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError
from tests import sampling
from tests.truth import NAMES, source, truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TARGETS: list[dict[str, Any]] = [
    {"to": "zero", "stage": 1, "world_size": 3},
    {"to": "zero", "stage": 2, "world_size": 1},
    {"to": "zero", "stage": 2, "world_size": 2, "round_robin": True},
    {"to": "zero", "stage": 3, "world_size": 2},
    {"to": "zero", "stage": 3, "world_size": 4, "sub_group_size": 300},
    {"to": "universal"},
    {"to": "dcp"},
]


def _law(src: Path | str, out: Path, target: dict[str, Any]) -> bool:
    """Whether it was converted; if not, nothing may be left."""
    refused: CkptError | None = None
    try:
        ckpttool.convert(src, out, **target)
    except CkptError as error:
        refused = error
    if refused is not None:
        assert refused.problem
        assert refused.hint
        assert not out.exists()
        return False
    before, after = ckpttool.inspect(src), ckpttool.inspect(out)
    assert {p.name for p in after.parameters} | {b.name for b in after.buffers} == {
        *(p.name for p in before.parameters),
        *(b.name for b in before.buffers),
    }
    assert ckpttool.verify(out, deep=True).findings == ()
    return True


@pytest.mark.parametrize("name", sampling.swept(NAMES))
def test_our_output_is_accepted(name: str, tmp_path: Path) -> None:
    # Every target meets some of the fixtures, and each kind of fixture.
    first = NAMES.index(name)
    own = [TARGETS[(first + i) % len(TARGETS)] for i in (0, 2, 5)]
    written = [_law(source(name), tmp_path / str(i), target) for i, target in enumerate(own)]
    fixture = truth(name)
    assert any(written) or fixture.unassigned or fixture.elastic or fixture.facts.get("set_aside")


DTYPES = [
    torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.float32, torch.float64,
    torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", sampling.some(DTYPES, 3), ids=str)
@pytest.mark.parametrize("what", ["frozen parameter", "buffer"])
def test_other_types_are_written_or_refused(
    what: str, dtype: torch.dtype, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    (path,) = root.rglob("mp_rank_00_model_states.pt")
    file = torch.load(path, weights_only=False)
    name = "frozen_proj.weight" if what == "frozen parameter" else "positions"
    value = file["module"][name].float().mul(50).to(dtype)
    file["module"][name] = value
    if what == "frozen parameter":
        file["frozen_param_fragments"][name] = value
    torch.save(file, path)
    written = [_law(root, tmp_path / str(i), target) for i, target in enumerate(TARGETS)]
    assert any(written)
