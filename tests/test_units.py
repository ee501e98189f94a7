"""Parsing and formatting of sizes."""

from __future__ import annotations

import pytest

from ckpttool.errors import ArgumentError
from ckpttool.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("1 GiB", 1 << 30),
        ("512MiB", 512 << 20),
        ("1000", 1000),
        ("1.5k", 1500),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5 apples", "1e9", "0.1B", "9" * 40])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^memory: is .*, not a size; write 5GB"):
        parse_size(text, "memory")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.5e12, "1.5 TB"), (2e15, "2.0 PB")]
)
def test_sizes_are_written(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text
