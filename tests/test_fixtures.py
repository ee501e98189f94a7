"""The bundled checkpoints are complete, described and small."""

from __future__ import annotations

import re

from tests.truth import HERE, NAMES, REFUSED, REPRESENTATIVE, source, truth

MAX_BYTES = 26_000_000


def test_every_checkpoint_has_its_truth_and_a_row_in_a_table() -> None:
    assert sorted(p.stem for p in (HERE / "truth").iterdir()) == sorted([*NAMES, *REFUSED])
    rows = re.findall(r"^\| `(.*?)` \| (\d) \| (\d) \| (\w+) \|", (HERE / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted([*NAMES, *REFUSED])
    for name, stage, ranks, dtype in rows:
        facts = truth(name).facts
        assert (facts["stage"], facts["world_size"], facts["dtype"]) == (int(stage), int(ranks), dtype), name


def test_the_combinations_that_matter_are_there() -> None:
    bf16 = {f"zero{stage}-dp{ranks}-bf16" for stage in (1, 2, 3) for ranks in (1, 2, 4)}
    odd = {f"zero{stage}-dp3-bf16" for stage in (2, 3)}
    others = {f"zero{stage}-dp2-{dtype}" for stage in (0, 1, 2, 3) for dtype in ("fp16", "fp32")}
    assert bf16 | odd | others | set(REPRESENTATIVE) <= set(NAMES)


def test_the_ranks_of_a_run_are_those_of_its_topology() -> None:
    for name in NAMES:
        ranks = truth(name).topology
        # Experts are shared by ranks that also share the data.
        parallel = ranks.data_parallel * ranks.tensor_parallel * ranks.pipeline_parallel
        copies = 2 if name.endswith("-mics") else 1
        assert parallel * copies == truth(name).facts["world_size"], name


def test_every_parameter_has_a_master_or_is_frozen() -> None:
    for name in NAMES:
        facts = truth(name).facts
        masters = {key.removeprefix("fp32/") for key in truth(name).arrays if key.startswith("fp32/")}
        assert masters | {*facts["frozen"], *facts.get("empty", ())} == set(facts["order"]), name


def test_nothing_of_the_truth_is_left_out_but_what_was_not_saved() -> None:
    """States that the readers are not asked for: of all checkpoints, only these, and for a reason each."""
    left_out: dict[str, set[str]] = {}
    for name in NAMES:
        expected = truth(name)
        held = {f"{k}/{expected.stored_name(n)}": k for k, n in (key.split("/", 1) for key in expected.arrays)}
        kinds = {held[key] for key in held.keys() - expected.states.keys()}
        for kind in kinds - {"adapter", "adapter_fp32"}:
            left_out.setdefault(kind, set()).add(name)
    assert left_out.pop("buffer") == {n for n in NAMES if n.startswith("universal-pipeline-zero1-pp2-dp2")}
    assert all(
        expected.facts["stage"] == 3
        or expected.universal
        or "averaged" in expected.facts
        or "-frozen" in n
        or "lora" in n
        for n in left_out.pop("module")
        for expected in [truth(n)]
    )
    for names in left_out.values():  # masters and moments
        assert names <= {"pipeline-zero0-pp2-dp1-fp32", "pipeline-zero0-pp2-dp2-fp16"}


def test_together_they_are_small() -> None:
    assert sum(p.stat().st_size for p in HERE.rglob("*") if p.is_file() and p.suffix != ".pyc") < MAX_BYTES


def test_one_source_and_one_tag_are_found_for_each() -> None:
    assert source("zero2-dp2-bf16-trainer").endswith("/checkpoint-3")
    assert len({source(name) for name in NAMES}) == len(NAMES)


def test_the_shapes_are_awkward() -> None:
    arrays = truth("zero3-dp4-bf16").arrays
    shapes = {name.removeprefix("fp32/"): a.shape for name, a in arrays.items() if name.startswith("fp32/")}
    assert shapes["scale"] == ()
    assert shapes["tiny"] == (3,)
    facts = truth("zero3-dp4-bf16").facts
    assert facts["tied"]
    assert facts["frozen"]
    assert len({g["lr"] for g in facts["groups"]}) == len({g["weight_decay"] for g in facts["groups"]}) == 2
