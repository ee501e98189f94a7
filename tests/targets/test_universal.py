"""Universal outputs: real engines of every stage load them bit for bit, and our reader reads them back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool import convert, inspect, verify
from ckpttool.analysis.digest import digest
from ckpttool.containers.values import StorageRef, TensorRef
from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.model import MASTER, MODULE
from ckpttool.targets.universal import plan_universal, universal_losses
from tests import sampling
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.execution.outputs import run_into
from tests.truth import NAMES, REPRESENTATIVE, source, tag_directory, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.model import Checkpoint, Parameter

CLIENT_STATE = {"epoch": 2, "note": "odd shapes", "losses": [1.5, 1.25], "nested": {"tokens": 36, "seen": [1, 2]}}
READ_BACK = sorted(
    {
        *REPRESENTATIVE,
        *(n for n in NAMES if n.endswith(("-sgd", "-adagrad", "-muon", "-empty", "-without-frozen", "-lora-trainer"))),
        "ds0.3.16-zero2-dp2-fp16",  # lists, no version
        "zero0-dp2-bf16",  # a step that is no tensor
        "zero0-dp2-fp16",  # a loss scaler that is a dictionary
        "zero1-dp2-bf16-grad-fp32",  # no loss scaler
        "zero3-dp2-bf16-sub-groups",
    }
)
TAG = "global_step3_universal"


def _write(checkpoint: Checkpoint, out: Path) -> Path:
    out.mkdir(parents=True)
    run_into(plan_universal(checkpoint, tag=TAG), str(out), jobs=None)
    return out


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


# ------------------------------------------------------------------------------------------------- real engines


@dataclass(frozen=True)
class Case:
    source: str
    """The bundled checkpoint that is converted."""
    stage: int
    world_size: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``Load``."""
    lost: str = ""
    """The optimizer's state that DeepSpeed does not load, or "everything"."""
    error: str = ""
    """What it raises instead."""
    step: str = ""
    """What the next step raises."""

    @property
    def id(self) -> str:
        words = [key for v in self.options.values() if isinstance(v, dict) for key in v]
        return "-".join([self.source, f"to-zero{self.stage}", f"dp{self.world_size}", *words])


GRADIENTS_FP32 = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
AMSGRAD_FAILS = "KeyError: 'max_exp_avg_sq'"
CASES = [
    *sampling.some([Case("zero1-dp2-bf16", stage, ranks) for stage in (1, 2, 3) for ranks in (2, 1)], 3),
    *sampling.some([Case("zero2-dp2-bf16-round-robin", stage, 2) for stage in (1, 2, 3)], 1),
    *sampling.some([Case("zero3-dp2-bf16-sub-groups", stage, 2) for stage in (1, 2, 3)], 1, key="sub-groups"),
    Case("zero3-dp2-bf16", 3, 2, {"zero_options": {"sub_group_size": 500}}),
    Case("zero2-dp2-bf16", 2, 2, {"zero_options": {"parameter_alignment": True}}),
    *(Case("zero2-dp2-fp16", stage, 2, {"dtype": "fp16"}) for stage in (1, 3)),
    Case("zero3-dp2-fp32", 2, 2, {"dtype": "fp32"}),
    Case("zero2-dp2-bf16", 1, 2, GRADIENTS_FP32),
    Case("zero1-dp2-bf16-grad-fp32", 1, 2, GRADIENTS_FP32),
    Case("zero1-dp2-bf16-grad-fp32", 3, 1),
    *sampling.some([Case("zero1-dp2-bf16-empty", stage, 1, {"empty": True}) for stage in (1, 3)], 1),
    Case("zero2-dp2-bf16-sgd", 1, 2, {"optimizer": "sgd"}),
    Case("zero2-dp2-bf16-adagrad", 2, 2, {"optimizer": "adagrad"}),
    Case("zero2-dp2-bf16-lion", 1, 2, {"optimizer": "lion"}),
    Case("zero3-dp2-bf16-lion", 3, 2, {"optimizer": "lion"}),
    Case("zero3-dp2-bf16-adam-amsgrad", 2, 2, {"optimizer": "amsgrad"}),
    Case("zero1-dp2-bf16-muon-grad-fp32", 1, 2, {"optimizer": "muon", **GRADIENTS_FP32}),
    Case("zero3-dp4-bf16", 2, 3),
    Case("zero1-dp4-bf16", 3, 3),
    # What DeepSpeed loses or refuses, as ``universal_losses`` says.
    Case("zero2-dp2-bf16-sgd", 3, 1, {"optimizer": "sgd"}, error="KeyError: 0"),
    Case("zero2-dp2-bf16-adagrad", 3, 1, {"optimizer": "adagrad"}, error="FileNotFoundError"),
    Case("zero3-dp2-bf16-adam-amsgrad", 3, 1, {"optimizer": "amsgrad"}, lost="max_exp_avg_sq", step=AMSGRAD_FAILS),
    Case("zero2-dp2-bf16", 2, 2, {"zero_options": {"round_robin_gradients": True}}, lost="everything"),
]


