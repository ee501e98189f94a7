"""A restore follows no symbolic link out of the checkpoint's root, unless follow_links is set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
REFUSED = "is reached through a link that leaves the checkpoint's root"
WAYS = ("restore", "restore b", "preview", "load", "load_state_dict")
FOLLOWING = ("restore and follow", "load and follow")


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, dict[str, str]]:
    directory: Path = tmp_path_factory.mktemp("linking")
    forked.start("tests.deepspeed.linking", [], directory)
    found: dict[str, dict[str, str]] = json.loads((directory / "told.json").read_text())
    return found


@pytest.mark.parametrize("what", ["file", "states", "manifest", "tag"])
def test_links_that_leave_the_root_are_refused(what: str, told: dict[str, dict[str, str]]) -> None:
    found = told[what]
    for way in ("restore b", "load", "load_state_dict"):
        assert REFUSED in found[way], way
    assert [found[way] for way in FOLLOWING] == ["b", "b"]


@pytest.mark.parametrize("what", ["file", "states", "manifest", "tag"])
def test_no_older_checkpoint_is_restored_instead(what: str, told: dict[str, dict[str, str]]) -> None:
    assert REFUSED in told[what]["restore"]
    assert REFUSED in told[what]["preview"]


def test_latest_that_is_a_link_is_refused(told: dict[str, dict[str, str]]) -> None:
    found = told["latest"]
    assert all(REFUSED in found[way] for way in ("restore", "preview", "load", "load_state_dict"))
    assert found["restore b"] == "b"
    assert [found[way] for way in FOLLOWING] == ["b", "b"]


def test_another_checkpoint_that_is_a_link_is_passed_over(told: dict[str, dict[str, str]]) -> None:
    assert [told["older tag"][way] for way in WAYS] == ["b"] * len(WAYS)


@pytest.mark.parametrize("what", ["root is a link", "inside", "cache"])
def test_links_that_stay_inside_are_followed(what: str, told: dict[str, dict[str, str]]) -> None:
    assert [told[what][way] for way in (*WAYS, *FOLLOWING)] == ["b"] * 7
