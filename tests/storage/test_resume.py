"""Live engines resume from a bucket, with no download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import ckpttool
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import StoredFile, VirtualFile
from ckpttool.formats import open_checkpoint
from ckpttool.storage import open_storage
from ckpttool.targets.zero.layout import Shape
from ckpttool.targets.zero.writer import plan_rank
from tests.deepspeed_engines import Load, load_all
from tests.storage.large import write_weights
from tests.truth import source, truth

if TYPE_CHECKING:
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

pytestmark = pytest.mark.deepspeed
SOURCE = "zero2-dp2-bf16"


@pytest.fixture
def url(s3: Bucket, proxy: Proxy) -> str:
    s3.upload(bundled(), "run")
    return s3.url("run")


def bundled() -> Path:
    return Path(source(SOURCE))


def test_an_engine_resumes_from_a_bucket(url: str, proxy: Proxy, tmp_path: Path) -> None:
    loads = [
        Load("native", url, 2, 2, resume={}),
        Load("other-stage", url, 3, 2, resume={}),
        Load("other-ranks", url, 1, 3, resume={}),
        Load("weights", url, 2, 1, resume={"weights_only": True}),
    ]
    loaded = load_all(loads)
    for load in loads:
        engine, expected = loaded[load.id], truth(SOURCE).tensors
        assert engine.error == ""
        wanted = {k: t for k, t in expected.items() if load.id != "weights" or not k.startswith("exp_avg")}
        assert [k for k, t in wanted.items() if not torch.equal(engine.tensors[k], t)] == []
        assert engine.facts["report"]["method"] == ("native" if load.id == "native" else "planned")
        assert engine.facts["step"] == ""
    assert {r.method for r in proxy.requests()} <= {"GET", "HEAD"}


def test_a_file_of_a_bucket_is_read_in_parts_that_are_asked_for_at_once(url: str, proxy: Proxy) -> None:
    with open_storage(url).open(f"{url}/global_step3/mp_rank_00_model_states.pt") as reader:
        proxy.clear()
        with StoredFile(reader, memory=1 << 20) as file:
            file._chunk_bytes = 1000
            whole = file.read()
    data = (bundled() / "global_step3" / "mp_rank_00_model_states.pt").read_bytes()
    assert whole == data
    asked = [r.range for r in proxy.requests() if r.range is not None]
    assert len(asked) == -(-len(data) // 1000)


def test_all_ranks_together_ask_for_everything_once(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    s3.upload(write_weights(tmp_path / "weights"), "weights")
    checkpoint = open_checkpoint(s3.url("weights"))
    shape = Shape(3, 2, 10**9, False, "F32")
    needed = sum(p.states["module"].nbytes for p in checkpoint.parameters)
    asked = []
    for rank in range(3):
        proxy.clear()
        plan = plan_rank(checkpoint, shape, rank, tag="t")
        with Sources(plan.sources) as sources, VirtualFile(plan, plan.files[0], sources, memory=64 << 20) as file:
            read = file.read()
        assert len(read) == plan.files[0].nbytes
        asked.append(sum(proxy.bytes_by_key().values()))
        assert proxy.most_in_flight("get_object") > 1
    assert max(asked) < needed / 3 * 1.1
    assert sum(asked) < needed * 1.1


def test_weights_of_a_bucket_are_a_state_dict(url: str) -> None:
    weights = ckpttool.load_state_dict(url, include=["up.*"])
    for key in ("up.weight", "up.bias"):
        assert torch.equal(weights[key], truth(SOURCE).tensors[f"fp32/{key}"])
