"""Output and exit codes of ``diff``, ``digest`` and ``extract``."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool import storage
from tests import damage
from tests.cli.command import EXTENSIONS_READING, ckpttool
from tests.truth import source, truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "zero2-dp2-bf16"
SRC = source(NAME)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The consolidated weights of a checkpoint."""
    assert ckpttool("consolidate", SRC, tmp_path / "weights", "--to", "safetensors").code == 0
    return tmp_path / "weights"


def change(file: Path, name: str, index: int, value: float) -> None:
    """Change one value of a tensor in a file of weights."""
    tensors = load_file(str(file))
    tensors[name].view(-1)[index] = value
    save_file(tensors, str(file), metadata={"format": "pt"})


def test_equal_checkpoints_exit_with_0() -> None:
    done = ckpttool("diff", SRC, source("zero1-dp2-bf16"))
    assert (done.code, done.stdout) == (0, "equal (32 tensors: weights and optimizer states)\n")


def test_weights_alone_are_compared_with_weights_alone(weights: Path) -> None:
    for sides in ((SRC, weights), (weights, SRC)):
        done = ckpttool("diff", *sides)
        assert done.code == 0
        assert f"{weights} holds no optimizer states: only weights are compared" in done.stdout
        assert "2 tensors have equal values in different types" in done.stdout
        assert done.stdout.endswith("equal (14 tensors: weights)\n")


