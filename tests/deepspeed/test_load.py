"""Live engines load checkpoints of other ranks, stages and groups, without a conversion."""

from __future__ import annotations

import math
import re
import shutil
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.checksums import of_bytes
from ckpttool.commit.manifest import Manifest
from ckpttool.integrations.live.report import LoadReport
from ckpttool.model import MASTER
from ckpttool.storage import MANIFEST
from tests import sampling
from tests.damage import flip
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.truth import source, truth

pytestmark = pytest.mark.deepspeed


@dataclass(frozen=True)
class Case:
    """A source, and the engine that resumes from it."""

    source: str
    stage: int
    ranks: int
    zero: dict[str, Any] = field(default_factory=dict)
    """Laid over ``zero_optimization``."""
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def id(self) -> str:
        odd = "".join(f"-{key}" for key in {**self.zero, **self.config})
        return f"{self.source}-on-zero{self.stage}-dp{self.ranks}{odd}"

    def load(self, kind: str, root: str, **more: Any) -> Load:
        """The engine, and what it is given."""
        dtype = truth(self.source).facts["dtype"]
        options = {"zero_options": self.zero, "config": self.config, "optimizer": self.optimizer, "dtype": dtype}
        return Load(f"{self.id}-{kind}", root, self.stage, self.ranks, **{**options, **more})


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
PLANNED = [
    Case("zero1-dp2-bf16", 2, 1),
    Case("zero2-dp4-bf16", 2, 3),
    Case("zero2-dp2-bf16", 3, 4, {"sub_group_size": 300}),
    Case("zero3-dp4-bf16", 3, 2),
    Case("zero3-dp4-bf16", 1, 3),
    Case("zero3-dp2-bf16-sub-groups", 3, 2),  # which the engine does not cut so
    Case("zero1-dp2-fp16", 3, 4),
    Case("zero3-dp2-fp16", 2, 1),
    Case("zero2-dp2-bf16-round-robin", 2, 4, {"round_robin_gradients": True}),
    Case("zero2-dp2-bf16-aligned", 2, 3, {"parameter_alignment": True}),
    Case("zero2-dp2-fp32", 3, 2),
    Case("zero1-dp2-bf16-grad-fp32", 1, 3, {}, FP32_GRADIENTS),
    Case("universal-zero2-dp2-bf16", 2, 2),
    Case("zero2-dp3-bf16-muon", 1, 2, optimizer="muon"),
    Case("zero2-dp2-bf16-sgd", 3, 3, optimizer="sgd"),
]
NATIVE = [
    Case("zero2-dp2-bf16", 2, 2),
    Case("zero1-dp2-fp16", 2, 2),  # of which DeepSpeed makes no difference
    Case("zero3-dp2-bf16-sub-groups", 3, 2, {"sub_group_size": 500}),
    Case("zero2-dp2-bf16-legacy", 2, 2),
    Case("zero0-dp2-bf16-unfused", 0, 1),
]
WITHOUT_ZERO = [
    Case("zero2-dp2-bf16", 0, 2),
    Case("zero3-dp4-bf16", 0, 3),
    Case("zero1-dp2-fp16", 0, 1),
    Case("zero2-dp2-fp32", 0, 2),
    Case("universal-zero2-dp2-bf16", 0, 2),
    Case("zero2-dp3-bf16-muon", 0, 1, optimizer="muon"),
    Case("zero2-dp2-bf16-sgd", 0, 1, optimizer="sgd"),
]
PLANNED = sampling.some(PLANNED, 10)
WITHOUT_ZERO = sampling.some(WITHOUT_ZERO, 4)
CONVERTED = sampling.some([*PLANNED, *NATIVE], 5)
"""Cases whose load is compared with a load of the converted checkpoint."""
WEIGHTS = [Case("zero3-dp4-bf16", stage, 2) for stage in sampling.some(range(4), 2)]
WEIGHTS.append(Case("zero2-dp2-fp16", 3, 3))
PLAIN = "zero2-dp2-bf16"
CHANGES = ("shape", "more", "less", "unfrozen", "reversed", "one group", "three groups", "rank 1 fails")


