"""Native ZeRO files for another number of ranks, inspected without DeepSpeed."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.zero.partitions import round_robin, undo_round_robin
from ckpttool.model import ScalarState
from ckpttool.targets.zero.layout import FlatGroup, Shape, SubGroup, sub_groups
from ckpttool.targets.zero.writer import plan_zero
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.truth import NAMES, source, tag_directory, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpttool.model import Checkpoint

REFUSED = {
    "ds0.3.16-zero3-dp2-fp16": "lists its parameters without their groups",
    "pipeline-zero0-pp2-dp1-fp32": "does not record the trained parameters",
    "pipeline-zero0-pp2-dp2-fp16": "does not record the trained parameters",
    **{n: "holds states that cannot be re-partitioned: group 0" for n in NAMES if "set_aside" in truth(n).facts},
} | dict.fromkeys((n for n in NAMES if truth(n).elastic), "holds no hyper-parameters (lr, betas, ...) of group 0")
CONVERTED = [n for n in NAMES if n not in REFUSED and not n.startswith(("moe", "autoep", "universal-autoep"))]


def _groups(checkpoint: Checkpoint) -> list[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    return [(sorted(g.parameters), dict(g.hyperparameters), dict(g.scalars)) for g in checkpoint.groups]


@pytest.mark.parametrize("name", sampling.some(CONVERTED, 18))
def test_nothing_changes_but_where_it_lies(name: str, tmp_path: Path) -> None:
    before = ckpttool.inspect(source(name))
    ranks = 1 + len(name) % 4
    stage = 1 + (len(name) // 4) % 3
    report = ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=ranks, stage=stage, prove=True)
    after = ckpttool.inspect(tmp_path / "out")
    assert (after.stage, after.topology.data_parallel, after.tag) == (stage, ranks, report.tag)
    assert not ckpttool.verify(tmp_path / "out", deep=True).findings
    assert _groups(after) == _groups(before)
    assert dict(after.aliases) == dict(before.aliases)
    assert [b.name for b in after.buffers] == [b.name for b in before.buffers]
    assert {p.name for p in after.parameters if p.frozen} == {p.name for p in before.parameters if p.frozen}
    assert (after.step, after.skipped_steps, after.scheduler) == (before.step, before.skipped_steps, before.scheduler)
    assert after.client_state == before.client_state
    assert after.dtype == before.dtype
    assert getattr(after.loss_scaler, "state", None) == getattr(
        before.loss_scaler, "state", getattr(after.loss_scaler, "state", None)
    )


@pytest.mark.parametrize("name", REFUSED)
def test_states_that_cannot_be_converted_are_noted(name: str, tmp_path: Path) -> None:
    error = command(
        "convert", source(name), tmp_path / "out", "--to", "zero", "--world-size", "2", "--stage", "1"
    ).error
    assert REFUSED[name] in error
    assert list(tmp_path.iterdir()) == []


def test_groups_without_hyper_parameters_are_noticed(checkpoint_copy: Callable[[str], Path]) -> None:
    """A run that loads such a checkpoint fails at its first step: earlier releases of ckpttool made them."""
    root = checkpoint_copy("zero2-dp2-bf16")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        base = file["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"] = [{"params": group["params"]} for group in base["param_groups"]]
        torch.save(file, path)
    (finding,) = ckpttool.verify(root).findings
    assert "group 0 has no hyper-parameters" in finding.problem


@pytest.mark.parametrize("stage", [2, 3])
def test_a_conversion_of_weights_alone_is_sound(stage: int, tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "weights", to="safetensors")
    report = ckpttool.convert(tmp_path / "weights", tmp_path / "out", to="zero", world_size=2, stage=stage)
    assert ckpttool.verify(tmp_path / "out", deep=True).findings == ()
    (remark,) = [r for r in ckpttool.inspect(tmp_path / "out").remarks if "load_module_only=True" in r]
    assert remark in report.notes


@pytest.mark.parametrize(
    "name", ["zero1-dp2-bf16", "zero2-dp2-bf16", "zero3-dp2-bf16", "zero0-dp2-fp32", "zero0-dp2-bf16"]
)
def test_a_state_of_one_element_that_all_ranks_have_alike_is_carried(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """As a step that an optimizer keeps in a tensor of shape (1,)."""
    root = checkpoint_copy(name)
    files = [*root.rglob("*optim_states.pt")] or [*root.rglob("mp_rank*")]
    for path in files:
        file = torch.load(path, weights_only=False)
        held = file.get("optimizer_state_dict") or file["optimizer"]
        for state in held.get("base_optimizer_state", held.get("optimizer_state_dict", held))["state"].values():
            state["tensor_step"] = torch.tensor([3], dtype=torch.int32)
        torch.save(file, path)
    before = ckpttool.inspect(root)
    assert not before.nonpartitionable
    assert {g.scalars["tensor_step"] for g in before.groups} == {ScalarState(3, "I32", (1,))}
    ckpttool.convert(root, tmp_path / "dcp", to="dcp", prove=True)
    for i, src in enumerate((root, tmp_path / "dcp")):
        for stage in (2, 3)[: 1 + (i == 0)]:
            out = tmp_path / f"{i}-{stage}"
            dtype: Any = truth(name).facts["dtype"] if i else None
            ckpttool.convert(src, out, to="zero", world_size=3, stage=stage, dtype=dtype, prove=True)
            assert {g.scalars["tensor_step"] for g in ckpttool.inspect(out).groups} == {ScalarState(3, "I32", (1,))}
            path = next(iter(sorted(out.rglob("*optim_states.pt"))))
            held = torch.load(path, weights_only=False)["optimizer_state_dict"]
            state = held.get("base_optimizer_state", held.get("optimizer_state_dict"))["state"][0]
            assert torch.equal(state["tensor_step"], torch.tensor([3], dtype=torch.int32))


@pytest.mark.parametrize("route", ["1", "2", "3", "universal,2", "dcp,1", "3,dcp,2"])
def test_hyper_parameters_that_are_tensors_stay_tensors(
    route: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a learning rate of another type the next steps give other masters."""
    src = checkpoint_copy("zero2-dp2-bf16")
    betas = (torch.tensor(0.9), torch.tensor(0.95, dtype=torch.float64))
    given = {"lr": torch.tensor(1e-2), "betas": betas, "warm": torch.tensor(7)}
    for path in (src / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        for group in file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group |= given
        torch.save(file, path)
    for i, to in enumerate(route.split(",")):
        out = tmp_path / str(i)
        if to in {"universal", "dcp"}:
            ckpttool.convert(src, out, to=to)  # type: ignore[arg-type]  # the same
        else:
            dtype: Any = "bf16" if "dcp" in route.split(",")[:i] else None
            ckpttool.convert(src, out, to="zero", world_size=2, stage=int(to), dtype=dtype)
        src = out
    assert ckpttool.inspect(src).groups[0].hyperparameters["lr"] == torch.tensor(1e-2).item()
    (first, *_) = sorted((src / "global_step3").glob("*optim_states.pt"))
    held = torch.load(first, weights_only=False)["optimizer_state_dict"]
    for group in held.get("optimizer_state_dict", held.get("base_optimizer_state"))["param_groups"]:
        kept = (group["lr"], *group["betas"], group["warm"])
        for ours, theirs in zip(kept, (given["lr"], *betas, given["warm"]), strict=True):
            assert isinstance(ours, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            assert (ours.dtype, ours.shape, ours.item()) == (theirs.dtype, theirs.shape, theirs.item())


EXPERTS = [n for n in NAMES if n.startswith(("moe", "autoep", "universal-autoep"))]


@pytest.mark.parametrize("name", sampling.some(EXPERTS, 3))
def test_experts_stay_spread_as_they_were(name: str, tmp_path: Path) -> None:
    before = ckpttool.inspect(source(name))
    for ranks, stage in ((2, 1), (6, 2), (4, 3)):
        if stage == 3 and name.startswith("moe"):
            continue
        out = tmp_path / str(stage)
        report = ckpttool.convert(source(name), out, to="zero", world_size=ranks, stage=stage, prove=True)
        after = ckpttool.inspect(out)
        assert (after.topology.data_parallel, after.topology.expert_parallel) == (ranks, 1 if name == SINGLE else 2)
        assert [g.parameters for g in after.groups] == [g.parameters for g in before.groups]
        assert {p.name for p in after.parameters} == {p.name for p in before.parameters}
        assert not ckpttool.verify(out, deep=True).findings
        assert f"expert-parallel size of {SPREAD.get(name, '2')}" in " ".join(report.notes)


SINGLE, PYRAMID = "moe-zero2-dp2-bf16", "moe-zero2-dp2-ep2-bf16-pyramid"
"""Where each rank has all experts, and where only the experts of one layer are spread over the ranks."""
SPREAD = {SINGLE: "1", PYRAMID: "1 and 2"}
"""The sizes in the note, where they are not 2."""


def test_experts_of_layers_over_different_ranks_are_not_spread_otherwise(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="spreads its experts over 1 and 2 ranks"):
        ckpttool.convert(source(PYRAMID), tmp_path / "out", to="zero", world_size=4, stage=1, expert_parallel=2)


@pytest.mark.parametrize("name", sampling.some([n for n in EXPERTS if n != PYRAMID], 3, key="spread"))
def test_experts_are_spread_as_asked_and_back_again(name: str, tmp_path: Path) -> None:
    own = ckpttool.inspect(source(name))
    was = own.groups[-1].hyperparameters["name"]
    src: Path | str = source(name)
    for i, parallel in enumerate((4, 1, 2, int(was.removeprefix("ep_size_")))):
        out = tmp_path / str(i)
        ckpttool.convert(src, out, to="zero", world_size=4, stage=1, expert_parallel=parallel, prove=True)
        held = ckpttool.inspect(out)
        assert held.topology.expert_parallel == parallel
        assert held.groups[-1].hyperparameters["name"] == f"ep_size_{parallel}"
        assert ckpttool.digest(out) == ckpttool.digest(source(name))
        src = out
    assert [g.parameters for g in held.groups] == [g.parameters for g in own.groups]


def test_experts_in_a_custom_order_keep_their_expert_parallel_size(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = checkpoint_copy("moe-zero2-dp2-bf16")
    checkpoint = ckpttool.inspect(copy)
    groups = [dataclasses.replace(g, parameters=g.parameters[::-1]) for g in checkpoint.groups]
    backwards = dataclasses.replace(checkpoint, groups=tuple(groups))
    plan_zero(backwards, Shape(2, 1, 10**9, False, "BF16"), tag="tag")
    with refused(PlanError):
        plan_zero(backwards, Shape(2, 1, 10**9, False, "BF16", expert_parallel=2), tag="tag")


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("moe-zero2-dp2-bf16", 3),
        ("autoep-zero2-dp2-ep2-bf16", 6),
        ("moe-zero2-dp2-bf16", 4),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(name: str, parallel: int, tmp_path: Path) -> None:
    with refused(PlanError):
        ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=6, stage=1, expert_parallel=parallel)


def test_a_missing_expert_is_reported() -> None:
    checkpoint = ckpttool.inspect(source("moe-zero2-dp2-bf16"))
    name = "first.deepspeed_moe.experts.deepspeed_experts.1."
    kept = tuple(p for p in checkpoint.parameters if not p.name.startswith(name))
    groups = [
        dataclasses.replace(g, parameters=tuple(n for n in g.parameters if not n.startswith(name)))
        for g in checkpoint.groups
    ]
    partial = dataclasses.replace(checkpoint, parameters=kept, groups=tuple(groups), replicas=())
    with refused(PlanError):
        plan_zero(partial, Shape(2, 1, 10**9, False, "BF16"), tag="tag")


@pytest.mark.parametrize("name", ["moe-zero2-dp4-ep2-bf16", "autoep-zero2-dp2-ep2-bf16"])
def test_experts_have_the_files_that_deepspeed_gives_them(name: str, tmp_path: Path) -> None:
    """The very same, on as many ranks as the source had."""
    own = ckpttool.inspect(source(name))
    ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=own.topology.data_parallel, prove=True)
    for file in own.files:
        before, after = (
            torch.load(f"{tag}/{file.name}", weights_only=False)
            for tag in (tag_directory(name), tmp_path / "out" / own.tag)
        )
        if file.kind == "expert":
            assert list(after) == list(before)
            assert all(torch.equal(after[key], before[key]) for key in before)
            assert all(after[key].dtype == before[key].dtype for key in before)
        elif file.kind == "optimizer":
            for key in ("partition_count", "group_paddings"):
                assert after["optimizer_state_dict"][key] == before["optimizer_state_dict"][key]
        else:
            assert after["module"].keys() == before["module"].keys()
            assert after["param_shapes"] == before["param_shapes"]
            assert after["num_experts"] == before["num_experts"]
            for ours, theirs in zip(after["ds_autoep_layers"] or [], before["ds_autoep_layers"] or [], strict=True):
                assert ours == {key: value for key, value in theirs.items() if key != "affine_maps"}


def test_stage_3_records_the_ranks_of_the_experts(tmp_path: Path) -> None:
    name = "autoep-zero3-dp4-ep2-bf16"
    ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=4, prove=True)
    for rank in range(4):
        for kind, inner, key in (
            ("bf16_zero_pp_rank_{}_mp_rank_00_optim", "optimizer_state_dict", "ds_zero_partition_groups"),
            ("zero_pp_rank_{}_mp_rank_00_model", None, "ds_autoep_layers"),
        ):
            file = f"{kind.format(rank)}_states.pt"
            before, after = (
                torch.load(f"{tag}/{file}", weights_only=False)
                for tag in (tag_directory(name), tmp_path / "out" / "global_step3")
            )
            before, after = (before[inner], after[inner]) if inner else (before, after)
            if inner is None:
                for layer in before[key]:
                    del layer["affine_maps"]
            assert after[key] == before[key]


