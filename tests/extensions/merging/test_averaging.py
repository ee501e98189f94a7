"""Averages equal the same sums in torch, over the states that live engines held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import ArgumentError
from ckpttool.extensions.merging.averaging import DECAYS, decay_weights, moving_average_weights, newest_of
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.deepspeed_engines import Load, load_all
from tests.model.workers import PickledTasks
from tests.truth import NAMES, source, truth

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _shapes(name: str) -> dict[str, torch.Size]:
    return {n: t.shape for n, t in truth(name).state_dict(torch.float32).items()}


ALIKE = [n for n in NAMES if _shapes(n) == _shapes("zero2-dp2-bf16")]
"""Checkpoints of one model: stages 0 to 3, universal, MiCS, of old releases, several types and optimizers."""
SAME = [
    ["autotp-zero2-tp2-dp2-bf16", "autotp-zero3-tp2-dp2-bf16"],
    ["moe-zero0-dp2-ep2-bf16", "moe-zero1-dp2-ep2-bf16"],
    ["megatron-zero1-tp2-dp2-bf16", "universal-megatron-zero2-tp2-dp2-bf16"],
    ["zero2-dp2-bf16-trainer", "zero3-dp2-bf16-trainer"],
]
"""Other models, of which several checkpoints are there."""
GROUPS = [*(ALIKE[i::13] for i in range(13)), *SAME]


def _mean(states: Sequence[torch.Tensor], weights: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """The same sums in the same order, by torch."""
    total = states[0].to(dtype) * weights[0]
    for state, weight in zip(states[1:], weights[1:], strict=True):
        total += state.to(dtype) * weight
    return total / sum(weights)


def _expected(
    names: Sequence[str], weights: Sequence[float], dtype: torch.dtype, accumulate: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """What an average of bundled checkpoints must give: of float32 states, but buffers keep their type."""
    states = [truth(n).state_dict(torch.float32) for n in names]
    buffers = {k.partition("/")[2] for k in truth(names[0]).states if k.startswith("buffer/")}
    result = {}
    for name, newest in states[-1].items():
        if newest.is_floating_point():
            mean = _mean([s[name] for s in states], weights, accumulate)
            result[name] = mean.to(newest.dtype if name in buffers else dtype)
        else:
            result[name] = newest
    return result


def _assert_same(out: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("number", "names"), sampling.some(enumerate(GROUPS), 9), ids=lambda v: v if isinstance(v, int) else v[0]
)
def test_mean_equals_torchs(number: int, names: list[str], tmp_path: Path) -> None:
    weights = [[1.0] * len(names), [0.3 + 0.7 * i for i in range(len(names))]][number % 2]
    given: Any = {} if number % 2 == 0 else {"weights": weights}
    dtype: Any = ("fp32", "bf16", "fp16")[number % 3]
    accumulate: Any = ("fp32", "fp32", "fp64")[number % 3]
    report = ckpttool.average(
        [source(n) for n in names], tmp_path / "out", to="safetensors", dtype=dtype, accumulate=accumulate, prove=True,
        check="full", **given,
    )  # fmt: skip
    in_type = {"fp32": torch.float32, "fp64": torch.float64}[accumulate]
    _assert_same(tmp_path / "out", _expected(names, weights, DTYPES[dtype], in_type))
    assert report.tied == truth(names[-1]).tied
    assert sum(s.weight for s in report.sources) == pytest.approx(1)


def test_sources_of_every_format_and_storage(s3: Any, tmp_path: Path) -> None:
    """ZeRO on disk, ZeRO in a bucket, safetensors in bf16 and in shards, DCP, universal; to a bucket."""
    names = ["zero2-dp3-bf16", "zero3-dp4-bf16", "zero1-dp2-fp16", "zero3-dp2-bf16", "universal-zero3-dp2-bf16"]
    s3.upload(Path(source(names[1])), "three")
    ckpttool.consolidate(source(names[2]), tmp_path / "weights", to="safetensors", dtype="bf16", max_shard_size="3kB")
    ckpttool.convert(source(names[3]), s3.url("dcp"), to="dcp")
    places = [source(names[0]), s3.url("three"), tmp_path / "weights", s3.url("dcp"), source(names[4])]
    weights = [3.0, -0.5, 0.25, 1.0, 1.5]
    ckpttool.average(places, s3.url("mean"), to="safetensors", weights=weights, prove=True)
    (tmp_path / "mean").mkdir()
    (tmp_path / "mean/model.safetensors").write_bytes(s3.get("mean/model.safetensors"))
    states = [truth(n).state_dict(torch.float32) for n in names]
    narrowed = {n: t.to(torch.bfloat16).float() if t.is_floating_point() else t for n, t in states[2].items()}
    buffers = {k.partition("/")[2] for k in truth(names[0]).states if k.startswith("buffer/")}
    states[2] = {n: states[2][n] if n in buffers else t for n, t in narrowed.items()}
    expected = {n: _mean([s[n] for s in states], weights, torch.float32) if t.is_floating_point() else t
                for n, t in states[-1].items()}  # fmt: skip
    _assert_same(tmp_path / "mean", expected)
    assert s3.uploads() == []


# ------------------------------------------------------------------------------------------------- weights


@given(st.sampled_from(sorted(DECAYS)), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_weights_of_a_schedule_stand_for_its_decay(decay: str, count: int, seed: int) -> None:
    """The mean is where training would have come, had the rate between two checkpoints been the schedule's."""
    random = np.random.default_rng(seed)
    begin, updates = random.normal(), random.normal(size=count - 1)
    checkpoints = begin + np.concatenate([[0.0], np.cumsum(updates)])
    weights = decay_weights(decay, count)
    rates = [DECAYS[decay](i / count) for i in range(1, count)]
    mean = float(np.dot(weights, checkpoints)) / sum(weights)
    assert mean == pytest.approx(begin + float(np.dot(rates, updates)), abs=1e-9)
    assert all(w >= 0 for w in weights)


