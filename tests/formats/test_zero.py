"""Layouts of ZeRO checkpoints: padding, sub-groups, and files that were changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import LayoutError, PlanError
from ckpttool.formats import LIVE_ORDER, in_order, open_checkpoint
from ckpttool.model import MASTER, MODULE, State
from ckpttool.model.names import ORDER
from ckpttool.model.places import Contiguous
from tests import damage
from tests.truth import gather, raw_bytes, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_padding_is_distinguished_from_elements_at_stage_3() -> None:
    checkpoint = open_checkpoint(source("zero3-dp4-bf16"))
    tiny = next(p for p in checkpoint.parameters if p.name == "tiny").states[MASTER].extents
    assert tiny["numel"].tolist() == [1, 1, 1, 0]
    assert tiny["padding"].tolist() == [0, 0, 0, 1]


def test_alignment_padding_is_distinguished_from_elements_at_stage_2() -> None:
    checkpoint = open_checkpoint(source("zero2-dp2-bf16-aligned"))
    embed = next(p for p in checkpoint.parameters if p.name == "embed.weight").states[MASTER].extents
    assert int(embed["padding"].sum()) == 6


def test_a_small_sub_group_size_makes_more_flat_buffers_and_the_same_groups() -> None:
    whole, cut = open_checkpoint(source("zero3-dp2-bf16")), open_checkpoint(source("zero3-dp2-bf16-sub-groups"))
    assert [g.parameters for g in cut.groups] == [g.parameters for g in whole.groups]
    model = torch.load(cut.path(2), weights_only=False)
    assert len(model["param_shapes"]) > len(cut.groups)


def test_the_round_robin_checkpoint_differs_in_its_recorded_order() -> None:
    """``param_slice_mappings`` puts parameters elsewhere: who follows it reads wrong weights."""
    checkpoint = open_checkpoint(source("zero2-dp2-bf16-round-robin"))
    file = torch.load(checkpoint.path(0), weights_only=False)["optimizer_state_dict"]
    mapped = {n: (a.start, a.numel) for m in file["param_slice_mappings"] for n, a in m.items()}
    ours = {}
    for parameter in checkpoint.parameters:
        for row in parameter.states[MASTER].extents if not parameter.frozen else []:
            if checkpoint.files[int(row["file"])].rank == 0:
                ours[parameter.name] = int(row["numel"])
    assert set(mapped) != set(ours)


@pytest.mark.parametrize("name", ["zero1-dp2-bf16", "zero2-dp4-bf16", "zero2-dp2-fp32"])
def test_an_order_that_the_storage_offsets_contradict_is_refused(
    name: str, checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy(name)
    damage.swap_equals(root)
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_states_before_the_first_step_are_only_the_masters(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        file["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
        torch.save(file, path)
    checkpoint = open_checkpoint(str(root))
    assert {key for p in checkpoint.parameters for key in p.states} == {MASTER, MODULE}
    assert checkpoint.groups[0].scalars == {}


def test_a_state_that_does_not_follow_the_partition_is_named_and_left_alone(
    checkpoint_copy: Callable[[str], Path],
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        state = file["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["momentum_buffer"] = torch.zeros(1568)
        torch.save(file, path)
    checkpoint = open_checkpoint(str(root))
    assert checkpoint.nonpartitionable == ("group 0: momentum_buffer",)
    assert "momentum_buffer" not in checkpoint.parameters[3].states


@pytest.mark.parametrize("name", ["zero0-dp2-fp32", "zero0-dp2-bf16", "zero2-dp2-bf16", "zero3-dp2-bf16"])
def test_a_state_of_no_parameter_is_named_and_neither_converted_nor_compared(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    for path in (root / "global_step3").glob("*_states.pt"):
        file = torch.load(path, weights_only=False)
        whole = file.get("optimizer_state_dict") or file.get("optimizer")
        if whole:
            base = whole.get("base_optimizer_state") or whole.get("optimizer_state_dict") or whole
            base["state"]["shared"] = {"d": 2.0}
            torch.save(file, path)
    assert open_checkpoint(str(root)).nonpartitionable == ("state 'shared'",)
    with refused(PlanError):
        ckpttool.convert(str(root), str(tmp_path / "out"), to="zero", world_size=3, stage=2)
    notes = ckpttool.diff(str(root), source(name), all=True).notes
    assert notes == ("states that belong to no parameter are not compared: state 'shared'",)


@pytest.mark.parametrize(
    "name", ["zero0-dp2-fp32", "zero0-dp2-bf16-unfused", "zero0-dp2-bf16", "moe-zero0-dp2-ep2-fp32"]
)
def test_without_zero_such_states_are_named_too(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """As 1-bit Adam's, which are padded for the number of ranks."""
    root = checkpoint_copy(name)
    before = open_checkpoint(str(root))
    changed = 0
    for path in [*root.rglob("mp_rank_00_model_states.pt"), *root.rglob("expp_rank_*")]:
        file = torch.load(path, weights_only=False)
        optimizer = file.get("optimizer") or {}
        for state in optimizer.get("optimizer_state_dict", optimizer).get("state", {}).values():
            state |= {"worker_error": torch.zeros(4096), "server_error": torch.zeros(2048)}
            changed += 1
        torch.save(file, path)
    assert changed
    checkpoint = open_checkpoint(str(root))
    numbers = range(len(before.groups))
    assert {*checkpoint.nonpartitionable} == {
        f"group {g}: {k}" for g in numbers for k in ("worker_error", "server_error")
    }
    assert [(p.name, [*p.states]) for p in checkpoint.parameters] == [(p.name, [*p.states]) for p in before.parameters]
    with refused(PlanError):
        ckpttool.convert(root, tmp_path / "zero", to="zero", world_size=2, stage=1)
    with refused(PlanError):
        ckpttool.convert(root, tmp_path / "universal", to="universal")
    assert not (tmp_path / "universal").exists()


