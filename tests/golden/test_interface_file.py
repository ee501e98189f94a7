from __future__ import annotations

import json

from tests.golden import interface


def test_the_interface_is_what_the_golden_file_says() -> None:
    """A change of a public name, a signature or a key of JSON shows in review, in the file."""
    advice = "if the change is meant, run: python -m tests.golden.interface"
    texts = interface.texts()
    assert sorted(texts) == sorted([interface.GOLDEN, *interface.OF_EXTENSIONS.glob(f"*/{interface.GOLDEN.name}")])
    for path, text in texts.items():
        found, golden = json.loads(text), json.loads(path.read_text(encoding="utf-8"))
        assert list(found["names"]) == list(golden["names"]), advice
        for part in ("names", "json"):
            for name, described in found[part].items():
                assert described == golden[part].get(name), f"{name}: {advice}"
        assert text == path.read_text(encoding="utf-8"), advice
