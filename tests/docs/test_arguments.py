"""The docstring of each public function says all of its arguments, and says one argument the same way everywhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import ckpttool
from ckpttool.options import OPTIONS, row_of
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
    "consolidate": ("ray",),
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
    ("stats", "optimizer"), ("LazyStateDict.load_into", "strict"),
    ("average", "src"), ("average", "tag"), ("average", "include"), ("average", "exclude"), ("average", "prove"),
    ("average", "storage_options"), ("cp", "prove"), ("prune", "dry_run"), ("prune", "progress"),
    ("extract", "src"), ("extract", "overwrite"), ("load", "check"), ("load", "dry_run"),
    ("LazyStateDict", "include"), ("LazyStateDict", "exclude"), ("LazyStateDict", "check"),
    ("CheckpointManager", "root"), ("CheckpointManager.save", "tag"), ("CheckpointManager.save", "overwrite"),
    ("CheckpointManager.save_into", "root"), ("CheckpointManager.restore", "tag"),
    ("CheckpointManager.restore", "dry_run"), ("Folders", "root"), ("Folders.save", "tag"),
    ("prepare", "root"), ("CkptCallback", "root"),
}  # fmt: skip
"""Arguments of such names that mean something else, or say more."""


class Argument(NamedTuple):
    """An argument in a docstring."""

    function: str
    name: str
    text: str


class Documented(NamedTuple):
    """A function or class of the package."""

    name: str
    node: ast.FunctionDef | ast.ClassDef
    listed: dict[str, str]
    """Texts of its docstring by argument."""

    @property
    def completed(self) -> bool:
        """Whether rows of options complete its docstring."""
        return isinstance(self.node, ast.FunctionDef) and "with_options" in map(ast.unparse, self.node.decorator_list)

    def arguments(self) -> Iterator[tuple[ast.arg, ast.expr | None]]:
        """Yield the parameters of a function, and their default values."""
        if isinstance(self.node, ast.FunctionDef):
            own = self.node.args
            defaults = [*[None] * (len(own.args) - len(own.defaults)), *own.defaults]
            yield from zip([*own.args, *own.kwonlyargs], [*defaults, *own.kw_defaults], strict=True)


def _documented(body: list[ast.stmt], prefix: str = "") -> Iterator[Documented]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", ast.get_docstring(node) or "", re.DOTALL | re.MULTILINE)
            entries = re.split(r"^    (?=[\w*])", section[1] if section else "", flags=re.MULTILINE)[1:]
            pairs = (one.partition(": ") for one in entries)
            yield Documented(prefix + node.name, node, {a: " ".join(inspect.cleandoc(b).split()) for a, _, b in pairs})
            if isinstance(node, ast.ClassDef):
                yield from _documented(node.body, f"{prefix}{node.name}.")


DOCUMENTED = [one for path in FILES for one in _documented(ast.parse(path.read_text()).body)]


def _arguments() -> Iterator[Argument]:
    for one in DOCUMENTED:
        if not one.node.name.startswith("_"):
            yield from (Argument(one.name, name, text) for name, text in one.listed.items())
    for option in (option for extension in EXTENSIONS for option in extension.options):
        yield from (Argument(function, option.name, option.text) for function in option.functions)


ARGUMENTS = list(_arguments())
OF_EXTENSIONS = {(name, option.name) for row in EXTENSIONS for option in row.options for name in option.functions}


def test_no_text_sends_the_reader_to_another_function() -> None:
    assert len(ARGUMENTS) > 250
    foreign = re.compile(r"[Aa]s for (?!Accelerate|``ray\.train\.report``|``restore_engine``)")
    assert [
        text for text in [*(a.text for a in ARGUMENTS), *(row.text for row in OPTIONS)] if foreign.search(text)
    ] == []


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in SHARED.items() for name in names])
def test_one_argument_is_said_the_same_way_everywhere(owner: str, name: str) -> None:
    (declared,) = (one.text for one in ARGUMENTS if (one.function, one.name) == (owner, name))
    same = [one for one in ARGUMENTS if one.name == name and (one.function, name) not in OTHER_MEANING]
    assert len(same) > 1
    assert [one for one in same if not one.text.startswith(declared)] == []


def test_each_argument_is_in_its_docstring_or_has_a_row() -> None:
    for one in (one for one in DOCUMENTED if one.listed or one.completed):
        names = [argument.arg for argument, _ in one.arguments() if argument.arg != "self"]
        missing = [name for name in names if name not in one.listed]
        assert [name for name in missing if not (one.completed and row_of(name, one.name))] == [], one.name
        assert not one.completed or one.listed.keys() <= {*names}, one.name


def test_a_row_is_like_the_parameters_without_a_text_of_their_own() -> None:
    """They have its text, so they have its type and its default value, too."""
    found = set()
    for one in (one for one in DOCUMENTED if one.completed):
        for argument, default in one.arguments():
            row = None if argument.arg in one.listed else row_of(argument.arg, one.name)
            if row is not None:
                found.add(row)
                assert argument.annotation is not None
                assert ast.unparse(argument.annotation) == row.annotation, (one.name, row.name)
                assert default is None or ast.literal_eval(default) == row.default, (one.name, row.name)
    assert found == {*OPTIONS}


def test_a_shared_argument_begins_with_the_text_of_its_row_and_does_not_repeat_it() -> None:
    in_stub = {one.name for one in DOCUMENTED if one.completed} & {
        *dir(ckpttool)
    }  # editors show others from the source
    for one in ARGUMENTS:
        texts = [row.text for row in OPTIONS if row.name == one.name]
        if texts and (one.function, one.name) not in OTHER_MEANING | OF_EXTENSIONS:
            assert one.text.startswith(tuple(texts)), one
            row = row_of(one.name, one.function)
            assert one.function not in in_stub or row is None or one.text != row.text, one
