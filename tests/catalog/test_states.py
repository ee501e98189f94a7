"""What counts as a checkpoint, by the state of its directory: one table for all that list, open and restore."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

import ckpttool
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.runs import run_commits, trainer_commits
from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import CkptError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.layouts import Place
from ckpttool.formats.scan import commits, scan
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, MARK, aside_name
from tests.rooms import present
from tests.saving.checkpoints import save_version
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Answer(NamedTuple):
    """What the tool says of the directory."""

    listed: str
    """``ls``: "whole", the reason that it is torn, "problem"; with "thin" or "link" before it; "" if not listed."""
    commit: bool
    """Whether it counts as a commit: rules of the manager count it, the next save has it as its parent."""
    resumes: bool
    """Whether a restore tries it."""
    opens: bool
    """Whether commands open it by its path."""


NO = Answer("", commit=False, resumes=False, opens=False)


def _committed(root: Path, name: str = "step2") -> Path:
    save_version(LOCAL, str(root), Alone(), name, 2)
    return root / name


def _plain(root: Path) -> Path:
    shutil.copytree(source("zero2-dp2-bf16") + "/global_step3", root / "step2")
    return root / "step2"


def _uncommitted(root: Path) -> Path:
    path = _committed(root)
    (path / MANIFEST).unlink()
    (path / MARK).write_text("{}")
    return path


def _marked(root: Path) -> Path:
    path = _committed(root)
    (path / MARK).write_text("{}")
    return path


def _cut(root: Path) -> Path:
    path = _committed(root)
    file = next(path.glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    return path


def _lacking(root: Path) -> Path:
    path = _plain(root)
    next(path.glob("*optim_states.pt")).unlink()
    return path


def _thin(root: Path) -> Path:
    path = _plain(root)
    from ckpttool.extensions.thinning.replacement import ThinOptions, plan_thinning

    plan_thinning(LOCAL, str(path), ThinOptions(dtype="bf16", grace=0.0)).carry_out(LOCAL)
    return path


def _linked(root: Path) -> Path:
    (root / "step2").symlink_to("step1")
    return root / "step2"


def _empty(root: Path) -> Path:
    (root / "step2").mkdir()
    return root / "step2"


def _foreign(root: Path) -> Path:
    (root / "step2").mkdir()
    (root / "step2" / "_CHECKPOINT_METADATA").write_bytes(b"x")
    return root / "step2"


def _half_removed(root: Path) -> Path:
    return _committed(root).rename(root / aside_name("step2"))


def _hidden(root: Path) -> Path:
    return _committed(root).rename(root / ".step2")


def _replaced(root: Path) -> Path:
    return _committed(root).rename(root / f"step2{REPLACED}")


def _nested(root: Path) -> Path:
    return _committed(root, "a/step2")


def _nested_beside_a_file(root: Path) -> Path:
    path = _nested(root)
    (path.parent / "notes.txt").write_text("mine")
    return path


def _nested_deep(root: Path) -> Path:
    return _committed(root, "a/b/c/d/step2")


def _nested_plain(root: Path) -> Path:
    path = _plain(root)
    (root / "a").mkdir()
    return path.rename(root / "a" / "step2")


def _nested_plain_and_named(root: Path) -> Path:
    (root / "latest").write_text("./a/step2/")
    return _nested_plain(root)


def _damaged(root: Path) -> Path:
    path = _committed(root)
    (path / MANIFEST).write_text("{")
    return path


def _being_copied(root: Path) -> Path:
    path = _committed(root)
    (path / MARK).write_text(json.dumps({"key": "x", "over": None, "files": [MANIFEST]}))
    return path


def _folder(root: Path) -> Path:
    path = root / "checkpoint-2"
    _committed(path)
    return path


def _folder_without_latest(root: Path) -> Path:
    path = _folder(root)
    (path / "latest").unlink()
    (path / "zero_to_fp32.py").unlink()
    return path


def _link_outside(root: Path) -> Path:
    (root / "step2").symlink_to(_committed(root.parent / "elsewhere"))
    return root / "step2"


TABLE: dict[str, tuple[Callable[[Path], Path], Answer]] = {
    "committed": (_committed, Answer("whole", commit=True, resumes=True, opens=True)),
    "committed, with its marker": (_marked, Answer("whole", commit=True, resumes=True, opens=True)),
    "committed, a file cut off": (_cut, Answer("incomplete", commit=True, resumes=True, opens=False)),
    "uncommitted": (_uncommitted, Answer("uncommitted", commit=False, resumes=False, opens=False)),
    "a plain save": (_plain, Answer("whole", commit=False, resumes=True, opens=True)),
    "a plain save that lacks a file": (_lacking, Answer("incomplete", commit=False, resumes=True, opens=False)),
    "thin": (_thin, Answer("thin whole", commit=True, resumes=True, opens=True)),
    "a link": (_linked, Answer("link whole", commit=True, resumes=True, opens=True)),
    "nested": (_nested, Answer("", commit=True, resumes=True, opens=True)),
    "nested, beside a file": (_nested_beside_a_file, Answer("", commit=False, resumes=True, opens=True)),
    "nested too deep": (_nested_deep, Answer("", commit=False, resumes=True, opens=True)),
    "nested, a plain save": (_nested_plain, Answer("", commit=False, resumes=False, opens=True)),
    "nested, a plain save that latest names": (
        _nested_plain_and_named,
        Answer("", commit=False, resumes=True, opens=True),
    ),
    "a damaged manifest": (_damaged, Answer("problem", commit=True, resumes=True, opens=False)),
    "a copy that is being written": (_being_copied, Answer("problem", commit=False, resumes=False, opens=False)),
    "a trainer's folder": (_folder, Answer("whole", commit=False, resumes=False, opens=True)),
    "a trainer's folder without latest": (
        _folder_without_latest,
        Answer("whole", commit=False, resumes=False, opens=True),
    ),
    "a link that leaves the root": (_link_outside, Answer("link problem", commit=True, resumes=True, opens=True)),
    "replaced": (_replaced, Answer("whole", commit=True, resumes=True, opens=True)),
    "half removed": (_half_removed, Answer("problem", commit=False, resumes=False, opens=True)),
    "hidden": (_hidden, Answer("whole", commit=False, resumes=False, opens=True)),
    "empty": (_empty, NO),
    "of another framework": (_foreign, NO),
}


def _listed(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    entry = next((e for e in ckpttool.ls(root).entries if e.name == name), None)
    if entry is None:
        return ""
    state = "whole" if entry.whole else entry.torn or "problem"
    return f"{'link ' if entry.link else ''}{'thin ' if entry.thin else ''}{state}"


def _opens(path: Path) -> bool:
    try:
        open_checkpoint(str(path))
    except CkptError:
        return False
    return True


@pytest.mark.parametrize("state", [state for state in TABLE if state != "thin" or present("thinning")])
def test_all_agree_on_what_counts_as_a_checkpoint(state: str, tmp_path: Path) -> None:
    build, expected = TABLE[state]
    root = tmp_path / "root"
    save_version(LOCAL, str(root), Alone(), "step1", 1)
    path = build(root)
    name = path.relative_to(root).as_posix()
    found = Answer(
        _listed(root, path),
        commit=str(path) in [one.path for one in commits(scan(LOCAL, str(root)))],
        resumes=name in [c.tag for c in candidates(LOCAL, str(root))],
        opens=_opens(path),
    )
    assert found == expected


class InRun(NamedTuple):
    """What the tool says of a folder of a run that holds the directory as a tag."""

    counts: bool
    """Whether the rotation of a trainer counts it."""
    of_ray: bool
    """Whether it is a commit of a run of Ray Train: a restore tries it, and the next commit has it as its parent."""
    newest: bool
    """Whether commands open it as the newest checkpoint of a trainer's output directory."""


