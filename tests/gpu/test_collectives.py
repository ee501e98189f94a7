"""Ranks can share a GPU: collectives of its tensors go through host memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_collectives_by_way_of_the_host_do_what_gloo_does(tmp_path: Path) -> None:
    forked.start("tests.gpu.collectives", [], tmp_path)
    assert sorted(p.name for p in tmp_path.glob("done-*")) == ["done-0", "done-1"]


@pytest.mark.deepspeed
def test_deepspeed_trains_by_way_of_the_host_as_it_does_without(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {
            "do": "probe", "device": "cpu", "backend": "gloo", "world_size": 2, "through_host": through,
            "directory": str(tmp_path / str(through)),
        }
        for through in (False, True)
    ]  # fmt: skip
    forked.start("tests.gpu.resumes", jobs, tmp_path)
    without, through = (json.loads((tmp_path / str(t) / "answer.json").read_text()) for t in (False, True))
    assert len(without["losses"]["stage 3"]) == 2
    assert through == without
