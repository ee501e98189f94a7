"""One table of roots with the answer of each command, on disk and in a bucket."""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.restore_order import candidates, find
from ckpttool.catalog.retention import Rules
from ckpttool.errors import CkptError, LayoutError, LinkError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.layouts import Place
from ckpttool.formats.series import series
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, aside_name, open_storage
from ckpttool.storage.confined import local_storage
from tests import sampling
from tests.rooms import present
from tests.saving.checkpoints import save_version
from tests.truth import HERE, source
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.server import Bucket


@functools.cache
def _made(kind: str, temporary: Path) -> Path:
    """A checkpoint of a format without tags, made once."""
    out = temporary / kind
    src = source("zero2-dp2-bf16-sgd")
    if kind == "dcp":
        ckpttool.convert(src, out, to="dcp")
    else:
        ckpttool.consolidate(src, out, to="safetensors")
    return out


TAG = source("zero2-dp2-bf16-sgd") + "/global_step3"
OTHER = source("zero2-dp2-bf16") + "/global_step3"
COPIES = {
    "tag": TAG,
    "other": OTHER,
    "trainer": source("zero2-dp2-bf16-trainer"),
    "accelerate": source("zero2-dp2-bf16-accelerate"),
    "lightning": source("zero2-dp2-bf16-lightning"),
    "universal": source("universal-zero3-dp2-bf16-repeated"),
    "verl": str(HERE / "fsdp/torch2.14.1-fsdp-3/verl"),
    "actor": str(HERE / "fsdp/torch2.14.1-fsdp-3/verl/global_step_3/actor"),
}


def build(root: Path, layout: dict[str, str], temporary: Path) -> None:
    """Make the files and directories of a row: a text after ">", a link after "@", an empty directory or a copy."""
    root.mkdir(parents=True, exist_ok=True)
    for name, what in layout.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if what.startswith(">"):
            path.write_text(what[1:])
        elif what.startswith("@"):
            path.symlink_to(what[1:])
        elif what == "empty":
            path.mkdir()
        elif what in {"dcp", "safetensors"}:
            shutil.copytree(_made(what, temporary), path, dirs_exist_ok=True)
        else:
            kind, _, without = what.partition(" without ")
            shutil.copytree(COPIES[kind], path, dirs_exist_ok=True)
            for file in path.rglob(without) if without else ():
                file.unlink()


class Row(NamedTuple):
    """A root, and what the tool says of it."""

    layout: dict[str, str]
    """Content by path, as ``build`` takes it."""
    opens: str
    """The directory of the checkpoint that is opened, "." for the root; "-" if it is refused."""
    lists: str
    """Names in ``ls``, older first: "*" after one that ``latest`` names, "!" if not whole; "" if it lists none."""
    resumes: str
    """Tags that a restore tries, the best first; "-" without one."""
    src: str = ""
    """What is passed: a path below the root."""


