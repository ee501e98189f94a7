"""Missing parts of a checkpoint are named; several directories of one checkpoint are merged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats import open_checkpoint
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.damage import edit
from tests.truth import gather, source, tag_directory, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.model import Checkpoint

SPREAD = [
    "autoep-zero2-dp2-ep2-bf16",
    "autoep-zero3-dp2-ep2-bf16",
    "autotp-zero3-tp2-dp2-bf16",
    "megatron-zero1-tp2-dp2-bf16",
    "moe-zero0-dp2-ep2-bf16",
    "moe-zero2-dp4-ep2-bf16",
    "pipeline-zero0-pp2-dp2-bf16",
    "pipeline-zero1-pp2-dp2-bf16",
    "pipeline-zero1-pp2-tp2-bf16",
    "universal-megatron-zero1-tp2-dp2-bf16",
    "universal-zero2-dp2-bf16",
    "universal-zero3-dp2-bf16",
    "zero3-dp2-bf16-nvme",
]


def _tag(root: Path) -> Path:
    (latest,) = root.glob("latest*")
    return root / latest.read_text()


def _needless(name: str) -> set[str]:
    """Files of a universal checkpoint that hold over again what its model states hold."""
    held = truth(name)
    others = {*held.facts["frozen"], *held.facts["tied"], "positions", "seen", "mask"}
    return {f"zero/{n}/fp32.pt" for n in others} if held.universal else set()


@pytest.mark.parametrize("name", SPREAD)
def test_any_one_missing_file_is_named(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(name)
    every = sorted(p for p in _tag(root).rglob("*") if p.is_file())
    for path in sampling.some(every, 20, key=name):
        relative = str(path.relative_to(_tag(root)))
        path.rename(root / "aside")
        if relative in _needless(name):
            open_checkpoint(str(root))
        else:
            with pytest.raises(CkptError) as caught:
                open_checkpoint(str(root))
            # Without the only file of model states there is nothing to tell a checkpoint by; a tied layer has no
            # number; and a swapped master is only known by its parameters' file.
            known = path.name in str(caught.value)
            only = name.split("-")[0] in {"moe", "universal"} and path.name == "mp_rank_00_model_states.pt"
            tied = path.name.startswith("layer_00") and "tied_modules.embed.weight" in caught.value.problem
            swapped = path.suffix == ".swp" and "offloaded_tensors" in caught.value.problem
            assert known or only or tied or swapped, (relative, caught.value)
        (root / "aside").rename(path)
    open_checkpoint(str(root))


@pytest.mark.parametrize("name", ["megatron-zero1-tp2-dp2-bf16", "universal-megatron-zero1-tp2-dp2-bf16"])
def test_model_states_of_another_world_size_are_noticed(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(name)
    edit(_tag(root) / "mp_rank_00_model_states.pt", lambda states: states.update(mp_world_size=4))
    with refused(LayoutError):
        open_checkpoint(str(root))
    edit(_tag(root) / "mp_rank_00_model_states.pt", lambda states: states.update(mp_world_size=1))
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_ranks_of_another_data_parallel_size_are_noticed(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("autotp-zero1-tp2-dp2-bf16")
    other = Path(tag_directory("autotp-zero1-tp2-dp1-bf16-uneven"))
    for path in _tag(root).glob("*mp_rank_01*"):
        path.unlink()
    for path in other.glob("*mp_rank_01*"):
        shutil.copy(path, _tag(root))
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_layers_of_a_pipeline_cannot_all_be_missing(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("pipeline-zero1-pp2-dp2-bf16")
    for path in _tag(root).glob("layer_*"):
        path.unlink()
    with refused(LayoutError):
        open_checkpoint(str(root))


@pytest.mark.parametrize("name", ["pipeline-zero0-pp2-dp2-fp16", "pipeline-zero0-pp2-dp1-fp32"])
def test_a_layer_is_missed_by_its_shape_where_no_file_names_its_parameters(
    name: str, checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy(name)
    assert "no file records the number of layers: layers 0 to 4 are present" in open_checkpoint(str(root)).remarks
    for number in (0, 1):
        path = _tag(root) / f"layer_{number:02d}-model_states.pt"
        path.rename(root / "aside")
        with refused(LayoutError):
            open_checkpoint(str(root))
        (root / "aside").rename(path)


# ------------------------------------------------------------------------------------------------- several nodes


def _split(root: Path, second: Path, belongs: Callable[[Path], bool]) -> tuple[Path, Path]:
    """Move some files to where another node would have written them."""
    tag = second / _tag(root).name
    for path in [p for p in _tag(root).rglob("*") if p.is_file() and belongs(p)]:
        target = tag / path.relative_to(_tag(root))
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    shutil.copy(next(root.glob("latest*")), second)
    return root, second


def _assert_is_the_truth(checkpoint: Checkpoint, name: str) -> None:
    expected = truth(name).states
    assert {f"{key}/{owner}" for owner, key, _ in checkpoint.states()} == expected.keys()
    for owner, key, state in checkpoint.states():
        assert gather(checkpoint, state) == expected[f"{key}/{owner}"].tobytes()


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("zero2-dp4-bf16", lambda p: "zero_pp_rank_2" in p.name or "zero_pp_rank_3" in p.name),
        ("zero3-dp4-bf16", lambda p: "zero_pp_rank_2" in p.name or "zero_pp_rank_3" in p.name),
        ("zero3-dp4-bf16", lambda p: "zero_pp_rank_0" in p.name),
        ("zero3-dp2-bf16-nvme", lambda p: "rank_1" in p.name or p.parent.name == "rank01"),
        ("megatron-zero1-tp2-dp2-bf16", lambda p: "mp_rank_01" in p.name),
        ("pipeline-zero1-pp2-dp2-bf16", lambda p: "mp_rank_01" in p.name or "layer_03" in p.name),
        ("moe-zero2-dp4-ep2-bf16", lambda p: "expert_2" in p.name or "expert_3" in p.name),
    ],
)
def test_directories_of_several_nodes_are_one_checkpoint(
    name: str, belongs: Callable[[Path], bool], checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = _split(checkpoint_copy(name), tmp_path / "second", belongs)
    for order in ([first, second], [second, first]):
        checkpoint = open_checkpoint([str(p) for p in order])
        assert checkpoint.location == str(_tag(order[0]))
        assert {os.path.dirname(checkpoint.path(i)) for i in range(len(checkpoint.files))} >= {
            str(_tag(first)),
            str(_tag(second)),
        }
        _assert_is_the_truth(checkpoint, name)
    tags = [str(_tag(first)), str(_tag(second))]
    _assert_is_the_truth(open_checkpoint(tags), name)
    assert ckpttool.verify(tags, deep=True).findings == ()
    done = command("digest", first, "--part", second)
    assert (done.code, done.stdout) == (0, command("digest", source(name)).stdout)


def test_a_node_may_count_the_ranks_of_what_it_offloaded_from_0(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "zero3-dp2-bf16-nvme"
    first, second = _split(
        checkpoint_copy(name), tmp_path / "second", lambda p: "rank_1" in p.name or p.parent.name == "rank01"
    )
    (_tag(first) / "offloaded_tensors" / "rank01").rmdir()
    (_tag(second) / "offloaded_tensors" / "rank01").rename(_tag(second) / "offloaded_tensors" / "rank00")
    for order in ([first, second], [second, first]):
        _assert_is_the_truth(open_checkpoint([str(p) for p in order]), name)
    shutil.copytree(_tag(second) / "offloaded_tensors" / "rank00", _tag(second) / "offloaded_tensors" / "rank01")
    with refused(LayoutError):
        open_checkpoint([str(first), str(second)])


def test_directories_of_two_checkpoints_are_not_one() -> None:
    with refused(LayoutError):
        open_checkpoint([source("zero3-dp4-bf16"), source("zero2-dp2-bf16")])


@pytest.mark.parametrize("name", ["zero2-dp4-bf16", "zero3-dp4-bf16"])
def test_a_file_that_no_node_has_is_named(name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = _split(
        checkpoint_copy(name), tmp_path / "second", lambda p: "_rank_2" in p.name or "_rank_3" in p.name
    )
    gone = next(_tag(second).glob("*zero_pp_rank_3*optim*"))
    gone.unlink()
    with refused(LayoutError):
        open_checkpoint([str(first), str(second)])
    with refused(LayoutError):
        open_checkpoint(str(first))


def test_directories_of_two_tags_are_no_checkpoint(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = _split(checkpoint_copy("zero3-dp4-bf16"), tmp_path / "second", lambda p: "rank_3" in p.name)
    _tag(second).rename(second / "global_step4")
    (second / "latest").write_text("global_step4")
    with refused(LayoutError):
        open_checkpoint([str(first), str(second)])
    with refused(LayoutError):
        open_checkpoint([str(first), str(second)], tag="global_step3")


# ------------------------------------------------------------------------------------------------- stored twice


def _change(path: Path, at: int, *keys: Any) -> None:
    """Change one element of a tensor in a file that torch wrote."""
    file = torch.load(path, weights_only=False)
    value = file
    for key in keys:
        value = value[key]
    value.detach().view(-1)[at] += 1
    torch.save(file, path)


def _assert_found(root: Path, out: Path, what: str) -> None:
    findings = ckpttool.verify(root, deep=True).findings
    assert any(what in f.problem for f in findings), findings
    with pytest.raises(LayoutError, match=what):
        ckpttool.consolidate(root, out, to="safetensors")
    assert not out.exists()


def test_a_replica_that_differs_between_tensor_parallel_ranks_is_found(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("megatron-zero1-tp2-dp2-bf16")
    path = _tag(root) / "mp_rank_01_model_states.pt"
    assert ckpttool.verify(root, deep=True).findings == ()
    _change(path, 3, "module", "layers.0.norm.weight")
    _assert_found(root, tmp_path / "out", "layers.0.norm.weight")


def test_a_buffer_that_differs_between_tensor_parallel_ranks_is_found(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("megatron-zero1-tp2-dp2-bf16")
    _change(_tag(root) / "mp_rank_01_model_states.pt", 2, "module", "positions")
    _assert_found(root, tmp_path / "out", "positions")


def test_masters_of_a_replica_that_differ_between_tensor_parallel_ranks_are_found(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("autotp-zero3-tp2-dp2-bf16")
    checkpoint = open_checkpoint(str(root))
    norm = next(p for p in checkpoint.parameters if p.name == "model.norm.weight").states["exp_avg"]
    replica = next(t for t in checkpoint.replicas if t.name == "model.norm.weight" and t.state.shape == (norm.numel,))
    row = replica.copy.extents[0]
    path = Path(checkpoint.path(int(row["file"])))
    assert "mp_rank_01" in path.name
    data = bytearray(path.read_bytes())
    data[int(row["offset"])] ^= 1
    path.write_bytes(data)
    assert any("model.norm.weight" in f.problem for f in ckpttool.verify(root).findings)


def test_a_tied_layer_that_differs_between_pipeline_stages_is_found(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("pipeline-zero1-pp2-dp2-bf16")
    path = next(_tag(root).glob("*pp_rank_0_mp_rank_01_optim*"))
    _change(path, 5, "optimizer_state_dict", "single_partition_of_fp32_groups", 0)
    _assert_found(root, tmp_path / "out", "tied_modules.embed.weight")


def test_a_whole_matrix_of_muon_that_differs_between_its_ranks_is_found(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero1-dp2-bf16-muon")
    checkpoint = open_checkpoint(str(root))
    (replica,) = [t for t in checkpoint.replicas if t.state.dtype == t.copy.dtype == "BF16"]
    path = Path(checkpoint.path(int(replica.copy.extents["file"][0])))
    data = bytearray(path.read_bytes())
    data[int(replica.copy.extents["offset"][0]) + 10] ^= 1
    path.write_bytes(data)
    _assert_found(root, tmp_path / "out", replica.name)


# ------------------------------------------------------------------------------------------------- universal


def _state(root: Path, parameter: str, state: str = "fp32") -> Path:
    return _tag(root) / "zero" / parameter / f"{state}.pt"


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_state_is_named(kept: float, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("universal-zero3-dp2-bf16")
    path = _state(root, "up.weight", "exp_avg")
    size = path.stat().st_size
    os.truncate(path, int(kept * size))
    with refused(CkptError):
        open_checkpoint(str(root))


def test_a_parameter_without_its_folder_is_named(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("universal-zero2-dp2-bf16")
    shutil.rmtree(_state(root, "up.weight").parent)
    with refused(LayoutError):
        open_checkpoint(str(root))


@pytest.mark.parametrize("name", ["universal-zero2-dp2-bf16", "universal-zero3-dp2-bf16"])
def test_states_of_other_shapes_are_refused(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(name)
    shutil.copy(_state(root, "embed.weight", "exp_avg"), _state(root, "up.weight", "exp_avg"))
    with refused(LayoutError):
        open_checkpoint(str(root))


def test_a_shape_that_is_turned_round_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("universal-zero2-dp2-bf16")
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        edit(_state(root, "up.weight", key), lambda states: _turn(states))
    with refused(LayoutError):
        open_checkpoint(str(root))


def _turn(states: dict[str, Any]) -> None:
    import dataclasses

    ref = states["param"]
    states["param"] = dataclasses.replace(ref, shape=ref.shape[::-1], stride=(ref.shape[0], 1))


@pytest.mark.parametrize("called", ["a\nb", "x" * 250, "module", "..x", " ", "latest"])
def test_a_folder_of_any_name_is_a_parameter_or_an_error(called: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("universal-zero2-dp2-bf16")
    shutil.copytree(_state(root, "up.weight").parent, _tag(root) / "zero" / called)
    try:
        assert called in {p.name for p in open_checkpoint(str(root)).parameters}
    except CkptError as error:
        assert "zero" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "name",
    [
        "zero2-dp2-bf16",
        "zero1-dp2-fp16",
        "moe-zero1-dp2-ep2-bf16",
        "moe-zero2-dp2-ep2-bf16-pyramid",
        "pipeline-zero1-pp2-dp2-bf16",
    ],
)
def test_the_models_own_weights_are_written_without_the_optimizer(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    ckpttool.consolidate(root, tmp_path / "before", to="safetensors", weights_from="module")
    for file in root.rglob("*optim_states.pt"):
        file.unlink()
    with refused(LayoutError):
        ckpttool.consolidate(root, tmp_path / "after", to="safetensors")
    report = ckpttool.consolidate(root, tmp_path / "after", to="safetensors", weights_from="module")
    assert any("the files of the optimizer are missing" in note for note in report.notes)
    assert ckpttool.digest(tmp_path / "after").weights == ckpttool.digest(tmp_path / "before").weights
    with pytest.raises(LayoutError, match="holds no ZeRO optimizer files"):
        ckpttool.inspect(root)


@pytest.mark.parametrize("name", ["megatron-zero2-tp2-dp2-bf16", "pipeline-zero1-pp2-tp2-bf16", "zero3-dp2-bf16"])
def test_parts_of_a_model_are_not_written_without_the_optimizer(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    for file in root.rglob("*optim_states.pt"):
        file.unlink()
    with refused(LayoutError):
        ckpttool.consolidate(root, tmp_path / "after", to="safetensors", weights_from="module")


def test_a_layer_that_is_missing_beside_the_optimizer_is_named(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("pipeline-zero1-pp2-dp2-bf16")
    for file in [*root.rglob("*optim_states.pt"), *root.rglob("layer_03-*.pt")]:
        file.unlink()
    with pytest.raises(LayoutError, match=r"layer_03-model_states\.pt: is missing"):
        ckpttool.consolidate(root, root.parent / "out", to="safetensors", weights_from="module")
    assert not (root.parent / "out").exists()


def test_the_optimizer_of_one_stage_of_a_pipeline_is_missing(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("pipeline-zero1-pp2-dp2-bf16")
    for file in root.rglob("*_mp_rank_01_optim_states.pt"):
        file.unlink()
    with pytest.raises(LayoutError, match="other model-parallel ranks have theirs"):
        ckpttool.consolidate(root, root.parent / "out", to="safetensors", weights_from="module")


def test_consolidate_of_a_run_names_the_checkpoint(tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(source("zero2-dp2-bf16-trainer"), tmp_path / f"run/checkpoint-{step}")
    report = ckpttool.consolidate(tmp_path / "run", tmp_path / "out", to="safetensors")
    assert f"read from {tmp_path}/run/checkpoint-6/global_step3" in report.notes
    report = ckpttool.consolidate(tmp_path / "run/checkpoint-3", tmp_path / "one", to="safetensors")
    assert not any("read from" in note for note in report.notes)