@dataclass(frozen=True)
class Sliced:
    """A source whose ranks hold parts of the model, and an engine whose ranks do."""

    source: str
    """The bundled checkpoint that is converted."""
    model: str
    """See ``parallel_engines``."""
    stage: int
    tensor: int
    """Slices of each layer."""
    stages: int = 1
    """Of the pipeline."""
    data: int = 1
    """Data-parallel ranks."""
    error: str = ""
    """What DeepSpeed raises instead."""
    lost: bool = False
    """Whether DeepSpeed scrambles it."""

    @property
    def id(self) -> str:
        return f"{self.source}-to-zero{self.stage}-pp{self.stages}-tp{self.tensor}-dp{self.data}"


WITHOUT_TENSOR_PARALLELISM = "autotp-zero1-tp2-dp2-bf16-merged"
"""An AutoTP run's checkpoint, as one of a run without it."""
SLICED = [
    Sliced("pipeline-zero1-pp2-dp2-bf16", "pipeline", 1, 1, stages=2),
    Sliced("pipeline-zero1-pp2-dp2-bf16", "pipeline", 1, 1, stages=1, data=2),
    Sliced("pipeline-zero0-pp2-dp2-bf16", "pipeline", 1, 1, stages=1),
    Sliced("pipeline-zero1-pp2-tp2-bf16", "pipeline-by-hand", 1, 2, stages=1),
    Sliced("pipeline-zero1-pp2-tp2-bf16", "pipeline-by-hand", 1, 1, stages=2),
    Sliced("pipeline-zero1-pp2-tp2-bf16", "pipeline-by-hand", 1, 2, stages=2),
    Sliced("megatron-zero1-tp2-dp2-bf16", "megatron", 1, 2),
    Sliced("megatron-zero1-tp2-dp2-bf16", "megatron", 2, 1, data=2),
    Sliced("megatron-zero2-tp2-dp2-bf16", "megatron-uneven", 2, 1),
    Sliced("autotp-zero1-tp2-dp2-bf16", "autotp", 1, 1),
    Sliced(WITHOUT_TENSOR_PARALLELISM, "autotp", 1, 2),
    Sliced("autotp-zero3-tp2-dp2-bf16", "autotp", 3, 2),
    Sliced("autotp-zero3-tp2-dp2-bf16", "autotp", 2, 2),
    Sliced("autotp-zero1-tp2-dp1-bf16-uneven", "autotp-uneven", 3, 2),
    Sliced("autotp-zero2-tp2-dp2-bf16-fused", "autotp-fused", 1, 2),
    Sliced("autotp-zero2-tp2-dp2-bf16-fused", "autotp-fused", 3, 1),
    # What DeepSpeed loses or refuses, as ``universal_losses`` says.
    Sliced("megatron-zero1-tp2-dp2-bf16", "megatron", 3, 2, error="RuntimeError: start"),
    Sliced("megatron-zero1-tp2-dp2-bf16", "megatron", 3, 1, lost=True),
    Sliced("megatron-zero2-tp2-dp2-bf16", "megatron-uneven", 1, 2, error="AssertionError: Loading"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """Every case, in one start of DeepSpeed."""
    directory = tmp_path_factory.mktemp("engines")
    roots = {n: _write(inspect(source(n)), directory / n) for n in {case.source for case in CASES}}
    loads = [
        Load(case.id, str(roots[case.source]), case.stage, case.world_size, universal=True, **case.options)
        for case in CASES
    ]
    merged = WITHOUT_TENSOR_PARALLELISM.removesuffix("-merged")
    convert(source(merged), directory / "merged", to="zero", world_size=3)
    roots[WITHOUT_TENSOR_PARALLELISM] = _write(inspect(directory / "merged"), directory / WITHOUT_TENSOR_PARALLELISM)
    for sliced in SLICED:
        if sliced.source not in roots:
            roots[sliced.source] = _write(inspect(source(sliced.source)), directory / sliced.source)
        cut: dict[str, Any] = {"model": sliced.model, "tensor": sliced.tensor, "stages": sliced.stages}
        ranks = sliced.tensor * sliced.stages * sliced.data
        loads.append(Load(sliced.id, str(roots[sliced.source]), sliced.stage, ranks, universal=True, **cut))
    return load_all(loads)


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_engines_hold_what_was_converted(case: Case, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[case.id], truth(case.source)
    if case.error:
        assert engine.error.startswith(case.error)
        return
    assert engine.error == ""
    assert engine.facts["step"] == case.step
    frozen = set(expected.facts["frozen"])
    different = set()
    for key, tensor in expected.tensors.items():
        kind, _, name = key.partition("/")
        if kind != "buffer" and name not in frozen:
            same = key in engine.tensors and torch.equal(engine.tensors[key], tensor)
            different |= set() if same else {kind}
    if case.lost == "everything":
        assert different == {"fp32", "module", "exp_avg", "exp_avg_sq"}
    else:
        assert different == ({case.lost} if case.lost else set())


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", [c for c in CASES if not c.error], ids=lambda case: case.id)
def test_engines_resume_where_the_run_was(case: Case, loaded: dict[str, Loaded]) -> None:
    facts, expected = loaded[case.id].facts, truth(case.source).facts
    assert facts["global_steps"] == expected["global_steps"]
    assert facts["skipped_steps"] == expected["skipped_steps"]
    assert facts["scheduler"] == {"last_batch_iteration": expected["global_steps"] - 1}
    assert facts["scalars"] == truth(case.source).scalars
    assert facts["client_state"] == CLIENT_STATE
    if case.options.get("dtype") == "fp16":
        assert facts["loss_scale"] == inspect(source(case.source)).loss_scaler.state["cur_scale"]
    for g, group in enumerate(facts["groups"]):
        # At stage 3 every group gets what the first one had.
        kept = expected["groups"][0 if case.stage == 3 else g]
        assert {k: group[k] for k in kept if k != "params"} == {k: v for k, v in kept.items() if k != "params"}


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_leaves_buffers_and_frozen_parameters_as_they_were(stage: int, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[f"zero1-dp2-bf16-to-zero{stage}-dp2"], truth("zero1-dp2-bf16")
    assert not engine.tensors["buffer/positions"].any()
    assert not torch.equal(engine.tensors["module/frozen_proj.weight"], expected.tensors["module/frozen_proj.weight"])
    losses = universal_losses(inspect(source("zero1-dp2-bf16")))
    assert any("buffers" in loss for loss in losses)
    assert any("frozen" in loss for loss in losses)


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", SLICED, ids=lambda case: case.id)
def test_engines_that_slice_the_model_hold_what_was_converted(case: Sliced, loaded: dict[str, Loaded]) -> None:
    engine, expected = loaded[case.id], truth(case.source.removesuffix("-merged"))
    if case.error:
        assert engine.error.startswith(case.error)
        return
    assert engine.error == ""
    assert engine.facts["step"] == ""
    assert engine.facts["global_steps"] == expected.facts["global_steps"]
    assert [dict(scalars) for scalars in engine.facts["scalars"]] == expected.scalars
    rows = expected.facts.get("vocabulary", {})
    different = set()
    for key, tensor in expected.tensors.items():
        kind, _, name = key.partition("/")
        if kind != "buffer" and name not in expected.facts["frozen"]:
            held, meant = engine.tensors[key], tensor
            if name in rows:  # each number of slices pads the vocabulary anew
                held, meant = held[: rows[name]], tensor[: rows[name]]
            different |= set() if torch.equal(held, meant) else {kind}
    assert different == ({"fp32", "module", "exp_avg", "exp_avg_sq"} if case.lost else set())
    for group, kept in zip(engine.facts["groups"], expected.facts["groups"], strict=True):
        # At stage 3 every group gets what the first one had.
        assert group["betas"] == list(kept["betas"])
        assert case.stage == 3 or (group["lr"], group["weight_decay"]) == (kept["lr"], kept["weight_decay"])


# ------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", [n for n in READ_BACK if not truth(n).unassigned])
def test_reading_back_gives_the_same(name: str, tmp_path: Path) -> None:
    before = inspect(source(name))
    after = inspect(str(_write(before, tmp_path / "out")))
    assert digest(after, jobs=1, advance=lambda _: None) == digest(before, jobs=1, advance=lambda _: None)
    assert after.format == "universal"
    assert after.tag == TAG
    assert [g.parameters for g in after.groups] == [g.parameters for g in before.groups]
    assert [g.hyperparameters for g in after.groups] == [g.hyperparameters for g in before.groups]
    assert [g.scalars for g in after.groups] == [g.scalars for g in before.groups]
    assert (after.step, after.skipped_steps) == (before.step or 0, before.skipped_steps)
    assert (after.scheduler, after.client_state) == (before.scheduler, before.client_state)
    assert after.aliases == before.aliases
    assert after.dtype == before.dtype
    assert {p.name for p in after.parameters if p.frozen} == {p.name for p in before.parameters if p.frozen}
    assert after.notes == ()


@pytest.mark.parametrize("name", [n for n in REPRESENTATIVE if not truth(n).unassigned])
def test_every_file_is_in_the_form_that_both_loaders_take(name: str, tmp_path: Path) -> None:
    checkpoint = inspect(source(name))
    root = _write(checkpoint, tmp_path / "out") / TAG
    assert (root.parent / "latest_universal").read_text() == TAG
    for parameter in checkpoint.parameters:
        folder = root / "zero" / parameter.name
        if parameter.frozen:
            assert not folder.exists()
            continue
        for key in parameter.states.keys() - {MODULE}:
            held = _load(folder / f"{key}.pt")
            if torch.is_tensor(held):
                assert name.startswith("autoep-zero3")
                assert held.shape == (parameter.numel,)
                continue
            assert held["param"].shape == parameter.shape
            assert held["cat_dim"] == parameter.slicing.dim
            if key == MASTER:
                assert held["param"].dtype == torch.float32
    optimizer = _load(root / "zero" / "optimizer_state.pt")
    assert optimizer["param_groups"] == optimizer["optimizer_state_dict"]["param_groups"]
    assert [g["params"] for g in optimizer["param_groups"]] == [[g] for g in range(len(checkpoint.groups))]
    assert optimizer["ds_version"]
    model, stage3 = (_load(root / f"{prefix}mp_rank_00_model_states.pt") for prefix in ("", "zero_pp_rank_0_"))
    assert list(model["module"]) == list(stage3["module"])
    assert all(t.numel() == 0 for n, t in stage3["module"].items() if n not in model["buffer_names"])
    for alias, stored in checkpoint.aliases.items():
        assert model["module"][alias].data_ptr() == model["module"][stored].data_ptr()


def test_the_modules_weights_are_the_cast_of_the_masters(tmp_path: Path) -> None:
    for name in ("zero3-dp2-bf16", "zero2-dp2-fp16", "zero1-dp2-fp32"):
        root = _write(inspect(source(name)), tmp_path / name) / TAG
        module = _load(root / "mp_rank_00_model_states.pt")["module"]
        for key, tensor in truth(name).tensors.items():
            kind, _, parameter = key.partition("/")
            if kind in {"module", "buffer"}:
                assert module[parameter].dtype == tensor.dtype
                assert torch.equal(module[parameter], tensor)


def _replaced(checkpoint: Checkpoint, change: Any) -> Checkpoint:
    return replace(checkpoint, parameters=tuple(change(p) for p in checkpoint.parameters))


def test_masters_of_16_bit_stay_so(tmp_path: Path) -> None:
    """As DeepSpeed's converter leaves those of CPU offload with 16-bit states."""

    def narrow(parameter: Parameter) -> Parameter:
        narrowed = {key: parameter.states[MODULE] if key == MASTER else s for key, s in parameter.states.items()}
        return replace(parameter, states=narrowed)

    root = _write(_replaced(inspect(source("zero1-dp2-bf16")), narrow), tmp_path / "out") / TAG
    expected = truth("zero1-dp2-bf16").tensors["module/up.weight"]
    held = _load(root / "zero" / "up.weight" / "fp32.pt")["param"]
    assert held.dtype == torch.bfloat16
    assert torch.equal(held, expected)


def test_the_overhead_of_a_file_is_small() -> None:
    checkpoint = inspect(source("zero2-dp2-bf16"))
    plan = plan_universal(checkpoint, tag=TAG)
    values = sum(
        p.numel * sum(4 if key == MASTER else itemsize(s.dtype) for key, s in p.states.items())
        for p in checkpoint.parameters
    )
    values += 2 * sum(b.state.nbytes for b in checkpoint.buffers)
    # A file has headers of about 1.5 kB; the one of the model some more for each tensor.
    assert plan.nbytes_written - values < 3000 * len(plan.files)
    assert plan.files[-1].name == "latest_universal"


# ------------------------------------------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize("tag", ["", ".", "..", "../x", "a//b", "/a", "a/", "a\nb", " a", "a" * 256])
def test_a_tag_that_names_no_directory_is_refused(tag: str) -> None:
    with refused(PlanError):
        plan_universal(inspect(source("zero1-dp1-bf16")), tag=tag)


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 256])
def test_a_name_that_no_directory_can_have_is_refused(name: str) -> None:
    def rename(parameter: Parameter) -> Parameter:
        return replace(parameter, name=name) if parameter.name == "up.weight" else parameter

    with refused(PlanError):
        plan_universal(_replaced(inspect(source("zero1-dp1-bf16")), rename), tag=TAG)


def test_weights_alone_are_refused() -> None:
    with refused(PlanError):
        plan_universal(inspect(source("pipeline-zero0-pp2-dp2-fp16")), tag=TAG)


def test_a_parameter_of_no_known_group_is_refused() -> None:
    def forget(parameter: Parameter) -> Parameter:
        return replace(parameter, group=-1)

    with refused(PlanError):
        plan_universal(_replaced(inspect(source("zero1-dp1-bf16")), forget), tag=TAG)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero2-dp2-bf16", ["buffers (3)", "frozen parameters (2)", "all 2 parameter groups"]),
        ("zero2-dp2-bf16-round-robin", ["round_robin_gradients"]),
        ("zero2-dp2-bf16-sgd", ["exp_avg and exp_avg_sq"]),
        ("zero3-dp2-bf16-adam-amsgrad", ["max_exp_avg_sq"]),
        ("zero1-dp2-bf16-muon", ["exp_avg and exp_avg_sq", "Muon"]),
        ("zero0-dp2-fp16", ["loss scaler"]),
        ("ds0.16.9-zero2-dp2-fp16", ["DeepSpeed 0.16.9", "0.19.4"]),
        ("moe-zero2-dp4-ep2-bf16", ["expert-parallel"]),
    ],
)
def test_losses_of_deepspeeds_load_are_noted(name: str, words: list[str]) -> None:
    losses = universal_losses(inspect(source(name)))
    for word in words:
        assert [loss for loss in losses if word in loss], (word, losses)
    assert all("zero checkpoint" in loss for loss in losses)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("megatron-zero1-tp2-dp2-bf16", ["does not pad the vocabulary (embed.weight)", "only for AutoTP"]),
        ("megatron-zero2-tp2-dp2-bf16", ["does not pad", "only for AutoTP", "only slices of one size (layers.0.qkv"]),
        ("autotp-zero2-tp2-dp2-bf16-fused", []),
        ("autotp-zero1-tp2-dp1-bf16-uneven", []),
    ],
)
def test_slices_that_deepspeed_cannot_load_are_noted(name: str, words: list[str]) -> None:
    losses = universal_losses(inspect(source(name)))
    found = [loss for loss in losses if "slices" in loss or "vocabulary" in loss]
    assert len(found) == len(words)
    assert all(word in loss for word, loss in zip(words, found, strict=True))