def _loads(directory: Path) -> list[Load]:
    loads = []
    for case in [*PLANNED, *NATIVE]:
        # Beside each other: an engine at stage 3 changes how later ones compute, in the last bits.
        loads.append(case.load("resumed", source(case.source), resume={}))
        if case not in CONVERTED:
            continue
        if case in NATIVE:
            loads.append(case.load("converted", source(case.source)))
            continue
        out = directory / case.id
        ckpttool.convert(
            source(case.source), out, to="zero", world_size=case.ranks, stage=case.stage,
            round_robin=case.zero.get("round_robin_gradients"), sub_group_size=case.zero.get("sub_group_size", 10**9),
        )  # fmt: skip
        loads.append(case.load("converted", str(out)))
    loads += [case.load("weights", source(case.source), resume={"weights_only": True}) for case in WEIGHTS]
    ckpttool.consolidate(source(PLAIN), directory / "safetensors", to="safetensors")

    def plain(kind: str, *, root: str = source(PLAIN), **more: Any) -> Load:
        return replace(Case(PLAIN, 2, 2).load(kind, root), **more)

    loads.append(plain("safetensors", root=str(directory / "safetensors"), resume={"weights_only": True}))
    shutil.copytree(source(PLAIN), strays := directory / "strays")
    shutil.copy2(Path(ckpttool.inspect(strays).location) / "mp_rank_00_model_states.pt", strays)
    loads.append(plain("preview", root=str(strays), resume={"dry_run": True}))
    flipped = _flipped(directory / "flipped")
    loads.append(plain("flipped-native", root=flipped, resume={}))
    loads.append(plain("flipped-planned", root=flipped, stage=3, world_size=3, resume={}))
    loads.append(plain("flipped-unchecked", root=flipped, stage=3, world_size=3, resume={"check": "off"}))
    committed = _flipped(directory / "committed", manifest=True)
    loads.append(plain("flipped-committed", root=committed, stage=3, world_size=3, resume={"check": "off"}))
    loads.append(plain("flag", universal=True, resume={}))
    loads.append(plain("no-masters", zero_options={"load_from_fp32_weights": False}, stage=1, resume={}))
    loads.append(plain("sgd", optimizer="adagrad", config={"scheduler": None}, resume={}))
    loads.append(plain("dtype", dtype="fp16", world_size=1, resume={}))
    loads += [case.load("resumed", str(source(case.source)), resume={}) for case in WITHOUT_ZERO]
    for change in CHANGES:
        config: dict[str, Any] = {"scheduler": None} if "group" in change else {}
        loads.append(plain(f"{change}-strict", change=change, config=config, resume={}))
        if change in {"more", "less"}:
            loads.append(plain(f"{change}-lax", change=change, resume={"strict": False}))
            loads.append(plain(f"{change}-lax-3", change=change, stage=3, world_size=3, resume={"strict": False}))
        if change == "reversed":
            loads.append(plain(f"{change}-3", change=change, stage=3, world_size=3, resume={}))
    return loads


def _flipped(root: Path, *, manifest: bool = False) -> str:
    """A copy of PLAIN in which one bit of a moment has flipped."""
    shutil.copytree(source(PLAIN), root)
    checkpoint = ckpttool.inspect(root)
    if manifest:
        directory = Path(checkpoint.location)
        files = {}
        for path in directory.iterdir():
            data = path.read_bytes()
            at = data.index(b"PK\1\2")  # opening compares only the archive's directory
            files[path.name] = of_bytes(data)._replace(directory=(at, zlib.crc32(data[at:])))
        (directory / MANIFEST).write_bytes(Manifest(checkpoint.tag, 3, 0.0, "", 2, 2, files=files).to_json())
    moment = next(p for p in checkpoint.parameters if p.name == "up.weight").states["exp_avg"].extents[0]
    flip(Path(checkpoint.path(int(moment["file"]))), int(moment["offset"]) + 3)
    return str(root)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """What live engines held after each load."""
    directory = tmp_path_factory.mktemp("resume")
    return load_all(_loads(directory))


