"""Batch sizes that keep the global batch on another number of ranks, and those that a configuration determines."""

from __future__ import annotations

import itertools
from typing import Any

from ckpttool.model.batch import configured_batch, equal_batch, fitting_numbers

GLOBAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_the_global_batch_is_kept_and_the_micro_batch_does_not_grow() -> None:
    for whole, largest, ranks in itertools.product((1, 12, 24, 60), (1, 2, 3, 4, 7), range(1, 9)):
        made = equal_batch(whole, ranks, largest)
        if whole % ranks:
            assert made is None
            continue
        assert made is not None
        assert made.micro is not None
        assert made.accumulation is not None
        assert made.whole == whole == made.micro * made.accumulation * ranks
        assert made.micro <= largest
        assert not [n for n in range(made.micro + 1, largest + 1) if (whole // ranks) % n == 0]


def test_numbers_that_fit_are_named() -> None:
    assert fitting_numbers(24, 5) == "choose 4 or 6 ranks, or a global batch near it, of 20 or 25"
    assert fitting_numbers(24, 30) == "choose 24 ranks, or a global batch near it, of 30"


def test_what_a_configuration_determines() -> None:
    """As DeepSpeed completes it."""
    cases: list[tuple[dict[str, Any], int | None, tuple[Any, ...] | None]] = [
        ({GLOBAL: 12}, 3, (12, 4, 1)),
        ({GLOBAL: 12, ACCUMULATION: 2}, 3, (12, 2, 2)),
        ({GLOBAL: 12, MICRO: 2}, 3, (12, 2, 2)),
        ({MICRO: 2}, 3, (6, 2, 1)),
        ({MICRO: 2, ACCUMULATION: 5}, 3, (30, 2, 5)),
        ({MICRO: 2}, None, None),
        ({GLOBAL: 12}, None, (12, None, None)),
        ({ACCUMULATION: 2}, 3, None),
        ({GLOBAL: True, MICRO: 0}, 3, None),
    ]
    for config, ranks, expected in cases:
        found = configured_batch(config, ranks)
        assert (None if found is None else (found.whole, found.micro, found.accumulation)) == expected, config
    assert equal_batch(2, 4, 1) is None