@pytest.mark.parametrize(
    "name", ["megatron-zero1-tp2-dp2-bf16", "megatron-zero2-tp2-dp2-bf16", "pipeline-zero1-pp2-tp2-bf16"]
)
def test_slicing_metadata_equals_that_of_deepspeeds_converter(name: str, tmp_path: Path) -> None:
    ours, theirs = _write(inspect(source(name)), tmp_path / "out") / TAG, Path(tag_directory(f"universal-{name}"))
    folders = [p.name for p in (ours / "zero").iterdir() if p.is_dir()]
    told = set()
    for folder in folders:
        mine, other = (_load(root / "zero" / folder / "exp_avg.pt") for root in (ours, theirs))
        for key in ("param_n_sub_params", "vocab_tensor"):
            assert mine.get(key) == other.get(key), folder
        view, wanted = mine.get("sub_param_shape"), other.get("sub_param_shape")
        assert (view is None) == (wanted is None)
        if view is not None:
            assert (view.shape, view.partition_dim) == (wanted.shape, wanted.partition_dim)
        else:
            assert mine["cat_dim"] == other.get("cat_dim", 0)
        told |= {(key, str(mine[key])) for key in mine.keys() - {"param", "sub_param_shape"}}
    assert told == {("cat_dim", "0"), ("cat_dim", "1"), ("param_n_sub_params", "2"), ("vocab_tensor", "True")}


