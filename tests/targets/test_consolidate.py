"""Consolidated weights equal the state of the live engine, and load with the usual libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

import ckpttool
from ckpttool.errors import CkptError, LayoutError, PlanError
from tests import damage, sampling
from tests.truth import NAMES, REPRESENTATIVE, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _load(out: Path, to: str) -> dict[str, torch.Tensor]:
    """All tensors of all files, each file through its own library; a name in two files is an error."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors" if to == "safetensors" else "*.bin")):
        loaded = load_file(path) if to == "safetensors" else torch.load(path, weights_only=True, mmap=True)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def _assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name


FORMS = [(to, dtype) for to in ("safetensors", "torch") for dtype in DTYPES]


@pytest.mark.parametrize(
    ("name", "to", "dtype"),
    [
        *((n, *form) for n in NAMES for form in sampling.some(FORMS, 1, key=n)),
        # Forms differ only in what is done with extents, of which these have every kind.
        *((n, *form) for n in REPRESENTATIVE for form in FORMS if form not in sampling.some(FORMS, 1, key=n)),
    ],
)
def test_weights_equal_the_engines(name: str, to: Any, dtype: Any, tmp_path: Path) -> None:
    report = ckpttool.consolidate(source(name), str(tmp_path / "out"), to=to, dtype=dtype)
    expected = truth(name).state_dict(DTYPES[dtype])
    tied = truth(name).tied
    assert report.tied == tied
    assert report.tensors == len(expected)
    if to == "torch":
        expected |= {alias: expected[stored] for alias, stored in tied.items()}
    _assert_same(_load(tmp_path / "out", to), expected)
    assert {f.name: f.nbytes for f in report.written.files} == {
        p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()
    }


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("name", ["zero2-dp3-bf16", "zero3-dp4-bf16"])
def test_shards_together_hold_every_weight_and_the_index_tells_where(name: str, to: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = ckpttool.consolidate(source(name), str(out), to=to, max_shard_size="4kB")
    expected = truth(name).state_dict(torch.float32)
    index_name = {"safetensors": "model.safetensors.index.json", "torch": "pytorch_model.bin.index.json"}[to]
    index = json.loads((out / index_name).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    if to == "torch":
        expected |= {alias: expected[stored] for alias, stored in truth(name).tied.items()}
    _assert_same(_load(out, to), expected)
    assert index["weight_map"].keys() == expected.keys()
    for tensor, file in index["weight_map"].items():
        held = load_file(out / file) if to == "safetensors" else torch.load(out / file, weights_only=True)
        assert tensor in held
    shards = [f for f in report.written.files if f.name != index_name]
    assert len(shards) > 1
    stem, extension = ("model", "safetensors") if to == "safetensors" else ("pytorch_model", "bin")
    names = [f"{stem}-{i:05d}-of-{len(shards):05d}.{extension}" for i in range(1, len(shards) + 1)]
    assert [f.name for f in shards] == names


def test_a_shard_that_fits_exactly_is_not_split(tmp_path: Path) -> None:
    total = ckpttool.consolidate(source("zero2-dp3-bf16"), str(tmp_path), to="safetensors", dry_run=True).elements
    held = sum(t.nbytes for t in truth("zero2-dp3-bf16").state_dict(torch.float32).values())
    assert total
    for limit, shards in ((held, 1), (held - 1, 2)):
        report = ckpttool.consolidate(
            source("zero2-dp3-bf16"), str(tmp_path), to="safetensors", max_shard_size=limit, dry_run=True
        )
        assert len([f for f in report.written.files if f.name.endswith("safetensors")]) == shards


def test_a_shard_is_beyond_the_limit_only_when_a_single_tensor_is(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero2-dp3-bf16"), str(tmp_path / "out"), to="safetensors", max_shard_size=3000)
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 3000


def test_a_tied_tensor_is_stored_once_in_a_torch_file(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero3-dp2-bf16"), str(tmp_path / "out"), to="torch")
    loaded = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


def test_safetensors_own_loader_ties_again_what_was_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc]  # mypy does not follow torch
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(61, 18)
            self.head = torch.nn.Linear(18, 61, bias=False)
            self.head.weight = self.embed.weight

    out = tmp_path / "out"
    ckpttool.consolidate(source("zero3-dp2-bf16"), str(out), to="safetensors", include=["embed.*", "head.*"])
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = Tied()
    missing, unexpected = load_model(model, out / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(model.head.weight, truth("zero3-dp2-bf16").tensors["fp32/embed.weight"])


@pytest.mark.parametrize("name", ["zero2-dp2-bf16-trainer", "zero3-dp2-bf16-trainer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_a_trainers_checkpoint_from_the_output_alone(name: str, dtype: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    report = ckpttool.consolidate(source(name), str(out), to="safetensors", dtype=dtype, max_shard_size="20kB")
    assert set(report.sidecars) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == DTYPES[dtype]
    expected = truth(name).state_dict(DTYPES[dtype])
    for parameter, value in model.named_parameters():
        assert torch.equal(value, expected[parameter]), parameter
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(out)) == 53


def test_the_configuration_names_the_type_that_was_written(tmp_path: Path) -> None:
    name = "zero2-dp2-bf16-trainer"
    for dtype, written in (("fp32", "float32"), ("bf16", "bfloat16")):
        ckpttool.consolidate(source(name), str(tmp_path / dtype), to="safetensors", dtype=dtype)  # type: ignore[arg-type]
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        original = json.loads((Path(source(name)) / "config.json").read_text())
        assert config == {**original, "dtype": written}


def _the_script_reads(name: str) -> bool:
    """Whether DeepSpeed's own script makes whole weights of a checkpoint.

    It knows one model-parallel rank, no experts, no file but the two kinds of ZeRO, one layout for a release, and what
    ``DeepSpeedZeroOptimizer`` writes, not ``BF16_Optimizer``; it cannot divide by the size of what is empty; and of a
    module that is registered several times under one parent it knows one name; and under ZenFlow it takes the
    older masters.
    """
    expected = truth(name)
    ranks = expected.topology
    spread = ranks.tensor_parallel > 1 or ranks.pipeline_parallel > 1 or "num_experts" in expected.facts
    odd = ("-legacy", "-nvme", "-grad-fp32", "-empty", "-mics", "-repeated", "-zenflow")
    return bool(expected.stage) and not spread and not any(o in name for o in odd) and expected.release >= (0, 14)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", [n for n in NAMES if _the_script_reads(n)])
def test_deepspeeds_own_script_agrees(name: str, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(source(name))
    ckpttool.consolidate(source(name), str(tmp_path / "out"), to="torch")
    ours = _load(tmp_path / "out", "torch")
    # The script leaves out frozen parameters at stage 1, and keeps them in 16 bit elsewhere.
    assert ours.keys() - theirs.keys() <= set(truth(name).facts["frozen"])
    for parameter, value in theirs.items():
        assert torch.equal(ours[parameter], value.to(ours[parameter].dtype)), parameter


@pytest.mark.parametrize("content", [b'{"model_type": "x"}', b"not json", b"[1]", b""])
def test_a_configuration_that_names_no_type_is_carried_as_it_is(
    content: bytes, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero1-dp1-bf16")
    (root / "config.json").write_bytes(content)
    ckpttool.consolidate(str(root), str(tmp_path / "out"), to="safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == content


def test_companions_are_carried_byte_for_byte_and_other_files_are_not(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero1-dp1-bf16")
    copied = {
        "tokenizer.model": b"\0\xff" * 5000,
        "merges.txt": b"",
        "modeling_x.py": b"raise SystemExit",
        "vocab.json": b"{}",
    }
    for name, data in {**copied, "zero_to_fp32.py": b"x", "optimizer.pt": b"x", "trainer_state.json": b"{}"}.items():
        (root / name).write_bytes(data)
    report = ckpttool.consolidate(str(root), str(tmp_path / "out"), to="torch")
    assert set(report.sidecars) == set(copied)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in copied} == copied
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*copied, "pytorch_model.bin"}


# ------------------------------------------------------------------------------------------------- choosing


def _names(out: Path) -> set[str]:
    return set(load_file(out / "model.safetensors"))


def test_include_and_exclude_choose_by_full_name(tmp_path: Path) -> None:
    ckpttool.consolidate(
        source("zero2-dp2-bf16"),
        str(tmp_path / "out"),
        to="safetensors",
        include=["*.weight"],
        exclude=["frozen*", "u*"],
    )
    assert _names(tmp_path / "out") == {"embed.weight", "down.weight", "norm.weight"}


def test_a_tied_name_asks_for_the_tensor_it_is_tied_to(tmp_path: Path) -> None:
    report = ckpttool.consolidate(source("zero3-dp2-bf16"), str(tmp_path / "out"), to="torch", include=["head.weight"])
    assert report.tied == {"head.weight": "embed.weight"}
    assert "head.weight" in _load(tmp_path / "out", "torch")


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero3-dp3-bf16"), str(tmp_path / "out"), to="safetensors", exclude_frozen=True)
    assert not any(name.startswith("frozen") for name in _names(tmp_path / "out"))


def test_nothing_left_to_write_is_an_error(tmp_path: Path) -> None:
    with refused(PlanError):
        ckpttool.consolidate(source("zero3-dp3-bf16"), str(tmp_path / "out"), to="safetensors", include=["nothing"])
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_the_same_and_writes_nothing(tmp_path: Path) -> None:
    def go(out: str, *, dry_run: bool) -> ckpttool.ConsolidateReport:
        return ckpttool.consolidate(
            source("zero3-dp3-bf16"), out, to="safetensors", max_shard_size=5000, dry_run=dry_run
        )

    dry = go(str(tmp_path / "out"), dry_run=True)
    assert not list(tmp_path.iterdir())
    real = go(str(tmp_path / "out"), dry_run=False)
    assert dry.written.files == real.written.files
    assert (dry.tensors, dry.elements) == (real.tensors, real.elements)
    assert dry.written.nbytes_read == real.written.nbytes_read
    assert dry.written.dry_run
    assert not real.written.dry_run


def test_values_too_large_for_fp16_are_counted(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy("zero3-dp1-bf16")
    path = next((root / "global_step3").glob("*optim_states.pt"))
    file = torch.load(path, weights_only=False)
    flat = file["optimizer_state_dict"]["fp32_flat_groups"][0]
    flat.detach()[5:8] = torch.tensor([1e6, -1e6, float("inf")])
    torch.save(file, path)
    report = ckpttool.consolidate(str(root), str(tmp_path / "out"), to="safetensors", dtype="fp16")
    assert report.written.overflowed == 2
    assert (
        ckpttool.consolidate(str(root), str(tmp_path / "bf16"), to="safetensors", dtype="bf16").written.overflowed == 0
    )


# ------------------------------------------------------------------------------------------------- proofs


def test_an_order_that_recorded_slices_contradict_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp4-bf16")
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"] = type(state["module"])((k, v.clone()) for k, v in state["module"].items())
    torch.save(state, path)
    damage.swap_equals(root)
    with refused(LayoutError):
        ckpttool.inspect(str(root))


@pytest.mark.parametrize("name", ["zero1-dp2-bf16", "zero2-dp2-fp16"])
def test_an_order_that_only_values_contradict_is_refused(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """Copies that were cloned one by one prove no order; their values still do."""
    root = checkpoint_copy(name)
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"] = type(state["module"])((k, v.clone()) for k, v in state["module"].items())
    torch.save(state, path)
    ckpttool.inspect(str(root))
    damage.swap_equals(root)
    with refused(LayoutError):
        ckpttool.consolidate(str(root), str(tmp_path / "out"), to="safetensors")
    assert not (tmp_path / "out").exists()
    problems = [f.problem for f in ckpttool.verify(str(root)).findings]
    assert len(problems) == 2
    assert all("copy of norm." in p for p in problems)


@pytest.mark.parametrize("at", [0, 255, -256, -1])
def test_a_changed_element_near_a_border_is_found_by_any_verification(
    at: int, checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["embed.weight"].view(-1)[at] += 1
    torch.save(state, path)
    (finding,) = ckpttool.verify(str(root)).findings
    assert "bf16 copy of embed.weight" in finding.problem


def test_one_changed_element_far_from_every_border_is_found_by_a_deep_verification(
    checkpoint_copy: Callable[[str], Path],
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["embed.weight"].view(-1)[549] += 1
    torch.save(state, path)
    assert not ckpttool.verify(str(root)).findings  # samples do not reach it
    (finding,) = ckpttool.verify(str(root), deep=True).findings
    assert "bf16 copy of embed.weight" in finding.problem


@pytest.mark.parametrize("name", sampling.some(NAMES, 66, key="sound"))
def test_every_bundled_checkpoint_is_sound_to_the_last_byte(name: str) -> None:
    report = ckpttool.verify(source(name), deep=True)
    assert report.findings == ()
    assert (report.records_checked > 0) == (name != "zero2-dp2-bf16-legacy")  # whose form has no checksums


def test_an_output_inside_a_missing_directory_is_made(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero1-dp1-bf16"), str(tmp_path / "a" / "b"), to="safetensors")
    assert _names(tmp_path / "a" / "b")


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with refused(CkptError):
        ckpttool.consolidate(source("zero1-dp1-bf16"), str(tmp_path / "out"), to="gguf")  # type: ignore[arg-type]
    shutil.rmtree(tmp_path)


# ------------------------------------------------------------------------------------------------- masters or copies


@pytest.mark.parametrize("name", ["zero1-dp2-bf16", "zero2-dp2-fp16"])
def test_a_model_changed_after_the_last_step_is_written_from_its_own_copies_when_asked(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    """Clamped or averaged weights: masters and copies differ, and only the user can know which count."""
    root = checkpoint_copy(name)
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["up.weight"].clamp_(-0.01, 0.01)
    torch.save(state, path)
    with refused(LayoutError):
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors")
    ckpttool.consolidate(root, tmp_path / "out", to="safetensors", weights_from="module")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["up.weight"], state["module"]["up.weight"].float())
    assert torch.equal(written["embed.weight"], truth(name).tensors["module/embed.weight"].float())


def test_stage_3_has_no_copies_to_write(tmp_path: Path) -> None:
    with refused(PlanError):
        ckpttool.consolidate(source("zero3-dp2-bf16"), tmp_path / "out", to="safetensors", weights_from="module")


def test_an_infinite_mask_is_no_finding_and_an_infinite_moment_is(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp1-bf16")
    model = next((root / "global_step3").glob("*model_states.pt"))
    state = torch.load(model, weights_only=False)
    state["module"]["positions"][3:] = float("-inf")
    torch.save(state, model)
    assert ckpttool.verify(root, deep=True).findings == ()
    optimizer = next((root / "global_step3").glob("*optim_states.pt"))
    file = torch.load(optimizer, weights_only=False)
    moments = file["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"]
    moments[4:6] = float("inf")
    moments[2] = float("nan")
    torch.save(file, optimizer)
    (finding,) = ckpttool.verify(root, deep=True).findings
    assert finding.path == str(optimizer)
    assert "exp_avg of embed.weight has 1 NaN and 2 infinite values" in finding.problem


def test_one_glob_may_be_given_as_it_is(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero3-dp2-bf16"), tmp_path / "out", to="safetensors", include="norm.*")
    assert _names(tmp_path / "out") == {"norm.weight", "norm.bias"}


def test_a_parameter_of_more_than_fp32_is_rounded_with_a_note(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}, source / "model.safetensors")
    report = ckpttool.consolidate(source, tmp_path / "out", to="safetensors")
    assert [note for note in report.notes if "fp64" in note] == ["rounded from fp64: a"]
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].dtype == torch.float32
    report = ckpttool.consolidate(source, tmp_path / "bf16", to="safetensors", dtype="bf16", include=["b"])
    assert not [note for note in report.notes if "fp64" in note]
