"""Optimizer states as safetensors: equal to the engine's, read back whole, and refused where two saves are mixed."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.analysis.digest import digest
from ckpttool.errors import ArgumentError, CkptError, LayoutError, PlanError
from ckpttool.formats.optimizer_states import METADATA
from tests import damage, sampling
from tests.storage import server
from tests.truth import REPRESENTATIVE, as_tensor, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMED = [name for name in REPRESENTATIVE if not truth(name).unassigned]
"""Those whose states belong to named parameters."""
OTHERS = ("zero2-dp2-bf16-adam-amsgrad", "zero3-dp2-bf16-sgd", "zero2-dp2-fp16", "zero1-dp2-bf16-empty")


def _export(name: str, out: Path, **options: Any) -> Any:
    return ckpttool.consolidate(source(name), out, to="safetensors", optimizer=True, **options)


def _digests(path: Path | str) -> Any:
    return digest(ckpttool.inspect(path), jobs=1, advance=lambda _: None)


def _metadata(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[METADATA])


@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_states_equal_the_engines(name: str, tmp_path: Path) -> None:
    _export(name, tmp_path / "out")
    written = load_file(tmp_path / "out" / "optimizer.safetensors")
    expected = {
        key.replace("/", ".", 1): as_tensor(array)
        for key, array in truth(name).states.items()
        if key.partition("/")[0] not in {"fp32", "module", "buffer"}
    }
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert written[key].dtype == tensor.dtype, key
        assert torch.equal(written[key], tensor), key
    groups = _metadata(tmp_path / "out" / "optimizer.safetensors")["groups"]
    steps = [{key: scalar["value"] for key, scalar in group["scalars"].items()} for group in groups]
    assert steps == truth(name).scalars


@pytest.mark.parametrize(
    ("name", "dtype"), sampling.some(itertools.product([*NAMED, *OTHERS], ["fp32", "bf16"]), 17, key="whole")
)
def test_the_files_are_a_whole_checkpoint(name: str, dtype: Any, tmp_path: Path) -> None:
    report = _export(name, tmp_path / "out", dtype=dtype, prove=True, max_shard_size="6kB")
    assert any(file.name.startswith("optimizer-00002-of-") for file in report.written.files)
    assert _digests(tmp_path / "out") == _digests(source(name))
    before, after = ckpttool.inspect(source(name)), ckpttool.inspect(tmp_path / "out")
    assert [g.parameters for g in after.groups] == [g.parameters for g in before.groups]
    assert [g.hyperparameters for g in after.groups] == [
        {k: tuple(v) if isinstance(v, list) else v for k, v in g.hyperparameters.items()} for g in before.groups
    ]
    assert [g.scalars for g in after.groups] == [g.scalars for g in before.groups]
    assert (after.step, after.dtype, after.skipped_steps) == (before.step, before.dtype, before.skipped_steps)
    assert {p.name for p in after.parameters if p.frozen} == {p.name for p in before.parameters if p.frozen}
    assert not ckpttool.verify(tmp_path / "out", deep=True).findings


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero3-dp4-bf16", "zero2-dp2-bf16-trainer"])
def test_a_conversion_back_has_the_digest_of_the_source(name: str, tmp_path: Path) -> None:
    _export(name, tmp_path / "out", dtype="bf16")
    ckpttool.convert(tmp_path / "out", tmp_path / "back", to="zero", world_size=3, stage=3, prove=True)
    assert _digests(tmp_path / "back") == _digests(source(name))
    ckpttool.convert(source(name), tmp_path / "direct", to="zero", world_size=3, stage=3)
    made, direct = (ckpttool.inspect(tmp_path / each) for each in ("back", "direct"))
    assert [g.hyperparameters for g in made.groups] == [g.hyperparameters for g in direct.groups]
    assert made.step == direct.step
    assert made.client_state == json.loads(json.dumps(direct.client_state))  # a tuple is an array


def test_transformers_loads_the_weights_beside_the_optimizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _export("zero2-dp2-bf16-trainer", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = ckpttool.load_state_dict(source("zero2-dp2-bf16-trainer"))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_mix_of_two_saves_is_refused(tmp_path: Path) -> None:
    for name in ("zero2-dp2-bf16", "zero2-dp4-bf16"):
        _export(name, tmp_path / name)
    shutil.copy(tmp_path / "zero2-dp4-bf16" / "model.safetensors", tmp_path / "zero2-dp2-bf16")
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "zero2-dp2-bf16")
    ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "plain", to="safetensors")
    shutil.copy(tmp_path / "zero2-dp4-bf16" / "optimizer.safetensors", tmp_path / "plain")
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "plain")


def test_weights_that_replace_others_take_the_old_optimizer_away(tmp_path: Path) -> None:
    _export("zero2-dp2-bf16", tmp_path / "out")
    ckpttool.consolidate(source("zero2-dp4-bf16"), tmp_path / "out", to="safetensors", overwrite=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_states_without_weights_or_with_a_missing_part_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _export("zero2-dp2-bf16", out, max_shard_size="6kB")
    for path in out.glob("model*"):
        path.rename(tmp_path / path.name)
    with refused(CkptError):
        ckpttool.inspect(out / "optimizer-00001-of-00004.safetensors")
    for path in tmp_path.glob("model*"):
        path.rename(out / path.name)
    (out / "optimizer-00002-of-00004.safetensors").unlink()
    with refused(LayoutError):
        ckpttool.inspect(out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "has version 3"),
        ({"groups": [{}]}, "its description of the optimizer is broken"),
        ({"buffers": ["no.such"]}, r"names .no\.such., which the weights beside it lack"),
        ({"states": ["exp_avg"]}, r"holds .exp_avg_sq\..*, which the description does not list"),
        ({"dtype": "F33"}, "its description of the optimizer is broken"),
        ({"groups": 7}, "its description of the optimizer is broken"),
    ],
)
def test_a_broken_description_is_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    _export("zero2-dp2-bf16", tmp_path / "out")
    path = tmp_path / "out" / "optimizer.safetensors"
    described = _metadata(path) | change
    save_file(load_file(path), path, {METADATA: json.dumps(described)})
    with pytest.raises(LayoutError, match=said) as caught:
        ckpttool.inspect(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    _export("zero2-dp2-bf16", tmp_path / "out")
    path = tmp_path / "out" / "optimizer.safetensors"
    described, tensors = _metadata(path), load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, {METADATA: json.dumps(described)})
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("zero2-dp2-fp16", True), ("zero0-dp2-fp16", True), ("zero2-dp2-bf16", False), ("zero3-dp2-fp32", False),
        ("zero0-dp2-bf16", False), ("zero0-dp2-fp32", False),
    ],
)  # fmt: skip
def test_a_loss_scale_that_is_not_kept_is_noted(name: str, noted: bool, tmp_path: Path) -> None:
    notes = _export(name, tmp_path / "out").notes
    assert ("not kept: the loss scale; a resumed fp16 run begins with a new one" in notes) == noted


def test_weights_alone_have_no_optimizer_to_write(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "plain", to="safetensors")
    with refused(PlanError):
        ckpttool.consolidate(tmp_path / "plain", tmp_path / "out", to="safetensors", optimizer=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"to": "torch"},
        {"include": ["a*"]},
        {"weights_from": "module"},
        {"rename": ["module"]},
        {"rename_map": {"up.weight": "x"}},
    ],
)
def test_a_part_of_the_model_has_no_optimizer(options: dict[str, Any], tmp_path: Path) -> None:
    with refused(ArgumentError):
        ckpttool.consolidate(
            source("zero2-dp2-bf16"), tmp_path / "out", **{"to": "safetensors", **options}, optimizer=True
        )


def test_a_bucket_holds_the_same_files(tmp_path: Path) -> None:
    _export("zero3-dp2-bf16", tmp_path / "out")
    with server.running() as endpoint:
        client = server.client(endpoint)
        client.create_bucket(Bucket="exports")
        storage = {"endpoint_url": endpoint, "key": server.KEY, "secret": server.SECRET}
        ckpttool.consolidate(
            source("zero3-dp2-bf16"), "s3://exports/out", to="safetensors", optimizer=True, storage_options=storage
        )
        for path in (tmp_path / "out").iterdir():
            body = client.get_object(Bucket="exports", Key=f"out/{path.name}")["Body"].read()
            assert body == path.read_bytes(), path.name
        found = ckpttool.inspect("s3://exports/out", storage_options=storage)
        assert digest(found, jobs=1, advance=lambda _: None) == _digests(source("zero3-dp2-bf16"))


def test_nan_and_infinity_of_the_client_state_are_kept(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    numbers = {
        "loss": math.nan,
        "best": [math.inf, {"worst": -math.inf}],
        "float": "nan",
        "one": {"ckpttool.float": "nan"},
    }
    damage.edit_model(root, lambda file: file.update(numbers))
    report = ckpttool.consolidate(root, tmp_path / "out", to="safetensors", optimizer=True)
    assert [n for n in report.notes if "JSON" in n] == ["not kept: one of the client state, which JSON cannot hold"]
    kept = ckpttool.inspect(tmp_path / "out").client_state
    assert repr([kept[key] for key in ("loss", "best", "float")]) == "[nan, [inf, {'worst': -inf}], 'nan']"
    json.loads(json.dumps(_metadata(tmp_path / "out" / "optimizer.safetensors")), parse_constant=lambda _: 1 / 0)