def test_how_tensors_are_sliced_survives_a_second_conversion(tmp_path: Path) -> None:
    first = inspect(source("megatron-zero2-tp2-dp2-bf16"))
    second = inspect(str(_write(first, tmp_path / "out")))
    assert {p.name: p.slicing for p in second.parameters} == {p.name: p.slicing for p in first.parameters}
    theirs = inspect(source("universal-megatron-zero2-tp2-dp2-bf16"))
    assert {p.name: p.slicing for p in theirs.parameters} == {p.name: p.slicing for p in first.parameters}


def test_tensors_in_the_client_state_are_carried(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    copy = checkpoint_copy("zero1-dp1-bf16")
    path = next(copy.rglob("mp_rank_00_model_states.pt"))
    model = _load(path)
    model["rng"] = torch.arange(100, dtype=torch.uint8)
    model["nested"] = [model["rng"][3:5], {"a": (torch.tensor(1.5), 2)}]
    torch.save(model, path)
    root = _write(inspect(str(copy)), tmp_path / "out") / TAG
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        held = _load(root / name)
        assert torch.equal(held["rng"], model["rng"])
        assert torch.equal(held["nested"][0], torch.tensor([3, 4], dtype=torch.uint8))
        assert held["nested"][1] == {"a": (torch.tensor(1.5), 2)}
    assert not any("client state" in loss for loss in universal_losses(inspect(str(copy))))


@pytest.mark.parametrize("step", [2, 4])
def test_groups_at_unlike_steps_are_noted(step: int) -> None:
    checkpoint = inspect(source("zero2-dp2-bf16"))
    first, second = checkpoint.groups
    later = replace(second, scalars={"step": replace(first.scalars["step"], value=step)})
    assert first.scalars["step"].value == 3
    assert not any("step of the first" in loss for loss in universal_losses(checkpoint))
    assert any("step of the first" in loss for loss in universal_losses(replace(checkpoint, groups=(first, later))))


def test_tensors_in_the_client_state_that_nobody_located_are_left_out_and_named(tmp_path: Path) -> None:
    ref = TensorRef(StorageRef("0", "FloatStorage", "F32", "cpu", 1), "F32", 0, (), ())
    checkpoint = inspect(source("zero1-dp1-bf16"))
    mixed = replace(checkpoint, client_state={"rng": ref, "epoch": 1, "nested": [ref, {"a": (ref, 2)}]})
    assert any("rng, nested" in loss for loss in universal_losses(mixed))
    model = _load(_write(mixed, tmp_path / "out") / TAG / "mp_rank_00_model_states.pt")
    assert "rng" not in model
    assert (model["epoch"], model["nested"]) == (1, [{"a": (2,)}])


def _form(value: Any) -> Any:
    """Keys, shapes and types."""
    if isinstance(value, dict):
        return {key: _form(item) for key, item in value.items()}
    return (tuple(value.shape), value.dtype) if torch.is_tensor(value) else value


@pytest.mark.parametrize("name", ["autoep-zero2-dp2-ep2-bf16", "autoep-zero3-dp2-ep2-bf16"])
def test_states_of_a_model_with_experts_have_deepspeeds_form(name: str, tmp_path: Path) -> None:
    report = convert(source(name), tmp_path / "out", to="universal", prove=True)
    theirs = Path(tag_directory(f"universal-{name}")) / "zero"
    files = [
        p.relative_to(theirs) for p in theirs.rglob("*.pt") if p.name in {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}
    ]
    ours = tmp_path / "out" / report.tag / "zero"
    files = [file for file in files if "gate.gate" not in file.parts[0]]  # another name of a router, never trained
    assert len(files) > 60
    different = [file for file in files if _form(_load(ours / file)) != _form(_load(theirs / file))]
    assert different == []
    assert not [file for file in files if not _same_values(_load(ours / file), _load(theirs / file))]
    bare = [file for file in files if torch.is_tensor(_load(ours / file))]
    assert bool(bare) == ("zero3" in name) == any("load only at stage 3" in loss for loss in report.notes)
    assert verify(tmp_path / "out", deep=True).findings == ()


def _same_values(ours: Any, theirs: Any) -> bool:
    ours, theirs = (value["param"] if isinstance(value, dict) else value for value in (ours, theirs))
    return bool(torch.equal(ours, theirs))


def test_the_count_of_samples_is_kept(tmp_path: Path) -> None:
    src = source("zero2-dp2-bf16")
    counted = inspect(src).samples
    assert counted
    convert(src, tmp_path / "out", to="universal")
    assert inspect(tmp_path / "out").samples == counted