def _plain(loaded: dict[str, Loaded], kind: str) -> Loaded:
    return loaded[f"{Case(PLAIN, 2, 2).id}-{kind}"]


def _differing(engine: Loaded, name: str, leave_out: tuple[str, ...] = ()) -> list[str]:
    expected = {k: t for k, t in truth(name).tensors.items() if not k.startswith(leave_out)}
    return [k for k, t in expected.items() if k not in engine.tensors or not _equal(k, engine.tensors[k], t)]


def _equal(key: str, found: torch.Tensor, expected: torch.Tensor) -> bool:
    if key.startswith("momentum_buffer"):  # torch casts what it loads to the type of the master
        found = found.to(expected.dtype)
    return found.dtype == expected.dtype and bool(torch.equal(found.view(expected.shape), expected))


@pytest.mark.parametrize("case", [*PLANNED, *NATIVE], ids=lambda case: case.id)
def test_an_engine_holds_what_it_was_when_it_was_saved(case: Case, loaded: dict[str, Loaded]) -> None:
    engine = loaded[f"{case.id}-resumed"]
    assert engine.error == ""
    assert _differing(engine, case.source) == []
    assert engine.facts["report"]["method"] == ("native" if case in NATIVE else "planned")


@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: case.id)
def test_it_is_as_if_it_had_been_converted_first(case: Case, loaded: dict[str, Loaded]) -> None:
    """Bit for bit, and training goes on the same."""
    resumed, converted = loaded[f"{case.id}-resumed"], loaded[f"{case.id}-converted"]
    assert converted.error == ""
    assert [k for k, t in converted.tensors.items() if not torch.equal(resumed.tensors[k], t)] == []
    assert resumed.tensors.keys() == converted.tensors.keys()
    same = ("global_steps", "skipped_steps", "scheduler", "loss_scale", "scalars", "groups", "client_state")
    assert {k: resumed.facts[k] for k in same} == {k: converted.facts[k] for k in same}
    assert resumed.facts["step"] == ""
    assert resumed.facts["losses"] == converted.facts["losses"]
    assert len(resumed.facts["losses"]) == 3


@pytest.mark.parametrize("case", WITHOUT_ZERO, ids=lambda case: case.id)
def test_an_engine_without_zero_goes_on_with_what_zero_saved(case: Case, loaded: dict[str, Loaded]) -> None:
    engine = loaded[f"{case.id}-resumed"]
    assert engine.error == ""
    assert _differing(engine, case.source) == []
    assert engine.facts["report"]["method"] == "planned"
    assert engine.facts["global_steps"] == ckpttool.inspect(source(case.source)).step
    assert all(scalars.get("step", 3) == 3 for scalars in engine.facts["scalars"])
    if not case.source.endswith("fp32"):  # DeepSpeed cannot clip the gradient of a scalar parameter there
        assert engine.facts["step"] == ""


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.id)
def test_all_ranks_together_read_what_is_needed_once(case: Case, loaded: dict[str, Loaded]) -> None:
    checkpoint = ckpttool.inspect(source(case.source))
    needed = sum(s.nbytes for p in checkpoint.parameters for k, s in p.states.items() if p.frozen or k != "module")
    needed += sum(b.state.nbytes for b in checkpoint.buffers)
    structure = sum(s.nbytes for s in checkpoint.embedded.values())
    ranks = loaded[f"{case.id}-resumed"].facts["read"]
    told, seen, read = zip(*ranks, strict=True)
    # The first one also compares samples of the 16-bit copies; torch looks for a directory in the end of each file.
    assert all(0 <= more - less <= 2 * 4096 for more, less in zip(read[1:], told[1:], strict=True))
    assert seen[1:] == (0,) * (case.ranks - 1)  # it alone reads the structure
    if case.optimizer == "muon":  # of which two ranks hold some matrices whole
        needed = max(needed, sum(told))
    assert sum(told) == needed + structure * case.ranks
    masters = sum(p.states[MASTER].nbytes for p in checkpoint.parameters if MASTER in p.states)
    assert max(told) < needed / case.ranks + masters / 2 or case.ranks == 1


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: case.id)
def test_weights_alone(case: Case, loaded: dict[str, Loaded]) -> None:
    engine = loaded[f"{case.id}-weights"]
    assert engine.error == ""
    assert _differing(engine, case.source, ("exp_avg",)) == []
    assert engine.facts["global_steps"] == 0
    assert engine.facts["scheduler"] == {"last_batch_iteration": -1}
    saved = {"epoch": 2, "note": "odd shapes", "losses": [1.5, 1.25], "nested": {"tokens": 36, "seen": [1, 2]}}
    assert engine.facts["client_state"] == saved
    assert {group["weight_decay"] for group in engine.facts["groups"]} == {0.25}  # the engine's own
    assert [k for k in engine.tensors if k.startswith("exp_avg") and engine.tensors[k].any()] == []
    assert engine.facts["step"] == ""