@pytest.mark.parametrize(
    ("name", "kept", "notes"),
    [
        ("fp32-onebit-adam", {"worker_error", "server_error"}, [ORDER, "worker_error and server_error"]),
        ("fp16-onebit-lamb", {"lamb_coeff_freeze", "last_factor", "scaling_coeff"}, [ORDER]),
        ("fp16-zero-one-adam", {"worker_error", "server_error"}, ["worker_error and server_error", "0/1 Adam lets"]),
    ],
)
def test_optimizers_that_compress_keep_what_no_other_layout_can_hold(
    name: str, kept: set[str], notes: list[str], tmp_path: Path
) -> None:
    name = f"ds0.19.6-zero0-dp2-{name}"
    checkpoint = open_checkpoint(source(name))
    sizes = {"tensor_size", "corrected_tensor_size", "server_chunk_size"} & truth(name).facts["set_aside"].keys()
    set_aside = {text.partition(",")[0] for text in checkpoint.of_one_layout}
    assert set_aside == {f"group {g}: {key}" for g in (0, 1) for key in kept | sizes}
    assert truth(name).facts["set_aside"].keys() == kept | sizes
    assert len(checkpoint.remarks) == len(notes)
    assert all(remark.startswith(note) for remark, note in zip(checkpoint.remarks, notes, strict=True))
    with refused(PlanError):
        ckpttool.convert(source(name), tmp_path / "zero", to="zero", world_size=2, stage=1)


def test_systems_that_deepspeed_has_removed_are_named() -> None:
    checkpoint = open_checkpoint(source("ds0.19.6-zero2-dp2-fp32-removed"))
    (remark,) = checkpoint.remarks
    assert remark.startswith("the run used compression_training, progressive_layer_drop, curriculum_learning: beside")
    assert "up.row_pruning_mask" in {b.name for b in checkpoint.buffers}
    assert not open_checkpoint(source("zero2-dp2-bf16-data-efficiency")).remarks


