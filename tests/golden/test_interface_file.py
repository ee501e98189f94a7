from __future__ import annotations

import json

from tests.golden import interface


def test_the_interface_is_what_the_golden_file_says() -> None:
    """A change of a public name, a signature or a key of JSON shows in review, in the file."""
    found, golden = json.loads(interface.text()), json.loads(interface.GOLDEN.read_text(encoding="utf-8"))
    advice = "if the change is meant, run: python -m tests.golden.interface"
    assert list(found["names"]) == list(golden["names"]), advice
    for part in ("names", "json"):
        for name, described in found[part].items():
            assert described == golden[part].get(name), f"{name}: {advice}"
    assert interface.text() == interface.GOLDEN.read_text(encoding="utf-8"), advice