OTHER_VALUES = {
    "step": (damage.edit_model, lambda f: f.update(global_steps=7)),
    "scheduler.last_batch_iteration": (damage.edit_model, lambda f: f["lr_scheduler"].update(last_batch_iteration=7)),
    "client_state.nested.seen[1]": (damage.edit_model, lambda f: f["nested"].update(seen=(1, 7))),
    "client_state.added": (damage.edit_model, lambda f: f.update(added=float("nan"))),
    "lr of ": (
        damage.edit_optimizer,
        lambda f: f["base_optimizer_state"]["param_groups"][1].update(lr=7.0),
    ),
    "loss_scaler.state.cur_scale": (
        damage.edit_optimizer,
        lambda f: f["loss_scaler"].state.update(cur_scale=7.0),
    ),
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_all_compares_the_values_besides_tensors_too(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(NAME)
    edit, change = OTHER_VALUES[name]
    assert ckpttool("diff", SRC, root, "--all").code == 0
    edit(root, change)
    assert ckpttool("diff", SRC, root).code == 0
    done = ckpttool("diff", SRC, root, "--all", "--json")
    told = json.loads(done.stdout)
    assert (done.code, told["equal"], len(told["others"])) == (1, False, 1)
    (other,) = told["others"]
    assert other["name"].startswith(name)
    assert other["b"] == ("nan" if "added" in name else "7.0" if "." in other["b"] else "7")
    shown = ckpttool("diff", SRC, root, "--all").stdout
    assert other["name"] in shown
    assert "0 of 32 tensors differ, other values that differ: 1 (weights and optimizer states; steps, " in shown
    assert ckpttool("diff", root, root, "--all").code == 0


def test_all_holds_for_a_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    assert ckpttool("convert", SRC, tmp_path / "out", "--to", "zero", "--world-size", "3", "--stage", "3").code == 0
    others = "steps, hyper-parameters, scheduler, loss scale and client state"
    done = ckpttool("diff", SRC, tmp_path / "out", "--all")
    assert done.stdout == f"equal (32 tensors: weights and optimizer states; {others})\n"


def test_all_compares_tensors_of_the_client_state(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(NAME)
    roots = [root, root.parent / "other"]
    shutil.copytree(roots[0], roots[1])
    for n, root in enumerate(roots):
        path = damage.model_file(root)
        file = torch.load(path, weights_only=False)
        torch.save({**file, "seen": torch.arange(5) * (n + 1)}, path)
    assert ckpttool("diff", *roots).code == 0
    done = ckpttool("diff", *roots, "--all")
    assert done.code == 1
    assert "client_state.seen  I64 [5], digest " in done.stdout
    assert ckpttool("diff", roots[1], roots[1], "--all").code == 0


def test_differences_are_printed_and_exit_with_1(weights: Path) -> None:
    change(weights / "model.safetensors", "up.bias", 3, 8.0)
    old = truth(NAME).tensors["fp32/up.bias"][3].item()
    done = ckpttool("diff", SRC, weights, "--json")
    assert done.code == 1
    told = json.loads(done.stdout)
    assert not told["equal"]
    (found,) = (t for t in told["tensors"] if t["kind"] != "equal")
    assert (found["name"], found["state"], found["kind"], found["differing"]) == ("up.bias", "weights", "values", 1)
    assert found["max_abs"] == abs(old - 8.0)
    assert found["max_rel"] == abs(old - 8.0) / 8.0
    assert "1 of 14 tensors differ" in ckpttool("diff", SRC, weights).stdout


def test_tolerances(weights: Path) -> None:
    old = truth(NAME).tensors["fp32/up.bias"][3].item()
    change(weights / "model.safetensors", "up.bias", 3, old + 0.001)
    assert ckpttool("diff", SRC, weights).code == 1
    assert ckpttool("diff", SRC, weights, "--atol", "0.0011").code == 0
    assert ckpttool("diff", SRC, weights, "--atol", "0.0009").code == 1
    assert ckpttool("diff", SRC, weights, "--rtol", str(0.0011 / abs(old))).code == 0
    assert ckpttool("diff", SRC, weights, "--rtol", str(0.0009 / abs(old + 0.001))).code == 1


def test_not_a_number_equals_itself_and_nothing_else(weights: Path, tmp_path: Path) -> None:
    change(weights / "model.safetensors", "up.bias", 3, float("nan"))
    shutil.copytree(weights, tmp_path / "same")
    assert ckpttool("diff", weights, tmp_path / "same").code == 0
    assert json.loads(ckpttool("diff", SRC, weights, "--json", "--include", "up.bias").stdout)["tensors"][0] == {
        "name": "up.bias", "state": "weights", "kind": "values", "dtypes": ["F32", "F32"], "shapes": [[37], [37]],
        "differing": 1, "max_abs": "inf", "max_rel": "inf",
    }  # fmt: skip


def test_infinity_is_near_nothing_but_itself(weights: Path, tmp_path: Path) -> None:
    shutil.copytree(weights, tmp_path / "other")
    change(weights / "model.safetensors", "up.bias", 3, float("inf"))
    for value in (1.0, float("nan"), -float("inf")):
        change(tmp_path / "other" / "model.safetensors", "up.bias", 3, value)
        for sides in ((weights, tmp_path / "other"), (tmp_path / "other", weights)):
            assert ckpttool("diff", *sides, "--rtol", "0.1", "--atol", "5").code == 1
    change(tmp_path / "other" / "model.safetensors", "up.bias", 3, float("inf"))
    assert ckpttool("diff", weights, tmp_path / "other", "--rtol", "0.1").code == 0


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    for command in (("diff", SRC, SRC), *((name, SRC) for name in EXTENSIONS_READING)):
        assert "holds no tensor of that name" in ckpttool(*command, "--include", "nothing").error


def test_missing_tensors_and_other_shapes(weights: Path) -> None:
    file = weights / "model.safetensors"
    tensors = load_file(str(file))
    del tensors["tiny"]
    tensors["new"] = torch.zeros(2)
    tensors["up.bias"] = tensors["up.bias"][:5].clone()
    save_file(tensors, str(file))
    told = json.loads(ckpttool("diff", SRC, weights, "--json").stdout)
    kinds = {t["name"]: t["kind"] for t in told["tensors"] if t["kind"] != "equal"}
    assert kinds == {"tiny": "only in a", "up.bias": "shape", "new": "only in b"}
    assert ckpttool("diff", SRC, weights, "--exclude", "tiny", "--exclude", "new", "--exclude", "up.bias").code == 0


def test_a_tied_tensor_may_be_stored_under_its_other_name(weights: Path) -> None:
    file = weights / "model.safetensors"
    tensors = load_file(str(file))
    tensors["head.weight"] = tensors.pop("embed.weight")
    save_file(tensors, str(file))
    assert ckpttool("diff", SRC, weights).code == 0
    assert ckpttool("diff", weights, SRC).code == 0


def test_states_are_compared_too(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(NAME)
    file = damage.optimizer_file(root)
    saved = torch.load(file, weights_only=False)
    saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg_sq"][7] += 1
    torch.save(saved, file)
    told = json.loads(ckpttool("diff", SRC, root, "--json").stdout)
    different = [(t["name"], t["state"], t["differing"]) for t in told["tensors"] if t["kind"] != "equal"]
    assert [(state, count) for _, state, count in different] == [("exp_avg_sq", 1)]


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".pt"])
def test_a_tensor_is_written_to_a_file(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"x{suffix}"
    done = ckpttool("extract", source("zero3-dp3-bf16"), "up.weight", "--state", "exp_avg", out)
    assert done.code == 0
    expected = truth("zero3-dp3-bf16").tensors["exp_avg/up.weight"]
    if suffix == ".safetensors":
        read = load_file(str(out))["up.weight"]
    else:
        read = torch.load(out) if suffix == ".pt" else torch.from_numpy(np.load(out))
    assert torch.equal(read, expected)
    again = ckpttool("extract", source("zero3-dp3-bf16"), "up.weight", out)
    assert again.error.endswith(f"{out}: exists already; choose another name, or pass --overwrite")
    assert ckpttool("extract", source("zero3-dp3-bf16"), "up.bias", out, "--overwrite").code == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    expected = truth("zero3-dp3-bf16").tensors["fp32/up.weight"].numpy()
    for text, part in (
        ("3", 3),
        ("-1", -1),
        ("2:9", slice(2, 9)),
        ("[:, 4]", (slice(None), 4)),
        (" 5:7, 1: ", (slice(5, 7), slice(1, None))),
    ):
        out = tmp_path / "x.npy"
        done = ckpttool("extract", source("zero3-dp3-bf16"), "up.weight", out, "--overwrite", f"--index={text}")
        assert done.code == 0, done.stderr
        assert np.array_equal(np.load(out), expected[part])


def test_an_impossible_extract_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    for arguments, told in (
        (["nothing", out], "holds no parameter nothing; inspect --params lists the names"),
        (["up.weight", out, "--state", "sum"], "holds no sum of up.weight; choose one of fp32, exp_avg"),
        (["up.weight", out, "--index", "0,0,0"], "--index: has 3 indices, but the shape is (37, 18); leave out"),
        (["up.weight", out, "--index", "37"], "--index: has 37 for a dimension of 37; choose an index"),
        (["up.weight", tmp_path / "x.txt"], "has an unknown suffix; choose .safetensors, .npy or .pt"),
        (["up.weight", out, "--state", "module"], "cannot hold bf16, which numpy lacks; choose .safetensors"),
        (["up.weight", tmp_path / "no" / "x.npy"], "does not exist; check the path"),
    ):
        assert told in ckpttool("extract", SRC, *map(str, arguments)).error
    assert list(tmp_path.iterdir()) == []


def test_bf16_survives(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert ckpttool("extract", SRC, "up.weight", "--state", "module", out).code == 0
    assert torch.equal(load_file(str(out))["up.weight"], truth(NAME).tensors["module/up.weight"])
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


def _digest(src: object) -> dict[str, str]:
    told: dict[str, str] = json.loads(ckpttool("digest", src, "--json").stdout)
    return told


def test_a_digest_does_not_depend_on_how_a_checkpoint_is_stored(weights: Path, tmp_path: Path) -> None:
    assert ckpttool("consolidate", SRC, tmp_path / "torch", "--to", "torch", "--max-shard-size", "3kB").code == 0
    first = _digest(SRC)
    assert first == _digest(source("zero1-dp2-bf16")) == _digest(source("zero2-dp2-bf16-legacy"))
    assert first["weights"] == _digest(weights)["weights"] == _digest(tmp_path / "torch")["weights"]
    assert _digest(weights)["optimizer"] is None
    assert first != _digest(source("zero2-dp3-bf16"))


def test_one_flipped_bit_makes_another_digest(weights: Path) -> None:
    before = _digest(weights)
    file = weights / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert _digest(weights)["weights"] != before["weights"]


def test_proving_commits_what_is_the_same_and_tells_its_digest(tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        out = tmp_path / dtype
        done = ckpttool("consolidate", SRC, out, "--to", "safetensors", "--dtype", dtype, "--prove", "--json")
        assert done.code == 0
        assert json.loads(done.stdout)["written"]["digest"] == _digest(out)["weights"]


def test_proving_finds_what_was_written_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = storage.write_at

    def wrong(fd: int, data: bytes | memoryview, start: int, target: str) -> None:
        changed = bytearray(data)
        if len(changed) > 2000:
            changed[-1] ^= 1
        right(fd, memoryview(changed), start, target)

    monkeypatch.setattr("ckpttool.storage.local_writer.write_at", wrong)
    error = ckpttool("consolidate", SRC, tmp_path / "out", "--to", "safetensors", "--prove").error
    assert " is not the source: weights of " in error
    assert " has other values than were saved" in error
    assert list(tmp_path.iterdir()) == []