def test_weights_alone_from_safetensors(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "safetensors")
    assert engine.error == ""
    assert _differing(engine, PLAIN, ("exp_avg",)) == []


def test_a_preview_touches_nothing(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "preview")
    assert engine.facts["untouched"]
    assert engine.facts["global_steps"] == 0
    assert engine.facts["report"]["dry_run"]
    assert "/strays/global_step3: would restore 11 parameters" in engine.facts["told"].splitlines()[0]


def test_a_report_names_files_beside_latest(loaded: dict[str, Loaded]) -> None:
    assert "note: mp_rank_00_model_states.pt beside latest in " in _plain(loaded, "preview").facts["told"]


def test_a_configuration_for_universal_checkpoints_does_not_matter(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "flag")
    assert engine.error == ""
    assert _differing(engine, PLAIN) == []
    assert "load_universal in the engine's configuration is ignored" in " ".join(engine.facts["report"]["notes"])


def test_a_run_in_another_type_keeps_its_own_loss_scale(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "dtype")
    assert engine.error == ""
    assert _differing(engine, PLAIN, ("module",)) == []
    assert engine.facts["loss_scale"] == 256
    assert "the checkpoint has no loss scale for fp16: the engine keeps its own" in engine.facts["report"]["notes"]


def test_masters_are_made_of_the_16_bit_copies_where_the_configuration_says_so(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "no-masters")
    assert engine.error == ""
    expected = truth(PLAIN).tensors
    for key in (k for k in expected if k.startswith("fp32/")):
        assert torch.equal(engine.tensors[key], expected[key].bfloat16().float())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "shape-strict",
            "tiny has shape [3], but [4] in the model; build the model with the shapes of the checkpoint",
        ),
        (
            "more-strict",
            "lacks extra, more of the model; pass strict=False, and they keep the model's values",
        ),
        ("less-strict", "holds seen, norm.bias that the model lacks; pass strict=False, and they are left out"),
        ("rank 1 fails-strict", "rank 1: Input/output error; check the disk"),
        ("sgd", "holds exp_avg, exp_avg_sq, but the engine's optimizer keeps sum"),
    ],
)
def test_a_misfit_is_one_clear_error_and_changes_nothing(kind: str, told: str, loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, kind)
    assert re.match(r"(Plan|Storage)Error: ", engine.error)
    assert told in engine.error
    assert "\n" not in engine.error
    assert engine.facts["untouched"]


@pytest.mark.parametrize("kind", ["flipped-native", "flipped-planned", "flipped-committed"])
def test_a_flipped_bit_is_found_before_the_engine_is_touched(kind: str, loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, kind)
    assert engine.error.startswith("ChecksumError: ")
    assert "up.weight" in engine.error
    assert "was recorded when it was saved" in engine.error
    assert engine.facts["untouched"]


def test_without_checks_it_is_loaded(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "flipped-unchecked")
    assert engine.error == ""
    assert _differing(engine, PLAIN) == ["exp_avg/up.weight"]