@given(st.floats(0.01, 0.99), st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_weights_of_a_moving_average_are_those_of_its_recurrence(decay: float, values: list[float]) -> None:
    moving = values[0]
    for value in values[1:]:
        moving = decay * moving + (1 - decay) * value
    weights = moving_average_weights(decay, len(values))
    assert sum(weights) == pytest.approx(1)
    assert float(np.dot(weights, values)) == pytest.approx(moving, abs=1e-9)


def _trained(directory: Path, step: int, **tensors: torch.Tensor) -> Path:
    """A small ZeRO checkpoint of one step, made from weights."""
    save_file(tensors, directory / f"{step}.safetensors")
    ckpttool.convert(directory / f"{step}.safetensors", directory / f"zero{step}", to="zero", world_size=2, stage=2)
    for path in (directory / f"zero{step}").rglob("*model_states.pt"):
        states = torch.load(path, weights_only=False)
        torch.save(states | {"global_steps": step}, path)
    return directory / f"zero{step}"


def test_schedule_and_moving_average_in_the_order_of_the_steps(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    saved = [torch.randn(7, 11, generator=generator) for _ in range(4)]
    sources = [_trained(tmp_path, 10 * (i + 1), weight=t) for i, t in enumerate(saved)]
    for options, weights in (
        ({"schedule": "1-sqrt"}, decay_weights("1-sqrt", 4)),
        ({"schedule": "cosine"}, decay_weights("cosine", 4)),
        ({"ema": 0.8}, moving_average_weights(0.8, 4)),
    ):
        out = tmp_path / str(options)
        report = ckpttool.average(sources, out, to="safetensors", **options)
        assert [s.step for s in report.sources] == [10, 20, 30, 40]
        _assert_same(out, {"weight": _mean(saved, weights, torch.float32)})
        done = command("average", *reversed(sources), tmp_path / "wrong", "--to", "safetensors", *_flags(options))
        assert "is of step 30, but follows" in done.error
    report = ckpttool.average(sources, tmp_path / "newest", to="safetensors", schedule="constant")
    _assert_same(tmp_path / "newest", {"weight": saved[-1]})
    assert report.written.nbytes_read <= 3 * saved[-1].nbytes  # sources without weight are not read
    # The newest is the one with the highest step, wherever it stands; the order of a plain mean is free.
    assert newest_of([ckpttool.inspect(sources[i]) for i in (1, 3, 0)]) == 1
    files = [tmp_path / f"{step}.safetensors" for step in (10, 20)]
    report = ckpttool.average(files, tmp_path / "zero", to="zero", world_size=2, stage=1)
    assert any(note.startswith("written from weights only") for note in report.notes)
    held = ckpttool.load_state_dict(tmp_path / "zero", dtype="fp32")
    assert torch.equal(held["weight"], _mean(saved[:2], [1, 1], torch.float32))


def _flags(options: dict[str, Any]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


# ------------------------------------------------------------------------------------------------- to ZeRO


@pytest.mark.deepspeed
def test_live_engine_continues_from_the_mean_with_the_newest_optimizer(tmp_path: Path) -> None:
    names = ["zero3-dp4-bf16", "zero1-dp2-bf16", "zero2-dp3-bf16"]
    loads = []
    for stage, ranks in ((2, 2), (3, 3)):
        out = tmp_path / f"zero{stage}"
        report = ckpttool.average(
            [source(n) for n in names], out, to="zero", weights=[1, 2, 5], stage=stage, world_size=ranks, prove=True
        )
        assert report.optimizer == ckpttool.inspect(source(names[2])).location
        assert f"optimizer, step and scheduler are copied from {report.optimizer}" in report.notes
        loads.append(Load(str(stage), str(out), stage, ranks))
    means = _expected(names, [1, 2, 5], torch.float32)
    newest = truth(names[-1])
    frozen = {*newest.facts["frozen"]}
    for engine in load_all(loads).values():
        assert engine.error == ""
        assert engine.facts["step"] == ""
        assert engine.facts["global_steps"] == newest.facts["global_steps"]
        for key, tensor in newest.tensors.items():
            kind, _, name = key.partition("/")
            if name in frozen and kind == "fp32":
                continue
            expected = tensor
            if kind in {"fp32", "module", "buffer"}:
                expected = means[name].to(tensor.dtype)
            assert torch.equal(engine.tensors[key], expected), key


# ------------------------------------------------------------------------------------------------- refusals


def test_sources_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    base = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    wrong = {
        "more": (base | {"c": torch.ones(1)}, "more.safetensors: holds c, but "),
        "fewer": ({"a": base["a"]}, "fewer.safetensors: holds no b, but "),
        "shape": (base | {"b": torch.ones(2, 2)}, "shape.safetensors: holds b with shape [2, 2], but "),
        "type": (base | {"b": torch.ones(4).to(torch.float8_e4m3fn)}, "holds b as F8_E4M3, which has no mean"),
    }
    save_file(base, tmp_path / "base.safetensors")
    held = sorted(p.name for p in tmp_path.iterdir())
    for name, (tensors, message) in wrong.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        sources = [tmp_path / f"{name}.safetensors", tmp_path / "base.safetensors"]
        error = command("average", *sources, tmp_path / "out", "--to", "safetensors").error
        assert message in error
        assert "--exclude" in error
        if name != "shape":
            continue
        # What does not fit may be left out.
        ckpttool.average(sources, tmp_path / "part", to="safetensors", exclude=["b"])
        _assert_same(tmp_path / "part", {"a": base["a"]})
    assert sorted({p.name for p in tmp_path.iterdir()} - {f"{n}.safetensors" for n in wrong} - {"part"}) == held


def test_tied_tensor_that_another_source_holds_twice_is_refused(tmp_path: Path) -> None:
    tied = truth("zero3-dp2-bf16").tied
    weights = truth("zero3-dp2-bf16").state_dict(torch.float32)
    apart = weights | {alias: weights[name] + 1 for alias, name in tied.items()}
    save_file(apart, tmp_path / "apart.safetensors")
    arguments = [tmp_path / "apart.safetensors", source("zero3-dp2-bf16"), tmp_path / "out", "--to", "safetensors"]
    assert "holds head.weight as a tensor of its own, but in" in command("average", *arguments).error
    # The same tensors under the tied name alone are no contradiction.
    renamed = {{v: k for k, v in tied.items()}.get(name, name): t for name, t in weights.items()}
    save_file(renamed, tmp_path / "renamed.safetensors")
    ckpttool.average([tmp_path / "renamed.safetensors", source("zero3-dp2-bf16")], tmp_path / "out", to="safetensors")
    _assert_same(tmp_path / "out", weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2, 3]}, "weights: has 3 numbers for 2 checkpoints"),
        ({"weights": [1, -1]}, "weights: is [1.0, -1.0], whose sum is not a number other than 0"),
        ({"weights": [1, float("nan")]}, "weights: is "),
        ({"ema": 1.5}, "ema: is 1.5, not between 0 and 1"),
        ({"ema": 0.5, "schedule": "linear"}, "schedule: cannot be combined with ema"),
        ({"schedule": "steep"}, "schedule: is 'steep', not constant, linear, cosine or 1-sqrt"),
        ({"stage": 2}, "stage: is for zero, not for safetensors"),
        ({"to": "zero", "overwrite": True}, "overwrite: is for safetensors, not for zero"),
        ({"accumulate": "bf16"}, "accumulate: is 'bf16', not fp32 or fp64"),
    ],
)
def test_wrong_arguments_are_refused_before_a_file_is_opened(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[").replace(".", r"\.")):
        ckpttool.average(["a", "b"], "out", **{"to": "safetensors", **options})


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1e39, 1e39], "with 1e+39, which is neither 0 nor"),
        ([1e38, 1e38], "with 1e+38, which is neither 0 nor"),
        ([3e38, -1e38], "with 3e+38, which is neither 0 nor"),
        ([1, 1e-46], "with 1e-46, which is neither 0 nor"),
        ([1e-40, 1e-40], "with 1e-40, which is neither 0 nor"),
        ([1, float("inf")], "with inf, which is neither 0 nor"),
        ([1, float("nan")], "with nan, which is neither 0 nor"),
        ([1e30, 1e30], "whose sum 2e+30 is not"),
        ([1e-20, -1e-20 * (1 - 2**-52)], "whose sum 1.504632769052528e-36 is not"),
    ],
)
def test_weights_near_the_limits_of_fp32_are_refused_before_a_file_is_opened(
    weights: list[float], problem: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        ckpttool.average(["a", "b"], "out", to="safetensors", weights=weights)
    assert f"{problem} from 1e-30 to 1e+30 in magnitude; scale the weights" in str(caught.value)


@pytest.mark.parametrize("scale", [1e-30, 4e29, -1.0])
def test_the_scale_of_the_weights_does_not_matter(scale: float, tmp_path: Path) -> None:
    names = ["zero2-dp2-bf16", "zero2-dp3-bf16"]
    ckpttool.average([source(n) for n in names], tmp_path / "out", to="safetensors", weights=[scale, scale])
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in _expected(names, [1, 1], torch.float32).items():
        if name in found:
            torch.testing.assert_close(found[name], expected)


def test_one_checkpoint_named_twice_is_refused(tmp_path: Path) -> None:
    src = source("zero2-dp2-bf16")
    error = command("average", src, f"{src}/global_step3", tmp_path / "out", "--to", "safetensors").error
    assert error.startswith(f"Error: SRC names {src}/global_step3 twice") or "twice; name it once" in error
    assert command("average", src, tmp_path / "out", "--to", "safetensors").code == 2


# ------------------------------------------------------------------------------------------------- resources


def test_tasks_of_a_cluster_compute_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["zero2-dp3-bf16", "zero3-dp4-bf16", "zero0-dp2-fp32"]
    monkeypatch.setattr("ckpttool.api._run._workers_of", lambda *_: PickledTasks())
    monkeypatch.setattr("ckpttool.execution.distributed.TASK_BYTES", 1000)  # many parts of a tensor
    ckpttool.average([source(n) for n in names], tmp_path / "out", to="safetensors", check="full")
    _assert_same(tmp_path / "out", _expected(names, [1, 1, 1], torch.float32))


def test_memory_depends_neither_on_the_model_nor_on_the_number_of_sources(tmp_path: Path) -> None:
    peaks = []
    for rows, count in ((1_000, 2), (12_000, 2), (1_000, 12)):
        sources = [str(tmp_path / f"{rows}-{i}.safetensors") for i in range(count)]
        for i, path in enumerate(sources):
            save_file({"weight": torch.full((rows, 1024), float(i)), "bias": torch.ones(8)}, path)
        out = str(tmp_path / f"{rows}-{count}")
        code = f"import ckpttool; ckpttool.average({sources}, {out!r}, to='safetensors')"
        script = f"{code}; print(open('/proc/self/status').read())"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        peaks.append(int(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("VmHWM"))))
    assert max(peaks) < min(peaks) + 12_000, peaks  # kB; the largest model has 48 MB a source


def test_json_and_text(tmp_path: Path) -> None:
    names = [source("zero2-dp2-bf16"), source("zero3-dp2-bf16")]
    done = command("average", *names, tmp_path / "out", "--to", "safetensors", "--weights", "1,3", "--json")
    told = json.loads(done.stdout)
    assert [s["weight"] for s in told["sources"]] == [0.25, 0.75]
    assert list(told) == [
        "version", "written", "to", "sources", "optimizer", "tensors", "elements", "dtype", "tied", "sidecars", "notes",
    ]  # fmt: skip
    done = command("average", *names, tmp_path / "none", "--to", "zero", "--dry-run")
    assert "would write the mean of 2 checkpoints" in done.stdout
    assert not (tmp_path / "none").exists()