STEPS = {"step3": "tag", "step6": "tag"}
ROOT = {**STEPS, "latest": ">step6"}
TABLE: dict[str, Row] = {
    "a root": Row(ROOT, "step6", "step3 step6*", "step6 step3"),
    "a tag": Row(ROOT, "step3", "step3", "-", "step3"),
    "no latest": Row(STEPS, "-", "step3 step6", "step6 step3"),
    "one tag, no latest": Row({"step3": "tag"}, "step3", "step3", "step3"),
    "latest names a missing tag": Row({**STEPS, "latest": ">step9"}, "-", "step3 step6", "step6 step3"),
    "latest is empty": Row({**STEPS, "latest": ">"}, "-", "step3 step6", "step6 step3"),
    "latest leads out": Row({**STEPS, "latest": ">../x"}, "-", "step3 step6", "step6 step3"),
    "latest leads to a tag outside": Row(
        {**STEPS, "../elsewhere/step9": "tag", "latest": ">../elsewhere/step9"}, "-", "step3 step6", "step6 step3"
    ),
    "latest is a directory": Row({**STEPS, "latest": "empty"}, "-", "step3 step6", "step6 step3"),
    "a tag with parts": Row({"a/step3": "tag", "latest": ">a/step3"}, "a/step3", "a*!", "a/step3"),
    "rank files beside latest": Row({**ROOT, "": "other"}, "step6", "step3 step6*", "step6 step3"),
    "rank files beside latest that names a missing tag": Row(
        {**STEPS, "latest": ">step9", "": "other"}, "-", "step3 step6", "step6 step3"
    ),
    "rank files beside tags": Row({**STEPS, "": "other"}, "-", "step3 step6", "step6 step3"),
    "one stray beside latest": Row(
        {**ROOT, "mp_rank_00_model_states.pt": ">x"}, "step6", "step3 step6*", "step6 step3"
    ),
    "a DCP marker beside latest": Row({**ROOT, ".metadata": ">x"}, "step6", "step3 step6*", "step6 step3"),
    "DCP beside latest": Row({**ROOT, "": "dcp"}, "step6", "step3 step6*", "step6 step3"),
    "DCP beside latest of a missing tag": Row({"latest": ">step9", "": "dcp"}, "-", "", "-"),
    "a tag with latest of itself": Row({"": "tag", "latest": ">run"}, ".", "run", "-"),
    "weights beside latest": Row({**ROOT, "": "safetensors"}, "step6", "step3 step6*", "step6 step3"),
    "a torn newest": Row(
        {"step3": "tag", "step6": "tag without *optim_states.pt", "latest": ">step6"},
        "-",
        "step3 step6*!",
        "step6 step3",
    ),
    "an empty directory": Row({}, "-", "", "-"),
    "an empty tag": Row({"step3": "tag", "step6": "empty", "latest": ">step6"}, "-", "step3", "step3"),
    "a foreign directory": Row({**ROOT, "logs/events": ">x"}, "step6", "step3 step6*", "step6 step3"),
    "files alone": Row({"notes.txt": ">x"}, "-", "", "-"),
    "two models": Row(
        {"pytorch_model": "tag", "pytorch_model_1": "other", "latest": ">pytorch_model_1"},
        "-",
        "pytorch_model pytorch_model_1*",
        "pytorch_model_1 pytorch_model",
    ),
    "universal": Row({"": "universal"}, "global_step3_universal", "global_step3_universal*", "global_step3_universal"),
    "universal beside tags": Row(
        {"": "universal", "step3": "tag", "latest": ">step3"},
        "step3",
        "global_step3_universal* step3*",
        "step3 global_step3_universal",
    ),
    "latest is a link to the tag": Row({**STEPS, "latest": "@step6"}, "step6", "step3 step6*", "step6 step3"),
    "latest links to a file that names it": Row(
        {**STEPS, "newest": ">step6", "latest": "@newest"}, "step6", "step3 step6*", "step6 step3"
    ),
    "a link to a tag": Row({**ROOT, "last": "@step6"}, "step6", "last step3 step6*", "step6 step3 last"),
    "a link to itself": Row({**ROOT, "last.ckpt": "@last.ckpt"}, "step6", "step3 step6*", "step6 step3"),
    "links to each other": Row({**ROOT, "a": "@b", "b": "@a"}, "step6", "step3 step6*", "step6 step3"),
    "a dangling link": Row({**ROOT, "x": "@gone"}, "step6", "step3 step6*", "step6 step3"),
    "a link to itself in a tag": Row({**ROOT, "step6/x": "@x"}, "step6", "step3 step6*", "step6 step3"),
    "latest links to itself": Row({**STEPS, "latest": "@latest"}, "-", "step3 step6", "step6 step3"),
    "a link out of the root": Row(
        {**ROOT, "../elsewhere/step9": "tag", "step9": "@../elsewhere/step9"},
        "step6",
        "step3 step6* step9!",
        "step6 step3",
    ),
    "a Trainer's run": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer"},
        "checkpoint-6/global_step3",
        "checkpoint-3 checkpoint-6",
        "-",
    ),
    "a Trainer's checkpoint": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer"},
        "checkpoint-3/global_step3",
        "global_step3*",
        "global_step3",
        "checkpoint-3",
    ),
    "a Trainer's run, the newest torn": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer without *optim_states.pt"},
        "checkpoint-3/global_step3",
        "checkpoint-3 checkpoint-6!",
        "-",
    ),
    "a Trainer's run, rank files in the newest": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer", "checkpoint-6/mp_rank_00_model_states.pt": ">x"},
        "checkpoint-6/global_step3",
        "checkpoint-3 checkpoint-6",
        "-",
    ),
    "a Trainer's run with one": Row({"checkpoint-3": "trainer"}, "checkpoint-3/global_step3", "checkpoint-3", "-"),
    "a Trainer's run with weights": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer", "": "safetensors"},
        "checkpoint-6/global_step3",
        "checkpoint-3 checkpoint-6",
        "-",
    ),
    "a Trainer's run, the newest of weights": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "safetensors"},
        "checkpoint-3/global_step3",
        "checkpoint-3 checkpoint-6",
        "-",
    ),
    "a Trainer's checkpoint of weights": Row({"checkpoint-3": "safetensors"}, "-", "checkpoint-3", "-"),
    "a Trainer's run beside tags": Row(
        {**ROOT, "checkpoint-3": "trainer"}, "step6", "checkpoint-3 step3 step6*", "step6 step3"
    ),
    "Accelerate": Row({"": "accelerate"}, "pytorch_model", "pytorch_model*", "pytorch_model"),
    "a project of Accelerate": Row(
        {"checkpoints/checkpoint_0": "accelerate", "checkpoints/checkpoint_1": "accelerate"},
        "-",
        "checkpoint_0 checkpoint_1",
        "-",
        "checkpoints",
    ),
    "Accelerate above": Row(
        {"checkpoints/checkpoint_0": "accelerate", "checkpoints/checkpoint_1": "accelerate"}, "-", "", "-"
    ),
    "Lightning": Row({"": "lightning"}, "checkpoint", "checkpoint*", "checkpoint"),
    "a run of Lightning": Row(
        {"epoch=0.ckpt": "lightning", "last.ckpt": "lightning"}, "-", "epoch=0.ckpt last.ckpt", "-"
    ),
    "a run of Lightning with a link": Row(
        {"epoch=0.ckpt": "lightning", "last.ckpt": "@epoch=0.ckpt"}, "-", "epoch=0.ckpt last.ckpt", "-"
    ),
    "one of Lightning": Row({"epoch=0.ckpt": "lightning"}, "epoch=0.ckpt/checkpoint", "epoch=0.ckpt", "-"),
    "a run of Ray": Row(
        {"checkpoint_2026-01-01_00-00-00.000000": "lightning", "checkpoint_2026-01-02_00-00-00.000000": "lightning"},
        "checkpoint_2026-01-02_00-00-00.000000/checkpoint",
        "checkpoint_2026-01-01_00-00-00.000000 checkpoint_2026-01-02_00-00-00.000000",
        "-",
    ),
    "a checkpoint of Ray": Row(
        {"checkpoint_2026-01-01_00-00-00.000000/epoch": "lightning"},
        "checkpoint_2026-01-01_00-00-00.000000/epoch/checkpoint",
        "epoch!",
        "-",
        "checkpoint_2026-01-01_00-00-00.000000",
    ),
    "a storage path of Ray": Row(
        {"run/checkpoint_2026-01-01_00-00-00.000000": "lightning", "run/checkpoint_manager_snapshot.json": ">{}"},
        "run/checkpoint_2026-01-01_00-00-00.000000/checkpoint",
        "",
        "-",
    ),
    "a storage path of Ray with two checkpoints": Row(
        {f"run/checkpoint_2026-01-0{day}_00-00-00.000000": "lightning" for day in (1, 2)}, "-", "", "-"
    ),
    "a storage path of Ray, in directories of a script": Row(
        {f"run/checkpoint_2026-01-0{day}_00-00-00.000000/epoch": "lightning" for day in (1, 2)}, "-", "", "-"
    ),
    "a run of Lightning with a link to itself": Row(
        {"epoch=0.ckpt": "lightning", "last.ckpt": "@last.ckpt"}, "epoch=0.ckpt/checkpoint", "epoch=0.ckpt", "-"
    ),
    "a Trainer's run with a link to itself": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "@checkpoint-6"}, "checkpoint-3/global_step3", "checkpoint-3", "-"
    ),
    "a project of Accelerate with a link to itself": Row(
        {"checkpoint_0": "accelerate", "checkpoint_1": "@checkpoint_1"},
        "checkpoint_0/pytorch_model",
        "checkpoint_0",
        "-",
    ),
    "a run of Ray with a link to itself": Row(
        {
            "checkpoint_2026-01-01_00-00-00.000000": "lightning",
            "checkpoint_2026-01-02_00-00-00.000000": "@checkpoint_2026-01-02_00-00-00.000000",
        },
        "checkpoint_2026-01-01_00-00-00.000000/checkpoint",
        "checkpoint_2026-01-01_00-00-00.000000",
        "-",
    ),
    "verl with a link to itself": Row({"": "verl", "x": "@x"}, "global_step_3/actor", "global_step_3*", "-"),
    "DCP with a link to itself": Row({"": "dcp", "x": "@x"}, ".", "", "-"),
    "safetensors with a link to itself": Row({"": "safetensors", "x": "@x"}, ".", "", "-"),
    "universal with a link to itself": Row(
        {"": "universal", "x": "@x"}, "global_step3_universal", "global_step3_universal*", "global_step3_universal"
    ),
    "latest with a byte order mark": Row({**STEPS, "latest": ">\ufeffstep6\n"}, "step6", "step3 step6*", "step6 step3"),
    "latest with a slash": Row({**STEPS, "latest": ">./step6/"}, "step6", "step3 step6*", "step6 step3"),
    "latest with blanks": Row({**STEPS, "latest": ">  step6 \n"}, "step6", "step3 step6*", "step6 step3"),
    "latest beside latest_universal": Row(
        {**ROOT, "latest_universal": ">step3"}, "step6", "step3* step6*", "step6 step3"
    ),
    "latest_universal alone": Row({**STEPS, "latest_universal": ">step3"}, "step3", "step6 step3*", "step3 step6"),
    "a hidden tag": Row({**ROOT, ".step9": "tag"}, "step6", ".step9 step3 step6*", "step6 step3"),
    "a directory that is half removed": Row(
        {**ROOT, aside_name("step9"): "tag"}, "step6", f"step3 step6* {aside_name('step9')}!", "step6 step3"
    ),
    "an uncommitted save": Row(
        {**ROOT, "step9": "tag", "step9/.ckpttool-staging": ">{}"}, "step6", "step3 step6* step9!", "step6 step3"
    ),
    "a root that is being written": Row({**ROOT, ".ckpttool-staging": ">{}"}, "-", "", "step6 step3"),
    "a pointer of git-lfs in a tag": Row(
        {**ROOT, "step6/mp_rank_00_model_states.pt": ">version https://git-lfs.github.com/spec/v1"},
        "-",
        "step3 step6*!",
        "step6 step3",
    ),
    "a dead link in a tag": Row(
        {
            "step3": "tag",
            "step6": "tag without mp_rank*",
            "step6/mp_rank_00_model_states.pt": "@gone",
            "latest": ">step6",
        },
        "-",
        "step3 step6*!",
        "step6 step3",
    ),
    "dead links alone": Row({"model.safetensors": "@../../blobs/1"}, "-", "", "-"),
    "Orbax": Row({"_CHECKPOINT_METADATA": ">x", "d/0": ">x"}, "-", "", "-"),
    "Orbax beside latest": Row({**ROOT, "_CHECKPOINT_METADATA": ">x"}, "step6", "step3 step6*", "step6 step3"),
    "Megatron": Row(
        {"latest_checkpointed_iteration.txt": ">5", "iter_0000005/mp_rank_00/model_optim_rng.pt": ">x"}, "-", "", "-"
    ),
    "Megatron-DeepSpeed": Row(
        {**ROOT, "latest_checkpointed_iteration.txt": ">6"}, "step6", "step3 step6*", "step6 step3"
    ),
    "FSDP1 of Accelerate": Row({"pytorch_model_fsdp_rank0.bin": ">x"}, "-", "", "-"),
    "an adapter": Row({"adapter_config.json": ">{}", "": "safetensors"}, ".", "", "-"),
    "weights beside one tag": Row({"step3": "tag", "": "safetensors"}, "step3", "step3", "step3"),
    "a tag with weights": Row({**ROOT, "step6/x": "safetensors"}, "step6", "step6*", "-", "step6"),
    "DCP beside tags": Row({**STEPS, "": "dcp"}, "-", "step3 step6", "step6 step3"),
    "a missing path": Row({}, "-", "", "-", "gone"),
    "a tag in a run of a Trainer, by its path": Row(
        {"checkpoint-3": "trainer"}, "checkpoint-3/global_step3", "global_step3*", "-", "checkpoint-3/global_step3"
    ),
    "rank files alone": Row({"": "tag"}, ".", "run", "-"),
    "rank files in a Trainer's checkpoint": Row(
        {"checkpoint-3": "trainer", "checkpoint-3/mp_rank_00_model_states.pt": ">x"},
        "checkpoint-3/global_step3",
        "global_step3*",
        "global_step3",
        "checkpoint-3",
    ),
    "a link to the root in it": Row({**ROOT, "x": "@."}, "step6", "step3 x! step6*", "step6 step3"),
    "a link to the root alone": Row({"x": "@."}, "-", "", "-"),
    "a link above in a Trainer's run": Row(
        {"checkpoint-3": "trainer", "checkpoint-6": "trainer", "x": "@.."},
        "checkpoint-6/global_step3",
        "x! checkpoint-3 checkpoint-6",
        "-",
    ),
    "a link to the root in a tag": Row({**ROOT, "step6/x": "@.."}, "step6", "step3 step6*", "step6 step3"),
    "rank files in Accelerate's folder": Row(
        {"": "accelerate", "mp_rank_00_model_states.pt": ">x"}, "pytorch_model", "pytorch_model*", "pytorch_model"
    ),
    "rank files in Lightning's folder": Row(
        {"": "lightning", "mp_rank_00_model_states.pt": ">x"}, "checkpoint", "checkpoint*", "checkpoint"
    ),
    "a checkpoint of Lightning with rank files in a run": Row(
        {"epoch=0.ckpt": "lightning", "epoch=0.ckpt/mp_rank_00_model_states.pt": ">x"},
        "epoch=0.ckpt/checkpoint",
        "epoch=0.ckpt",
        "-",
    ),
    "rank files in a checkpoint of Ray": Row(
        {
            "checkpoint_2026-01-01_00-00-00.000000": "lightning",
            "checkpoint_2026-01-01_00-00-00.000000/mp_rank_00_model_states.pt": ">x",
        },
        "checkpoint_2026-01-01_00-00-00.000000/checkpoint",
        "checkpoint_2026-01-01_00-00-00.000000",
        "-",
    ),
    "rank files in a run of verl": Row({"": "verl", "mp_rank_00_model_states.pt": ">x"}, "-", "global_step_3*", "-"),
    "rank files beside universal": Row(
        {"": "universal", "mp_rank_00_model_states.pt": ">x"},
        "global_step3_universal",
        "global_step3_universal*",
        "global_step3_universal",
    ),
    "a root of links to tags": Row(
        {
            "../disk/step3": "tag",
            "../disk/step6": "tag",
            "step3": "@../disk/step3",
            "step6": "@../disk/step6",
            "latest": ">step6",
        },
        "-",
        "step3! step6*!",
        "-",
    ),
    "latest is a link to a tag out of the root": Row(
        {**STEPS, "../disk/step9": "tag", "latest": "@../disk/step9"}, "-", "step3 step6", "-"
    ),
    "a chain of links": Row(
        {**STEPS, "a": "@step6", "b": "@a", "latest": ">b"}, "b", "a step3 step6 b*", "b step6 step3 a"
    ),
    "latest names a link": Row(
        {**STEPS, "last": "@step3", "latest": ">last"}, "last", "step3 step6 last*", "last step6 step3"
    ),
    "verl": Row({"": "verl"}, "global_step_3/actor", "global_step_3*", "-"),
    "a step of verl": Row({"": "verl"}, "global_step_3/actor", "actor", "-", "global_step_3"),
    "verl, latest of a missing step": Row(
        {"": "verl", "latest_checkpointed_iteration.txt": ">9"}, "-", "global_step_3", "-"
    ),
    "verl, actor and critic": Row({"": "verl", "global_step_3/critic": "actor"}, "-", "global_step_3*", "-"),
    "verl, the model": Row({"": "verl"}, "global_step_3/actor", "", "-", "global_step_3/actor"),
    "torchtitan": Row({"step-3": "dcp", "step-6": "dcp"}, "step-6", "step-3 step-6", "-"),
    "torchtitan, newest without metadata": Row(
        {"step-3": "dcp", "step-6/__0_0.distcp": ">x"}, "step-3", "step-3 step-6!", "-"
    ),
    "DCP": Row({"": "dcp"}, ".", "", "-"),
    "DCP in a folder": Row({"x": "dcp"}, "-", "x", "-"),
    "safetensors": Row({"": "safetensors"}, ".", "", "-"),
    "safetensors in a folder": Row({"x": "safetensors"}, "-", "x", "-"),
    "a safetensors file": Row({"": "safetensors"}, ".", "", "-", "model.safetensors"),
    "a rank file": Row(ROOT, "-", "", "-", "step6/mp_rank_00_model_states.pt"),
    "a rank file of an optimizer": Row(ROOT, "-", "", "-", "step6/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "a file of verl": Row({"": "verl"}, "-", "", "-", "global_step_3/actor/model_world_size_3_rank_0.pt"),
    "a file of DCP": Row({"": "dcp"}, "-", "", "-", "__0_0.distcp"),
    "a random state file of a trainer": Row(
        {"checkpoint-3": "trainer", "checkpoint-3/rng_state_0.pth": ">x"}, "-", "", "-", "checkpoint-3/rng_state_0.pth"
    ),
    "the file latest": Row(ROOT, "-", "", "-", "latest"),
    "a file of universal": Row({"": "universal"}, "-", "", "-", "global_step3_universal/zero/optimizer_state.pt"),
    "runs": Row(
        {
            "run2/step3": "tag",
            "run2/step6": "tag",
            "run2/latest": ">step6",
            "run10/step3": "tag",
            "run10/step6": "tag",
            "run10/latest": ">step6",
        },
        "-",
        "run2! run10!",
        "-",
    ),
    "a run saved into a tag": Row(
        {**ROOT, "step6/step9": "other", "step6/latest": ">step9"}, "step6", "step3 step6*", "step6 step3"
    ),
    "a run saved into a tag, the tag": Row(
        {**ROOT, "step6/step9": "other", "step6/latest": ">step9"}, "step6", "step6*", "step9", "step6"
    ),
    "rank files beside latest in a root with the name of a step": Row(
        {"epoch1": "other", "epoch1/step3": "tag", "epoch1/step6": "tag", "epoch1/latest": ">step6"},
        "epoch1/step6",
        "step3 step6*",
        "step6 step3",
        "epoch1",
    ),
    "a root without latest two levels below": Row({"a/run/step3": "tag", "a/run/step6": "tag"}, "-", "", "-"),
    "a whole file beside an index of others": Row(
        {
            "": "safetensors",
            "model.safetensors.index.json": '>{"weight_map": {"a": "a.safetensors"}}',
            "a.safetensors": ">",
        },
        "-",
        "",
        "-",
    ),
    "a run below": Row({"run2/step3": "tag", "run2/step6": "tag", "run2/latest": ">step6"}, "run2/step6", "run2!", "-"),
}
if not present("rank_files"):
    TABLE = {name: row for name, row in TABLE.items() if not {"verl", "actor"} & {*row.layout.values()}}