@pytest.mark.parametrize(
    ("name", "ranks", "stage"),
    [
        ("moe-zero2-dp4-ep2-bf16", 3, 2),
        ("autoep-zero3-dp4-ep2-bf16", 1, 3),
        ("moe-zero2-dp2-bf16", 2, 3),
    ],
)
def test_experts_that_cannot_be_spread_so_are_refused(name: str, ranks: int, stage: int, tmp_path: Path) -> None:
    with refused(PlanError):
        ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=ranks, stage=stage)


def _tensors(path: Path | str) -> dict[str, Any]:
    """Every tensor of a rank's optimizer file, by where it is in it."""
    found: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}/{key}")
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                walk(item, f"{place}/{i}")

    walk(torch.load(path, weights_only=False)["optimizer_state_dict"], "")
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_there_and_back_gives_the_same_tensors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(
        st.sampled_from(
            ["zero1-dp4-bf16", "zero2-dp3-bf16", "zero2-dp2-fp16", "zero2-dp2-bf16-round-robin", "zero2-dp2-bf16-sgd"]
        )
    )
    ranks, stage = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 3]))
    root = tmp_path_factory.mktemp("there")
    own = ckpttool.inspect(source(name))
    ckpttool.convert(source(name), root / "there", to="zero", world_size=ranks, stage=stage)
    ckpttool.convert(root / "there", root / "back", to="zero", world_size=own.topology.data_parallel, stage=own.stage)
    for file in own.files:
        if file.kind == "optimizer":
            before, after = (
                _tensors(f"{tag_directory(name)}/{file.name}"),
                _tensors(root / "back" / own.tag / file.name),
            )
            assert before.keys() == after.keys()
            for place, tensor in before.items():
                assert torch.equal(after[place], tensor), place
                assert after[place].dtype == tensor.dtype


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero2-dp2-bf16-round-robin", "zero2-dp3-bf16"])
@pytest.mark.parametrize("chain", ["on,off", "off,on,off", "on,3,off", "off,universal,off", "on,universal,on,off"])
def test_the_order_of_the_parameters_survives_any_chain(name: str, chain: str, tmp_path: Path) -> None:
    """DeepSpeed loads flat buffers by position: their order is as good as the values."""
    own = [g.parameters for g in ckpttool.inspect(source(name)).groups]
    src = source(name)
    for i, step in enumerate(chain.split(",")):
        out = str(tmp_path / str(i))
        if step == "universal":
            ckpttool.convert(src, out, to="universal", prove=True)
        elif step == "3":
            ckpttool.convert(src, out, to="zero", world_size=3, stage=3, prove=True)
        else:
            ckpttool.convert(src, out, to="zero", world_size=2 + i, stage=2, round_robin=step == "on", prove=True)
        assert [g.parameters for g in ckpttool.inspect(out).groups] == own, step
        src = out
    last = torch.load(f"{src}/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    assert [tuple(shapes) for shapes in last["param_shapes"]] == own


FROM_DCP = ["zero2-dp2-bf16", "zero3-dp4-bf16", "zero2-dp2-bf16-sgd", "zero2-dp2-bf16-adagrad", "zero1-dp2-bf16-empty",
            "megatron-zero1-tp2-dp2-bf16", "pipeline-zero1-pp2-dp2-bf16", "zero2-dp2-bf16-round-robin",
            "moe-zero2-dp4-ep2-bf16", "zero2-dp2-bf16-trainer"]  # fmt: skip


@pytest.mark.parametrize("name", FROM_DCP)
def test_values_are_unchanged_after_dcp(name: str, tmp_path: Path) -> None:
    own = ckpttool.inspect(source(name))
    ckpttool.convert(source(name), tmp_path / "dcp", to="dcp", prove=True)
    report = ckpttool.convert(
        tmp_path / "dcp", tmp_path / "back", to="zero", world_size=2, stage=2, dtype="bf16", prove=True
    )
    back = ckpttool.inspect(tmp_path / "back")
    assert ckpttool.digest(tmp_path / "back") == ckpttool.digest(source(name))
    assert not ckpttool.diff(source(name), tmp_path / "back").different
    step = 3 if own.groups[0].scalars else 0  # which is all that tells
    assert (report.tag, back.step) == (f"global_step{step}", step)
    assert [g.parameters for g in back.groups] == [g.parameters for g in own.groups]
    for after, before in zip(back.groups, own.groups, strict=True):
        assert before.hyperparameters.items() <= after.hyperparameters.items()
        assert {k: v.value for k, v in after.scalars.items()} == {k: v.value for k, v in before.scalars.items()}
    assert any("load_lr_scheduler_states=False" in note for note in report.notes)


def test_facts_missing_in_dcp_are_requested(tmp_path: Path) -> None:
    ckpttool.convert(source("zero2-dp2-bf16"), tmp_path / "dcp", to="dcp")
    with refused(PlanError):
        ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="zero", world_size=2, stage=2)
    with refused(PlanError):
        ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="zero", world_size=2, stage=3, dtype="bf16")


