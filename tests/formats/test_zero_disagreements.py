"""If two sources in a checkpoint disagree, reading stops and names them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import LayoutError
from ckpttool.formats import open_checkpoint
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[dict[str, Any]], None]

OPTIMIZER_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def _states(file: dict[str, Any]) -> Any:
    return file["optimizer_state_dict"]


def _shorten_master(file: dict[str, Any]) -> None:
    groups = _states(file)["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-1].clone()


def _lie_about_padding(file: dict[str, Any]) -> None:
    _states(file)["group_paddings"][1] = 2


def _other_step(file: dict[str, Any]) -> None:
    _states(file)["base_optimizer_state"]["state"][0]["step"] = torch.tensor(2.0)


def _other_learning_rate(file: dict[str, Any]) -> None:
    _states(file)["base_optimizer_state"]["param_groups"][1]["lr"] = 0.5


def _other_alignment(file: dict[str, Any]) -> None:
    _states(file)["param_alignment_paddings"][0][0] = 4


def _other_version(file: dict[str, Any]) -> None:
    file["ds_version"] = "0.18.0"


def _half_moments(file: dict[str, Any]) -> None:
    state = _states(file)["base_optimizer_state"]["state"][0]
    state["exp_avg"] = state["exp_avg"].half()


def _one_group_less(file: dict[str, Any]) -> None:
    del file["param_shapes"][1]


def _two_for_one_name(file: dict[str, Any]) -> None:
    file["param_shapes"][1]["embed.weight"] = torch.Size([2])


def _larger_shape(file: dict[str, Any]) -> None:
    file["param_shapes"][0]["up.weight"] = torch.Size([37, 19])


def _one_parameter_less(file: dict[str, Any]) -> None:
    del file["param_shapes"][0]["down.weight"]


def _other_world_size(file: dict[str, Any]) -> None:
    file["dp_world_size"] = 4


def _tie_two_trained(file: dict[str, Any]) -> None:
    file["shared_params"]["norm.bias"] = "norm.weight"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (OPTIMIZER_1, _shorten_master),
        (OPTIMIZER_1, _lie_about_padding),
        (OPTIMIZER_1, _other_step),
        (OPTIMIZER_1, _other_learning_rate),
        (OPTIMIZER_1, _other_alignment),
        (OPTIMIZER_1, _other_version),
        (OPTIMIZER_1, _half_moments),
        (MODEL, _one_group_less),
        (MODEL, _two_for_one_name),
        (MODEL, _larger_shape),
        (MODEL, _one_parameter_less),
        (MODEL, _other_world_size),
        (MODEL, _tie_two_trained),
    ],
)
def test_stage_2(file: str, change: Change, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    _edit(root / "global_step3" / file, change)
    with refused(LayoutError):
        open_checkpoint(str(root))
    assert ckpttool.verify(str(root)).findings


def _other_sub_group_step(file: dict[str, Any]) -> None:
    state = _states(file)["optimizer_state_dict"]["state"]
    state[1]["step"] = torch.tensor(2.0)


def _shorten_sub_group(file: dict[str, Any]) -> None:
    groups = _states(file)["fp32_flat_groups"]
    groups[1] = groups[1].detach()[:-1].clone()


def _empty_sub_group(file: dict[str, Any]) -> None:
    groups = _states(file)["fp32_flat_groups"]
    groups[1] = groups[1].detach()[:0].clone()


def _shorten_frozen(file: dict[str, Any]) -> None:
    fragments = file["frozen_param_fragments"]
    fragments["frozen_proj.bias"] = fragments["frozen_proj.bias"][:-1].clone()


def _other_frozen_type(file: dict[str, Any]) -> None:
    fragments = file["frozen_param_fragments"]
    fragments["frozen_proj.bias"] = fragments["frozen_proj.bias"].float()


def _no_frozen(file: dict[str, Any]) -> None:
    file["frozen_param_fragments"].clear()


def _other_order(file: dict[str, Any]) -> None:
    shapes = file["param_shapes"]
    shapes[0] = type(shapes[0])(reversed(shapes[0].items()))


def _other_global_step(file: dict[str, Any]) -> None:
    file["global_steps"] = 2


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (OPTIMIZER_1, _shorten_sub_group),
        (OPTIMIZER_1, _empty_sub_group),
        ("zero_pp_rank_1_" + MODEL, _shorten_frozen),
        ("zero_pp_rank_1_" + MODEL, _other_frozen_type),
        ("zero_pp_rank_1_" + MODEL, _no_frozen),
        ("zero_pp_rank_1_" + MODEL, _other_order),
        ("zero_pp_rank_1_" + MODEL, _other_global_step),
    ],
)
def test_stage_3(file: str, change: Change, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp2-bf16-sub-groups")
    _edit(root / "global_step3" / file, change)
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_sub_groups_of_one_group_that_took_different_steps_are_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp2-bf16-sub-groups")
    for path in (root / "global_step3").glob("*optim_states.pt"):
        _edit(path, _other_sub_group_step)
    with refused(LayoutError):
        open_checkpoint(str(root))


def _count_in_the_last(file: dict[str, Any], steps: tuple[float, float], *, in_groups: bool) -> None:
    """Let the last parameter of each group have another step than the others; FusedAdam has a step in its groups."""
    optimizer = file["optimizer"]
    for group in optimizer["param_groups"]:
        group.update({"step": 0} if in_groups else {})
        for number in group["params"]:
            last = number == group["params"][-1]
            optimizer["state"][number]["step"] = torch.tensor(steps[last])


@pytest.mark.parametrize("in_groups", [False, True], ids=["torch", "fused"])
def test_parameters_without_zero_count_their_own_steps(in_groups: bool, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero0-dp2-fp32")
    _edit(root / "global_step3" / MODEL, lambda file: _count_in_the_last(file, (1.0, 3.0), in_groups=in_groups))
    found = open_checkpoint(str(root))
    steps = [[found.numbers(p)["step"].value for p in found.parameters if p.group == g] for g in (0, 1)]
    if in_groups:
        assert {*steps[0], *steps[1]} == {3.0}
        assert found.of_one_layout == ()
    else:
        assert [sorted(own) for own in steps] == [[1.0] * (len(own) - 1) + [3.0] for own in steps]
        assert found.of_one_layout == tuple(f"group {g}: step, which differs among its parameters" for g in (0, 1))


def _rms(file: dict[str, Any], rank: int) -> None:
    for state in _states(file)["base_optimizer_state"]["state"].values():
        state["RMS"] = 0.25 + rank


def test_a_number_that_each_rank_computes_is_no_damage(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    for rank, path in enumerate(sorted((root / "global_step3").glob("*optim_states.pt"))):
        _edit(path, partial(_rms, rank=rank))
    assert open_checkpoint(str(root)).nonpartitionable == ("group 0: RMS", "group 1: RMS")
    assert ckpttool.verify(root).findings == ()


def test_padding_that_no_alignment_explains_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    """As files of releases that recorded no paddings would look with a parameter missing at the end."""
    root = checkpoint_copy("zero2-dp2-bf16")
    _edit(root / "global_step3" / MODEL, lambda file: file["param_shapes"][1].pop("norm.bias"))
    for path in (root / "global_step3").glob("*optim_states.pt"):
        _edit(path, lambda file: _states(file).pop("param_alignment_paddings"))
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_frozen_weights_quantised_by_zero_are_refused_for_their_scale_is_lost(
    checkpoint_copy: Callable[[str], Path],
) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")

    def quantise(file: dict[str, Any]) -> None:
        fragments = file["frozen_param_fragments"]
        fragments["frozen_proj.bias"] = fragments["frozen_proj.bias"].to(torch.int8)

    for path in (root / "global_step3").glob("*model_states.pt"):
        _edit(path, quantise)
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_moments_and_masters_know_their_own_padding(checkpoint_copy: Callable[[str], Path]) -> None:
    """DeepSpeed saves the masters of stages 1 and 2 without the padding at the end, and the moments with it."""
    checkpoint = open_checkpoint(str(checkpoint_copy("zero2-dp2-bf16")))
    last = next(p for p in checkpoint.parameters if p.name == "norm.bias")
    assert {key: int(last.states[key].extents["padding"][-1]) for key in ("fp32", "exp_avg")} == {
        "fp32": 0,
        "exp_avg": 3,
    }


def test_a_rank_whose_place_among_the_experts_is_another_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("autoep-zero3-dp2-ep2-bf16")

    def move(file: dict[str, Any]) -> None:
        for entry in file["optimizer_state_dict"]["ds_zero_partition_groups"]:
            if len(entry["partition_ranks"]) > 1:
                entry["partition_rank"] = 1 - entry["partition_rank"]

    _edit(next(root.rglob("*rank_0*optim_states.pt")), move)
    with refused(LayoutError):
        open_checkpoint(str(root))


def _edit(path: Path, change: Change) -> None:
    file = torch.load(path, weights_only=False)
    change(file)
    torch.save(file, path)


def test_a_scheduler_of_another_step_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    """The loop of Ray's page counts no steps of the engine: its scheduler alone tells that two saves are mixed."""
    root = checkpoint_copy("zero3-dp2-bf16")
    path = root / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["lr_scheduler"]["last_batch_iteration"] -= 1
    torch.save(state, path)
    with refused(LayoutError):
        open_checkpoint(str(root))