def _opened(src: str, root: str) -> str:
    location = open_checkpoint(src).location
    return location.removeprefix(root).strip("/") or "."


def _listed(src: str) -> str:
    try:
        found = ckpttool.ls(src)
    except CkptError:
        return ""
    return " ".join(f"{e.name}{'*' if e.latest else ''}{'' if e.whole else '!'}" for e in found.entries)


def _resumed(src: str) -> str:
    storage = open_storage(src) if src.startswith("s3:") else local_storage([src], follow_links=False)
    try:
        return " ".join(one.tag for one in candidates(storage, src)) or "-"
    except LinkError:
        return "-"


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_every_command_takes_the_same_checkpoint_of_a_root(name: str, tmp_path: Path, temporary: Path) -> None:
    row, root = TABLE[name], tmp_path / "run"
    build(root, row.layout, temporary)
    src = str(root / row.src)
    if row.opens == "-":
        with refused(CkptError):
            open_checkpoint(src)
    else:
        assert _opened(src, str(root)) == row.opens
    assert (_listed(src), _resumed(src)) == (row.lists, row.resumes)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.some(TABLE, 44, key="reads"))
def test_every_command_that_reads_takes_what_is_opened(name: str, tmp_path: Path, temporary: Path) -> None:
    row, root = TABLE[name], tmp_path / "run"
    build(root, row.layout, temporary)
    _check_readers(row, str(root / row.src), root, tmp_path, [*TABLE].index(name))


