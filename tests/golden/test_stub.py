"""The stub beside ``ckpttool`` has the public functions as they are."""

from __future__ import annotations

from tests.golden.stub import STUB, text


def test_the_stub_has_the_public_functions_as_they_are() -> None:
    assert STUB.read_text(encoding="utf-8") == text(), "python -m tests.golden.stub"