@pytest.mark.parametrize("kind", ["more-lax", "more-lax-3"])
def test_missing_parameters_keep_their_values(kind: str, loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, kind)
    assert engine.error == ""
    assert _differing(engine, PLAIN) == []
    assert engine.facts["report"]["missing"] == ["extra", "more"]
    for key in ("fp32/extra", "module/extra", "buffer/more"):
        assert torch.equal(engine.tensors[key], engine.tensors[f"before/{key}"])
    assert engine.tensors["fp32/extra"].any()
    assert not engine.tensors["exp_avg/extra"].any()
    assert engine.facts["step"] == ""


@pytest.mark.parametrize("kind", ["less-lax", "less-lax-3"])
def test_unknown_tensors_are_left_out(kind: str, loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, kind)
    assert engine.error == ""
    assert sorted(engine.facts["report"]["unexpected"]) == ["norm.bias", "seen"]
    assert {key.partition("/")[2] for key in _differing(engine, PLAIN)} == {"norm.bias", "seen"}
    assert engine.facts["step"] == ""


@pytest.mark.parametrize("kind", ["reversed-strict", "reversed-3", "three groups-strict"])
def test_groups_are_matched_by_name(kind: str, loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, kind)
    assert engine.error == ""
    assert _differing(engine, PLAIN) == []
    by_name = {n: g for g in truth(PLAIN).facts["groups"] for n in g["params"]}
    for group, scalars in zip(engine.facts["groups"], engine.facts["scalars"], strict=True):
        for name in group["params"]:
            assert {k: group[k] for k in ("lr", "eps", "weight_decay")} == {
                k: by_name[name][k] for k in ("lr", "eps", "weight_decay")
            }
        assert scalars == {"step": 3}
    assert engine.facts["step"] == ""


def test_of_groups_that_differ_no_hyper_parameters_are_taken(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "one group-strict")
    assert _differing(engine, PLAIN) == []
    assert engine.facts["groups"][0]["weight_decay"] == 0.25
    assert engine.facts["report"]["groups_kept"] == [0]
    why = "its parameters are in groups 0 and 1 of the checkpoint, which differ"
    assert f"group 0 keeps the model's hyper-parameters: {why}" in engine.facts["report"]["notes"]


def test_a_parameter_that_was_frozen_is_trained_from_what_it_was(loaded: dict[str, Loaded]) -> None:
    engine = _plain(loaded, "unfrozen-strict")
    assert _differing(engine, PLAIN) == []
    expected = truth(PLAIN).tensors["module/frozen_proj.weight"]
    assert torch.equal(engine.tensors["fp32/frozen_proj.weight"], expected.float())
    assert not engine.tensors["exp_avg/frozen_proj.weight"].any()
    assert (
        "frozen_proj.weight was not trained in the saved run: it starts without moments"
        in engine.facts["report"]["notes"]
    )


def test_a_report_says_what_happened(loaded: dict[str, Loaded]) -> None:
    told = loaded[f"{Case('zero3-dp4-bf16', 3, 2).id}-resumed"].facts["told"].splitlines()
    assert told[0].endswith("s")
    assert "restored 11 parameters (2,850 elements) and 3 buffers of step 3" in told[0]
    assert told[1].startswith("from ZeRO-3 over 4 ranks to ZeRO-3 over 2 ranks (planned, ")
    assert told[2].startswith("with it: exp_avg, exp_avg_sq, scheduler")
    assert "client state (epoch, note, losses, nested)" in told[2]


def test_losses_go_on(loaded: dict[str, Loaded]) -> None:
    """Of a run in fp32, other ranks and another stage change no more than the order of sums."""
    case = next(c for c in PLANNED if c.source == "zero2-dp2-fp32")
    losses = loaded[f"{case.id}-resumed"].facts["losses"]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] > losses[-1]


# ------------------------------------------------------------------------------------ models spread over ranks