def _check_readers(row: Row, src: str, root: Path, out: Path, number: int) -> None:
    """Check that the commands that read take the checkpoint that is opened, or that all refuse the source.

    Of the two that open it to write another one, every second row tries the one or the other.
    """
    copy = out / "copy"
    commands: dict[str, Callable[[], Any]] = {
        "cp": lambda: ckpttool.cp(src, copy),
        "digest": lambda: ckpttool.digest(src),
        "consolidate": lambda: ckpttool.consolidate(src, out / "out", to="safetensors"),
        "convert": lambda: ckpttool.convert(src, out / "dcp", to="dcp"),
    }
    if not sampling.thorough():
        del commands["consolidate" if number % 2 else "convert"]
    made = {"cp": copy, "consolidate": out / "out", "convert": out / "dcp"}
    if row.opens == "-":
        for command in commands.values():
            with pytest.raises(CkptError):
                command()
        assert not any(path.exists() for path in made.values())
        return
    done = {called: command() for called, command in commands.items()}
    expected = ckpttool.digest(root / row.opens).weights
    found = {
        "digest": done["digest"].weights,
        **{called: ckpttool.digest(path).weights for called, path in made.items() if called in done},
    }
    assert found == dict.fromkeys(found, expected)


def _in_a_bucket(most: int) -> dict[str, Row]:
    """Rows that a bucket may contain: it has no links, and no empty directories."""
    possible = [n for n, r in TABLE.items() if r.layout and not any(w[0] in "@e" for w in r.layout.values())]
    possible.remove("a directory that is half removed")  # a bucket renames no directory: a marker tells it
    return {name: TABLE[name] for name in sampling.some(possible, most)}


