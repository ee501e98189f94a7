from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import wording
from tests.golden.messages import functions_with_messages

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = "run: python -m tests.golden.messages"
NODE = "tests/commit/test_manifest.py::test_missing_manifest"


def test_the_file_has_messages_of_the_tests_that_expect_them() -> None:
    golden = wording.golden_messages()
    present = {f for f in golden if not f.startswith("tests/extensions/") or (wording.ROOT / f).parent.is_dir()}
    named = {f: {name.partition("[")[0] for name in golden[f]} for f in golden if f in present}
    expecting = functions_with_messages()
    differ = sorted(f for f in {*named, *expecting} if named.get(f) != expecting.get(f))
    assert not differ, f"{differ}: {COMMAND}"
    assert list(golden) == sorted(golden), COMMAND


def test_the_message_is_compared_whole(tmp_path: Path) -> None:
    found = f"{tmp_path}/ckpttool.json: does not exist; check the path"
    with wording.of_test(NODE, tmp_path), wording.refused(ValueError) as caught:
        raise ValueError(found)
    assert str(caught.value) == found
    told = f"is not message 1 of .*{COMMAND} tests/commit/test_manifest.py$"
    for another in (found[:-1], f"{found}s", found.replace("ckpttool.json", "latest")):
        with pytest.raises(AssertionError, match=told), wording.of_test(NODE, tmp_path):
            wording.compare(another)


def test_a_message_more_or_less_is_an_error() -> None:
    with pytest.raises(AssertionError, match=f"ended without .*: does not .*{COMMAND}"), wording.of_test(NODE):
        pass
    with pytest.raises(AssertionError, match=r"is not message 1 of \[\]"), wording.of_test(f"{NODE}_of_none"):
        wording.compare("anything")


def test_parameters_may_have_messages_of_their_own() -> None:
    names = wording.golden_messages()["tests/formats/test_locate.py"]
    function = "test_a_latest_that_names_nothing_sensible_is_refused"
    assert wording.expected("tests/formats/test_locate.py", f"{function}[/]") == names[function]
    assert wording.expected("tests/formats/test_locate.py", f"{function}[gone]") == names[f"{function}[gone]"]
