"""Ranks can share a GPU: collectives of its tensors go by way of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path


def test_collectives_by_way_of_the_host_do_what_gloo_does(tmp_path: Path) -> None:
    forked.start("tests.gpu.collectives", [], tmp_path)
    assert sorted(p.name for p in tmp_path.glob("done-*")) == ["done-0", "done-1"]