@pytest.mark.slow
def test_every_command_that_reads_takes_it_in_a_bucket(s3: Bucket, tmp_path: Path, temporary: Path) -> None:
    for number, row in enumerate(_in_a_bucket(6).values()):
        build(tmp_path / str(number) / "run", row.layout, temporary)
        s3.upload(tmp_path / str(number), f"readers/{number}")
        src = f"{s3.url(f'readers/{number}/run')}/{row.src}".rstrip("/")
        _check_readers(row, src, tmp_path / str(number) / "run", tmp_path / str(number), number)


def test_a_bucket_gives_the_same_answers(s3: Bucket, tmp_path: Path, temporary: Path) -> None:
    rows = _in_a_bucket(14)
    for number, row in enumerate(rows.values()):
        build(tmp_path / str(number) / "run", row.layout, temporary)
    s3.upload(tmp_path, "all")
    wrong = {}
    for number, (name, row) in enumerate(rows.items()):
        root = s3.url(f"all/{number}/run")
        src = f"{root}/{row.src}".rstrip("/")
        try:
            opened = _opened(src, root)
        except CkptError:
            opened = "-"
        answer = opened, _listed(src), _resumed(src)
        if answer != row[1:4]:
            wrong[name] = answer
    assert wrong == {}


@pytest.mark.parametrize("name", [name for name in TABLE if " file of" in name or name == "a rank file"])
def test_every_command_names_the_checkpoint_of_a_file(name: str, tmp_path: Path, temporary: Path) -> None:
    build(tmp_path / "run", TABLE[name].layout, temporary)
    src = tmp_path / "run" / TABLE[name].src
    calls: list[Callable[[], Any]] = [
        lambda: ckpttool.ls(src),
        lambda: ckpttool.verify(src),
        lambda: find(LOCAL, str(src), None),
        lambda: ckpttool.prune(src, keep_last=1),
    ]
    for call in calls:
        with pytest.raises(CkptError, match="is one file of a checkpoint") as caught:
            call()
        assert caught.value.hint == f"pass {Place(LOCAL, str(src)).whole}"


