"""Law of saves and resumes on real engines: a restore gives the newest committed state of some engine."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked, sampling

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

COUNT = int(os.environ.get("CKPTTOOL_TEST_ENGINES", "3" if sampling.thorough() else "2"))
"""Histories; each has several lives, of so many ranks."""
FIRST = int(os.environ.get("CKPTTOOL_TEST_ENGINES_FIRST", "0"))
"""The number of the first: each is another."""
DOES = ("train", "train", "save", "save", "restore", "clock", "bad", "spoil", "full")


def _history(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)  # noqa: S311  nothing is secret
    lives = [
        {
            "ranks": draw.choice([1, 2, 2, 3]), "stage": draw.choice([0, 1, 2, 3]), "background": draw.random() < 0.5,
            "groups": draw.choice(["two", "two", "two", "swapped", "reversed", "cut", "frozen a", "frozen b"]),
            "optimizer": draw.choice(["adamw", "adamw", "adamw", "momentum"]),
            "does": ["train", "save", *draw.choices(DOES, k=7)],
            "end": draw.choice(["", "exit", "kill"]), "victim": draw.randrange(3), "at": draw.randrange(5),
        }
        for _ in range(4)
    ]  # fmt: skip
    for life in lives:
        life["background"] = life["background"] or life["end"] == "exit"
    return {"id": f"history-{seed}", "lives": lives}


def test_histories(tmp_path: Path) -> None:
    jobs = [_history(seed) for seed in range(FIRST, FIRST + COUNT)]
    forked.start("tests.deepspeed.histories", jobs, tmp_path)
    for job in jobs:
        done = (tmp_path / job["id"] / "done").read_text().splitlines()
        assert [json.loads(line)[0] for line in done] == [life["does"] for life in job["lives"]]
