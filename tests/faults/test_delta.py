"""A failure at any operation of ``delta`` and ``apply``: nothing is left, or the output is complete."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckpttool.cli._errors import INTERRUPTED
from ckpttool.testing.disks import OF_COMMANDS, is_no_cleanup, watching
from ckpttool.testing.faults import Before, Fail, Nothing, Rule, interrupt
from tests import sampling
from tests.cli.command import Outcome, ckpttool
from tests.truth import source

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

BEFORE, BEHIND = source("zero2-dp2-bf16"), source("zero3-dp2-bf16")


def _run(what: str, delta: Path, out: Path, rule: Rule) -> Outcome:
    paths = (BEFORE, BEHIND) if what == "delta" else (BEFORE, delta)
    with watching(rule):
        return ckpttool(what, *paths, out, "--jobs", 1)


def _contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("what", ["delta", "apply"])
@pytest.mark.parametrize("fault", [Fail("ENOSPC"), Before(interrupt)], ids=["ENOSPC", "^C"])
def test_failure_at_every_operation(what: str, fault: Fail | Before, tmp_path: Path) -> None:
    delta, root = tmp_path / "delta", tmp_path / "root"
    assert ckpttool("delta", BEFORE, BEHIND, delta).code == 0
    root.mkdir()
    recorded = Rule(Nothing(), OF_COMMANDS, when=is_no_cleanup)
    assert _run(what, delta, root / "out", recorded).code == 0
    good = _contents(root / "out")
    assert {"open", "create", "pwrite", "preadv", "rename"} <= set(recorded.matched)
    for at in sampling.some(range(len(recorded.matched)), 30, key=f"{what} {isinstance(fault, Before)}"):
        shutil.rmtree(root / "out", ignore_errors=True)
        rule = Rule(fault, OF_COMMANDS, when=is_no_cleanup, nth=at + 1)
        done = _run(what, delta, root / "out", rule)
        assert rule.matched[: at + 1] == recorded.matched[: at + 1]
        assert rule.done == 1
        if done.code == 0:
            assert recorded.matched[at] == "mkdir", "it was there already"
            assert _contents(root / "out") == good
            continue
        if isinstance(fault, Before):
            assert done.code == INTERRUPTED
        else:
            assert done.error
        assert list(root.iterdir()) == []
    assert _run(what, delta, root / "again", Rule(Nothing(), OF_COMMANDS)).code == 0
    assert _contents(root / "again") == good