@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("a storage path")])
def test_ls_names_the_run_below(name: str, tmp_path: Path, temporary: Path) -> None:
    build(tmp_path / "run", TABLE[name].layout, temporary)
    with pytest.raises(CkptError, match="holds no checkpoints") as caught:
        ckpttool.ls(tmp_path / "run")
    assert caught.value.hint == f"pass a run below it: {tmp_path}/run/run"
    assert ckpttool.ls(tmp_path / "run/run").entries


def test_checkpoints_of_runs_are_not_engines_of_one_save(tmp_path: Path, temporary: Path) -> None:
    saved = [f"checkpoint_2026-01-0{day}_00-00-00.000000" for day in (1, 2)]
    build(tmp_path, {f"storage/{run}/{one}": "lightning" for run in ("a", "b") for one in saved}, temporary)
    build(tmp_path / "save", {"actor": "tag", "critic": "other"}, temporary)
    assert Place(LOCAL, str(tmp_path / "save")).engines == [
        str(tmp_path / "save" / name) for name in ("actor", "critic")
    ]
    assert [Place(LOCAL, str(tmp_path / path)).engines for path in ("storage", "storage/a")] == [[], []]
    with refused(CkptError):
        open_checkpoint(str(tmp_path / "storage"))


def test_an_older_checkpoint_is_not_opened_in_silence(tmp_path: Path, temporary: Path) -> None:
    build(tmp_path, TABLE["a Trainer's run, the newest of weights"].layout, temporary)
    remarks = ckpttool.inspect(tmp_path).remarks
    assert any("checkpoint-6: is not a checkpoint of DeepSpeed; " in remark for remark in remarks)


