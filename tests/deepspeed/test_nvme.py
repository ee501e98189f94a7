"""An engine that keeps its optimizer on NVMe: ``tests/versions/nvme.py`` has real ones, which need libaio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


@on_ranks(1)
def _refused(root: str) -> tuple[str, list[str]]:
    """Load into an engine that says that its optimizer is on NVMe; return the refusal, and what it changed."""
    import ckpttool
    from tests.deepspeed import engines

    engine = engines.build(3, "bf16", "one", "adamw")
    engines.step(engine, 2)
    ckpttool.CheckpointManager(root).save(engine)
    engines.step(engine, 1)
    before = engines.held(engine)
    engine.zero_nvme_offload_optimizer = lambda: True
    told = engines.refusal(lambda: ckpttool.load(engine, root))
    return told, engines.differing(before, engines.held(engine))


def test_a_load_into_an_optimizer_on_nvme_is_refused_before_the_engine_changes(tmp_path: Path) -> None:
    ((told, changed),) = _refused(str(tmp_path))
    assert told.startswith("the engine: keeps its optimizer on NVMe: a load by DeepSpeed ")
    assert told.endswith('; set "device" of offload_optimizer to "cpu"')
    assert changed == []