def test_buffers_of_dcp_can_be_named(tmp_path: Path) -> None:
    name = "zero3-dp2-bf16"
    ckpttool.convert(source(name), tmp_path / "dcp", to="dcp")
    options: dict[str, Any] = {"to": "zero", "world_size": 3, "stage": 3, "dtype": "bf16"}
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", buffers=["pos*"], prove=True, **options)
    assert not ckpttool.diff(source(name), tmp_path / "out").different
    back, own = ckpttool.inspect(tmp_path / "out"), ckpttool.inspect(source(name))
    assert {b.name for b in back.buffers} == {b.name for b in own.buffers} == {"positions", "seen", "mask"}
    with refused(ArgumentError):
        ckpttool.convert(tmp_path / "dcp", tmp_path / "none", buffers=["nothing"], **options)
    with refused(ArgumentError):
        ckpttool.convert(source(name), tmp_path / "none", buffers=["mask"], **options)


def test_states_that_were_not_saved_are_not_required(tmp_path: Path) -> None:
    """An engine with frozen parameters looks each up where a mapping of them is there, even an empty one."""
    for stage, file in ((2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")):
        out = tmp_path / str(stage)
        ckpttool.convert(source("zero2-dp2-bf16-without-frozen"), out, to="zero", world_size=1, stage=stage)
        written = torch.load(out / "global_step3" / f"{file}_model_states.pt", weights_only=False)
        assert written["frozen_param_fragments"] is None
        assert written["global_samples"] == 12


@pytest.mark.parametrize(
    ("name", "said"),
    [("megatron-zero1-tp2-dp2-bf16", "embed.weight has 29 rows"), ("autotp-zero1-tp2-dp1-bf16-uneven", "")],
)
def test_a_vocabulary_without_its_padding_is_noted(name: str, said: str, tmp_path: Path) -> None:
    report = ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=2, stage=1, dry_run=True)
    notes = [note for note in report.notes if "vocabulary" in note]
    assert bool(notes) == bool(said)
    assert all(said in note for note in notes)


def test_padding_at_stage_3_is_zeros(tmp_path: Path) -> None:
    ckpttool.convert(source("zero3-dp2-bf16"), tmp_path / "out", to="zero", world_size=4)
    tiny = next(p for p in ckpttool.inspect(tmp_path / "out").parameters if p.name == "tiny").states["fp32"].extents
    last = tiny[-1]
    assert (int(last["numel"]), int(last["padding"])) == (0, 1)
    file = tmp_path / "out" / "global_step3" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    with file.open("rb") as opened:
        opened.seek(int(last["offset"]))
        assert opened.read(4) == b"\0\0\0\0"


def test_latest_is_written_last_and_names_the_tag(tmp_path: Path) -> None:
    ckpttool.convert(source("zero2-dp2-bf16"), tmp_path / "out", to="zero", world_size=3)
    assert (tmp_path / "out" / "latest").read_text() == "global_step3"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["global_step3", "latest"]


def test_sidecar_files_of_a_trainer_are_copied(tmp_path: Path) -> None:
    ckpttool.convert(source("zero2-dp2-bf16-trainer"), tmp_path / "out", to="zero", world_size=3)
    held = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "trainer_state.json", "latest", "global_step3"} <= held
    own = (tmp_path / "out" / "trainer_state.json").read_bytes()
    with open(f"{source('zero2-dp2-bf16-trainer')}/trainer_state.json", "rb") as file:
        assert own == file.read()