def test_an_incomplete_later_step_of_a_run_is_named(tmp_path: Path, temporary: Path) -> None:
    build(tmp_path, TABLE["torchtitan, newest without metadata"].layout, temporary)
    assert f"{tmp_path}/step-6: is not complete; step-3 was opened instead" in ckpttool.inspect(tmp_path).remarks
    assert not any("opened instead" in remark for remark in ckpttool.inspect(tmp_path, tag="step-3").remarks)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a Trainer's run", "holds no checkpoint itself, but "),
        ("runs", "holds no checkpoint itself, but "),
        ("latest is empty", "latest names '', which is not a tag in this root; resuming from step6"),
        ("latest leads to a tag outside", "'../elsewhere/step9', which is not a tag in this root; resuming from step6"),
    ],
)
def test_a_restore_says_what_it_does_not_take(
    name: str, said: str, tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path / "run", TABLE[name].layout, temporary)
    find(LOCAL, str(tmp_path / "run"), None)
    assert said in caplog.text


def test_formats_of_one_model_are_one_series() -> None:
    for name in ("zero2-dp2-bf16", "zero3-dp2-bf16"):
        assert series(ckpttool.inspect(source(name))) == series(ckpttool.inspect(source(f"universal-{name}")))


@pytest.mark.parametrize("name", ["rank files beside latest", "DCP beside latest", "one stray beside latest"])
def test_files_beside_latest_are_neither_read_nor_copied(name: str, tmp_path: Path, temporary: Path) -> None:
    root = tmp_path / "run"
    build(root, TABLE[name].layout, temporary)
    expected = ckpttool.digest(root / "step6")
    assert ckpttool.digest(root).weights == expected.weights
    assert ckpttool.digest(root, tag="step3").weights == ckpttool.digest(root / "step3").weights
    report = ckpttool.consolidate(root, tmp_path / "weights", to="safetensors")
    assert any("not read, latest names step6" in note for note in report.notes)
    ckpttool.cp(root, tmp_path / "copy")
    assert {p.name for p in (tmp_path / "copy").iterdir()} >= {"step6", "latest"}
    assert not list((tmp_path / "copy").glob("*.pt"))
    assert any("in the root itself" in problem for problem in ckpttool.ls(root).problems)


