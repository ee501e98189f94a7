"""The docstring of each public function says all of its arguments, and says one argument the same way everywhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ckpttool.registry import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckpttool"
FILES = [
    *sorted(path for path in (PACKAGE / "api").glob("[!_]*.py") if path.stem != "options"),
    *(PACKAGE / "integrations" / name for name in ("ray_train.py", "torch/state_dict.py")),
    *(PACKAGE / "integrations/live" / name for name in ("folders.py", "load.py", "manager.py")),
    *sorted((PACKAGE / "extensions").glob("*/api.py")),
]
SHARED = {
    "inspect": ("trust_names", "follow_links"),
    "consolidate": ("jobs", "memory", "ray", "allow_partial"),
    "convert": ("resume",),
    "load": ("strict", "weights_only"),
    "CheckpointManager": ("allow",),
    "CheckpointManager.restore": ("require_committed", "optimizer", "scheduler"),
}
"""Arguments that several functions have, and the function whose text is that of all."""
OTHER_MEANING = {
    ("load", "memory"), ("load", "allow"), ("load", "optimizer"), ("load", "scheduler"), ("load", "extra"),
    ("CheckpointManager.save", "optimizer"), ("CheckpointManager.save", "scheduler"),
    ("RayTrainCheckpoints.report", "optimizer"), ("RayTrainCheckpoints.report", "scheduler"),
    ("live_digest", "optimizer"), ("live_digest", "scheduler"),
    ("prove", "optimizer"), ("prove", "scheduler"), ("prove", "weights_only"), ("consolidate", "optimizer"),
    ("stats", "optimizer"), ("LazyStateDict.load_into", "strict"), ("verify", "jobs"), ("digest", "jobs"),
    ("diff", "jobs"), ("stats", "jobs"),
}  # fmt: skip
"""Arguments of such names that mean something else."""


class Argument(NamedTuple):
    """An argument in a docstring."""

    function: str
    name: str
    text: str


def _documented(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                yield from _documented(node.body, f"{prefix}{node.name}.")


def _arguments() -> Iterator[Argument]:
    for path in FILES:
        for function, text in _documented(ast.parse(path.read_text()).body):
            listed = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
            for one in re.split(r"^    (?=\w)", listed[1] if listed else "", flags=re.MULTILINE)[1:]:
                name, _, said = one.partition(": ")
                yield Argument(function, name, " ".join(inspect.cleandoc(said).split()))
    for option in (option for extension in EXTENSIONS for option in extension.options):
        yield from (Argument(function, option.name, option.text) for function in option.functions)


ARGUMENTS = list(_arguments())


def test_no_text_sends_the_reader_to_another_function() -> None:
    assert len(ARGUMENTS) > 300
    foreign = re.compile(r"[Aa]s for (?!Accelerate|``ray\.train\.report``|``restore_engine``)")
    assert [one for one in ARGUMENTS if foreign.search(one.text)] == []


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in SHARED.items() for name in names])
def test_one_argument_is_said_the_same_way_everywhere(owner: str, name: str) -> None:
    (declared,) = (one.text for one in ARGUMENTS if (one.function, one.name) == (owner, name))
    same = [one for one in ARGUMENTS if one.name == name and (one.function, name) not in OTHER_MEANING]
    assert len(same) > 1
    assert [one for one in same if not one.text.startswith(declared)] == []
