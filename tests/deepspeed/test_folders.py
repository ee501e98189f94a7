"""Agreements of the ranks of a training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.integrations.deepspeed.folders import Folders
from ckpttool.saving.coordination import Alone

if TYPE_CHECKING:
    from pathlib import Path


class _Noting(Alone):
    """One rank that notes the options of agreements."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[dict[str, Any]] = []

    def agree(self, what: str, message: Any, decide: Any, **options: Any) -> Any:
        """Note the options, and decide."""
        self.options.append(options)
        return super().agree(what, message, decide, **options)


def test_the_first_rank_waits_until_the_others_have_its_decision(tmp_path: Path) -> None:
    """Its process may end then, and hold the store of the ranks."""
    folders, ranks = Folders(str(tmp_path)), _Noting()
    folders._met = ranks
    assert folders.on_first_rank(lambda: 7) == 7
    assert [options["last"] for options in ranks.options] == [True]
