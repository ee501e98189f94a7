"""A plan must fill its files exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpttool.errors import PlanError
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile, merge_literals
from ckpttool.storage import LOCAL_SPEC
from tests.wording import refused

NOTHING = np.zeros(0, dtype=COPY)


def _copies(*rows: tuple[int, int, int, int, int]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.array(list(rows), dtype=COPY)


def test_literals_and_copies_may_fill_a_file_together() -> None:
    copies = _copies((0, 0, 2, 4, 0), (0, 100, 3, 12, 1))
    plan = CopyPlan(
        (SourceFile("a", 1000, "", LOCAL_SPEC),),
        (("F32", "F32"), ("F32", "BF16")),
        (TargetFile("x", 18, ((0, b"head"),), copies),),
    )
    assert plan.nbytes_written == 18
    assert plan.nbytes_read == 2 * 4 + 3 * 4


@pytest.mark.parametrize(
    ("nbytes", "literals", "copies", "message"),
    [
        (5, ((0, b"head"),), NOTHING, "gap at bytes 4 to 5"),
        (4, ((0, b"head"), (2, b"h")), NOTHING, "overlap at bytes 2 to"),
        (8, ((0, b"head"),), _copies((0, 0, 2, 4, 0)), "outside"),
        (8, ((0, b"head"),), _copies((0, 0, 1, 3, 0)), "overlap"),
    ],
)
def test_a_file_not_filled_exactly_once_is_refused(nbytes: int, literals: Any, copies: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CopyPlan(
            (SourceFile("a", 1000, "", LOCAL_SPEC),), (("F32", "F32"),), (TargetFile("x", nbytes, literals, copies),)
        )


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "../x", "/x", "a\0b"])
def test_a_name_that_leaves_the_directory_is_refused(name: str) -> None:
    with refused(PlanError):
        CopyPlan((), (), (TargetFile(name, 0, (), NOTHING),))


def test_literals_that_go_on_where_others_end_are_joined() -> None:
    assert merge_literals([(9, b"e"), (0, b"ab"), (2, b"cd"), (4, b""), (10, b"f")]) == ((0, b"abcd"), (9, b"ef"))
    assert merge_literals([]) == ()
    # What overlaps stays apart, for the plan to refuse.
    assert merge_literals([(0, b"ab"), (1, b"cd")]) == ((0, b"ab"), (1, b"cd"))