@pytest.mark.parametrize("other", ["a commit", "a save of DeepSpeed"])
def test_a_commit_that_was_copied_beside_latest_is_not_read(other: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for number in (1, 2):
        save_version(LOCAL, str(root), Alone(), f"step{number}", number)
    if other != "a commit":
        (root / "step2").rename(tmp_path / "step2")
        shutil.copytree(OTHER, root / "step2")
    shutil.copytree(root / "step1", root, dirs_exist_ok=True)
    assert _opened(str(root), str(root)) == "step2"
    assert (_listed(str(root)), _resumed(str(root))) == ("step1 step2*", "step2 step1")
    assert ckpttool.digest(root) == ckpttool.digest(root / "step2")
    (root / "latest").unlink()
    with pytest.raises(CkptError, match="of one checkpoint beside the checkpoints step1, step2, and no latest"):
        open_checkpoint(str(root))
    (root / "latest").write_text("step9")
    with pytest.raises(CkptError, match="but latest names 'step9', which is not there"):
        open_checkpoint(str(root))
    assert _opened(str(root / "step1"), str(root)) == "step1"
    assert _opened(str((root / "step1").rename(tmp_path / "kept")), str(tmp_path)) == "kept"


@pytest.mark.parametrize("where", ["", "step2"])
def test_a_link_to_itself_blocks_neither_rotation_nor_removal(where: str, tmp_path: Path) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    for number in (1, 2, 3):
        save_version(LOCAL, str(root), Alone(), f"step{number}", number)
        save_version(LOCAL, str(run / f"checkpoint-{number}"), Alone(), "step2", number)
    for path in (root / where, run / "checkpoint-1" / where, run):
        (path / "last.ckpt").symlink_to("last.ckpt")
    maintain(LOCAL, str(root), Rules(last=2), grace=1e9)
    assert {p.name for p in root.iterdir()} >= {"step2", "step3"}
    assert not (root / "step1").exists()
    assert rotate(LOCAL, str(run), 2, keep=(), grace=1e9) == [str(run / "checkpoint-1")]
    assert [d.keep for d in ckpttool.prune(root, keep_last=1)] == [False, True]
    assert [one.tag for one in find(LOCAL, str(root), None)] == ["step3"]


def test_verify_judges_no_root_that_has_several_checkpoints_and_no_latest(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(f"{source('zero2-dp2-bf16')}/global_step3", tmp_path / f"global_step{step}")
    with pytest.raises(LayoutError, match="holds 2 checkpoints and no latest"):
        ckpttool.verify(tmp_path)
    (tmp_path / "latest").write_text("global_step9")  # this is a defect
    assert len(ckpttool.verify(tmp_path).findings) == 1


def test_a_note_names_a_run_saved_into_a_tag(tmp_path: Path, temporary: Path) -> None:
    build(tmp_path / "run", TABLE["a run saved into a tag, the tag"].layout, temporary)
    tag = tmp_path / "run/step6"
    expected = f"latest in {tag} names another run's checkpoint, not read: {tag}/step9"
    assert expected in ckpttool.inspect(tag).remarks
    assert expected not in ckpttool.inspect(tmp_path / "run").remarks
    assert expected not in ckpttool.inspect(tag / "step9").remarks


def test_ls_says_that_latest_is_empty(tmp_path: Path, temporary: Path) -> None:
    build(tmp_path / "run", TABLE["latest is empty"].layout, temporary)
    assert ckpttool.ls(tmp_path / "run").problems == ("latest is empty",)