def _beside(out: Path) -> set[str]:
    return {p.name for p in out.iterdir() if not p.is_dir()}


@pytest.mark.parametrize("to", ["zero", "universal"])
def test_random_number_states_are_not_copied_but_named(to: Any, tmp_path: Path) -> None:
    ranks = 3 if to == "zero" else None
    report = ckpttool.convert(source("zero2-dp2-bf16-trainer"), tmp_path / "out", to=to, world_size=ranks)
    assert not {name for name in _beside(tmp_path / "out") if "rng" in name}
    assert [note for note in report.notes if "(rng_state_0.pth, rng_state_1.pth)" in note]
    assert "not copied: other files in the checkpoint's root (model.safetensors)" in report.notes
    assert {"scheduler.pt", "trainer_state.json"} <= _beside(tmp_path / "out")


def test_random_number_states_are_copied_for_the_same_number_of_ranks(tmp_path: Path) -> None:
    report = ckpttool.convert(source("zero2-dp2-bf16-trainer"), tmp_path / "out", to="zero", world_size=2, stage=3)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= _beside(tmp_path / "out")
    for name in ("rng_state_0.pth", "rng_state_1.pth"):
        with open(f"{source('zero2-dp2-bf16-trainer')}/{name}", "rb") as file:
            assert (tmp_path / "out" / name).read_bytes() == file.read()
    assert not [note for note in report.notes if "random" in note]