@dataclass(frozen=True)
class Spread:
    """A source whose model is spread over ranks, and the engine."""

    source: str
    model: str
    """See ``parallel_engines``."""
    stage: int
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "native"
    """Or "refused"."""

    @property
    def id(self) -> str:
        return f"{self.source}-on-zero{self.stage}-dp{self.ranks}"


SPREAD = [
    Spread("pipeline-zero1-pp2-dp2-bf16", "pipeline", 1, 4, {"stages": 2}),
    Spread("autotp-zero2-tp2-dp2-bf16", "autotp", 2, 4, {"tensor": 2}),
    Spread("autotp-zero2-tp2-dp2-bf16", "autotp", 2, 2, {"tensor": 2}, "refused"),
    Spread("moe-zero0-dp2-ep2-fp32", "moe", 0, 2, {"experts": 2}),
    Spread("moe-zero2-dp4-ep2-bf16", "moe-residual", 2, 4, {"experts": 2}),
    Spread("moe-zero2-dp4-ep2-bf16", "moe-residual", 1, 2, {"experts": 2}, "planned"),
    Spread("moe-zero2-dp4-ep2-bf16", "moe-residual", 2, 4, {"experts": 4}, "planned"),
    Spread("autoep-zero3-dp4-ep2-bf16", "autoep", 3, 2, {"experts": 2}, "planned"),
    Spread("autoep-zero3-dp4-ep2-bf16", "autoep", 2, 2, {"experts": 1}, "planned"),
]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """What engines of such models held."""
    found: dict[str, Loaded] = {}
    # DeepSpeed remembers the groups of the first engine: those with tensor parallelism get processes of their own.
    for kind in ("stages", "tensor", "experts"):
        loads = [
            Load(
                str(n),
                source(s.source),
                s.stage,
                s.ranks,
                dtype=s.source.rpartition("-")[2],
                model=s.model,
                resume={},
                **s.options,
            )
            for n, s in enumerate(SPREAD)
            if kind in s.options
        ]
        found |= load_all(loads)
    return found


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: f"{case.id}-{case.method}-{case.options}")
def test_models_that_are_spread_over_ranks(case: Spread, spread: dict[str, Loaded]) -> None:
    engine, expected = spread[str(SPREAD.index(case))], truth(case.source)
    if case.method == "refused":
        assert engine.error.startswith("PlanError: ")
        assert "convert it to a universal checkpoint" in engine.error
        return
    assert engine.error == ""
    assert [k for k, t in expected.tensors.items() if not torch.equal(engine.tensors[k], t)] == []
    assert engine.facts["report"]["method"] == case.method
    assert engine.facts["global_steps"] == expected.facts["global_steps"]
    assert engine.facts["step"] == ""


MORE_EXPERTS = {
    "autoep-zero2-dp2-ep2-bf16": ("autoep", 3, 2, 2, "model.layers.0.mlp"),
    "universal-autoep-zero2-dp2-ep2-bf16": ("autoep", 2, 2, 2, "model.layers.0.mlp"),
    "universal-autoep-zero3-dp2-ep2-bf16": ("autoep", 3, 1, 1, "model.layers.0.mlp"),
    "moe-zero2-dp2-bf16": ("moe", 1, 1, 1, "first"),
}
"""Checkpoints with four experts: engine with eight, its stage, ranks and expert-parallel size, and its first layer."""


@pytest.mark.parametrize("name", MORE_EXPERTS)
def test_another_number_of_experts_is_named(name: str, tmp_path: Path) -> None:
    model, stage, ranks, parallel, layer = MORE_EXPERTS[name]
    load = Load("more", source(name), stage, ranks, dtype="bf16", model=model, experts=parallel, change="more experts",
                resume={"weights_only": True})  # fmt: skip
    error = load_all([load])["more"].error
    hint = "build the model with the shapes of the checkpoint"
    assert error.endswith(f"has 4 experts in {layer}, but the model has 8; {hint}")


def test_a_report_has_what_is_asserted_here() -> None:
    """Its fields are the library's interface."""
    assert {"path", "tag", "client_state", "missing", "unexpected", "notes"} <= {*LoadReport.__dataclass_fields__}
