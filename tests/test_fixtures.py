"""The bundled checkpoints are complete, described and small."""

from __future__ import annotations

import re

from tests.truth import HERE, NAMES, truth

MAX_BYTES = 15_000_000


def test_every_checkpoint_has_its_truth_and_a_row_in_the_table() -> None:
    assert sorted(p.stem for p in (HERE / "truth").iterdir()) == NAMES
    rows = re.findall(r"^\| `(.*?)` \| (\d) \| (\d) \| (\w+) \|", (HERE / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == NAMES
    for name, stage, ranks, dtype in rows:
        facts = truth(name).facts
        assert (facts["stage"], facts["world_size"], facts["dtype"]) == (int(stage), int(ranks), dtype)


def test_the_combinations_that_matter_are_there() -> None:
    bf16 = {f"zero{stage}-dp{ranks}-bf16" for stage in (1, 2, 3) for ranks in (1, 2, 4)}
    odd = {f"zero{stage}-dp3-bf16" for stage in (2, 3)}
    others = {f"zero{stage}-dp2-{dtype}" for stage in (1, 2, 3) for dtype in ("fp16", "fp32")}
    assert bf16 | odd | others <= set(NAMES)


def test_together_they_are_small() -> None:
    assert sum(p.stat().st_size for p in HERE.rglob("*") if p.is_file()) < MAX_BYTES


def test_the_shapes_are_awkward() -> None:
    tensors = truth("zero3-dp4-bf16").tensors
    shapes = {name.removeprefix("fp32/"): tuple(t.shape) for name, t in tensors.items() if name.startswith("fp32/")}
    assert shapes["scale"] == ()
    assert shapes["tiny"] == (3,)
    facts = truth("zero3-dp4-bf16").facts
    assert facts["tied"]
    assert facts["frozen"]
    assert len({g["lr"] for g in facts["groups"]}) == len({g["weight_decay"] for g in facts["groups"]}) == 2