def test_files_of_accelerate_that_depend_on_ranks_are_noted(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = checkpoint_copy("zero2-dp2-bf16-accelerate")
    (copy / "dl_state_dict.bin").write_bytes(b"x")
    (copy / "random_states_1.pkl").write_bytes(b"x")
    other = ckpttool.convert(copy, tmp_path / "other", to="zero", world_size=4)
    assert _beside(tmp_path / "other") == {"latest", "scheduler.bin"}
    for words in ("(random_states_0.pkl, random_states_1.pkl)", "(dl_state_dict.bin)", "one step for each rank"):
        assert [note for note in other.notes if words in note], words
    same = ckpttool.convert(copy, tmp_path / "same", to="zero", world_size=2, stage=1)
    assert _beside(tmp_path / "same") == _beside(copy)
    assert not same.notes


def test_random_number_states_of_only_some_ranks_are_not_copied(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = next(checkpoint_copy("zero2-dp2-bf16-trainer").glob("checkpoint-*"))
    (copy / "rng_state_1.pth").unlink()
    report = ckpttool.convert(copy, tmp_path / "out", to="zero", world_size=2)
    assert [note for note in report.notes if "(rng_state_0.pth)" in note]
    assert "rng_state_0.pth" not in _beside(tmp_path / "out")


def test_a_dry_run_writes_nothing_and_says_what_it_would(tmp_path: Path) -> None:
    arguments = ["convert", source("zero2-dp2-bf16"), tmp_path / "out", "--to", "zero", "--world-size", "3", "--json"]
    planned = json.loads(command(*arguments, "--dry-run").stdout)["written"]
    assert list(tmp_path.iterdir()) == []
    done = json.loads(command(*arguments).stdout)["written"]
    of_the_run = {"dry_run", "seconds", "checks", "needs"}
    assert {k: v for k, v in planned.items() if k not in of_the_run} == {
        k: v for k, v in done.items() if k not in of_the_run
    }
    assert planned["checks"] is None
    assert done["nbytes_written"] == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert len(done["files"]) == 5


def test_plain_words_for_what_is_missing(tmp_path: Path) -> None:
    done = command("convert", source("zero2-dp2-bf16"), tmp_path / "out", "--to", "zero")
    assert done.code == 2
    assert "--to zero needs --world-size" in done.stderr
    error = command("convert", source("zero0-dp2-bf16"), tmp_path / "out", "--to", "zero", "--world-size", "2").error
    assert error.endswith("has no ZeRO stage; choose one with --stage")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 7))
