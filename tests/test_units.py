"""Parsing and formatting of sizes."""

from __future__ import annotations

import re

import pytest

from ckpttool.arguments import checked_duration
from ckpttool.errors import ArgumentError
from ckpttool.units import format_age, format_ago, format_duration, format_size, parse_duration, parse_size
from tests.wording import refused


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
    with refused(ArgumentError):
        parse_size(text, "memory")


@pytest.mark.parametrize("text", ["99999999999d", "36501d", "999999999999"])
def test_a_duration_that_is_too_long_is_named_as_it_was_written(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_duration(text, "keep_for")
    assert str(caught.value) == f"keep_for: is {text!r}, not a duration of at most 36500d; write 36500d or less"


@pytest.mark.parametrize(("text", "seconds"), [("36500d", 36500 * 86400), ("4.1min", 246), ("0.00001s", 1e-5)])
def test_a_duration_may_be_given_as_a_text_or_as_its_seconds(text: str, seconds: float) -> None:
    assert checked_duration("keep_for", text) == pytest.approx(seconds)
    assert checked_duration("keep_for", parse_duration(text)) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e30, "soon", True, ()])
def test_an_invalid_duration_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"keep_for: is '{value}'")):
        checked_duration("keep_for", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.5e12, "1.5 TB"), (2e15, "2.0 PB")]
)
def test_sizes_are_written(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("text", ["7d", "36h", "90min", "1.5s", "0d", "100s"])
def test_a_formatted_duration_is_read_as_the_same(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (-0.4, "0 s ago"), (59, "59 s ago"), (7200, "2 h ago"), (-30, "30 s ahead"), (-7200, "2 h ahead")],
)
def test_a_time_to_come_is_not_called_past(seconds: float, text: str) -> None:
    assert format_ago(seconds) == text
    assert format_age(seconds) == text.removesuffix(" ago")
