"""What users really have: files that are gone, cut off, mixed or no checkpoint at all.

Every command says so in one line that names the file and what to do, exits with 1 and leaves nothing behind.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from tests import damage
from tests.cli.command import ckpttool, remains
from tests.damage import flip, mix_in, model_file, optimizer_file, resave, tag_of, truncate
from tests.truth import source, truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ZERO2, ZERO3 = "zero2-dp2-bf16", "zero3-dp2-bf16"
OPTIMIZER_0 = "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIMIZER_1 = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "global_step3/mp_rank_00_model_states.pt"
MODEL_0 = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"
MODEL_1 = "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Case:
    """One thing that can be wrong, and what must be said about it."""

    id: str
    checkpoint: str
    inflict: Callable[[Path], object]
    named: str
    """The file that must be named, relative to the checkpoint."""
    says: str


def _swap(kind: str, rank: int) -> Callable[[Path], object]:
    """Take one file from a later save of the same run."""

    def inflict(root: Path) -> None:
        other = root.parent / "other"
        shutil.copytree(root, other)
        resave(other, step=7)
        shutil.copyfile(damage.files_of(other, kind)[rank], damage.files_of(root, kind)[rank])

    return inflict


def _make_empty(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def _make_file(root: Path) -> None:
    shutil.rmtree(root)
    root.touch()


UNREADABLE = [
    Case("rank's optimizer file is missing", ZERO2, lambda c: optimizer_file(c, 1).unlink(),
         OPTIMIZER_1, "is missing (ZeRO-2 over 2 ranks, found only rank 0); restore it"),
    Case("first rank's optimizer file is missing", ZERO3, lambda c: optimizer_file(c, 0).unlink(),
         OPTIMIZER_0, "is missing (ZeRO-3 over 2 ranks, found only rank 1); restore it"),
    Case("model file is missing", ZERO2, lambda c: model_file(c).unlink(),
         MODEL, "is missing (ZeRO-2 over 2 ranks); restore it"),
    Case("rank's model file is missing", ZERO3, lambda c: model_file(c, 1).unlink(),
         MODEL_1, "is missing (ZeRO-3 over 2 ranks); restore it"),
    Case("file is empty", ZERO2, lambda c: damage.empty(optimizer_file(c, 1)),
         OPTIMIZER_1, "is empty; restore it"),
    Case("file is all zeros", ZERO2, lambda c: damage.zeros(optimizer_file(c, 1)),
         OPTIMIZER_1, "begins with zeros: it was never written"),
    Case("file is cut off", ZERO3, lambda c: truncate(optimizer_file(c, 1), 9000),
         OPTIMIZER_1, "truncated or damaged: restore it"),
    Case("zip directory is broken", ZERO3, lambda c: damage.break_zip_directory(model_file(c, 1)),
         MODEL_1, "the zip directory is broken"),
    Case("file is text", ZERO2, lambda c: damage.make_text(optimizer_file(c, 1)),
         OPTIMIZER_1, "is an HTML page"),
    Case("file is a Git LFS pointer", ZERO3, lambda c: damage.make_git_lfs_pointer(model_file(c)),
         MODEL_0, "is a pointer of git-lfs, not the file; run: git lfs pull"),
    Case("file is a directory", ZERO2, lambda c: damage.make_directory(optimizer_file(c, 1)),
         OPTIMIZER_1, "is not a file (ZeRO-2 over 2 ranks"),
    Case("file is a pipe", ZERO2, lambda c: damage.make_pipe(model_file(c)),
         MODEL, "is not a regular file; remove it"),
    Case("file is a dangling link", ZERO2, lambda c: damage.make_dangling_link(optimizer_file(c, 1)),
         OPTIMIZER_1, "is a link to 'gone', which is not there"),
    Case("rank of another world size", ZERO2, lambda c: mix_in(optimizer_file(c, 1), "zero2-dp4-bf16"),
         OPTIMIZER_1, "was saved by 4 ranks, but bf16_zero_pp_rank_0"),
    Case("model of another world size", ZERO3, lambda c: mix_in(model_file(c, 1), "zero3-dp3-bf16"),
         MODEL_1, "was saved by 3 ranks, but bf16_zero_pp_rank_0"),
    Case("rank of another stage", ZERO2, lambda c: mix_in(optimizer_file(c, 1), "zero3-dp2-bf16"),
         OPTIMIZER_1, "is of ZeRO-3, but bf16_zero_pp_rank_0"),
    Case("rank of a stage with the same layout", ZERO2, lambda c: mix_in(optimizer_file(c, 1), "zero1-dp2-bf16"),
         OPTIMIZER_1, "is of ZeRO-1, but bf16_zero_pp_rank_0"),
    Case("rank of another step, ZeRO-2", ZERO2, _swap("optim", 1),
         OPTIMIZER_1, "step of group 0 differs from rank 0's (7.0 here, 3.0 there): two saves are"),
    Case("rank of another step, ZeRO-3", ZERO3, _swap("optim", 1),
         OPTIMIZER_1, "step of sub-group 0 differs from rank 0's (7.0 here, 3.0 there): two saves"),
    Case("model of another step", ZERO3, _swap("model", 1),
         MODEL_1, "global_steps differs from rank 0's (7 here, 3 there): two saves"),
    Case("both prefixes", ZERO2, lambda c: damage.name_as_fp16(optimizer_file(c, 1)),
         "global_step3", "mixes files of two saves: bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt and zero_pp_rank_1"),
    Case("latest names what is gone", ZERO2, lambda c: (c / "latest").write_text("global_step9"),
         "latest", "names 'global_step9', which is not there; choose one with --tag: global_step3"),
    Case("latest names a very long tag", ZERO2, lambda c: (c / "latest").write_text("x" * 100_000),
         "latest", "does not name a tag; choose one with --tag: global_step3"),
    Case("latest is empty", ZERO2, lambda c: (c / "latest").write_text(""),
         "latest", "does not name a tag; choose one with --tag: global_step3"),
    Case("latest leads out of the root", ZERO2, lambda c: (c / "latest").write_text("../../x"),
         "latest", "does not name a tag; choose one with --tag: global_step3"),
    Case("latest is binary", ZERO2, lambda c: (c / "latest").write_bytes(b"\xff\xfe\x00\x80"),
         "latest", "is not text"),
    Case("latest is huge", ZERO2, lambda c: truncate(c / "latest", 1 << 32),
         "latest", "is 4294967296 bytes long, too large for a text file"),
    Case("root is empty", ZERO2, _make_empty,
         "", "contains no checkpoint; pass a checkpoint root (with a file named latest) or a tag's directory"),
    Case("root is gone", ZERO2, lambda c: shutil.rmtree(c), "", "does not exist; check the path"),
    Case("root is a file", ZERO2, _make_file, "", "is not a directory; pass a"),
]  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda c: c.id)
def test_checkpoint_that_cannot_be_read(case: Case, checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(case.checkpoint)
    case.inflict(root)
    before = remains(tmp_path)
    for view in [(), ("--json",), ("--params",)]:
        _assert_says(ckpttool("inspect", root, *view).error, root, case)
    for to in ("safetensors", "torch"):
        _assert_says(ckpttool("consolidate", root, tmp_path / "out", "--to", to).error, root, case)
    for options in [(), ("--deep",)]:
        if case.id in {"root is gone", "root is a file", "root is empty"}:  # nothing to judge: a failure
            _assert_says(ckpttool("verify", root, *options).error, root, case)
            continue
        assert ckpttool("verify", root, "--tag", "nope", *options).code == 3
        done = ckpttool("verify", root, *options)
        assert (done.code, done.stderr) == (1, "")
        _assert_says(done.stdout.splitlines()[0], root, case)
        done = ckpttool("verify", root, *options, "--json")
        assert done.code == 1
        finding = json.loads(done.stdout)["findings"][0]
        _assert_says(f"{finding['path']}: {finding['problem']}; {finding['hint']}", root, case)
    assert remains(tmp_path) == before


def _assert_says(line: str, root: Path, case: Case) -> None:
    path = root / case.named if case.named else root
    assert f"{path}: " in line
    assert case.says in line
    assert len(line) < 1000


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero3-dp2-bf16", "zero2-dp2-bf16-legacy"])
@pytest.mark.parametrize("file", [optimizer_file, model_file])
def test_file_cut_off_anywhere(
    name: str, file: Callable[[Path], Path], checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    path = file(root)
    whole = path.read_bytes()
    before = remains(tmp_path)
    for nbytes in sorted({1, 3, 4, 21, 22, 30, 100, *range(0, len(whole), 1499), len(whole) - 22, len(whole) - 1}):
        path.write_bytes(whole[:nbytes])
        for done in (ckpttool("inspect", root), ckpttool("consolidate", root, tmp_path / "out", "--to", "torch")):
            assert done.error.startswith(f"Error: {path}: "), nbytes
        done = ckpttool("verify", root)
        assert done.code == 1
        assert done.stdout.startswith(f"{path}: ")
    assert remains(tmp_path) == before


def test_verify_lists_every_file_that_is_wrong(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp4-bf16")
    optimizer_file(root, 3).unlink()
    damage.empty(model_file(root, 1))
    damage.make_text(optimizer_file(root, 2))
    model_file(root, 0).unlink()
    done = ckpttool("verify", root, "--json")
    problems = {f["path"].rpartition("/")[2]: f["problem"] for f in json.loads(done.stdout)["findings"]}
    assert {name: problem[:10] for name, problem in problems.items()} == {
        "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt": "is missing",
        "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt": "is an HTML",
        "zero_pp_rank_1_mp_rank_00_model_states.pt": "is empty",
        "zero_pp_rank_0_mp_rank_00_model_states.pt": "is missing",
    }


@pytest.mark.parametrize("name", [ZERO2, ZERO3])
def test_leftovers_of_a_larger_world_size_are_reported_and_not_read(
    name: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    left = tag_of(root) / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    mix_in(left, name.replace("dp2", "dp4"))
    note = f"{left}: is left over from another save (this checkpoint is ZeRO-{name[4]} over 2 ranks) and was not read"
    shown = ckpttool("inspect", root)
    assert shown.code == 0
    assert f"note: {note}; remove it\n" in shown.stdout
    assert json.loads(ckpttool("inspect", root, "--json").stdout)["notes"] == [f"{note}; remove it"]
    assert ckpttool("consolidate", root, tmp_path / "a", "--to", "safetensors").code == 0
    assert ckpttool("consolidate", source(name), tmp_path / "b", "--to", "safetensors").code == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    checked = ckpttool("verify", root)
    assert checked.code == 1
    assert f"{note}; remove it\n" in checked.stdout
    assert "1 finding " in checked.stdout


# ------------------------------------------------------------------------------------------------- wrong values


@dataclass(frozen=True)
class Mixture:
    """Files of two saves that agree in all but the values."""

    id: str
    checkpoint: str
    inflict: Callable[[Path], object]


def _other_masters(root: Path) -> None:
    model = model_file(root).read_bytes()
    resave(root, step=3)
    model_file(root).write_bytes(model)


MIXTURES = [
    Mixture("model of another run", ZERO2, _other_masters),
    Mixture("model of the same step in another order", ZERO2, lambda c: mix_in(model_file(c), f"{ZERO2}-round-robin")),
]


@pytest.mark.parametrize("case", MIXTURES, ids=lambda c: c.id)
def test_values_of_two_saves_are_refused(case: Mixture, checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(case.checkpoint)
    case.inflict(root)
    assert ckpttool("inspect", root).code == 0
    before = remains(tmp_path)
    for to in ("safetensors", "torch"):
        error = ckpttool("consolidate", root, tmp_path / "out", "--to", to).error
        assert f"{model_file(root)}: the " in error
        assert "two saves are mixed (restore it from a copy), or the model was changed" in error
    assert remains(tmp_path) == before
    checked = ckpttool("verify", root)
    assert checked.code == 1
    assert f"{model_file(root)}: the " in checked.stdout


def test_a_rank_of_another_precision_is_refused_at_once(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-fp32")
    mix_in(optimizer_file(root, 1), "zero2-dp2-fp16")
    error = ckpttool("inspect", root).error
    assert f"{optimizer_file(root, 1)}: fp16 > enabled in ds_config differs from rank 0's: two saves are mixed" in error


def _flip_in(root: Path, name: str, state: str, element: int) -> Path:
    """Change a bit of one element of a state; returns the file."""
    told = json.loads(ckpttool("inspect", root, "--param", name, "--json").stdout)["states"][state]
    extent = next(e for e in told["extents"] if e["start"] <= element < e["start"] + e["numel"])
    path = tag_of(root) / str(extent["file"])
    flip(path, extent["offset"] + (element - extent["start"]) * extent["nbytes"] // extent["numel"])
    return path


@pytest.mark.parametrize(
    ("name", "state"), [(ZERO2, "exp_avg"), (ZERO3, "exp_avg_sq"), (ZERO3, "fp32"), ("zero1-dp1-bf16", "fp32")]
)
def test_flipped_bit_is_found_by_reading_every_byte(
    name: str, state: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    path = _flip_in(root, "embed.weight", state, 500)
    assert ckpttool("inspect", root).code == 0
    assert ckpttool("verify", root).code == 0
    consolidated = ckpttool("consolidate", root, tmp_path / "out", "--to", "safetensors")
    if state == "fp32":
        assert f"{path}: record " in consolidated.error
        assert "embed.weight" in consolidated.error
        assert not (tmp_path / "out").exists()
    else:  # which weights are not made of
        assert consolidated.code == 0
    deep = ckpttool("verify", root, "--deep")
    assert (deep.code, deep.stderr) == (1, "")
    first = deep.stdout.splitlines()[0]
    assert first.startswith(f"{path}: record ")
    assert "was recorded when it was saved; restore the file from a copy: its bytes have changed" in first


def test_flipped_bit_where_samples_are_taken_stops_consolidation(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero1-dp1-bf16")
    at = _flip_in(root, "embed.weight", "module", 1097)
    error = ckpttool("consolidate", root, tmp_path / "out", "--to", "safetensors").error
    assert f"{at}: the bf16 copy of embed.weight differs from its fp32 master" in error
    assert ckpttool("verify", root).code == 1
    assert not (tmp_path / "out").exists()


def test_flipped_bit_in_a_pickle_is_found_at_once(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(ZERO3)
    path = optimizer_file(root)
    flip(path, path.read_bytes().index(b"param_groups") + 3)
    assert f"{path}: its pickle does not match its checksum" in ckpttool("inspect", root).error


def test_flipped_bit_really_changes_what_is_written(checkpoint_copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = checkpoint_copy(ZERO3)
    _flip_in(root, "embed.weight", "fp32", 500)
    assert ckpttool("consolidate", root, tmp_path / "out", "--to", "torch", "--check", "off").code == 0
    written = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)["embed.weight"]
    assert (written != truth(ZERO3).tensors["fp32/embed.weight"]).sum() == 1


@pytest.mark.parametrize("command", [("cp",), ("convert", "--to", "zero", "--world-size", "2")], ids=lambda c: c[0])
def test_a_random_number_state_that_is_damaged_is_not_taken_along(
    command: tuple[str, ...], checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16-trainer")
    (path,) = root.glob("checkpoint-*/rng_state_0.pth")
    whole = path.read_bytes()
    flip(path, len(whole) // 2)
    error = ckpttool(command[0], path.parent, tmp_path / "out", *command[1:]).error
    assert error.startswith(f"Error: {path}: record ")
    path.write_bytes(whole[:5000])
    assert (
        f"{path}: is cut off: only its first" in ckpttool(command[0], path.parent, tmp_path / "out", *command[1:]).error
    )
    assert not (tmp_path / "out/latest").exists()


@pytest.mark.parametrize(
    ("command", "file", "told"),
    [
        (("consolidate", "--to", "safetensors"), "model.safetensors", "; no checksums recorded: only structure, "),
        (("convert", "--to", "zero", "--world-size", "1"), OPTIMIZER_0, " checksums compared; "),
        (("convert", "--to", "dcp"), "__0_0.distcp", " checksums compared; "),
    ],
    ids=["safetensors", "zero", "dcp"],
)
def test_verify_calls_nothing_sound_that_it_cannot_compare(
    command: tuple[str, ...], file: str, told: str, tmp_path: Path
) -> None:
    name, *options = command
    assert ckpttool(name, source(ZERO2), tmp_path / "out", *options).code == 0
    before = ckpttool("verify", tmp_path / "out", "--deep")
    assert before.code == 0
    line = before.stdout.splitlines()[0]
    assert ": no finding (" in line
    assert told in line
    assert line.endswith("only structure, NaN and infinity were checked)")
    path = tmp_path / "out" / file
    data = bytearray(path.read_bytes())
    weights = truth(ZERO2).state_dict(torch.float32)["down.weight"]
    data[data.index(weights.flatten()[:8].numpy().tobytes())] ^= 1  # the lowest bit of a mantissa
    path.write_bytes(data)
    assert "sound" not in ckpttool("verify", tmp_path / "out", "--deep").stdout
