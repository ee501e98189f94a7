"""What counts as a checkpoint, by the state of its directory: one table for all that list, open and restore."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

import ckpttool
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.thinning import ThinOptions, plan_thinning, thin
from ckpttool.commit.manifest import REPLACED, commits
from ckpttool.errors import CkptError
from ckpttool.formats import open_checkpoint
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, MARK, aside_name
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
    options = ThinOptions(dtype="bf16", grace=0.0)
    thin(LOCAL, plan_thinning(LOCAL, str(path), options), options)
    return path


def _linked(root: Path) -> Path:
    (root / "step2").symlink_to("step1")
    return root / "step2"


def _empty(root: Path) -> Path:
    (root / "step2").mkdir()
    return root / "step2"


def _foreign(root: Path) -> Path:
    (root / "step2").mkdir()
    (root / "step2" / "model_world_size_2_rank_0.pt").write_bytes(b"x")
    return root / "step2"


def _half_removed(root: Path) -> Path:
    return _committed(root).rename(root / aside_name("step2"))


def _hidden(root: Path) -> Path:
    return _committed(root).rename(root / ".step2")


def _replaced(root: Path) -> Path:
    return _committed(root).rename(root / f"step2{REPLACED}")


def _nested(root: Path) -> Path:
    return _committed(root, "a/step2")


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


@pytest.mark.parametrize("state", TABLE)
def test_all_agree_on_what_counts_as_a_checkpoint(state: str, tmp_path: Path) -> None:
    build, expected = TABLE[state]
    root = tmp_path / "root"
    save_version(LOCAL, str(root), Alone(), "step1", 1)
    path = build(root)
    name = path.relative_to(root).as_posix()
    found = Answer(
        _listed(root, path),
        commit=str(path) in commits(LOCAL, str(root)),
        resumes=name in [c.tag for c in candidates(LOCAL, str(root))],
        opens=_opens(path),
    )
    assert found == expected
