"""What drawn roots count as loadable is what a live engine of DeepSpeed and its ``latest`` rule load."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.catalog.drawn_roots import Item, files_of, is_complete
from tests.deepspeed.engines import build, step
from tests.forked import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


def _without(pattern: str) -> Callable[[Path], None]:
    def remove(tag: Path) -> None:
        for path in tag.glob(pattern):
            path.unlink()

    return remove


def _cut(pattern: str) -> Callable[[Path], None]:
    def truncate(tag: Path) -> None:
        for path in tag.glob(pattern):
            os.truncate(path, path.stat().st_size // 2)

    return truncate


DAMAGES: dict[str, Callable[[Path], None]] = {
    "whole": lambda tag: None,
    "cut off": _without("*optim_states.pt"),
    "without model": _without("*model_states.pt"),
    "truncated": _cut("*optim_states.pt"),
    "truncated model": _cut("*model_states.pt"),
    "with a user's directory": lambda tag: (tag / "sft").mkdir(),
    "gone": shutil.rmtree,
}


@on_ranks(1)
def _loaded(directory: Path) -> dict[str, tuple[bool, bool]]:
    """By damage: whether DeepSpeed loads the state with its optimizer, and whether the oracle says so."""
    engine = build(2, "bf16", "two", "adamw")
    step(engine, 2)
    engine.save_checkpoint(str(directory / "pristine"))
    pristine = {path.name: path.read_bytes() for path in (directory / "pristine/global_step2").iterdir()}
    found = {}
    for damage, apply in DAMAGES.items():
        root = directory / damage
        shutil.copytree(directory / "pristine", root)
        apply(root / "global_step2")
        fresh = build(2, "bf16", "two", "adamw", seed=1)
        says = all(
            (root / "global_step2" / n).is_file() and is_complete(root / "global_step2" / n, d)
            for n, d in pristine.items()
        )
        found[damage] = _loads(fresh, root), says
    return found


def _loads(engine: Any, root: Path) -> bool:
    try:
        path, _ = engine.load_checkpoint(str(root))
    except Exception:
        return False
    return path is not None and bool(engine.optimizer.optimizer.state)


def test_the_oracle_agrees_with_deepspeed(tmp_path: Path) -> None:
    (found,) = _loaded(tmp_path)
    assert {damage: by for damage, (by, _) in found.items()} == {damage: says for damage, (_, says) in found.items()}
    assert [damage for damage, (by, _) in found.items() if by] == ["whole", "with a user's directory"]


def test_an_item_needs_the_files_of_all_its_tags(tmp_path: Path) -> None:
    fixture = "zero2-dp2-bf16-sgd/global_step3"
    for tag in ("pytorch_model", "pytorch_model_1"):
        (tmp_path / tag).mkdir()
        for name, data in files_of(fixture).items():
            (tmp_path / tag / name).write_bytes(data)
    item = Item(tmp_path, 1, "both", {"pytorch_model": fixture, "pytorch_model_1": fixture})
    assert item.loads()
    next((tmp_path / "pytorch_model").glob("*optim*")).unlink()
    assert not item.loads()