def test_partitions_hold_every_element_once(sizes: list[int], ranks: int) -> None:
    named = {str(i): n for i, n in enumerate(sizes)}
    buffers: list[FlatGroup | SubGroup] = [FlatGroup(named, ranks), *sub_groups(named, ranks, 40)]
    for buffer in buffers:
        seen: dict[str, list[range]] = {}
        for held in buffer.fragments():
            end = 0
            for f in held:
                assert f.position >= end
                end = f.position + f.numel
                seen.setdefault(f.name, []).append(range(f.first, f.first + f.numel))
            assert end <= buffer.partition
        for name, numel in buffer.sizes.items():
            elements = sorted(e for r in seen.get(name, []) for e in r)
            assert elements == list(range(numel))
        if isinstance(buffer, FlatGroup):
            assert buffer.partition * ranks % (2 * ranks) == 0
            assert sum(buffer.padding(r) for r in range(ranks)) == buffer.partition * ranks - buffer.numel


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 7), st.integers(1, 60))
def test_sub_groups_keep_the_order_and_close_at_the_limit(sizes: list[int], ranks: int, limit: int) -> None:
    named = {str(i): n for i, n in enumerate(sizes)}
    subs = list(sub_groups(named, ranks, limit))
    assert [n for s in subs for n in s.sizes] == list(named)
    for sub in subs[:-1]:
        assert sub.partition >= limit
        *all_but_last, _ = sub.sizes.values()
        assert sum(-(-n // ranks) for n in all_but_last) < limit
    assert isinstance(subs[0], SubGroup)


@given(st.integers(1, 30), st.integers(1, 9))
def test_round_robin_is_undone(count: int, ranks: int) -> None:
    names = [str(i) for i in range(count)]
    assert undo_round_robin(round_robin(names, ranks), ranks) == names


def test_keys_of_the_client_state_that_are_no_text_are_kept(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """DeepSpeed merges the client state into its own dict, whatever the keys are."""
    client = {7: "seven", True: "yes", "1.5": 1, 1.5: "float", (1, 2): [3]}
    root = checkpoint_copy("zero2-dp2-bf16")
    (path,) = root.glob("global_step*/*model_states.pt")
    torch.save(torch.load(path, weights_only=False) | client, path)
    ckpttool.convert(root, tmp_path / "zero", to="zero", world_size=3)
    (made,) = (tmp_path / "zero").glob("global_step*/*model_states.pt")
    found = torch.load(made, weights_only=False)
    assert {key: found.get(key) for key in client} == client
    report = ckpttool.consolidate(root, tmp_path / "states", to="safetensors", optimizer=True)
    assert "not kept: 7 of the client state, which JSON cannot hold" in report.notes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["zero2-dp2-bf16-trainer", "zero3-dp2-bf16-trainer", "zero3-dp2-bf16-without-frozen"])
def test_an_output_excludes_frozen_parameters_as_its_source_does(name: str, stage: int, tmp_path: Path) -> None:
    ckpttool.convert(source(name), tmp_path / "out", to="zero", world_size=2, stage=stage)
    assert ckpttool.inspect(tmp_path / "out").excludes_frozen == name.endswith("without-frozen")
