"""The parts of the documentation that are made from the source and from the fixtures are complete and true."""

from __future__ import annotations

import ast
import fnmatch
import re
import shutil
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.formats.stand_ins import OR_ANOTHER_TAG
from docs.generators import drawings, error_messages, error_pages, support_features, terminal
from tests.cli.command import ckpttool as command
from tests.docs.blocks import PAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"


@pytest.fixture(scope="module")
def messages() -> list[error_messages.Message]:
    """Every message of the package; reading the source takes two seconds."""
    return error_messages.read_messages()


# ------------------------------------------------------------------------------------------------- error messages


@pytest.mark.slow
def test_every_construction_of_an_error_gives_a_message(messages: list[error_messages.Message]) -> None:
    kinds = {m.kind for m in messages}
    listed = {(m.kind, place) for m in messages for place in m.places}
    made = 0
    for path in (ROOT / "ckpttool").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name in kinds and not module.startswith("ckpttool.testing"):
                assert (name, module) in listed, (name, module)
                made += 1
    assert made > 300
    assert len(messages) >= made


def test_few_messages_are_the_words_of_others(messages: list[error_messages.Message]) -> None:
    """Where the operating system or another library says what is wrong, there is no text to list."""
    unknown = [m for m in messages if m.problem == error_messages.UNKNOWN]
    assert len(unknown) <= 5, [m.places for m in unknown]
    assert sum(not m.hints for m in messages) <= 5


def test_anchors_are_made_of_the_class_and_the_words(messages: list[error_messages.Message]) -> None:
    message = error_messages.Message("NoCheckpointError", "holds no {kind} checkpoint", (), ())
    assert message.anchor == "layout-holds-no-checkpoint"
    for anchor, alike in error_pages.anchored(messages).items():
        assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", anchor)
        assert len({error_messages.public_class(m.kind) for m in alike}) == 1


def _without_a_rank(root: Path) -> None:
    (root / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def _without_latest(root: Path) -> None:
    (root / "latest").unlink()
    shutil.copytree(root / "global_step3", root / "global_step4")


def _another_latest(root: Path) -> None:
    (root / "latest").write_text("global_step9")


def _cut_off(root: Path) -> None:
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])


def _swapped(root: Path) -> None:
    one, other = (root / "global_step3" / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def _marked(root: Path) -> None:
    (root / "global_step3" / ".ckpttool-staging").write_text("{}")


def _linked(root: Path) -> None:
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    shutil.move(path, root.parent / "elsewhere")
    path.symlink_to(root.parent / "elsewhere")


DAMAGE = {
    _without_a_rank: "layout-is-missing",
    _without_latest: "layout-holds-checkpoints-and-no-latest",
    _another_latest: "layout-names-which-is-not-there",
    _cut_off: "truncated-is-cut-off-only-its-first-bytes-are-there",
    _swapped: "layout-was-saved-as-as-its-records-show-files-were-renamed-or-swapped",
    _marked: "layout-is-being-written-or-was-left-half-written-by-a-killed-run",
    _linked: "link-is-reached-through-a-link-that-leaves-the-checkpoint-s-root",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__.strip("_"))
def test_real_errors_are_found_on_the_page(
    damage: object, messages: list[error_messages.Message], tmp_path: Path
) -> None:
    """An error that the package raises is one of the messages, with its hint."""
    assert callable(damage)
    root = tmp_path / "root"
    shutil.copytree(CHECKPOINTS / "zero2-dp2-bf16", root)
    damage(root)
    with pytest.raises(ckpttool.CkptError) as caught:
        ckpttool.inspect(root)
    error = caught.value
    found = error_pages.find(error_messages.public_class(type(error).__name__), error.problem, messages)
    assert found is not None, error
    assert found.anchor == DAMAGE[damage]
    hints = [hint for m in error_pages.anchored(messages)[found.anchor] for hint in m.hints]
    hints += [OR_ANOTHER_TAG.sub("", hint) for hint in hints]  # the root has one tag
    assert any(error_pages.pattern(hint).fullmatch(error.hint) for hint in hints), (error.hint, hints)


def test_the_page_has_an_anchor_for_every_message(messages: list[error_messages.Message], tmp_path: Path) -> None:
    error_pages.write(tmp_path / "errors")
    page = "".join(path.read_text() for path in (tmp_path / "errors").iterdir())
    anchors = re.findall(r"^\(error-(.*)\)=$", page, re.MULTILINE)
    assert sorted(anchors) == sorted({m.anchor for m in messages})
    for message in messages:
        assert message.problem in page


# ------------------------------------------------------------------------------------------------- what is read


def test_every_fixture_shows_a_feature_and_every_pattern_names_a_fixture() -> None:
    held = sorted(p.name for p in CHECKPOINTS.iterdir())
    shown = {name for feature in support_features.FEATURES for name in support_features.shown_by(feature, held)}
    assert shown == set(held)
    for feature in support_features.FEATURES:
        for pattern in feature.shown_by:
            alone = support_features.Feature("", "", (pattern,))
            assert support_features.shown_by(alone, held), f"{pattern} is no fixture"


# ------------------------------------------------------------------------------------------------- README, pictures


def test_the_picture_in_the_readme_is_what_the_commands_print() -> None:
    assert terminal.PICTURE.read_text() == terminal.picture(terminal.session()), "run docs/generators/terminal.py"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    drawings.write(tmp_path)
    for name in drawings.PICTURES:
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg ")


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(links) > 20
    for link in links:
        assert (ROOT / link).exists(), link
    assert f"{len(list(CHECKPOINTS.iterdir()))} bundled checkpoints" in text


def test_the_readme_names_every_command_or_its_page_does() -> None:
    pages = "".join(page.read_text() for page in PAGES if page.name != "README.md")
    for name in re.findall(r"^  (\w+) ", command("--help").stdout.partition("Commands:")[2], re.MULTILINE):
        assert f"ckpttool {name} " in pages, name


def test_the_checkpoints_in_the_table_of_systems_are_bundled() -> None:
    text = (ROOT / "docs" / "support.md").read_text().partition("## Systems of DeepSpeed")[2].partition("\n## ")[0]
    names = [path.name for path in CHECKPOINTS.iterdir()]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][2:]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]*)`", row[5]) if "-" in pattern]
    assert len(rows) > 20
    assert len(patterns) > 20
    assert not [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
