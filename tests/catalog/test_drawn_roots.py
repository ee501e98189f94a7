"""Of drawn roots: what the frameworks load next, what is pinned and what is not ours is there after any removal."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain, rotate
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import REPLACED
from ckpttool.commit.marks import state_of
from ckpttool.errors import CkptError
from ckpttool.registry import carry_out
from ckpttool.saving.claim import Skipped
from ckpttool.storage import LOCAL
from tests import sampling
from tests.catalog.drawn_roots import MODELS, Item, Root, commit, draw
from tests.faults.disks import CHANGES, Killed, watching
from tests.faults.rules import Kill, Rule
from tests.rooms import present
from tests.truth import source

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

pytestmark = pytest.mark.slow
ROOTS = 2000
CHUNKS = 20


def _action(root: Root, rng: random.Random) -> tuple[str, Callable[[], object], Item | None]:
    """Draw what is done: its name, a function, and the checkpoint that it replaces."""
    last, torn = rng.choice([1, 1, 2]), rng.random() < 0.5
    path = str(root.path)
    choices = ["prune", "prune", "maintain", "cp"]
    loadable = [item for item in root.items if item.loads()]
    if root.layout in {"trainer", "accelerate"} and root.items[-1] in loadable:
        choices += ["rotate", "rotate"]  # after a save
    if root.layout in {"tags", "commits"}:
        choices += ["overwrite", "go on"]
    name = rng.choice(choices)
    every, thin = rng.choice([None, None, 2]), rng.choice([None, "bf16"]) if present("thinning") else None
    given: dict[str, Any] = {} if thin is None else {"thin": thin}
    if name == "prune":
        text = f"prune(keep_last={last}, keep_every={every}, torn={torn}, thin={thin})"
        prune = partial(ckpttool.prune, path, keep_last=last, keep_every=every, torn=torn, grace=0, **given)
        return text, prune, None
    if name == "maintain":
        rule = Rules(last, every, action=next(iter(carry_out("prune", given)), None))
        return f"maintain(last={last}, thin={thin})", lambda: maintain(LOCAL, path, rule, grace=0), None
    if name == "cp":  # of a model like "a", and latest names it if that names no newer one
        root.items.append(Item(root.path / "global_step3", 3, "a", {"": "zero2-dp2-bf16-lion/global_step3"}))
        return "cp", lambda: ckpttool.cp(source("zero2-dp2-bf16-lion"), path), None
    if name == "rotate":
        return f"rotate({last})", lambda: rotate(LOCAL, path, last, keep=(), grace=0), None
    own = [item for item in root.items if item.series == "a"]
    item = rng.choice(own if name == "overwrite" else [one for one in own if one not in loadable] or own)
    skipped = None if name == "overwrite" else Skipped(state_of(LOCAL, str(item.path)), "is torn")
    if name == "go on" and item in loadable:
        skipped = None
    tag, step = item.path.name, item.step
    return (
        f"{name} at {tag}",
        lambda: commit(root.path, tag, step, MODELS["a"], overwrite=name == "overwrite", skipped=skipped),
        item,
    )


def _check(root: Root, keep: dict[str, Item], replaced: Item | None) -> None:
    for path, data in root.foreign.items():
        # A run below a checkpoint that a save has moved aside moves with nothing: the save is refused.
        assert path.is_file(), f"{path.relative_to(root.path.parent)}, which is not ours, is gone"
        assert path.read_bytes() == data
    for link in root.links:
        assert link.is_symlink(), f"the link {link.name} is gone"
    for why, item in keep.items():
        found = item.loads()
        if item is replaced and not item.is_pinned:
            aside = Item(Path(f"{item.path}{REPLACED}"), item.step, item.series, item.tags)
            found = found or aside.loads()
        assert found or (item.is_pinned and item.path.is_dir()), f"{item.path.name} ({why}) is gone"


def _try(seed: int, directory: Path) -> str:
    root, rng = draw(seed, directory)
    keep = root.must_stay()
    what, act, replaced = _action(root, rng)
    killed = rng.random() < 0.4
    root.story.append(what)
    try:
        if killed:
            rule = Rule(Kill(rng.choice(["before", "after"])), CHANGES, nth=rng.randint(1, 25))
            with watching(rule), contextlib.suppress(Killed, CkptError):
                act()
            killed = rule.done > 0
            root.story.append("killed" if killed else "not killed")
            _check(root, keep, replaced)
        with contextlib.suppress(CkptError):
            act()
        _check(root, keep, replaced)
        pinned = {why: item for why, item in keep.items() if item.is_pinned}
        keep = root.must_stay() | pinned  # a save has changed what is the newest
        with contextlib.suppress(CkptError):
            maintain(LOCAL, str(root.path), Rules(1), grace=0)
        _check(root, keep, None)
        with contextlib.suppress(CkptError):
            ckpttool.prune(root.path, keep_last=1, torn=True, grace=0)
        _check(root, keep, None)
    except AssertionError as error:
        raise AssertionError(f"{error}; {'; '.join(root.story)}") from error
    return f"{what.partition('(')[0].partition(' at')[0]}{', killed' if killed else ''}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_that_anyone_keeps_is_lost(
    chunk: int, tmp_path: Path, crash_points: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no test of the disk
    size = ROOTS // CHUNKS
    wrong, tried = [], 0
    for seed in sampling.some(range(chunk * size, (chunk + 1) * size), 2, key=f"drawn roots {chunk}"):
        try:
            _try(seed, tmp_path / str(seed))
        except AssertionError as error:
            wrong.append(str(error))
        tried += 1
        shutil.rmtree(tmp_path / str(seed))
    assert wrong == []
    crash_points(tried)