IN_RUN: dict[str, InRun] = {
    "committed": InRun(counts=True, of_ray=True, newest=True),
    "committed, with its marker": InRun(counts=True, of_ray=True, newest=True),
    "committed, a file cut off": InRun(counts=True, of_ray=True, newest=False),
    "uncommitted": InRun(counts=False, of_ray=False, newest=False),
    "a plain save": InRun(counts=True, of_ray=False, newest=True),
    "a plain save that lacks a file": InRun(counts=True, of_ray=False, newest=False),
    "thin": InRun(counts=False, of_ray=True, newest=True),
    "nested": InRun(counts=True, of_ray=False, newest=True),
    "nested, beside a file": InRun(counts=True, of_ray=False, newest=True),
    "nested too deep": InRun(counts=True, of_ray=False, newest=True),
    "nested, a plain save that latest names": InRun(counts=True, of_ray=False, newest=True),
    "a damaged manifest": InRun(counts=False, of_ray=True, newest=False),
    "a copy that is being written": InRun(counts=False, of_ray=False, newest=False),
    "a link that leaves the root": InRun(counts=True, of_ray=True, newest=True),
    "replaced": InRun(counts=True, of_ray=True, newest=False),
    "half removed": InRun(counts=False, of_ray=False, newest=False),
    "hidden": InRun(counts=False, of_ray=True, newest=False),
    "empty": InRun(counts=False, of_ray=False, newest=False),
}
if not present("thinning"):
    del IN_RUN["thin"]


@pytest.mark.parametrize("state", IN_RUN)
def test_all_agree_on_what_counts_as_a_checkpoint_of_a_run(state: str, tmp_path: Path) -> None:
    assert _in_run(tmp_path, state) == IN_RUN[state]


def _in_run(base: Path, state: str) -> InRun:
    build, _ = TABLE[state]
    run, of_ray = base / "run", base / "ray"
    for root, first, second in ((run, "checkpoint-1", "checkpoint-2"), (of_ray, "ckpttool_01_a", "ckpttool_02_b")):
        save_version(LOCAL, str(root / first), Alone(), "step1", 1)
        (root / second).mkdir()
        path = build(root / second)
        latest = root / second / "latest"
        latest.write_text(latest.read_text() if latest.exists() else path.relative_to(root / second).as_posix())
    try:
        newest = open_checkpoint(str(run), report=lambda error: None).root == str(run / "checkpoint-2")
    except CkptError:
        newest = False
    counted = trainer_commits(Place(LOCAL, str(run)).folders)
    return InRun(
        counts=str(run / "checkpoint-2") in [one.name for one in counted],
        of_ray=str(of_ray / "ckpttool_02_b") in [one.root for one in run_commits(LOCAL, str(of_ray))],
        newest=newest,
    )