def test_masters_kept_in_16_bit_are_taken_for_what_they_are(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        states = file["optimizer_state_dict"]
        key = "single_partition_of_fp32_groups"
        states[key] = [t.to(torch.bfloat16) for t in states[key]]
        torch.save(file, path)
    checkpoint = open_checkpoint(str(root))
    assert {p.states[MASTER].dtype for p in checkpoint.parameters if not p.frozen} == {"BF16"}


def test_tied_names_of_files_that_do_not_record_them_show_by_sharing_bytes(
    checkpoint_copy: Callable[[str], Path],
) -> None:
    root = checkpoint_copy("zero1-dp2-bf16")
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    del state["shared_params"]
    torch.save(state, path)
    assert dict(open_checkpoint(str(root)).aliases) == {"head.weight": "embed.weight"}


def _change_head(root: Path, head: torch.Tensor) -> None:
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["head.weight"] = head
    torch.save(state, path)


def test_a_tie_of_two_shapes_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero1-dp2-bf16")
    _change_head(root, torch.zeros(61, 17, dtype=torch.bfloat16))
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_a_tied_tensor_stored_twice_must_be_the_same_twice(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero1-dp2-bf16")
    embed = truth("zero1-dp2-bf16").tensors["module/embed.weight"]
    _change_head(root, embed.clone())
    assert "head.weight" in {t.name for t in open_checkpoint(str(root)).replicas}
    assert ckpttool.verify(str(root), deep=True).findings == ()
    _change_head(root, -embed)
    (finding,) = ckpttool.verify(str(root)).findings
    assert "bf16 copy of head.weight differs from its fp32 master" in finding.problem


def test_extents_that_leave_a_gap_are_no_checkpoint() -> None:
    sound = open_checkpoint(source("zero1-dp1-bf16"))
    broken = State((4,), "F32", Contiguous(3, 0, 0))
    parameter = replace(sound.parameters[0], states={MASTER: broken})
    with refused(LayoutError):
        replace(sound, parameters=(parameter,))


def test_extents_beyond_the_end_of_a_file_are_no_checkpoint() -> None:
    sound = open_checkpoint(source("zero1-dp1-bf16"))
    broken = State((4,), "F32", Contiguous(4, 0, sound.files[0].nbytes - 15))
    parameter = replace(sound.parameters[0], states={MASTER: broken})
    with refused(LayoutError):
        replace(sound, parameters=(parameter,))


def _edit_model(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in (root / "global_step3").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero3-dp2-bf16"])
def test_buffers_of_any_strides_are_read(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    buffers = {"t": whole.permute(2, 0, 1), "sliced": whole[1:, ::2, 1:4], "expanded": whole[0, 0, :1].expand(7)}

    def add(state: dict[str, Any]) -> None:
        state["module"].update(buffers)
        state["buffer_names"] += list(buffers)

    root = checkpoint_copy(name)
    _edit_model(root, add)
    checkpoint = open_checkpoint(str(root))
    for buffer in checkpoint.buffers:
        if buffer.name in buffers:
            assert gather(checkpoint, buffer.state) == raw_bytes(buffers[buffer.name])


@pytest.mark.parametrize("name", ["zero1-dp2-bf16", "zero2-dp2-bf16", "zero3-dp2-bf16"])
def test_other_tensors_keep_their_dtype(name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Scales of quantised layers and ``_extra_state`` stand in state dicts, too."""
    extra = {"up.weight.absmax": torch.tensor([1.2345678]), "up._extra_state": torch.tensor([1, 2], dtype=torch.uint8)}
    root = checkpoint_copy(name)
    _edit_model(root, lambda state: state["module"].update(extra))
    ckpttool.consolidate(root, tmp_path / "out", to="torch", dtype="bf16")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    for key, value in extra.items():
        assert written[key].dtype == value.dtype
        assert torch.equal(written[key], value)
    assert written["frozen_proj.weight"].dtype == torch.bfloat16


def test_frozen_and_tied_weights_that_were_left_out_are_remarked_on(checkpoint_copy: Callable[[str], Path]) -> None:
    """As ``exclude_frozen_parameters`` saves a LoRA run on a model with tied, frozen embeddings."""
    root = checkpoint_copy("zero2-dp2-bf16")

    def leave_out(state: dict[str, Any]) -> None:
        state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
        state["shared_params"] = {"lm.weight": "wte.weight"}
        for key in ("frozen_proj.weight", "frozen_proj.bias", "head.weight"):
            del state["module"][key]

    _edit_model(root, leave_out)
    checkpoint = open_checkpoint(str(root))
    assert not checkpoint.aliases
    assert not any(p.frozen for p in checkpoint.parameters)
    assert "exclude_frozen_parameters" in checkpoint.remarks[0]
    assert ckpttool.verify(root, deep=True).findings == ()
    assert open_checkpoint(source("zero2-dp2-bf16")).remarks == ()


def test_model_states_of_another_step_than_the_optimizers_are_noticed(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")
    _edit_model(root, lambda state: state.update(global_steps=5))
    (note,) = open_checkpoint(str(root)).notes
    assert "group 0 took 3.0 steps, but the model states are of step 5" in note.problem
    assert len(ckpttool.verify(root).findings) == 1


def test_an_engine_that_counts_no_steps_is_sound(checkpoint_copy: Callable[[str], Path]) -> None:
    """The script of Ray's page calls ``optimizer.step()``, and not ``engine.step()``."""
    root = checkpoint_copy("zero3-dp2-bf16")
    _edit_model(root, lambda state: state.update(global_steps=0))
    report = ckpttool.verify(root, deep=True)
    assert report.findings == ()
    assert (
        "the optimizer took 3 steps, and the engine counted none: the loop does not call engine.step()" in report.notes
    )


@pytest.mark.parametrize("key", ["fp32", "module", 7])
def test_an_optimizer_state_with_a_name_that_means_something_else_poses_as_nothing(
    key: Any, checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        file = torch.load(path, weights_only=False)
        state = file["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]
        state[key] = torch.full_like(state["exp_avg"], 7.0)
        torch.save(file, path)
    checkpoint = open_checkpoint(str(root))
    assert checkpoint.nonpartitionable == (f"sub-group 0: {key} (the optimizer's)",)
    embed = next(p for p in checkpoint.parameters if p.name == "embed.weight")
    assert gather(checkpoint, embed.states[MASTER]) == raw_bytes(truth("zero3-dp2-bf16").tensors["fp32/embed.weight"])
    assert set(embed.states) == {"fp32", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", ["pipeline-zero1-pp2-dp2-bf16", "pipeline-zero1-pp2-tp2-bf16"])
def test_the_layers_of_a_pipeline_are_files_of_their_stage(name: str) -> None:
    checkpoint = open_checkpoint(source(name))
    layers: dict[int, set[str]] = {}  # of each model-parallel rank, as DeepSpeed recorded its parameters
    for i, file in enumerate(checkpoint.files):
        if file.kind == "model" and file.model_rank is not None:
            shapes = torch.load(checkpoint.path(i), weights_only=False)["param_shapes"]
            layers[file.model_rank] = {n.partition(".")[0] for group in shapes for n in group}
    checked = 0
    for file in checkpoint.files:
        if file.kind == "layer":
            assert file.model_rank is not None
            number = str(int(file.name.removeprefix("layer_")[:2]))
            holders = [rank for rank, numbers in layers.items() if number in numbers] or [0, 1]  # 0 is the tied one
            assert file.model_rank in holders
            checked += 1
    assert checked >= 4


def test_numbered_parameters_are_read_again_in_a_given_order() -> None:
    """The remark of a reader that had to assume an order leads back to that reader."""
    checkpoint = open_checkpoint(source("zero0-dp2-fp32"))
    order = [name for group in checkpoint.groups for name in group.listed or group.parameters]
    assert in_order(replace(checkpoint, remarks=()), order).remarks == ()
    assert checkpoint.remarks == (ORDER,)
    assert in_order(checkpoint, order[1:]) is checkpoint  # does not fit
    found = in_order(checkpoint, order)
    assert found.remarks == ()  # the model and the optimizer agree
    assert [p.name for p in found.parameters] == [p.name for p in checkpoint.parameters]
    shapes = {p.name: p.shape for p in checkpoint.parameters if "exp_avg" in p.states}
    one, other = next((a, b) for a in shapes for b in shapes if a != b and shapes[a] == shapes[b])
    swapped = [{one: other, other: one}.get(name, name) for name in order]
    found = in_order(checkpoint, swapped)
    assert found.remarks == (LIVE_ORDER,)
    there, here = (
        {p.name: p.states["exp_avg"].place.rows.tolist() for p in c.parameters if "exp_avg" in p.states}
        for c in (found, checkpoint)
    )
    assert (there[one], there[other]) == (here[other], here[one])
